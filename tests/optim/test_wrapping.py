"""What wrappers of inputs go around, what they call the layers there, and what they refuse."""

import copy

import pytest
import torch
from torch import nn

from adiv_optim import GaussNewton, GradientOnly, InputScaled, Proportional, UnitConsistent, Whitened, gauge

PASSED, X = nn.Linear(4, 3), torch.ones(1, 4)


def sgd(model=PASSED):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def lazy():
    model = nn.Sequential(nn.LazyLinear(3))
    return Whitened(sgd(model), model)


def lazy_skipped():
    model = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 2))
    return GradientOnly(sgd(model), model, Proportional(), skip=["0"])


def plain_parts():
    model = nn.Sequential(nn.LayerNorm(3), nn.Embedding(4, 3))
    return InputScaled(sgd(model), model)


#: An option, its value, and a word of the error.
OPTIONS = [
    *((Whitened, "damping", value, "positive and finite") for value in (0.0, torch.inf)),
    (Whitened, "decay", 1.0, "at least 0 and below 1"),
    (Whitened, "every", 0, "an integer of at least 1"),
    *((Whitened, name, 2.5, "an integer of at least 1") for name in ("every", "rank", "max_dim")),
    *((InputScaled, "floor", value, "positive and finite") for value in (0.0, -1.0, torch.inf, torch.nan)),
]


@pytest.mark.parametrize(("kind", "option", "value", "word"), OPTIONS)
def test_options_out_of_range_are_named(kind, option, value, word):
    with pytest.raises(ValueError, match=word):
        kind(sgd(), PASSED, **{option: value})


#: A call, and a word of its error.
MISTAKES = {
    "no layer": (plain_parts, r"0\.weight \(LayerNorm is not a layer"),
    "no shape": (lazy, "has no shape yet"),
    "no shape, skipped": (lazy_skipped, r"GradientOnly: the optimizer holds '0\.weight', which has no shape yet"),
    "takes terms": (lambda: Whitened(GaussNewton(PASSED), PASSED), "cannot wrap GaussNewton, which reads no gradients"),
    "neither graph nor input": (lambda: UnitConsistent(sgd(), PASSED), "pass example_input"),
    "another input": (lambda: UnitConsistent(sgd(), PASSED, example_input=torch.ones(1, 5)), r"shape \(1, 5\)"),
    "no gauge": (lambda: UnitConsistent(sgd(), PASSED, example_input=X, gauge="network"), "pass gauge.NetworkGauge"),
    "every of a gauge": (lambda: gauge.NetworkGauge(every=0), "every is 0"),
    "no model": (lambda: gauge.trace(sgd(), X), "trace: model must be"),
}


@pytest.mark.parametrize(("call", "word"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_named(call, word):
    with pytest.raises((TypeError, ValueError), match=word):
        call()


def test_names_are_those_of_the_model_itself():
    model, x = nn.Linear(4, 3), torch.randn(9, 4)
    compiled = torch.compile(copy.deepcopy(model), backend="eager")
    saved = Whitened(torch.optim.SGD(compiled.parameters(), lr=0.1), compiled)
    compiled(x).sum().backward()
    saved.step()
    assert saved.coverage().treated.keys() == {"weight", "bias"}
    optimizer = Whitened(torch.optim.SGD(model.parameters(), lr=0.1), model)
    optimizer.load_state_dict(saved.state_dict())
    assert optimizer.coverage().treated.keys() == {"weight", "bias"}
