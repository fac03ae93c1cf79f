"""Letting an optimizer step on other variables than the model's weights: the one driver of a step."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from .._linalg import host
from .._linalg.limits import check_dict
from .._linalg.shards import whole
from ..attach.coverage import Coverage, warn
from ..attach.reports import fed, gone, report
from ..functional.shared import refuse_capture, without_autocast
from .chained import ChainedOptimizer
from .snapshot import Snapshot, Transform, decay_factors, hooked
from .wrapper import OptimizerWrapper, check_same_parameters

#: What to do where FSDP1 has flattened parameters.
UNFLATTENED = "use fully_shard, or GradientOnly, which goes with FSDP1"
#: Where in a state dict a method keeps what it remembers, and where methods of wrappers within do.
_OURS = ("method", "within")


class Method:
    """What a wrapper measures, and the transforms that follow from it; this one has none."""

    #: What may be done about a checkpoint that does not fit.
    remedy = "load what was saved of the same model with the same settings, or leave 'method' out to measure anew"

    def transforms(self) -> Sequence[Transform]:
        """Measure if that is due, and return this step's transforms; other parameters take the plain step."""
        return ()

    def rescale(self, snapshots: Sequence["Snapshot"]) -> None:
        """Called when steps have been mapped back and not yet added: sums over processes belong here."""

    def after_step(self) -> None:
        """Called when a step has been taken and the weights are the user's again."""

    def coverage(self) -> Coverage:
        """Say of every trainable parameter how it is treated, or why it is not."""
        return Coverage()

    def treated_parameters(self) -> Collection[int] | None:
        """The ids of the parameters that `coverage` speaks of; None is whatever has the names now."""
        return None

    def why_inactive(self) -> str:
        """Say, after the second step, why nothing has been treated so far, with the remedy; "" if something has."""
        return ""

    def metrics(self) -> dict[str, float]:
        """Return what was measured last, as scalars for a logger."""
        return {}

    def settings(self) -> dict[str, Any]:
        """Return what it was built with, as the wrapper's repr shows it."""
        return {"detached": True}

    def state_dict(self) -> dict[str, Any]:
        """Return what it remembers from step to step, with the same keys and shapes before and after training."""
        return {}

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise a ValueError if the state cannot be loaded as it is; nothing is loaded then."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take from a checkpoint what it remembers; an empty one makes it forget."""


