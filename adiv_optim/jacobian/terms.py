"""The residuals of a loss, term by term, their Jacobian J, its damped least squares, and the memory that these take."""

import os
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad, jacrev, vmap

from .modules import call_with

#: A residual function of (model, *one sample), and the batched tensors that it is mapped over.
Term = tuple[Any, ...]
Parameters = Mapping[str, Tensor]


class _Residual(nn.Module):
    """A residual function of a network as a module, which can be run with other parameters."""

    def __init__(self, network: nn.Module, function: Callable[..., Tensor], where: str) -> None:
        super().__init__()
        self.network, self.function, self.where = network, function, where
        self.dtype = next(parameter.dtype for parameter in network.parameters() if parameter.requires_grad)

    def forward(self, *sample: Tensor) -> Tensor:
        residual = self.function(self.network, *sample)
        if not isinstance(residual, Tensor) or residual.dtype != self.dtype or not residual.numel():
            kind = type(residual).__name__
            form = f"{tuple(residual.shape)} of {residual.dtype}" if isinstance(residual, Tensor) else f"a {kind}"
            raise TypeError(
                f"{self.where}: a residual is {form}; it must be a tensor of {self.dtype}, as the parameters are, with "
                "at least 1 number."
            )
        return residual.flatten()


class Terms:
    r"""Residuals r of some terms, stacked, with :math:`|r|^2` the sum of their mean squares; and J = ∂r/∂θ.

    Args:
        network: whose trainable parameters are θ.
        terms: residual functions and the batched tensors that each is mapped over.
        where: opens the messages of errors.

    Raises:
        TypeError: terms are not given as pairs of a function and tensors; once they are evaluated, a residual is no
            tensor of the parameters' type.
        ValueError: the tensors of a term differ in length, or are empty.
    """

    def __init__(self, network: nn.Module, terms: Sequence[Term], where: str) -> None:
        _check(terms, where)
        self.residuals = [_Residual(network, function, where) for function, *_ in terms]
        self.samples: list[tuple[Tensor, ...]] = [tuple(tensors) for _, *tensors in terms]
        #: Numbers in one sample's residual, per term; set by `evaluate`.
        self.sizes: list[int] = []

    def differentiated_at_once(self, chunk_size: int | None) -> int:
        """Return how many rows of J the largest chunk has."""
        counts = [min(chunk_size or len(tensors[0]), len(tensors[0])) for tensors in self.samples]
        return max(count * size for count, size in zip(counts, self.sizes, strict=True))

    @property
    def sample_count(self) -> int:
        """How many samples there are."""
        return sum(len(tensors[0]) for tensors in self.samples)

    @property
    def residual_count(self) -> int:
        """How many residuals there are."""
        return sum(len(tensors[0]) * size for tensors, size in zip(self.samples, self.sizes, strict=True))

    def evaluate(self, parameters: Parameters) -> Tensor:
        """Return the residuals at some parameters, (residuals,), each divided by the root of its term's count."""
        by_term = []
        for residual, tensors in zip(self.residuals, self.samples, strict=True):
            run = vmap(lambda *sample, r=residual: _call(r, parameters, sample))
            by_term.append(run(*tensors))
        self.sizes = [values.shape[1] for values in by_term]
        return torch.cat([values.flatten() / values.numel() ** 0.5 for values in by_term])

    def jacobian(self, parameters: Parameters, chunk_size: int | None) -> Tensor:
        """Return J at some parameters, (residuals, θ), in their order; samples are differentiated by chunks."""
        widths = [parameter.numel() for parameter in parameters.values()]
        first = next(iter(parameters.values()))
        whole, row = first.new_empty(self.residual_count, sum(widths)), 0
        for residual, tensors, size in zip(self.residuals, self.samples, self.sizes, strict=True):
            count = len(tensors[0])

            def of_parameters(parameters: Parameters, *sample: Tensor, r: nn.Module = residual) -> Tensor:
                return _call(r, parameters, sample)

            def of_number(*about: Any, r: Callable[..., Tensor] = of_parameters) -> Tensor:
                return r(*about)[0]

            # A gradient is a backward pass without the map over one.
            run: Callable[..., Any] = grad(of_number) if size == 1 else jacrev(of_parameters)
            each = vmap(run, in_dims=(None, *[0] * len(tensors)))
            for start in range(0, count, chunk := chunk_size or count):
                parts = each(dict(parameters), *(tensor[start : start + chunk] for tensor in tensors))
                rows = len(tensors[0][start : start + chunk]) * size
                block, column = whole[row : row + rows], 0
                for name, width in zip(parameters, widths, strict=True):
                    block[:, column : column + width] = parts[name].reshape(rows, width)
                    column += width
                block /= (count * size) ** 0.5
                row += rows
        return whole


