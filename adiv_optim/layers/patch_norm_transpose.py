"""PatchNorm for transposed convolutions."""

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvTransposeNd

from ..functional import box_sum
from .patch_norm import PatchNorm

_PLAIN: dict[int, Any] = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


class _PatchNormConvTranspose(PatchNorm, _ConvTransposeNd):
    padding: tuple[int, ...]  # 'same' and 'valid' are for plain convolutions

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        """Return the transposed convolution with every patch normalised."""
        dims = len(self.kernel_size)
        kernel_size, stride, padding, dilation = map(list, (self.kernel_size, self.stride, self.padding, self.dilation))
        extra = self._output_padding(input, output_size, stride, padding, kernel_size, dims, dilation)
        output = _PLAIN[dims](input, self.weight, self.inner_bias, stride, padding, extra, self.groups, dilation)
        norm = self._spread(self.channel_norm(input), output.shape[-dims:])
        return self.normalised(output, box_sum(norm, kernel_size, [1] * dims, dilation))

    def _spread(self, norm: Tensor, output_size: Sequence[int]) -> Tensor:
        """Space positions out by the stride and pad them: windows at stride 1 are then what the outputs read."""
        dims = len(self.kernel_size)
        for axis, step in enumerate(self.stride, start=-dims):
            norm = F.pad(norm.unsqueeze(axis), [0, 0] * (-axis - 1) + [0, step - 1]).flatten(axis - 1, axis)
        sides = [
            (gap * (size - 1) - padding, wanted + padding - found)
            for gap, size, padding, wanted, found in zip(
                self.dilation, self.kernel_size, self.padding, output_size, norm.shape[-dims:], strict=True
            )
        ]
        return F.pad(norm, [side for pair in reversed(sides) for side in pair])


class PatchNormConvTranspose1d(_PatchNormConvTranspose, nn.ConvTranspose1d):
    """torch.nn.ConvTranspose1d divided by the norms of its patches; see `PatchNormConvTranspose2d`."""


class PatchNormConvTranspose2d(_PatchNormConvTranspose, nn.ConvTranspose2d):
    r"""torch.nn.ConvTranspose2d divided by the norms of its patches.

    .. math:: z_p = (\alpha W x_p + \beta b) / \sqrt{\alpha^2|x_p|^2 + \beta^2}

    Both forms are those of `PatchNormConv2d` (Bird 2025, Eqs. 55 and 56). The patch :math:`x_p` of an output
    position holds the inputs that reach it, and :math:`|x_p|^2` is the transposed box filter of
    :math:`\sum_c x_c^2`: a box filter over the input spaced out by the stride.

    Args:
        args, kwargs: as for torch.nn.ConvTranspose2d, by position or by name.
        form, alpha, beta, eps: as for `PatchNormConv2d`.

    Shape:
        As torch.nn.ConvTranspose2d; `forward` takes its `output_size` too.

    Raises:
        ValueError: as `PatchNormConv2d`, and what torch.nn.ConvTranspose2d raises.

    Example:
        >>> import torch
        >>> layer = PatchNormConvTranspose2d(8, 4, 3, stride=2)
        >>> layer(torch.ones(1, 8, 5, 5), output_size=(12, 12)).shape
        torch.Size([1, 4, 12, 12])
    """


class PatchNormConvTranspose3d(_PatchNormConvTranspose, nn.ConvTranspose3d):
    """torch.nn.ConvTranspose3d divided by the norms of its patches; see `PatchNormConvTranspose2d`."""
