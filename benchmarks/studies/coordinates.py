"""Coordinate networks: a picture learned from (x, y), with and without normalisers, by bare and by wrapped optimizers.

Each arm is a normaliser, an optimizer and a wrapper. Its learning rate (and damping) come from ten trials, each of them
on crops that no table shows. Then it learns other crops, each by a seed of its own: arms are compared in pairs.

Behind Fourier features, as practitioners have it, they are compared after equal time: each has as many steps as take
the time of 500 steps of bare Adam, by the price of a step, which is measured first; so have its trials.
"""

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from ..core.arms import Arm, Look, arm, compete, first_trial, label, sections, style, variants
from ..core.figure import panels
from ..core.runs import check_known, in_turn, measure, run_all
from ..core.store import Result, Store, setting
from ..core.study import Recipe, Sections, Study, Training, check_length
from ..core.tables import Cell, Section, Table, estimate, exact, grouped, machine
from ..problems.pictures import COORDINATES, NETWORKS, CoordinateRun, Fit, by_crop, psnr
from ..train import NORMS, ten_steps

#: Crops that trials learn: the two hardest; in the newer studies those of a photograph by itself, or two of them.
HARDEST, ORDINARY = (0, 1), (12, 13, 14, 15)
#: Crops that tables show, or the first of them: of other photographs than those of `ORDINARY`.
SHOWN = tuple(range(2, 12))
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
ALL = list(dict.fromkeys([
    *MAIN, *_arms(["none"], ["adam"], ["input-scaled", "preconditioned"]), Arm("none", "muon", "preconditioned"),
    Arm("none", "sgd", "batch-ideal"), *_arms(["none"], ["momentum", "adam", "muon"], ["mac"]),
    *_arms(NORMS, _WITH, ["none", "whitened", "whitened-16"]),
]))  # fmt: skip
#: The arms of each protocol, (network, side, batch size, steps), most valuable first; and how many crops there are.
Protocols = Mapping[tuple[str, int, int | None, int], tuple[Sequence[Arm], int]]
PROTOCOLS: Protocols = {
    ("relu", 64, None, 500): (ALL, 10),
    ("siren", 64, None, 500): (MAIN[:6], 5),
    ("wide", 64, None, 500): (MAIN[:4], 5),
}
#: Those of the study `coordinates-ordinary`.
ORDINARILY: Protocols = {
    ("relu", 64, None, 500): (ALL, 10),
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
        shown = by_crop(SHOWN[:crops][: options.crops], size=size, steps=options.steps or steps)
        for each in arms:
            first = first_trial(CoordinateRun("china, flower", "none", **length), each)
            compete(first, options.trials, COORDINATES, store, lambda error: -psnr(error), shown, by_crop(tuned_on))


def _study(help: str, protocols: Protocols, tuned_on: Sequence[int], hours: float, small: str) -> Study:
    return Study(
        help, partial(_run, protocols=protocols, tuned_on=tuned_on), report, PictureOptions(), makes=[Recipe(hours)],
        smoke=f"--network {small} --trials 1 --crops 1 --steps 1", page="docs/results/fields.md",
    )  # fmt: skip


#: The four that the README's picture shows come first.
IN_TIME = [
    Arm("none", "adam", "none"), Arm("none", "soap", "none"), Arm("none", "soap", "whitened"),
    Arm("none", "muon", "none"), Arm("none", "adam", "whitened"), Arm("none", "muon", "whitened"),
    *(Arm("layernorm", optimizer, "none") for optimizer in ("adam", "muon", "soap")),
]  # fmt: skip
#: Deviations of the frequencies that bare Adam and SOAP try at their first learning rates, judged by held-out pixels.
DEVIATIONS = (1.5, 3.0, 6.0, 12.0)


def like(arm: Arm, **settings: Any) -> CoordinateRun:
    """Return the first trial of an arm, with some of its settings replaced."""
    return replace(first_trial(CoordinateRun("china, flower, hopper", "none", network="fourier"), arm), **settings)


def measured_prices(rounds: int) -> Result:
    """Ratios of the arms' steps to bare Adam's in processor time, taken in turn, ten steps at a time."""
    runs = [like(arm, lr=1e-3) for arm in IN_TIME]
    ratios, milliseconds = in_turn({label(run): ten_steps(run, Fit(run)) for run in runs}, rounds)
    return {"part": "prices", "time_ratio": ratios, "adam_ms": milliseconds / 10}


def prices(store: Store) -> dict[str, dict[str, Any]]:
    """Label of an arm → the ratio of its step's time to that of Adam's."""
    return store.read("prices")[0]["time_ratio"]


@dataclass
class FourierOptions(Training):
    """Options of this study."""

    trials: int = 10  # that choose an arm's learning rate and damping
    crops: int = len(SHOWN)  # this many at most
    steps: int = 500  # of bare Adam, whose time each arm has
    rounds: int = 41  # that measure the prices of steps


def _run_in_time(options: FourierOptions, store: Store) -> None:
    check_length(store, time_of=options.steps)
    measure(store, {"prices": partial(measured_prices, options.rounds)})
    for each, deviation in product(IN_TIME[:2], DEVIATIONS):
        run = like(each, steps=max(1, options.steps // 2), held_out=True, deviation=deviation)
        run_all(variants(run, by_crop(ORDINARY)), COORDINATES, store, part="deviation")
    shown, times = by_crop(SHOWN[: options.crops]), prices(store)
    for each in IN_TIME:
        steps = max(1, round(options.steps / times[label(like(each))]["median"]))
        first = like(each, steps=steps, time_of=options.steps)
        best = compete(first, options.trials, COORDINATES, store, lambda error: -psnr(error), shown, by_crop(ORDINARY))
        run_all(variants(replace(best, held_out=True), shown), COORDINATES, store)
        if steps != options.steps:
            run_all(variants(replace(best, steps=options.steps, time_of=None), shown), COORDINATES, store)


def _trials(store: Store) -> Counter[Arm]:
    """How many settings each arm has tried; every trial has a run on the first of its crops."""
    return Counter(arm(r) for r in store.read("search") if r["settings"]["crop"] == ORDINARY[0])


#: What is compared → behind "against the bare optimizer".
_KINDS = {
    "in equal time": "", "after equal steps": " after equal steps", "of held-out pixels": " on held-out pixels",
}  # fmt: skip


def _table(store: Store, kinds: Sequence[Mapping[Arm, list[Result]]]) -> Table:
    """A row for every arm; `kinds` are its runs in equal time, after equal steps, and with pixels held out."""
    times, trials, rows = prices(store), _trials(store), list[dict[str, str | Cell]]()
    for key in sorted(kinds[0], key=lambda key: _LOOK.level(kinds[0][key]), reverse=True):
        settings = kinds[0][key][0]["settings"]
        row: dict[str, str | Cell] = {
            "arm": label(settings), "learning rate": exact(settings["lr"]), "damping": exact(settings.get("damping")),
            "trials": exact(trials[key]), "time per step": exact(times[label(settings)]["median"], ".2f"),
            "steps in equal time": exact(settings["steps"]),
        }  # fmt: skip
        for kind, (of, where) in zip(kinds, _KINDS.items(), strict=True):
            runs, bare = kind.get(key, []), kind.get(Arm("none", key.optimizer, "none"), [])
            row[f"PSNR {of}, dB"] = _LOOK.estimate(runs)
            row[f"against the bare optimizer{where} (p)"] = _LOOK.gain(runs, bare) if runs is not bare else ""
        rows.append(row)
    return Table.of(rows)


def _figure(results: dict[Arm, list[Result]], times: dict[str, Any], title: str, path: Path) -> None:
    """Draw PSNR against time, in steps of bare Adam: the mean over crops."""
    with panels([""], title, path, ylabel="PSNR, dB", xlabel="time, in steps of bare Adam") as (axis,):
        for key, runs in results.items():
            name = label(runs[0]["settings"])
            x = [times[name]["median"] * step for step in runs[0]["steps"]]
            curves = [[psnr(error) for error in run["error"]] for run in runs if None not in run["error"]]
            means = [statistics.fmean(values) for values in zip(*curves, strict=True)]
            axis.plot(x, means, label=name, **style(key))


def report_in_time(store: Store, name: str, folder: Path) -> Sections:
    """One table and one figure."""
    results = store.read()
    learned = [r for r in results if "held_out" not in r["settings"]]
    in_time = grouped((r for r in learned if "time_of" in r["settings"]), arm)
    budget = next(iter(in_time.values()))[0]["settings"]["time_of"]
    in_steps = grouped((r for r in learned if r["settings"]["steps"] == budget), arm)
    held_out, network = grouped((r for r in results if "held_out" in r["settings"]), arm), NETWORKS["fourier"]
    heading = (
        f"{network.layers} linear layers of width {network.width}, ReLU, behind {network.frequencies} Fourier "
        f"features; 64 × 64 pixels, all in every step, the time of {budget} steps of Adam"
    )
    measured = store.read("prices")[0]
    ratios = list(measured["time_ratio"].values())
    widest = max((high - low) / (high + low) for low, high in (each["quartiles"] for each in ratios))
    _figure(in_time, measured["time_ratio"], heading, folder / f"{name}.png")
    fewest = min(_trials(store).values())
    deviations = ", ".join(
        f"{statistics.fmean(psnr(r['score']) for r in runs):.1f} dB at {deviation:g}"
        for deviation, runs in grouped(store.read("deviation"), setting("deviation")).items()
    )
    crops = len({r["settings"]["crop"] for r in learned})
    caption = (
        f"Mean ± standard error over {crops} crops of two photographs; p of paired t tests. Settings: best of "
        f"{fewest} trials in equal time on four crops of a third photograph. The features' deviation "
        f"is 3 (held-out pixels of those crops: {deviations}). Time: processor time in Adam's "
        f"{measured['adam_ms']:.1f} ms, {ratios[0]['rounds']} rounds, quartiles within ± {100 * widest:.0f} %. "
        f"Every other pixel is held out. {machine(results[0]['environment'])}"
    )
    return {name: Section([f"**{heading}**", _table(store, [in_time, in_steps, held_out]), caption])}


STUDIES = {
    "coordinates": _study("coordinate networks: a picture learned from (x, y)", PROTOCOLS, HARDEST, 8.0, "siren"),
    "coordinates-ordinary": _study(
        "the protocols whose settings matter most, whose trials learn four ordinary crops", ORDINARILY, ORDINARY, 4.4,
        "fourier",
    ),
    "initialisation": _study(
        "the same by He's initialisation, of twenty layers, small SIRENs, and whitened without graft_norm",
        INITIALISATION, ORDINARY[::2], 0.7, "he",
    ),
    "fourier": Study(
        "a picture learned behind Fourier features, by bare and wrapped optimizers in equal time", _run_in_time,
        report_in_time, FourierOptions(), makes=[Recipe(0.8)], smoke="--trials 1 --crops 1 --steps 2 --rounds 1",
        page="docs/results/fields.md",
    ),
}  # fmt: skip
