"""Gauges: rescalings of hidden units that leave a network's function as it is, and steps that none of them changes."""

from .adjoint import UCBackpropagation, uc_adjoint, uc_backpropagation, uc_inverse, uc_linear
from .gauges import LayerGauge, NetworkGauge, apply_gauge, canonical, random_gauge
from .graph import ChannelGraph, Entry, Factors
from .network import network_scales
from .rz import RZScaling, rz_scaling
from .tracing import trace

__all__ = [
    "ChannelGraph",
    "Entry",
    "Factors",
    "LayerGauge",
    "NetworkGauge",
    "RZScaling",
    "UCBackpropagation",
    "apply_gauge",
    "canonical",
    "network_scales",
    "random_gauge",
    "rz_scaling",
    "trace",
    "uc_adjoint",
    "uc_backpropagation",
    "uc_inverse",
    "uc_linear",
]
