"""Steps give their device work and do not wait for it: tensors of torch's meta device, which hold nothing to wait for.

There `.item()`, `bool(tensor)` and `.cpu()` raise. What a measurement must know goes through `_device.read`, which is
counted.
"""

import copy
import warnings
from functools import partial
from itertools import product

import pytest
import torch
from torch import nn

from adiv_optim import (
    BatchIdeal,
    Disproportional,
    Preconditioned,
    Proportional,
    UnitConsistent,
    _device,
    functional,
    gauge,
)
from tests.helpers.cases import needs_cuda
from tests.helpers.loops import images, train
from tests.helpers.seeds import manual_seed
from tests.layers.test_contract import LAYERS
from tests.wrappers import REMEMBERING, WRAPPERS, Wrapper, by_inputs, each_wrapper

STEPS, EVERY = 8, 4  # of two rounds, the second of which measures at its third step
#: Layers of `network` that are measured, one of them of two groups.
MEASURED = 4
#: By wrapper, how often a measurement waits; the others measure nothing.
WAITS = {
    "input-scaled": 1 + MEASURED,
    "preconditioned": 1 + MEASURED,
    # Whether the sums are finite, whether the equations are solved, and how far the scales moved.
    "unit-consistent": 3,
    # How uneven the covariance is, its eigenvalues, and whether the root is finite.
    "whitened": 1 + 3 * MEASURED,
    # Its leading eigenvectors, and whether the root made of them is finite.
    "whitened-rank": 1 + 2 * MEASURED,
    "layer-gauge": 3 + MEASURED,
}
OPTIMIZERS = {
    "adamw": torch.optim.AdamW,
    "adam-decay": partial(torch.optim.Adam, weight_decay=0.1),  # reads the weights
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
}


def layer_gauge(inner, model, example, every):
    return UnitConsistent(inner, model, gauge=gauge.LayerGauge(every=every), example_input=example)


MORE = {
    "preconditioned": by_inputs(Preconditioned, every=EVERY),
    "layer-gauge": Wrapper(layer_gauge, {"every": EVERY}),
}
ALL = {**WRAPPERS, **MORE}
#: What remembers something maps weights in three ways; a correction does not know the optimizer.
ROWS = [(name, kind) for name in ALL for kind in (OPTIMIZERS if name in REMEMBERING else ["adamw"])]


@pytest.fixture
def waits(monkeypatch):
    """How many numbers were read, each time; what is read is 2, which is true as well."""
    found = []

    def read(*tensors):
        assert all(tensor.is_meta for tensor in tensors)
        if not tensors:
            return []  # nothing is waited for
        found.append(sum(tensor.numel() for tensor in tensors))
        return [2.0] * found[-1]

    monkeypatch.setattr(_device, "read", read)
    return found


def network():
    manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 1, groups=2), nn.ReLU(), nn.Flatten(),
        nn.Linear(36, 8), nn.ReLU(), nn.Linear(8, 3),
    )  # fmt: skip


def measures(name, number):
    if name in ("unit-consistent", "layer-gauge"):
        return number % EVERY == 0
    return number in (0, 1, 2, 6)


@pytest.mark.parametrize(("name", "optimizer"), ROWS)
def test_step_waits_for_nothing_but_a_measurement(name, optimizer, waits):
    (x, y), model = images(1)[0], network().to("meta")
    wrapped = ALL[name](OPTIMIZERS[optimizer](model.parameters(), lr=0.1), model, x.to("meta"))
    counts = []
    for _ in range(STEPS):
        train(model, wrapped, [(x.to("meta"), y.to("meta"))])
        counts.append(len(waits))
        waits.clear()
    assert counts == [WAITS.get(name, 0) * measures(name, number) for number in range(STEPS)]


def test_a_step_that_looks_at_its_tensors_is_found(waits):
    class Looking(torch.optim.SGD):
        def step(self, closure=None):
            assert any(bool(p.grad.any()) for group in self.param_groups for p in group["params"])
            super().step(closure)

    (x, y), model = images(1)[0], network().to("meta")
    wrapped = WRAPPERS["unit-consistent"](Looking(model.parameters(), lr=0.1), model, x.to("meta"))
    with pytest.raises(RuntimeError, match="meta tensors"):
        train(model, wrapped, [(x.to("meta"), y.to("meta"))])


RULES = (Proportional(), Disproportional(), BatchIdeal())


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_functions_wait_for_nothing(rule, waits):
    for dims, count in product(range(4), (2, 50)):  # fewer rows than columns, and more
        with torch.device("meta"):
            call = getattr(functional, f"conv{dims}d") if dims else functional.linear
            x, weight = torch.randn(count, 6, *[4] * dims), torch.randn(5, 6, *[3] * dims, requires_grad=True)
            call(x, weight, torch.randn(5, requires_grad=True), correction=rule).sum().backward()
        assert weight.grad.shape == weight.shape
        assert not waits


def test_layers_wait_for_nothing(waits):
    for layer, shape in LAYERS.values():
        layer, x = copy.deepcopy(layer).to("meta"), torch.randn(shape, device="meta", requires_grad=True)
        layer(x).sum().backward()
        assert x.grad.shape == x.shape
        assert all(parameter.grad is not None for parameter in layer.parameters()), layer
        assert not waits, layer


@needs_cuda
@each_wrapper
def test_step_between_measurements_does_not_synchronize(wrap):
    model = network().cuda()
    (x, y) = (tensor.cuda() for tensor in images(1)[0])
    settings = {"every": EVERY} if wrap in map(WRAPPERS.get, REMEMBERING) else {}
    optimizer = wrap(torch.optim.AdamW(model.parameters()), model, x, **settings)
    train(model, optimizer, 3 * [(x, y)])
    with warnings.catch_warnings():  # torch says at every such call that the mode is a prototype
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        train(model, optimizer, [(x, y)])
    finally:
        torch.cuda.set_sync_debug_mode("default")
