"""Steps that end early: by a lack of memory at any allocation, by Ctrl-C at any moment.

Every treated weight then has its old or its new value, and every gradient is what it was.
"""

import copy
import random
import signal
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from adiv_optim import InputScaled, Preconditioned, UnitConsistent, gauge
from tests.helpers.seeds import manual_seed
from tests.helpers.steps import weights
from tests.wrappers import WRAPPERS

ROUTES = {
    **{name: WRAPPERS[name] for name in ("unit-consistent", "whitened", "whitened-rank", "preconditioned")},
    "by-rate": lambda inner, model, x: InputScaled(inner, model, floor=0.01),
    "layer-gauge": lambda inner, model, x: UnitConsistent(inner, model, gauge=gauge.LayerGauge(), example_input=x),
}


class Own(torch.optim.AdamW):
    """Of a type of its own: it might read the weights, which are mapped."""


#: SGD with a rate of 0, whose new weights are the old ones; and one that writes each weight twice.
INNER = {
    "sgd-0": lambda p: torch.optim.SGD(p, lr=0.0),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.5, foreach=False),
    "mapped": lambda p: Own(p, lr=0.1, weight_decay=0.5, foreach=False),
}
#: The second of two writes is another moment for weights that a map moves, whichever map it is.
each_route = pytest.mark.parametrize(
    ("wrap", "inner"),
    [pytest.param(wrap, INNER["sgd-0"], id=f"{name}-sgd-0") for name, wrap in ROUTES.items()]
    + [
        pytest.param(ROUTES[name], INNER["adamw"], id=f"{name}-adamw")
        for name in ("unit-consistent", "whitened", "by-rate")
    ]
    + [pytest.param(ROUTES["unit-consistent"], INNER["mapped"], id="unit-consistent-mapped")],
)


class OutOfMemoryAt(TorchDispatchMode):
    """Lets the allocation of a number fail; counts them from 0."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.seen = number, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {t.untyped_storage()._cdata for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        outputs = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)]
        if any(t.untyped_storage()._cdata not in inputs for t in outputs):
            self.seen += 1
            if self.seen > self.number:
                raise torch.OutOfMemoryError("planted")
        return result


def ready(wrap: Any, inner: Any) -> Any:
    """An optimizer with a gradient, whose next step measures, and scales far from 1."""
    manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(36, 8), nn.ReLU(), nn.Linear(8, 3))
    with torch.no_grad():
        model[0].weight.mul_(50)
        model[3].weight.div_(50)
    x = torch.randn(6, 2, 5, 5)
    optimizer = wrap(inner(model.parameters()), model, x[:1])
    model(x).square().mean().backward()
    return optimizer


def again(optimizer: Any) -> Any:
    """A copy, gradients included; copies of parameters leave theirs behind."""
    copied = copy.deepcopy(optimizer)
    for one, other in zip(copied.model.parameters(), optimizer.model.parameters(), strict=True):
        one.grad = other.grad.clone()
    return copied


def gradients(optimizer: Any) -> list[Tensor]:
    return [p.grad.clone() for p in optimizer.model.parameters()]


def outcomes(wrap: Any, inner: Any) -> tuple[list[list[Tensor]], list[Tensor]]:
    """For each treated weight what it may be after a step that may have ended early; and the gradients."""
    optimizer = ready(wrap, inner)
    before, grads = weights(optimizer.model), gradients(optimizer)
    allowed = [before]
    optimizer.step()
    allowed.append(weights(optimizer.model))
    # AdamW itself writes a weight twice: what no map treats it may leave between the two.
    treated = {} if isinstance(optimizer, Preconditioned) else optimizer.coverage().treated
    assert treated or wrap is ROUTES["preconditioned"]
    names = [name for name, _ in optimizer.model.named_parameters()]
    return [values if name in treated else [] for name, *values in zip(names, *allowed, strict=True)], grads


def assert_old_or_new(optimizer: Any, allowed: list[list[Tensor]], grads: list[Tensor]) -> None:
    """All treated weights are as before the step, or all as after one that was taken."""
    treated = [(found, own) for found, own in zip(weights(optimizer.model), allowed, strict=True) if own]
    states = range(len(treated[0][1])) if treated else ()
    assert not treated or any(all(torch.equal(found, own[state]) for found, own in treated) for state in states)
    assert all(torch.equal(a, b) for a, b in zip(gradients(optimizer), grads, strict=True))


@each_route
def test_every_allocation_may_fail(wrap, inner, request):
    allowed, grads = outcomes(wrap, inner)
    first, number, failed = ready(wrap, inner), 0, True
    stride = 1 if request.config.getoption("--slow") else 11
    while failed:
        optimizer = again(first)
        try:
            with OutOfMemoryAt(number):
                optimizer.step()
            failed = False
        except torch.OutOfMemoryError:
            number += stride
        assert_old_or_new(optimizer, allowed, grads)
        if inner is INNER["sgd-0"]:  # AdamW may be left with half of its own state
            optimizer.step()
            assert all(bool(p.isfinite().all()) for p in optimizer.model.parameters())
    assert number > 20


def test_weights_left_mapped_are_found():
    allowed, grads = outcomes(ROUTES["whitened"], INNER["sgd-0"])
    optimizer = ready(ROUTES["whitened"], INNER["sgd-0"])
    assert_old_or_new(optimizer, allowed, grads)
    with torch.no_grad():
        optimizer.model[0].weight.mul_(2)
    with pytest.raises(AssertionError):
        assert_old_or_new(optimizer, allowed, grads)


class Alarm:
    """Ctrl-C after a while, within a `with` and not outside."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.armed = seconds, False

    def __enter__(self) -> None:
        self.before = signal.signal(signal.SIGALRM, self.ring)
        self.armed = True
        signal.setitimer(signal.ITIMER_REAL, self.seconds)

    def ring(self, *_: Any) -> None:
        if self.armed:
            raise KeyboardInterrupt

    def __exit__(self, *_: Any) -> None:
        self.armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self.before)


# Where Python cannot raise, within the end of an object, it prints.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@each_route
def test_any_moment_may_be_the_last(wrap, inner, request):
    moments = 400 if request.config.getoption("--slow") else 15
    allowed, grads = outcomes(wrap, inner)
    first = ready(wrap, inner)
    other = ready(wrap, inner)
    start = time.perf_counter()
    other.step()
    length, interrupted, draw = time.perf_counter() - start, 0, random.Random(0)
    for _ in range(moments):
        optimizer, start = again(first), time.perf_counter()
        try:
            with Alarm(draw.uniform(1e-5, length)):
                optimizer.step()
            length = time.perf_counter() - start  # where other programs run, a first step tells little of the next
        except KeyboardInterrupt:
            interrupted += 1
            torch.set_grad_enabled(True)  # torch.no_grad itself may have been interrupted, and then stays on
        assert_old_or_new(optimizer, allowed, grads)
    assert interrupted
