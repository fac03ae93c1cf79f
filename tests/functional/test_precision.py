"""Half precision and autocast, on the CPU and, where there is one, on a CUDA device."""

import copy

import pytest
import torch
from torch import nn

from adiv_optim import BatchIdeal, Disproportional, Proportional, functional
from tests.functional.test_reference import by_hand
from tests.helpers.cases import LAYERS, apply, each_correction, gradients, relative_error

# Unit round-off times a small factor for the few dozen products each sum holds.
TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 2e-6, torch.float64: 1e-12}

pytestmark = pytest.mark.usefixtures("in_float64")

DEVICES = ["cpu", "cuda"][: 1 + torch.cuda.is_available()]
SOME = ["linear-rows", "linear-narrow-to-wide", "conv2d-groups", "conv2d-no-bias"]

each_device = pytest.mark.parametrize("device", DEVICES)
each_dtype = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
some_layers = pytest.mark.parametrize("case", [LAYERS[name] for name in SOME], ids=SOME)


def float64_reference(layer, x, g, correction):
    return by_hand(copy.deepcopy(layer).double().cpu(), x.detach().double().cpu(), g.double().cpu(), correction)


def assert_near_float64(found, layer, x, g, correction, tolerance):
    wanted = float64_reference(layer, x, g, correction)
    assert found.keys() == wanted.keys()
    for name in wanted:
        assert found[name].dtype == layer.weight.dtype
        assert relative_error(found[name].cpu(), wanted[name]) <= tolerance, name


@each_device
@some_layers
@each_dtype
def test_gradients_keep_the_dtype_and_are_close_to_float64(device, case, dtype):
    correction = Disproportional()
    layer, x = case.layer(dtype).to(device), case.input(dtype).to(device)
    output = apply(layer, x, correction)
    g = torch.randn_like(output)
    assert_near_float64(gradients(output, layer, g), layer, x, g, correction, TOLERANCE[dtype])


@pytest.mark.parametrize("rule", [Proportional(), Disproportional()], ids=repr)
@pytest.mark.parametrize("stack", [False, True], ids=["layer", "stack"])
def test_one_huge_activation_leaves_the_other_columns_their_gradient_in_float16(rule, stack):
    """The others times s, 1/3000² of the row's largest entry, lie below what float16 can hold."""
    layer = nn.Linear(64, 32)
    x = torch.cat([torch.full((48, 1), 3000.0), torch.randn(48, 63)], 1).half()
    g = (8 * torch.randn(48, 32)).half()
    wanted = float64_reference(layer.half(), x, g, rule)["weight"][:, 1:]
    if stack:
        weights = layer.weight.detach().expand(2, -1, -1).clone().requires_grad_()
        output = torch.vmap(lambda weight: functional.linear(x, weight, layer.bias, rule))(weights)
        output.backward(g.expand_as(output))
        found = weights.grad
    else:
        apply(layer, x, rule).backward(g)
        found = layer.weight.grad[None]
    for each in found:
        assert relative_error(each[:, 1:], wanted) <= 1e-2  # subnormal results have fewer bits
    rounded = (x.double() / x.double().square().sum(1, keepdim=True)).half()  # what plain rounding would contract
    assert relative_error((g.double().mT @ rounded.double())[:, 1:], wanted) > 0.05, "the case shows nothing"


@each_correction
def test_bfloat16_bias_gradient_of_a_convolution_is_rounded_once(correction):
    """As that of a linear layer is: neither the rescaled gradients nor the sums of parts are rounded to bfloat16."""
    layer, x = nn.Conv2d(4, 64, 1).bfloat16(), torch.randn(64, 4, 32, 32).bfloat16()  # a gradient of eight parts
    output = apply(layer, x, correction)
    g = torch.randn_like(output)
    found = gradients(output, layer, g)
    rows, grad_rows = (tensor.movedim(1, -1).flatten(0, -2).double() for tensor in (x, g))
    scales = correction.scales({"weight": rows.square().sum(1), "bias": torch.ones(len(rows)).double()})
    wanted = grad_rows.mT @ scales["bias"]
    assert ((found["bias"] - wanted).abs() <= 2**-8 * wanted.abs()).all()


def tiny_beside_another(build, *spatial):
    """Rows that meet different weights, so that the second's gradient owes nothing to how small the first is."""
    x = torch.tensor([[1e-3, 0.0], [0.0, 1.0]]).view(2, 2, *spatial)
    return build, x, torch.full((2, 3, *spatial), 1e-2)


def overflowing(wide, narrow):
    """A row whose squared norm passes 65504, where float16 ends, and an ordinary one."""
    x = torch.full((2, wide), 400.0)
    x[1] = 0.5
    return lambda: nn.Linear(wide, narrow), x, torch.linspace(-1, 2, 2 * narrow).view(2, narrow)


