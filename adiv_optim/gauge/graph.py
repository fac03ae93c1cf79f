"""The channels of a traced model: which share a scale, and how each parameter moves when they are rescaled."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._distributed import local_view


class Factors(NamedTuple):
    """The two diagonal scales of one parameter, shaped to multiply `parameter.view(shape)`.

    Args:
        shape: the parameter's own shape, with the groups of a grouped convolution split off its first dimension.
        d: D = exp(s_out), broadcastable to `shape`.
        e: E = exp(−s_in), broadcastable to `shape`.
    """

    shape: tuple[int, ...]
    d: Tensor
    e: Tensor

    def of_shard(self, parameter: Tensor) -> "Factors":
        """Return those of this process's part of a parameter: all of it, where it is not sharded."""
        shape, (d, e) = local_view(self.shape, (self.d, self.e), parameter)
        return Factors(shape, d, e)


@dataclass(frozen=True, eq=False)
class Entry:
    """How one parameter or buffer moves: an element w becomes w · exp(power · (s[plus] − s[minus])).

    Args:
        shape: to view the tensor in; only a grouped convolution's differs from its own shape.
        plus: channels of its outputs, broadcastable to `shape`; 0 is the pinned one, k has the free log-scale k − 1.
        minus: channels of its inputs, likewise.
        counted: whether it counts in the network gauge: a weight does, others if a channel of theirs has no weight.
        power: 2 for a running variance, else 1.
        expected_log_weight: mean of log|w| as PyTorch initialises such a weight: −½ log(fan_in) − 1 for matrices and
            kernels.
        why: why no channel moves it; empty if one does.
        matrix: whether its dimensions are outputs, inputs and positions, as those of a matrix or a kernel are.
    """

    shape: tuple[int, ...]
    plus: Tensor
    minus: Tensor
    counted: bool = False
    power: int = 1
    expected_log_weight: float = 0.0
    why: tuple[str, ...] = ()
    matrix: bool = False

    @property
    def moves(self) -> bool:
        """Whether any free channel moves it."""
        return not self.why

    @property
    def sides(self) -> tuple[Tensor, Tensor]:
        """The channels of its outputs and of its inputs, (plus, minus)."""
        return self.plus, self.minus

    def describe_free(self) -> str:
        """Say how many of its channels are free."""
        named = [(side, name) for side, name in zip(self.sides, ("outputs", "inputs"), strict=True) if bool(side.any())]
        return " and ".join(f"{int((side > 0).sum())} of {side.numel()} {name}" for side, name in named) + " free"


@dataclass(eq=False)
class ChannelGraph:
    """Which channels of which layers share a positive scale, as `gauge.trace` finds.

    It holds names, never tensors of the model, and can be copied and pickled.

    Args:
        free: how many log-scales may be chosen; `log_scales` has shape (free,).
        parameters: name → how it moves, for every parameter that the traced call used; the first name of a tied one.
        buffers: likewise, for the running statistics of BatchNorm.
        unused: names of parameters that the traced call did not use.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from adiv_optim import gauge
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> graph = gauge.trace(model, torch.ones(1, 3))
        >>> entry = graph.parameters["0.weight"]
        >>> entry.plus.flatten(), entry.minus.flatten()  # four free outputs, inputs pinned
        (tensor([1, 2, 3, 4]), tensor([0]))
        >>> factors = graph.factors(gauge.network_scales(graph, dict(model.named_parameters())))
        >>> balanced = model[0].weight.view(factors["0.weight"].shape) / (factors["0.weight"].d * factors["0.weight"].e)
    """

    free: int
    parameters: dict[str, Entry]
    buffers: dict[str, Entry]
    unused: tuple[str, ...] = ()
    #: By device, what `factors` and `network_scales` compute from the entries alone.
    _cache: dict[Any, Any] = field(default_factory=dict, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cache": {}}

    def factors(self, log_scales: Tensor, *, buffers: bool = False) -> dict[str, Factors]:
        """Return D and E of every parameter that moves.

        In balanced coordinates w is `w.view(shape) / (d * e)`, and its gradient g is `g.view(shape) * d * e`.

        Args:
            log_scales: (free,), on the device the factors are wanted on.
            buffers: whether those of running statistics: means are multiplied by eˢ, variances by e²ˢ.

        Returns:
            name → `Factors`. Parameters without free channels are left out: both their factors are 1.

        Raises:
            ValueError: `log_scales` has another shape.
        """
        self.check_log_scales(log_scales)
        entries = self.buffers if buffers else self.parameters
        moving = {name: entry for name, entry in entries.items() if entry.moves}
        if not moving:
            return {}
        key = ("factors", buffers, log_scales.device)
        if key not in self._cache:
            sides = [(side, s * e.power) for e in moving.values() for side, s in zip(e.sides, (1, -1), strict=True)]
            self._cache[key] = (
                torch.cat([side.flatten() for side, _ in sides]).to(log_scales.device),
                torch.cat([torch.full_like(side.flatten(), power) for side, power in sides]).to(log_scales.device),
                [side.shape for side, _ in sides],
            )
        gather, power, shapes = self._cache[key]
        values = (torch.cat([log_scales.new_zeros(1), log_scales])[gather] * power).exp()
        parts = iter(values.split([shape.numel() for shape in shapes]))
        scales = (next(parts).view(shape) for shape in shapes)
        return {name: Factors(entry.shape, next(scales), next(scales)) for name, entry in moving.items()}

    def check(self, tensors: Mapping[str, Tensor], names: Iterable[str]) -> None:
        """Refuse tensors by name that lack one of the names, or have it in another shape than the traced one."""
        for name in names:
            if name not in tensors:
                raise ValueError(f"the graph has {name!r}, which the model has not; trace this model.")
            shape, tensor = (self.parameters.get(name) or self.buffers[name]).shape, tensors[name]
            split = len(shape) - tensor.dim() + 1  # how many dimensions its first one was split into
            traced = (math.prod(shape[:split]), *shape[split:]) if shape else ()
            if tensor.shape != traced:
                raise ValueError(
                    f"{name!r} has shape {tuple(tensor.shape)}, but was traced with {traced}; trace again."
                )

    def check_log_scales(self, log_scales: Tensor) -> None:
        """Refuse log-scales of another shape than (free,)."""
        if log_scales.shape != (self.free,):
            raise ValueError(
                f"log_scales has shape {tuple(log_scales.shape)}, but the graph has {self.free} free channels; "
                "pass the result of random_gauge or network_scales for this graph."
            )
