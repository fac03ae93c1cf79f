"""One method on one network for images, all seeds: the settings of a run, alone, in a grid and on the command line."""

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from itertools import product
from typing import Any

import torch

from ..core.runs import DEVICE, Run, add_progress_arguments, fingerprint
from ..data import DATA
from ..methods import METHODS, Method
from .networks import ACTIVATIONS, DEPARTURES, NETWORKS, OPTIMIZERS

BACKENDS = ("ensemble", "loop", "jacobian")
#: Options that make one small run.
SMOKE = "--methods none --activations tanh --epochs 1 --seeds 1 --device cpu"
SCHEDULES = ("constant", "cosine")


@dataclass(frozen=True)
class ImageRun(Run):
    """The settings of one run."""

    activation: str
    hidden: tuple[int, ...] = (32, 32)  # widths of the hidden layers; of a convolutional network, the channels
    batch_size: int = 32  # an epoch drops the last incomplete batch
    optimizer: str = "adam"
    lr: float = 1e-3  # before the method's own factor
    schedule: str = "constant"  # or "cosine", from the rate to 0 over the run
    epochs: int = 20
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)  # each draws its own initialisation and its own order of samples
    #: All seeds as one batched program, one after the other ("loop"), or likewise by explicit Jacobians ("jacobian").
    backend: str = "ensemble"
    validation: bool = False  # hold out a tenth of the training set and measure accuracy on it
    weight_decay: float | None = None
    #: Start every seed from the first one's network with its hidden units rescaled at random, by e^s with s normal of
    #: this deviation, and let all see the same batches: they differ in nothing else.
    rescaled: float | None = None
    network: str | None = None  # a key of `NETWORKS`; None is fully connected
    gain: float | None = None  # what all parameters are multiplied by before training
    departure: str | None = None  # a key of `DEPARTURES`: what a paper leaves open, read otherwise

    kind = "images"

    def __post_init__(self) -> None:
        self.check(
            ("batch_size", "lr", "epochs", "gain"), schedule=SCHEDULES, backend=BACKENDS, network=NETWORKS,
            activation=ACTIVATIONS, optimizer=OPTIMIZERS, departure=[None, *DEPARTURES],
        )  # fmt: skip
        if not self.seeds:
            raise ValueError("seeds is empty; a run needs at least one.")
        if not all(width > 0 for width in self.hidden):
            raise ValueError(f"hidden is {list(self.hidden)}; every width must be positive.")
        if METHODS[self.method].by_inputs is not None and self.backend != "loop":
            raise ValueError(f"method {self.method!r} sees forward passes, which only backend 'loop' makes one by one.")

    def computes(self) -> str:
        """A hash of what its method computes on a network of its kind."""
        return _computes(METHODS[self.method], self.network)


@cache
def _computes(method: Method, network: str | None) -> str:
    # More rows and columns than a whitening of rank 16 tells apart.
    inputs = torch.arange(24 * 64, dtype=torch.float64).square().sin().view(24, 64)
    hidden = {None: (20,), "residual": (20, 20)}.get(network, (3, 3))
    model = NETWORKS[network](method, (64, *hidden, 3), "leaky-relu")
    return fingerprint(method, model, inputs, torch.arange(24) % 3)


def again(result: Mapping[str, Any], **own: Any) -> ImageRun:
    """The run of a result, with some settings of one's own."""
    settings = {name: tuple(v) if isinstance(v, list) else v for name, v in result["settings"].items()}
    return ImageRun(**{**settings, **own})


#: Settings by the names of `ImageRun`: one value, or a list of several; seeds is how many, seed k is k.
Grid = Mapping[str, Any]


