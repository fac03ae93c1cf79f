"""Runs are told apart by their settings and by what their methods compute."""

import math
from dataclasses import replace
from functools import partial
from importlib.util import find_spec

import pytest
from torch import nn

from adiv_optim import Disproportional, Proportional
from benchmarks.catalogue import STUDIES
from benchmarks.core.arms import Look, _curves, quartiles
from benchmarks.core.store import environment
from benchmarks.grids import best_optimizer, expand
from benchmarks.methods import METHODS
from benchmarks.problems.equations import EquationRun
from benchmarks.problems.friedman import FriedmanRun
from benchmarks.problems.images import ImageRun
from benchmarks.problems.language import TextRun
from benchmarks.problems.pictures import CoordinateRun
from benchmarks.problems.regression import TableRun
from benchmarks.problems.streams import StreamRun
from benchmarks.problems.surrogates import SurrogateRun

from .conftest import STORES, result, stored

FIELDS = {
    "fourier": CoordinateRun, "coordinates": CoordinateRun, "initialisation": CoordinateRun,
    "coordinates-ordinary": CoordinateRun,
    "tabular": TableRun, "equations": EquationRun, "friedman": FriedmanRun, "streams": StreamRun,
    "surrogates": SurrogateRun,
}  # fmt: skip
RUN = ImageRun("digits", "none", "tanh")
TEXT = TextRun("python-reference", "adamw", "layernorm", 1e-2)


def test_runs_that_ended_early_or_broke_down_count_in_curves_and_quartiles():
    runs = [{"error": [1.0, 0.1, 0.01]}, {"error": [1.0, 0.1]}, {"error": [1.0, None]}]
    look = Look(math.log10, quartiles, "", str)
    assert _curves(runs, look).tolist() == [[0, -1, -2], [0, -1, -1], [0, math.inf, math.inf]]
    assert quartiles([-1.0, -2.0, math.inf]).numbers == {"": 0.1, "low": 0.01, "high": math.inf, "n": 3}


class Doubled(Proportional):
    def scales(self, factors):
        return {name: 2 * scale for name, scale in super().scales(factors).items()}


def test_what_a_method_computes_is_told_by_its_numbers(monkeypatch):
    proportional, text = replace(RUN, method="proportional"), replace(TEXT, method="proportional-adamw")
    before = proportional.computes(), text.computes()
    assert len({before[0], RUN.computes(), replace(RUN, method="disproportional").computes()}) == 3
    assert proportional.computes() != replace(proportional, network="cnn").computes()
    # Another name or object for the same rule, and other settings, leave it as it is; a rule of other numbers does not.
    for rule, same in ((Proportional(), True), (Doubled(), False), (Disproportional(), False)):
        for name in ("proportional", "proportional-adamw"):
            monkeypatch.setitem(METHODS, name, replace(METHODS[name], label="renamed", correction=rule))
        assert (proportional.computes() == before[0]) is (text.computes() == before[1]) is same
    slower = replace(METHODS["none"], lr_factor=0.9)
    normed = replace(METHODS["none"], normalizer=partial(nn.LayerNorm, elementwise_affine=False))
    for changed in (slower, normed):
        monkeypatch.setitem(METHODS, "none", changed)
        assert RUN.computes() != ImageRun("digits", "l2norm", "tanh").computes()
        assert RUN.computes() != before[0]


def test_committed_results_are_of_the_rules_of_today():
    for store in STORES.values():
        assert store.study in STUDIES
        for part, line in ((name, each) for name in (None, "search", "trials") for each in store.read(name)):
            settings = line["settings"]
            if "method" not in settings:  # a measurement
                continue
            kind = FIELDS.get(store.study, TextRun if "norm" in settings else ImageRun)
            if settings["method"].startswith("singd") and find_spec("singd") is None:
                continue
            own = {name: tuple(v) if isinstance(v, list) else v for name, v in settings.items()}
            run = kind(**({"steps": None} if "seconds" in own else {}), **own)
            assert (line["key"], line["computes"]) == (run.key(part), run.computes()), (store.path, settings)


#: A run, what is changed of it, and what is said.
BAD = [
    (RUN, {"method": "groupnorm"}, "unknown method 'groupnorm'; known are none, batchnorm"),
    (RUN, {"method": "whitened"}, "method 'whitened' sees forward passes, which only backend 'loop'"),
    (RUN, {"damping": 1.0}, "damping is 1.0, but method 'none' has none"),
    (TEXT, {"method": "batch-ideal-adamw"}, "method 'batch-ideal-adamw' needs a damping"),
]


@pytest.mark.parametrize(("run", "change", "message"), BAD)
def test_bad_settings_are_refused(run, change, message):
    with pytest.raises(ValueError, match=message):
        replace(run, **change)


def test_grids_are_every_combination_with_what_is_given_in_their_place():
    grids = [{"data": "digits", "method": ["none", "whitened"], "activation": ["tanh"], "lr": [0.1, 0.2]}]
    runs = expand(grids, {"seeds": 2, "out": "not a setting"})
    assert [(run.lr, run.method, run.backend) for run in runs] == [
        (0.1, "none", "ensemble"), (0.1, "whitened", "loop"), (0.2, "none", "ensemble"), (0.2, "whitened", "loop")
    ]  # fmt: skip
    assert {run.seeds for run in runs} == {(0, 1)}
    alike = [{**grids[0], "lr": lr} for lr in ([0.1], [0.3])]
    assert expand(alike, {"seeds": 2, "lr": [0.1, 0.2]}) == runs


def test_best_optimizer_is_that_of_the_best_trial_and_no_rivals(tmp_path):
    scores = {"sgd": 51.0, "muon": 52.0, "soap": 70.0}
    trials = [{**result(optimizer=name), "part": "search", "score": score} for name, score in scores.items()]
    store = stored(tmp_path, "mlp-tuned", trials)
    assert best_optimizer(store, "none", "tanh") == "muon"
    with pytest.raises(LookupError, match="no trials of batchnorm with tanh"):
        best_optimizer(store, "batchnorm", "tanh")


def test_environment_names_versions_hardware_commit_and_day(monkeypatch):
    arguments = ["--data", "imagefolder:/somewhere/photos", "--seeds", "1", "--out", "/somewhere/runs"]
    monkeypatch.setattr("sys.argv", ["benchmarks", "compare", *arguments])
    found = environment()
    assert found["command"] == "python -m benchmarks compare --data imagefolder:photos --seeds 1 --out runs"
    assert found["torch"]
    assert found["processor"]
    assert found["threads"] >= 1
    assert found["commit"] is None or len(found["commit"].removesuffix("-dirty")) >= 12
    assert found["date"].count("-") == 2
