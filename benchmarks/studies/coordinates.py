"""Coordinate networks: a picture learned from (x, y), with and without normalisers, by bare and by wrapped optimizers.

Each arm is a normaliser, an optimizer and a wrapper. Its learning rate (and damping) come from ten trials, each of them
on crops that no table shows. Then it learns other crops, each by a seed of its own: arms are compared in pairs.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from ..core.arms import Arm, Look, compete, first_trial, sections
from ..core.runs import check_known
from ..core.store import Store
from ..core.study import Recipe, Sections, Study, Training
from ..core.tables import estimate
from ..problems.pictures import COORDINATES, NETWORKS, CoordinateRun, by_crop, psnr
from ..train import NORMS

#: Crops that trials learn: the two hardest; in the newer studies those of a photograph by itself, or two of them.
HARDEST, ORDINARY = (0, 1), (12, 13, 14, 15)
#: Of crops in front, the first that tables show.
SHOWN_FROM = 2
_ABOUT = "Mean ± standard error over crops; p is of the paired t test."
_LOOK = Look(psnr, partial(estimate, digits=1), "PSNR, dB", "{:+.1f}".format, about=_ABOUT)


def _named(settings: Mapping[str, Any]) -> tuple[str, str]:
    network, size, batch = NETWORKS[settings["network"]], settings["size"], settings.get("batch_size")
    what = f"{network.layers} linear layers of width {network.width}, {network.about}"
    features = f" behind {network.frequencies} Fourier features" * bool(network.frequencies)
    pixels = f"{batch} pixels a step" if batch else "all pixels in every step"
    heading = f"{what}{features}; {size} × {size} pixels, {pixels}, {settings['steps']} steps"
    return f"{settings['network']}-{size}{f'-batch-{batch}' if batch else ''}", heading


def report(store: Store, name: str, folder: Path) -> Sections:
    """A section for every network, size of crops and batch size."""
    return sections(store, name, folder, _LOOK, _named, [*MAIN, *_FREE].__contains__)


def _arms(norms: Iterable[str], optimizers: Iterable[str], methods: Iterable[str]) -> list[Arm]:
    return [Arm(*settings) for settings in product(norms, optimizers, methods)]


_WITH = ("adam", "muon", "soap")
MAIN = [
    *_arms(["none"], _WITH, ["none", "whitened"]), *_arms(["batchnorm"], _WITH, ["none"]),
    *_arms(["batchnorm"], ["muon", "soap"], ["whitened"]),
]  # fmt: skip
PLAIN = [
    *MAIN, *_arms(["none"], ["adam"], ["input-scaled", "preconditioned"]), Arm("none", "muon", "preconditioned"),
    Arm("none", "sgd", "batch-ideal"), *_arms(["none"], ["momentum", "adam", "muon"], ["mac"]),
    *_arms(["none"], _WITH, ["whitened-16"]), Arm("batchnorm", "adam", "whitened"), Arm("layernorm", "adam", "none"),
]  # fmt: skip
ALL = list(dict.fromkeys([*PLAIN, *_arms(NORMS, _WITH, ["none", "whitened", "whitened-16"])]))
#: The arms of each protocol, (network, side, batch size, steps), most valuable first; and how many crops there are.
Protocols = Mapping[tuple[str, int, int | None, int], tuple[Sequence[Arm], int]]
PROTOCOLS: Protocols = {
    ("relu", 64, None, 500): (ALL, 10),
    ("siren", 64, None, 500): (MAIN[:6], 5),
    ("wide", 64, None, 500): (MAIN[:4], 5),
}
#: Those of the study `coordinates-ordinary`.
ORDINARILY: Protocols = {
    ("relu", 64, None, 500): (PLAIN, 10),
    ("relu", 64, 512, 500): (MAIN, 10),
    ("fourier", 64, None, 500): (MAIN, 10),
    ("relu", 128, None, 2000): (MAIN[:8], 5),
}
_FREE = _arms(["none"], ["adam", "soap"], ["whitened-free"])
_PLAIN = _arms(["none"], ["adam", "soap"], ["none", "whitened"])
#: Those of the study `initialisation`.
INITIALISATION: Protocols = {
    ("relu", 64, None, 500): ([*_PLAIN, *_FREE], 10),
    ("he", 64, None, 500): (_PLAIN, 10),
    ("deep", 64, None, 500): ([*_PLAIN[:2], Arm("batchnorm", "adam", "none")], 5),
    ("siren-32", 64, None, 500): (MAIN[:6], 10),
}


@dataclass
class PictureOptions(Training):
    """Options of these studies."""

    network: str | None = None  # this one alone: relu, he, deep, fourier, siren, siren-32 or wide
    trials: int = 10  # that choose an arm's learning rate and damping
    crops: int | None = None  # this many at most
    steps: int | None = None  # in place of each protocol's own


def _run(options: PictureOptions, store: Store, protocols: Protocols, tuned_on: Sequence[int]) -> None:
    check_known("network", filter(None, [options.network]), dict.fromkeys(network for network, *_ in protocols))
    for (network, size, batch_size, steps), (arms, crops) in protocols.items():
        if options.network not in (None, network):
            continue
        # The settings of larger crops are those of the smaller ones, whose trials take a sixteenth of the time.
        length: dict[str, Any] = {"network": network, "batch_size": batch_size, "steps": options.steps or 500}
        after = range(SHOWN_FROM, SHOWN_FROM + min(options.crops or crops, crops))
        shown = by_crop(after, size=size, steps=options.steps or steps)
        for arm in arms:
            first = first_trial(CoordinateRun("china, flower", "none", **length), arm)
            compete(first, options.trials, COORDINATES, store, lambda error: -psnr(error), shown, by_crop(tuned_on))


def _study(help: str, protocols: Protocols, tuned_on: Sequence[int], hours: float, small: str) -> Study:
    return Study(
        help, partial(_run, protocols=protocols, tuned_on=tuned_on), report, PictureOptions(), makes=[Recipe(hours)],
        smoke=f"--network {small} --trials 1 --crops 1 --steps 1", page="docs/results/fields.md",
    )  # fmt: skip


STUDIES = {
    "coordinates": _study("coordinate networks: a picture learned from (x, y)", PROTOCOLS, HARDEST, 8.0, "siren"),
    "coordinates-ordinary": _study(
        "the protocols whose settings matter most, whose trials learn four ordinary crops", ORDINARILY, ORDINARY, 3.5,
        "fourier",
    ),
    "initialisation": _study(
        "the same by He's initialisation, of twenty layers, small SIRENs, and whitened without graft_norm",
        INITIALISATION, ORDINARY[::2], 0.7, "he",
    ),
}  # fmt: skip
