"""A measurement that takes much longer than its layer is warned of once, with what makes it cheaper."""

import warnings

import pytest
import torch
from torch import nn
from torch.optim import SGD

from adiv_optim import InputScaled, Preconditioned, Whitened
from adiv_optim.optim import layer_inputs

#: Image, kernel, channels, groups: of a kernel of 9 × 9 without mixing of channels each weight is read once.
DEPTHWISE = ((8, 4, 20, 20), 9, 4, 4)
PLAIN = ((2, 4, 20, 20), 3, 64, 1)


def told(wrapper, case, **settings):
    shape, kernel, channels, groups = case
    layer = nn.Conv2d(shape[1], channels, kernel, groups=groups)
    optimizer = wrapper(SGD(layer.parameters(), lr=0.1), layer, every=1, **settings)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            optimizer.zero_grad()
            layer(torch.randn(shape)).square().mean().backward()
            optimizer.step()
    return [str(each.message) for each in caught]


@pytest.mark.parametrize("wrapper", [Whitened, Preconditioned])
def test_once_by_name_with_a_remedy(wrapper, monkeypatch):
    monkeypatch.setattr(layer_inputs, "LONG", 2**10)
    (message,) = told(wrapper, DEPTHWISE)
    assert message.startswith("weight: a measurement of what its layer reads takes some ")
    assert "skip leaves the layer alone" in message


@pytest.mark.parametrize(
    ("wrapper", "case", "settings"),
    [
        (Whitened, PLAIN, {}), (InputScaled, DEPTHWISE, {}), (Whitened, DEPTHWISE, {"rank": 2}),
        (Whitened, DEPTHWISE, {"max_rows": 1}),
    ],
    ids=["many outputs", "mean square", "rank", "few rows"],
)  # fmt: skip
def test_not_where_it_takes_a_few_passes(wrapper, case, settings, monkeypatch):
    monkeypatch.setattr(layer_inputs, "LONG", 2**10)
    assert not told(wrapper, case, **settings)


def test_roots_are_counted_where_few_rows_are(monkeypatch):
    """A kernel of 31 × 31 without mixing of channels: its roots take longer than its sums."""
    monkeypatch.setattr(layer_inputs, "LONG", 2**10)
    (message,) = told(Whitened, ((2, 2, 31, 31), 31, 2, 2), max_rows=1)
    # Two roots of 962 columns, and forward passes of two samples with one place each.
    times = float(message.split(" times the multiplications")[0].rsplit(" ", 1)[-1])
    assert times > 2 * 962**3 / (2 * 2 * 961)


def test_not_where_it_takes_no_time():
    assert not told(Whitened, DEPTHWISE)
