"""MeanFieldNorm: constants of closed forms, the wide limit of LayerNorm, and everything torch does to a module."""

import copy
import io
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import gradcheck

from adiv_optim.layers import MeanFieldNorm, convert
from tests.helpers.covering import paired

CLOSED, COMPILED = 1e-6, 1e-6

ACTIVATIONS = {
    "relu": nn.ReLU(),
    "leaky-relu": nn.LeakyReLU(0.2),
    "selu": nn.SELU(),
    "tanh": nn.Tanh(),
    "sigmoid": nn.Sigmoid(),
    "gelu": nn.GELU(),
    "silu": nn.SiLU(),
    "hardtanh": nn.Hardtanh(),
    "prelu": nn.PReLU(),
    "exp": torch.exp,
    "absolute": torch.abs,
    "function": F.softplus,
}
each_activation = pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=ACTIVATIONS)
SWITCHES = {
    "both": {},
    "center": {"normalize": False},
    "normalize": {"center": False},
    "neither": {"center": False, "normalize": False},
}
each_switch = pytest.mark.parametrize("switches", SWITCHES.values(), ids=SWITCHES)

#: Activation → mean and variance under a standard normal.
CONSTANTS = {
    "relu": (torch.relu, 1 / math.sqrt(math.tau), 0.5 - 1 / math.tau),
    "absolute": (torch.abs, 2 / math.sqrt(math.tau), 1 - 4 / math.tau),
    "exp": (torch.exp, math.sqrt(math.e), math.e**2 - math.e),
    "sin": (torch.sin, 0.0, (1 - math.exp(-2)) / 2),
    "square": (torch.square, 1.0, 2.0),
}


@paired("constants switches", CONSTANTS, SWITCHES)
def test_output_is_the_activation_less_its_mean_over_its_deviation(constants, switches):
    activation, mean, variance = constants
    x = torch.randn(4, 3, 5, dtype=torch.float64)
    wanted = activation(x)
    wanted = wanted - mean if switches.get("center", True) else wanted
    wanted = wanted / math.sqrt(variance) if switches.get("normalize", True) else wanted
    torch.testing.assert_close(MeanFieldNorm(activation, **switches)(x), wanted, rtol=0, atol=CLOSED)


@each_activation
def test_outputs_of_normal_inputs_have_mean_0_and_variance_1(activation):
    x = torch.randn(200_000)
    output = MeanFieldNorm(activation)(x).detach()
    assert output.mean().item() == pytest.approx(0, abs=0.01)
    assert output.var().item() == pytest.approx(1, abs=0.1)
    plain = activation(x).detach()
    assert abs(plain.mean()) > 0.05 or abs(plain.var() - 1) > 0.1 or isinstance(activation, nn.SELU)


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.Tanh(), nn.GELU()], ids=str)
def test_wide_layers_make_it_the_layer_norm_of_the_activation(activation):
    errors = []
    for width in (100, 10_000):
        x = F.layer_norm(torch.randn(64, width), (width,))
        difference = MeanFieldNorm(activation)(x) - F.layer_norm(activation(x), (width,))
        errors.append(difference.square().mean().sqrt().item())
    assert errors[1] < 0.02
    assert errors[1] < errors[0] / 5  # as 1/√width


def test_constant_activation_can_be_centred():
    assert torch.equal(MeanFieldNorm(torch.ones_like, normalize=False)(torch.randn(3)), torch.zeros(3))


def test_neither_step_is_the_activation_bit_for_bit():
    x = torch.randn(50)
    assert torch.equal(MeanFieldNorm(F.gelu, center=False, normalize=False)(x), F.gelu(x))


@paired("activation switches", ACTIVATIONS, SWITCHES)
def test_gradcheck_passes(activation, switches):
    layer = MeanFieldNorm(copy.deepcopy(activation), **switches).double()
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert gradcheck(layer, (x,))


def test_state_dict_is_that_of_the_activation():
    assert MeanFieldNorm(nn.ReLU()).state_dict() == {}
    layer = MeanFieldNorm(nn.PReLU())
    assert list(layer.state_dict()) == ["activation.weight"]
    layer(torch.randn(9)).sum().backward()
    assert layer.activation.weight.grad is not None


def test_constants_are_those_of_the_parameters_at_construction():
    prelu = nn.PReLU(init=0.0)
    layer = MeanFieldNorm(prelu)
    assert layer.mean == pytest.approx(MeanFieldNorm(nn.ReLU()).mean, abs=CLOSED)
    prelu.weight.data.fill_(0.9)
    assert layer.mean == pytest.approx(MeanFieldNorm(nn.ReLU()).mean, abs=CLOSED)
    assert MeanFieldNorm(prelu).mean < layer.mean / 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_output_keeps_the_dtype(dtype):
    layer, x = MeanFieldNorm(nn.PReLU()).to(dtype), torch.randn(50).to(dtype)
    assert layer(x).dtype == dtype
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(layer(x).double(), layer.double()(x.double()), rtol=4 * eps, atol=4 * eps)


