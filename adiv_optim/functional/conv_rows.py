"""The rows of a convolution are patches; all are unfolded at once only if `BatchIdeal` has fewer rows than features."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Literal

import torch
from torch import Tensor

from .._device import wide_dtype
from ..corrections import Solve
from .linears import LinearRows, TrainedParameters, summed
from .lines import sums_over_patches
from .patches import Geometry, Patches
from .shared import batch_slices


@dataclass(frozen=True)
class ConvRows(TrainedParameters):
    """The patches of a convolution and the gradients of its outputs, (N, out_channels, *positions)."""

    patches: Patches
    grad_output: Tensor
    weight: Tensor
    needs_weight: bool
    needs_bias: bool
    label: str = "conv"

    def factors(self) -> dict[str, Tensor]:
        """Return |x_p|² for the weight, 1 for the bias; shape (N, groups, *out_spatial)."""
        return self.with_ones(self.patches.squared_norm())

    @property
    def count(self) -> int:
        """How many patches there are: samples times positions."""
        return len(self.grad_output) * math.prod(self.grad_output.shape[2:])

    def contract(self, scales: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return Σ_p s_p g_p x_pᵀ and Σ_p s_p g_p, a few samples at a time: the rescaled output gradient is large."""
        gradients = summed(self._contract_samples(samples, scales) for samples in batch_slices(self.grad_output))
        return {name: gradient.to(self.patches.input.dtype) for name, gradient in gradients.items()}

    def _contract_samples(self, samples: slice, scales: Mapping[str, Tensor]) -> dict[str, Tensor]:
        g, gradients = self.grad_output[samples], {}
        if self.needs_bias:
            scaled = _rescale_groups(g, scales["bias"][samples])
            gradients["bias"] = scaled.sum([0, *range(2, scaled.dim())])
        if self.needs_weight:
            if scales["weight"] is not scales.get("bias"):
                scaled = _rescale_groups(g, scales["weight"][samples])
            # s g may pass 65504, where float16 ends, though Σ s g xᵀ does not; and the patches x cannot be scaled in
            # place of g. So float16 is contracted in float32, a few samples at a time.
            dtype = self.patches.input.dtype
            dtype = torch.float32 if dtype == torch.float16 else dtype
            gradients["weight"] = self._weight_gradient(scaled, samples, dtype).to(scaled.dtype)
        return gradients

    def _weight_gradient(self, grad_output: Tensor, samples: slice, dtype: torch.dtype) -> Tensor:
        """Return Σ_p g_p x_pᵀ over some samples."""
        x, weight = self.patches.input[samples].to(dtype), self.weight.to(dtype)
        return conv_gradient("weight", grad_output.to(dtype), x, weight, self.patches.geometry)

    def ideal(self, solve: Solve) -> dict[str, Tensor]:
        """Return the ideal gradients, those of one linear layer in each group."""
        # Few patches unfolded are no larger than the Gram matrix, and only the side of the samples is exact then.
        if self.has_few_rows(self.count, math.prod(self.weight.shape[1:])):
            rows, grad_rows = self.patches.unfold(), self.grad_rows
            solved = LinearRows(rows, grad_rows, self.needs_weight, self.needs_bias).ideal(solve)
        else:
            solved = self.split(solve(*self._products(), self.count))
        shapes = {"weight": self.weight.shape, "bias": (len(self.weight),)}
        dtype = self.patches.input.dtype
        return {name: gradient.reshape(shapes[name]).to(dtype) for name, gradient in solved.items()}

    def _products(self) -> tuple[Tensor, Tensor]:
        """Return X~ᵀX~ and X~ᵀG, in float32 at least."""
        dtype, groups = wide_dtype(self.patches.input), self.patches.geometry.groups
        sum_of_g = self.grad_output.sum([0, *range(2, self.grad_output.dim())], dtype=dtype).view(groups, 1, -1)
        count = sum_of_g.new_full((groups, 1, 1), self.count)
        if not self.needs_weight:
            return count, sum_of_g
        slices = batch_slices(self.grad_output)
        x_g = reduce(torch.add, (self._weight_gradient(self.grad_output[part], part, dtype) for part in slices))
        x_g = x_g.reshape(groups, -1, x_g[0].numel()).mT
        gram, sum_of_x = sums_over_patches(self.patches, dtype)
        if not self.needs_bias:
            return gram, x_g
        gram = torch.cat([torch.cat([gram, sum_of_x], -1), torch.cat([sum_of_x.mT, count], -1)], -2)
        return gram, torch.cat([x_g, sum_of_g], -2)

    @property
    def grad_rows(self) -> Tensor:
        """The output gradients as (groups, rows, channels)."""
        samples, channels, *positions = self.grad_output.shape
        groups = self.patches.geometry.groups  # reshaped, as `unflatten` has no rule for gradients in batches
        grouped = self.grad_output.reshape(samples, groups, channels // groups, *positions)
        return grouped.movedim(1, 0).movedim(2, -1).reshape(groups, -1, channels // groups)


def conv_gradient(
    of: Literal["input", "weight"], grad_output: Tensor, input: Tensor, weight: Tensor, geometry: Geometry
) -> Tensor:
    """Return torch's gradient of a convolution's input or weight."""
    needs = [of == "input", of == "weight", False]
    gradients = torch.ops.aten.convolution_backward(
        grad_output, input, weight, None, geometry.stride, geometry.padding, geometry.dilation,
        False, [0] * len(geometry.stride), geometry.groups, needs,
    )  # fmt: skip
    return gradients[needs.index(True)]


def _rescale_groups(grad_output: Tensor, scale: Tensor) -> Tensor:
    """Multiply (N, C_out, *out) by (N, groups, *out), a scale for all channels of a group, in the wider dtype."""
    samples, channels, *positions = grad_output.shape
    grouped = grad_output.reshape(samples, scale.shape[1], channels // scale.shape[1], *positions)
    return (grouped * scale.unsqueeze(2)).reshape(samples, channels, *positions)
