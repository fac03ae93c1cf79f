"""Coordinate networks: a picture learned from (x, y), with and without normalisers, by bare and by wrapped optimizers.

Each arm is a normaliser, an optimizer and a wrapper. Its learning rate (and damping) come from ten trials, each of them
on two crops that no table shows. Then it learns other crops, each by a seed of its own: arms are compared in pairs.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from ..core.arms import Look, sections
from ..core.runs import run_all
from ..core.store import Store
from ..core.study import Recipe, Sections, Study, Training
from ..core.tables import estimate
from ..core.tune import around, choose
from ..problems.pictures import COORDINATES, NETWORKS, Arm, CoordinateRun, first_trial, psnr
from ..train import NORMS

#: Of crops in front, those that trials learn.
TUNED_ON = (0, 1)
_LOOK = Look(
    psnr,
    partial(estimate, digits=1),
    "PSNR, dB",
    "{:+.1f}".format,
    about="Mean ± standard error over crops, each by its own seed. Learning rate and damping are the best of an "
    "arm's trials, each on two other crops. p is of the paired t test over the crops. Learning rates rise over 20 "
    "steps and fall to 0 by a cosine. Muon trains the matrices inside the network, Adam the rest at the same rate.",
)


def _named(settings: Mapping[str, Any]) -> tuple[str, str]:
    network, size, batch = NETWORKS[settings["network"]], settings["size"], settings.get("batch_size")
    what = f"{network.layers} linear layers of width {network.width}, {'sines' if network.omega else 'ReLU'}"
    features = f" behind {network.frequencies} Fourier features" * bool(network.frequencies)
    pixels = f"{batch} pixels a step" if batch else "all pixels in every step"
    heading = f"{what}{features}; {size} × {size} pixels, {pixels}, {settings['steps']} steps"
    return f"{settings['network']}-{size}{f'-batch-{batch}' if batch else ''}", heading


def report(store: Store, name: str, folder: Path) -> Sections:
    """A section for every network, size of crops and batch size."""
    return sections(store, name, folder, _LOOK, _named, lambda arm: arm[:3] in MAIN)


WRAPPED = ("none", "whitened", "whitened-16")
OPTIMIZERS_HERE = ("adam", "muon", "soap")
MAIN: list[Arm] = [
    *product(["none"], OPTIMIZERS_HERE, ["none", "whitened"]),
    *product(["batchnorm"], OPTIMIZERS_HERE, ["none"]),
    ("batchnorm", "muon", "whitened"),
    ("batchnorm", "soap", "whitened"),
]
OTHERS: list[Arm] = [
    ("none", "adam", "input-scaled"), ("none", "adam", "preconditioned"), ("none", "muon", "preconditioned"),
    ("none", "sgd", "batch-ideal"), ("none", "momentum", "mac"), ("none", "adam", "mac"), ("none", "muon", "mac"),
]  # fmt: skip
_RANK_16: list[Arm] = [("none", optimizer, "whitened-16") for optimizer in OPTIMIZERS_HERE]
ALL: list[Arm] = list(dict.fromkeys([
    *MAIN, *OTHERS, *_RANK_16, ("batchnorm", "adam", "whitened"), ("layernorm", "adam", "none"),
    *product(NORMS, OPTIMIZERS_HERE, WRAPPED),
]))  # fmt: skip
#: The arms of each protocol, (network, side, batch size, steps), most valuable first; and how many crops there are.
PROTOCOLS: dict[tuple[str, int, int | None, int], tuple[Sequence[Arm], int]] = {
    ("relu", 64, None, 500): (ALL, 10),
    ("relu", 64, 512, 500): (MAIN, 10),
    ("fourier", 64, None, 500): (MAIN, 10),
    ("relu", 128, None, 2000): (MAIN[:8], 5),
    ("siren", 64, None, 500): (MAIN[:6], 5),
    ("wide", 64, None, 500): (MAIN[:4], 5),
}


def _on(run: CoordinateRun, crops: Iterable[int]) -> list[CoordinateRun]:
    return [replace(run, crop=crop, seed=crop) for crop in crops]


@dataclass
class PictureOptions(Training):
    """Options of this study."""

    network: str | None = None
    """this one alone: relu, fourier, siren or wide"""
    size: int | None = None
    """crops of this side alone: 64 or 128"""
    batch_size: int | None = None
    """steps of so many pixels alone; 0 is all"""
    trials: int = 10
    """that choose an arm's learning rate and damping"""
    crops: int | None = None
    """this many at most"""
    steps: int | None = None
    """in place of each protocol's own"""


def _run(options: PictureOptions, store: Store) -> None:
    for (network, size, batch_size, steps), (arms, crops) in PROTOCOLS.items():
        if options.network not in (None, network) or options.size not in (None, size):
            continue
        if options.batch_size not in (None, batch_size or 0):
            continue
        like = CoordinateRun(
            "china, flower", "none", network=network, size=size, batch_size=batch_size, steps=options.steps or steps
        )
        # The settings of larger crops are those of the smaller ones, whose trials take a sixteenth of the time.
        small = replace(like, size=64, steps=options.steps or 500)
        for arm in arms:
            search = around(first_trial(small, arm), options.trials)
            each = partial(_on, crops=TUNED_ON)
            (chosen,) = choose([search], COORDINATES, store, lambda error: -psnr(error), each=each)
            shown = range(len(TUNED_ON), len(TUNED_ON) + min(options.crops or crops, crops))
            run_all(_on(replace(chosen, size=size, steps=like.steps), shown), COORDINATES, store)


STUDIES = {
    "coordinates": Study(
        "coordinate networks: a picture learned from (x, y)", _run, report, PictureOptions(), makes=[Recipe(8.0)],
        smoke="--network siren --trials 1 --crops 1 --steps 1", page="docs/results/fields.md",
    ),
}  # fmt: skip
