"""DyT and DyISRU: the published formulas, and channels; ChannelScale: torch's normalisers' parameters alone."""

import copy
import math
from functools import partial

import pytest
import torch
from torch import nn

from adiv_optim.layers import ChannelScale, DyISRU, DyT
from tests.helpers.covering import paired

pytestmark = pytest.mark.usefixtures("in_float64")

EXACT = 1e-12

#: Class and formula, with α = 1/2 and C = d: Zhu et al. 2025, Su 2025 (ρ = 2), Stollenwerk 2025; C = 1 without √d.
FORMS = {
    "dyt": (DyT, lambda x, d: math.tanh(0.5 * x)),
    "dyt-sqrt-d": (partial(DyT, sqrt_d=True), lambda x, d: math.sqrt(d) * math.tanh(x / (2 * math.sqrt(d)))),
    "dyisru": (DyISRU, lambda x, d: math.sqrt(d) * x / math.sqrt(x**2 + d)),
    "dyisru-without-sqrt-d": (partial(DyISRU, sqrt_d=False), lambda x, d: x / math.sqrt(x**2 + 1)),
}


#: normalized_shape, dim, input shape: the places of LayerNorm, BatchNorm2d, BatchNorm1d and a LayerNorm over images.
PLACES = {
    "last": (5, -1, (2, 3, 5)),
    "images": (3, 1, (2, 3, 4, 5)),
    "images-from-behind": (3, -3, (2, 3, 4, 5)),
    "several": ((3, 4), -1, (2, 3, 4)),
    "several-in-the-middle": ((3, 4), 2, (2, 3, 4, 5)),
    "unbatched": (5, -1, (5,)),
}


def features(size):
    return math.prod(size) if isinstance(size, tuple) else size


@paired("form size_dim_shape", FORMS, PLACES)
def test_output_at_initialisation_is_the_published_formula(form, size_dim_shape):
    (kind, formula), (size, dim, shape) = form, size_dim_shape
    layer, x = kind(size, dim=dim), 3 * torch.randn(shape)
    wanted = torch.tensor([formula(value, features(size)) for value in x.flatten().tolist()]).view(shape)
    torch.testing.assert_close(layer(x), wanted, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("kind", [DyT, DyISRU])
@pytest.mark.parametrize(("size", "dim", "shape"), PLACES.values(), ids=PLACES)
def test_every_parameter_acts_on_its_own_channel(kind, size, dim, shape):
    layer, x = kind(size, dim=dim), torch.randn(shape)
    for parameter in layer.parameters():
        parameter.data.uniform_(0.5, 2)
    # torch broadcasts from the last dimension: there the same parameters need no alignment.
    sizes = layer.normalized_shape
    first = dim % len(shape) - len(sizes) + 1
    middle, last = list(range(first, first + len(sizes))), list(range(len(shape) - len(sizes), len(shape)))
    moved = x.movedim(middle, last)
    if kind is DyT:
        squashed = torch.tanh(layer.alpha * moved)
    else:
        squashed = math.sqrt(features(size)) * moved / (moved**2 + layer.log_c.exp()).sqrt()
    wanted = (layer.weight * squashed + layer.bias).movedim(last, middle)
    torch.testing.assert_close(layer(x), wanted, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("kind", [DyISRU, DyT])
def test_the_largest_and_least_numbers_reach_the_bounds_with_gradients_of_no_size(kind):
    layer = kind(1)
    x = torch.tensor([[3e38], [-3e38], [2e19], [-2e19], [1e-38], [0.0]], requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert y[:4].flatten().tolist() == pytest.approx([1, -1, 1, -1], rel=1e-6)
    assert y[4:].abs().max() <= 1e-37
    assert x.grad.isfinite().all()
    assert x.grad[:4].abs().max() <= 1e-18
    assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())


@pytest.mark.parametrize("kind", [DyT, DyISRU])
def test_parameters_are_the_papers_and_a_reset_gives_back_their_initial_values(kind):
    layer = kind(4)
    initial = {name: parameter.clone() for name, parameter in layer.named_parameters()}
    own = "alpha" if isinstance(layer, DyT) else "log_c"
    assert initial.keys() == {"weight", "bias", own}
    assert (initial["weight"].tolist(), initial["bias"].tolist(), initial[own].shape) == ([1] * 4, [0] * 4, (1,))
    assert set(dict(kind(4, bias=False).named_parameters())) == {"weight", own}
    assert set(dict(kind(4, elementwise_affine=False).named_parameters())) == {own}
    for parameter in layer.parameters():
        parameter.data.normal_()
    layer.reset_parameters()
    assert all(torch.equal(parameter, initial[name]) for name, parameter in layer.named_parameters())


def test_c_is_what_was_asked_for_and_stays_positive_under_any_step():
    layer = DyISRU(8, c=0.3)
    assert layer.c.item() == pytest.approx(0.3, rel=EXACT)
    layer.log_c.grad = torch.full((1,), 1e3)
    torch.optim.SGD([layer.log_c], lr=0.1).step()
    assert 0 < layer.c.item() < 1e-40
    assert layer(torch.randn(3, 8)).isfinite().all()


@pytest.mark.parametrize(("kind", "formula"), FORMS.values(), ids=FORMS)
def test_half_precision_is_close_where_squares_and_c_would_overflow(kind, formula):
    width, dtype = 70_000, torch.float16  # C = d is beyond float16
    layer = kind(width).to(dtype)
    x = torch.zeros(1, width, dtype=dtype)
    x[0, :4] = torch.tensor([-30_000.0, 300.0, 1.0, 0.01])
    output = layer(x)
    assert output.dtype == dtype
    wanted = torch.tensor([formula(value, width) for value in x[0, :4].tolist()])
    torch.testing.assert_close(output[0, :4].double(), wanted, rtol=2e-2, atol=1e-4)


#: torch's normaliser, whose parameters are 1 and 0 at first; the scaling; an input.
NORMALISERS = {
    "layer-norm": (nn.LayerNorm(5), ChannelScale(5), (2, 3, 5)),
    "rms-norm": (nn.RMSNorm(5, eps=1e-6), ChannelScale(5, bias=False), (2, 5)),
    "batch-norm": (nn.BatchNorm2d(3), ChannelScale(3, dim=1), (2, 3, 4, 4)),
    "group-norm": (nn.GroupNorm(1, 4), ChannelScale(4, dim=-3), (2, 4, 3, 3)),
}


@pytest.mark.parametrize(("plain", "scale", "shape"), NORMALISERS.values(), ids=NORMALISERS)
def test_normaliser_without_parameters_then_scale_is_the_normaliser(plain, scale, shape):
    whole, x = copy.deepcopy(plain).double(), torch.randn(shape)
    for parameter in whole.parameters():
        nn.init.normal_(parameter)
    parts = nn.Sequential(plain, scale).double()
    parts[1].load_state_dict(dict(whole.named_parameters()))
    torch.testing.assert_close(parts(x), whole(x), rtol=EXACT, atol=EXACT)
