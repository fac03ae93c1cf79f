"""A layer without anything to train is torch's own: it keeps no input, and code that works in place behind it works."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, vmap

from adiv_optim import BatchIdeal, Proportional, attach
from tests.helpers.cases import LAYERS, apply

KINDS = {"linear": lambda: nn.Linear(6, 6), "conv": lambda: nn.Conv2d(3, 3, 3, padding=1)}
INPUTS = {"linear": (64, 6), "conv": (4, 3, 5, 5)}


def kept_for_backward(model, x):
    """Numbers that are kept, parameters and what is kept twice left out."""
    own, kept = {p.data_ptr() for p in model.parameters()}, {}

    def pack(tensor):
        if tensor.data_ptr() not in own:
            kept[tensor.data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(x)
    del output
    return sum(kept.values())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", [Proportional(), BatchIdeal()], ids=repr)
def test_frozen_layers_keep_no_input(kind, rule):
    def network(first):
        model = nn.Sequential(*(KINDS[kind]() for _ in range(5)))
        for layer in model[first:]:
            layer.requires_grad_(False)
        return model

    x = torch.randn(INPUTS[kind])
    assert kept_for_backward(attach(network(1), rule), x) == kept_for_backward(network(1), x)
    assert kept_for_backward(attach(network(5), rule), x) == 5 * x.numel(), "the count shows nothing"


class AddedTo(nn.Module):
    def __init__(self, trained):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(trained)

    def forward(self, x):
        x = self.first(x)
        return x.add_(self.second(x))


def test_the_input_of_a_frozen_layer_may_be_changed_in_place():
    model, x = AddedTo(False), torch.randn(3, 4)
    model(x).sum().backward()
    wanted = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    attach(model, Proportional())(x).sum().backward()
    assert {name for name, p in model.named_parameters() if p.grad is not None} == wanted.keys()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        attach(AddedTo(True), Proportional())(x).sum().backward()


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")  # torch's own, of torch's layer
@pytest.mark.parametrize("case", LAYERS.values(), ids=LAYERS)
def test_output_and_input_gradient_of_a_frozen_layer_are_torchs(case):
    layer, x = case.layer().requires_grad_(False), case.input().requires_grad_()
    found, wanted = apply(layer, x, Proportional()), layer(x)
    assert torch.equal(found, wanted)
    g = torch.randn_like(wanted)
    (own,), (other,) = (torch.autograd.grad(output, x, g) for output in (found, wanted))
    assert torch.equal(own, other)


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
