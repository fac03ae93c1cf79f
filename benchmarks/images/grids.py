"""Grids of runs: every combination of some settings, at several lengths, whose options take the place of them."""

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from itertools import product
from typing import Any

from ..core.runs import DEVICE, add_progress_arguments, run_all
from ..core.store import Store
from ..core.study import Report, Study
from ..data import DATA
from ..methods import METHODS, having
from .networks import ACTIVATIONS, DEPARTURES, NETWORKS, OPTIMIZERS
from .run import BACKENDS, SCHEDULES, ImageRun
from .train import IMAGES

#: Options that make one small run.
SMOKE = "--methods none --activations tanh --epochs 1 --seeds 1 --device cpu"
#: The papers' protocol: plain [0, 1] pixels, PyTorch's initialisation, Adam at 10⁻³ for everybody.
PAPERS = {"data": "cifar10", "method": having("compared"), "activation": ["tanh", "leaky-relu"]}

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


#: Name → grids: the settings of a protocol at one of its lengths.
Presets = Mapping[str, Sequence[Grid]]


def presets(*grids: Grid, reduced: Grid | None = None) -> Presets:
    """A paper's protocol at its own length, at the length that is `reduced`, and on digits to see that it runs."""
    shorter = {"epochs": 30, "seeds": 3} if reduced is None else reduced
    return {
        "paper": [{"epochs": 100, "seeds": 5, **grid} for grid in grids],
        "reduced": [{**grid, **shorter} for grid in grids],
        "smoke": [{**grid, "data": "digits", "epochs": 1, "seeds": 2} for grid in grids],
    }


def grid_study(help: str, grids: Sequence[Grid] | Presets, report: Report, **entry: Any) -> Study:
    """A study of every combination of the settings of some grids, any of which a command may replace.

    The entry is the rest of the study's.
    """
    lengths = grids if isinstance(grids, Mapping) else {"": grids}

    def run(options: argparse.Namespace, store: Store) -> None:
        runs = expand(lengths[getattr(options, "preset", "")], vars(options))
        run_all(runs, IMAGES, store, download=options.download, only_estimate=options.estimate)

    def arguments(parser: argparse.ArgumentParser) -> None:
        add_arguments(parser, grids=next(iter(lengths.values())))
        parser.add_argument("--estimate", action="store_true", help="only say how long what is not there takes")
        if len(lengths) > 1:
            parser.add_argument("--preset", choices=lengths, default="paper", help="how long; paper: as in the paper")

    whole = {"data": "images", "smoke": f"{SMOKE} --lr 0.1 --batch-size 8", **entry}
    return Study(help, run, report, arguments, **whole)
