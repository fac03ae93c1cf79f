"""Optimizers that wrap another optimizer."""

from .chained import ChainedOptimizer
from .gradient_only import GradientOnly
from .input_scaled import InputScaled
from .mapped import Mapped
from .preconditioned import Preconditioned
from .step import Stack, take_step
from .watch import Watch
from .watching import ChangeOfVariables, Watching
from .whitened import Whitened
from .wrapper import OptimizerWrapper

__all__ = [
    "ChainedOptimizer",
    "ChangeOfVariables",
    "GradientOnly",
    "InputScaled",
    "Mapped",
    "OptimizerWrapper",
    "Preconditioned",
    "Stack",
    "Watch",
    "Watching",
    "Whitened",
    "take_step",
]
