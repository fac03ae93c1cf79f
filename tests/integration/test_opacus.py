"""Opacus as the oracle: its per-sample gradients, weighed as Bird 2025 has it and summed, are a correction's."""

import copy

import pytest
import torch
from torch import Tensor, nn

from adiv_optim import (
    Disproportional,
    InputScaled,
    Preconditioned,
    Proportional,
    UnitConsistent,
    Whitened,
    attach,
)
from tests.helpers.cases import relative_error

opacus = pytest.importorskip("opacus")

pytestmark = [
    pytest.mark.integration,
    pytest.mark.usefixtures("in_float64"),
    # Opacus's hooks on a first layer, whose input takes no gradient.
    pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning"),
]
EXACT = 1e-12
#: |x|² of every sample → s of weight and bias, Eqs. 20 and 21.
RULES = {
    "proportional": (Proportional(), lambda norm: (1 / (norm + 1), 1 / (norm + 1))),
    "disproportional": (Disproportional(), lambda norm: (1 / (2 * norm), torch.full_like(norm, 0.5))),
}


def per_sample_gradients(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Per-sample gradients of the sum of |output|."""
    hooked = opacus.GradSampleModule(copy.deepcopy(model), loss_reduction="sum")
    hooked(x).abs().sum().backward()
    return {name.removeprefix("_module."): p.grad_sample for name, p in hooked.named_parameters()}


def squared_norms(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """|x|² of every sample, for every layer that takes a correction."""
    found = {}
    watched = copy.deepcopy(model)
    for path, layer in watched.named_modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            layer.register_forward_pre_hook(lambda _, args, path=path: found.update({path: args[0]}))
    watched(x)
    return {path: rows.detach().flatten(1).square().sum(1) for path, rows in found.items()}


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3))


NETWORKS = {
    "mlp": (mlp, lambda: torch.randn(7, 5)),
    "embedding": (
        lambda: nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(12, 3)), lambda: torch.randint(9, (7, 3)),
    ),
    "conv2d of one position": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(4, 3)), lambda: torch.randn(7, 2, 3, 3),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("correction", "scales"), RULES.values(), ids=RULES)
@pytest.mark.parametrize(("build", "draw"), NETWORKS.values(), ids=NETWORKS)
def test_samples_are_rows(build, draw, correction, scales):
    model, x = build(), draw()
    parts, norms = per_sample_gradients(model, x), squared_norms(model, x)
    attach(model, correction)(x).abs().sum().backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    assert found.keys() == parts.keys()
    for name, gradient in found.items():
        path, _, parameter = name.rpartition(".")
        plain = parts[name].sum(0)
        if path in norms:
            scale = scales(norms[path])[parameter == "bias"]
            assert relative_error(gradient, torch.einsum("b,b...->...", scale, parts[name])) <= EXACT, name
            assert relative_error(gradient, plain) > 1e-2, name
        else:
            assert relative_error(gradient, plain) <= EXACT, name


@pytest.mark.parametrize("wrapper", [Whitened, Preconditioned, InputScaled])
def test_what_measures_inputs_is_refused_on_either_side_of_opacus(wrapper):
    model = opacus.GradSampleModule(mlp())
    private = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "expected_batch_size": 7}
    bare = opacus.optimizers.DPOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), **private)
    with pytest.raises(ValueError, match=rf"^{wrapper.__name__} measures inputs, .* the ε which Opacus reports"):
        wrapper(bare, model)
    late = mlp()
    inside = wrapper(torch.optim.SGD(late.parameters(), lr=0.1), late)
    outside, model = opacus.optimizers.DPOptimizer(inside, **private), opacus.GradSampleModule(late)
    model(torch.randn(7, 5)).square().sum().backward()
    with pytest.raises(ValueError, match=rf"^{wrapper.__name__} measures inputs, .* the ε which Opacus reports"):
        outside.step()


def test_what_reads_weights_alone_steps_inside_opacus():
    late = mlp()
    inside = UnitConsistent(torch.optim.SGD(late.parameters(), lr=0.1), late, example_input=torch.randn(1, 5))
    private = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "expected_batch_size": 7}
    outside, model = opacus.optimizers.DPOptimizer(inside, **private), opacus.GradSampleModule(late)
    before = late[0].weight.detach().clone()
    model(torch.randn(7, 5)).square().sum().backward()
    outside.step()
    assert not torch.equal(late[0].weight, before)


def test_a_correction_that_comes_after_opacus_is_refused():
    layer = nn.Linear(4, 3)
    opacus.GradSampleModule(layer)
    with pytest.raises(ValueError, match="attach it, or build GradientOnly, before make_private"):
        attach(layer, Proportional())
