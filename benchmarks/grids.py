"""Grids of runs for images: combinations of settings, in place of which options stand, and what chooses settings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any

import torch

from .core.runs import DEVICE, check_known, run_all
from .core.store import Store, setting
from .core.study import Absent, Report, Study, Training
from .ensemble import IMAGES
from .methods import METHODS, Method
from .problems.images import ImageRun

#: Options that make one small run.
SMOKE = "--methods none --activations tanh --epochs 1 --seeds 1 --device cpu"
#: The methods of the first paper, and those with the gradient-only forms.
OF_PAPER = ["none", "batchnorm", "layernorm", "rmsnorm", "l2norm", "l2norm-half", "affine-like"]
COMPARED = [*OF_PAPER, "proportional", "disproportional", "batch-ideal"]
#: The papers' protocol: plain [0, 1] pixels, PyTorch's initialisation, Adam at 10⁻³ for everybody.
PAPERS = {"data": "cifar10", "method": COMPARED, "activation": ["tanh", "leaky-relu"]}

#: Settings by the names of `ImageRun`: one value, or a list of several; seeds is how many, seed k is k.
Grid = Mapping[str, Any]
#: Name → grids: the settings of a protocol at one of its lengths.
Presets = Mapping[str, Sequence[Grid]]
_SEVERAL = ("departure", "gain", "rescaled", "lr", "batch_size", "hidden", "activation", "optimizer", "method")
#: The paper's Appendix B.2 (Figs. 9 and 8), which says neither sizes nor activation: small enough for two CPU cores.
CNN: Grid = {"network": "cnn", "hidden": (16, 32, 32, 32, 32)}
CNN_POOL: Grid = {"network": "cnn-pool", "hidden": (16, 32, 32)}
#: The optimizers that every method on the MLP is behind; rivals have others.
ALL_HAVE = ("sgd", "momentum", "adam", "muon")


@dataclass
class GridOptions(Training):
    """Options in place of a grid's own settings, which its study has by default."""

    data: str | None = None  # digits, cifar10 or imagefolder:PATH
    methods: tuple[str, ...] | None = None  # any of benchmarks/methods.py for images
    activations: tuple[str, ...] | None = None  # tanh, leaky-relu, identity
    optimizers: tuple[str, ...] | None = None  # adam, sgd, momentum, muon, soap
    epochs: int | None = None  # passes over the training set
    seeds: int | None = None  # how many; seed k is k
    batch_size: tuple[int, ...] | None = None  # samples in a step
    lr: tuple[float, ...] | None = None  # learning rate, before a method's own factor
    schedule: str | None = None  # of the rate: constant, cosine
    hidden: tuple[int, ...] | None = None  # widths of hidden layers, or channels
    network: str | None = None  # mlp, residual, cnn-pool or cnn
    rescaled: tuple[float, ...] | None = None  # rescale hidden units at random, by this deviation
    departure: tuple[str, ...] | None = None  # from the protocol: none, centred, he
    damping: float | None = None  # of methods that have one, in place of their own
    device: str = DEVICE  # where to train: cpu, cuda, cuda:1, …
    preset: str | None = None  # how long: paper, as in the paper, which is the default, or reduced

    def given(self) -> dict[str, Any]:
        """The settings that a command names, by the names of `ImageRun`."""
        plural = {"methods": "method", "activations": "activation", "optimizers": "optimizer"}
        named = {plural.get(name, name): value for name, value in vars(self).items() if value is not None}
        settings = {name: list(value) if isinstance(value, tuple) else value for name, value in named.items()}
        if "network" in settings:
            settings["network"] = None if self.network == "mlp" else self.network
        if self.departure:
            settings["departure"] = [None if name == "none" else name for name in self.departure]
        return settings


def expand(grids: Sequence[Grid], given: Grid) -> list[ImageRun]:
    """Every run of some grids, with what is given in place of their own settings.

    A method without a damping has none if others have; one with an optimizer of its own is there once, not for each.
    """
    known = {field.name for field in fields(ImageRun)}
    every = list[dict[str, Any]]()
    for grid in grids:
        settings = {**grid, **{name: value for name, value in given.items() if name in known}}
        if "hidden" in given:
            settings["hidden"] = tuple(given["hidden"])  # one network, where a grid's list has several
        several = {name: value for name in _SEVERAL if isinstance(value := settings.get(name), list)}
        for values in product(*several.values()):
            own = {**settings, **dict(zip(several, values, strict=True))}
            own["seeds"] = tuple(range(own.get("seeds", 5)))
            own["hidden"] = tuple(own.get("hidden", (32, 32)))
            method = METHODS.get(own["method"], Method())  # an unknown one is for `ImageRun` to refuse
            if callable(method.optimizer) and "optimizer" in several:
                own["optimizer"] = several["optimizer"][0]
            # Whitening sees forward passes one by one.
            every.append({"backend": "ensemble" if method.by_inputs is None else "loop", **own})
    damped = {name for name, method in METHODS.items() if method.damped} & {own["method"] for own in every}
    for own in every:
        if damped and own["method"] not in damped:
            own.pop("damping", None)
    return list(dict.fromkeys(ImageRun(**own) for own in every))  # what is given may make grids alike


