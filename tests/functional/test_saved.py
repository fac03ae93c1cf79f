"""What a corrected layer keeps for its backward pass: what torch's keeps, and nothing where nothing is trained."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, vmap

from adiv_optim import BatchIdeal, Proportional, attach

RULES = [Proportional(), BatchIdeal()]
LAYERS = {
    "linear": (lambda: nn.Linear(6, 6), (64, 6)),
    "conv": (lambda: nn.Conv2d(3, 3, 3, padding=1), (4, 3, 5, 5)),
}
each_rule = pytest.mark.parametrize("rule", RULES, ids=repr)


def kept(model, x):
    """How many numbers are kept, parameters and what is kept twice left out."""
    own, kept = {p.data_ptr() for p in model.parameters()}, {}

    def pack(tensor):
        if tensor.data_ptr() not in own:
            kept[tensor.data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(x)
    del output
    return sum(kept.values())


@pytest.mark.parametrize(("build", "shape"), LAYERS.values(), ids=LAYERS)
@each_rule
def test_layers_keep_what_torchs_keep_and_frozen_ones_no_input(build, shape, rule):
    x = torch.randn(shape)
    for trained in range(6):
        model = nn.Sequential(*(build() for _ in range(5)))
        for layer in model[trained:]:
            layer.requires_grad_(False)
        by_torch = kept(model, x)
        assert kept(attach(model, rule), x) == by_torch
    assert by_torch == 5 * x.numel(), "the count shows nothing"


def test_an_input_that_is_a_parameter_of_a_transform_is_still_corrected():
    """Within vmap a weight does not say that it is differentiated."""
    layer = nn.Linear(3, 2).requires_grad_(False)
    weights = {name: p.detach().expand(4, *p.shape) for name, p in layer.named_parameters()}
    x, attached = torch.randn(5, 3), attach(nn.Linear(3, 2), Proportional()).requires_grad_(False)

    def loss(weights):
        each = vmap(lambda one: functional_call(attached, one, (x,)))(weights)
        return each.square().sum()

    found = grad(loss)(weights)
    rows, output = x.double(), F.linear(x, layer.weight, layer.bias).double()
    scale = 1 / (rows.square().sum(1) + 1)
    wanted = (2 * output * scale[:, None]).mT @ rows
    for each in found["weight"]:
        assert torch.allclose(each.double(), wanted, rtol=1e-5)


def second_loss_behind_a_step(model, x):
    first, second = model(x).sum(), model(x).square().sum()
    first.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1
    model.zero_grad()
    second.backward()
    return model[0].weight.grad


@each_rule
def test_a_first_layer_may_be_stepped_on_between_two_losses_and_one_whose_input_needs_a_gradient_may_not(rule):
    """The weight is kept only where the input needs a gradient."""
    model, x = attach(nn.Sequential(nn.Linear(3, 2)), rule), torch.linspace(-1, 1, 12).view(4, 3)
    model(x).square().sum().backward()
    wanted = model[0].weight.grad
    model.zero_grad()
    assert torch.equal(second_loss_behind_a_step(model, x), wanted)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        second_loss_behind_a_step(model, x.requires_grad_())


@pytest.mark.parametrize("shape", [(2, 5, 4), (4,), (5, 4)])
def test_an_output_may_be_changed_in_place(shape):
    x, layer = torch.randn(shape), attach(nn.Linear(4, 3), Proportional())
    gradients = [torch.autograd.grad(act(layer(x)).sum(), layer.weight)[0] for act in (F.relu, F.relu_)]
    assert torch.equal(*gradients)
    assert gradients[0].any()
