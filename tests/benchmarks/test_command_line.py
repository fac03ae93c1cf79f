"""The command line: resuming, interruption, shares of ranks, and mistakes in one line."""

import json
import math
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.multiprocessing import get_context

from benchmarks.__main__ import main
from benchmarks.core.store import Store
from tests.helpers.processes import START

from .conftest import RESULTS, stored

SMALL = ["compare", "--activations", "tanh", "--epochs", "1", "--seeds", "2", "--device", "cpu", "--threads", "1"]


def read(out: Path) -> list:
    return Store(out / "compare.jsonl").read()


def run(arguments: list, environment: dict) -> None:
    os.environ.update(environment)
    sys.exit(main(arguments))


def started(arguments: list, **environment: str):
    """The command in a process of its own, forked from one that has torch imported."""
    process = get_context(START).Process(target=run, args=(arguments, environment))
    process.start()
    return process


def test_ranks_share_the_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    shares = []
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        assert main([*SMALL, "--out", str(tmp_path / rank), "--methods", "none", "rmsnorm", "l2norm"]) == 0
        shares.append({r["settings"]["method"] for r in read(tmp_path / rank)})
    assert shares == [{"none", "l2norm"}, {"rmsnorm"}]


def run_by_two_ranks(arguments, monkeypatch):
    other = started([*arguments, "--threads", "1"], RANK="1", WORLD_SIZE="2")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(arguments) == 0
    other.join()
    assert other.exitcode == 0


def test_ranks_choose_settings_from_what_all_have_tried(tmp_path, monkeypatch):
    """What chooses comes before what is chosen, though the other rank begins seconds later."""
    arguments = ["digits-tuned", "--methods", "none", "--optimizers", "sgd", "--activations", "tanh", "--epochs", "1"]
    arguments += ["--search-epochs", "1", "--trials", "2", "--seeds", "1", "--device", "cpu", "--out", str(tmp_path)]
    run_by_two_ranks(arguments, monkeypatch)
    lines = [json.loads(line) for line in (tmp_path / "digits-tuned.jsonl").read_text().splitlines()]
    assert [line.get("part") for line in lines if "key" in line] == 7 * ["search"] + 2 * ["trials"] + [None]


def test_a_rank_reads_runs_of_equations_once_all_have_made_theirs(tmp_path, monkeypatch):
    arguments = ["equations", "--equation", "burgers", "--optimizer", "gauss-newton", "--width", "20", "--seeds", "2"]
    run_by_two_ranks([*arguments, "--steps", "1", "--out", str(tmp_path)], monkeypatch)


def test_killed_benchmark_leaves_whole_lines_and_resumes(tmp_path):
    methods = ["none", "rmsnorm", "l2norm"]
    arguments = [*SMALL, "--out", str(tmp_path), "--methods", *methods]
    process = started(arguments)
    while process.is_alive() and len(read(tmp_path)) < 1:
        time.sleep(0.02)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert 1 <= len(read(tmp_path)) < len(methods)
    assert main(arguments) == 0
    assert len(read(tmp_path)) == len(methods)


