"""GradientOnly: corrected gradients behind any optimizer, and a plain model afterwards."""

import copy
import warnings
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW

from adiv_optim import BatchIdeal, Correction, GradientOnly, Proportional, Whitened, coverage
from tests.helpers.steps import inputs, same, sgd, stepped


def mlp(bias=True):
    return nn.Sequential(nn.Linear(4, 5, bias), nn.Tanh(), nn.Linear(5, 2, bias)).double()


def train(model, optimizer, steps=3):
    return stepped(model, optimizer, *(inputs(step).double() for step in range(steps)))


@dataclass(frozen=True)
class One(Correction):
    """The correction that corrects nothing."""

    def scales(self, factors):
        return {name: torch.ones_like(factor) for name, factor in factors.items()}


def skipped(optimizer, model):
    """A correction on a layer beside the model."""
    return GradientOnly(optimizer, nn.ModuleList([model, nn.Linear(1, 1)]), Proportional(), skip=["0"])


# Without a bias: its gradient is the product of G with the scales, which sums in another order than torch's sum of G.
@pytest.mark.parametrize(("wrap", "bias"), [(lambda o, m: GradientOnly(o, m, One()), False), (skipped, True)])
def test_correcting_nothing_is_the_bare_optimizer_bit_for_bit(wrap, bias):
    model = mlp(bias)
    plain = copy.deepcopy(model)
    wanted = train(plain, AdamW(plain.parameters(), lr=0.01))
    assert same(train(model, wrap(AdamW(model.parameters(), lr=0.01), model)), wanted)


def test_skip_and_strict_are_those_of_attach():
    model = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 2)).double()
    build = lambda: sgd(model)  # noqa: E731
    with pytest.raises(ValueError, match="strict: 2 trainable parameters"):
        GradientOnly(build(), model, Proportional(), strict=True)
    optimizer = GradientOnly(build(), model, Proportional(), skip=["0", nn.LayerNorm], strict=True)
    train(model, optimizer, 1)
    assert coverage(model).treated.keys() == {"2.weight", "2.bias"}


def test_coverage_metrics_and_repr_say_what_is_corrected():
    model = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 2)).double()
    optimizer = GradientOnly(sgd(model), model, Proportional(eps=0.5))
    assert repr(optimizer).startswith("GradientOnly(SGD (")
    assert repr(optimizer).endswith(", correction=Proportional(eps=0.5))")
    names = [f"GradientOnly/{name}" for name in ("treated_parameters", "treated_elements", "layers", "layers_seen")]
    assert optimizer.metrics() == dict(zip(names, (0, 0, 2, 0), strict=True))
    train(model, optimizer, 1)
    assert optimizer.coverage() == coverage(model)
    assert optimizer.metrics() == dict(zip(names, (4 / 6, 37 / 47, 2, 2), strict=True))
    optimizer.detach()
    assert repr(optimizer).endswith(", correction=None)")
    assert optimizer.metrics()["GradientOnly/layers"] == 0


def test_metrics_hold_those_of_the_wrapper_within():
    model = nn.Linear(4, 5).double()
    within = Whitened(sgd(model), model)
    found = GradientOnly(within, model, Proportional()).metrics()
    assert found.items() > within.metrics().items()


def attached(model):
    GradientOnly(sgd(model[0]), model, Proportional())
    return model


ERRORS = {
    "other-parameters": (lambda m: (sgd(mlp()), m, Proportional()), ValueError, "none of .*deepcopy"),
    "no-module": (lambda m: (sgd(m), m.parameters(), Proportional()), TypeError, "found generator"),
    "correction-class": (lambda m: (sgd(m), m, Proportional), TypeError, r"write Proportional\(\)"),
    "correction-none": (lambda m: (sgd(m), m, None), TypeError, "found NoneType"),
    "a-second-one": (
        lambda m: (sgd(m), attached(m), Proportional()), ValueError, "layer '0' already .*pass it plainly",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("arguments", "error", "message"), ERRORS.values(), ids=ERRORS)
def test_mistakes_are_named_and_leave_the_model_unattached(arguments, error, message):
    model = mlp()
    with pytest.raises(error, match=message):
        GradientOnly(*arguments(model))
    assert (type(model[0]) is nn.Linear) == ("already" not in message)


FAR = {
    "habit-of-adam": (SGD, {"lr": 1e-3}, BatchIdeal(), r"is 0.001, .* hardly at all; take a rate of 0.1 to 1"),
    "rate-of-the-sum": (SGD, {"lr": 30.0}, BatchIdeal(), r"is 30, .* take a rate of 0.1 to 1"),
    "by-momentum": (SGD, {"lr": 1.0, "momentum": 0.95}, BatchIdeal(), r"is 20, .* take a rate of 0.1 to 1"),
    "mean-loss": (SGD, {"lr": 1e-3}, BatchIdeal(per_sample=False), r"per_sample=True\) and a rate of 0.1 to 1"),
}
NEAR = {
    "usual": (SGD, {"lr": 0.1, "momentum": 0.9}, BatchIdeal()),
    "small-with-momentum": (SGD, {"lr": 1e-3, "momentum": 0.9}, BatchIdeal()),
    "high": (SGD, {"lr": 3.0}, BatchIdeal(0.3)),
    "mean-loss": (SGD, {"lr": 300.0}, BatchIdeal(per_sample=False)),
    "waiting-for-a-schedule": (SGD, {"lr": 0.0}, BatchIdeal()),
    "momentum-of-one": (SGD, {"lr": 1e-3, "momentum": 1.0}, BatchIdeal()),
    "adam": (Adam, {"lr": 1e-3}, BatchIdeal()),
    "proportional": (SGD, {"lr": 1e-3}, Proportional()),
}


@pytest.mark.parametrize(("kind", "options", "rule", "message"), FAR.values(), ids=FAR)
def test_rate_far_from_any_that_trains_is_warned_of_once(kind, options, rule, message):
    model = mlp()
    with pytest.warns(UserWarning, match=message) as found:
        optimizer = GradientOnly(kind(model.parameters(), **options), model, rule)
    train(model, optimizer, 2)  # any other warning is an error
    assert len(found) == 1
    assert found[0].filename == __file__


@pytest.mark.parametrize(("kind", "options", "rule"), NEAR.values(), ids=NEAR)
def test_rates_that_train_are_not_warned_of(kind, options, rule):
    model = mlp()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        GradientOnly(kind(model.parameters(), **options), model, rule)
