"""Quadrature of an activation against the standard normal, on panels that are halved where it is not smooth."""

import copy
import math
from collections.abc import Callable, Iterator
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

Activation = Callable[[Tensor], Tensor]

#: The normal density beyond this is no float64 any more.
EDGE = 38
#: The share of a moment that one panel may miss before it is halved, and that all of them may miss in the end.
PER_PANEL, IN_ALL = 1e-14, 1e-7
MOST_PANELS, MOST_HALVINGS = 2**14, 60
NODES, WEIGHTS = (torch.from_numpy(each) for each in np.polynomial.legendre.leggauss(20))


class Sampled(NamedTuple):
    """An activation on quadrature nodes, weights taken into the functions: E[fg] is Σ (roots · f)(roots · g)."""

    nodes: Tensor  # z
    roots: Tensor  # √(weight · density at z)
    values: Tensor  # roots · σ(z)

    def hermite(self) -> Iterator[Tensor]:
        """Yield roots · He_k(z) / √k! for k = 0, 1, …, which stays bounded where He_k alone would overflow."""
        before, h, k = torch.zeros_like(self.roots), self.roots, 0
        while True:
            yield h
            k += 1
            before, h = h, (self.nodes * h - math.sqrt(k - 1) * before) / math.sqrt(k)


@torch.no_grad()
def sample(activation: Activation, degree: int = 1) -> Sampled:
    """Evaluate an activation on nodes that integrate its square, its mean and its Hermite coefficient of one degree.

    At first there is a panel of 20 Gauss-Legendre nodes between any two neighbouring whole numbers. A panel is replaced
    by its halves as long as that changes one of the three integrals, which closes in on kinks, jumps and steep places
    wherever they are. Raises as `gaussian_moments` does.
    """
    if not callable(activation):
        raise TypeError(f"activation is {activation!r}; pass an elementwise module or function, such as torch.relu.")
    name = repr(activation) if isinstance(activation, nn.Module) else getattr(activation, "__name__", "activation")
    if isinstance(activation, nn.Module):
        if any(tensor.is_meta for tensor in activation.state_dict().values()):
            raise ValueError(f"{name} is on the meta device and has no values to integrate; build it on another one.")
        activation = copy.deepcopy(activation).to("cpu", torch.float64)
    cuts = torch.arange(-EDGE, EDGE + 1, dtype=torch.float64, device="cpu")
    edges = torch.stack([cuts[:-1], cuts[1:]], 1)
    _check_elementwise(activation, edges.flatten(), name)

    coarse = _on(activation, edges, name)
    second, _, _ = _integrals(coarse, degree)
    if second[[0, -1]].max() > PER_PANEL * second.sum():
        raise ValueError(f"{name} has no finite variance under a standard normal: it must grow slower than exp(z²/4).")
    size = second.sum().clamp(min=torch.finfo(second.dtype).tiny)
    sizes = torch.stack([size, size.sqrt(), size.sqrt()]).unsqueeze(1)
    accepted, missed = [], 0.0
    for halvings in range(1, MOST_HALVINGS + 1):
        middle = edges.mean(1, keepdim=True)
        edges = torch.cat([edges[:, :1], middle, middle, edges[:, 1:]], 1).view(-1, 2)
        fine = _on(activation, edges, name)
        change = (_integrals(fine, degree).unflatten(1, (-1, 2)).sum(2) - _integrals(coarse, degree)).abs()
        change = (change / sizes).amax(0)
        unsettled = (change > PER_PANEL) & (halvings < MOST_HALVINGS) & (len(change) < MOST_PANELS)
        missed += change[~unsettled].sum().item()
        both = unsettled.repeat_interleave(2)
        accepted.append([part[~both].flatten() for part in fine])
        if not unsettled.any():
            break
        edges, coarse = edges[both], Sampled(*(part[both] for part in fine))
    if not missed <= IN_ALL:  # NaN included
        raise ValueError(
            f"the moments of {name} under a standard normal do not settle: its variance is infinite, or it is rougher "
            "than can be integrated; pass a function without infinitely many jumps."
        )
    return Sampled(*map(torch.cat, zip(*accepted, strict=True)))


def _on(activation: Activation, edges: Tensor, name: str) -> Sampled:
    """The activation on the nodes of panels, a row each."""
    half = edges.diff(dim=1) / 2
    nodes = edges[:, :1] + half * (1 + NODES)
    roots = (half * WEIGHTS).sqrt() * torch.exp(-nodes.square() / 4) / math.tau**0.25
    # A copy, for an activation may work in place.
    values = activation(nodes.clone()).to(nodes.dtype)
    if not values.isfinite().all():
        at = nodes[~values.isfinite()][0]
        raise ValueError(f"{name} gives {activation(at[None]).item()} at z = {at:.6g}; it must be finite for every z.")
    return Sampled(nodes, roots, roots * values)


def _integrals(panels: Sampled, degree: int) -> Tensor:
    """E[σ²], E[σ] and c_degree, panel by panel: shape (3, panels)."""
    highest = next(islice(panels.hermite(), degree, None))
    factors = torch.stack([panels.values, panels.roots, highest])
    return (factors * panels.values).sum(-1)


def _check_elementwise(activation: Activation, nodes: Tensor, name: str) -> None:
    complaint = f"{name} is not an elementwise activation"
    try:
        found, some = activation(nodes.clone()), activation(nodes[1::2, None].clone())
    except Exception as error:
        raise ValueError(f"{complaint}: it cannot be applied to a tensor of any shape ({error}).") from error
    if not isinstance(found, Tensor) or (found.shape, some.shape) != (nodes.shape, (len(nodes) // 2, 1)):
        raise ValueError(f"{complaint}: its output has not the shape of its input.")
    if not torch.allclose(found[1::2], some[:, 0], rtol=1e-6, atol=1e-12, equal_nan=True):
        raise ValueError(
            f"{complaint}: what it gives for a number depends on the other numbers of the tensor, or on chance (then "
            "call .eval() first)."
        )