METHOD = "from benchmarks.methods import Method\nMETHODS = {'none': Method('x')}"
COMPARE, TEXT, DEPTH = "compare --device cpu", "char-lm --preset tiny --device cpu", "isometry-training"
#: A command and a part of its one line; FILE is a file of the text that stands last, or of none; HERE is this file.
MISTAKES = {
    "seeds": (f"{COMPARE} --seeds 0", "--seeds is 0; it must be positive"),
    "seconds": ("bench --seconds -1", "--seconds is -1; it must be positive"),
    "lr": (f"{COMPARE} --lr inf", "--lr is inf; it must be positive and finite"),
    "name": (f"{COMPARE} --name a/b", "--name is 'a/b'; it names a file in the folder --out"),
    "preset": (f"{COMPARE} --preset paper", "--preset is 'paper'; this study has no presets"),
    "folder": ("report --out /nonexistent", "no results; run `python -m benchmarks digits` first"),
    "hidden": (f"{COMPARE} --hidden 0", "hidden is [0]; every width must be positive"),
    "optimizer": (f"{COMPARE} --optimizers lion", "unknown optimizer 'lion'; known are adam, sgd"),
    "data": (f"{COMPARE} --data mnist", "unknown data set 'mnist'; known are digits"),
    "no-images": (f"{COMPARE} --data imagefolder:/nowhere", "No such file or directory: '/nowhere/train'"),
    "device": ("compare --device nowhere", "--device nowhere: "),
    "out": ("normalisers-plane --out HERE", "File exists: "),
    "another-study": ("normalisers-plane --out RESULTS --name digits", "is of the study 'digits', and not of"),
    "no-methods": (f"{COMPARE} --method-file FILE", "holds no METHODS; write `from benchmarks.methods import", ""),
    "method-twice": (f"{COMPARE} --method-file FILE", "a method 'none' already", METHOD),
    "no-file": (f"{COMPARE} --method-file FILE", "No such file or directory: 'FILE'", None),
    "no-text": (f"{TEXT} --data /nowhere/text", "--data /nowhere/text: there is no such file"),
    "activation": (f"{DEPTH} --activations swish", "unknown activation 'swish'; known are sigmoid, SELU"),
    "nothing-to-run": ("equations --optimizer random-features --width 20", "nothing to run with these options"),
    "no-rates": ("digits-tuned --optimizers soap", "unknown optimizer of this study 'soap'; known are sgd, adam"),
    "trials": ("digits-optimizers --trials 2", "--trials has no effect on this study; leave it out"),
    "search-epochs": ("cifar10-trials --search-epochs 1", "--search-epochs has no effect on this study"),
    "norms": (f"{TEXT} --norms layernorm", "--norms has no effect on what the study tries; name --methods"),
    "nothing-to-follow": ("mechanism --tuned FILE", "has no runs to follow", None),
    "recipe": ("reproduce fig99", "unknown results 'fig99'; known are"),
    "cuda": ("compare --device cuda", ". --device cpu works everywhere."),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_one_line(name, tmp_path, capsys):
    if name == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    command, message, *text = MISTAKES[name]
    file = tmp_path / "file.py"
    if text and text[0] is not None:
        file.write_text(text[0])
    places = {"FILE": str(file), "HERE": __file__, "RESULTS": str(RESULTS)}
    arguments = [re.sub("FILE|HERE|RESULTS", lambda place: places[place[0]], part) for part in command.split()]
    assert main([*arguments, *([] if "--out" in arguments else ["--out", str(tmp_path)])]) == 2
    error = capsys.readouterr().err
    assert message.replace("FILE", str(file)) in error
    assert error.count("\n") == 1


LENGTHS = [("bench", {"epochs": 20, "seeds": [1]}), ("fourier", {"time_of": 2}), ("streams", {"steps": 2})]


@pytest.mark.parametrize(("study", "settings"), LENGTHS)
def test_runs_of_two_lengths_are_not_put_into_one_file(study, settings, tmp_path, capsys):
    stored(tmp_path, study, [{"settings": settings}])
    assert main([study, "--steps", "4", "--out", str(tmp_path)]) == 2
    assert f"{study}.jsonl has runs of another length ({next(iter(settings))} " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "option"), [("digits-optimizers", "--lr 1"), ("report", "--name mine"), ("gpu", "--threads 1")]
)
def test_commands_lack_options_that_they_do_not_read(command, option, capsys):
    with pytest.raises(SystemExit) as ended:
        main([command, *option.split()])
    assert ended.value.code == 2
    assert f"Unrecognized options: {option.split()[0]}" in " ".join(capsys.readouterr().err.split())


def test_help_has_the_text_of_every_option(capsys):
    with pytest.raises(SystemExit):
        main(["compare", "--help"])
    assert "passes over the training set" in re.sub(r"[\s│╭╮╰╯─]+", " ", capsys.readouterr().out)


def test_log_without_its_package_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    assert main([*SMALL, "--methods", "none", "--log", "tensorboard", "--out", str(tmp_path)]) == 2
    assert "pip install tensorboard" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.integration
def test_log_holds_losses_of_every_run(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    assert main([*SMALL, "--methods", "none", "--log", "tensorboard", "--out", str(tmp_path)]) == 0
    (folder,) = (tmp_path / "compare.tensorboard").iterdir()
    assert folder.name.startswith("none")
    events = accumulator.EventAccumulator(str(folder)).Reload()
    tags = {f"{name}/{seed}" for name in ("train loss", "accuracy") for seed in "01"}
    assert set(events.Tags()["scalars"]) == tags
    assert all(math.isfinite(event.value) for tag in tags for event in events.Scalars(tag))
