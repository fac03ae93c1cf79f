"""Optimizers that hold another one mix weights of several steps: they go around the wrappers that map weights."""

import pytest
import torch
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import SGD

from adiv_optim import InputScaled, Preconditioned, UnitConsistent, Whitened
from tests.helpers.steps import BY_CLASS, MAPPING, network, sgd


class Lookahead(torch.optim.Optimizer):
    """Holds an optimizer; as Accelerate's it passes `eval` on, and has no second set of weights for that."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__([p for group in base.param_groups for p in group["params"]], {})
        self.base = base

    def eval(self) -> None:
        pass


each_wrapper = pytest.mark.parametrize("name", [*MAPPING, "Preconditioned"])


@each_wrapper
def test_they_are_refused_within_with_the_order_that_works(name):
    model = network()
    message = rf"^{name} around Lookahead, which holds .* Write Lookahead\({name}\(SGD\(…\), model\), …\)\.$"
    with pytest.raises(ValueError, match=message):
        BY_CLASS[name](Lookahead(sgd(model)), model)


@each_wrapper
def test_weights_without_numbers_are_told_at_the_step(name):
    model = network().to("meta")
    x = torch.ones(3, 4, device="meta")
    if name == "UnitConsistent":
        optimizer = UnitConsistent(sgd(model), model, example_input=x)
    else:
        optimizer = BY_CLASS[name](sgd(model), model)
    model(x).sum().backward()
    with pytest.raises(NotImplementedError, match="meta tensor"):
        optimizer.step()


def with_memory(kind, **settings):
    """A model that has got its memory after the optimizer was built: to_empty() makes new parameters."""
    model = network().to("meta")
    optimizer = kind(sgd(model), model, **settings)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    model(torch.ones(3, 4)).sum().backward()
    return optimizer


@pytest.mark.parametrize(
    ("kind", "settings"), [(Whitened, {}), (Whitened, {"rank": 2}), (InputScaled, {}), (Preconditioned, {})]
)
def test_weights_that_came_after_the_optimizer_are_not_counted_and_told_at_the_second_step(kind, settings):
    optimizer = with_memory(kind, **settings)
    optimizer.step()
    with pytest.warns(UserWarning, match=r"no layer has seen a row. Build the optimizer from the model as it is now"):
        optimizer.step()


def test_weights_that_came_after_a_gauge_was_traced_are_told_at_the_step():
    optimizer = with_memory(UnitConsistent, example_input=torch.ones(3, 4, device="meta"))
    with pytest.raises(NotImplementedError, match="meta tensor"):
        optimizer.step()


@each_wrapper
def test_an_optimizer_dealt_to_processes_is_refused_with_what_shards_instead(name, one_process):
    model = network()
    sharded = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1)
    with pytest.raises(ValueError, match=rf"{name} around ZeroRedundancyOptimizer: .*fully_shard"):
        BY_CLASS[name](sharded, model)
