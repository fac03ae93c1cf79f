"""The residuals of a loss, term by term, their Jacobian J, its damped least squares, and the memory that these take."""

import os
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from functools import partial
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
        self.where = where
        self.residuals = [_Residual(network, function, where) for function, *_ in terms]
        self.samples: list[tuple[Tensor, ...]] = [tuple(tensors) for _, *tensors in terms]
        #: Numbers in one sample's residual, per term; set by `evaluate`.
        self.sizes: list[int] = []

    def evaluate(self, parameters: Parameters) -> Tensor:
        """Return the residuals at some parameters, (residuals,), each divided by the root of its term's count."""
        by_term = []
        with torch.enable_grad():  # else torch takes a backward of SiLU and Mish that has no forward rule
            for residual, tensors in zip(self.residuals, self.samples, strict=True):
                by_term.append(vmap(partial(_call, residual, parameters))(*tensors))
        self.sizes = [values.shape[1] for values in by_term]
        return torch.cat([values.flatten() / values.numel() ** 0.5 for values in by_term])

    def jacobian(self, parameters: Parameters, chunk_size: int | None) -> Tensor:
        """Return J at some parameters, (residuals, θ), in their order; samples are differentiated by chunks.

        Raises:
            MemoryError: J and its factors need more than is free.
        """
        widths, first = [parameter.numel() for parameter in parameters.values()], next(iter(parameters.values()))
        counts = [len(tensors[0]) for tensors in self.samples]
        total = sum(count * size for count, size in zip(counts, self.sizes, strict=True))
        at_once = max(min(chunk_size or n, n) * size for n, size in zip(counts, self.sizes, strict=True))
        _check_memory(self.where, total, sum(widths), at_once, sum(counts), first)
        whole, row = first.new_empty(total, sum(widths)), 0
        for residual, tensors, size in zip(self.residuals, self.samples, self.sizes, strict=True):
            count = len(tensors[0])
            # Of one number a gradient: a backward pass without the map over one.
            run: Any = jacrev(partial(_call, residual)) if size > 1 else grad(partial(_first_number, residual))
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


def _call(residual: nn.Module, parameters: Parameters, *sample: Tensor) -> Tensor:
    return call_with(residual, {f"network.{name}": value for name, value in parameters.items()}, sample)


def _first_number(residual: nn.Module, parameters: Parameters, *sample: Tensor) -> Tensor:
    return _call(residual, parameters, *sample)[0]


def _check(terms: Any, where: str) -> None:
    if not isinstance(terms, (list, tuple)) or not terms:
        raise TypeError(
            f"{where} takes a list of terms, [(residual, points), …], and no closure, whose residuals would have to be "
            f"differentiated by a backward pass each; found {type(terms).__name__}."
        )
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


def _check_memory(where: str, rows: int, count: int, at_once: int, points: int, parameter: Tensor) -> None:
    size = parameter.element_size()
    needed, free = step_bytes(rows, count, at_once, size), free_bytes(parameter.device)
    if needed > free:
        most = bisect_right(range(rows), free, key=lambda fewer: step_bytes(fewer, count, at_once, size)) - 1
        raise MemoryError(
            f"{where}: {rows:,} residuals by {count:,} parameters need {needed / 1e9:.1f} GB, and "
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
