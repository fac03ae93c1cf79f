"""One table of layers, three rules, three ways to a gradient: functional, attached, and explicit Jacobians.

All are held against the fuzzer's reference, which knows rows and nothing else.
"""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from adiv_optim import BatchIdeal, Correction, Disproportional, Proportional, attach, jacobian
from adiv_optim.functional.patches import Geometry, Patches
from tests.fuzz import corrected
from tests.fuzz.by_hand import outputs, rows
from tests.helpers.cases import CONV, FUNCTIONAL_CONV, LAYERS, apply, each_layer, gradients, linear, relative_error

EXACT = 1e-12  # float64, relative
#: A Cholesky factor squares the condition of the rows.
EXACT_SOLVE = 1e-9
VISIBLE = 1e-2  # what a wrong scale must exceed

RULES = {"proportional": Proportional(), "disproportional": Disproportional(), "batch-ideal": BatchIdeal(0.3)}
each_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)

pytestmark = pytest.mark.usefixtures("in_float64")


def by_hand(layer: Any, x: Tensor, g: Tensor, rule: Correction) -> dict[str, Tensor]:
    """Gradients of what is trained, group by group of a layer's outputs."""
    method = object.__new__(getattr(corrected, type(rule).__name__))
    method.settings = vars(rule)
    trained = {name: p for name, p in layer.named_parameters() if p.requires_grad}
    if not x.numel():
        return {name: torch.zeros_like(p) for name, p in trained.items()}
    groups = zip(rows(layer, x), outputs(layer, g), strict=True)
    parts = [method.of_group(*group, list(trained)) for group in groups]
    return {name: torch.cat([part[name] for part in parts]).view_as(p) for name, p in trained.items()}


def assert_near(found: dict[str, Tensor], wanted: dict[str, Tensor], rule: Correction) -> None:
    assert found.keys() == wanted.keys()
    for name in wanted:
        assert relative_error(found[name], wanted[name]) <= (EXACT_SOLVE if isinstance(rule, BatchIdeal) else EXACT)


@each_layer
@each_rule
def test_gradients_are_those_by_hand_and_of_jacobians_whatever_is_trained(case, rule):
    layer, x = case.layer(), case.input()
    for trained in ({"weight", "bias"}, {"weight"}, {"bias"}):
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_(name in trained)
        if layer.bias is None and trained == {"bias"}:
            continue
        output = apply(layer, x, rule)
        g = torch.randn_like(output)
        kept = x.clone(), g.clone()
        found = gradients(output, layer, g)
        assert torch.equal(x, kept[0])
        assert torch.equal(g, kept[1])
        assert_near(found, by_hand(layer, x, g, rule), rule)
        assert_near(found, jacobian.corrected_gradients(layer, lambda z, g: (z * g).sum(), x, g, rule), rule)
        if "weight" in trained:
            plain = gradients(layer(x), layer, g)["weight"]
            assert relative_error(found["weight"], plain) > VISIBLE, "the case shows nothing"


@each_layer
def test_forward_and_input_gradient_are_torchs_bit_for_bit_and_an_attached_layer_is_the_function(case):
    layer, x = case.layer(torch.float32), case.input(torch.float32).requires_grad_()
    plain = layer(x)
    g = torch.randn_like(plain)
    (wanted,) = torch.autograd.grad(plain, x, g, retain_graph=True)
    found = {}
    for rule in (None, *RULES.values()):
        output = apply(layer, x, rule)
        assert torch.equal(output, plain)
        assert torch.equal(torch.autograd.grad(output, x, g, retain_graph=True)[0], wanted)
        by_rule = torch.autograd.grad(output, [x, *layer.parameters()], g)  # with everything trained
        assert torch.equal(by_rule[0], wanted)
        found[rule] = by_rule[1:]
    by_torch = torch.autograd.grad(plain, list(layer.parameters()), g)
    assert all(map(torch.equal, found[None], by_torch))
    attach(layer, RULES["disproportional"])
    output = layer(x)
    assert torch.equal(output, plain)
    again = torch.autograd.grad(output, [x, *layer.parameters()], g)
    assert all(map(torch.equal, again, (wanted, *found[RULES["disproportional"]])))
    layer.requires_grad_(False)
    output = apply(layer, x, RULES["proportional"])
    assert torch.equal(output, plain)
    assert torch.equal(torch.autograd.grad(output, x, g)[0], wanted)
    assert not apply(layer, x.detach(), RULES["proportional"]).requires_grad


