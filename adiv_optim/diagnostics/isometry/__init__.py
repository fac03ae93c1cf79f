"""How far the samples of a batch are from orthogonal and equally long, and the recorder of it."""

from .gram import isometry, isometry_gap, isometry_strength, mean_field_bound
from .recorder import IsometryRecorder, record

__all__ = ["IsometryRecorder", "isometry", "isometry_gap", "isometry_strength", "mean_field_bound", "record"]
