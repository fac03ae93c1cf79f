"""Which canonical coordinates a unit-consistent optimizer steps in."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .._linalg.limits import check_count
from .._linalg.shards import whole
from .channels.graph import ChannelGraph, Entry, Factors
from .scales.rz import rz_scaling


@dataclass(frozen=True)
class Gauge(ABC):
    """A rule that finds scales D and E for every parameter such that W' = D⁻¹WE⁻¹ is the same in every gauge.

    Args:
        every: measure the scales anew every so many steps; equivalent networks follow one path all the same.
        fan_in: the magnitude that channels are balanced to; see `network_scales`.
    """

    every: int = 1
    fan_in: bool = True

    def __post_init__(self) -> None:
        check_count(type(self).__name__, every=self.every)

    @abstractmethod
    def factors(self, graph: ChannelGraph, parameters: Mapping[str, Tensor], log_scales: Tensor) -> dict[str, Factors]:
        """Return D and E of every parameter that moves.

        Args:
            graph: from `trace`.
            parameters: name → tensor.
            log_scales: the network gauge of these parameters, from `network_scales`.
        """

    def treats(self, graph: ChannelGraph) -> dict[str, str]:
        """Say of every parameter that `factors` has scales for, how it is treated; all others take the plain step.

        Here those that a free channel moves.
        """
        return {name: f"network gauge, {entry.free()}" for name, entry in graph.parameters.items() if entry.moves}


@dataclass(frozen=True)
class NetworkGauge(Gauge):
    r"""One scale per channel of the whole network: D = exp(s_out), E = exp(−s_in), s from `network_scales`.

    The wrapped optimizer runs as it would on the balanced network. With `fan_in` that is near the network as PyTorch
    initialises it, so that learning rates carry over. Weights and biases follow one path in every gauge.

    Example:
        >>> NetworkGauge(every=10)
        NetworkGauge(every=10, fan_in=True)
    """

    def factors(self, graph: ChannelGraph, parameters: Mapping[str, Tensor], log_scales: Tensor) -> dict[str, Factors]:
        """Return exp(s_out) and exp(−s_in); see `Gauge.factors`."""
        return graph.factors(log_scales)


@dataclass(frozen=True)
class LayerGauge(Gauge):
    r"""Every weight by itself: D and E from `rz_scaling`, the paper's step :math:`W \leftarrow W - \eta D^2 G E^2`.

    (Uhlmann, *Unit-Consistent (UC) Adjoint for GSD and Backprop in Deep Learning Applications*.) Typical weights
    have |W'| ≈ 1 then, so that learning rates do not carry over: for N(0, σ²) weights divide plain SGD's rate by about
    0.28σ². Biases, and whatever else is no matrix, take the scales of `NetworkGauge`: by D of one layer they drift.

    Example:
        >>> LayerGauge()
        LayerGauge(every=1, fan_in=True)
    """

    def factors(self, graph: ChannelGraph, parameters: Mapping[str, Tensor], log_scales: Tensor) -> dict[str, Factors]:
        """Return the scales of `rz_scaling` for weights, exp(s_out) for biases; see `Gauge.factors`."""
        network = graph.factors(log_scales)
        # Rows of zeros, and parts of a weight that zeros set apart, get scales by convention from `rz_scaling`. It is
        # given the weight in the network gauge, which is the same in every gauge: these scales are the same then too.
        found = dict(network)
        for name in self._weights(graph):
            balanced = network[name].divide(parameters[name]) if name in network else parameters[name]
            shape, d, e = layer_scales(graph.parameters[name], balanced)
            if name in network:
                d, e = d * network[name].d.to(d), e * network[name].e.to(e)
            found[name] = Factors(shape, d, e)
        return found

    def treats(self, graph: ChannelGraph) -> dict[str, str]:
        """Say "layer gauge" of weights; see `Gauge.treats`."""
        return {**super().treats(graph), **dict.fromkeys(self._weights(graph), "layer gauge")}

    @staticmethod
    def _weights(graph: ChannelGraph) -> list[str]:
        return [name for name, entry in graph.parameters.items() if entry.matrix]


def layer_scales(entry: Entry, weight: Tensor) -> Factors:
    """Return D and E of a weight that is a matrix or a kernel by `rz_scaling`, and raise as that does.

    A sharded weight is gathered, so that all processes that hold a part call this together.
    """
    weight = whole(weight.detach())
    # Scales of float16 weights may lie outside of float16's range.
    single = weight.to(torch.promote_types(weight.dtype, torch.float32))
    ones = (1,) * (weight.dim() - 2)
    rows, _, columns = rz_scaling(single.reshape(entry.shape), kernel_dims=len(ones))
    return Factors(entry.shape, rows.view(*rows.shape, 1, *ones), columns.view(*columns.shape[:-1], 1, -1, *ones))
