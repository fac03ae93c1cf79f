"""What the studies of the language model share: options of a command, and how losses stand in tables."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from examples.gpt import DEFAULT

from ..core.options import DEVICE, Training
from ..core.store import Result
from ..core.tables import Words, spread
from ..problems.language import TextRun, final_validation_loss

#: The page that shows their tables.
PAGE = "docs/results/language-model.md"
#: Options that make one small run.
SMOKE = "--preset tiny --steps 2 --seeds 1 --device cpu"


@dataclass
class TextOptions(Training):
    """Options of every study of the language model."""

    weight_decay: float = 0.0
    """the same for all methods"""
    preset: str = "small"
    """size of the network: tiny, small, deep, million or gpu"""
    data: str = DEFAULT
    """a file of text, or python-reference, which Python ships"""
    device: str = DEVICE
    """where to train: cpu, cuda, cuda:1, …"""

    def run(self, **more: Any) -> TextRun:
        """A run with these options; what a study compares takes the place of its method, normaliser and rate."""
        common = {"weight_decay": self.weight_decay, "preset": self.preset, "device": self.device}
        return TextRun(self.data, "adamw", "layernorm", 1e-3, **common, **more)


class Edge(str):
    """A number that is the first or the last of several that were tried, which a page marks.

    Example:
        >>> f"{Edge(0.01):g}"
        '0.01*'
    """

    def __format__(self, spec: str) -> str:
        return f"{float(self):{spec}}*"


def marked(value: float | None, tried: Iterable[float]) -> float | Edge | None:
    """A setting, as an `Edge` if it is the first or the last of those tried."""
    values = set(tried)
    return Edge(value) if len(values) > 1 and value in (min(values), max(values)) else value


def worth(loss: float | None) -> float:
    """A loss to choose by: infinity, where a run diverged."""
    return math.inf if loss is None else loss


def losses_of(results: Iterable[Result]) -> tuple[list[float], list[float]]:
    """The losses of validation and test, inf where a run diverged."""
    each = [(worth(final_validation_loss(result)), worth(result["test_loss"])) for result in results]
    return [validation for validation, _ in each], [test for _, test in each]


def loss_columns(title: str, losses: list[float]) -> Mapping[str, Any]:
    """The columns of a mean loss, or how many runs diverged."""
    if math.inf in losses:
        return {title: Words(f"diverged, {losses.count(math.inf)} of {len(losses)}")}
    return spread(title, losses)


def title(result: Result) -> str:
    """Text and network of a run."""
    size = result["size"]
    return (
        f"Characters of {result['settings']['data']}, GPT of {size['layers']} layers, width {size['width']}, "
        f"{size['heads']} heads, context {size['context']}, batch {size['batch_size']}"
    )
