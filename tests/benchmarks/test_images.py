"""The ensemble trainer gives every seed the numbers a plain loop gives it, and every trial those that it has alone."""

from dataclasses import replace
from itertools import cycle

import pytest
import torch
from torch import nn

from benchmarks import ensemble
from benchmarks.data import Dataset, load
from benchmarks.ensemble import Ensemble, Loops, accuracy, build_optimizer, epoch_orders, set_rate
from benchmarks.methods import MAC, METHODS
from benchmarks.problems.images import NETWORKS, ImageRun, build_model, held_out

STEPS = 6
#: What trains as one program.
TOGETHER = [name for name, method in METHODS.items() if method.applies == "images" and method.by_inputs is None]
TOLERANCE = 1e-10  # relative, on every step's loss, in float64


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return load("digits").to("cpu", torch.float64)


def stepped(runs: list[ImageRun], data: Dataset) -> torch.Tensor:
    """Every step's loss of an epoch: shape (steps, seeds), or (steps, runs)."""
    run, found = runs[0], []
    trainer = Ensemble(runs, data) if run.backend == "ensemble" else Loops(run, data)
    (order,) = epoch_orders(run, len(data.train_labels))
    for number, index in enumerate(order.unbind(1)):
        set_rate(run, trainer.optimizers, number / order.shape[1])
        found.append(trainer.step(index))
    return torch.stack(found)


def losses(run: ImageRun, data: Dataset) -> torch.Tensor:
    """Every step's loss on the first samples: shape (steps, seeds)."""
    rows = slice(STEPS * run.batch_size)
    return stepped([run], data._replace(train_inputs=data.train_inputs[rows], train_labels=data.train_labels[rows]))


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
    found, wanted = ([accuracy(model, digits) for model in each.models] for each in (together, apart))
    assert found == pytest.approx(wanted)


def test_without_a_compiler_steps_stay_as_they_are(digits, monkeypatch):
    monkeypatch.setattr(ensemble, "COMPILE_AFTER", 2)
    monkeypatch.setenv("PATH", "")
    with pytest.warns(UserWarning, match="no C\\+\\+ compiler"):
        assert_plain_loops(ImageRun("digits", "none", "tanh", (8,), epochs=1, seeds=(0, 1)), digits)


#: Each with another way to act on convolutions; every network has two of them or more.
ON_OTHERS = ["none", "batchnorm", "l2-patch", "affine-like", "proportional", "batch-ideal", "uc-network"]
OTHERS = [
    *({"method": m, "network": n} for m, n in zip(ON_OTHERS, cycle(name for name in NETWORKS if name))),
    {"method": "none", "schedule": "cosine"},
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


def test_every_epoch_is_a_new_permutation():
    run = ImageRun("digits", "none", "tanh", epochs=2, seeds=(0, 1), batch_size=4)
    first, second = epoch_orders(run, 22)
    assert first.shape == (2, 5, 4)
    for order in (*first, *second):
        assert len(order.unique()) == 20
        assert order.max() < 22
    assert not torch.equal(first, second)
    assert not torch.equal(first[0], first[1])


FINAL = ImageRun("digits", "none", "tanh", optimizer="sgd", schedule="cosine", epochs=2, seeds=(0, 1))


@pytest.mark.parametrize(("method", "optimizer"), [("none", "sgd"), ("batch-ideal", "adam"), ("batchnorm", "momentum")])
def test_trials_side_by_side_are_the_runs_alone(optimizer, method, digits):
    first = replace(FINAL, method=method, optimizer=optimizer, seeds=(3,), lr=0.01, validation=True, epochs=1)
    runs = [first, replace(first, lr=0.03, weight_decay=1e-2)]
    data = held_out(digits)
    together = stepped(runs, data)
    alone = torch.cat([stepped([run], data) for run in runs], 1)
    assert ((together - alone).abs() / alone).max() <= 1e-10
    assert (together[:, 0] - together[:, 1]).abs().max() > 1e-4


def test_held_out_tenth_is_never_trained_on(digits):
    count = len(digits.train_labels)
    split = held_out(digits._replace(train_inputs=torch.arange(count).unsqueeze(1)))
    train_rows, test_rows = (set(rows.flatten().tolist()) for rows in (split.train_inputs, split.test_inputs))
    assert len(test_rows) == count // 10
    assert not train_rows & test_rows
    assert len(train_rows | test_rows) == count


def test_cosine_goes_from_the_rate_to_nothing(digits):
    run = replace(FINAL, lr=0.1)
    trainer = Ensemble([run], digits)
    for progress, wanted in ((0.0, 0.1), (0.5, 0.05), (1.0, 0.0)):
        set_rate(run, trainer.optimizers, progress)
        assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(wanted)


@pytest.mark.integration
def test_muon_steps_what_is_inside_and_adam_the_rest():
    pytest.importorskip("pytorch_optimizer")
    run = ImageRun("digits", "none", "tanh", (8, 6, 6), optimizer="muon", lr=0.01, network="cnn")
    model = build_model(run, load("digits"), 0)
    optimizer = build_optimizer(run, run.make_method(), model.parameters())
    before = [p.detach().clone() for p in model.parameters()]
    generator = torch.Generator().manual_seed(0)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)
    gradients = [p.grad.clone() for p in model.parameters()]
    optimizer.step()
    *inside, last = [place for place, p in enumerate(before) if p.dim() > 1]
    assert len(inside) == 3
    for place, (p, old, gradient) in enumerate(zip(model.parameters(), before, gradients, strict=True)):
        step = (p.detach() - old).flatten(1) if p.dim() > 1 else p.detach() - old
        if place in inside:
            # Newton–Schulz in bfloat16 brings singular values to between 0.7 and 1.2; the step has Adam's RMS.
            values = torch.linalg.svdvals(step) / (0.01 * 0.2 * max(step.shape) ** 0.5)
            assert values.min() > 0.5
            assert values.max() < 1.3
        else:
            assert torch.allclose(step.view_as(gradient), -0.01 * gradient.sign(), rtol=1e-4)
    assert last not in inside


def test_fused_optimizers_read_the_gradients_of_mac():
    """They take a gradient to lie in memory as its parameter does."""

    def moved(fused):
        torch.manual_seed(0)
        layer = nn.Linear(4, 3)
        opt = MAC(torch.optim.Adam(layer.parameters(), lr=0.1, fused=fused), layer, damping=0.5)
        for _ in range(3):
            opt.zero_grad()
            layer(torch.randn(5, 4)).square().sum().backward()
            opt.step()
        return layer.weight

    torch.testing.assert_close(moved(True), moved(False))
