"""Optimizers that stand in front of another optimizer."""

from .gradient_only import GradientOnly
from .wrapper import OptimizerWrapper

__all__ = ["GradientOnly", "OptimizerWrapper"]
