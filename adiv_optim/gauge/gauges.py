"""Gauges of a model: draw one, apply one, bring a model to the balanced one; and how a step chooses its scales."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .._checks import check_count, check_not_negative
from .._device import at_least_float32, local, to_float64, whole
from ..optim.parameters import unwrapped
from .graph import ChannelGraph, Factors
from .network import network_scales
from .rz import rz_scaling


def random_gauge(graph: ChannelGraph, sigma: float = 1.0, *, generator: torch.Generator | None = None) -> Tensor:
    """Draw log-scales s ~ N(0, σ²), one for each free channel.

    Args:
        graph: from `trace`.
        sigma: σ; scales e^s are log-normal.
        generator: of the random numbers; the result is on its device.

    Returns:
        (graph.free,), float64.

    Raises:
        ValueError: σ is negative or not finite.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from adiv_optim import gauge
        >>> graph = gauge.trace(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), torch.ones(1, 3))
        >>> gauge.random_gauge(graph, 1.5, generator=torch.Generator().manual_seed(0)).shape
        torch.Size([4])
    """
    check_not_negative("random_gauge", sigma=sigma)
    device = generator.device if generator is not None else None
    return sigma * torch.randn(graph.free, generator=generator, device=device, dtype=torch.float64)


@torch.no_grad()
def apply_gauge(model: nn.Module, graph: ChannelGraph, log_scales: Tensor) -> nn.Module:
    r"""Rescale a model's channels in place; its function stays.

    .. math:: W_{oi} \leftarrow e^{s_o} W_{oi} e^{-s_i}, \qquad b_o \leftarrow e^{s_o} b_o

    The function is that of the traced call: parameters that it did not use (`graph.unused`) stay as they are, and
    a call that uses them changes. A running mean moves by e^s, a running variance by e^{2s}. BatchNorm's function
    stays where its eps is negligible beside the variance (1e-30, say), and changes a little otherwise.

    Args:
        model: the traced model, or one with the same parameters.
        graph: from `trace`.
        log_scales: s, (graph.free,); in any precision and on any device.

    Returns:
        The same model.

    Raises:
        ValueError: `log_scales` has another shape or holds NaN or inf, a parameter would leave the range of its type,
            or the model lacks one of the graph or has it in another shape. The model is then unchanged.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from adiv_optim import gauge
        >>> model, x = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double(), torch.randn(5, 3).double()
        >>> graph, before = gauge.trace(model, x), model(x)
        >>> _ = gauge.apply_gauge(model, graph, gauge.random_gauge(graph))
        >>> torch.allclose(model(x), before)
        True
    """
    if not isinstance(graph, ChannelGraph) or not isinstance(log_scales, Tensor):
        raise TypeError(
            f"apply_gauge takes (model, graph, log_scales), found {type(model).__name__}, {type(graph).__name__}, "
            f"{type(log_scales).__name__}; graph is what trace returns, log_scales a tensor of (graph.free,)."
        )
    if not bool(log_scales.isfinite().all()):
        raise ValueError("log_scales holds NaN or inf; draw it from random_gauge or network_scales.")
    plain = unwrapped(model)
    tensors = {**dict(plain.named_parameters()), **dict(plain.named_buffers())}
    log_scales = to_float64(log_scales)
    factors = {**graph.factors(log_scales), **graph.factors(log_scales, buffers=True)}
    graph.check(tensors, factors)
    new = dict[str, Tensor]()
    for name in factors:
        shape, d, e = factors[name].of_shard(tensors[name])
        part = local(tensors[name]).detach().view(shape)
        # One of the factors may leave the range of half precision where their product does not.
        wide = at_least_float32(part)
        new[name] = (wide * d.to(wide) * e.to(wide)).to(part.dtype)
        if not bool((new[name].isfinite() | ~part.isfinite()).all()):
            raise ValueError(f"{name!r} leaves the range of {part.dtype} by these scales; take smaller ones.")
    for name, value in new.items():
        local(tensors[name]).detach().view(value.shape).copy_(value)
    return model


def canonical(model: nn.Module, graph: ChannelGraph) -> Tensor:
    """Bring a model into its balanced gauge, in place: the one in which `network_scales` returns zeros.

    This is the paper's projection Π (appendix B) for a whole network: all models that differ by a gauge become the
    same, and a second projection changes nothing.

    Args:
        model: the traced model, or one with the same parameters.
        graph: from `trace`.

    Returns:
        The log-scales that were taken off; `apply_gauge(model, graph, …)` with them puts them back.

    Raises:
        ValueError: as `network_scales` and `apply_gauge`. The model is then unchanged.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from adiv_optim import gauge
        >>> model = nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1)).double()
        >>> _ = model[0].weight.data.fill_(2.0), model[2].weight.data.fill_(-8.0)
        >>> gauge.canonical(model, gauge.trace(model, torch.ones(1, 1).double())).exp()
        tensor([0.5000], dtype=torch.float64)
        >>> round(model[0].weight.item(), 9), round(model[2].weight.item(), 9)
        (4.0, -4.0)
    """
    log_scales = network_scales(graph, dict(unwrapped(model).named_parameters()))
    apply_gauge(model, graph, -log_scales)
    return log_scales


@dataclass(frozen=True)
class NetworkGauge:
    r"""One scale per channel of the whole network: D = exp(s_out), E = exp(−s_in), s from `network_scales`.

    The wrapped optimizer runs as it would on the balanced network. That is near the network as PyTorch initialises it,
    so that learning rates carry over. Weights and biases follow one path in every gauge. A subclass may have other
    `factors`, with which W' = D⁻¹WE⁻¹ is the same in every gauge.

    Args:
        every: measure the scales anew every so many steps; equivalent networks follow one path all the same.

    Example:
        >>> NetworkGauge(every=10)
        NetworkGauge(every=10)
    """

    every: int = 1

    def __post_init__(self) -> None:
        check_count(type(self).__name__, every=self.every)

    def factors(self, graph: ChannelGraph, parameters: Mapping[str, Tensor], log_scales: Tensor) -> dict[str, Factors]:
        """Return D and E by name; parameters that are left out take the plain step.

        Args:
            graph: from `trace`.
            parameters: name → tensor.
            log_scales: the network gauge of these parameters, from `network_scales`.
        """
        return graph.factors(log_scales)

    def treatments(self, graph: ChannelGraph) -> dict[str, str]:
        """Return in words how each parameter that has scales is treated: unless overridden, those that move."""
        moving = {name: entry for name, entry in graph.parameters.items() if entry.moves}
        return {name: f"network gauge, {entry.describe_free()}" for name, entry in moving.items()}


@dataclass(frozen=True)
class LayerGauge(NetworkGauge):
    r"""Scales of each weight by itself, D and E from `rz_scaling`: :math:`W \leftarrow W - \eta D^2 G E^2`.

    This is the paper's step (Uhlmann, *Unit-Consistent (UC) Adjoint for GSD and Backprop in Deep Learning
    Applications*). Typical weights have |W'| ≈ 1 then, so that learning rates do not carry over: for N(0, σ²) weights
    divide plain SGD's rate by about 0.28σ². Biases, and whatever is no matrix, take the scales of `NetworkGauge`: by
    those of one layer they would drift.

    Example:
        >>> LayerGauge()
        LayerGauge(every=1)
    """

    def factors(self, graph: ChannelGraph, parameters: Mapping[str, Tensor], log_scales: Tensor) -> dict[str, Factors]:
        # The scales of rows of zeros, and of parts of a weight that zeros set apart, are `rz_scaling`'s convention. So
        # it scales the weight in the network gauge, which is the same in every gauge, and these scales with it.
        factors = graph.factors(log_scales)
        for name, entry in graph.parameters.items():
            if not entry.matrix:
                continue
            ones = (1,) * (parameters[name].dim() - 2)
            # Every process with a part of a sharded weight gathers all of it. In float32 at least: scales of float16
            # weights may lie outside of float16's range.
            weight = at_least_float32(whole(parameters[name].detach())).view(entry.shape)
            d, e = (factor.to(weight) for factor in factors[name][1:]) if name in factors else weight.new_ones(2)
            try:
                rows, _, columns = rz_scaling((weight / d).div_(e), kernel_dims=len(ones))
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
            d, e = d * rows.view(*rows.shape, 1, *ones), e * columns.view(*columns.shape[:-1], 1, -1, *ones)
            factors[name] = Factors(entry.shape, d, e)
        return factors

    def treatments(self, graph: ChannelGraph) -> dict[str, str]:
        matrices = {name: "layer gauge" for name, entry in graph.parameters.items() if entry.matrix}
        return {**super().treatments(graph), **matrices}
