"""Ratios and peaks mean what they say."""

from functools import partial

import pytest
import torch

from adiv_optim import BatchIdeal, functional
from benchmarks.__main__ import main
from benchmarks.core.runs import interleaved
from benchmarks.core.store import Store
from benchmarks.speed import gauss_newton, jobs, timing
from benchmarks.speed.timing import peak_memory

MEBIBYTE = 2**20


def test_everything_is_timed_once_per_round():
    calls = []
    seconds = interleaved({name: lambda name=name: calls.append(name) for name in "ab"}, rounds=3)
    assert "".join(calls) == "ab" * 5  # two rounds of warm-up
    assert {name: len(values) for name, values in seconds.items()} == {"a": 3, "b": 3}


def test_peak_memory_sees_the_highest_moment():
    def job():
        held = torch.ones(MEBIBYTE // 4)

        def run():
            large = held.repeat(4)
            del large
            return held.repeat(2)

        return run

    assert 5 * MEBIBYTE <= peak_memory(job) < 5 * MEBIBYTE + 2**16


def test_convolution_behind_batch_ideal_is_never_unfolded_whole():
    layer = partial(jobs.layer, (32, 64, 16, 16), 64, 3)
    corrected, plain = (peak_memory(lambda rule=rule: partial(layer(), rule)) for rule in (BatchIdeal(), None))
    assert corrected <= 1.5 * plain


def test_many_rows_of_batch_ideal_never_meet_in_a_square_matrix():
    rows, features = 20_000, 8  # rows × rows would be 1.6 GB

    def job():
        x, weight = torch.randn(rows, features), torch.randn(2, features, requires_grad=True)
        return lambda: functional.linear(x, weight, None, BatchIdeal()).sum().backward()

    assert peak_memory(job) <= 10 * rows * features * 4


def test_suites_are_measured_by_precision_once(tmp_path, capsys):
    command = ["speed", "--only", "input-scaled", "--preset", "tiny", "--rounds", "1", "--device", "cpu"]
    command += ["--threads", "1", "--out", str(tmp_path)]
    assert main(command) == main([*command, "--dtype", "bfloat16"]) == main(command) == 0
    plain, low = (r["rows"] for r in Store(tmp_path / "speed.jsonl").read())
    assert [row["what"] for row in plain] == [row["what"] for row in low]
    assert all(row["time_ratio"]["rounds"] == 1 and row["memory_ratio"] >= 1 for row in plain)
    assert [row["memory_ratio"] for row in plain] != [row["memory_ratio"] for row in low]
    printed = " ".join(capsys.readouterr().out.split())
    assert "## speed-input-scaled-bfloat16-tiny" in printed
    assert printed.count("1 of 1 measurements are in") == 1


def test_a_process_of_its_own_has_the_options_of_the_command():
    timing.ASKED.set(timing.SpeedOptions(device="cpu", rounds=2))
    job, plain = partial(jobs.ten_steps, 4, 1, 1), partial(jobs.ten_steps, 4, 1)
    with timing.allocator(keeps=True) as process:
        found = process.submit(timing.row, "what", job, plain, 25).result()
    assert found["time_ratio"]["rounds"] == 2


@pytest.mark.parametrize(("rows", "width"), [(4, 3), (40, 2)])
def test_parts_of_a_gauss_newton_step_are_those_that_are_timed(rows, width):
    timed = gauss_newton.jobs(rows, width)
    jacobian, step = timed["jacobian"](), timed["solution"]()
    assert step.shape == (jacobian.shape[1],)
    losses = [timed["step"]().item() for _ in range(5)]
    assert len(set(losses)) == 5  # points are drawn anew
