"""Every layer compiled in one graph, exported, and run from an ONNX file by onnxruntime."""

import copy
import pickle

import pytest
import torch
from torch import nn

from adiv_optim.layers import AffineLikeLinear, ChannelScale, DyISRU, DyT, IsotropicTanh, L2Norm, NormLikeLinear
from tests.helpers.covering import paired

CLOSE = 1e-6

LAYERS = {
    "affine-like": AffineLikeLinear(5, 4),
    "norm-like": NormLikeLinear(5, 4),
    "l2-norm": L2Norm(),
    "l2-norm-layerwise": L2Norm((1, 2, 3)),
    "channel-scale": ChannelScale(5),
    "channel-scale-of-images": ChannelScale(3, dim=1, per_channel=False),
    "dyt": DyT(5),
    "dyt-of-images": DyT(3, dim=1, per_channel=True, sqrt_d=True),
    "dyisru": DyISRU(5),
    "dyisru-of-images": DyISRU(3, dim=1, per_channel=True, sqrt_d=False),
    "isotropic-tanh": IsotropicTanh(),
    "isotropic-tanh-of-images": IsotropicTanh(dim=1),
}
some_layers = pytest.mark.parametrize("name", [name for name in LAYERS if not name.endswith("of-images")])
each_layer = pytest.mark.parametrize("name", LAYERS)


class Side(nn.Module):
    """All layers side by side on one input, so that one program holds them all."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict(copy.deepcopy(LAYERS))
        for parameter in self.parameters():
            nn.init.uniform_(parameter, 0.5, 1.5)

    def forward(self, x):
        return tuple(layer(x) for layer in self.layers.values())


def images(count=2):
    x = torch.randn(count, 3, 4, 5)
    x[0, 0, 0] = 0  # a row of zeros
    return x


def greatest_difference(found, wanted):
    assert len(found) == len(wanted) == len(LAYERS)
    return max((torch.as_tensor(one) - other).abs().max().item() for one, other in zip(found, wanted, strict=True))


def test_the_measure_sees_a_difference():
    model, x = Side().eval(), images()
    other = copy.deepcopy(model)
    other.layers["dyt-of-images"].alpha.data[1] += 1e-4
    with torch.no_grad():
        assert greatest_difference(other(x), model(x)) > CLOSE


def gradients(model, x):
    parameters = dict(model.named_parameters())
    loss = sum(output.square().sum() for output in model(x))
    return dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))


# What the compiler itself deprecates is none of ours.
@pytest.mark.filterwarnings("ignore::UserWarning:torch._inductor", "ignore::UserWarning:torch._dynamo")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_without_graph_breaks_equals_eager(backend):
    model, x = Side(), images()
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    assert greatest_difference(compiled(x), model(x)) <= CLOSE
    wanted, found = gradients(model, x), gradients(compiled, x)
    for (name, one), other in zip(wanted.items(), found.values(), strict=True):
        assert (one - other).abs().max() <= CLOSE * one.abs().max().clamp(min=1), name


def batched():
    return ({0: torch.export.Dim("batch")},)


def test_exported_program_equals_eager_for_other_batches():
    model, x = Side().eval(), images(7)
    program = torch.export.export(model, (images(),), dynamic_shapes=batched())
    with torch.no_grad():
        assert greatest_difference(program.module()(x), model(x)) <= CLOSE


def test_onnx_file_run_by_onnxruntime_equals_eager_for_other_batches(tmp_path):
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    model, x = Side().eval(), images(7)
    program = torch.onnx.export(model, (images(),), dynamic_shapes=batched(), dynamo=True, verbose=False)
    program.save(tmp_path / "layers.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "layers.onnx", providers=["CPUExecutionProvider"])
    (input,) = session.get_inputs()
    with torch.no_grad():
        assert greatest_difference(session.run(None, {input.name: x.numpy()}), model(x)) <= CLOSE


@paired("name dtype", {name: name for name in LAYERS}, {"float16": torch.float16, "bfloat16": torch.bfloat16})
def test_half_precision_keeps_the_dtype_and_is_close(name, dtype):
    layer, x = copy.deepcopy(LAYERS[name]), images()
    wanted = layer(x)
    output = layer.to(dtype)(x.to(dtype))
    assert output.dtype == dtype
    torch.testing.assert_close(output.float(), wanted, rtol=2e-2, atol=2e-2)


@some_layers
def test_autocast_is_close(name):
    layer, x = LAYERS[name], images()
    with torch.autocast("cpu", torch.bfloat16):
        output = layer(x)
    torch.testing.assert_close(output.float(), layer(x), rtol=3e-2, atol=3e-2)


@paired("name dtype", {name: name for name in LAYERS}, {"float16": torch.float16, "float32": torch.float32})
def test_zero_input_gives_finite_values_and_gradients(name, dtype):
    layer = copy.deepcopy(LAYERS[name]).to(dtype)
    x = torch.zeros(2, 3, 4, 5, dtype=dtype, requires_grad=True)
    output = layer(x)
    output.sum().backward()
    for tensor in (output, x.grad, *(parameter.grad for parameter in layer.parameters())):
        assert tensor.isfinite().all()


@each_layer
def test_second_derivatives_at_zero_rows_are_finite(name):
    layer, x = copy.deepcopy(LAYERS[name]).double(), torch.zeros(2, 3, 4, 5, dtype=torch.float64, requires_grad=True)
    output = layer(x)
    inputs = [x, *layer.parameters()]
    first = torch.autograd.grad((output + output.square()).sum(), inputs, create_graph=True)
    penalty = sum(gradient.square().sum() for gradient in first)
    assert penalty > 0 or isinstance(layer, L2Norm)
    for second in torch.autograd.grad(penalty, inputs, allow_unused=True) if penalty.requires_grad else ():
        assert second is None or second.isfinite().all()


@each_layer
def test_channels_last_gives_the_same(name):
    x = images()
    torch.testing.assert_close(LAYERS[name](x.to(memory_format=torch.channels_last)), LAYERS[name](x))


@each_layer
def test_vmap_over_inputs_gives_the_same(name):
    x = torch.randn(6, 2, 3, 4, 5)
    torch.testing.assert_close(torch.func.vmap(LAYERS[name])(x), torch.stack([LAYERS[name](one) for one in x]))


@some_layers
def test_copies_and_pickles_compute_the_same(name):
    layer, x = LAYERS[name], images()
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(twin(x), layer(x))
        assert repr(twin) == repr(layer)