def presets(grids: Sequence[Grid], reduced: Sequence[Grid]) -> Presets:
    """A paper's protocol at its own length, and at the length that is reduced."""
    return {"paper": [{"epochs": 100, "seeds": 5, **grid} for grid in grids], "reduced": reduced}


def grid_study(help: str, grids: Sequence[Grid] | Presets, report: Report, **entry: Any) -> Study:
    """A study of every combination of settings of some grids, which a command may replace; the entry is its rest."""
    lengths: dict[Any, Sequence[Grid]] = dict(grids) if isinstance(grids, Mapping) else {None: grids}
    default = next(iter(lengths))

    def run(options: GridOptions, store: Store) -> None:
        if (preset := options.preset or default) not in lengths:
            has = ", ".join(lengths) if default else "no presets"
            raise ValueError(f"--preset is {preset!r}; this study has {has}.")
        run_all(expand(lengths[preset], options.given()), IMAGES, store, download=options.download)

    whole = {"data": "images", "smoke": f"{SMOKE} --lr 0.1 --batch-size 8", **entry}
    return Study(help, run, report, GridOptions(), **whole)


#: Steps of about three. A rate chosen at an edge says that the best may lie beyond it.
GRIDS: dict[str, tuple[float, ...]] = {
    "sgd": (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0),
    "adam": (1e-4, 3e-4, 1e-3, 3e-3, 1e-2),
    "momentum": (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0),
}

#: Where trials look: the rate within this factor of the grid's choice …
RATE_FACTOR = 5.0
#: … the share of a weight that decay takes in one step at the full rate …
SHRINK = (3e-6, 3e-4)
#: … and the dampings, of methods that have one: few, so that many trials of one damping train side by side.
DAMPING = (0.1, 0.3, 1.0, 3.0)


@dataclass
class TunedOptions(GridOptions):
    """Options of searches, which choose rates and dampings, and let rates fall by a cosine."""

    lr: Absent[tuple[float, ...] | None] = None
    schedule: Absent[str | None] = None
    damping: Absent[float | None] = None
    preset: Absent[str | None] = None

    search_epochs: int = 3  # passes over the training set of runs that choose rates
    trials: int = 8  # how many choose rate, weight decay and damping together, in studies that have trials


def trial(run: ImageRun, **settings: Any) -> ImageRun:
    """A run that helps to choose settings: of one seed, validated."""
    return replace(run, seeds=run.seeds[:1], validation=True, **settings)


def every_rate(run: ImageRun, options: TunedOptions) -> list[ImageRun]:
    """The trials of all rates of the optimizer's grid, for fewer epochs than the run has."""
    check_known("optimizer of this study", [run.optimizer], GRIDS)
    return [trial(run, lr=lr, epochs=options.search_epochs) for lr in GRIDS[run.optimizer]]


def trials(run: ImageRun, options: TunedOptions) -> list[ImageRun]:
    """Trials around a run, of its own length: the same points of one Sobol sequence for all methods.

    A point is rate and weight decay, each spread evenly over the logarithm of its range, and damping, which a method
    without one leaves unused.
    """
    points = torch.quasirandom.SobolEngine(3, scramble=True, seed=0).draw(options.trials, dtype=torch.float64)
    (low, high), lowest, found = SHRINK, run.lr / RATE_FACTOR, []
    for u, v, w in points.tolist():
        rate = lowest * (run.lr * RATE_FACTOR / lowest) ** u
        decay = low * (high / low) ** v * (0.1 if run.optimizer == "momentum" else 1.0) / rate
        damping = DAMPING[int(w * len(DAMPING))] if METHODS[run.method].damped else None
        found.append(trial(run, lr=float(f"{rate:.2g}"), weight_decay=float(f"{decay:.2g}"), damping=damping))
    return found


def best_optimizer(store: Store, method: str | None, activation: str) -> str:
    """The optimizer with which a method was best on held-out data; of none tried a LookupError."""
    key, wanted = setting("method", "activation", "optimizer"), [(method, activation, name) for name in ALL_HAVE]
    tried = [trial for trial in store.read("search") if key(trial) in wanted]
    if not tried:
        raise LookupError(f"no trials of {method} with {activation}.")
    return str(max(tried, key=lambda trial: trial["score"])["settings"]["optimizer"])
