"""Optimizers that wrap another optimizer."""

from .chained import ChainedOptimizer
from .gradient_only import GradientOnly
from .input_scaled import InputScaled
from .mapped import Mapped
from .measurements import ChangeOfVariables, Measurements
from .preconditioned import Preconditioned
from .step import Stack, take_step
from .watch import Watch
from .whitened import Whitened
from .wrapper import OptimizerWrapper

__all__ = [
    "ChainedOptimizer", "ChangeOfVariables", "GradientOnly", "InputScaled", "Mapped", "Measurements",
    "OptimizerWrapper", "Preconditioned", "Stack", "Watch", "Whitened", "take_step",
]  # fmt: skip
