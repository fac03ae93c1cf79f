"""What a run is, and how its result is kept: one JSON, written whole or not at all."""

import hashlib
import json
import os
import platform
import re
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import adiv_optim
from adiv_optim import BatchIdeal

from .methods import ACTIVATIONS, METHODS, Method
from .networks import CONVOLUTIONAL

BACKENDS = ("ensemble", "loop", "jacobian")
SCHEDULES = ("constant", "cosine")
#: AdamW without decay is Adam.
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": partial(torch.optim.AdamW, weight_decay=0.0),
    "sgd": torch.optim.SGD,
    "momentum": partial(torch.optim.SGD, momentum=0.9),
}


@dataclass(frozen=True)
class Run:
    """The settings of one run: one method on one network, all seeds.

    Args:
        data: the --data argument.
        method: a key of `METHODS`.
        activation: a key of `ACTIVATIONS`.
        hidden: widths of the hidden layers; of a convolutional network, the channels.
        batch_size: samples per step; an epoch drops the last incomplete batch.
        optimizer: a key of `OPTIMIZERS`.
        lr: the learning rate, before the method's own factor.
        schedule: "constant", or "cosine" from the rate to 0 over the run.
        epochs: passes over the training set.
        seeds: each draws its own initialisation and its own order of samples.
        backend: "ensemble" trains all seeds as one batched program, "loop" one after the other, "jacobian"
            likewise, with every gradient from explicit per-sample Jacobians.
        device: where to train.
        validation: hold out a tenth of the training set and measure accuracy on it, for choosing settings.
        weight_decay: of the optimizer; None is none.
        damping: of `BatchIdeal`, in place of the method's own.
        rescaled: start every seed from the first one's network with its hidden units rescaled at random, by e^s with s
            normal of this deviation, and let all see the same batches: they differ in nothing else.
        network: a key of `networks.CONVOLUTIONAL`; None is fully connected.
    """

    data: str
    method: str
    activation: str
    hidden: tuple[int, ...] = (32, 32)
    batch_size: int = 32
    optimizer: str = "adam"
    lr: float = 1e-3
    schedule: str = "constant"
    epochs: int = 20
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    backend: str = "ensemble"
    device: str = "cpu"
    validation: bool = False
    weight_decay: float | None = None
    damping: float | None = None
    rescaled: float | None = None
    network: str | None = None

    def __post_init__(self) -> None:
        for name, value, known in (
            ("method", self.method, METHODS),
            ("activation", self.activation, ACTIVATIONS),
            ("optimizer", self.optimizer, OPTIMIZERS),
            ("schedule", self.schedule, SCHEDULES),
            ("backend", self.backend, BACKENDS),
        ):
            if value not in known:
                raise ValueError(f"unknown {name} {value!r}; known are {', '.join(known)}.")
        for name, number in (("batch_size", self.batch_size), ("lr", self.lr), ("epochs", self.epochs)):
            if not number > 0:
                raise ValueError(f"{name} is {number}; it must be positive.")
        if self.network is not None and self.network not in CONVOLUTIONAL:
            raise ValueError(f"unknown network {self.network!r}; known are mlp, {', '.join(CONVOLUTIONAL)}.")
        if not self.seeds:
            raise ValueError("seeds is empty; a run needs at least one.")
        if not all(width > 0 for width in self.hidden):
            raise ValueError(f"hidden is {list(self.hidden)}; every width must be positive.")
        if self.damping is not None and not METHODS[self.method].damped:
            raise ValueError(f"damping is {self.damping}, but method {self.method!r} has none.")
        if METHODS[self.method].whitening is not None and self.backend != "loop":
            raise ValueError(f"method {self.method!r} sees forward passes, which only backend 'loop' makes one by one.")

    def make_method(self) -> Method:
        """The method, with this run's damping."""
        method = METHODS[self.method]
        if self.damping is None:
            return method
        if isinstance(method.correction, BatchIdeal):
            return replace(method, correction=replace(method.correction, damping=self.damping))
        return replace(method, whitening=self.damping)

    def settings(self) -> dict[str, Any]:
        """Return what identifies the run: everything that is set, but for where its data happens to lie."""
        return {name: v for name, v in {**asdict(self), "data": public_name(self.data)}.items() if v is not None}

    @property
    def filename(self) -> str:
        """A readable name, unique to the settings."""
        settings = self.settings()
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]
        parts = (settings["data"], self.method, self.activation, self.backend, digest)
        return re.sub(r"[^a-z0-9.]+", "-", "_".join(parts).lower()) + ".json"


def public_name(data: str) -> str:
    """The name of a data set without the path it was read from: the folder's own name says which it is."""
    kind, _, argument = data.partition(":")
    return f"{kind}:{Path(argument).name}" if argument else kind


def environment() -> dict[str, Any]:
    """Return what a reader needs to judge a number: versions, hardware and the command."""
    return {
        "command": " ".join(["python -m benchmarks", *(public_name(a) if ":" in a else a for a in sys.argv[1:])]),
        "adiv_optim": adiv_optim.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*: (.+)$", info.read_text(), re.MULTILINE) if info.exists() else []
    return f"{names[0]} × {os.cpu_count()}" if names else platform.processor()


def write(path: Path, result: dict[str, Any]) -> None:
    """Write a result so that an interruption leaves the old file or the new one, never half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.partial")
    try:
        partial.write_text(json.dumps(result, indent=1) + "\n")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def read(folder: Path) -> list[dict[str, Any]]:
    """Read every result in a folder, in the order of the file names."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
