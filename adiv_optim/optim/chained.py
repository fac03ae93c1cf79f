"""Several optimizers on disjoint parameters, as one."""

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch.optim import LBFGS, Optimizer

from .wrapper import OptimizerWrapper


class ChainedState(MutableMapping[Any, Any]):
    """The states of several optimizers as one mapping; that of a parameter lives in the one whose group holds it."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers

    def _of(self, key: Any) -> Any:
        """Return the state that has an entry, or is to have it."""
        for optimizer in self._optimizers:
            if key in optimizer.state:
                return optimizer.state
        for optimizer in self._optimizers:
            if any(key is parameter for group in optimizer.param_groups for parameter in group["params"]):
                return optimizer.state
        shape = f" of shape {tuple(key.shape)}" if isinstance(key, torch.Tensor) else f" {key!r}"
        raise KeyError(
            f"ChainedOptimizer.state: no group of its optimizers holds the parameter{shape}; put it into "
            "group['params'] of one of them first."
        )

    def __getitem__(self, key: Any) -> Any:
        if key not in self:  # torch's own would make an entry
            raise KeyError(key)
        return self._of(key)[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._of(key)[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._of(key)[key]

    def __contains__(self, key: object) -> bool:
        return any(key in optimizer.state for optimizer in self._optimizers)

    def __iter__(self) -> Iterator[Any]:
        return (key for optimizer in self._optimizers for key in optimizer.state)

    def __len__(self) -> int:
        return sum(len(optimizer.state) for optimizer in self._optimizers)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({dict(self)!r})"


class ChainedOptimizer(Optimizer):
    """Several optimizers on disjoint parameters as one, such as Muon for matrices and AdamW for the rest.

    Groups, state and state dict are those of one optimizer over all the parameters, in the order of `optimizers`: a
    scheduler reaches every group, GradScaler skips all the steps or none, and every wrapper of this library goes
    around it. `step(closure)` calls the closure once, then each optimizer's `step()` in turn. The optimizers stay
    usable: `chained.optimizers[0].state_dict()` is the state dict of Muon alone, and loads one. OneCycleLR wants a list
    of `max_lr`, and `cycle_momentum=False`, as `defaults` is empty.

    Args:
        optimizers: built already, each on parameters of its own.

    Raises:
        TypeError: not optimizers, LBFGS, or a wrapper of this library, which belongs around the chain.
        ValueError: no optimizer, or a parameter that two of them hold.

    Example:
        >>> import torch
        >>> from adiv_optim import ChainedOptimizer
        >>> model = torch.nn.Linear(3, 2)
        >>> muon, adamw = torch.optim.Muon([model.weight], lr=0.02), torch.optim.AdamW([model.bias], lr=1e-3)
        >>> opt = ChainedOptimizer([muon, adamw])
        >>> schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 0.5)
        >>> [group["lr"] for group in opt.param_groups]
        [0.01, 0.0005]
    """

    optimizers: tuple[Optimizer, ...]

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        if isinstance(optimizers, Optimizer):
            raise TypeError("ChainedOptimizer: optimizers is an optimizer; pass a list of them, [Muon(…), AdamW(…)].")
        every, holder = tuple(optimizers), dict[int, int]()
        if not every:
            raise ValueError("ChainedOptimizer: optimizers is empty; pass [Muon(…), AdamW(…)].")
        for place, optimizer in enumerate(every):
            if not isinstance(optimizer, Optimizer) or isinstance(optimizer, (LBFGS, OptimizerWrapper)):
                name = type(optimizer).__name__
                around = f"; write {name}(ChainedOptimizer([…]), model)" * isinstance(optimizer, OptimizerWrapper)
                raise TypeError(
                    f"ChainedOptimizer: optimizers[{place}] is of type {name}; wanted a plain torch.optim.Optimizer, "
                    f"and not LBFGS, which calls its closure many times within a step{around}."
                )
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                if (other := holder.setdefault(id(parameter), place)) != place:
                    raise ValueError(
                        f"ChainedOptimizer: optimizers[{other}] and optimizers[{place}] both hold a parameter of shape "
                        f"{tuple(parameter.shape)}; give each parameter to one of them."
                    )
        # Optimizer.__init__ would build param_groups anew; this only fills in the tables of hooks.
        super().__setstate__({"optimizers": every})

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all optimizers, in their order: the dicts themselves, in a new list."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        for optimizer, groups in zip(self.optimizers, self._shares(value), strict=True):
            optimizer.param_groups = groups

    @property
    def state(self) -> Any:
        """The state of each parameter, which lives in its own optimizer."""
        return ChainedState(self.optimizers)

    @state.setter
    def state(self, value: Mapping[Any, Any]) -> None:
        owners = [(self.state._of(key), key, entry) for key, entry in value.items()]  # or a KeyError, before a change
        self.state.clear()
        for state, key, entry in owners:
            state[key] = entry

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """Empty: the optimizers have different ones."""
        return {}

    def __getstate__(self) -> dict[str, Any]:
        return {"optimizers": self.optimizers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the entries of a copy or a pickle; or groups and state, as torch's load_state_dict hands them over."""
        super().__setstate__({name: value for name, value in state.items() if name not in ("param_groups", "state")})
        if "optimizers" in state:
            return  # each has its own already
        if "param_groups" in state:
            self.param_groups = state["param_groups"]
        if "state" in state:
            self.state = state["state"]
        for optimizer in self.optimizers:
            optimizer.__setstate__({"param_groups": optimizer.param_groups, "state": optimizer.state})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load all optimizers; those that load in their own way, as of 8-bit states, do so with their share."""
        super().load_state_dict(state_dict)
        for optimizer, groups in zip(self.optimizers, self._shares(state_dict["param_groups"]), strict=True):
            if type(optimizer).load_state_dict is not Optimizer.load_state_dict:
                keys, saved = [key for group in groups for key in group["params"]], state_dict["state"]
                state = {key: saved[key] for key in keys if key in saved}
                optimizer.load_state_dict({**state_dict, "state": state, "param_groups": groups})

    def _shares(self, groups: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
        """Deal groups to the optimizers, in their order."""
        counts = [len(optimizer.param_groups) for optimizer in self.optimizers]
        if len(groups) != sum(counts):
            raise ValueError(f"ChainedOptimizer: found {len(groups)} groups, wanted {sum(counts)}, {counts} of each.")
        rest = iter(groups)
        return [[next(rest) for _ in range(count)] for count in counts]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Evaluate the closure if there is one, then let each optimizer step; return the loss, or None."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(*() if set_to_none else (False,))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse by a ValueError: which optimizer the group is for is not known."""
        raise ValueError(
            "ChainedOptimizer: add_param_group does not say which optimizer is to step on the group; call "
            "add_param_group of one of .optimizers, before schedulers and GradientOnly are built."
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self.optimizers)!r})"
