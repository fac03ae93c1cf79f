"""The ensemble trainer gives every seed the numbers a plain loop gives it."""

from dataclasses import replace
from itertools import cycle

import pytest
import torch

from benchmarks import ensemble
from benchmarks.data import Dataset, load
from benchmarks.ensemble import Ensemble, Loops, epoch_orders, train
from benchmarks.methods import METHODS
from benchmarks.problems.images import NETWORKS, ImageRun, build_model

STEPS = 6
#: What trains as one program.
TOGETHER = [name for name, method in METHODS.items() if method.applies == "images" and method.by_inputs is None]
TOLERANCE = 1e-10  # relative, on every step's loss, in float64


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return load("digits").to("cpu", torch.float64)


def losses(run: ImageRun, data: Dataset) -> torch.Tensor:
    """Every step's loss: shape (steps, seeds)."""
    rows = slice(STEPS * run.batch_size)
    data = data._replace(train_inputs=data.train_inputs[rows], train_labels=data.train_labels[rows])
    return torch.tensor(train(run, data).step_losses, dtype=torch.float64)


def assert_plain_loops(run: ImageRun, data: Dataset) -> None:
    together, apart = losses(run, data), losses(replace(run, backend="loop"), data)
    assert together.shape == (STEPS, len(run.seeds))
    assert ((together - apart).abs() / apart).max() <= TOLERANCE
    # The test can fail: seeds differ from one another by far more than the tolerance.
    assert len(run.seeds) == 1 or (together[:, 0] - together[:, 1]).abs().max() > 1e-3


@pytest.mark.parametrize("method", TOGETHER)
def test_ensemble_equals_plain_loops(method, digits):
    assert_plain_loops(ImageRun("digits", method, "leaky-relu", epochs=1, seeds=(0, 1, 2)), digits)


@pytest.mark.parametrize("method", ["batchnorm", "proportional"])
def test_compiled_ensemble_equals_plain_loops(method, digits, monkeypatch):
    """One writes to buffers, the other has a backward of its own, which torch's compiler alone would lose."""
    monkeypatch.setattr(ensemble, "COMPILE_AFTER", 3)
    run = ImageRun("digits", method, "tanh", (8,), epochs=1, seeds=(0, 1))
    together, apart = Ensemble([run], digits), Loops(run, digits)
    eager = together._gradients
    for index in next(epoch_orders(run, len(digits.train_labels))).unbind(1)[:STEPS]:
        found, wanted = together.step(index), apart.step(index)
        assert ((found - wanted).abs() / wanted).max() <= TOLERANCE
    assert together._gradients is not eager
    assert together.accuracy() == pytest.approx(apart.accuracy())


def test_a_missing_compiler_is_said(digits, monkeypatch):
    monkeypatch.setattr(ensemble, "COMPILE_AFTER", 2)
    monkeypatch.setenv("PATH", "")
    run = ImageRun("digits", "none", "tanh", (8,), epochs=1, seeds=(0, 1))
    with pytest.warns(UserWarning, match=r"no C\+\+ compiler is there \(g\+\+, clang\+\+, cl\): steps take"):
        together = losses(run, digits)
    assert (together - losses(replace(run, backend="loop"), digits)).abs().max() <= TOLERANCE


#: Each with another way to act on convolutions; every network has two of them or more.
ON_OTHERS = ["none", "batchnorm", "l2-patch", "affine-like", "proportional", "batch-ideal", "uc-network"]
OTHERS = [
    *({"method": m, "network": n} for m, n in zip(ON_OTHERS, cycle(name for name in NETWORKS if name))),
    *({"method": m, "backend": "jacobian", "seeds": (0,)} for m in ("none", "batchnorm", "proportional")),
    # Each model's own: Muon's iteration does not act elementwise, so that a stack of them would be another matrix.
    *(
        pytest.param({"method": m, "optimizer": name, "lr": 0.01}, marks=pytest.mark.integration)
        for m, name in [*((m, "muon") for m in ("none", "batchnorm", "proportional", "uc-network")), ("none", "soap")]
    ),
]


@pytest.mark.parametrize("settings", OTHERS, ids=lambda settings: "-".join(map(str, settings.values())))
def test_other_networks_backends_and_optimizers_equal_plain_loops(settings, digits):
    if "optimizer" in settings:
        pytest.importorskip("pytorch_optimizer")
    base = ImageRun("digits", "none", "leaky-relu", (4, 4), epochs=1, seeds=(0, 1))
    assert_plain_loops(replace(base, **settings), digits)


@pytest.mark.parametrize(
    ("method", "optimizer"), [("none", "sgd"), ("uc-network", "sgd"), ("uc-network", "adam"), ("uc-layer", "adam")]
)
def test_rescaled_networks_start_as_one_function_and_stay_so_in_canonical_coordinates(method, optimizer, digits):
    run = ImageRun("digits", method, "leaky-relu", epochs=1, optimizer=optimizer, lr=1e-4, rescaled=1.5)
    found = losses(run, digits)
    spread = (found.amax(1) - found.amin(1)) / found.amin(1)
    assert spread[0] <= TOLERANCE
    assert spread[-1] <= TOLERANCE if method != "none" else spread[-1] > 1e-3


def test_gain_multiplies_every_parameter_at_first(digits):
    run = ImageRun("digits", "affine-like", "tanh")
    for plain, scaled in zip(
        *(build_model(r, digits, 1).parameters() for r in (run, replace(run, gain=2.0))), strict=True
    ):
        assert torch.equal(2 * plain, scaled)


def test_every_epoch_is_a_new_permutation():
    run = ImageRun("digits", "none", "tanh", epochs=2, seeds=(0, 1), batch_size=4)
    first, second = epoch_orders(run, 22)
    assert first.shape == (2, 5, 4)
    for order in (*first, *second):
        assert len(order.unique()) == 20
        assert order.max() < 22
    assert not torch.equal(first, second)
    assert not torch.equal(first[0], first[1])


def test_batch_larger_than_the_data_is_refused(digits):
    with pytest.raises(ValueError, match="batch_size is 5000, but the training set has only 1438 samples"):
        train(ImageRun("digits", "none", "tanh", batch_size=5000), digits)
