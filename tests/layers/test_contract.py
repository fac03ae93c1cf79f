"""What every layer keeps to: derivatives, zeros, precisions, transforms, copies, compilers and files.

A layer's formula is in its own file.
"""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck, gradgradcheck
from torch.func import functional_call

from adiv_optim.layers import (
    AffineLikeLinear,
    ChannelScale,
    DyISRU,
    DyT,
    IsotropicTanh,
    L2Norm,
    MeanFieldNorm,
    NormLikeLinear,
    PatchNormConv1d,
    PatchNormConv2d,
    PatchNormConvTranspose1d,
    PatchNormConvTranspose2d,
    PatchNormConvTranspose3d,
)

CLOSE = 1e-6

#: Layers that take images of three channels, five wide, and tell samples apart.
IMAGES = {
    "affine-like": AffineLikeLinear(5, 4, alpha=0.7, beta=1.9),
    "norm-like": NormLikeLinear(5, 4),
    "norm-like-beta": NormLikeLinear(5, 4, False, alpha=3.0, beta=0.5),
    "l2-norm": L2Norm(),
    "l2-norm-layerwise": L2Norm((1, 2, 3)),
    "channel-scale": ChannelScale(5),
    "channel-scale-of-images": ChannelScale(3, dim=1, bias=False),
    "dyt": DyT(5),
    "dyt-of-images": DyT(3, dim=1, sqrt_d=True),
    "dyisru": DyISRU(5),
    "dyisru-of-images": DyISRU(3, dim=1, sqrt_d=False),
    "isotropic-tanh": IsotropicTanh(),
    "isotropic-tanh-of-images": IsotropicTanh(dim=(1, 2, 3)),
    "mean-field": MeanFieldNorm(nn.Tanh()),
    "mean-field-prelu": MeanFieldNorm(nn.PReLU(), center=False),
    "patch-norm": PatchNormConv2d(3, 4, 3, stride=2, padding=1, padding_mode="reflect"),
    "patch-norm-groups": PatchNormConv2d(3, 6, (3, 2), groups=3, form="norm-like", alpha=-3.0, beta=0.6),
    "patch-norm-transposed": PatchNormConvTranspose2d(
        3, 6, (3, 2), (2, 3), (1, 0), (1, 2), 3, dilation=(1, 2), form="norm-like"
    ),
}
#: Layers whose input has other dimensions, and a size of it; others have images.
OTHERS = {
    "patch-norm-1d-unbatched": (PatchNormConv1d(3, 4, 3, padding=2, padding_mode="circular", form="norm-like"), (3, 7)),
    "patch-norm-transposed-1d": (PatchNormConvTranspose1d(4, 6, 3, stride=2, padding=1), (2, 4, 5)),
    "patch-norm-transposed-3d": (
        PatchNormConvTranspose3d(2, 4, 2, (1, 2, 1), groups=2, form="norm-like"), (1, 2, 2, 2, 3),
    ),
}  # fmt: skip
LAYERS = {**{name: (layer, (2, 3, 4, 5)) for name, layer in IMAGES.items()}, **OTHERS}
each_layer = pytest.mark.parametrize("name", LAYERS)
each_of_images = pytest.mark.parametrize("name", IMAGES)


def drawn(layer, dtype=torch.float32):
    """A copy, with parameters drawn at random."""
    layer = copy.deepcopy(layer).to(dtype)
    for parameter in layer.parameters():
        nn.init.uniform_(parameter, 0.5, 1.5)
    return layer


def layer_and_input(name, dtype=torch.float32):
    layer, shape = LAYERS[name]
    return drawn(layer, dtype), torch.randn(shape, dtype=dtype)


@each_layer
def test_first_and_second_derivatives_pass_gradcheck_forward_ones_too(name):
    layer, x = layer_and_input(name, torch.float64)
    names = [name for name, _ in layer.named_parameters()]

    def call(x, *parameters):
        return functional_call(layer, dict(zip(names, parameters, strict=True)), (x,))

    inputs = (x.requires_grad_(), *layer.parameters())
    assert gradcheck(call, inputs, fast_mode=True, check_forward_ad=True)
    assert gradgradcheck(call, inputs, fast_mode=True)


@each_layer
def test_zero_input_gives_finite_values_and_first_and_second_derivatives(name):
    for dtype in (torch.float16, torch.float64):
        layer, x = layer_and_input(name, dtype)
        x = torch.zeros_like(x).requires_grad_()
        inputs, output = [x, *layer.parameters()], layer(x)
        first = torch.autograd.grad((output + output.square()).sum(), inputs, create_graph=True)
        assert all(tensor.isfinite().all() for tensor in (output, *first))
    penalty = sum(gradient.square().sum() for gradient in first)
    second = torch.autograd.grad(penalty, inputs, allow_unused=True) if penalty.requires_grad else ()
    assert all(tensor is None or tensor.isfinite().all() for tensor in second)


