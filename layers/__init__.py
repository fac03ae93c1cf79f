"""Structural layers: the corrections that change the forward pass. Imported as adiv_optim.layers."""

from .affine_like import AffineLikeLinear
from .convert import convert
from .l2_norm import L2Norm
from .mean_field import MeanFieldNorm
from .norm_like import NormLikeLinear

__all__ = ["AffineLikeLinear", "L2Norm", "MeanFieldNorm", "NormLikeLinear", "convert"]