#: Of tiny rows 1/|x|² is far beyond 65504, x/|x|² is not.
EXTREME = {
    "overflow-scale-gradient": overflowing(64, 3),
    "overflow-scale-input": overflowing(3, 64),
    "overflow-patch": (
        lambda: nn.Conv2d(3, 4, 3), torch.linspace(-1, 2, 75).view(1, 3, 5, 5).index_fill(3, torch.tensor([0, 1]), 200),
        torch.linspace(-1, 2, 36).view(1, 4, 3, 3),
    ),
    "row-below-a-power-of-float16": (
        lambda: nn.Linear(4, 3, bias=False), torch.full((1, 4), 3e-6), torch.full((1, 3), 1e-3)
    ),
    "tiny-patch": (lambda: nn.Conv2d(1, 3, 2, bias=False), torch.full((1, 1, 2, 2), 1e-3), torch.ones(1, 3, 1, 1)),
    "tiny-row-beside-another": tiny_beside_another(lambda: nn.Linear(2, 3)),
    "tiny-row-beside-another-no-bias": tiny_beside_another(lambda: nn.Linear(2, 3, bias=False)),
    "tiny-patch-beside-another": tiny_beside_another(lambda: nn.Conv2d(2, 3, 1), 1, 1),
    "tiny-patch-beside-another-no-bias": tiny_beside_another(lambda: nn.Conv2d(2, 3, 1, bias=False), 1, 1),
}  # fmt: skip


@each_device
@pytest.mark.parametrize(("build", "x", "g"), EXTREME.values(), ids=EXTREME)
@each_correction
def test_float16_holds_rows_whose_norms_or_scales_it_cannot_hold(device, build, x, g, correction):
    layer, x, g = build().to(device, torch.float16), x.half().to(device), g.half().to(device)
    found = gradients(apply(layer, x, correction), layer, g)
    assert_near_float64(found, layer, x, g, correction, TOLERANCE[torch.float16])
    if len(x) == 2:  # every column by itself: the largest must not hide the others
        wanted = float64_reference(layer, x, g, correction)["weight"]
        for one, other in zip(found["weight"].cpu().unbind(1), wanted.unbind(1), strict=True):
            assert relative_error(one, other) <= TOLERANCE[torch.float16]


@each_correction
def test_float32_row_whose_squared_norm_underflows_counts_as_zero_and_stays_finite(correction):
    layer, x = nn.Linear(4, 3, bias=False).float(), torch.full((1, 4), 1e-30).float()
    found = gradients(apply(layer, x, correction), layer, torch.ones(1, 3).float())["weight"]
    assert found.isfinite().all()


@each_device
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@some_layers
def test_autocast_forward_is_torchs_and_gradients_keep_the_parameters_dtype(device, dtype, case):
    correction = Disproportional()
    layer = case.layer(torch.float32).to(device)
    x = case.input(torch.float32).to(device).requires_grad_()
    with torch.autocast(device, dtype):
        plain = layer(x)
        output = apply(layer, x, correction)
    assert output.dtype == plain.dtype == dtype
    assert torch.equal(output, plain)
    g = torch.randn_like(output)
    (wanted_input,) = torch.autograd.grad(plain, x, g, retain_graph=True)
    (found_input,) = torch.autograd.grad(output, x, g, retain_graph=True)
    assert torch.equal(found_input, wanted_input)
    assert_near_float64(gradients(output, layer, g), layer, x, g, correction, TOLERANCE[dtype])


def test_autocast_leaves_float64_alone_and_can_be_nested_and_disabled():
    for dtype, inside in ((torch.float64, True), (torch.float32, False)):
        layer, x = nn.Linear(5, 3, dtype=dtype), torch.randn(4, 5, dtype=dtype)
        with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", torch.bfloat16, enabled=inside):
            output = apply(layer, x, Proportional())
        assert output.dtype == dtype
        assert torch.equal(output, layer(x))


@pytest.mark.parametrize("name", ["linear-rows", "conv2d-groups"])
@pytest.mark.parametrize("correction", [Proportional(), BatchIdeal()], ids=["proportional", "batch-ideal"])
def test_backward_inside_autocast_gives_the_gradients_of_backward_outside(name, correction):
    """Scales and solves stay in float32 there: a Gram matrix in bfloat16 made those of `BatchIdeal` 80 % wrong."""
    layer, x = LAYERS[name].layer(torch.float32), LAYERS[name].input(torch.float32)
    found = []
    for inside in (True, False):
        with torch.autocast("cpu", torch.bfloat16):
            output = apply(layer, x, correction)
            g = torch.ones_like(output)
            if inside:
                found.append(gradients(output, layer, g))
        if not inside:
            found.append(gradients(output, layer, g))
    assert all(torch.equal(found[0][name], found[1][name]) for name in ("weight", "bias"))
