"""Optimizers that stand in front of another optimizer."""

from .chained import ChainedOptimizer
from .gradient_only import GradientOnly
from .input_scaled import InputScaled
from .preconditioned import Preconditioned
from .unit_consistent import UnitConsistent
from .whitened import Whitened
from .wrapper import OptimizerWrapper

__all__ = [
    "ChainedOptimizer",
    "GradientOnly",
    "InputScaled",
    "OptimizerWrapper",
    "Preconditioned",
    "UnitConsistent",
    "Whitened",
]
