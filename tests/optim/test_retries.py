"""A step that failed and is called again: the weights and the rows of a run without the fault."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from adiv_optim import InputScaled, Preconditioned, Whitened
from tests.helpers.steps import inputs, network, same, sgd

pytestmark = pytest.mark.usefixtures("in_float64")

WRAPPERS: dict[str, Callable[..., Any]] = {
    "whitened": Whitened,
    "rank": lambda *given, **options: Whitened(*given, rank=2, **options),
    "preconditioned": Preconditioned,
    "held": lambda *given, **options: InputScaled(*given, floor=0.1, hold=True, **options),
}


def once(function: Callable[..., Any], call: int) -> Callable[..., Any]:
    """The function, but for one call of it."""
    calls: list[int] = []

    def failing(*given: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == call:
            raise torch.OutOfMemoryError("planted")
        return function(*given, **options)

    return failing


#: Where the memory ends: whose method it is, its name, the call, and the wrappers that go there. At `rescale` not those
#: that leave weights or biases to the optimizer, which has moved them by then.
FAULTS: dict[str, tuple[Callable[[Any], Any], str, int, set[str]]] = {
    "sums of the first layer": (lambda optimizer: optimizer.method.layers[0].moments, "updated", 1, {*WRAPPERS}),
    "sums of the last layer": (lambda optimizer: optimizer.method.layers[1].moments, "updated", 1, {*WRAPPERS}),
    "root of the first layer": (lambda optimizer: optimizer.method, "measure", 1, {*WRAPPERS} - {"held"}),
    "root of the last layer": (lambda optimizer: optimizer.method, "measure", 2, {*WRAPPERS} - {"held"}),
    "scales": (lambda optimizer: optimizer.method, "_scales", 1, {"held"}),
    "rescale": (lambda optimizer: optimizer.method, "rescale", 1, {"whitened", "rank"}),
    "inner step": (lambda optimizer: optimizer.inner, "step", 1, {*WRAPPERS}),
}


def trained(name: str, fault: str, fails: bool) -> tuple[list[Any], bool]:
    model, failed = network(), False
    optimizer = WRAPPERS[name](sgd(model, lr=0.01), model, every=1)
    for number in range(4):
        optimizer.zero_grad()
        for seed in (number, 10 + number):
            model(inputs(seed, size=1 + number)).square().mean().backward()
        if number == 2:
            part_of, method, call, _ = FAULTS[fault]
            part = part_of(optimizer)
            setattr(part, method, once(getattr(part, method), call if fails else 0))
            try:
                optimizer.step()
            except torch.OutOfMemoryError:
                failed = True
                optimizer.step()
            continue
        optimizer.step()
    layers = optimizer.method.layers
    memory, rows = [tensor for layer in layers for tensor in layer.memory], [layer.rows for layer in layers]
    return [*model.parameters(), *memory, torch.tensor(rows)], failed


@pytest.mark.parametrize(("fault", "name"), [(fault, name) for fault in FAULTS for name in sorted(FAULTS[fault][-1])])
def test_it_is_the_step_of_a_run_without_the_fault(fault, name):
    (found, failed), (wanted, _) = trained(name, fault, True), trained(name, fault, False)
    assert failed
    assert same(found, wanted)
