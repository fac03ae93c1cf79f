"""Rescalings of a network that its function does not see, and coordinates that they cannot touch."""

from ..scaling import RZScaling, rz_scaling, uc_adjoint, uc_inverse
from ._apply import apply_gauge, canonical, random_gauge
from ._gauges import Gauge, LayerGauge, NetworkGauge
from ._graph import ChannelGraph, Entry, Factors, Node
from ._network import network_scales
from ._trace import trace

__all__ = [
    "ChannelGraph",
    "Entry",
    "Factors",
    "Gauge",
    "LayerGauge",
    "NetworkGauge",
    "Node",
    "RZScaling",
    "apply_gauge",
    "canonical",
    "network_scales",
    "random_gauge",
    "rz_scaling",
    "trace",
    "uc_adjoint",
    "uc_inverse",
]