def test_can_be_built_and_used_on_the_meta_device():
    with torch.device("meta"):
        layer = MeanFieldNorm(nn.ReLU())
        assert layer(torch.empty(3)).shape == (3,)
    assert layer.mean == MeanFieldNorm(nn.ReLU()).mean


def test_draws_nothing_and_leaves_the_default_dtype():
    state = torch.get_rng_state()
    MeanFieldNorm(nn.Tanh())
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_default_dtype() == torch.float32


def test_copies_and_pickles_compute_the_same():
    layer, x = MeanFieldNorm(nn.GELU(), center=False), torch.randn(5, 4)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(twin(x), layer(x))
        assert repr(twin) == repr(layer)
    assert "center=False, normalize=True, mean=0.282095, std=0.587915" in repr(layer)


def test_repr_names_a_function():
    assert repr(MeanFieldNorm(torch.tanh)).startswith("MeanFieldNorm(tanh, center=True, ")
    assert repr(MeanFieldNorm(nn.Tanh())).startswith("MeanFieldNorm(\n  center=True, ")


def test_vmap_and_functional_gradients():
    layer, x = MeanFieldNorm(nn.Tanh()), torch.randn(5, 4)
    torch.testing.assert_close(torch.vmap(layer)(x), layer(x))
    found = torch.vmap(torch.func.grad(lambda row: layer(row).sum()))(x)
    torch.testing.assert_close(found, (1 - x.tanh().square()) / layer.std)


def network():
    return nn.Sequential(
        nn.Linear(6, 8), MeanFieldNorm(nn.ReLU()), nn.Linear(8, 8), MeanFieldNorm(torch.tanh), nn.Linear(8, 3)
    )


@each_switch
def test_compiles_as_one_graph(switches):
    # In float64: in float32 torch's compiled GELU alone differs from its eager one by 1e-6.
    layer = MeanFieldNorm(nn.GELU(), **switches)
    x = torch.randn(1000, 8, dtype=torch.float64, requires_grad=True)
    compiled = torch.compile(layer, fullgraph=True)
    found = compiled(x)
    torch.testing.assert_close(found, layer(x), rtol=0, atol=COMPILED)
    (gradient,) = torch.autograd.grad(found.square().sum(), x)
    (wanted,) = torch.autograd.grad(layer(x).square().sum(), x)
    torch.testing.assert_close(gradient, wanted, rtol=COMPILED, atol=COMPILED)


def test_exports_with_a_free_batch_size():
    model = network()
    batch = torch.export.Dim("batch", min=2, max=1024)
    program = torch.export.export(model, (torch.randn(4, 6),), dynamic_shapes=({0: batch},))
    x = torch.randn(9, 6)
    torch.testing.assert_close(program.module()(x), model(x), rtol=0, atol=COMPILED)
    assert set(program.state_dict) == set(model.state_dict())


def test_onnx_runtime_computes_the_same():
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model, x = network().eval(), torch.randn(4, 6)
    buffer = io.BytesIO()
    torch.onnx.export(model, (x,), dynamo=True).save(buffer)
    session = runtime.InferenceSession(buffer.getvalue(), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), model(x), rtol=0, atol=1e-5)


def test_convert_puts_it_in_the_place_of_an_activation():
    model = convert(nn.Sequential(nn.Linear(4, 3), nn.ReLU()), {nn.ReLU: lambda old: MeanFieldNorm(old)})
    assert isinstance(model[1].activation, nn.ReLU)
    x = torch.randn(5, 4)
    torch.testing.assert_close(model(x), MeanFieldNorm(torch.relu)(model[0](x)))


ERRORS = {
    "name": ("relu", TypeError, "activation is 'relu'"),
    "softmax": (nn.Softmax(dim=-1), ValueError, "is not an elementwise activation"),
    "layer-norm": (nn.LayerNorm(5), ValueError, "is not an elementwise activation"),
    "random": (nn.Dropout(), ValueError, r"on chance \(then call .eval\(\) first\)"),
    "infinite-variance": (lambda x: (x * x / 4).exp(), ValueError, "no finite variance under a standard normal"),
    "infinite": (torch.reciprocal, ValueError, "do not settle: its variance is infinite"),
    "nan": (torch.sqrt, ValueError, "gives nan at z ="),
    "meta": (nn.PReLU(device="meta"), ValueError, "is on the meta device and has no values to integrate"),
    "constant": (torch.ones_like, ValueError, "activation is the constant 1, without a variance to divide by"),
}


@pytest.mark.parametrize(("activation", "error", "message"), ERRORS.values(), ids=ERRORS)
def test_activation_without_constants_is_refused(activation, error, message):
    with pytest.raises(error, match=message):
        MeanFieldNorm(activation)
