"""Optimizers that hold another one mix weights of several steps: they go around the wrappers that map weights."""

import pytest
import torch
from torch.optim import SGD, AdamW

from adiv_optim import (
    ChainedOptimizer,
    GradientOnly,
    InputScaled,
    Preconditioned,
    Proportional,
    UnitConsistent,
    Whitened,
)
from tests.helpers.steps import inputs, network, same, sgd, stepped, weights


class Lookahead(torch.optim.Optimizer):
    """Every so often the weights are their mean with what they were (Zhang et al. 2019)."""

    def __init__(self, base: torch.optim.Optimizer, every: int = 2) -> None:
        super().__init__([p for group in base.param_groups for p in group["params"]], {})
        self.base, self.every, self.count = base, every, 0
        self.slow = [p.detach().clone() for p in self.param_groups[0]["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        self.base.step()
        self.count += 1
        if self.count % self.every == 0:
            for slow, p in zip(self.slow, self.param_groups[0]["params"], strict=True):
                slow.lerp_(p, 0.5)
                p.copy_(slow)


WRAP = {
    "Whitened": Whitened,
    "InputScaled": InputScaled,
    "Preconditioned": Preconditioned,
    "UnitConsistent": lambda inner, model: UnitConsistent(inner, model, example_input=torch.ones(1, 4)),
}
each_wrapper = pytest.mark.parametrize("name", WRAP)


@each_wrapper
@pytest.mark.parametrize("between", [lambda i, _: i, lambda i, model: GradientOnly(i, model, Proportional())])
def test_they_are_refused_within_with_the_order_that_works(name, between):
    model = network()
    message = rf"^{name} around Lookahead, which holds .* Write Lookahead\({name}\(SGD\(…\), model\), …\)\.$"
    with pytest.raises(ValueError, match=message):
        WRAP[name](between(Lookahead(sgd(model)), model), model)


@each_wrapper
def test_that_order_is_the_average_of_the_weights(name):
    model, plain = network(), network()
    slow = weights(plain)
    optimizer, inside = Lookahead(WRAP[name](sgd(model), model)), WRAP[name](sgd(plain), plain)
    for step in range(4):
        for net, own in ((model, optimizer), (plain, inside)):
            stepped(net, own, inputs(step))
        if step % 2:
            with torch.no_grad():
                for average, p in zip(slow, plain.parameters(), strict=True):
                    p.copy_(average.lerp_(p, 0.5))
        assert same(model.parameters(), plain.parameters())


@each_wrapper
def test_chains_are_no_such_optimizers(name):
    model = network()
    chain = ChainedOptimizer([SGD(model[0].parameters(), lr=0.1), AdamW(model[2].parameters())])
    assert WRAP[name](chain, model).inner is chain