class Reparametrized(OptimizerWrapper):
    """An optimizer that steps on other variables than the model's weights; its state is about those too.

    The weights are mapped in place around the inner `step` and are the user's own outside of it. Whatever ends the
    step early, an error, a lack of memory or Ctrl-C, all treated weights then have their old values.
    The inner optimizer may read p and p.grad and nothing else of the model. One that is known to read no weights finds
    zeros in their place. After the step p.grad is the gradient that it was before. The inner optimizer's own `step()`,
    called by hand, is a plain step.

    Args:
        optimizer: any torch.optim.Optimizer but LBFGS.
        model: the model whose parameters it steps on.
        method: makes the transforms.

    Raises:
        TypeError: not an optimizer, or LBFGS.
        ValueError: the optimizer holds no parameter of the model, holds another optimizer, or is a wrapper that this
            one cannot go around.
    """

    model: nn.Module
    method: Method

    def __init__(self, optimizer: Optimizer, model: nn.Module, method: Method) -> None:
        super().__init__(optimizer)
        check_same_parameters(type(self).__name__, optimizer, model)
        self._refuse_within()
        self.__setstate__({**vars(self), "model": unwrapped(model), "method": method})

    def goes_around(self, within: "Reparametrized") -> bool:
        """Whether an optimizer within may map weights as well: only where this one leaves the weights alone."""
        return False

    def _refuse_within(self) -> None:
        own, within = type(self).__name__, self.inner
        while isinstance(within, OptimizerWrapper):
            if isinstance(within, Reparametrized) and not self.goes_around(within):
                turned = f"write {type(within).__name__}({own}(…), …)"
                raise ValueError(
                    f"{own} around {type(within).__name__}: the inner one would measure a model whose weights the "
                    f"outer one has mapped; {turned if within.goes_around(self) else 'choose one'}."
                )
            within = within.inner
        held = [value for value in vars(within).values() if isinstance(value, Optimizer)]
        if held and not isinstance(within, ChainedOptimizer):
            name, inside = type(within).__name__, type(held[0]).__name__
            raise ValueError(
                f"{own} around {name}, which holds an optimizer itself: it would mix weights of one step's variables "
                f"with those of another's. Write {name}({own}({inside}(…), model), …)."
            )

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy or a pickle keeps: as in torch, no hooks."""
        return {**super().__getstate__(), "model": self.model, "method": self.method}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take what a copy or a pickle kept."""
        super().__setstate__(state)
        self._own_steps, self._fed = 0, False
        self._told: set[str] = set()

    @property
    def detached(self) -> bool:
        """Whether `detach` was called."""
        return type(self.method) is Method

    def _makes_state(self) -> bool:
        """Whether rates, gradients and state are all nothing, as where torch.distributed.checkpoint takes a step.

        It does so to know the state of an optimizer that has none. What is remembered belongs to the steps that train.
        """
        rates = [group.get("lr") for group in self.param_groups]
        if self.state or any(rate != 0 if not isinstance(rate, Tensor) or rate.is_cpu else True for rate in rates):
            return False
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        dense = all(gradient.layout == torch.strided for gradient in gradients)
        return dense and not any(host.read(*(whole(gradient.any()) for gradient in gradients)))

    @torch.compiler.disable  # traced, a step would be dozens of graphs
    @torch.no_grad()
    def _inner_step(self, *args: Any, **kwargs: Any) -> None:
        if self._makes_state():
            super()._inner_step(*args, **kwargs)
            return
        device = next(self.model.parameters()).device
        if not self.detached:
            refuse_capture(type(self).__name__, "counts its steps", next(self.model.parameters()))
        # Before the step, which may free gradients. Looking costs a walk over the model, and seldom finds anything.
        self._fed, number = self._fed or fed(self), self._own_steps + 1
        reason = gone(self, self.model, number == 2 and not self._fed) if number & (number - 1) == 0 else ""
        with without_autocast(device.type):  # it would round the products of transforms
            self._mapped_step(*args, **kwargs)
        self.method.after_step()
        self._own_steps += 1
        reason = reason or (self.method.why_inactive() if self._own_steps == 2 else "")
        if reason and reason not in self._told and not self.detached:
            self._told.add(reason)
            warn(f"{type(self).__name__} takes plain steps: {reason}")

    def _mapped_step(self, *args: Any, **kwargs: Any) -> None:
        held = {id(p) for group in self.param_groups for p in group["params"]}
        decay, read = decay_factors(self.inner), hooked(self.inner)
        # A model may have several optimizers, and a method know weights of another one's.
        snapshots = [
            Snapshot(transform, decay, read)
            for transform in self.method.transforms()
            if all(id(p) in held for p in transform.parameters)
        ]
        try:
            for snapshot in snapshots:
                snapshot.enter()
            super()._inner_step(*args, **kwargs)
            for snapshot in snapshots:
                snapshot.leave()
            self.method.rescale(snapshots)
            for snapshot in snapshots:
                snapshot.write()
        except BaseException:
            for snapshot in snapshots:
                snapshot.restore()
            raise

    def settings(self) -> dict[str, Any]:
        """Return what the wrapper was built with, as its repr shows it."""
        return self.method.settings()

    def coverage(self) -> Coverage:
        """Say of every parameter that the optimizer holds how its step is treated, or why it takes the plain one."""
        unknown = (
            "detached" if self.detached else "it, or its name, is newer than the wrapper; wrap the optimizer again"
        )
        return report(self, self.model, self.method.coverage(), self.method.treated_parameters(), unknown)

    def detach(self) -> nn.Module:
        """Return the model, and take plain steps from now on."""
        self.method = Method()
        return self.model

    def metrics(self) -> dict[str, float]:
        """Return what was measured last as a flat dict of numbers, for any logger."""
        found = self.coverage()
        shares = {"treated_parameters": found.parameter_share, "treated_elements": found.element_share}
        own = {f"{type(self).__name__}/{key}": float(value) for key, value in (shares | self.method.metrics()).items()}
        return {**super().metrics(), **own}

    def _of_two_weights(self, name: str) -> Callable[[], Any]:
        super()._of_two_weights(name)
        raise AttributeError(
            f"{type(self).__name__} has no {name}(): {type(self.inner).__name__} keeps its second set of weights in "
            "the variables of the steps it took, and would mix them with the model's own; wrap it in GradientOnly."
        )

    def _state_dict(self) -> dict[str, Any]:
        inner = dict(super()._state_dict())
        # What a method within remembers goes one level down: both have one name.
        within = {name: inner.pop(name) for name in _OURS if name in inner}
        remembered = self.method.state_dict()
        return {**inner, **({"method": remembered} if remembered else {}), **({"within": within} if within else {})}

    def _load_state_dict(self, state_dict: dict[str, Any]) -> None:
        remembered, within = state_dict.get("method", {}), state_dict.get("within", {})
        if "method" in state_dict:
            self.method.check_state_dict(remembered)
        check_dict(within, f"{type(self).__name__}: state_dict['within']", self.method.remedy)
        rest = {name: value for name, value in state_dict.items() if name not in _OURS}
        super()._load_state_dict({**rest, **within})
        self.method.load_state_dict(remembered)


def unwrapped(model: nn.Module) -> nn.Module:
    """The model itself, whose parameters have other names in DistributedDataParallel and what torch.compile returns."""
    while isinstance(model, DistributedDataParallel) or hasattr(model, "_orig_mod"):
        inside: Any = model.module if isinstance(model, DistributedDataParallel) else model._orig_mod
        model = inside
    return model
