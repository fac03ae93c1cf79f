"""PatchNorm: convolutions, transposed ones too, that normalise every patch they read."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from .._device import at_least_float32
from ..functional.convolutions import TORCH_CONV
from ..functional.shared import box_sum
from .lengths import inverse_norm, sum_of_squares
from .linears import affine_like_scale, check_form, norm_like_factors

_TORCH_CONV_TRANSPOSE: dict[int, Any] = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


class PatchNorm(_ConvNd):
    """The base of all PatchNorm convolutions; their equation stands in `PatchNormConv2d`."""

    def __init__(
        self,
        *args: Any,
        form: Literal["affine-like", "norm-like"] = "affine-like",
        alpha: float = 1.0,
        beta: float | None = None,
        eps: float = 1e-12,
        **kwargs: Any,
    ) -> None:
        if form == "affine-like" and beta is None:
            beta = 1.0
        check_form(type(self).__name__, form, alpha, beta, eps)
        super().__init__(*args, **kwargs)
        self.form = form
        self.alpha = alpha
        self.beta: Any = beta  # None in the norm-like form of Eq. 56, else a number
        self.eps = eps

    def _channel_squared_norm(self, input: Tensor) -> Tensor:
        """Return Σ_c |x_c|² over the channels of each group, (…, groups, *spatial), in float32 at least."""
        channels = -len(self.kernel_size) - 1
        grouped = at_least_float32(input).unflatten(channels, (self.groups, -1))
        return sum_of_squares(grouped, channels).squeeze(channels)

    @property
    def _inner_bias(self) -> Tensor | None:
        """What is added before the patch norm divides: (β/α) b in the affine-like form, nothing in the other."""
        if self.bias is None or self.form == "norm-like":
            return None
        return self.bias * (self.beta / self.alpha)

    def _normalise(self, output: Tensor, squared_norm: Tensor) -> Tensor:
        """Scale a convolution that has added `_inner_bias` by the norms of its patches; add the bias if norm-like.

        The output is (…, out_channels, *out_spatial), the squared norms (…, groups, *out_spatial), in float32 at least.
        """
        channels = -len(self.kernel_size) - 1
        # In half precision too the product is taken in float32: 1 / |patch| may pass float16's range.
        grouped, squared_norm = output.unflatten(channels, (self.groups, -1)), squared_norm.unsqueeze(channels)
        if self.form == "affine-like":
            scaled = grouped * affine_like_scale(squared_norm, self.alpha, self.beta)
        else:
            gain, shift = norm_like_factors(self.alpha, self.beta)
            scale = gain * inverse_norm(squared_norm, self.eps)
            if self.bias is None:
                scaled = grouped * scale
            else:
                bias = shift * self.bias.view(self.groups, -1, *[1] * len(self.kernel_size))
                scaled = torch.addcmul(bias, grouped, scale)
        return scaled.flatten(channels - 1, channels).to(output.dtype)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, form={self.form!r}, alpha={self.alpha}, beta={self.beta}, eps={self.eps}"


class _PatchNormConv(PatchNorm):
    def forward(self, input: Tensor) -> Tensor:
        if max(self.kernel_size) == 1 and not any(self._reversed_padding_repeated_twice):
            # Each patch is a pixel, and the pixels that the stride skips need no norm.
            pixels: Any = (..., *(slice(None, None, step) for step in self.stride))
            input = input[pixels]
            output = TORCH_CONV[len(self.kernel_size)](input, self.weight, self._inner_bias, groups=self.groups)
            return self._normalise(output, self._channel_squared_norm(input))
        output = self._conv_forward(input, self.weight, self._inner_bias)
        # Padding the sum over channels is padding the channels, for every mode.
        mode = "constant" if self.padding_mode == "zeros" else self.padding_mode
        norm = F.pad(self._channel_squared_norm(input), self._reversed_padding_repeated_twice, mode)
        return self._normalise(output, box_sum(norm, self.kernel_size, self.stride, self.dilation))


class PatchNormConv1d(_PatchNormConv, nn.Conv1d):
    """torch.nn.Conv1d divided by the norms of the patches it reads; see `PatchNormConv2d`."""


class PatchNormConv2d(_PatchNormConv, nn.Conv2d):
    r"""torch.nn.Conv2d divided by the norms of the patches it reads: PatchNorm.

    A convolution is a linear layer whose rows are patches, and PatchNorm is the structural correction of that
    layer (Bird 2025, Appendix B.2). `form="affine-like"` is Eq. 55, here with Eq. 37's α and β (1 and 1):

    .. math:: z_p = (\alpha W x_p + \beta b) / \sqrt{\alpha^2|x_p|^2 + \beta^2}

    `form="norm-like"` is Eq. 56, :math:`z_p = W x_p / |x_p| + b`, and with `beta` given the form of Eq. 35:

    .. math:: z_p = \alpha W x_p / s_p + \beta b, \qquad s_p = \sqrt{\alpha^2 |x_p|^2 / (1 - \beta^2)}.

    Where the output is a single patch, a gradient step moves it by exactly :math:`-\eta g` in the affine-like
    form and in Eq. 35, by :math:`-2\eta g` in Eq. 56 (without a bias as in `AffineLikeLinear` and
    `NormLikeLinear`). The patches of an image share their pixels and their weights; their effect on
    each other stays.

    Args:
        args, kwargs: as for torch.nn.Conv2d, by position or by name; padding='same' and every padding_mode included.
        form: "affine-like" or "norm-like"; this and the next three by name.
        alpha: coefficient of Wx, not 0; in the norm-like form only its sign counts.
        beta: coefficient of b. Affine-like: not 0, None is 1. Norm-like: strictly between -1 and 1, None is Eq. 56.
        eps: in the norm-like form the patch norm is clamped from below at this value; zero patches give βb, or b.

    Shape:
        As torch.nn.Conv2d, unbatched input included. The state dict is torch's too, and channels_last is kept.

    Raises:
        ValueError: an unknown form; `alpha` 0; `beta` 0 (affine-like) or outside (-1, 1) (norm-like); in the latter
            `eps` negative; and the errors of torch.nn.Conv2d.

    Example:
        >>> import torch
        >>> layer = PatchNormConv2d(1, 1, 2, form="norm-like")
        >>> _ = layer.weight.data.fill_(1.0), layer.bias.data.fill_(2.0)
        >>> layer(torch.full((1, 1, 2, 2), 3.0)).item()  # 12 / 6 + 2
        4.0
    """


class PatchNormConv3d(_PatchNormConv, nn.Conv3d):
    """torch.nn.Conv3d divided by the norms of the patches it reads; see `PatchNormConv2d`."""


class _PatchNormConvTranspose(PatchNorm, _ConvTransposeNd):
    padding: tuple[int, ...]  # 'same' and 'valid' are for plain convolutions

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        dims = len(self.kernel_size)
        kernel_size, stride, padding, dilation = map(list, (self.kernel_size, self.stride, self.padding, self.dilation))
        output_padding = self._output_padding(input, output_size, stride, padding, kernel_size, dims, dilation)
        output = _TORCH_CONV_TRANSPOSE[dims](
            input, self.weight, self._inner_bias, stride, padding, output_padding, self.groups, dilation
        )
        norm = self._space_out(self._channel_squared_norm(input), output.shape[-dims:])
        return self._normalise(output, box_sum(norm, kernel_size, [1] * dims, dilation))

    def _space_out(self, norm: Tensor, output_size: Sequence[int]) -> Tensor:
        """Space positions out by the stride and pad them: the outputs then read windows at stride 1."""
        dims = len(self.kernel_size)
        for axis, step in enumerate(self.stride, start=-dims):
            norm = F.pad(norm.unsqueeze(axis), [0, 0] * (-axis - 1) + [0, step - 1]).flatten(axis - 1, axis)
        axes = zip(self.dilation, self.kernel_size, self.padding, output_size, norm.shape[-dims:], strict=True)
        sides = [(gap * (size - 1) - padding, out + padding - spaced) for gap, size, padding, out, spaced in axes]
        return F.pad(norm, [side for pair in reversed(sides) for side in pair])


class PatchNormConvTranspose1d(_PatchNormConvTranspose, nn.ConvTranspose1d):
    """torch.nn.ConvTranspose1d divided by the norms of its patches; see `PatchNormConvTranspose2d`."""


class PatchNormConvTranspose2d(_PatchNormConvTranspose, nn.ConvTranspose2d):
    r"""torch.nn.ConvTranspose2d divided by the norms of its patches.

    Both forms are those of `PatchNormConv2d` (Bird 2025, Eqs. 55 and 56). The patch :math:`x_p` of an output
    position holds the inputs that reach it, and :math:`|x_p|^2` is the transposed box filter of
    :math:`\sum_c x_c^2`: a box filter over the input spaced out by the stride.

    Args:
        args, kwargs: as for torch.nn.ConvTranspose2d, by position or by name.
        form, alpha, beta, eps: as for `PatchNormConv2d`.

    Shape:
        As torch.nn.ConvTranspose2d; `forward` takes its `output_size` too.

    Raises:
        ValueError: as `PatchNormConv2d`, and the errors of torch.nn.ConvTranspose2d.

    Example:
        >>> import torch
        >>> layer = PatchNormConvTranspose2d(8, 4, 3, stride=2)
        >>> layer(torch.ones(1, 8, 5, 5), output_size=(12, 12)).shape
        torch.Size([1, 4, 12, 12])
    """


class PatchNormConvTranspose3d(_PatchNormConvTranspose, nn.ConvTranspose3d):
    """torch.nn.ConvTranspose3d divided by the norms of its patches; see `PatchNormConvTranspose2d`."""
