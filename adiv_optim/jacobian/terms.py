"""The residuals of a loss, term by term, their Jacobian J, its damped least squares, and the memory that these take."""

import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import grad, jacrev, vmap

from .._checks import describe
from .modules import Parameters, WrittenOut, call_with

#: A residual function of (model, *one sample), and the batched tensors that it is mapped over.
Term = tuple[Any, ...]


class _Residual(nn.Module):
    """The residual function of a term and its network as one module, which `call_with` runs with other parameters."""

    def __init__(self, network: nn.Module, function: Callable[..., Tensor], tensors: list[Tensor], where: str) -> None:
        super().__init__()
        self.network, self.function, self.tensors, self.where = network, function, tensors, where
        self.dtype = next(parameter.dtype for parameter in network.parameters() if parameter.requires_grad)
        self.count = len(tensors[0])
        self.size = 0  # numbers in the residual of one sample; set by `Terms.evaluate`

    @contextmanager
    def differentiated(self) -> Iterator[None]:
        """Let torch differentiate rightly, and say where its errors come from."""
        try:
            with WrittenOut():
                yield
        except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
            error.add_note(
                f"{self.where}: this residual is given the network and one sample of each tensor, without the "
                "dimension of the batch, and runs once for all by torch.func.vmap. Derivatives by a point come from "
                "jacobian.derivatives, laplacian or torch.func, not from torch.autograd.grad. Points have the dtype of "
                "the parameters; a branch is a torch.where, an index a torch.gather or a one-hot row made before the "
                "step; random numbers are drawn before it, and .eval() ends dropout. Write norms of what the network "
                "returns as square roots."
            )
            raise

    def forward(self, *sample: Tensor) -> Tensor:
        residual = self.function(self.network, *sample)
        if not isinstance(residual, Tensor) or residual.dtype != self.dtype or not residual.numel():
            is_tensor = isinstance(residual, Tensor)
            form = f"{tuple(residual.shape)} of {residual.dtype}" if is_tensor else f"a {type(residual).__name__}"
            raise TypeError(
                f"{self.where}: a residual is {form}; it must be a tensor of {self.dtype}, as the parameters are, "
                "with at least 1 number."
            )
        return residual.flatten()


class Terms:
    """Residuals r of some terms, stacked, with |r|² the sum of their mean squares; and J = ∂r/∂θ."""

    def __init__(self, network: nn.Module, terms: Sequence[Term], caller: str) -> None:
        _check_terms(terms, caller)
        self.caller = caller
        self.residuals = [
            _Residual(network, function, [each.detach() for each in tensors], f"{caller}: terms[{number}]")
            for number, (function, *tensors) in enumerate(terms)
        ]

    def evaluate(self, parameters: Parameters, *, refuse_outside: bool = False) -> Tensor:
        """Return the residuals at some parameters, (residuals,), each divided by the root of its term's count.

        With `refuse_outside` raise a ValueError if one depends on another tensor that requires gradients.
        """
        by_term = []
        for residual in self.residuals:
            with residual.differentiated(), torch.set_grad_enabled(refuse_outside):
                values = vmap(partial(_call, residual, parameters))(*residual.tensors)
            if values.requires_grad:
                raise ValueError(
                    f"{residual.where}: this residual uses a tensor that requires gradients and is no parameter of the "
                    "network, so that no step would change it. Make it an nn.Parameter of the network's module before "
                    "the optimizer is built, and reach it by the residual's first argument; or detach() it."
                )
            residual.size = values.shape[1]
            by_term.append(values.flatten() / values.numel() ** 0.5)
        return torch.cat(by_term)

    def jacobian(self, parameters: Parameters, chunk_size: int | None) -> Tensor:
        """Return J at some parameters, (residuals, θ), in their order, after `evaluate`; samples go chunk by chunk."""
        widths, like = [parameter.numel() for parameter in parameters.values()], next(iter(parameters.values()))
        total = sum(residual.count * residual.size for residual in self.residuals)
        self._check_memory(total, sum(widths), chunk_size, like)
        jacobian, start = like.new_empty(total, sum(widths)), 0
        for residual in self.residuals:
            per_sample = vmap(partial(_derivative, residual), in_dims=(None, *[0] * len(residual.tensors)))
            for chunk in zip(*(tensor.split(chunk_size or residual.count) for tensor in residual.tensors), strict=True):
                with residual.differentiated():
                    by_name = per_sample(parameters, *chunk)
                rows = jacobian[start : start + len(chunk[0]) * residual.size]
                for columns, name in zip(rows.split(widths, dim=1), parameters, strict=True):
                    columns.copy_(by_name[name].reshape(columns.shape))
                rows /= (residual.count * residual.size) ** 0.5
                start += len(rows)
        return jacobian

    def _check_memory(self, residuals: int, parameters: int, chunk_size: int | None, like: Tensor) -> None:
        """Raise where a step needs more than is free."""
        chunks = [min(chunk_size or each.count, each.count) * each.size for each in self.residuals]

        def needs(count: int, at_once: int = max(chunks)) -> int:
            return step_bytes(count, parameters, at_once, like.element_size())

        needed, free = needs(residuals), free_bytes(like.device)
        if needed > free:
            most = bisect_right(range(residuals), free, key=needs) - 1
            points = sum(each.count for each in self.residuals) * most // residuals
            smallest_chunk = max(each.size for each in self.residuals)
            remedy = ", or set a smaller chunk_size" * (needs(residuals, smallest_chunk) <= free)
            raise MemoryError(
                f"{self.caller}: {residuals:,} residuals by {parameters:,} parameters need {needed / 1e9:.1f} GB, and "
                f"{free / 1e9:.1f} GB are free; draw at most {points:,} points a step{remedy}."
            )


