"""The command for a day with a GPU, on a CPU and small: it runs to its end, resumes, and stops when its time is up.

The tests and one piece stand for all eight, which `make commands` runs.
"""

import pytest

from benchmarks.__main__ import main
from benchmarks.studies import gpu

SOME = ("cuda-tests", "char-lm")


@pytest.fixture
def command(tmp_path, file):
    out = tmp_path / "out"
    return ["gpu", "--device", "cpu", "--out", str(out), "--text", str(file)], out


def test_pieces_of_both_kinds_run_and_are_not_run_again(command, capsys, monkeypatch):
    arguments, out = command
    every = gpu.jobs
    (mine := out.parent / "test_cuda.py").write_text("def test_nothing():\n    pass\n")
    assert all((gpu.ROOT / path).exists() for path in gpu.TESTS)
    monkeypatch.setattr(gpu, "TESTS", [str(mine)])
    monkeypatch.setattr(gpu, "jobs", lambda *about: [job for job in every(*about) if job.name in SOME])
    assert main([*arguments, "--minutes", "1"]) == 0
    assert main([*arguments, "--minutes", "30"]) == 0  # where a minute was not enough
    printed = capsys.readouterr().out
    assert "2 of 2 pieces are done" in printed
    assert "left:" not in printed[printed.rindex("pieces are done") :]
    assert {path.name for path in out.glob("*.jsonl")} == {"gpu.jsonl", "gpu-char-lm.jsonl"}
    before = {path: path.read_bytes() for path in out.glob("*.jsonl")}
    assert main([*arguments, "--minutes", "1"]) == 0
    assert {path: path.read_bytes() for path in out.glob("*.jsonl")} == before


# Where Python cannot raise, within the end of an object, it prints.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_what_the_minutes_do_not_suffice_for_is_left(command, capsys):
    arguments, _ = command
    assert main([*arguments, "--minutes", "0.001"]) == 0
    printed = capsys.readouterr().out
    assert "0 of 8 pieces are done" in printed
    assert printed.count("left: ") == 8


def test_a_piece_that_fails_costs_the_others_nothing(command, capsys, monkeypatch):
    arguments, _ = command
    good, bad = gpu.Job("good", ("speed-devices",)), gpu.Job("bad", ("speed-devices",))

    def study(job, options):
        if job is bad:
            raise RuntimeError("CUDA out of memory.\nMore of it")
        return {}

    monkeypatch.setattr(gpu, "jobs", lambda *about: [bad, good])
    monkeypatch.setattr(gpu, "_study", study)
    assert main([*arguments, "--minutes", "1"]) == 2
    printed = capsys.readouterr().out
    assert "1 of 2 pieces are done" in printed
    assert "left: bad (failed: RuntimeError: CUDA out of memory.)" in printed
