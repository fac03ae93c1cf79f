"""ChannelScale: the half of torch's normalisers that has parameters."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck

from adiv_optim.layers import ChannelScale, L2Norm

pytestmark = pytest.mark.usefixtures("in_float64")

EXACT = 1e-12

#: torch's normaliser with parameters, itself without, the scaling, an input.
NORMALISERS = {
    "layer-norm": (nn.LayerNorm(5), nn.LayerNorm(5, elementwise_affine=False), ChannelScale(5), (2, 3, 5)),
    "layer-norm-of-images": (
        nn.LayerNorm((3, 4, 4)), nn.LayerNorm((3, 4, 4), elementwise_affine=False), ChannelScale((3, 4, 4)),
        (2, 3, 4, 4),
    ),
    "rms-norm": (
        nn.RMSNorm(5, eps=1e-6), nn.RMSNorm(5, eps=1e-6, elementwise_affine=False), ChannelScale(5, bias=False), (2, 5),
    ),
    "batch-norm": (nn.BatchNorm2d(3), nn.BatchNorm2d(3, affine=False), ChannelScale(3, dim=1), (2, 3, 4, 4)),
    "batch-norm-of-rows": (nn.BatchNorm1d(3), nn.BatchNorm1d(3, affine=False), ChannelScale(3, dim=1), (4, 3)),
    "group-norm": (nn.GroupNorm(1, 4), nn.GroupNorm(1, 4, affine=False), ChannelScale(4, dim=-3), (2, 4, 3, 3)),
}  # fmt: skip


@pytest.mark.parametrize(("whole", "plain", "scale", "shape"), NORMALISERS.values(), ids=NORMALISERS)
def test_normaliser_without_parameters_then_scale_is_the_normaliser(whole, plain, scale, shape):
    whole, x = copy.deepcopy(whole).double(), torch.randn(shape)
    for parameter in whole.parameters():
        nn.init.normal_(parameter)
    parts = nn.Sequential(plain, copy.deepcopy(scale)).double()
    parts[1].load_state_dict(dict(whole.named_parameters()))
    torch.testing.assert_close(parts(x), whole(x), rtol=EXACT, atol=EXACT)
    # The test can fail: without the scaling the output is another.
    assert (plain(x) - whole(x)).abs().max() > 1e-2


def test_starts_as_the_identity():
    x = torch.randn(2, 5)
    for layer in (ChannelScale(5), ChannelScale(5, per_channel=False), ChannelScale(5, elementwise_affine=False)):
        assert torch.equal(layer(x), x)


def test_one_number_for_all_channels():
    layer, x = ChannelScale(3, dim=1, per_channel=False), torch.randn(2, 3, 4, 4)
    layer.weight.data.fill_(2.0)
    layer.bias.data.fill_(-1.0)
    assert [tuple(parameter.shape) for parameter in layer.parameters()] == [(1,), (1,)]
    torch.testing.assert_close(layer(x), 2 * x - 1, rtol=EXACT, atol=EXACT)


def test_composes_with_any_normaliser():
    # The step an affine layer with parameters takes is that of appendix A, Eq. 38: γ and β are trained.
    model, x = nn.Sequential(L2Norm(), ChannelScale(5), nn.Linear(5, 2)), torch.randn(4, 5)
    before = model(x)
    before.square().sum().backward()
    torch.optim.SGD(model[1].parameters(), lr=0.1).step()
    assert (model(x) - before).abs().max() > 1e-3


@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_gradcheck_passes(per_channel, bias):
    layer = ChannelScale(3, dim=1, per_channel=per_channel, bias=bias)
    x = torch.randn(2, 3, 2, 2, requires_grad=True)
    names = [name for name, _ in layer.named_parameters()]

    def call(x, *parameters):
        return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (x,))

    assert gradcheck(call, (x, *layer.parameters()))


def test_zero_rows_give_beta_and_pass_the_gradient_times_gamma():
    layer, x = ChannelScale(4), torch.zeros(2, 4, requires_grad=True)
    nn.init.normal_(layer.weight)
    nn.init.normal_(layer.bias)
    output = layer(x)
    output.sum().backward()
    assert torch.equal(output, layer.bias.expand(2, 4))
    assert torch.equal(x.grad, layer.weight.expand(2, 4))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_output_keeps_the_dtype(dtype):
    x = torch.randn(2, 4).to(dtype)
    assert torch.equal(ChannelScale(4, dtype=dtype)(x), x)


def test_repr_tells_what_was_set():
    layer = ChannelScale(4, dim=1, bias=False, per_channel=False)
    assert repr(layer) == "ChannelScale((4,), dim=1, elementwise_affine=True, bias=False, per_channel=False)"


def test_bad_arguments_are_errors():
    with pytest.raises(ValueError, match="ChannelScale: normalized_shape is -1; give the number of channels"):
        ChannelScale(-1)
    with pytest.raises(TypeError, match="unexpected keyword argument 'affine'"):
        partial(ChannelScale, affine=False)(4)
    with pytest.raises(ValueError, match=r"ChannelScale: the input has shape \(2, 5\), but its size at dimension -1"):
        ChannelScale(4)(torch.zeros(2, 5))
