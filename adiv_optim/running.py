"""BatchIdeal with a memory: the running average of a layer's inputs, and the gradient measured by it."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch._C import _functorch

from .checkpoint import ANYTHING, COUNT, NUMBER, POSITIVE, Maybe, check, numbers
from .corrected_layers import Corrected
from .corrections import BatchIdeal, Correction, Rows
from .functional._shared import refuse_capture
from .sharding import refuse_sharded

#: What to do where gradients are sharded, and a running average could turn parts of them only.
WHOLE = "use decay=None, or DistributedDataParallel"


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
        #: Sums since the last step: X~ᵀX~, the number of rows, and which parameters X~ has columns for.
        self.pending: Tensor | None = None
        self.pending_rows = 0
        self.pending_names: frozenset[str] = frozenset()
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.forget_pending()
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

    @torch.compiler.disable  # a backward that a compiled function calls is compiled as well
    def gradients(self, rows: Rows) -> dict[str, Tensor]:
        """Remember the rows, and return the plain gradients."""
        gram = rows.gram()
        if _functorch.is_functorch_wrapped_tensor(gram):
            raise RuntimeError(
                f"{self.label} remembers its inputs ({self.rule}), which a transform of torch.func would have to carry "
                "outside; call backward() outside of the transform, or use decay=None."
            )
        gradients = rows.plain()
        if self.pending is None:
            self.pending, self.pending_names = gram, frozenset(gradients)
        elif self.pending_names == gradients.keys() and self.pending.shape == gram.shape:
            self.pending += gram
        else:
            raise RuntimeError(
                f"{self.label}: {sorted(gradients)} is trained now, {sorted(self.pending_names)} was in the backward "
                "before; call zero_grad() before what is trained changes."
            )
        self.pending_rows += rows.count
        return gradients

    def forget_pending(self) -> None:
        """Drop what backward passes have left since the last step, as zero_grad drops their gradients."""
        self.pending, self.pending_rows, self.pending_names = None, 0, frozenset()

    def begin(self, layer: nn.Module) -> None:
        """Called before each forward: rows whose gradients are gone, by any zero_grad, are dropped as well."""
        own = [p for p in layer.parameters(recurse=False) if isinstance(p, nn.Parameter) and p.requires_grad]
        if torch.is_grad_enabled() and own:
            refuse_capture(self.label, own[0])
        if self.pending is None or torch._C._current_graph_task_id() != -1:
            return  # within a backward pass, by activation checkpointing, gradients may still be on their way to p.grad
        if own and not any(p.grad is not None and bool(p.grad.any()) for p in own):
            self.forget_pending()

    @torch.no_grad()
    def precondition(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Update the average, and return the ideal gradients.

        Args:
            gradients: plain gradients of the trained ones of "weight" and "bias", as the backward passes since the last
                step left them.

        Returns:
            The same names and shapes. If no backward has run since, `gradients` themselves. After a batch that
            holds NaN or inf they are NaN, and the average is left as it was.

        Raises:
            ValueError: the gradients are of other parameters than the backward passes trained.
        """
        if self.pending is None:
            return dict(gradients)
        if gradients.keys() != self.pending_names:
            raise ValueError(
                f"{self.label}: gradients of {sorted(gradients)} to correct, but the backward passes trained "
                f"{sorted(self.pending_names)}; let both be the same from backward to step."
            )
        gram, rows = self.pending, self.pending_rows
        self.forget_pending()
        if not bool(gram.isfinite().all()):
            return {name: torch.full_like(gradient, math.nan) for name, gradient in gradients.items()}
        decay = self.rule.decay
        assert decay is not None
        if self.total is not None and self.total.shape != gram.shape:  # another parameter is trained than before
            self.reset()
        kept = 0.0 if self.total is None else decay
        self.total = gram if not kept or self.total is None else self.total.to(gram).mul_(kept).add_(gram)
        self.rows, self.weight = kept * self.rows + rows, kept * self.weight + 1
        if self._factor is None or self.steps % self.rule.every == 0:
            self._factor = self.rule.factor(self.total / self.weight, self.rows / self.weight)
        self.steps += 1
        return self._apply(self._factor.to(gram), gradients)

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
        """Return the memory, for a checkpoint; a copy, which later steps leave alone."""
        tensors = {"total": self.total, "factor": self._factor}
        copies = {name: None if tensor is None else tensor.clone() for name, tensor in tensors.items()}
        return {**copies, "rows": self.rows, "weight": self.weight, "steps": self.steps}

    def check_state_dict(self, state: Any, layer: nn.Module, path: str, remedy: str) -> None:
        """Raise a ValueError if the memory is of a layer of another size, or damaged; see `checkpoint.check`."""
        grams = [(*_stack(layer), columns, columns) for columns in _columns(layer)]
        wanted = {
            "total": Maybe(numbers(*grams)),
            "factor": Maybe(numbers(*grams, finite=False)),  # NaN is how a matrix without a factor is remembered
            "rows": NUMBER,
            "weight": NUMBER,
            "steps": COUNT,
        }
        check(state, wanted, path, remedy)
        if state["total"] is not None:
            for name in ("rows", "weight"):
                check(state[name], POSITIVE, f"{path}[{name!r}]", remedy)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the memory from a checkpoint; it moves to the layer's device with the next step."""
        self.reset()
        self.total, self._factor = (None if state[k] is None else state[k].clone() for k in ("total", "factor"))
        self.rows, self.weight, self.steps = state["rows"], state["weight"], state["steps"]


