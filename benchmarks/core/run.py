"""What a run is: its settings, what its method computes, and where it was made."""

import os
import platform
import re
import subprocess
import sys
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, field
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import adiv_optim

from ..methods import METHODS, Method
from .store import digest

#: Of every parser's --device.
DEVICE: dict[str, Any] = {
    "default": "cuda" if torch.cuda.is_available() else "cpu",
    "metavar": "NAME",
    "help": "where to train: cpu, cuda, cuda:1, …",
}


def check_device(name: str) -> None:
    """Raise a ValueError if there is no such device, or it does not work here."""
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:  # an assertion is what a build without CUDA raises
        reason = str(error).splitlines()[0].rstrip(".")
        raise ValueError(f"--device {name}: {reason}. --device cpu works everywhere.") from error


@dataclass(frozen=True)
class Run:
    """The settings that all runs have."""

    data: str  # the --data argument
    method: str
    damping: float | None = field(default=None, kw_only=True)  # of methods that have one, in place of their own
    device: str = field(default="cpu", kw_only=True)

    kind = ""  # which methods are for runs of this kind; see `Method.applies`

    def check(self, positive: Collection[str], **known: Collection[Any]) -> None:
        """Refuse settings that are not positive, or not among the known; and a damping that goes nowhere."""
        known = {"method": [name for name, method in METHODS.items() if self.kind in method.applies], **known}
        for name, values in known.items():
            if getattr(self, name) not in values:
                raise ValueError(f"unknown {name} {getattr(self, name)!r}; known are {', '.join(map(str, values))}.")
        for name in positive:
            if (value := getattr(self, name)) is not None and not value > 0:
                raise ValueError(f"{name} is {value}; it must be positive.")
        if self.damping is not None and not METHODS[self.method].damped:
            raise ValueError(f"damping is {self.damping}, but method {self.method!r} has none.")

    def make_method(self) -> Method:
        """The method, with this run's damping."""
        return METHODS[self.method].with_damping(self.damping)

    def settings(self) -> dict[str, Any]:
        """What identifies the run: everything that is set, but for where its data happens to lie; as JSON has it."""
        values = {**asdict(self), "data": public_name(self.data)}
        return {n: list(v) if isinstance(v, tuple) else v for n, v in values.items() if v is not None}

    def key(self, part: str | None = None) -> str:
        """What tells the run's result from others: its settings, and what it is for."""
        return digest([self.settings(), part])

    def computes(self) -> str:
        """A hash of what its method computes; see `fingerprint`."""
        raise NotImplementedError


def step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor, labels: Tensor) -> Tensor:
    """Take a training step on the cross entropy, and return that of before."""
    optimizer.zero_grad()
    loss = F.cross_entropy(model(inputs).flatten(0, -2), labels.flatten())
    loss.backward()
    optimizer.step()
    return loss.detach()


def set_rates(optimizers: Iterable[torch.optim.Optimizer], factor: float) -> None:
    """Set every learning rate to a share of what it was at first."""
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["lr"] = factor * group.setdefault("initial_lr", group["lr"])


def fingerprint(method: Method, model: nn.Module, inputs: Tensor, labels: Tensor) -> str:
    """A hash of what a method computes: of the losses of three steps on a small problem that never changes.

    It tells rules apart by their numbers, to six decimals in float64: another way to write one leaves it as it is.
    """
    model = model.double()
    with torch.no_grad():
        for place, parameter in enumerate(model.parameters()):
            wave = torch.arange(parameter.numel(), dtype=torch.float64).add(place).sin()
            parameter.copy_(0.3 * wave.view_as(parameter))
    kind = method.optimizer if callable(method.optimizer) else torch.optim.SGD
    optimizer = method.wrap(kind(model.parameters(), lr=0.3 * method.lr_factor), model, inputs[:2])
    return digest([f"{step(model, optimizer, inputs, labels).item():.6f}" for _ in range(3)])


def public_name(data: str) -> str:
    """The name of a data set without the path it was read from: the folder's or file's own name says which it is."""
    kind, colon, argument = data.partition(":")
    return f"{kind}:{Path(argument).name}" if colon else Path(kind).name


def environment() -> dict[str, Any]:
    """Return what a reader needs to judge a number: command, versions, commit, date and hardware."""
    info = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*: (.+)$", info.read_text(), re.MULTILINE) if info.exists() else []
    # Not where data and results happen to lie.
    pairs = zip(sys.argv, sys.argv[1:], strict=False)
    arguments = [public_name(a) if before == "--data" or Path(a).is_absolute() else a for before, a in pairs]
    return {
        "command": " ".join(["python -m benchmarks", *arguments]),
        "adiv_optim": adiv_optim.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": f"{names[0]} × {os.cpu_count()}" if names else platform.processor(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "commit": _commit(),
        "date": date.today().isoformat(),
    }


@cache
def _commit() -> str | None:
    """Of the clone, if this is one; what results and their pages add to it changes nothing that is computed."""
    try:
        head, changed = (
            subprocess.run(["git", *command.split()], cwd=Path(__file__).parents[2], capture_output=True, check=True)
            for command in ("rev-parse --short=12 HEAD", "diff HEAD --name-only -- *.py")
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.decode().strip() + "-dirty" * bool(changed.stdout)
