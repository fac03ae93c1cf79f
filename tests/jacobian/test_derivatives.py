"""Derivatives by the input, against Hessians by torch.func and gradients by two reverse passes."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, hessian, jacrev, vmap

from adiv_optim.jacobian import derivatives, laplacian
from adiv_optim.jacobian.input_derivatives import _ELEMENTWISE
from tests.helpers.modules import Model

pytestmark = pytest.mark.usefixtures("in_float64")


#: An activation that the library does not know.
SINE = Model(lambda _, x: torch.sin(2 * x))


def network(activation, outputs=3):
    inner = nn.Sequential(nn.Linear(5, 6, bias=False), activation)
    return nn.Sequential(nn.Linear(2, 5), activation, inner, nn.Linear(6, outputs))


NETWORKS = {
    **{kind.__name__: network(kind()) for kind in _ELEMENTWISE},
    "unknown": network(SINE),
    "linear": nn.Linear(2, 3),
    # torch's forward rules of both hold the statistics fixed in second derivatives.
    "layer norm": nn.Sequential(nn.Linear(2, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3)),
    "instance norm": nn.Sequential(
        nn.Linear(2, 8), nn.Unflatten(0, (2, 4)), nn.InstanceNorm1d(2, affine=True), nn.Flatten(0), nn.Linear(8, 3)
    ),
    "SiLU and Mish of a module": network(nn.Sequential(nn.SiLU(), SINE, nn.Mish())),
}


def by_hessian(model, x):
    return model(x), jacrev(model)(x), hessian(model)(x).diagonal(dim1=-2, dim2=-1)


def difference(model, x):
    found, wanted = derivatives(model, x), by_hessian(model, x)
    assert [part.shape for part in found] == [part.shape for part in wanted] == [(3,), (3, 2), (3, 2)]
    return max((one - other).abs().max().item() for one, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize("name", NETWORKS)
def test_they_are_those_of_the_hessian_and_the_same_where_gradients_are_off(name):
    model, x = NETWORKS[name].double(), torch.randn(2)
    assert difference(model, x) < 1e-12
    assert torch.allclose(laplacian(model, x), hessian(model)(x).diagonal(dim1=-2, dim2=-1).sum(-1), atol=1e-12)
    wanted = derivatives(model, x)
    with torch.no_grad():
        for part, other in zip(derivatives(model, x), wanted, strict=True):
            assert torch.allclose(part, other, atol=1e-14)
            assert not part.requires_grad


@pytest.mark.parametrize("kind", [nn.ReLU, nn.ELU, nn.CELU, nn.SELU, nn.SiLU, nn.Mish, nn.LeakyReLU])
def test_activations_in_place_are_as_others(kind):
    model, x = network(activation := kind()).double(), torch.randn(2)
    wanted = by_hessian(model, x)
    activation.inplace = True
    for part, other in zip(derivatives(model, x), wanted, strict=True):
        assert torch.allclose(part, other, atol=1e-12)


def test_a_function_around_a_network_is_differentiated():
    model = network(nn.Tanh())
    assert difference(lambda x: x.prod() * model(x), torch.randn(2)) < 1e-12
    point = torch.randn(2)
    in_place, wanted = derivatives(lambda x: model(x.mul_(2)), point), by_hessian(lambda x: model(2 * x), point)
    assert all(torch.allclose(part, other, atol=1e-12) for part, other in zip(in_place, wanted, strict=True))


def test_a_layer_with_a_forward_or_a_hook_of_its_own_runs_that():
    for place in (0, 1):
        model = network(nn.Tanh())
        plain = model[place].forward
        model[place].forward = lambda x, plain=plain: 2 * plain(x)
        assert difference(model, torch.randn(2)) < 1e-12
    model = network(nn.Tanh())
    model[0].register_forward_hook(lambda layer, args, output: 2 * output)
    assert difference(model, torch.randn(2)) < 1e-12


@pytest.mark.parametrize("activation", [nn.Tanh(), SINE], ids=["carried", "by transforms"])
def test_their_gradients_by_the_parameters_are_those_of_reverse_passes(activation):
    model, points = network(activation, outputs=1), torch.randn(4, 2)
    square = Model(lambda square, x: laplacian(square.model, x).square().sum(), model=model)
    parameters = {name: parameter.detach() for name, parameter in square.named_parameters()}
    found = vmap(grad(lambda parameters, x: functional_call(square, parameters, (x,))), in_dims=(None, 0))(
        parameters, points
    )
    for number, x in enumerate(points):
        x = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        second = sum(torch.autograd.grad(first[k], x, create_graph=True)[0][k] for k in range(2))
        wanted = torch.autograd.grad(second.square(), list(model.parameters()), allow_unused=True)
        for name, gradient in zip(parameters, wanted, strict=True):
            expected = torch.zeros_like(parameters[name]) if gradient is None else gradient
            assert torch.allclose(found[name][number], expected, atol=1e-10)


def test_several_points_and_torchscript_are_refused():
    with pytest.raises(ValueError, match=r"x is a torch\.float64 tensor of shape \(4, 2\); it is one point"):
        derivatives(network(nn.Tanh()), torch.randn(4, 2))
    with pytest.raises(TypeError, match="pass the module that was scripted"):
        derivatives(torch.jit.script(nn.Sequential(nn.Linear(2, 3), nn.Tanh())), torch.rand(2))
