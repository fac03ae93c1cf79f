"""BatchIdeal with a memory: the running average of a layer's inputs, and the gradient measured by it."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch._C import _functorch

from .corrected_layers import Corrected
from .corrections import BatchIdeal, Correction, Rows


class RunningIdeal(Correction):
    r"""What one layer keeps under `BatchIdeal(decay=…)`; made by `attach`, not by hand.

    Backward passes add up :math:`\tilde X^\top \tilde X` and leave plain gradients; `precondition` makes of
    them, once per step, :math:`(A + \lambda I)^{-1} \tilde X^\top G`.

    Args:
        rule: damping, decay and the rest.
        label: the layer, for error messages.
    """

    traceable = False

    def __init__(self, rule: BatchIdeal, label: str) -> None:
        self.rule, self.label = rule, label
        #: Sums since the last step: X~ᵀX~ and the number of rows.
        self.pending: Tensor | None = None
        self.pending_rows = 0
        #: Running sums with the weights decay^age, and the sum of those weights.
        self.total: Tensor | None = None
        self.rows = self.weight = 0.0
        self.steps = 0
        self._factor: Tensor | None = None

    def __repr__(self) -> str:
        return repr(self.rule)

    def scales(self, factors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the scale of a row that is alone; see `BatchIdeal.scales`."""
        return self.rule.scales(factors)

    def gradients(self, rows: Rows) -> dict[str, Tensor]:
        """Remember the rows, and return the plain gradients."""
        gram = rows.gram()
        if _functorch.is_functorch_wrapped_tensor(gram):
            raise RuntimeError(
                f"{self.label} remembers its inputs ({self.rule}), which a transform of torch.func would have to carry "
                "outside; call backward() outside of the transform, or use decay=None."
            )
        if self.pending is not None and self.pending.shape == gram.shape:
            self.pending += gram
        else:
            self.pending, self.pending_rows = gram, 0
        self.pending_rows += rows.count
        ones = torch.ones((), dtype=gram.dtype, device=gram.device)
        return rows.contract({name: ones.expand_as(factor) for name, factor in rows.factors().items()})

    def forget_pending(self) -> None:
        """Drop what backward passes have left since the last step, as zero_grad drops their gradients."""
        self.pending, self.pending_rows = None, 0

    @torch.no_grad()
    def precondition(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Update the average, and return the ideal gradients.

        Args:
            gradients: plain gradients of the trained ones of "weight" and "bias", as the backward passes since the last
                step left them.

        Returns:
            The same names and shapes. If no backward has run since, `gradients` themselves.
        """
        if self.pending is None:
            return dict(gradients)
        gram, rows = _summed_over_processes(self.pending, self.pending_rows)
        self.forget_pending()
        decay = self.rule.decay
        assert decay is not None
        if self.total is None or self.total.shape != gram.shape:  # another parameter is trained than before
            self.total, self.rows, self.weight, self.steps, self._factor = torch.zeros_like(gram), 0.0, 0.0, 0, None
        self.total.mul_(decay).add_(gram)
        self.rows = decay * self.rows + rows
        self.weight = decay * self.weight + 1
        if self._factor is None or self.steps % self.rule.every == 0:
            self._factor = self.rule.factor(self.total / self.weight, self.rows / self.weight)
        self.steps += 1
        return self._apply(self._factor, gradients)

    def _apply(self, factor: Tensor, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        stack = factor.shape[:-2]  # the groups of a convolution, the members of an ensemble
        blocks = []
        if "weight" in gradients:
            has_bias = "bias" in gradients
            blocks.append(gradients["weight"].reshape(*stack, -1, factor.shape[-1] - has_bias))
        if "bias" in gradients:
            blocks.append(gradients["bias"].reshape(*stack, -1, 1))
        plain = torch.cat(blocks, -1).mT.to(factor.dtype)
        solved = torch.cholesky_solve(plain, factor).mT
        if self.rule.per_sample:
            solved = solved * (self.rows / self.weight)
        found = {}
        if "weight" in gradients:
            found["weight"] = solved[..., : blocks[0].shape[-1]]
        if "bias" in gradients:
            found["bias"] = solved[..., -1]
        return {name: part.reshape(gradients[name].shape).to(gradients[name].dtype) for name, part in found.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the memory, for a checkpoint."""
        return {
            "total": self.total, "rows": self.rows, "weight": self.weight, "steps": self.steps, "factor": self._factor
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the memory from a checkpoint."""
        self.total, self._factor = (None if state[k] is None else state[k].clone() for k in ("total", "factor"))
        self.rows, self.weight, self.steps = state["rows"], state["weight"], state["steps"]


def bound(correction: Correction, label: str) -> Correction:
    """The rule as one layer keeps it: with a memory of its own, if it needs one."""
    if isinstance(correction, BatchIdeal) and correction.keeps_memory:
        return RunningIdeal(correction, label)
    return correction


def precondition(model: nn.Module) -> None:
    """Turn the plain gradients that `BatchIdeal(decay=…)` leaves in p.grad into ideal ones, once per step.

    `GradientOnly` calls it in `step`; with `attach` alone, call it between the last backward and the optimizer's
    step, on every process of data-parallel training alike. Layers without a running average, or without a backward
    since the last call, are left alone.

    Example:
        >>> import torch
        >>> from adiv_optim import BatchIdeal, attach, precondition
        >>> model = attach(torch.nn.Linear(2, 1, bias=False), BatchIdeal(damping=0.0, decay=0.0))
        >>> for row in torch.tensor([[[1.0, 0.0]], [[1.0, 1.0]]]):  # two micro-batches
        ...     model(row).sum().backward()
        >>> precondition(model)
        >>> (torch.tensor([[1.0, 0.0], [1.0, 1.0]]) @ model.weight.grad.T).flatten()  # both outputs move by 1
        tensor([1.0000, 1.0000])
    """
    for rule, layer in _remembering(model):
        gradients = {
            name: parameter.grad
            for name, parameter in layer.named_parameters(recurse=False)
            if parameter.requires_grad and parameter.grad is not None
        }
        if not gradients:
            rule.forget_pending()
            continue
        for name, gradient in rule.precondition(gradients).items():
            gradients[name].copy_(gradient)


def forget_pending(model: nn.Module) -> None:
    """Drop what backward passes since the last step have left for `precondition`."""
    for rule, _ in _remembering(model):
        rule.forget_pending()


def memory(model: nn.Module) -> dict[str, RunningIdeal]:
    """Every running average of a model, by its layer's path."""
    paths = {module: path for path, module in model.named_modules()}
    return {paths[layer]: rule for rule, layer in _remembering(model)}


def _remembering(model: nn.Module) -> Iterator[tuple[RunningIdeal, nn.Module]]:
    for module in model.modules():
        if isinstance(module, Corrected) and isinstance(module._correction, RunningIdeal):
            yield module._correction, module


def _summed_over_processes(gram: Tensor, rows: int) -> tuple[Tensor, int]:
    """Sums over the processes of the default group, if there are any; data parallelism averages the gradients."""
    if not (distributed.is_available() and distributed.is_initialized()) or distributed.get_world_size() == 1:
        return gram, rows
    count = torch.tensor(rows, device=gram.device)
    distributed.all_reduce(gram)
    distributed.all_reduce(count)
    return gram, int(count)
