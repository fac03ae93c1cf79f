"""A study is one file and one line, and so is a problem: with it come its command, recipe and page, and go with it."""

import ast
import sys
from contextlib import contextmanager
from importlib import import_module

import pytest

from benchmarks.__main__ import main
from benchmarks.catalogue import RECIPES, STUDIES, collect, recipes
from benchmarks.core.store import Store
from tests.test_readme import python_blocks

from .conftest import ROOT


@contextmanager
def planted(module, code, tmp_path, monkeypatch):
    """Let a room of the benchmarks have one file more, and the catalogue its studies, for as long as this lasts."""
    room, _, file = module.rpartition(".")
    (tmp_path / f"{file}.py").write_text(code)
    with monkeypatch.context() as added:
        package = import_module(room)
        added.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
        found = collect([module])
        for there, more in ((STUDIES, found), (RECIPES, recipes(found))):
            for name, each in more.items():
                added.setitem(there, name, each)
        try:
            yield found
        finally:
            del sys.modules[module]
            delattr(package, file)


def test_the_study_of_the_page_for_contributors_is_one_file_and_one_line(tmp_path, monkeypatch, capsys):
    ((code, _),) = python_blocks(ROOT / "CONTRIBUTING.md")
    out, page = tmp_path / "out", tmp_path / "page.md"
    with planted("benchmarks.studies.mine", code, tmp_path, monkeypatch) as studies:
        assert main(["mine", *studies["mine"].smoke.split(), "--out", str(out)]) == 0
        assert "| sum of 2 | 1 |" in capsys.readouterr().out
        assert main(["reproduce", "mine", "--out", str(out / "again")]) == 0
        assert Store(out / "again" / "mine.jsonl").read()[0]["value"] == 6
        page.write_text("<!-- results:mine --><!-- end -->")
        assert main(["report", "--out", str(out), "--pages", str(page)]) == 0
        assert "| sum of 2 | 1 |\n\nA caption. All rows: [mine.csv](out/mine.csv)." in page.read_text()


#: A problem: data, network, loss, error and settings of a run; and a study of it by two arms.
SINE = '''"""A sine curve learned from points of it; the error is the mean square."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.core.arms import Arm, Look, compete, first_trial, sections
from benchmarks.core.study import Options, Recipe, Study
from benchmarks.core.tables import estimate
from benchmarks.train import FieldRun, Problem, kind_of, perceptron


@dataclass(frozen=True)
class SineRun(FieldRun):
    """One curve, learned by one seed."""

    periods: int = 1


class Curve(Problem):
    """A tanh network that learns a curve at 64 points."""

    def __init__(self, run):
        self.run, self.x = run, torch.linspace(-1, 1, 64).view(-1, 1)

    def model(self):
        torch.manual_seed(self.run.seed)
        return nn.Sequential(*perceptron((1, 16, 16, 1), activation=nn.Tanh))

    def loss(self, model, optimizer):
        return F.mse_loss(model(self.x), (math.pi * self.run.periods * self.x).sin())

    @torch.no_grad()
    def error(self, model):
        return self.loss(model, None).item()


CURVES = kind_of(Curve)
ARMS = [Arm("none", "adam", "none"), Arm("none", "adam", "whitened")]
LOOK = Look(float, estimate, "mean square", "{:+.2f}".format, logarithmic=True, about="Mean over seeds.")


@dataclass
class SineOptions(Options):
    steps: int = 100
    """of every run"""


def run(options, store):
    shown = [{"seed": seed} for seed in (1, 2)]
    for arm in ARMS:
        first = first_trial(SineRun("", "none", steps=options.steps), arm)
        compete(first, 1, CURVES, store, float, shown)


def report(store, name, folder):
    return sections(store, name, folder, LOOK, lambda settings: ("curve", "A sine curve"), ARMS.__contains__)


STUDIES = {"sine": Study("a sine curve", run, report, SineOptions(), makes=[Recipe(0.1)], smoke="--steps 1")}
'''


def test_a_problem_is_one_file_of_at_most_120_lines_and_one_line(tmp_path, monkeypatch, capsys):
    assert SINE.count("\n") <= 120
    out = tmp_path / "out"
    with planted("benchmarks.problems.sine", SINE, tmp_path, monkeypatch) as studies:
        assert main(["sine", *studies["sine"].smoke.split(), "--out", str(out)]) == 0
        assert "whitened Adam" in capsys.readouterr().out
        store = Store(out / "sine.jsonl")
        runs, trials = store.read(), store.read("search")
        assert {(trial["settings"]["method"], trial["settings"]["seed"]) for trial in trials} == {
            ("none", 0), ("whitened", 0)
        }  # fmt: skip
        assert [(run["settings"]["method"], run["settings"]["seed"], run["steps"]) for run in runs] == [
            (method, seed, [0, 1]) for method in ("none", "whitened") for seed in (1, 2)
        ]
        assert all(before != after for before, after in (run["error"] for run in runs))
        assert main(["report", "--out", str(out)]) == 0
        assert "whitened Adam" in (out / "sine-curve.csv").read_text()
        assert (out / "sine-curve.png").exists()
    assert main(["report", "--out", str(out)]) == 2
    assert "is of the study 'sine'" in capsys.readouterr().err


#: One study of each way to run and to report; the others differ from them in settings, which recipes hold.
SMALL = [
    "norm-free", "coordinates", "fourier", "equations", "friedman", "surrogates", "streams", "isometry-training",
    "normalisers-plane", "speed-gauss-newton",
]  # fmt: skip
#: What captions say of how these were made, where others would be wrong.
SAID = {
    "equations": "after 1 steps, or the viscosity", "surrogates": "After 2 steps", "fourier": "best of 3 trials",
}  # fmt: skip


@pytest.mark.parametrize("name", SMALL)
def test_a_small_run_of_a_study_is_reported_and_goes_on_where_it_was_stopped(name, tmp_path, file, capsys):
    study, path = STUDIES[name], tmp_path / f"{name}.jsonl"
    data = {"text": ["--data", str(file)], "images": ["--data", "digits"], "": []}[study.data]
    command = [name, *data, *study.smoke.split(), "--threads", "1", "--out", str(tmp_path)]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "| --- |" in printed
    assert SAID.get(name, "") in printed
    before = path.read_bytes()
    assert main(command) == 0
    assert path.read_bytes() == before


def closure(path):
    """A file of benchmarks, and all those that it stands on."""
    whole, waiting = set(), {path}
    while waiting:
        path = waiting.pop()
        whole.add(path)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                base = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
                names = [base.with_suffix(".py"), *(base / f"{alias.name}.py" for alias in node.names)]
                waiting |= {name for name in names if name.is_file()} - whole
    return whole


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks" / "studies").glob("[!_]*.py")), ids=lambda path: path.stem)
def test_a_study_stands_on_at_most_eleven_other_files(path):
    files = closure(path)
    assert ROOT / "benchmarks" / "core" / "store.py" in files
    assert len(files) <= 12, sorted(file.name for file in files)
