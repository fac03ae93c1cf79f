"""Optimizers that hold another one mix weights of several steps: they go around the wrappers that map weights."""

import pytest
import torch
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import SGD

from adiv_optim import ChainedOptimizer, InputScaled, Preconditioned, Whitened
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
    for inner in (Lookahead(sgd(model)), ChainedOptimizer([Lookahead(sgd(model[0])), sgd(model[2])])):
        with pytest.raises(ValueError, match=message):
            BY_CLASS[name](inner, model)


@pytest.mark.parametrize(
    ("kind", "settings"), [(Whitened, {}), (Whitened, {"rank": 2}), (InputScaled, {}), (Preconditioned, {})]
)
def test_weights_that_came_after_the_optimizer_are_not_counted_and_told_at_the_second_step(kind, settings):
    model = network().to("meta")
    optimizer = kind(sgd(model), model, **settings)
    model.to_empty(device="cpu")  # makes new parameters
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    with pytest.warns(UserWarning, match=r"no layer has seen a row. Build the optimizer from the model as it is now"):
        optimizer.step()


@each_wrapper
def test_an_optimizer_dealt_to_processes_is_refused_with_what_shards_instead(name, one_process):
    model = network()
    sharded = ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1)
    with pytest.raises(ValueError, match=rf"{name} around ZeroRedundancyOptimizer: .*fully_shard"):
        BY_CLASS[name](sharded, model)
