"""One method on the language model, one seed: the settings of a run, alone and on the command line."""

import argparse
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from examples.gpt import DEFAULT, GPT, NORMS, PRESETS, Preset

from ..core.progress import add_progress_arguments
from ..core.run import DEVICE, Run, fingerprint
from ..methods import METHODS, Method

#: Options that make one small run.
SMOKE = "--preset tiny --steps 2 --seeds 1 --device cpu"


@dataclass(frozen=True)
class TextRun(Run):
    """The settings of one run."""

    norm: str
    lr: float  # at its peak
    weight_decay: float = 0.0  # of all optimizers
    steps: int = 1000
    seed: int = 0  # draws the initialisation and, by itself, the batches: they are the same for every method
    preset: str = "small"
    embedding_deviation: float | None = None  # at first; see `GPT`
    embedding_lr: float | None = None  # at its peak, of the AdamW that trains them; None is that of all it trains
    clip: float | None = None  # what the norm of all gradients is cut to

    kind = "language"

    def __post_init__(self) -> None:
        self.check(("lr", "steps"), norm=NORMS, preset=PRESETS)
        if METHODS[self.method].damped and self.damping is None:
            raise ValueError(f"method {self.method!r} needs a damping.")

    @property
    def size(self) -> Preset:
        """Of the network and its batches."""
        return PRESETS[self.preset]

    def computes(self) -> str:
        """A hash of what its method and normaliser compute; of its optimizer itself only the name counts."""
        return _computes(METHODS[self.method], self.norm)


@cache
def _computes(method: Method, norm: str) -> str:
    tokens = torch.arange(64).square().view(8, PRESETS["tiny"].context) % 7
    return fingerprint(method, GPT(PRESETS["tiny"], 7, norm), tokens, tokens.roll(1, 0))


def add_arguments(parser: argparse.ArgumentParser, preset: str, weight_decay: float = 0.0) -> None:
    """Give a parser the options of every study of the language model."""
    parser.add_argument("--weight-decay", type=float, default=weight_decay, help="the same for all methods")
    parser.add_argument("--preset", default=preset, help=", ".join(PRESETS))
    parser.add_argument("--data", default=DEFAULT, help=f"a file of text, or {DEFAULT}, which Python ships")
    parser.add_argument("--device", **DEVICE)
    add_progress_arguments(parser)


def described(options: argparse.Namespace, **more: Any) -> TextRun:
    """A run with these options; what a study compares takes the place of its method, normaliser and rate."""
    common = {"weight_decay": options.weight_decay, "preset": options.preset, "device": options.device}
    return TextRun(options.data, "adamw", "layernorm", 1e-3, **common, **more)
