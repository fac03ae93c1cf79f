"""Optimizers that stand in front of another optimizer."""

from .chained import ChainedOptimizer
from .chart import Chart, Map
from .coordinates import Coordinates
from .gradient_only import GradientOnly
from .input_scaled import InputScaled
from .preconditioned import Preconditioned
from .unit_consistent import UnitConsistent
from .whitened import Whitened
from .wrapper import OptimizerWrapper

__all__ = [
    "ChainedOptimizer",
    "Chart",
    "Coordinates",
    "GradientOnly",
    "InputScaled",
    "Map",
    "OptimizerWrapper",
    "Preconditioned",
    "UnitConsistent",
    "Whitened",
]
