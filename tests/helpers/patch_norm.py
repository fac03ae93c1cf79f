"""Options of PatchNorm convolutions, and their outputs by torch's convolutions."""

import math

import torch
from torch import nn

from adiv_optim.layers import (
    PatchNormConv1d,
    PatchNormConv2d,
    PatchNormConv3d,
    PatchNormConvTranspose1d,
    PatchNormConvTranspose2d,
    PatchNormConvTranspose3d,
)

#: Class, constructor arguments, input shape.
CASES = {
    "1d": (PatchNormConv1d, (4, 6, 3), {}, (2, 4, 9)),
    "1d-same-odd-total": (PatchNormConv1d, (4, 6, 4), {"padding": "same", "dilation": 3}, (2, 4, 12)),
    "1d-circular-unbatched": (PatchNormConv1d, (4, 6, 3), {"padding": 2, "padding_mode": "circular"}, (4, 9)),
    "2d": (PatchNormConv2d, (4, 6, 3), {}, (2, 4, 7, 6)),
    "2d-oblong": (
        PatchNormConv2d, (4, 6, (3, 2)),
        {"stride": (2, 1), "padding": (1, 2), "dilation": (1, 3)}, (2, 4, 7, 8),
    ),
    "2d-groups": (PatchNormConv2d, (4, 6, 3), {"groups": 2, "padding": 1}, (2, 4, 5, 5)),
    "2d-depthwise": (PatchNormConv2d, (4, 8, 3), {"groups": 4, "stride": 2, "padding": 1}, (2, 4, 7, 7)),
    "2d-same-dilated": (PatchNormConv2d, (4, 6, (3, 4)), {"padding": "same", "dilation": (2, 1)}, (2, 4, 7, 6)),
    "2d-valid": (PatchNormConv2d, (4, 6, 2), {"padding": "valid", "stride": 2}, (2, 4, 6, 6)),
    "2d-reflect": (
        PatchNormConv2d, (4, 6, 3), {"padding": (2, 1), "padding_mode": "reflect", "groups": 2}, (2, 4, 5, 6)
    ),
    "2d-replicate": (PatchNormConv2d, (4, 6, 3), {"padding": 1, "padding_mode": "replicate"}, (2, 4, 5, 6)),
    "2d-same-circular": (PatchNormConv2d, (4, 6, 4), {"padding": "same", "padding_mode": "circular"}, (2, 4, 6, 5)),
    "2d-unbatched": (PatchNormConv2d, (4, 6, 3), {"groups": 2, "padding": 1}, (4, 5, 5)),
    "2d-no-bias": (PatchNormConv2d, (4, 6, 3), {"bias": False}, (2, 4, 5, 5)),
    "2d-1x1-strided": (PatchNormConv2d, (4, 6, 1), {"stride": 2}, (2, 4, 6, 5)),
    "2d-1x1-circular": (PatchNormConv2d, (4, 6, 1), {"padding": 1, "padding_mode": "circular"}, (2, 4, 5, 6)),
    "3d": (PatchNormConv3d, (2, 4, 2), {"groups": 2, "padding": 1, "stride": (1, 2, 1)}, (2, 2, 3, 4, 3)),
    "3d-reflect-dilated": (
        PatchNormConv3d, (2, 3, 2), {"padding": 1, "padding_mode": "reflect", "dilation": (2, 1, 1)}, (1, 2, 3, 3, 3)
    ),
    "1d-1-strided-unbatched": (PatchNormConv1d, (4, 6, 1), {"stride": 3, "groups": 2}, (4, 9)),
    "3d-1x1x1-strided": (PatchNormConv3d, (2, 4, 1), {"stride": (1, 2, 3)}, (2, 2, 3, 4, 5)),
    "transposed-1d": (PatchNormConvTranspose1d, (4, 6, 3), {"stride": 2, "padding": 1}, (2, 4, 5)),
    "transposed-1d-unbatched": (PatchNormConvTranspose1d, (4, 6, 2), {"groups": 2}, (4, 5)),
    "transposed-2d": (PatchNormConvTranspose2d, (4, 6, 3), {}, (2, 4, 4, 3)),
    "transposed-2d-oblong": (
        PatchNormConvTranspose2d, (4, 6, (3, 2)),
        {"stride": (2, 3), "padding": (1, 0), "output_padding": (1, 2), "dilation": (1, 2)}, (2, 4, 4, 3),
    ),
    "transposed-2d-depthwise": (PatchNormConvTranspose2d, (4, 8, 4), {"groups": 4, "stride": 2}, (2, 4, 3, 3)),
    "transposed-2d-cropped": (PatchNormConvTranspose2d, (4, 6, 2), {"padding": 2, "stride": 2}, (2, 4, 5, 5)),
    "transposed-2d-gaps": (PatchNormConvTranspose2d, (4, 6, 1), {"stride": 2, "bias": False}, (2, 4, 3, 3)),
    "transposed-3d": (PatchNormConvTranspose3d, (2, 4, 2), {"groups": 2, "stride": (1, 2, 1)}, (1, 2, 2, 2, 3)),
}  # fmt: skip

