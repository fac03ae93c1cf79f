"""Steps in other units by other rates, of optimizers known to step in proportion to theirs."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from .unread import is_known, those_who_step


def rated_by_step(optimizer: Optimizer) -> set[int]:
    """Ids of the weights whose steps `AtRates` can scale at no cost: the optimizer takes them one after the other.

    Groups of one weight each would cost it its kernels for many weights, which it has on a GPU or is asked for.
    """
    optimizer = those_who_step(optimizer)[-1]
    if not is_known(optimizer):
        return set()
    return {
        id(parameter)
        for group in optimizer.param_groups
        if not (group.get("foreach") or group.get("fused"))
        for parameter in group["params"]
        if parameter.device.type == "cpu"
    }


class AtRates:
    r"""Weights that stay where they are, while their step is that on W' = s W: at the rate η / s, with the decay λ s.

    Of an optimizer whose step on W' is :math:`\Delta W' = -\eta (U + \lambda W')`, with a U of its state and the
    gradient, that is :math:`\Delta W = \Delta W' / s = -(\eta / s) (U + \lambda s W)`; where the decay is part of the
    gradient, :math:`G' + \lambda W' = G / s + \lambda s W` all the same.

    Every weight is a group of its own. Its gradient is divided when the optimizer comes to it, and its old value kept
    until the optimizer goes on: copies of one layer at a time, which the processor's caches still hold.

    Args:
        optimizer: one that `rated_by_step` knows, or wrappers around it that do nothing.
        factors: s by the ids of the weights.
    """

    def __init__(self, optimizer: Optimizer, factors: Mapping[int, float]) -> None:
        self.optimizer, self.factors = those_who_step(optimizer)[-1], factors
        self.groups = self.optimizer.param_groups
        #: The weight that is being stepped on, its value and its gradient.
        self.now: tuple[nn.Parameter, Tensor, Any] | None = None

    def enter(self) -> None:
        """Give every weight a group with its rate."""
        if self.factors:
            self.optimizer.param_groups = _Groups(self)

    def leave(self) -> None:
        """Give the groups back."""
        if self.factors:  # those of an optimizer around others may be a property that cannot be set
            self.optimizer.param_groups = self.groups

    def restore(self) -> None:
        """Give the groups back, and the weight in hand its old value."""
        self.leave()
        self._put_back()

    def _put_back(self) -> None:
        if self.now is not None:
            parameter, weight, gradient = self.now
            self.now = None
            parameter.copy_(weight)
            parameter.grad = gradient

    def parts(self) -> Iterator[dict[str, Any]]:
        """Yield each group without the weights that have factors, then one for each of these."""
        self._put_back()  # of a look at the groups that went no further: Adam looks where there is a GPU
        for group in self.groups:
            if rest := [p for p in group["params"] if id(p) not in self.factors]:
                yield {**group, "params": rest}
            for parameter in group["params"]:
                if (factor := self.factors.get(id(parameter))) is not None:
                    gradient = parameter.grad
                    self.now = parameter, parameter.clone(), gradient
                    parameter.grad = gradient / factor
                    decay = group.get("weight_decay", 0.0) * factor
                    yield {**group, "params": [parameter], "lr": group["lr"] / factor, "weight_decay": decay}
                    if parameter.grad is not None:  # else the optimizer has freed it
                        parameter.grad = gradient
                    self.now = None


class _Groups(list[dict[str, Any]]):
    """The groups of an optimizer, whose loop over them is over `AtRates.parts`."""

    def __init__(self, at: AtRates) -> None:
        super().__init__(at.groups)
        self.at = at

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self.at.parts()