def _call(residual: nn.Module, parameters: Parameters, *sample: Tensor) -> Tensor:
    return call_with(residual, {f"network.{name}": value for name, value in parameters.items()}, *sample)


def _derivative(residual: _Residual, parameters: Parameters, *sample: Tensor) -> Parameters:
    if residual.size == 1:  # no need of a vmap over its numbers, as jacrev has
        return grad(lambda at: _call(residual, at, *sample)[0])(parameters)
    # A sample may be complex, which jacrev takes no argument of.
    return cast(Parameters, jacrev(lambda at: _call(residual, at, *sample))(parameters))


def _check_terms(terms: Any, caller: str) -> None:
    if not isinstance(terms, (list, tuple)) or not terms:
        raise TypeError(
            f"{caller} takes a list of terms, [(residual, points), …], with at least one, and no closure, whose "
            f"residuals would have to be differentiated by a backward pass each; found {describe(terms)}."
        )
    for number, term in enumerate(terms):
        has_function = isinstance(term, (list, tuple)) and len(term) > 1 and callable(term[0])
        if not has_function or not all(isinstance(part, Tensor) and part.dim() for part in term[1:]):
            raise TypeError(
                f"{caller}: terms[{number}] is not (residual, tensor, …): a function of (model, *one sample) and the "
                "batched tensors that it is mapped over."
            )
        lengths = [len(part) for part in term[1:]]
        if len(set(lengths)) > 1 or not lengths[0]:
            raise ValueError(
                f"{caller}: the tensors of terms[{number}] have {', '.join(map(str, lengths))} rows; all need the same "
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
    triangle = factors[:size]  # and reflectors below its diagonal, which are not read

    def solve(v: Tensor) -> Tensor:
        padded = v.new_zeros(rows + size, 1)
        if is_wide:
            padded[:size] = torch.linalg.solve_triangular(triangle.mT, v[:, None], upper=False)
            return torch.ormqr(factors, tau, padded)[:rows, 0]
        padded[:rows, 0] = v
        rotated = torch.ormqr(factors, tau, padded, transpose=True)[:size]
        return torch.linalg.solve_triangular(triangle, rotated, upper=True)[:, 0]

    return solve


def step_bytes(residuals: int, parameters: int, at_once: int, number_bytes: int) -> int:
    """Return a step's peak of memory, with `at_once` residuals differentiated together; see `GaussNewton`."""
    jacobian = residuals * parameters
    gradients = 3 * min(at_once, residuals) * parameters  # of a residual that runs the network twice, and their sum
    factors = 2 * (jacobian + min(residuals, parameters) ** 2)  # QR works on J over √λ I, and returns as much
    return number_bytes * (jacobian + max(gradients, factors))


def free_bytes(device: torch.device) -> float:
    """Return the bytes that are free, or all that there are where the system does not say."""
    if device.type == "cuda":  # memory that torch keeps for later tensors is free too
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept
    try:
        with open("/proc/meminfo") as file:
            return 1024 * next(int(line.split()[1]) for line in file if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else float("inf")
