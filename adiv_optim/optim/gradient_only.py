"""Gradient-only corrections: attached on construction; every other call goes to the optimizer."""

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from .._checks import warn
from .._device import has_gradient
from ..attach import attach, correction_coverage, detach, extend
from ..corrections import Correction
from ..rows.layers import Corrected
from ..rows.models import UNCALLED, Coverage, Skip, describe_uncalled, listed
from .parameters import OUTSIDE, check_same_parameters, report
from .wrapper import OptimizerWrapper


class GradientOnly(OptimizerWrapper):
    """Let any optimizer step on corrected gradients.

    On construction the correction goes on the model's layers (see `attach`); from then on `loss.backward()` leaves the
    corrected gradient in `p.grad`, and the wrapper hands every call to the optimizer. The forward pass, the state dict
    and the exported model stay as they are. Accumulation and data parallelism need nothing; `BatchIdeal` alone is ideal
    for the rows of one call, not for the union of several, as `Preconditioned` is. A layer that comes into the model
    later is corrected once `add_param_group` brings its parameters.

    The correction is the model's, and stays until `detach` takes it off, also when the wrapper is deleted. A second
    optimizer on the same model is passed unwrapped. Where the inner optimizer's step fails, weights are where it left
    them, as without a wrapper.

    Args:
        optimizer: any torch.optim.Optimizer but LBFGS.
        model: the model whose gradients are corrected.
        correction: `Proportional()`, `Disproportional()`, `BatchIdeal()` or your own `Correction`.
        skip: paths of modules and module types to leave alone; see `attach`.
        strict: refuse a model with trainable parameters that would not be corrected; see `attach`.

    Raises:
        TypeError: not an optimizer, LBFGS, or not a correction.
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

    #: The arguments for layers that come later; None once this is detached.
    _attach_arguments: dict[str, Any] | None = None
    _steps_with_gradients = 0

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        correction: Correction,
        *,
        skip: Skip = (),
        strict: bool = False,
    ) -> None:
        super().__init__(optimizer)
        check_same_parameters("GradientOnly", optimizer, model)
        skip = listed(skip)
        self.model = attach(model, correction, skip=skip, strict=strict)
        self._attach_arguments = {"correction": correction, "skip": skip, "strict": strict}
        coverage = self.coverage()
        outside = sum(coverage.elements[name] for name, why in coverage.skipped.items() if why == OUTSIDE)
        if 2 * outside > (every := sum(coverage.elements.values())):
            warn(
                f"GradientOnly: {outside / every:.1%} of the elements that the optimizer holds are "
                f"{OUTSIDE}, {type(self.model).__name__}, and keep the plain gradient. coverage() lists all of them."
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "model": self.model, "_attach_arguments": self._attach_arguments}

    def __repr__(self) -> str:
        rules = dict.fromkeys(repr(layer._correction) for layer in self._layers())
        return f"{type(self).__name__}({self.inner!r}, correction={', '.join(rules) or None})"

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group to the inner optimizer, and correct the layers that are new and hold some of it."""
        super().add_param_group(param_group)
        if self._attach_arguments is not None:
            extend(self.model, parameters=self.param_groups[-1]["params"], **self._attach_arguments)

    def _inner_step(self, **kwargs: Any) -> None:
        is_second = self._count_step()
        super()._inner_step(**kwargs)
        if is_second:
            self._warn_of_uncalled_layers()

    @torch.compiler.disable  # the optimizer's step can be traced, and what is said around it not in torch 2.9
    def _count_step(self) -> bool:
        """Count a step with gradients, and say whether it is the second."""
        has_gradients = any(p.grad is not None for group in self.param_groups for p in group["params"])
        self._steps_with_gradients += has_gradients
        return has_gradients and self._steps_with_gradients == 2

    @torch.compiler.disable
    def _warn_of_uncalled_layers(self) -> None:
        """Warn of layers that have gradients and have never been called."""
        skipped = self.coverage().skipped
        # Some loops give zeros to parameters that a batch did not reach.
        parameters = self.model.named_parameters()
        if uncalled := [path for path, p in parameters if skipped.get(path) == UNCALLED and has_gradient(p)]:
            warn(f"GradientOnly takes plain steps with {describe_uncalled(uncalled)}")

    def detach(self) -> nn.Module:
        """Take the correction off and return the plain model; the optimizer goes on with plain gradients."""
        model, self._attach_arguments = detach(self.model), None
        return model

    def coverage(self) -> Coverage:
        """Say of every parameter that the optimizer holds whether its gradient is corrected, or why it is not."""
        coverage = correction_coverage(self.model, trained=self._steps_with_gradients > 1)
        return report(self, self.model, coverage, "no correction attached")

    def metrics(self) -> dict[str, float]:
        """Return plain numbers for a logger: corrected shares, and how many corrected layers have run."""
        seen = [layer._ran for layer in self._layers()]
        return self._metrics(self.coverage(), {"layers": len(seen), "layers_seen": sum(seen)})

    def _layers(self) -> list[Corrected]:
        return [module for module in self.model.modules() if isinstance(module, Corrected)]
