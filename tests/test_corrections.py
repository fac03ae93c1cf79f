"""The rules on rows, against the formulas of Bird 2025, Eqs. 20 and 21."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from adiv_optim import Correction, Disproportional, Proportional, attach, functional
from adiv_optim.corrections import check_correction
from tests.helpers.cases import each_correction

EXACT = 1e-15  # float64, relative: one or two roundings

X = torch.ones(4, 3)
NORMS = torch.tensor([0.0, 1e-8, 0.5, 1.0, 3.0, 1e8, 1e300, torch.nan], dtype=torch.float64)
TRAINED = {"weight-and-bias": (True, True), "weight-only": (True, False), "bias-only": (False, True)}
each_trained = pytest.mark.parametrize(("weight", "bias"), TRAINED.values(), ids=TRAINED)
each_rule = pytest.mark.parametrize("rule", [Proportional, Disproportional])


def row_scales(correction: Correction, norm: float, weight: bool = True, bias: bool = True) -> tuple[float, float]:
    """(s_W, s_b) of a row with |x|² = norm, by Bird 2025, Eqs. 20 and 21; only trained parameters count."""
    if isinstance(correction, Proportional):
        total = (norm if weight else 0.0) + bias
        scale = 1 / total if total else 0.0
        return scale, scale
    share = 1 / (weight + bias)
    return (share / norm if norm else 0.0), share


def factors_of(norms, weight=True, bias=True):
    return ({"weight": norms} if weight else {}) | ({"bias": torch.ones_like(norms)} if bias else {})


@each_correction
@each_trained
def test_scales_are_the_papers_formulas(correction, weight, bias):
    scales = correction.scales(factors_of(NORMS, weight, bias))
    wanted = torch.tensor([row_scales(correction, n, weight, bias) for n in NORMS.tolist()], dtype=torch.float64)
    assert scales.keys() == factors_of(NORMS, weight, bias).keys()
    for name, column in (("weight", 0), ("bias", 1)):
        if name in scales:
            torch.testing.assert_close(scales[name], wanted[:, column], rtol=EXACT, atol=0, equal_nan=True)


@each_correction
@pytest.mark.parametrize("names", [("weight",), ("bias",), ("weight", "bias"), tuple("abcd")], ids=str)
def test_effective_step_of_a_row_is_one_with_any_number_of_parameters(correction, names):
    """Σ_p s_p f_p = 1: the diagonal of the effective update is the ideal one."""
    factors = {name: torch.rand(2, 3, dtype=torch.float64) + 0.1 for name in names}
    before = {name: factor.clone() for name, factor in factors.items()}
    scales = correction.scales(factors)
    total = sum(scales[name] * factors[name] for name in factors)
    torch.testing.assert_close(total, torch.ones_like(total), rtol=4 * EXACT, atol=0)
    assert all(torch.equal(factors[name], before[name]) for name in names)
    assert all(scale.shape == (2, 3) and scale.dtype == torch.float64 for scale in scales.values())


@each_rule
def test_eps_bounds_the_scale_of_tiny_rows_and_must_be_positive(rule):
    scale = rule(eps=0.5).scales({"weight": torch.tensor([0.1, 0.5, 2.0])})["weight"]
    assert scale.tolist() == [2.0, 2.0, 0.5]
    with pytest.raises(ValueError, match=f"{rule.__name__}: eps is 0.*positive"):
        rule(eps=0)


@dataclass(frozen=True)
class Returns(Correction):
    """A rule whose scales are made by `of`."""

    of: Callable[[dict[str, Tensor]], object]

    def scales(self, factors):
        return self.of(factors)


KEYS, FOR_WEIGHT = r".*\['bias', 'weight'\]", ".* for 'weight'; it must be"
#: What becomes of the factors of weight and bias, and what is said of it.
WRONG_SCALES = {
    "weight-alone": (lambda factors: {"weight": factors["weight"]}, KEYS),
    "one-too-many": (lambda factors: {**factors, "gain": factors["weight"]}, KEYS),
    "float": (lambda factors: dict.fromkeys(factors, 0.5), rf"0.5 \(float\){FOR_WEIGHT}"),
    "float-of-bias": (lambda factors: {**factors, "bias": 0.5}, r"0\.5 \(float\) for 'bias'"),
    "one-number": (lambda factors: {n: f.mean() for n, f in factors.items()}, rf"a torch.float32 .* \(\){FOR_WEIGHT}"),
    "one-row-short": (lambda factors: {n: f[1:] for n, f in factors.items()}, f"a torch.float32 tensor{FOR_WEIGHT}"),
    "integers": (lambda factors: {n: f.long() for n, f in factors.items()}, f"a torch.int64 tensor{FOR_WEIGHT}"),
}
PLACES = {
    "linear": (lambda rule: functional.linear(X, *nn.Linear(3, 2).parameters(), rule), "linear"),
    "conv2d": (lambda rule: attach(nn.Conv2d(3, 2, 1), rule)(torch.ones(1, 3, 2, 2)), r"the model itself \(Conv2d\)"),
    "attached": (lambda rule: attach(nn.Sequential(nn.Linear(3, 2)), rule)(X), r"layer '0' \(Linear\)"),
}


@pytest.mark.parametrize(("of", "message"), WRONG_SCALES.values(), ids=WRONG_SCALES)
def test_scales_that_do_not_fit_are_an_error_that_names_rule_and_layer(of, message):
    for run, place in PLACES.values():
        with pytest.raises(ValueError, match=rf"^{place}: Returns\.scales returned {message}"):
            run(Returns(of)).sum().backward()


def test_check_correction_says_what_was_found():
    for found, message in (
        (Proportional, r"the class Proportional: write Proportional\(\);"),
        (None, "NoneType; pass Proportional"),
        (nn.Linear(1, 1), "Linear; pass .* attach takes the model first"),
    ):
        with pytest.raises(TypeError, match=rf"must be an instance of adiv_optim\.Correction, found .*{message}"):
            check_correction(found)
