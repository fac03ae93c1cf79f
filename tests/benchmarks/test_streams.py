"""Streams: an error counts before its step, bounds and the running RMS by their definitions, stacks against loops."""

import math

import numpy as np
import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.core.runs import NOBODY
from benchmarks.core.store import Store
from benchmarks.online import DECAY, Loop, Stack, by_running_rms, relative_error, share, signal_of, train
from benchmarks.problems.streams import SIGNALS, Stream
from benchmarks.studies.streams import ARMS, STUDIES, TUNING, against, run_of, tolerated


@pytest.fixture(autouse=True)
def double(monkeypatch):
    """Let networks and signals be of float64."""
    monkeypatch.setattr("benchmarks.online._stream", signal_of.__globals__["_stream"].__wrapped__)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def errors_of(trainer, signals):
    windows, targets = (torch.stack([signal[part] for signal in signals], 1) for part in (0, 1))
    return torch.stack([trainer.step(*row) for row in zip(windows, targets, strict=True)])


@pytest.mark.parametrize("arm", [arm for arm in ARMS if arm != "whitened"])
def test_a_stack_takes_the_steps_of_loops(arm):
    limit = 0.05 if arm == "clipped" else None
    runs = [run_of(arm, lr=lr, seed=seed, steps=12, limit=limit) for lr, seed in ((0.1, 3), (0.02, 4))]
    signals = list(map(signal_of, runs))
    side_by_side = errors_of(Stack(runs), signals)
    alone = torch.cat([errors_of(Loop(run), [signal]) for run, signal in zip(runs, signals, strict=True)], 1)
    assert torch.allclose(side_by_side, alone, rtol=1e-9, atol=1e-12)
    frozen = errors_of(Stack([run_of(arm, lr=1e-12, seed=seed, steps=12, limit=limit) for seed in (3, 4)]), signals)
    assert not torch.allclose(frozen, alone, rtol=1e-3)


@pytest.mark.parametrize("trainer", [Loop, lambda run: Stack([run])], ids=["loop", "stack"])
def test_an_error_counts_before_the_step(trainer):
    run = run_of("sgd", lr=0.05, steps=2)
    signal, model = signal_of(run), Loop(run).model
    window, target = signal.windows[:1], signal.targets[:1]
    before = (model(window).squeeze(-1) - target).detach()
    learning = trainer(run)
    assert torch.allclose(learning.step(window, target), before, rtol=1e-12)
    assert learning.step(window, target).abs() < 0.999 * before.abs()


@pytest.mark.parametrize(("target", "is_bounded"), [(0.3, True), (30.0, True), (0.3, False)])
def test_overshooting_bound_is_that_of_the_paper(target, is_bounded):
    rate = 0.5 if is_bounded else 1e-6
    model = torch.nn.Linear(3, 1)
    x = torch.tensor([[1.0, -2.0, 0.5]])
    z = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    error = (model(x).squeeze(-1) - target).detach()
    norm = sum(part.abs().sum().item() for part in z)
    bound = rate * 2.0 * max(abs(error.item()), 1.0) * norm
    wanted = rate / bound if bound > 1 else rate
    got = rate * share(
        "overshooting", torch.tensor([rate]), torch.tensor([math.inf]), [error * g[None] for g in z], error
    )
    assert got.item() == pytest.approx(wanted, rel=1e-12)
    assert (got.item() < rate) == is_bounded


def test_overshooting_bound_without_an_error_is_no_bound():
    assert share("overshooting", torch.ones(1), torch.ones(1), [torch.zeros(1, 3)], torch.zeros(1)).item() == 1


def test_norm_bound_is_torchs_clipping():
    gradient = torch.randn(2, 5)
    limit = 0.5 * gradient.norm(dim=1).amin().item()
    parts = share("norm", torch.ones(2), torch.tensor([limit, 1e9]), [gradient], torch.ones(2))
    parameter = torch.nn.Parameter(torch.zeros(5))
    parameter.grad = gradient[0].clone()
    torch.nn.utils.clip_grad_norm_([parameter], limit)
    assert torch.allclose(parts[0] * gradient[0], parameter.grad, rtol=1e-5)  # torch adds 1e-6 to the norm
    assert parts[1] == 1


