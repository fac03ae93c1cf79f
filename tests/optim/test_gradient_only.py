"""GradientOnly: corrected gradients behind any optimizer, and a plain model afterwards."""

import copy
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils.parametrizations import weight_norm
from torch.optim import AdamW

from adiv_optim import BatchIdeal, Correction, GradientOnly, Proportional, coverage
from adiv_optim.rows.layers import plain_type
from tests.helpers.steps import inputs, same, sgd, stepped


def mlp(bias=True):
    return nn.Sequential(nn.Linear(4, 5, bias), nn.Tanh(), nn.Linear(5, 2, bias)).double()


def train(model, optimizer, steps=3):
    return stepped(model, optimizer, *(inputs(step).double() for step in range(steps)))


def test_a_parametrized_layer_that_fully_shard_is_applied_to_is_corrected(one_process):
    model = mlp()
    weight_norm(model[0])
    fully_shard(model[0], mesh=init_device_mesh("cpu", (1,)))
    optimizer = GradientOnly(sgd(model), model, Proportional())
    train(model, optimizer, 1)
    assert optimizer.coverage().parameter_share == 1
    assert plain_type(optimizer.detach()[0]) is nn.Linear


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


def attached(model):
    GradientOnly(sgd(model[0]), model, Proportional())
    return model


ERRORS = {
    "other-parameters": (lambda m: (sgd(mlp()), m, Proportional()), ValueError, "none of .*deepcopy"),
    "no-module": (lambda m: (sgd(m), m.parameters(), Proportional()), TypeError, "found generator"),
    "correction-class": (lambda m: (sgd(m), m, Proportional), TypeError, r"write Proportional\(\)"),
    "correction-none": (lambda m: (sgd(m), m, None), TypeError, "found NoneType"),
    "a-second-one": (
        lambda m: (sgd(m), attached(m), BatchIdeal()), ValueError, "layer '0' already .*leave it unwrapped",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("arguments", "error", "message"), ERRORS.values(), ids=ERRORS)
def test_mistakes_are_named_and_leave_the_model_unattached(arguments, error, message):
    model = mlp()
    with pytest.raises(error, match=message):
        GradientOnly(*arguments(model))
    assert (type(model[0]) is nn.Linear) == ("already" not in message)
