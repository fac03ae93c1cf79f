"""Half precision and autocast, on the CPU and, where there is one, on a CUDA device."""

import pytest
import torch
from torch import nn

from adiv_optim import BatchIdeal, Disproportional, Proportional, functional
from tests.helpers.cases import LAYERS, apply, each_correction, gradients, needs_cuda, relative_error
from tests.helpers.references import loop_gradients

# Unit round-off times a small factor for the few dozen products each sum holds.
TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 2e-6, torch.float64: 1e-12}
FLOAT16_MAX = 65504.0

DEVICES = ["cpu", pytest.param("cuda", marks=needs_cuda)]
SOME = ["linear-rows", "linear-narrow-to-wide", "conv2d-groups", "conv2d-no-bias"]

each_device = pytest.mark.parametrize("device", DEVICES)
each_dtype = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
some_layers = pytest.mark.parametrize("case", [LAYERS[name] for name in SOME], ids=SOME)


def float64_reference(layer, x, g, correction):
    exact = type(layer).__new__(type(layer))
    exact.__dict__.update(layer.__dict__)
    exact._parameters = {
        name: None if p is None else nn.Parameter(p.detach().double().cpu()) for name, p in layer._parameters.items()
    }
    return loop_gradients(exact, x.detach().double().cpu(), g.double().cpu(), correction)


@each_device
@some_layers
@each_dtype
def test_gradients_keep_the_dtype_and_are_close_to_float64(device, case, dtype):
    correction = Disproportional()
    layer, x = case.layer(dtype).to(device), case.input(dtype).to(device)
    output = apply(layer, x, correction)
    g = torch.randn_like(output)
    found = gradients(output, layer, g)
    wanted = float64_reference(layer, x, g, correction)
    assert found.keys() == wanted.keys()
    for name in wanted:
        assert found[name].dtype == dtype
        assert relative_error(found[name].cpu(), wanted[name]) <= TOLERANCE[dtype], name


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


@each_device
@pytest.mark.parametrize("shape", [(64, 3), (3, 64)], ids=["scale-output-gradient", "scale-input"])
@each_correction
def test_float16_row_whose_squared_norm_overflows_float16(device, shape, correction):
    layer = nn.Linear(*shape).to(device, torch.float16)
    x = torch.full((2, shape[0]), 400.0, dtype=torch.float16, device=device)
    x[1] = 0.5
    assert x[0].double().square().sum() > FLOAT16_MAX
    g = torch.randn(2, shape[1], device=device).half()
    found = gradients(apply(layer, x, correction), layer, g)
    wanted = float64_reference(layer, x, g, correction)
    for name in wanted:
        assert found[name].isfinite().all()
        assert relative_error(found[name].cpu(), wanted[name]) <= TOLERANCE[torch.float16], name


@each_correction
def test_float16_patch_whose_squared_norm_overflows_float16(correction):
    layer = nn.Conv2d(3, 4, 3).half()
    x = torch.randn(1, 3, 5, 5).half()
    x[..., :2] = 200.0
    g = torch.randn(1, 4, 3, 3).half()
    found = gradients(apply(layer, x, correction), layer, g)
    wanted = float64_reference(layer, x, g, correction)
    for name in wanted:
        assert relative_error(found[name], wanted[name]) <= TOLERANCE[torch.float16], name


@each_correction
def test_float16_row_so_small_that_the_scale_overflows_float16(correction):
    # 1/|x|² is far beyond 65504, x/|x|² is not.
    layer = nn.Linear(4, 3, bias=False).half()
    x = torch.full((1, 4), 1e-3).half()
    g = torch.ones(1, 3).half()
    found = gradients(apply(layer, x, correction), layer, g)["weight"]
    assert relative_error(found, float64_reference(layer, x, g, correction)["weight"]) <= TOLERANCE[torch.float16]


@each_correction
def test_float16_patch_so_small_that_the_scale_overflows_float16(correction):
    layer = nn.Conv2d(1, 3, 2, bias=False).half()
    x = torch.full((1, 1, 2, 2), 1e-3).half()
    g = torch.ones(1, 3, 1, 1).half()
    found = gradients(apply(layer, x, correction), layer, g)["weight"]
    assert relative_error(found, float64_reference(layer, x, g, correction)["weight"]) <= TOLERANCE[torch.float16]


@pytest.mark.parametrize("kind", ["linear", "conv2d"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@each_correction
def test_float16_tiny_row_does_not_wipe_out_the_gradient_of_another(kind, bias, correction):
    # The rows meet different weights, so the second one's gradient owes nothing to how small the first one is.
    layer = (nn.Linear(2, 3, bias=bias) if kind == "linear" else nn.Conv2d(2, 3, 1, bias=bias)).half()
    shape = (2, 2) if kind == "linear" else (2, 2, 1, 1)
    x = torch.tensor([[1e-3, 0.0], [0.0, 1.0]]).half().view(shape)
    g = torch.full((2, 3), 1e-2).half().view(2, 3, *shape[2:])
    found = gradients(apply(layer, x, correction), layer, g)["weight"]
    wanted = float64_reference(layer, x, g, correction)["weight"]
    assert relative_error(found[:, 1], wanted[:, 1]) <= TOLERANCE[torch.float16]


@each_correction
def test_float32_row_whose_squared_norm_underflows_counts_as_zero_and_stays_finite(correction):
    layer = nn.Linear(4, 3, bias=False)
    x = torch.full((1, 4), 1e-30)
    found = gradients(apply(layer, x, correction), layer, torch.ones(1, 3))["weight"]
    assert found.isfinite().all()


AUTOCAST = [
    ("cpu", torch.bfloat16),
    ("cpu", torch.float16),
    pytest.param("cuda", torch.bfloat16, marks=needs_cuda),
    pytest.param("cuda", torch.float16, marks=needs_cuda),
]


@pytest.mark.parametrize(("device", "dtype"), AUTOCAST)
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
    found = gradients(output, layer, g)
    wanted = float64_reference(layer, x, g, correction)
    for name in wanted:
        assert found[name].dtype == torch.float32
        assert relative_error(found[name].cpu(), wanted[name]) <= TOLERANCE[dtype], name


def test_autocast_leaves_float64_alone():
    correction = Proportional()
    layer, x = nn.Linear(5, 3).double(), torch.randn(4, 5, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        plain, output = layer(x), apply(layer, x, correction)
    assert output.dtype == plain.dtype == torch.float64
    assert torch.equal(output, plain)


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


def test_autocast_regions_can_be_nested_and_disabled():
    correction = Proportional()
    layer, x = nn.Linear(5, 3), torch.randn(4, 5)
    with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False):
        output = apply(layer, x, correction)
    assert output.dtype == torch.float32
    assert torch.equal(output, layer(x))


@needs_cuda
@pytest.mark.parametrize("name", ["linear-rows", "conv2d-every-option", "conv3d"])
def test_cuda_gives_the_cpus_gradients(name):
    case, correction = LAYERS[name], Disproportional()
    layer, x = case.layer(), case.input()
    output = apply(layer, x, correction)
    g = torch.randn_like(output)
    on_cpu = gradients(output, layer, g)
    layer.cuda()
    on_cuda = gradients(apply(layer, x.cuda(), correction), layer, g.cuda())
    for key in on_cpu:
        assert relative_error(on_cuda[key].cpu(), on_cpu[key]) <= TOLERANCE[torch.float64]