def bound(correction: Correction, label: str) -> Correction:
    """The rule as one layer keeps it: with a memory of its own, if it needs one."""
    if isinstance(correction, BatchIdeal) and correction.keeps_memory:
        return RunningIdeal(correction, label)
    return correction


@torch.compiler.disable
def precondition(model: nn.Module) -> None:
    """Turn the plain gradients that `BatchIdeal(decay=…)` leaves in p.grad into ideal ones, once per step.

    `GradientOnly` calls it in `step`; with `attach` alone, call it between the last backward and the optimizer's
    step, on every process of data-parallel training alike. Layers without a running average, or without a backward
    since the last call, are left alone.

    Where torch.distributed is initialised, the sums of all processes of the default group are added up first, unless
    the rule has synchronize=False. Every process must call it then, also one whose batch did not reach a layer.

    Raises:
        ValueError: there is a running average, and the model is sharded.

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
    remembering = list(_remembering(model))
    if remembering:
        refuse_sharded("BatchIdeal(decay=…)", model, WHOLE)
    _sum_over_processes(remembering)
    for rule, layer in remembering:
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


def check_memory(model: nn.Module, averages: Any, path: str) -> None:
    """Raise a ValueError if a checkpoint's running averages are not those of the model's layers; `path` is theirs."""
    remedy = "attach the correction to the same layers of the same model, or leave 'running' out to begin anew"
    rules = memory(model)
    check(averages, dict.fromkeys(rules, ANYTHING), path, remedy)
    for name, rule in rules.items():
        rule.check_state_dict(averages[name], model.get_submodule(name), f"{path}[{name!r}]", remedy)


def _remembering(model: nn.Module) -> Iterator[tuple[RunningIdeal, nn.Module]]:
    for module in model.modules():
        if isinstance(module, Corrected) and isinstance(module._correction, RunningIdeal):
            yield module._correction, module


def _sum_over_processes(remembering: list[tuple[RunningIdeal, nn.Module]]) -> None:
    """Add up what is pending over the processes of the default group, if there are any; DDP averages the gradients."""
    shared = [(rule, layer) for rule, layer in remembering if rule.rule.synchronize]
    if not shared or not (distributed.is_available() and distributed.is_initialized()):
        return
    if distributed.get_world_size() == 1:
        return
    # Counts first and for all layers, so that every process takes part in the same sums.
    device = next(shared[0][1].parameters()).device
    counts = torch.tensor([rule.pending_rows for rule, _ in shared], device=device)
    distributed.all_reduce(counts)
    for (rule, layer), count in zip(shared, counts.tolist(), strict=True):
        if not count:
            continue
        if rule.pending is None:
            rule.pending, rule.pending_names = _no_rows(layer)
        distributed.all_reduce(rule.pending)
        rule.pending_rows = count


def _no_rows(layer: nn.Module) -> tuple[Tensor, frozenset[str]]:
    """What a process adds whose batch did not reach the layer: X~ᵀX~ of nothing."""
    trained = {name: p for name, p in layer.named_parameters(recurse=False) if p.requires_grad}
    weight = layer.get_parameter("weight")
    columns = weight[0].numel() * ("weight" in trained) + ("bias" in trained)
    dtype = torch.promote_types(weight.dtype, torch.float32)
    return torch.zeros(*_stack(layer), columns, columns, dtype=dtype, device=weight.device), frozenset(trained)


def _stack(layer: nn.Module) -> tuple[int, ...]:
    """How many of X~ᵀX~ there are beside each other: one for each group of a convolution."""
    return () if isinstance(layer, nn.Linear) else (int(layer.groups),)  # type: ignore[arg-type]


def _columns(layer: nn.Module) -> list[int]:
    """How many columns X~ can have: those of the weight and the bias, or of one of them if the other is frozen."""
    features = layer.get_parameter("weight")[0].numel()
    return [features] if layer.bias is None else [features + 1, features, 1]