def test_running_rms_is_that_of_a_plain_loop():
    signal = SIGNALS["coloured"](np.random.default_rng(0), 30)
    divided = by_running_rms(signal)
    square = np.mean(signal.windows[0] ** 2)
    for row in range(30):
        square = DECAY * square + (1 - DECAY) * np.mean(signal.windows[row] ** 2)
        rms = math.sqrt(square) + 1e-6
        for part, whole in zip(divided, signal, strict=True):
            assert part[row] == pytest.approx(whole[row] / rms, rel=1e-12)
    assert divided.windows[5] != pytest.approx(signal.windows[5])


@pytest.mark.parametrize("name", SIGNALS)
def test_a_signal_is_of_its_seed_and_its_window_moves_by_a_row(name):
    first, again, other = (SIGNALS[name](np.random.default_rng(seed), 100) for seed in (1, 1, 2))
    assert first.windows.shape == (100, 16)
    assert first.targets.shape == first.scales.shape == (100,)
    assert np.array_equal(first.targets, again.targets)
    assert not np.array_equal(first.targets, other.targets)
    assert np.array_equal(first.windows[1:, :-1], first.windows[:-1, 1:])


def test_mackey_glass_and_membrane_predict_values_that_windows_show_later():
    for name, ahead in (("mackey-glass", 1), ("membrane", 5)):
        signal = SIGNALS[name](np.random.default_rng(0), 50)
        assert np.array_equal(signal.targets[:-ahead], signal.windows[ahead:, -1])


def test_error_is_relative_to_scaled_targets_of_the_second_half():
    signal = Stream(None, torch.tensor([9.0, 9.0, 4.0, 3.0]), torch.tensor([1.0, 1.0, 2.0, 1.0]))
    assert relative_error(torch.tensor([7.0, 7.0, 2.0, 1.0]), signal) == pytest.approx((1 + 1) / (4 + 9))
    assert relative_error(torch.tensor([7.0, 7.0, 2.0, math.inf]), signal) is None


def test_a_network_that_diverges_leaves_its_neighbour_as_it_is():
    runs = [run_of("sgd", lr=lr, steps=60) for lr in (1e9, 0.01)]
    diverged, result = train(runs, NOBODY)
    assert diverged["error"] is None
    assert result["error"] == pytest.approx(train(runs[1:], NOBODY)[0]["error"], rel=1e-9)


def test_range_of_rates_lies_between_the_rates_that_are_worse():
    errors = {0.1: 1.21, 1.0: 1.0, 10.0: math.inf}
    low, high = tolerated(errors)
    assert low == pytest.approx(10**-0.5)
    assert high == 1.0
    assert tolerated({0.1: 1.05, 1.0: 1.0, 10.0: 1.0}) == (0.1, 10.0)


def test_divergence_is_the_worst_of_ranks():
    values, rival = (dict.fromkeys(range(1, 11), error) for error in (1.0, 2.0))
    assert against(values, rival).numbers == {"ratio": pytest.approx(0.5), "p": pytest.approx(2 / 2**10), "n": 10}
    assert against(values, {**rival, 1: math.inf}).numbers["ratio"] == pytest.approx(0.5)
    assert against(values, {**rival, 1: 0.9}).numbers["p"] > 2 / 2**10


def test_study_makes_nothing_twice_and_is_reported(tmp_path, capsys):
    command = ["streams", *STUDIES["streams"].smoke.split(), "--threads", "1", "--out", str(tmp_path)]
    assert main(command) == 0
    printed, before = capsys.readouterr().out, (tmp_path / "streams.jsonl").read_text()
    assert all(f"| {ARMS[arm].label} | " in printed for arm in ("sgd", "proportional"))
    assert (tmp_path / "streams.png").exists()
    assert main(command) == 0
    assert (tmp_path / "streams.jsonl").read_text() == before
    store = Store(tmp_path / "streams.jsonl")
    assert {r["settings"]["seed"] for r in store.read("search")} == set(TUNING)
    assert {r["settings"]["seed"] for r in store.read()} == {1, 2}