@each_layer
def test_lower_precision_is_kept_and_close_under_autocast_too(name):
    for dtype in (torch.float16, torch.bfloat16):
        layer, x = layer_and_input(name)
        wanted = layer(x)
        with torch.autocast("cpu", dtype):
            torch.testing.assert_close(layer(x).to(wanted), wanted, rtol=6e-2, atol=6e-2)
        layer, x = layer.to(dtype), x.to(dtype).requires_grad_()
        output = layer(x)
        torch.testing.assert_close(output.float(), wanted, rtol=6e-2, atol=6e-2)
        output.sum().backward()
        assert {tensor.dtype for tensor in (output, x.grad, *(p.grad for p in layer.parameters()))} == {dtype}


@each_of_images
def test_channels_last_gives_the_same_and_stays_so(name):
    layer, x = layer_and_input(name)
    last = x.to(memory_format=torch.channels_last)
    output = layer(last)
    torch.testing.assert_close(output, layer(x))
    if not isinstance(layer, nn.Linear):
        assert output.is_contiguous(memory_format=torch.channels_last)


@each_layer
def test_vmap_over_inputs_and_parameters_is_a_loop(name):
    layer, x = layer_and_input(name)
    x = torch.stack([x, -2 * x, 3 * x])
    torch.testing.assert_close(torch.vmap(layer)(x), torch.stack([layer(one) for one in x]))
    values = {name: torch.stack([p, p * 2, p + 1]).detach() for name, p in layer.named_parameters()}

    def loss(values, x):
        return functional_call(layer, values, (x,)).square().sum()

    derivative = torch.func.grad(loss, argnums=(0, 1))
    found, of_x = torch.vmap(derivative)(values, x)
    for k, one in enumerate(x):
        wanted, of_one = derivative({name: value[k] for name, value in values.items()}, one)
        torch.testing.assert_close(of_x[k], of_one, rtol=1e-4, atol=1e-5)
        for name in wanted:
            torch.testing.assert_close(found[name][k], wanted[name], rtol=1e-4, atol=1e-4)


@each_layer
def test_copies_and_pickles_compute_the_same_and_can_be_built_without_memory(name):
    layer, x = layer_and_input(name)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(twin(x), layer(x))
        assert repr(twin) == repr(layer)
    assert layer.to("meta")(x.to("meta")).is_meta


#: What stands in a layer's repr beside torch's own.
SHOWN = {
    "affine-like": "AffineLikeLinear(in_features=5, out_features=4, bias=True, alpha=0.7, beta=1.9)",
    "channel-scale-of-images": "ChannelScale((3,), dim=1, elementwise_affine=True, bias=False)",
    "dyt": "DyT((5,), dim=-1, elementwise_affine=True, bias=True, alpha=0.5, sqrt_d=False)",
    "isotropic-tanh-of-images": "IsotropicTanh(dim=(1, 2, 3))",
    "mean-field-prelu": "center=False, normalize=True, mean=0.299",
}


@pytest.mark.parametrize("name", SHOWN)
def test_repr_tells_what_was_set(name):
    assert SHOWN[name] in repr(LAYERS[name][0])


# All layers side by side on one input, so that one program holds them all.


class Side(nn.Module):
    def __init__(self, names=tuple(IMAGES)):
        super().__init__()
        self.layers = nn.ModuleDict({name: drawn(IMAGES[name]) for name in names})

    def forward(self, x):
        return tuple(layer(x) for layer in self.layers.values())


def images(count=2):
    x = torch.randn(count, 3, 4, 5)
    x[0, 0, 0] = 0  # a row of zeros
    return x


def greatest_difference(found, wanted):
    pairs = list(zip(found, wanted, strict=True))
    return max((torch.as_tensor(one) - other).abs().max().item() for one, other in pairs)


def gradients(model, x):
    parameters = dict(model.named_parameters())
    loss = sum(output.square().sum() for output in model(x))
    return dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))


#: A layer of every kind of arithmetic, for which inductor generates code.
GENERATED = ["norm-like", "l2-norm-layerwise", "dyt-of-images", "patch-norm-groups"]


# What the compiler itself deprecates is none of ours.
@pytest.mark.filterwarnings("ignore::UserWarning:torch._inductor", "ignore::UserWarning:torch._dynamo")
@pytest.mark.parametrize(("backend", "names"), [("aot_eager", [*IMAGES]), ("inductor", GENERATED)], ids=["all", "code"])
def test_compiled_without_graph_breaks_equals_eager(backend, names):
    model, x = Side(names), images()
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


@pytest.mark.filterwarnings("ignore::UserWarning")  # the exporter's
def test_onnx_file_run_by_onnxruntime_equals_eager_for_other_batches(tmp_path):
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    model, x = Side().eval(), images(7)
    program = torch.onnx.export(model, (images(),), dynamic_shapes=batched(), dynamo=True, verbose=False)
    program.save(tmp_path / "layers.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "layers.onnx", providers=["CPUExecutionProvider"])
    (input,) = session.get_inputs()
    with torch.no_grad():
        assert greatest_difference(session.run(None, {input.name: x.numpy()}), model(x)) <= 10 * CLOSE
