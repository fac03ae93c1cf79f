"""Structural layers: the corrections that change the forward pass. Imported as adiv_optim.layers."""

from .affine_like import AffineLikeLinear
from .convert import convert
from .l2_norm import L2Norm
from .norm_like import NormLikeLinear
from .patch_norm import PatchNormConv1d, PatchNormConv2d, PatchNormConv3d
from .patch_norm_transpose import PatchNormConvTranspose1d, PatchNormConvTranspose2d, PatchNormConvTranspose3d

__all__ = [
    "AffineLikeLinear",
    "L2Norm",
    "NormLikeLinear",
    "PatchNormConv1d",
    "PatchNormConv2d",
    "PatchNormConv3d",
    "PatchNormConvTranspose1d",
    "PatchNormConvTranspose2d",
    "PatchNormConvTranspose3d",
    "convert",
]
