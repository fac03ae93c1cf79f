"""What wrappers that measure inputs remember of a layer."""

from typing import Any

from torch import Tensor


def mean_of(layer: Any) -> list[Tensor]:
    """The blocks of a layer's covariance."""
    return layer.moments.mean(layer.memory, layer.rows)


def counted(layer: Any) -> int:
    """How many rows are to count at the next measurement."""
    return layer.pending_rows + (0 if layer.unwatched is None else layer.unwatched.rows)


def rms_of(layer: Any) -> Tensor:
    """The root mean square of an entry."""
    found: Tensor = layer.moments.rms(layer.memory, layer.rows)
    return found


def spectra_of(layer: Any) -> Any:
    """Of each block the trace, and the leading eigenvalues and eigenvectors."""
    return layer.moments.spectra(layer.memory, layer.rows)
