"""The memory that a Gauss–Newton step needs at its peak, and that a device has free."""

import os
from bisect import bisect_right
from collections.abc import Sequence

import torch
from torch import Tensor


def step_bytes(rows: int, parameters: int, at_once: int, size: int) -> int:
    """Return the peak of a step: J, and three times its rows that are differentiated at once, or three matrices JJᵀ.

    A residual that runs the network twice has two gradients and their sum; the matrices are JJᵀ (or JᵀJ), the shifted
    one and its factor. Activations that a backward pass keeps come on top.

    Args:
        rows: residuals.
        parameters: numbers that are trained.
        at_once: rows of J that are differentiated at once.
        size: bytes of a number.

    Example:
        >>> step_bytes(300, 1000, at_once=300, size=8) == 8 * (300 * 1000 + 3 * 300 * 1000)
        True
    """
    return size * (rows * parameters + 3 * max(min(at_once, rows) * parameters, min(rows, parameters) ** 2))


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
