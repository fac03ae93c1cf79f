"""One contract for both recorders: cadence, numbers for loggers and files, and a training that does not notice."""

import json
import math
import re
from operator import itemgetter

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from adiv_optim import BatchIdeal, GradientOnly, Proportional
from adiv_optim.diagnostics import DivergenceRecorder, record
from tests.diagnostics.test_untouched import batch, everything, network, same

pytestmark = pytest.mark.usefixtures("in_float64")

#: (model, optimizer, every) → a recorder; what is called in front of a step; how the numbers are named.
RECORDERS = {
    "divergence": (
        lambda model, optimizer, every, loss=F.cross_entropy: DivergenceRecorder(model, loss, optimizer, every=every),
        lambda recorder, model, x, y: recorder.step(x, y),
    ),
    "isometry": (
        lambda model, optimizer, every, loss=None: record(model, every=every),
        lambda recorder, model, x, y: model(x),
    ),
}
#: Of a layer's summary, in the order of the table's columns.
NUMBERS = itemgetter(
    "cosine_median", "projection_median", "gain_mean", "interference_median", "weight_share", "squared_norm_variance"
)
each_recorder = pytest.mark.parametrize("name", RECORDERS)


def removed(recorder):
    if hasattr(recorder, "remove"):
        recorder.remove()


def last(recorder):
    """Path → numbers of the last measurement."""
    layers = recorder.history[-1]["layers"]
    return layers if isinstance(layers, dict) else {call["path"]: call for call in layers}


@each_recorder
@pytest.mark.parametrize("corrected", [False, True], ids=["plain", "corrected"])
def test_every_nth_step_is_measured_and_training_is_the_same_bit_for_bit(name, corrected):
    (build, _), runs = RECORDERS[name], []
    for watched in (False, True):
        torch.manual_seed(3)
        model = network()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        if corrected:
            optimizer = GradientOnly(optimizer, model, BatchIdeal(0.1))
        keys = [set(vars(module)) for module in model.modules()]
        recorder = build(model, optimizer, 2) if watched else None
        for number in range(5):
            x, y = batch()
            if watched and name == "divergence":
                found = recorder.step(x, y)
                assert (found is not None) == (number % 2 == 0)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        removed(recorder)
        assert [set(vars(module)) for module in model.modules()] == keys
        runs.append(everything(model, optimizer)[0])
    assert same(*runs)
    assert [entry["step"] for entry in recorder.history] == [0, 2, 4]
    # The test can fail: one number drawn more is seen.
    torch.rand(1)
    assert not same(runs[0]["random"], everything(model, optimizer)[0]["random"])


@each_recorder
def test_loggers_get_the_last_measurement_flat(name):
    (build, measure), model = RECORDERS[name], network()
    recorder = build(model, None, 1)
    assert recorder.metrics() == {}
    for scale in (1.0, 2.0):
        x, y = batch()
        measure(recorder, model, scale * x, y)
    metrics = recorder.metrics()
    assert all(type(value) is float for value in metrics.values())
    for path, entry in last(recorder).items():
        wanted = {key: value for key, value in entry.items() if isinstance(value, (int, float))}
        if name == "divergence":
            table = str(recorder.step(x, y)).splitlines()
            entry = {**entry, "weight_share": entry["responsibility"]["weight"]}
            wanted = dict(zip(re.split(r"  +", table[0])[2:], NUMBERS(entry), strict=True))
        assert wanted
        assert {key: metrics[f"{name}/{path}/{key}"] for key in wanted} == wanted
    removed(recorder)


@each_recorder
def test_history_is_saved_as_strict_json(name, tmp_path):
    """Gradients of zero have no direction, and ten samples of three features no finite gap."""
    (build, measure), model = RECORDERS[name], nn.Linear(6, 3)
    recorder = build(model, None, 1, lambda z, _: 0 * z.sum())
    measure(recorder, model, *batch())
    assert not all(map(math.isfinite, [v for v in last(recorder)[""].values() if isinstance(v, float)]))
    recorder.save(tmp_path / "history.json")
    text = (tmp_path / "history.json").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    found = json.loads(text)["history"][0]
    assert found["step"] == 0
    entry = found["layers"][""] if name == "divergence" else found["layers"][0]
    wanted = last(recorder)[""]
    for key, value in wanted.items():
        if isinstance(value, float):
            assert entry[key] == (value if math.isfinite(value) else None)
    removed(recorder)


MISTAKES = {
    "divergence": (lambda model: DivergenceRecorder(model, F.cross_entropy, every=0), "every is 0"),
    "divergence-corrected-twice": (
        lambda model: DivergenceRecorder(
            model,
            F.cross_entropy,
            GradientOnly(torch.optim.SGD(model.parameters()), model, Proportional()),
            Proportional(),
        ),
        "already has a correction",
    ),
    "isometry": (lambda model: record(model, every=0), "every is 0; it must be an integer of at least 1"),
    "isometry-samples": (lambda model: record(model, max_samples=0), "max_samples is 0"),
    "isometry-path": (lambda model: record(model, layers=["7"]), r"layers names '7', .*; its modules are '', '0', '1'"),
}


@pytest.mark.parametrize(("build", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_refused_at_once_and_leave_no_hooks(build, message):
    model = network()
    with pytest.raises(ValueError, match=message):
        build(model)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
