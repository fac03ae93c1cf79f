"""PatchNorm convolutions under torch's tools: precision, copies, state dicts, compile, export and ONNX."""

import copy
import pickle

import pytest
import torch
from torch import nn

from adiv_optim.layers import PatchNormConv2d, PatchNormConvTranspose2d
from tests.helpers.covering import paired
from tests.helpers.patch_norm import CASES, CLASSES, FORMS, PLAIN, build, reference

each_class = pytest.mark.parametrize("case", CLASSES.values(), ids=CLASSES)
each_class_in_some_form = paired("case form", CLASSES, FORMS)
both_forms = pytest.mark.parametrize("form", [FORMS["affine-like"], FORMS["norm-like"]], ids=["affine", "norm"])

CLOSE = 1e-6


@pytest.mark.parametrize("kind", PLAIN, ids=lambda kind: kind.__name__)
def test_arguments_by_position_are_those_of_torch(kind):
    transposed = issubclass(kind, (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d))
    arguments = (4, 6, 3, 2, 1, 1, 2, False, 2) if transposed else (4, 6, 3, 2, 1, 2, 2, False, "reflect")
    ours, plain = kind(*arguments), PLAIN[kind](*arguments)
    assert ours.extra_repr() == f"{plain.extra_repr()}, form='affine-like', alpha=1.0, beta=1.0, eps=1e-12"


@each_class
def test_weights_are_interchangeable_with_torch(case):
    kind, sizes, options, _ = case
    ours, plain = kind(*sizes, **options), PLAIN[kind](*sizes, **options)
    plain.load_state_dict(ours.state_dict())
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter, ours.get_parameter(name))
    ours.load_state_dict(PLAIN[kind](*sizes, **options).state_dict())
    assert not torch.equal(ours.weight, plain.weight)


@each_class_in_some_form
def test_copies_and_pickles_compute_the_same(case, form):
    layer, x = build(case, form)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(twin(x), layer(x))
        assert repr(twin) == repr(layer)
    for name, value in form.items():
        assert f"{name}={value!r}" in repr(layer)


@paired("form case", FORMS, {name: CASES[name] for name in ("2d-groups", "transposed-2d")})
def test_channels_last_is_kept(case, form):
    layer, x = build(case, form)
    wanted = layer(x)
    layer, x = layer.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    x.requires_grad_()
    output = layer(x)
    assert output.is_contiguous(memory_format=torch.channels_last)
    assert not output.is_contiguous()
    torch.testing.assert_close(output, wanted)
    output.sum().backward()
    assert x.grad.is_contiguous(memory_format=torch.channels_last)


@paired("case form dtype", CLASSES, FORMS, {str(d): d for d in (torch.float16, torch.bfloat16, torch.float64)})
def test_output_and_gradients_keep_the_dtype(case, form, dtype):
    layer, x = build(case, form)
    wanted = layer(x)
    layer, x = layer.to(dtype), x.to(dtype).requires_grad_()
    output = layer(x)
    output.sum().backward()
    assert {tensor.dtype for tensor in (output, x.grad, layer.weight.grad)} == {dtype}
    tolerance = {torch.float16: 1e-2, torch.bfloat16: 6e-2}.get(dtype, 1e-5)
    torch.testing.assert_close(output.float(), wanted, rtol=tolerance, atol=tolerance)


@paired("form kind", FORMS, {kind.__name__: kind for kind in (PatchNormConv2d, PatchNormConvTranspose2d)})
@pytest.mark.parametrize("size", [2e-6, 300.0, 10000.0], ids=str)
def test_float16_patches_whose_norms_float16_cannot_hold(kind, form, size):
    # |x|² exceeds 65504 above 256, and 1/|x| does below 1.5e-5; Wx itself is representable.
    layer = kind(3, 4, 1, **form).half()
    x = (size * torch.tensor([1.0, 0.5, -1.0])).half().view(1, 3, 1, 1)
    output = layer(x)
    assert output.dtype == torch.float16
    # At 2e-6 the convolution's own output has few bits left, and W x is all that is lost.
    tolerance = 2e-1 if size < 1e-3 else 4e-3
    torch.testing.assert_close(output.double(), reference(layer.double(), x.double()), rtol=tolerance, atol=tolerance)


@both_forms
def test_autocast_gives_the_lower_precision_and_is_close(form):
    layer, x = build(CASES["2d-groups"], form)
    with torch.autocast("cpu", torch.bfloat16):
        output = layer(x)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.float(), layer(x), rtol=3e-2, atol=3e-2)


def gradients(call, layer, x, g):
    x = x.clone().requires_grad_()
    output = call(x)
    return (output.detach(), *torch.autograd.grad(output, [x, *layer.parameters()], g))


COMPILED = [
    ("aot_eager", "2d-reflect", "norm-like"),
    ("aot_eager", "transposed-2d-oblong", "affine-like"),
    ("inductor", "2d-groups", "affine-like"),
    ("inductor", "transposed-1d", "norm-like"),
]


@pytest.mark.parametrize(("backend", "case", "form"), COMPILED)
def test_compiled_without_graph_breaks_is_the_same(backend, case, form):
    layer, x = build(CASES[case], FORMS[form])
    g = torch.randn_like(layer(x))
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    for ours, eager in zip(gradients(compiled, layer, x, g), gradients(layer, layer, x, g), strict=True):
        assert (ours - eager).abs().max() <= CLOSE * eager.abs().max()


@paired("case form", CLASSES, {name: FORMS[name] for name in ("affine-like", "norm-like")})
def test_exported_program_is_the_same_for_every_batch_size(case, form):
    kind, sizes, options, shape = case
    layer = kind(*sizes, **options, **form).eval()
    shape = shape[-len(layer.kernel_size) - 1 :]
    program = torch.export.export(layer, (torch.randn(3, *shape),), dynamic_shapes=({0: torch.export.Dim("batch")},))
    for batch in (2, 5):
        x = torch.randn(batch, *shape)
        assert (program.module()(x) - layer(x)).abs().max() <= CLOSE


@pytest.mark.filterwarnings("ignore::UserWarning")  # the exporter's
@pytest.mark.parametrize(
    ("case", "form"),
    [
        ("transposed-2d-oblong", "affine-like"),
        ("2d-groups", "norm-like-alpha-beta"),
    ],
)
def test_onnx_file_computes_the_same(case, form, tmp_path):
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    layer, x = build(CASES[case], FORMS[form])
    torch.onnx.export(layer.eval(), (x,), tmp_path / "layer.onnx", dynamo=True, verbose=False)
    session = runtime.InferenceSession(tmp_path / "layer.onnx")
    (output,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert (torch.from_numpy(output) - layer(x)).abs().max() <= CLOSE
