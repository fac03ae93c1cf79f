"""Changing a model's gauge: other weights, the same function."""

import torch
from torch import Tensor, nn

from .._linalg.limits import check_not_negative
from .channels.graph import ChannelGraph
from .scales.network import network_scales


def random_gauge(graph: ChannelGraph, sigma: float = 1.0, *, generator: torch.Generator | None = None) -> Tensor:
    """Draw log-scales s ~ N(0, σ²), one for each free channel.

    Args:
        graph: from `trace`.
        sigma: σ; scales e^s are log-normal.
        generator: of the random numbers; the result lies on its device.

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

    The function is that of the traced call: parameters that it did not use (`graph.outside`) stay as they are, and
    another call that uses them computes something else then. A running mean moves by e^s, a running variance by e^{2s}.
    BatchNorm's function changes as much as its eps matters beside the variance, and not at all where that is negligible
    (1e-30, say).

    Args:
        model: the traced model, or one with the same parameters.
        graph: from `trace`.
        log_scales: s, (graph.free,); in any precision and on any device.

    Returns:
        The same model.

    Raises:
        ValueError: `log_scales` has another shape or holds NaN or inf, or the model lacks a parameter of the
            graph or has it in another shape. The model is then unchanged.

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
    graph.check(log_scales)
    if not bool(log_scales.isfinite().all()):
        raise ValueError("log_scales holds NaN or inf; draw it from random_gauge or network_scales.")
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    entries = {**graph.parameters, **graph.buffers}
    factors = {**graph.factors(log_scales.double()), **graph.buffer_factors(log_scales.double())}
    if lacking := [name for name in factors if name not in tensors]:
        raise ValueError(
            f"the graph has {lacking[0]!r}, which the model does not; trace the model that it is applied to."
        )
    parts = {name: entries[name].held(name, tensors[name])[1] for name in factors}
    for name, part in parts.items():
        _, d, e = factors[name].held(tensors[name])
        # One of the factors may leave the range of half precision where their product does not.
        wide = part.to(torch.promote_types(part.dtype, torch.float32))
        part.copy_(wide * d.to(wide) * e.to(wide))
    return model


def canonical(model: nn.Module, graph: ChannelGraph, *, fan_in: bool = True) -> Tensor:
    """Bring a model into its balanced gauge, in place: the one in which `network_scales` finds nothing to do.

    This is the paper's projection Π (appendix B) for a whole network: all models that differ by a gauge become
    the same one. Doing it twice is doing it once.

    Args:
        model: the traced model, or one with the same parameters.
        graph: from `trace`.
        fan_in: the magnitude of balanced weights; see `network_scales`.

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
    log_scales = network_scales(graph, dict(model.named_parameters()), fan_in=fan_in)
    apply_gauge(model, graph, -log_scales)
    return log_scales
