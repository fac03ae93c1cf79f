"""What wrappers that measure inputs remember of a layer."""

from typing import Any

from torch import Tensor


def mean_of(layer: Any) -> list[Tensor]:
    """The blocks of a layer's covariance."""
    return layer.moments.mean(layer.memory, layer.rows)


def rms_of(layer: Any) -> Tensor:
    """The root mean square of an entry."""
    found: Tensor = layer.moments.rms(layer.memory, layer.rows)
    return found


def spectra_of(layer: Any) -> Any:
    """Of each block the trace, and the leading eigenvalues and eigenvectors."""
    return layer.moments.spectra(layer.memory, layer.rows)
