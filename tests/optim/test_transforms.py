"""Models called within transforms of torch.func: the primal rows count once, whatever is around them."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, hessian, jacfwd, jacrev, jvp, vmap

from adiv_optim import InputScaled, Preconditioned, Whitened
from tests.helpers.cases import relative_error
from tests.helpers.covering import paired
from tests.helpers.remembered import covariance_of, memory, rows_counted
from tests.helpers.steps import same

EXACT = 1e-11  # float64, twelve steps of Adam

pytestmark = pytest.mark.usefixtures("in_float64")

WRAPPERS = {
    "whitened": lambda inner, model: Whitened(inner, model, every=3),
    "rank": lambda inner, model: Whitened(inner, model, every=3, rank=4),
    "preconditioned": lambda inner, model: Preconditioned(inner, model, every=3),
    "input-scaled": lambda inner, model: InputScaled(inner, model, every=3, floor=0.1),
}
#: Points to the values at them and their Laplacian.
Laplacian = Callable[[nn.Module, Tensor], Tensor]


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 1))


def by_reverse_passes(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return sum(torch.autograd.grad(first[:, k].sum(), x, create_graph=True)[0][:, k] for k in range(2))


def one_value(model: nn.Module) -> Callable[[Tensor], Tensor]:
    parameters = dict(model.named_parameters())
    return lambda x: functional_call(model, parameters, (x,)).squeeze(-1)


def by_matrix(second: Callable[[Callable], Callable]) -> Laplacian:
    return lambda model, x: vmap(second(one_value(model)))(x).diagonal(dim1=-2, dim2=-1).sum(-1)


def by_two_jvps(model: nn.Module, x: Tensor) -> Tensor:
    u = one_value(model)

    def along(direction: Tensor) -> Tensor:
        tangent = direction.expand_as(x)
        return jvp(lambda y: jvp(u, (y,), (tangent,))[1], (x,), (tangent,))[1]

    return vmap(along)(torch.eye(2)).sum(0)


def by_nested_maps(model: nn.Module, x: Tensor) -> Tensor:
    return vmap(vmap(lambda y: hessian(one_value(model))(y).trace()), in_dims=1, out_dims=1)(x.view(4, 5, 2)).flatten()


LAPLACIANS: dict[str, Laplacian] = {
    "vmap of hessian": by_matrix(hessian),
    "vmap of jacrev of jacfwd": by_matrix(lambda u: jacrev(jacfwd(u))),
    "jvp of jvp": by_two_jvps,
    "vmap of vmap": by_nested_maps,
}


def trained(laplacian: Laplacian, wrap: Callable, steps: int = 12) -> tuple[Tensor, torch.optim.Optimizer]:
    model, generator = mlp(), torch.Generator().manual_seed(1)
    optimizer = wrap(torch.optim.Adam(model.parameters(), lr=1e-2), model)
    for _ in range(steps):
        inner, sides = (torch.rand(20, 2, generator=generator) for _ in range(2))
        loss = (laplacian(model, inner) - 1).square().mean() + model(sides).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()]), optimizer


@paired("laplacian wrap", LAPLACIANS, WRAPPERS)
def test_training_path_is_that_of_two_reverse_passes(laplacian, wrap):
    found, _ = trained(laplacian, wrap)
    wanted, _ = trained(by_reverse_passes, wrap)
    assert relative_error(found, wanted) <= EXACT


def test_rows_count_once_and_a_second_pass_counts_again():
    (_, one), (_, again) = (
        trained(laplacian, WRAPPERS["whitened"], steps=1)
        for laplacian in (by_matrix(hessian), lambda model, x: by_matrix(hessian)(model, torch.cat([x, x]))[:20])
    )
    names = ("0.weight", "2.weight", "4.weight")
    assert (rows_counted(one), rows_counted(again)) == (dict.fromkeys(names, 40), dict.fromkeys(names, 60))
    # The companion: a path that counts rows otherwise is another path.
    twice, _ = trained(lambda m, x: by_matrix(hessian)(m, torch.cat([x, x]))[:20], WRAPPERS["whitened"])
    wanted, _ = trained(by_reverse_passes, WRAPPERS["whitened"])
    assert relative_error(twice, wanted) > 1e3 * EXACT


CONVOLUTIONS = {
    "one sample": (lambda: nn.Conv2d(2, 3, 3, padding=1), (2, 6, 6)),
    "groups": (lambda: nn.Conv2d(2, 4, 3, groups=2), (2, 6, 6)),
    "batches": (lambda: nn.Conv1d(2, 3, 3, stride=2), (4, 2, 9)),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_covariance_of_a_mapped_convolution_is_that_of_all_samples(name):
    build, shape = CONVOLUTIONS[name]
    inputs, kept = torch.randn(5, *shape), []
    for mapped in (True, False):
        torch.manual_seed(0)
        layer = build()
        optimizer = Whitened(torch.optim.SGD(layer.parameters(), lr=0.1), layer, graft_norm=False)
        if mapped:
            vmap(jacfwd(lambda x, layer=layer: layer(x).square().sum()))(inputs).sum().backward()
        else:
            layer(inputs.flatten(0, 1) if name == "batches" else inputs).sum().backward()
        optimizer.step()
        kept.append((rows_counted(optimizer), covariance_of(optimizer, layer)))
    (rows, found), (wanted_rows, wanted) = kept
    assert rows == wanted_rows
    assert relative_error(found, wanted) <= 1e-13


def rows_of_a_step(layer: nn.Linear, optimizer: Whitened) -> float:
    """How many rows count in a step that is taken now."""
    for p in layer.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    return rows_counted(optimizer)["weight"]


def test_tangents_of_forward_mode_leave_the_sums():
    x, kept = torch.rand(4, 3), []
    for with_tangent in (True, False):
        layer = nn.Linear(3, 2)
        optimizer = Whitened(torch.optim.SGD(layer.parameters(), lr=0.1), layer)
        with forward_ad.dual_level():
            output = layer(forward_ad.make_dual(x, torch.ones_like(x)) if with_tangent else x)
            if not with_tangent:
                output.sum().backward()
            assert rows_of_a_step(layer, optimizer) == 4
            kept.append(memory(optimizer))
            assert all(forward_ad.unpack_dual(part).tangent is None for part in kept[-1])
    assert same(*kept)


@pytest.mark.parametrize("inputs_too", [True, False])
def test_weights_that_are_mapped_over_are_refused(inputs_too):
    layer, x = nn.Linear(3, 2), torch.rand(4, 3)
    optimizer = Whitened(torch.optim.SGD(layer.parameters(), lr=0.1), layer)
    weights = {name: torch.stack([p, p]).detach() for name, p in layer.named_parameters()}
    inputs, places = (torch.stack([x, x]), (0, 0)) if inputs_too else (x, (0, None))
    with pytest.raises(RuntimeError, match=r"^weight: vmap maps over this weight.*detach\(\) the optimizer"):
        vmap(lambda p, y: functional_call(layer, p, (y,)), places)(weights, inputs)
    assert rows_of_a_step(layer, optimizer) == 0
    optimizer.detach()
    vmap(lambda p: functional_call(layer, p, (x,)))(weights)


class Doubled(nn.Linear):
    def input_rows(self, input: Tensor) -> Tensor:
        return 2 * input

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(2 * input)


def test_input_rows_that_would_see_more_dimensions_are_refused():
    layer = Doubled(3, 2)
    optimizer = Whitened(torch.optim.SGD(layer.parameters(), lr=0.1), layer)
    with pytest.raises(RuntimeError, match=r"^weight: vmap maps over the argument of input_rows"):
        vmap(layer)(torch.rand(4, 3))
    assert rows_of_a_step(layer, optimizer) == 0
