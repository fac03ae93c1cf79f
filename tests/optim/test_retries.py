"""A step that ended at any of its operations and is called again: the weights and rows of a run without the fault."""

import sys
from functools import partial
from typing import Any

import pytest
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from adiv_optim import InputScaled
from tests.helpers.remembered import memory
from tests.helpers.steps import BY_COVARIANCE, inputs, network, same, sgd

pytestmark = pytest.mark.usefixtures("in_float64")


WRAPPERS = BY_COVARIANCE | {"held": partial(InputScaled, floor=0.1, hold=True)}


class InterruptedAt(TorchDispatchMode):
    """Lets one of torch's operations end in Ctrl-C; counts them from 0, without those that tell a profiler."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.seen = number, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += func.namespace != "profiler"
        if self.seen == self.number + 1:
            self.seen += 1
            raise KeyboardInterrupt
        return func(*args, **(kwargs or {}))


def trained(name: str, number: int) -> tuple[list[Tensor], bool]:
    """Weights and rows after four steps, the third of which ended at an operation; and whether it did."""
    model, interrupted, mode = network(), False, InterruptedAt(number)
    if name == "held":  # which leaves biases to the optimizer: by the end of its step they have moved
        model = nn.Sequential(*(nn.Linear(m.in_features, m.out_features, False) for m in model[::2]))
        for p in model.parameters():
            nn.init.constant_(p, 0.1)
    optimizer = WRAPPERS[name](sgd(model, lr=0.01), model, every=1)
    for step in range(4):
        optimizer.zero_grad()
        for seed in (step, 10 + step):
            model(inputs(seed, size=1 + step)).square().mean().backward()
        if step == 2 and name == "inverse":  # which leaves all weights to it
            optimizer.inner.register_step_pre_hook(lambda *_: setattr(mode, "number", sys.maxsize))
        try:
            if step == 2:
                with mode:
                    optimizer.step()
        except KeyboardInterrupt:
            interrupted = True
        if step != 2 or interrupted:
            optimizer.step()
    return [*model.parameters(), *memory(optimizer)], interrupted


@pytest.mark.parametrize("name", WRAPPERS)
def test_it_is_the_step_of_a_run_without_the_fault(name, request):
    (wanted, interrupted), number = trained(name, sys.maxsize), 0
    assert not interrupted
    while True:
        found, interrupted = trained(name, number)
        assert same(found, wanted), number
        if not interrupted:
            break
        number += 1 if request.config.getoption("--slow") else 7
    assert number > 30
