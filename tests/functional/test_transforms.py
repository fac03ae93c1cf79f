"""Corrected layers under vmap, torch.compile and double differentiation."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, jacrev, stack_module_state, vmap

from adiv_optim import functional
from tests.helpers.cases import CORRECTIONS, LAYERS, apply, each_correction, gradients, relative_error
from tests.helpers.covering import paired

EXACT = 1e-12  # float64, relative
COMPILED = 1e-5  # float32, relative: the compiler may reorder sums

SOME = ["linear-tokens", "linear-rows-no-bias", "linear-narrow-to-wide", "conv1d", "conv2d-every-option", "conv3d"]
some_layers = paired("case correction", {name: LAYERS[name] for name in SOME}, CORRECTIONS)


class Through(nn.Module):
    """A layer called through adiv_optim.functional, so that functional_call can swap its parameters."""

    def __init__(self, layer, correction):
        super().__init__()
        self.layer, self.correction = layer, correction

    def forward(self, input):
        return apply(self.layer, input, self.correction)


@some_layers
def test_vmap_over_stacked_models_is_a_loop_over_models(case, correction):
    models = [Through(case.layer(), correction) for _ in range(3)]
    inputs = torch.stack([case.input() for _ in models])
    stacked, _ = stack_module_state(models)

    def loss(parameters, x):
        return functional_call(models[0], parameters, (x,)).square().sum()

    found = vmap(grad(loss))(stacked, inputs)
    for k, (model, x) in enumerate(zip(models, inputs, strict=True)):
        model(x).square().sum().backward()
        for name, parameter in model.named_parameters():
            assert relative_error(found[name][k], parameter.grad) <= EXACT, name


@some_layers
def test_backward_through_vmap_is_a_loop_over_models(case, correction):
    # The ensemble trainer's way: vmap forward, then one ordinary backward over the stacked tensors.
    models = [Through(case.layer(), correction) for _ in range(3)]
    inputs = torch.stack([case.input() for _ in models]).requires_grad_()
    stacked, _ = stack_module_state(models)
    output = vmap(lambda parameters, x: functional_call(models[0], parameters, (x,)))(stacked, inputs)
    g = torch.randn_like(output)
    output.backward(g)
    for k, model in enumerate(models):
        x = inputs[k].detach().requires_grad_()
        model(x).backward(g[k])
        assert relative_error(inputs.grad[k], x.grad) <= EXACT
        for name, parameter in model.named_parameters():
            assert relative_error(stacked[name].grad[k], parameter.grad) <= EXACT, name


def test_biases_of_their_own_beside_a_shared_weight_are_a_loop_over_them():
    weight, biases, inputs = (torch.randn(*shape, dtype=torch.float64) for shape in ((3, 5), (4, 3), (4, 2, 5)))

    def loss(bias, x):
        return functional.linear(x, weight, bias, CORRECTIONS["disproportional"]).square().sum()

    wanted = torch.stack([grad(loss)(bias, x) for bias, x in zip(biases, inputs, strict=True)])
    assert relative_error(vmap(grad(loss))(biases, inputs), wanted) <= EXACT


@some_layers
def test_vmap_with_shared_input_is_a_loop_over_models(case, correction):
    models, x = [Through(case.layer(), correction) for _ in range(2)], case.input()
    stacked, _ = stack_module_state(models)
    found = vmap(
        grad(lambda parameters, x: functional_call(models[0], parameters, (x,)).square().sum()), in_dims=(0, None)
    )(stacked, x)
    for k, model in enumerate(models):
        model(x).square().sum().backward()
        for name, parameter in model.named_parameters():
            assert relative_error(found[name][k], parameter.grad) <= EXACT, name


@some_layers
def test_per_sample_gradients_by_vmap_of_grad_are_a_loop_over_samples(case, correction):
    model, x = Through(case.layer(), correction), case.input()
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters, sample):
        return functional_call(model, parameters, (sample.unsqueeze(0),)).square().sum()

    found = vmap(grad(loss), in_dims=(None, 0))(parameters, x)
    for k, sample in enumerate(x):
        model.zero_grad()
        model(sample.unsqueeze(0)).square().sum().backward()
        for name, parameter in model.named_parameters():
            assert relative_error(found[name][k], parameter.grad) <= EXACT, name


DOUBLE = ["linear-rows", "linear-unbatched", "conv1d", "conv2d", "conv3d"]


@paired("case wanted", {name: LAYERS[name] for name in DOUBLE}, {name: name for name in ("input", "weight", "bias")})
@each_correction
def test_double_backward_raises(case, wanted, correction):
    layer, x = case.layer(), case.input().requires_grad_()
    tensors = {"input": x, "weight": layer.weight, "bias": layer.bias}
    output = apply(layer, x, correction)
    (first,) = torch.autograd.grad(output.square().sum(), tensors[wanted], create_graph=True)
    with pytest.raises(RuntimeError, match=r"differentiated twice.*correction=None, detach"):
        torch.autograd.grad(first.sum(), layer.weight)


@pytest.mark.parametrize("case", [LAYERS[name] for name in DOUBLE], ids=DOUBLE)
@each_correction
def test_nested_torch_func_derivatives_raise(case, correction):
    layer, x = case.layer(), case.input()
    model = Through(layer, correction)
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters):
        return functional_call(model, parameters, (x,)).square().sum()

    with pytest.raises(RuntimeError, match="differentiated twice"):
        jacrev(jacrev(loss))(parameters)
    with pytest.raises(RuntimeError, match="differentiated twice"):
        grad(lambda parameters: grad(loss)(parameters)["layer.weight"].sum())(parameters)


def test_double_backward_without_correction_works():
    layer, x = nn.Linear(3, 2).double(), torch.randn(4, 3, dtype=torch.float64)
    (first,) = torch.autograd.grad(apply(layer, x, None).square().sum(), layer.weight, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), layer.weight)
    torch.testing.assert_close(second, 2 * x.sum(1) @ x * torch.ones(2, 1, dtype=torch.float64))


@each_correction
def test_single_gradient_with_create_graph_is_the_corrected_one(correction):
    layer, x = nn.Linear(3, 2).double(), torch.randn(4, 3, dtype=torch.float64)
    wanted = gradients(apply(layer, x, correction), layer, torch.ones(4, 2, dtype=torch.float64))
    output = apply(layer, x, correction).sum()
    found = torch.autograd.grad(output, [layer.weight, layer.bias], create_graph=True)
    for tensor, name in zip(found, wanted, strict=True):
        assert torch.equal(tensor.detach(), wanted[name])


@each_correction
def test_forward_mode_raises(correction):
    layer, x = nn.Linear(3, 2).double(), torch.randn(4, 3, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="jvp"):
        torch.func.jvp(lambda x: apply(layer, x, correction), (x,), (x,))


def linear_and_convolution(x, conv_weight, conv_bias, weight, bias):
    correction = CORRECTIONS["proportional"]
    hidden = functional.conv2d(x, conv_weight, conv_bias, padding=1, correction=correction).relu().flatten(1)
    return functional.linear(hidden, weight, bias, CORRECTIONS["disproportional"]).square().mean()


# pytest runs with warnings as errors; what inductor itself deprecates is none of ours.
@pytest.mark.filterwarnings("ignore::UserWarning:torch._inductor", "ignore::UserWarning:torch._dynamo")
@pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
def test_compiled_without_graph_breaks_gives_the_same_gradients(backend):
    shapes = [(4, 3, 6, 6), (4, 3, 3, 3), (4,), (5, 144), (5,)]
    tensors = [torch.randn(shape, requires_grad=True) for shape in shapes]
    torch._dynamo.reset()
    compiled = torch.compile(linear_and_convolution, fullgraph=True, backend=backend)
    plain_loss, loss = linear_and_convolution(*tensors), compiled(*tensors)
    torch.testing.assert_close(loss, plain_loss)
    wanted, found = torch.autograd.grad(plain_loss, tensors), torch.autograd.grad(loss, tensors)
    for one, other in zip(found, wanted, strict=True):
        assert relative_error(one, other) <= COMPILED
