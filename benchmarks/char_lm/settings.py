"""What one run is: a method, a network, a seed."""

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .. import runs
from .methods import METHODS
from .model import NORMS, PRESETS, Preset
from .text import DEFAULT


@dataclass(frozen=True)
class CharRun:
    """The settings of one run.

    Args:
        method: a key of `METHODS`.
        norm: a key of `NORMS`.
        lr: the rate at its peak.
        damping: of the method, if it has one; else None.
        weight_decay: of all its optimizers.
        steps: how many.
        seed: draws the initialisation and, by itself, the batches: they are the same for every method.
        preset: a key of `PRESETS`.
        data: the --data argument.
        device: where to train.
    """

    method: str
    norm: str
    lr: float
    damping: float | None = None
    weight_decay: float = 0.0
    steps: int = 1000
    seed: int = 0
    preset: str = "small"
    data: str = DEFAULT
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name, value, known in (
            ("method", self.method, METHODS),
            ("norm", self.norm, NORMS),
            ("preset", self.preset, PRESETS),
        ):
            if value not in known:
                raise ValueError(f"unknown {name} {value!r}; known are {', '.join(known)}.")
        for name, number in (("lr", self.lr), ("steps", self.steps)):
            if not number > 0:
                raise ValueError(f"{name} is {number}; it must be positive.")
        if METHODS[self.method].damped and self.damping is None:
            raise ValueError(f"method {self.method!r} needs a damping.")
        if self.damping is not None and not METHODS[self.method].damped:
            raise ValueError(f"damping is {self.damping}, but method {self.method!r} has none.")
        if lacks := METHODS[self.method].lacks:
            raise ValueError(f"method {self.method!r} needs {lacks}.")

    @property
    def size(self) -> Preset:
        """Of the network and its batches."""
        return PRESETS[self.preset]

    def settings(self) -> dict[str, Any]:
        """Return what identifies the run: everything that is set, of a file of text only its name."""
        return {name: v for name, v in {**asdict(self), "data": Path(self.data).name}.items() if v is not None}

    @property
    def filename(self) -> str:
        """A readable name, unique to the settings."""
        settings = self.settings()
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]
        parts = (settings["data"], self.preset, self.method, self.norm, str(self.seed), digest)
        return re.sub(r"[^a-z0-9.]+", "-", "_".join(parts).lower()) + ".json"

    def environment(self) -> dict[str, Any]:
        """What `runs.environment` says, without the path of the text."""
        found = runs.environment()
        if Path(self.data).name != self.data:
            found["command"] = found["command"].replace(self.data, Path(self.data).name)
        return found