def across(tensor: Tensor) -> Tensor:
    """The same numbers, lying column by column."""
    return tensor.mT.contiguous().mT


def without(number: int) -> Any:
    """One row of zeros."""
    return lambda x, g: (x.index_fill(0, torch.tensor([number]), 0.0), g)


LINEAR, IMAGE = LAYERS["linear-rows"], CONV["conv2d-every-option"]
#: Layer, and what becomes of its input and output gradient.
SITUATIONS = {
    "broadcast-gradient": (LINEAR, lambda x, g: (x, torch.ones(()).expand_as(g))),
    "broadcast-gradient-conv": (IMAGE, lambda x, g: (x, torch.ones(()).expand_as(g))),
    "column-by-column": (LINEAR, lambda x, g: (across(x), across(g))),
    "column-by-column-conv": (IMAGE, lambda x, g: (across(x), across(g))),
    "zeros": (LINEAR, lambda x, g: (0 * x, g)),
    "zeros-no-bias": (LAYERS["linear-rows-no-bias"], lambda x, g: (0 * x, g)),
    "zeros-many-no-bias": (linear(5, 3, bias=False, shape=(20, 5)), lambda x, g: (0 * x, g)),
    "zeros-conv": (IMAGE, lambda x, g: (0 * x, g)),
    "one-row-of-zeros": (LINEAR, without(1)),
    "one-row-of-zeros-no-bias": (LAYERS["linear-rows-no-bias"], without(1)),
    "no-rows": (linear(5, 3, shape=(0, 5)), lambda x, g: (x, g)),
    **{f"no-samples-{name}": (CONV[name], lambda x, g: (x[:0], g[:0])) for name in ("conv1d", "conv2d", "conv3d")},
}


@pytest.mark.parametrize(("case", "change"), SITUATIONS.values(), ids=SITUATIONS)
def test_gradients_are_those_by_hand_however_rows_lie_and_where_there_is_nothing(case, change):
    layer, x = case.layer(), case.input()
    x, g = change(x, torch.randn_like(layer(x)))
    x.requires_grad_()
    names = [name for name, _ in layer.named_parameters()]
    for rule in RULES.values():
        *found, grad_x = torch.autograd.grad(apply(layer, x, rule), [*layer.parameters(), x], g)
        assert grad_x.shape == x.shape
        assert_near(dict(zip(names, found, strict=True)), by_hand(layer, x.detach(), g, rule), rule)


@each_rule
@pytest.mark.parametrize("case", [LINEAR, linear(5, 3, shape=(30, 5)), IMAGE], ids=["rows", "many-rows", "conv"])
def test_nan_and_inf_travel(case, rule):
    layer, x = case.layer(), case.input()
    g = torch.randn_like(layer(x))
    for where, bad in itertools.product((x, g), (torch.nan, torch.inf)):
        good = where.clone()
        where.view(-1)[0] = bad
        assert not gradients(apply(layer, x, rule), layer, g)["weight"].isfinite().all()
        where.copy_(good)


LAYOUTS = {
    "column-major": ((33, 70), (1, 0)),
    "one-column": ((40, 1), (1, 0)),
    "tokens-column-major": ((4, 17, 30), (2, 0, 1)),
    "tokens-across": ((4, 17, 30), (1, 0, 2)),
    "one-sample": ((1, 17, 30), (0, 2, 1)),
    "four-dimensions": ((2, 1, 9, 20), (3, 0, 1, 2)),
}


