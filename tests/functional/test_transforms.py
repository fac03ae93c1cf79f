"""Corrected layers under vmap, torch.compile and double differentiation."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, jacrev, stack_module_state, vmap

from adiv_optim import BatchIdeal, Disproportional, Proportional, attach, functional
from tests.helpers.cases import CORRECTIONS, LAYERS, apply, each_correction, gradients, relative_error
from tests.helpers.covering import paired
from tests.helpers.modules import Model

EXACT = 1e-9  # float64, relative; what BatchIdeal solves
COMPILED = 1e-5  # float32, relative: the compiler may reorder sums

SOME = [
    "linear-tokens", "linear-rows-no-bias", "linear-narrow-to-wide", "linear-rows", "conv1d", "conv2d-every-option",
    "conv2d", "conv3d",
]  # fmt: skip
RULES = {"proportional": Proportional(), "batch-ideal": BatchIdeal(0.01), "disproportional": Disproportional()}
some_layers = paired("case rule", {name: LAYERS[name] for name in SOME}, RULES)


def through(layer, correction):
    """A layer called through adiv_optim.functional, so that functional_call can swap its parameters."""
    return Model(lambda model, input: apply(model.layer, input, correction), layer=layer)


def assert_a_loop(found, models, inputs):
    """Gradients by name, the k-th of the k-th model and input."""
    for k, (model, x) in enumerate(zip(models, inputs, strict=True)):
        model.zero_grad()
        model(x).square().sum().backward()
        for name, parameter in model.named_parameters():
            assert relative_error(found[name][k], parameter.grad) <= EXACT, name


@some_layers
def test_vmap_over_models_or_samples_is_a_loop(case, rule):
    models = [through(case.layer(), rule) for _ in range(3)]
    inputs = torch.stack([case.input() for _ in models])
    stacked, _ = stack_module_state(models)

    def loss(parameters, x):
        return functional_call(models[0], parameters, (x,)).square().sum()

    assert_a_loop(vmap(grad(loss))(stacked, inputs), models, inputs)
    assert_a_loop(vmap(grad(loss), in_dims=(0, None))(stacked, inputs[0]), models, [inputs[0]] * 3)
    # The ensemble trainer's way: vmap forward, then one ordinary backward over the stacked tensors.
    vmap(loss)(stacked, inputs).sum().backward()
    assert_a_loop({name: p.grad for name, p in stacked.items()}, models, inputs)
    one = {name: p.detach() for name, p in models[0].named_parameters()}
    samples = [x[None] for x in inputs[0]]
    assert_a_loop(vmap(grad(loss), in_dims=(None, 0))(one, torch.stack(samples)), [models[0]] * len(samples), samples)


def test_biases_of_their_own_beside_a_shared_weight_are_a_loop_over_them():
    weight, biases, inputs = (torch.randn(*shape, dtype=torch.float64) for shape in ((3, 5), (4, 3), (4, 2, 5)))

    def loss(bias, x):
        return functional.linear(x, weight, bias, Disproportional()).square().sum()

    wanted = torch.stack([grad(loss)(bias, x) for bias, x in zip(biases, inputs, strict=True)])
    assert relative_error(vmap(grad(loss))(biases, inputs), wanted) <= EXACT


DOUBLE = ["linear-rows", "linear-unbatched", "conv1d", "conv2d", "conv3d"]


@paired("case wanted", {name: LAYERS[name] for name in DOUBLE}, {name: name for name in ("input", "weight", "bias")})
@each_correction
def test_second_derivatives_raise(case, wanted, correction):
    layer, x = case.layer(), case.input().requires_grad_()
    tensors = {"input": x, "weight": layer.weight, "bias": layer.bias}
    (first,) = torch.autograd.grad(apply(layer, x, correction).square().sum(), tensors[wanted], create_graph=True)
    with pytest.raises(RuntimeError, match=r"differentiated twice.*correction=None, detach"):
        torch.autograd.grad(first.sum(), layer.weight)
    model, x = through(layer, correction), x.detach()
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters):
        return functional_call(model, parameters, (x,)).square().sum()

    with pytest.raises(RuntimeError, match="differentiated twice"):
        jacrev(jacrev(loss))(parameters)
    with pytest.raises(RuntimeError, match="differentiated twice"):
        grad(lambda parameters: grad(loss)(parameters)["layer.weight"].sum())(parameters)


@each_correction
def test_first_derivatives_with_create_graph_are_the_corrected_ones_and_forward_mode_raises(correction):
    layer, x = nn.Linear(3, 2).double(), torch.randn(4, 3, dtype=torch.float64)
    wanted = gradients(apply(layer, x, correction), layer, torch.ones(4, 2, dtype=torch.float64))
    output = apply(layer, x, correction).sum()
    found = torch.autograd.grad(output, [layer.weight, layer.bias], create_graph=True)
    assert all(map(torch.equal, found, wanted.values()))
    with pytest.raises(RuntimeError, match="jvp"):
        torch.func.jvp(lambda x: apply(layer, x, correction), (x,), (x,))


def linear_and_convolution(x, conv_weight, conv_bias, weight, bias):
    hidden = functional.conv2d(x, conv_weight, conv_bias, padding=1, correction=Proportional()).relu()
    hidden = functional.linear(hidden.flatten(1), weight, bias, Disproportional())
    return functional.linear(hidden, weight[:, :5], None, BatchIdeal(0.1)).square().mean()


# pytest runs with warnings as errors; what inductor itself deprecates is none of ours.
@pytest.mark.filterwarnings("ignore::UserWarning:torch._inductor", "ignore::UserWarning:torch._dynamo")
def test_gradients_in_a_batch_are_a_loop_over_them_for_a_convolution_too():
    for rule in RULES.values():
        layer, x = attach(nn.Conv2d(4, 6, 3, groups=2).double(), rule), torch.randn(3, 4, 5, 5, dtype=torch.float64)
        several = torch.randn(2, 3, 6, 3, 3, dtype=torch.float64)
        found = torch.autograd.grad(layer(x), [*layer.parameters()], several, is_grads_batched=True)
        each = [torch.autograd.grad(layer(x), [*layer.parameters()], gradient) for gradient in several]
        for together, *alone in zip(found, *each, strict=True):
            assert relative_error(together, torch.stack(alone)) <= EXACT


@pytest.mark.parametrize(("backend", "half"), [("inductor", False), ("aot_eager", True)], ids=str)
def test_compiled_without_graph_breaks_gives_the_same_gradients(backend, half):
    """Under autocast too, in which torch.compile traces the backward pass of what was called within."""
    shapes = [(4, 3, 6, 6), (4, 3, 3, 3), (4,), (5, 144), (5,)]
    tensors = [torch.randn(shape, requires_grad=True) for shape in shapes]
    torch._dynamo.reset()
    compiled = torch.compile(linear_and_convolution, fullgraph=True, backend=backend)
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        plain_loss, loss = linear_and_convolution(*tensors), compiled(*tensors)
    wanted, found = torch.autograd.grad(plain_loss, tensors), torch.autograd.grad(loss, tensors)
    for one, other in zip(found, wanted, strict=True):
        assert relative_error(one, other) <= (2e-2 if half else COMPILED)


KINDS = {
    "linear": (lambda w, x, rule: functional.linear(x, w, None, rule), (3, 2, 5), (3, 4, 5)),
    "conv1d": (lambda w, x, rule: functional.conv1d(x, w, None, 1, 1, correction=rule), (3, 2, 2, 3), (3, 4, 2, 6)),
}


@paired("kind correction", KINDS, CORRECTIONS)
def test_compiled_vmap_keeps_the_correction_or_says_that_it_cannot(kind, correction):
    layer, weight_shape, input_shape = kind
    torch._dynamo.reset()
    input, start = torch.randn(input_shape).double(), torch.randn(weight_shape).double()

    def ensemble(rule):
        return vmap(lambda w, x: layer(w, x, rule).square().sum())

    def gradient(of):
        weight = start.clone().requires_grad_()
        of(weight, input).sum().backward()
        return weight.grad

    eager = gradient(ensemble(correction))
    assert relative_error(gradient(torch.compile(ensemble(correction), backend="aot_eager")), eager) <= EXACT
    # The plain gradient, which a lost correction would give, is another one.
    assert relative_error(gradient(ensemble(None)), eager) > 0.1
    torch._dynamo.reset()  # of what was compiled with breaks
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(ensemble(correction), fullgraph=True, backend="aot_eager")(start.requires_grad_(), input)
