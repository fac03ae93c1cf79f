"""Structural layers: the corrections that change the forward pass. Imported as adiv_optim.layers."""

from .channel_scale import ChannelScale
from .convert import Replacement, convert, plan
from .elementwise import DyISRU, DyT, MeanFieldNorm
from .lengths import IsotropicTanh, L2Norm
from .linears import AffineLikeLinear, NormLikeLinear
from .patch_norm import (
    PatchNormConv1d,
    PatchNormConv2d,
    PatchNormConv3d,
    PatchNormConvTranspose1d,
    PatchNormConvTranspose2d,
    PatchNormConvTranspose3d,
)

__all__ = [
    "AffineLikeLinear",
    "ChannelScale",
    "DyISRU",
    "DyT",
    "IsotropicTanh",
    "L2Norm",
    "MeanFieldNorm",
    "NormLikeLinear",
    "PatchNormConv1d",
    "PatchNormConv2d",
    "PatchNormConv3d",
    "PatchNormConvTranspose1d",
    "PatchNormConvTranspose2d",
    "PatchNormConvTranspose3d",
    "Replacement",
    "convert",
    "plan",
]
