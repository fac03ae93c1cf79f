"""The base of all wrappers: parameter groups, state and hooks are those of the inner optimizer."""

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from .._checks import check_dict
from ..rows.models import Coverage
from .parameters import WRONG_ORDER

#: The prefix of the entries that wrappers add to the optimizer's in a state dict.
OURS = "adiv_optim."
#: The key of a state dict for entries of parameters that the optimizer has no state of yet.
WITHOUT_STATE = f"{OURS}waiting"
#: The module whose functions read `state` to save it.
_CHECKPOINT = "torch.distributed.checkpoint.state_dict"


def _of_inner(name: str) -> Any:
    """A property that is the inner optimizer's, to be read and set."""
    doc = f"The inner optimizer's {name}."
    return property(lambda self: getattr(self.inner, name), lambda self, new: setattr(self.inner, name, new), doc=doc)


class OptimizerWrapper(Optimizer):
    """A torch.optim.Optimizer that hands its work to another one.

    `param_groups`, `state` and `defaults` *are* the inner optimizer's, so schedulers, GradScaler, checkpoints
    and code that reads or writes them see one optimizer. Hooks registered on the wrapper run around the whole step, and
    hooks of the inner optimizer inside it; torch's global ones do both.

    Args:
        optimizer: the optimizer to wrap; kept as `inner`.

    Raises:
        TypeError: `optimizer` is not a torch.optim.Optimizer, is LBFGS, GaussNewton or a wrapper itself, or has an
            `eval()`, as schedule-free ones do.
    """

    inner: Optimizer
    param_groups, defaults = _of_inner("param_groups"), _of_inner("defaults")

    def __init__(self, optimizer: Optimizer) -> None:
        name = type(self).__name__
        if not isinstance(optimizer, Optimizer):
            order = WRONG_ORDER if isinstance(optimizer, nn.Module) else "Build that first, from model.parameters()."
            raise TypeError(f"{name} wraps a torch.optim.Optimizer, found {type(optimizer).__name__}. {order}")
        if isinstance(optimizer, LBFGS):
            raise TypeError(
                f"{name} cannot wrap LBFGS: it evaluates its closure many times within one step, and its line "
                "search needs the true gradient of the loss. Wrap a first-order optimizer (SGD, AdamW, …)."
            )
        if type(optimizer).__name__ == "GaussNewton":
            raise TypeError(f"{name} cannot wrap GaussNewton, which reads no gradients: call its step(terms) itself.")
        if isinstance(optimizer, OptimizerWrapper):
            raise TypeError(
                f"{name} cannot wrap {type(optimizer).__name__}: wrappers do not nest. Choose one; a correction goes "
                "on the model by attach(model, correction), without a wrapper."
            )
        # One that holds another, as Accelerate's, only passes the call on.
        if hasattr(optimizer, "eval") and not any(isinstance(value, Optimizer) for value in vars(optimizer).values()):
            raise TypeError(
                f"{name} cannot wrap {type(optimizer).__name__}, which keeps a second set of weights: write "
                f"ScheduleFreeWrapper({name}(…), …); a correction goes on the model by attach, without a wrapper."
            )
        # Optimizer.__init__ would build param_groups anew; the way in that unpickling takes only fills in
        # the hook tables, all that a wrapper needs.
        super().__setstate__({"inner": optimizer})

    def __getstate__(self) -> dict[str, Any]:
        """Return the entries that a copy or a pickle keeps: as in torch, no hooks."""
        return {"inner": self.inner}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the entries of a copy or a pickle; groups and state, which programs set by it, go to `inner`."""
        inside = {name: value for name, value in state.items() if name in ("param_groups", "state")}
        super().__setstate__({name: value for name, value in state.items() if name not in inside})
        if inside:
            self.inner.__setstate__(inside)

    @property
    def state(self) -> Any:
        """The inner optimizer's own mapping, to read and to write; the memory of wrappers is in `state_dict()` alone.

        torch.distributed.checkpoint, which looks here for the names in a checkpoint, sees a copy with both.
        """
        if sys._getframe(1).f_globals.get("__name__") != _CHECKPOINT:
            return self.inner.state
        state_dict = self._state_dict()
        parameters = {key: parameter for parameter, key in parameters_and_keys(self, state_dict)}
        state = {parameters.get(key, key): entries for key, entries in state_dict["state"].items()}
        return MappingProxyType(defaultdict(dict, state))

    @state.setter
    def state(self, value: Any) -> None:
        self.inner.state = value

    def settings(self) -> dict[str, Any]:
        """Return the arguments that the wrapper was built with, as its repr shows them."""
        return {}

    def __repr__(self) -> str:
        settings = [f"{name}={value!r}" for name, value in self.settings().items()]
        return f"{type(self).__name__}({', '.join([repr(self.inner), *settings])})"

    def metrics(self) -> dict[str, float]:
        """Return the last measurements as a flat dict of numbers, for any logger."""
        return {}

    def _metrics(self, coverage: Coverage, numbers: dict[str, float]) -> dict[str, float]:
        """Return the treated shares and further numbers, by names that begin with the wrapper's."""
        shares = {"treated_parameters": coverage.parameter_share, "treated_elements": coverage.element_share}
        return {f"{type(self).__name__}/{name}": float(value) for name, value in (shares | numbers).items()}

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Call the closure once if there is one, take the inner optimizer's step, and return the closure's result."""
        loss = None
        if torch.is_inference_mode_enabled():
            raise RuntimeError(
                f"{type(self).__name__}: no later step could change what a step in torch.inference_mode() makes; "
                "call step() outside of it, or under torch.no_grad()."
            )
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._inner_step(**kwargs)
        return loss

    def _inner_step(self, **kwargs: Any) -> None:
        self.inner.step(**kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(*() if set_to_none else (False,))  # some take no argument

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group to the inner optimizer, which has it even after an error, and treat its layers."""
        self.inner.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's state dict: a checkpoint loads with or without the wrapper."""
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        state_dict = self._state_dict()
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            replaced = post_hook(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict into wrapper and inner optimizer; or raise a ValueError, and nothing has changed."""
        check_dict(state_dict, f"{type(self).__name__}: state_dict", "load what state_dict() returned")
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = hook(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        self._load_state_dict(state_dict)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def _load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part in ("state", WITHOUT_STATE):
            for key, entries in state_dict.get(part, {}).items():
                if names := wrapper_entries(entries):
                    raise ValueError(
                        f"{type(self).__name__}: state_dict[{part!r}][{key!r}] has an unknown {names[0]!r}, which "
                        "another wrapper saved, or the same one of another model; wrap the optimizer as it was then, "
                        f"or leave the names out that begin with {OURS!r}."
                    )
        self.inner.load_state_dict(state_dict)


def parameters_and_keys(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> Iterator[tuple[Tensor, Any]]:
    """Yield each parameter with the key of its part in a state dict: a number, or its name."""
    for group, saved in zip(optimizer.param_groups, state_dict.get("param_groups", ()), strict=False):
        yield from zip(group["params"], saved.get("params", ()), strict=False)


def wrapper_entries(entries: Any) -> list[str]:
    """Return the names of the entries that wrappers add, in a parameter's part of a state dict; a number has none."""
    return [name for name in entries if str(name).startswith(OURS)] if isinstance(entries, Mapping) else []