def expand(grids: Sequence[Grid], given: Grid) -> list[ImageRun]:
    """Every run of some grids, with what is given in place of their own settings."""
    known = {field.name for field in fields(ImageRun)}
    order = ("departure", "gain", "rescaled", "lr", "batch_size", "hidden", "activation", "optimizer", "method")
    runs = []
    for grid in grids:
        settings = {**grid, **{name: value for name, value in given.items() if name in known}}
        if "hidden" in given:
            settings["hidden"] = tuple(given["hidden"])  # one network, where a grid's list has several
        several = {name: value for name in order if isinstance(value := settings.get(name), list)}
        for values in product(*several.values()):
            own = {**settings, **dict(zip(several, values, strict=True))}
            own["seeds"] = tuple(range(own.get("seeds", 5)))
            own["hidden"] = tuple(own.get("hidden", (32, 32)))
            # Whitening sees forward passes one by one; an unknown method is for `ImageRun` to refuse.
            whitens = own["method"] in METHODS and METHODS[own["method"]].by_inputs is not None
            runs.append(ImageRun(**{"backend": "loop" if whitens else "ensemble", **own}))
    return list(dict.fromkeys(runs))  # what is given may make grids alike


def _shown(name: str, grids: Iterable[Grid]) -> str:
    """What grids have for a setting, for the text of its option: every value that one of them has, once."""
    default = {field.name: field.default for field in fields(ImageRun)} | {"seeds": 5}
    found = [grid.get(name, default.get(name)) for grid in grids]
    values = dict.fromkeys(value for each in found for value in (each if isinstance(each, (list, tuple)) else [each]))
    return " ".join(f"{value:g}" if isinstance(value, float) else str(value) for value in values if value is not None)


def add_arguments(parser: argparse.ArgumentParser, *names: str, grids: Sequence[Grid]) -> None:
    """Give a parser options that take the place of some grids' own settings, those of the given names or all."""
    several: dict[str, Any] = {"nargs": "+"}
    options: dict[str, dict[str, Any]] = {
        "data": {"help": f"{', '.join(DATA)}; imagefolder as imagefolder:PATH"},
        "method": {**several, "metavar": "NAME", "help": "any of benchmarks/methods for images"},
        "activation": {**several, "metavar": "NAME", "help": ", ".join(ACTIVATIONS)},
        "optimizer": {**several, "metavar": "NAME", "help": ", ".join(OPTIMIZERS)},
        "epochs": {"type": int, "metavar": "COUNT", "help": "passes over the training set"},
        "seeds": {"type": int, "metavar": "COUNT", "help": "how many; seed k is k"},
        "batch_size": {**several, "type": int, "metavar": "SIZE", "help": "samples in a step"},
        "lr": {**several, "type": float, "metavar": "RATE", "help": "learning rate, before a method's own factor"},
        "schedule": {"metavar": "NAME", "help": f"of the rate: {', '.join(SCHEDULES)}"},
        "hidden": {**several, "type": int, "metavar": "WIDTH", "help": "widths of hidden layers, or channels"},
        "network": {
            "type": lambda name: None if name == "mlp" else name,
            "metavar": "NAME",
            "help": f"{', '.join(name or 'mlp' for name in NETWORKS)}; mlp if the study has none",
        },
        "validation": {"action": "store_true", "help": "measure accuracy on a tenth of the training set"},
        "rescaled": {**several, "type": float, "metavar": "SIGMA", "help": "rescale hidden units at random"},
        "gain": {**several, "type": float, "metavar": "FACTOR", "help": "multiply all parameters before training"},
        "departure": {
            **several,
            "type": lambda name: None if name == "none" else name,
            "metavar": "NAME",
            "help": f"from the protocol: none, {', '.join(DEPARTURES)}",
        },
        "weight_decay": {"type": float, "metavar": "DECAY", "help": "of the optimizer; none by itself"},
        "damping": {"type": float, "help": "of methods that have one, in place of their own"},
        "backend": {"help": f"{', '.join(BACKENDS)}; what fits the method by default"},
        "device": DEVICE,
    }
    for name in names or options:
        option = {"default": argparse.SUPPRESS, **options[name]}
        if name not in ("device", "validation", "backend") and (shown := _shown(name, grids)):
            option["help"] += f" (default: {shown})"
        flag = f"--{name.replace('_', '-')}{'s' * (name in ('method', 'activation', 'optimizer'))}"
        parser.add_argument(flag, dest=name, **option)
    add_progress_arguments(parser)
