"""Gradient-only corrections: attach on construction, otherwise the optimizer as it was."""

import warnings
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.optim import SGD, Optimizer

from ..attach import attach, detach
from ..corrections import BatchIdeal, Correction
from ..running import check_memory, forget_pending, memory, precondition
from .wrapper import OptimizerWrapper, check_same_parameters

#: Rates of SGD, lr / (1 - momentum), outside of which `BatchIdeal` does not train, per_sample or not. Networks on
#: scikit-learn's digits, batches of 32, damping 1: below the first they are at chance after two epochs; from the second
#: on some diverge. Without per_sample the loss may be a sum, whose rates have no such upper end.
_RATES = {True: (3e-3, 10.0), False: (1e-2, float("inf"))}


class GradientOnly(OptimizerWrapper):
    """Let any optimizer step on corrected gradients.

    On construction the correction goes on the model's layers (see `attach`); from then on `loss.backward()`
    leaves the corrected gradient in `p.grad`, and the wrapper hands every call to the optimizer. The
    forward pass, the state dict and the exported model stay as they are. Per-row corrections are additive,
    so accumulation over micro-batches and data parallelism need nothing; `BatchIdeal` is ideal for the rows
    of one backward and not for their union, unless it has a decay: then `step` corrects the gradient, `zero_grad`
    drops what it would have corrected it by, and `state_dict` holds the running averages under "running" (a plain
    optimizer ignores them).

    Args:
        optimizer: any torch.optim.Optimizer but LBFGS.
        model: the model whose gradients are corrected.
        correction: `Proportional()`, `Disproportional()`, `BatchIdeal()` or your own `Correction`.
        skip: paths of modules and module types to leave alone; see `attach`.
        strict: refuse a model with trainable parameters that would not be corrected; see `attach`.

    Warns:
        UserWarning: SGD's rate is far from any that trains with `BatchIdeal`.

    Raises:
        TypeError: not an optimizer, LBFGS, not a correction, or the arguments are in the wrong order.
        ValueError: the optimizer holds no parameter of the model, or `attach` finds fault with it.

    Example:
        >>> import torch
        >>> from adiv_optim import GradientOnly, Proportional
        >>> model = torch.nn.Linear(2, 1)
        >>> x = torch.tensor([[3.0, 4.0]])
        >>> before = model(x).item()
        >>> opt = GradientOnly(torch.optim.SGD(model.parameters(), lr=0.1), model, Proportional())
        >>> model(x).sum().backward()  # the output gradient is 1 …
        >>> opt.step()
        >>> round(model(x).item() - before, 4)  # … and the output moves by -lr × 1; plain SGD: -2.6
        -0.1
    """

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        correction: Correction,
        *,
        skip: Iterable[str | type[nn.Module]] = (),
        strict: bool = False,
    ) -> None:
        if isinstance(optimizer, nn.Module) or isinstance(model, (Optimizer, Correction)):
            found = ", ".join(type(argument).__name__ for argument in (optimizer, model, correction))
            raise TypeError(
                f"GradientOnly: arguments in the wrong order: found {found}; it takes (optimizer, model, correction)."
            )
        super().__init__(optimizer)
        check_same_parameters("GradientOnly", optimizer, model)
        self.model = attach(model, correction, skip=skip, strict=strict)
        if type(optimizer) is SGD and isinstance(correction, BatchIdeal):
            _warn_of_rate(optimizer, correction)

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy or a pickle keeps: as in torch, no hooks."""
        return {**super().__getstate__(), "model": self.model}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, and what a running average has seen of them."""
        super().zero_grad(set_to_none)
        forget_pending(self.model)

    def _finish_gradients(self) -> None:
        super()._finish_gradients()
        precondition(self.model)

    def _state_dict(self) -> dict[str, Any]:
        averages = {path: rule.state_dict() for path, rule in memory(self.model).items()}
        inner = super()._state_dict()
        return {**inner, "running": averages} if averages else inner

    def _load_state_dict(self, state_dict: dict[str, Any]) -> None:
        rules, averages = memory(self.model), state_dict.get("running", {})
        if "running" in state_dict:
            check_memory(self.model, averages, "GradientOnly: state_dict['running']")
        super()._load_state_dict({name: value for name, value in state_dict.items() if name != "running"})
        for path, rule in rules.items():
            if path in averages:
                rule.load_state_dict(averages[path])
            else:
                rule.reset()

    def detach(self) -> nn.Module:
        """Take the correction off and return the plain model; the optimizer goes on with plain gradients."""
        return detach(self.model)


def _warn_of_rate(optimizer: SGD, rule: BatchIdeal) -> None:
    # A rate of 0 freezes a group, or waits for a schedule.
    rates = [
        float(group["lr"]) / max(1 - group["momentum"], 1e-3) for group in optimizer.param_groups if group["lr"] > 0
    ]
    least, most = _RATES[rule.per_sample]
    if not rates or least <= max(rates) < most:
        return
    if max(rates) >= most:
        remedy = "Each row moves by about the rate times its own loss gradient; take a rate of 0.1 to 1"
    elif rule.per_sample:
        remedy = "Each row moves by about the rate times its own loss gradient, hardly at all; take a rate of 0.1 to 1"
    else:
        remedy = (
            "With a loss that is a mean over B samples every row moves by a B-th of the rate, hardly at all; take "
            "BatchIdeal(per_sample=True) and a rate of 0.1 to 1, or a rate B times as large"
        )
    warnings.warn(
        f"GradientOnly: SGD's rate, lr / (1 - momentum), is {max(rates):.3g}, far from what trains with {rule!r}. "
        f"{remedy}.",
        UserWarning,
        stacklevel=3,
    )
