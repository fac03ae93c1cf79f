"""GradientOnly: corrected gradients behind any optimizer, and a plain model afterwards."""

import copy

import pytest
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils.parametrizations import weight_norm

from adiv_optim import BatchIdeal, GradientOnly, Proportional, coverage
from adiv_optim.rows.layers import plain_type
from tests.helpers.steps import inputs, same, sgd, stepped


def mlp():
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def test_a_parametrized_layer_that_fully_shard_is_applied_to_is_corrected(one_process):
    model = mlp()
    weight_norm(model[0])
    fully_shard(model[0], mesh=init_device_mesh("cpu", (1,)))
    optimizer = GradientOnly(sgd(model), model, Proportional())
    stepped(model, optimizer, inputs(0).double())
    assert optimizer.coverage().parameter_share == 1
    assert plain_type(optimizer.detach()[0]) is nn.Linear


def test_a_model_that_is_skipped_takes_the_bare_steps_bit_for_bit():
    model, x = mlp(), inputs(0).double()
    plain, beside = copy.deepcopy(model), nn.ModuleList([model, nn.Linear(1, 1)])
    optimizer = GradientOnly(sgd(model), beside, Proportional(), skip=["0"])
    assert same(stepped(model, optimizer, x, x), stepped(plain, sgd(plain), x, x))


def test_coverage_metrics_and_repr_say_what_is_corrected():
    model = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 2)).double()
    optimizer = GradientOnly(sgd(model), model, Proportional(eps=0.5))
    assert repr(optimizer).startswith("GradientOnly(SGD (")
    assert repr(optimizer).endswith(", correction=Proportional(eps=0.5))")
    names = [f"GradientOnly/{name}" for name in ("treated_parameters", "treated_elements", "layers", "layers_seen")]
    assert optimizer.metrics() == dict(zip(names, (0, 0, 2, 0), strict=True))
    stepped(model, optimizer, inputs(0).double())
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
