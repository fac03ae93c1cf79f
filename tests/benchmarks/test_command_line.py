"""The command line: resuming, interruption, shares of ranks, and mistakes in one line."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.methods import DEFAULT
from benchmarks.runs import read

ROOT = Path(__file__).parents[2]
SMALL = ["train", "--activations", "tanh", "--epochs", "1", "--seeds", "2", "--device", "cpu"]


def train(out: Path, *methods: str) -> int:
    return main([*SMALL, "--out", str(out), "--methods", *methods])


def test_train_writes_one_result_per_run(tmp_path):
    assert train(tmp_path, "none", "affine-like") == 0
    results = read(tmp_path)
    assert {r["settings"]["method"] for r in results} == {"none", "affine-like"}
    for r in results:
        assert len(r["test_accuracy"]) == 1
        assert len(r["test_accuracy"][0]) == 2
        assert r["seconds"][0] > 0


def test_finished_runs_are_not_repeated(tmp_path):
    assert train(tmp_path, "none", "rmsnorm") == 0
    (kept,) = tmp_path.glob("*-none-*.json")
    (lost,) = (path for path in tmp_path.glob("*.json") if path != kept)
    before = kept.stat().st_mtime_ns
    lost.unlink()
    assert train(tmp_path, "none", "rmsnorm") == 0
    assert kept.stat().st_mtime_ns == before
    assert lost.exists()


def test_ranks_share_the_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    shares = []
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        assert train(tmp_path / rank, "none", "rmsnorm", "l2norm") == 0
        shares.append({r["settings"]["method"] for r in read(tmp_path / rank)})
    assert shares == [{"none", "l2norm"}, {"rmsnorm"}]


def test_killed_benchmark_leaves_whole_results_and_resumes(tmp_path):
    command = [sys.executable, "-m", "benchmarks", *SMALL, "--out", str(tmp_path), "--threads", "1"]
    command[command.index("--epochs") + 1] = "8"
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and len(list(tmp_path.glob("*.json"))) < 2:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    found = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    assert 2 <= len(found) < len(DEFAULT)
    assert subprocess.run(command, cwd=ROOT, capture_output=True, check=True).returncode == 0
    assert len(read(tmp_path)) == len(DEFAULT)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "groupnorm"], "unknown method 'groupnorm'; known are none, batchnorm"),
        (["--seeds", "0"], "seeds is empty"),
        (["--hidden", "0"], "hidden is [0]; every width must be positive"),
        (["--optimizer", "lion"], "unknown optimizer 'lion'; known are adam, sgd"),
        (["--data", "imagefolder"], "write imagefolder:PATH"),
        (["--data", "mnist"], "unknown data set 'mnist'; known are digits"),
        (["--data", "imagefolder:/nowhere"], "there is no folder /nowhere/train"),
    ],
)
def test_mistakes_are_one_line(arguments, message, tmp_path, capsys):
    assert main(["train", "--out", str(tmp_path), "--device", "cpu", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_report_draws_what_train_wrote(tmp_path, capsys):
    assert train(tmp_path / "digits", "none") == 0
    assert main(["report", "--out", str(tmp_path)]) == 0
    assert "| none |" in capsys.readouterr().out
    assert (tmp_path / "digits.png").exists()
