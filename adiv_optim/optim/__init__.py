"""Optimizers that stand in front of another optimizer."""

from .chained import ChainedOptimizer
from .gradient_only import GradientOnly
from .input_scaled import InputScaled
from .mapped import Mapped, Watching
from .measured_layers import ChangeOfVariables
from .preconditioned import Preconditioned
from .step import Stack, take_step
from .watch import Watch
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