FORMS = {
    "affine-like": {},
    "affine-like-alpha-beta": {"alpha": -0.5, "beta": 2.0},
    "norm-like": {"form": "norm-like"},
    "norm-like-alpha-beta": {"form": "norm-like", "alpha": -3.0, "beta": 0.6},
}

#: One case of every class, for what takes longer.
CLASSES = {
    name: CASES[name]
    for name in ("1d-circular-unbatched", "2d-reflect", "3d", "transposed-1d", "transposed-2d-oblong", "transposed-3d")
}

#: The torch layer of every class.
PLAIN = {
    PatchNormConv1d: nn.Conv1d,
    PatchNormConv2d: nn.Conv2d,
    PatchNormConv3d: nn.Conv3d,
    PatchNormConvTranspose1d: nn.ConvTranspose1d,
    PatchNormConvTranspose2d: nn.ConvTranspose2d,
    PatchNormConvTranspose3d: nn.ConvTranspose3d,
}


#: What tells a torch layer how to read its input.
OPTIONS = {
    False: ("stride", "padding", "dilation", "groups", "padding_mode"),
    True: ("stride", "padding", "output_padding", "groups", "dilation"),
}


def build(case, form):
    """(layer, input) of a case."""
    kind, sizes, options, shape = case
    return kind(*sizes, **options, **form), torch.randn(shape)


@torch.no_grad()
def reference(layer, input):
    """The layer's output by torch's convolutions: of the input by its weights, and of the squares by ones."""
    kind, options = PLAIN[type(layer)], {name: getattr(layer, name) for name in OPTIONS[layer.transposed]}
    plain = kind(layer.in_channels, layer.out_channels, layer.kernel_size, bias=False, **options)
    sums = kind(layer.in_channels, layer.groups, layer.kernel_size, bias=False, **options)
    plain.weight.copy_(layer.weight)
    nn.init.ones_(sums.weight)
    channels = -len(layer.kernel_size) - 1
    norm = sums(input.square()).repeat_interleave(layer.out_channels // layer.groups, channels)
    bias = torch.zeros(layer.out_channels) if layer.bias is None else layer.bias
    return formula(layer, plain(input), bias.view(-1, *[1] * len(layer.kernel_size)), norm)


def formula(layer, linear, bias, norm):
    """Bird 2025, Eqs. 37, 56 and 35, of W x, b and |x|²."""
    alpha, beta = layer.alpha, layer.beta
    if layer.form == "affine-like":
        return (alpha * linear + beta * bias) / (alpha**2 * norm + beta**2) ** 0.5
    if beta is None:
        return math.copysign(1, alpha) * linear / norm.clamp(min=1e-24) ** 0.5 + bias
    return alpha * linear / (alpha**2 * norm.clamp(min=1e-24) / (1 - beta**2)) ** 0.5 + beta * bias
