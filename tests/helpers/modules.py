"""Models that are their parts and one expression."""

from collections.abc import Callable
from typing import Any

from torch import nn


class Model(nn.Module):
    """Parts by name, and what is made of an input: `compute(model, *inputs)`."""

    def __init__(self, compute: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.compute = compute
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.compute(self, *inputs, **named)
