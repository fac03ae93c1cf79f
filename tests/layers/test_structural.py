"""AffineLikeLinear and NormLikeLinear: formulas and exact effective updates."""

import pytest
import torch
import torch.nn.functional as F

from adiv_optim.layers import AffineLikeLinear, L2Norm, NormLikeLinear
from tests.helpers.covering import paired

LEARNING_RATE = 0.1
EXACT = 1e-12  # float64, on numbers of order one


def affine_like(x, weight, bias, alpha=1.0, beta=1.0):
    """(αWx + βb) / √(α²|x|² + β²), Bird 2025, Eq. 37."""
    shift = 0 if bias is None else beta * bias
    return (alpha * x @ weight.T + shift) / (alpha**2 * x.abs().square().sum(-1, keepdim=True) + beta**2).sqrt()


def norm_like(x, weight, bias, alpha=1.0, beta=None):
    """αW(x/s) + βb with s = √(α²|x|²/(1 − β²)), Eq. 35; beta None is Wx/|x| + b, Eq. 17."""
    norm = x.abs().square().sum(-1, keepdim=True).sqrt()
    gain = 1 / norm if beta is None else alpha / (alpha**2 * norm**2 / (1 - beta**2)).sqrt()
    shift = 0 if bias is None else bias * (1 if beta is None else beta)
    return x @ weight.T * gain + shift


AFFINE = {
    "eq-19": {},
    "negative-alpha": {"alpha": -0.5},
    "negative-beta": {"beta": -2.0},
    "alpha-beta": {"alpha": 0.7, "beta": 1.9},
}
NORM = {
    "eq-17": {},
    "negative-beta": {"beta": -0.6},
    "beta-zero": {"beta": 0.0},
    "alpha-beta": {"alpha": 3.0, "beta": 0.5},
    "negative-alpha": {"alpha": -3.0, "beta": 0.5},
}
KINDS = {f"affine-{name}": (AffineLikeLinear, affine_like, options) for name, options in AFFINE.items()} | {
    f"norm-{name}": (NormLikeLinear, norm_like, options) for name, options in NORM.items()
}
#: One of either formula, with every term in it.
both_kinds = pytest.mark.parametrize(
    ("kind", "formula", "options"),
    [KINDS[name] for name in ("affine-alpha-beta", "norm-alpha-beta", "norm-eq-17")],
    ids=["affine", "norm", "norm-eq-17"],
)
each_bias = pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
@paired("case bias_shape", KINDS, {"bias-tokens": (True, (2, 3, 5)), "no-bias-unbatched": (False, (5,))})
def test_output_is_the_formula(case, bias_shape, dtype):
    (kind, formula, options), (bias, shape) = case, bias_shape
    layer, x = kind(5, 3, bias, **options, dtype=dtype), torch.randn(shape, dtype=dtype)
    wanted = formula(x, layer.weight, layer.bias, **options)
    torch.testing.assert_close(layer(x), wanted, rtol=EXACT, atol=EXACT)


def gain_of_one_row(kind, options, bias, norm):
    """The factor by which a step on one row exceeds -lr × g, from the docstrings of the layers."""
    if kind is NormLikeLinear:
        beta = options.get("beta")
        if beta is None:
            return 2.0 if bias else 1.0
        return 1.0 if bias else 1 - beta**2
    alpha, beta = options.get("alpha", 1.0), options.get("beta", 1.0)
    return 1.0 if bias else alpha**2 * norm / (alpha**2 * norm + beta**2)


@both_kinds
@each_bias
def test_effective_update_of_one_row(kind, formula, options, bias):
    layer, g = kind(5, 3, bias, **options).double(), torch.randn(1, 3, dtype=torch.float64)
    for length in (1e-3, 1.0, 1e3):
        x = length * F.normalize(torch.randn(1, 5, dtype=torch.float64), dim=-1)
        layer.zero_grad()
        before = layer(x)
        before.backward(g)
        torch.optim.SGD(layer.parameters(), lr=LEARNING_RATE).step()
        gain = gain_of_one_row(kind, options, bias, length**2)
        torch.testing.assert_close(layer(x) - before, -LEARNING_RATE * gain * g, rtol=0, atol=EXACT)


@both_kinds
@pytest.mark.parametrize("length", [200.0, 30000.0], ids=str)
def test_float16_does_not_overflow_where_the_squared_norm_would(kind, formula, options, length):
    # |x|² exceeds 65504 for |x| > 256; Wx itself stays below it here.
    layer = kind(4, 3, **options).half()
    x = torch.zeros(1, 4).half()
    x[0, 1] = length
    output = layer(x)
    wanted = formula(x.double(), layer.weight.double(), layer.bias.double(), **options)
    assert output.dtype == torch.float16
    torch.testing.assert_close(output.double(), wanted, rtol=4e-3, atol=2e-3)


@each_bias
@pytest.mark.parametrize("autocast", [False, True], ids=["half", "autocast"])
def test_float16_zero_rows_are_right_where_1_over_beta_would_overflow(bias, autocast):
    layer, x = AffineLikeLinear(4, 3, bias, beta=1e-5), torch.zeros(2, 4)
    wanted = layer(x)
    if not autocast:
        layer, x = layer.half(), x.half()
    with torch.autocast("cpu", torch.float16, enabled=autocast):
        output = layer(x)
    assert output.dtype == torch.float16
    # (β/α) b has few bits left in float16.
    torch.testing.assert_close(output.float(), wanted, rtol=0, atol=2**-7)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("kind", [AffineLikeLinear, NormLikeLinear])
def test_layers_without_features_return_their_bias(kind):
    layer = kind(0, 3)
    torch.nn.init.normal_(layer.bias)  # which torch leaves at 0 then
    assert torch.allclose(layer(torch.randn(4, 5, 0)), layer.bias.expand(4, 5, -1))
    assert kind(3, 0)(torch.randn(4, 3)).shape == (4, 0)


def test_eps_bounds_the_norm_from_below():
    x = torch.tensor([[1.0, 0.0], [0.0, 4.0]])
    assert torch.equal(L2Norm(eps=2.0)(x), torch.tensor([[0.5, 0.0], [0.0, 1.0]]))
    layer = NormLikeLinear(2, 2, bias=False, eps=2.0)
    torch.testing.assert_close(layer(x), torch.stack([layer.weight[:, 0] / 2, layer.weight[:, 1]]))
