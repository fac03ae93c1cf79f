"""A Fourier neural operator and RealNVP: whitened optimizers beside the plainest remedies.

Settings of an arm come from trials with data and a network of another seed, until the best learning rate is inside.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from ..core.arms import Arm, compete, errors, first_trial, label
from ..core.runs import check_known, in_turn, measure
from ..core.store import Result, Store, setting
from ..core.study import Compared, Recipe, Sections, Study, check_length
from ..core.tables import Cell, Section, grouped, in_words, machine, pivot, ranged
from ..problems.surrogates import BLOCKS, COUPLINGS, SURROGATES, TEST, TRAIN, VISCOSITY, Burgers, SurrogateRun
from ..train import ten_steps

ARMS = [
    *(Arm("none", optimizer, method) for optimizer, method in product(["adam", "soap"], ["none", "whitened"])),
    Arm("none", "muon", "none"),
]
#: Data set → optimizers, each with a setting that a practitioner would change first.
REMEDIES: dict[str, list[tuple[str, Mapping[str, Any]]]] = {
    # About 1.16 times as many steps take whitened SOAP's time.
    "burgers": [("adam", {"spectral_rate": 3.2}), ("soap", {"longer": 1.16}), ("soap", {"longer": 1.5})],
    "moons": [("adam", {"norm": "layernorm"}), ("adam", {"start": "zero"})],
    "patches": [
        ("adam", {name: value})
        for name, value in (("norm", "layernorm"), ("norm", "columns"), ("longer", 2), ("start", "zero"))
    ],
}
TITLES = {
    "burgers": "operator, relative error",
    "moons": "flow, two moons, nats",
    "patches": "flow, squares of photographs, nats",
}
STARTS = {"adam": 1e-2, "soap": 3.2e-3, "muon": 1e-2}


def measured_price(rounds: int) -> Result:
    """The ratio of a step of whitened SOAP to one of SOAP, of the operator, in processor time."""
    run = SurrogateRun("", "none", optimizer="soap", lr=1e-3)
    runs = (run, replace(run, method="whitened"))
    ratios, _ = in_turn({each.method: ten_steps(each, Burgers(each)) for each in runs}, rounds)
    return {"part": "price", "time_ratio": ratios["whitened"]}


def _key(result: Result) -> tuple[Any, ...]:
    s = result["settings"]
    names = ("norm", "optimizer", "method", "spectral_rate", "start", "longer")
    return tuple(s.get(name) for name in names)


def _name(settings: Mapping[str, Any]) -> str:
    words = {
        "spectral_rate": f"modes at {settings.get('spectral_rate')} times its rate",
        "start": "couplings begin as the identity",
        "longer": f"{settings.get('longer')} times the steps",
    }
    return ", ".join([label(settings), *(text for name, text in words.items() if name in settings)])


def _cell(runs: Sequence[Result]) -> Cell:
    final, data_set = [*errors(runs).values()], runs[0]["settings"]["data_set"]
    middle, low, high = statistics.median(final), min(final), max(final)
    digits = 4 if data_set == "burgers" else 2
    more = {name: runs[0]["settings"][name] for name in ("lr", "damping") if name in runs[0]["settings"]}
    more["ms"] = statistics.median(1000 * r["seconds"][-1] / r["steps"][-1] for r in runs)
    cell = ranged(low, middle, high, f".{digits}f", n=len(final), **more)
    return cell if len(final) > 1 else cell._replace(text=f"{middle:.{digits}f}")


def report(store: Store, name: str, folder: Path) -> Sections:
    """A row for every arm, a column for every data set."""
    results = store.read()
    groups = grouped(results, lambda r: (_key(r), r["settings"]["data_set"]))
    chosen = {key: [r for r in own if setting("lr")(r) == setting("lr")(own[-1])] for key, own in groups.items()}
    rows = {key: _name(own[0]["settings"]) for key, own in grouped(results, _key).items()}
    cells: dict[tuple[Any, str], str | Cell] = {key: _cell(own) for key, own in chosen.items()}
    prices = [f"{r['time_ratio']['median']:.2f}" for r in store.read("price")]
    price = f"A step of whitened SOAP takes {prices[0]} of SOAP's with the operator. " if prices else ""
    steps = min(r["settings"]["steps"] for r in results)
    most = max(map(len, chosen.values()))
    median = f", or the median of {in_words(most)} and the range" if most > 1 else ""
    caption = (
        f"A Fourier neural operator of {BLOCKS} blocks learns Burgers' equation from {TRAIN:,} functions, with a "
        f"viscosity of {VISCOSITY:g}, and is judged on {TEST}; RealNVP has {COUPLINGS} couplings, of squares of 8 × 8 "
        f"pixels in two photographs, those of the right quarter test. Lower is better. One seed{median}, "
        f"after {steps} steps. {price}{machine(results[0]['environment'])}"
    )
    return {name: Section([pivot(["arm"], rows, TITLES, cells), caption])}


@dataclass
class SurrogateOptions(Compared):
    """Options of this study; an arm with a damping has two trials more."""

    data_sets: tuple[str, ...] = tuple(TITLES)  # that are learned
    rounds: int = 41  # that measure the price of a step
    optimizers: tuple[str, ...] = ("adam", "soap", "muon")  # that learn them


def _run(options: SurrogateOptions, store: Store) -> None:
    check_known("data set", options.data_sets, TITLES)
    check_known("optimizer", options.optimizers, STARTS)
    check_length(store, unless="longer", steps=options.steps)
    if "burgers" in options.data_sets:
        measure(store, {"price": partial(measured_price, options.rounds)})
    shown = [{"seed": seed} for seed in range(1, options.seeds + 1)]
    for data_set in options.data_sets:
        like = SurrogateRun("", "none", data_set=data_set, steps=options.steps)
        arms = [(arm, like) for arm in ARMS if arm.optimizer in options.optimizers]
        for optimizer, change in REMEDIES[data_set]:
            run = replace(like, **change, steps=round(options.steps * change.get("longer", 1)))
            arms += [(Arm(run.norm, optimizer, "none"), run)] * (optimizer in options.optimizers)
        for arm, run in arms:
            first = first_trial(run, arm, starts=STARTS)
            compete(first, options.trials + 2 * first.damped, SURROGATES, store, float, shown)


#: What one seed does not decide.
DECIDED = ("--data-sets moons --seeds 5", "--data-sets burgers --optimizers soap --seeds 5")
STUDIES = {
    "surrogates": Study(
        "a Fourier neural operator and RealNVP, by whitened optimizers and the plainest remedies", _run, report,
        SurrogateOptions(trials=5, seeds=1), smoke="--trials 1 --steps 2 --data-sets moons",
        makes=[Recipe(0.4, options=("", *DECIDED))], page="docs/results/fields.md",
    )
}  # fmt: skip
