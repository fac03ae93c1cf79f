"""Rescalings of a network that its function does not see, and coordinates that they cannot touch."""

from ._apply import apply_gauge, canonical, random_gauge
from ._backpropagation import UCBackpropagation, uc_backpropagation, uc_linear
from ._gauges import Gauge, LayerGauge, NetworkGauge
from .channels.graph import ChannelGraph, Entry, Factors, Node
from .channels.trace import trace
from .scales.network import network_scales
from .scales.rz import RZScaling, rz_scaling, uc_adjoint, uc_inverse

__all__ = [
    "ChannelGraph",
    "Entry",
    "Factors",
    "Gauge",
    "LayerGauge",
    "NetworkGauge",
    "Node",
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