def _call(residual: nn.Module, parameters: Parameters, sample: Sequence[Tensor]) -> Tensor:
    return call_with(residual, {f"network.{name}": value for name, value in parameters.items()}, tuple(sample))


def _check(terms: Any, where: str) -> None:
    if callable(terms):
        raise TypeError(
            f"{where} takes terms, [(residual, points), …], and no closure: a closure's residuals have to be "
            "differentiated by a backward pass each."
        )
    if not isinstance(terms, (list, tuple)) or not terms:
        raise TypeError(f"{where} takes a list of terms, [(residual, points), …], found {type(terms).__name__}.")
    for number, term in enumerate(terms):
        form = isinstance(term, (list, tuple)) and len(term) > 1 and callable(term[0])
        if not form or not all(isinstance(part, Tensor) and part.dim() for part in term[1:]):
            raise TypeError(
                f"{where}: terms[{number}] is not (residual, tensor, …): a function of (model, *one sample) and the "
                "batched tensors that it is mapped over."
            )
        lengths = [len(part) for part in term[1:]]
        if len(set(lengths)) > 1 or not lengths[0]:
            raise ValueError(
                f"{where}: the tensors of terms[{number}] have {', '.join(map(str, lengths))} rows; all need the same "
                "number, and at least 1."
            )


def solver(jacobian: Tensor, ridge: float) -> Callable[[Tensor], Tensor]:
    """Return v → Jᵀ(JJᵀ + λI)⁻¹ v = (JᵀJ + λI)⁻¹ Jᵀv, by the QR factors of Jᵀ over √λ I, or of J where it is tall."""
    is_wide = len(jacobian) <= jacobian.shape[1]
    tall = jacobian.mT if is_wide else jacobian
    rows, size = tall.shape
    stacked = tall.new_zeros(size, rows + size).mT  # by columns, as LAPACK takes it
    stacked[:rows] = tall
    stacked[rows:].diagonal().fill_(ridge**0.5)
    factors, tau = torch.geqrf(stacked)
    triangle = factors[:size]  # with reflectors below the diagonal, which are not read

    def solve(v: Tensor) -> Tensor:
        padded = v.new_zeros(rows + size, 1)
        if is_wide:
            padded[:size] = torch.linalg.solve_triangular(triangle.mT, v[:, None], upper=False)
            return torch.ormqr(factors, tau, padded)[:rows, 0]
        padded[:rows, 0] = v
        turned = torch.ormqr(factors, tau, padded, transpose=True)[:size]
        return torch.linalg.solve_triangular(triangle, turned, upper=True)[:, 0]

    return solve


def step_bytes(rows: int, parameters: int, at_once: int, size: int) -> int:
    """Return a step's peak of memory in bytes, `size` for each number; see `GaussNewton`.

    A residual that runs the network twice has two gradients and their sum; QR works on J over √λ I and returns as much.
    """
    whole = rows * parameters
    return size * (whole + max(3 * min(at_once, rows) * parameters, 2 * (whole + min(rows, parameters) ** 2)))


def check_memory(rows: int, at_once: int, points: int, parameters: Sequence[Tensor]) -> None:
    """Raise a MemoryError if a step needs more than is free, which says how many of its points a step may draw."""
    count, size = sum(parameter.numel() for parameter in parameters), parameters[0].element_size()
    needed, free = step_bytes(rows, count, at_once, size), free_bytes(parameters[0].device)
    if needed > free:
        most = bisect_right(range(rows), free, key=lambda fewer: step_bytes(fewer, count, at_once, size)) - 1
        raise MemoryError(
            f"GaussNewton.step: {rows:,} residuals by {count:,} parameters need {needed / 1e9:.1f} GB, and "
            f"{free / 1e9:.1f} GB are free; draw at most {points * most // rows:,} points a step, or set chunk_size."
        )


def free_bytes(device: torch.device) -> float:
    """Return the bytes that a step may take."""
    if device.type == "cuda":  # memory that torch keeps for later tensors is free too
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept
    try:
        with open("/proc/meminfo") as file:
            return 1024 * next(int(line.split()[1]) for line in file if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else float("inf")