@pytest.mark.parametrize(("shape", "order"), LAYOUTS.values(), ids=LAYOUTS)
def test_input_gradient_is_bit_identical_however_the_input_lies(shape, order):
    """torch multiplies the gradient of a column-major input the other way round, which rounds differently."""
    places = [order.index(dim) for dim in range(len(order))]
    x = torch.randn([shape[dim] for dim in order], dtype=torch.float32).permute(places).requires_grad_()
    assert x.shape == shape
    g = torch.randn(*shape[:-1], 13, dtype=torch.float32)
    for bias in (True, False):
        layer = torch.nn.Linear(shape[-1], 13, bias=bias, dtype=torch.float32)
        for grad_output in (g, g[..., :1].expand_as(g)):
            found, wanted = (
                torch.autograd.grad(apply(layer, x, rule), x, grad_output)[0] for rule in (Proportional(), None)
            )
            assert torch.equal(found, wanted)


# What only convolutions have: their patches' norms, and channels_last.

PATCHES = {
    "plain": {"kernel_size": (3, 3)},
    "kernel-1": {"kernel_size": (1, 1)},
    "uneven": {"kernel_size": (2, 3), "stride": (2, 1), "padding": (1, 2)},
    "dilated": {"kernel_size": (2, 3), "dilation": (3, 2), "padding": (2, 2)},
    "stride-beyond-kernel": {"kernel_size": (2, 2), "stride": (3, 3)},
    "depthwise": {"kernel_size": (3, 2), "stride": (1, 2), "padding": (1, 1), "dilation": (1, 2), "groups": 4},
}


@pytest.mark.parametrize("options", PATCHES.values(), ids=PATCHES)
def test_squared_norms_of_patches_are_exact_patch_by_patch_over_sixteen_decades(options):
    """A running-sum or FFT box filter would lose the small patches beside the large, or go below zero."""
    x = torch.randn(3, 4, 7, 8) * torch.logspace(-16, 0, 8)
    given = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1, **options}
    kernel, groups = given["kernel_size"], given.pop("groups")
    geometry = Geometry(given["stride"], given["padding"], given["dilation"], groups)
    box = Patches(x, kernel, geometry).squared_norm()
    # unfold lists channels slowest, so a group's rows are contiguous.
    wanted = torch.nn.functional.unfold(x, **given).unflatten(1, (groups, -1)).square().sum(2).view_as(box)
    torch.testing.assert_close(box, wanted, rtol=2e-14, atol=0)
    x = torch.cat([torch.full((1, 1, 3, 4), 1e15), torch.zeros(1, 1, 3, 8)], 3)
    box = Patches(x, (3, 3), Geometry((1, 1), (0, 0), (1, 1), 1)).squared_norm()
    assert torch.equal(box[..., 4:], torch.zeros_like(box[..., 4:]))


@each_rule
def test_channels_last_stays_channels_last(rule):
    layer = torch.nn.Conv2d(4, 6, 3, padding=1).to(memory_format=torch.channels_last)
    x = torch.randn(2, 4, 5, 7).contiguous(memory_format=torch.channels_last).requires_grad_()
    for trained in (True, False):
        layer.bias.requires_grad_(trained)
        output = apply(layer, x, rule)
        output.backward(torch.randn(2, 6, 5, 7).contiguous(memory_format=torch.channels_last))
        for tensor in (output, x.grad, layer.weight.grad):
            assert tensor.is_contiguous(memory_format=torch.channels_last)
            assert not tensor.is_contiguous()


@pytest.mark.parametrize("padding", [1, (1,), (1, 1), [1, 1]], ids=repr)
def test_one_number_stands_for_every_axis(padding):
    x, weight = torch.randn(1, 2, 4, 4), torch.randn(3, 2, 3, 3)
    found = FUNCTIONAL_CONV[2](x, weight, None, padding, padding, padding, correction=Proportional())
    assert torch.equal(found, torch.nn.functional.conv2d(x, weight, None, padding, padding, padding))
