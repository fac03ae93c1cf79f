"""The rows of a convolution: patches that are never all unfolded at once."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..corrections import Solve
from .linears import LinearRows, gram_of, split_solution
from .patches import patch_squared_norm, unfold
from .shared import parts


class Geometry(NamedTuple):
    """What a convolution does in space: one number per spatial dimension each, and the groups."""

    stride: list[int]
    padding: list[int]
    dilation: list[int]
    groups: int


@dataclass(frozen=True)
class ConvRows:
    """The patches of a convolution; each group has rows of its own.

    Args:
        input: shape (N, C, *spatial).
        grad_output: shape (N, out_channels, *out_spatial).
        weight: the weight, for its shape.
        geometry: stride, padding, dilation and groups.
        needs_weight: whether the weight is trained.
        needs_bias: whether there is a bias and it is trained.
        label: of the layer, for error messages.
    """

    input: Tensor
    grad_output: Tensor
    weight: Tensor
    geometry: Geometry
    needs_weight: bool
    needs_bias: bool
    label: str = "conv"

    @property
    def count(self) -> int:
        """How many patches there are: samples times positions."""
        return len(self.grad_output) * math.prod(self.grad_output.shape[2:])

    def factors(self) -> dict[str, Tensor]:
        """|x_p|² for the weight, 1 for the bias; shape (N, groups, *out_spatial)."""
        norm = patch_squared_norm(self.input, self.weight.shape[2:], *self.geometry)
        factors = {"weight": norm} if self.needs_weight else {}
        return {**factors, "bias": torch.ones_like(norm)} if self.needs_bias else factors

    def contract(self, scales: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Σ_p s_p g_p x_pᵀ and Σ_p s_p g_p, a few samples at a time: the rescaled output gradient is large."""
        shared = scales.get("weight") is scales.get("bias")
        # float16 ends at 65504, which s g may pass where Σ s g xᵀ does not, and the patches x cannot be scaled in
        # place of g. It is contracted in float32, a part at a time.
        dtype = torch.float32 if self.input.dtype == torch.float16 else self.input.dtype
        weight = self.weight.to(dtype)
        gradients: dict[str, Tensor] = {}
        for part in parts(self.grad_output):
            g, x = self.grad_output[part], self.input[part].to(dtype)
            if self.needs_bias:
                scaled = _rescale_groups(g, scales["bias"][part])
                _add(gradients, "bias", scaled.sum([0, *range(2, scaled.dim())]))
            if self.needs_weight:
                scaled = scaled if shared else _rescale_groups(g, scales["weight"][part])
                wide, scaled = scaled.dtype, scaled.to(dtype)
                grad_weight = plain_backward(scaled, x, weight, self.geometry, False, True)[1]
                _add(gradients, "weight", grad_weight.to(wide))
        return {name: gradient.to(self.input.dtype) for name, gradient in gradients.items()}

    def ideal(self, solve: Solve) -> dict[str, Tensor]:
        """The ideal of a linear layer in each group, with the Gram matrix of the patches summed part by part."""
        features = math.prod(self.weight.shape[1:])
        few = self.count <= features * self.needs_weight + self.needs_bias
        # Few patches make a matrix no larger than the Gram matrix, and only their own side is exact then.
        solved = self._rows(slice(None)).ideal(solve) if few else self._feature_side(solve)
        shapes = {"weight": self.weight.shape, "bias": (len(self.weight),)}
        return {name: gradient.reshape(shapes[name]).to(self.input.dtype) for name, gradient in solved.items()}

    def _feature_side(self, solve: Solve) -> dict[str, Tensor]:
        sums = self._summed(lambda rows: {"gram": rows.gram(), "plain": gram_of(rows.columns(), [rows.grad_rows])})
        solution = solve(sums["gram"], sums["plain"], self.count)
        return split_solution(solution, self.needs_weight, self.needs_bias)

    def _summed(self, of: Callable[[LinearRows], dict[str, Tensor]]) -> dict[str, Tensor]:
        """Sums over all patches, of which a few samples' are unfolded at a time."""
        features = math.prod(self.weight.shape[1:])
        per_sample = self.count // len(self.grad_output) * features * self.geometry.groups
        step = max(1, max(2**19, self.input.numel() // 4) // per_sample)
        sums: dict[str, Tensor] = {}
        for start in range(0, len(self.input), step):
            for name, part in of(self._rows(slice(start, start + step))).items():
                _add(sums, name, part)
        return sums

    def _rows(self, part: slice) -> LinearRows:
        """The patches of some samples, unfolded: a stack with one linear layer per group."""
        dtype = torch.promote_types(self.input.dtype, torch.float32)
        x, g = self.input[part].to(dtype), self.grad_output[part].to(dtype)
        rows = unfold(x, self.weight.shape[2:], *self.geometry)
        grad_rows = g.unflatten(1, (self.geometry.groups, -1)).movedim(1, 0).movedim(2, -1).flatten(1, -2)
        return LinearRows(rows, grad_rows, self.needs_weight, self.needs_bias)


def plain_backward(
    grad_output: Tensor, input: Tensor, weight: Tensor, geometry: Geometry, needs_input: bool, needs_weight: bool
) -> tuple[Tensor, Tensor]:
    """Torch's own gradients of input and weight; one that is not needed is None."""
    grad_input, grad_weight, _ = torch.ops.aten.convolution_backward(
        grad_output, input, weight, None, geometry.stride, geometry.padding, geometry.dilation,
        False, [0] * len(geometry.stride), geometry.groups, [needs_input, needs_weight, False],
    )  # fmt: skip
    return grad_input, grad_weight


def _add(totals: dict[str, Tensor], name: str, part: Tensor) -> None:
    totals[name] = totals[name] + part if name in totals else part


def _rescale_groups(grad_output: Tensor, scale: Tensor) -> Tensor:
    """(N, C_out, *out) × (N, groups, *out) in the wider of their dtypes; a group's scale serves all of its channels."""
    grouped = grad_output.unflatten(1, (scale.shape[1], -1))
    return (grouped * scale.unsqueeze(2)).flatten(1, 2)
