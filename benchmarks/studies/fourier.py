"""A picture learned behind Fourier features, as practitioners do: bare, whitened, and with LayerNorm.

Arms are compared after equal time: each has as many steps as take the time of 500 steps of bare Adam, by the price of
a step, which is measured first. Settings are chosen after that time, too, on crops of a photograph of its own.
"""

import argparse
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from ..core.figure import panels
from ..core.runs import add_progress_arguments, measure, run_all
from ..core.store import Result, Store
from ..core.study import Recipe, Sections, Study
from ..core.table import Cell, Row, Section, Table, estimate, exact, grouped, machine
from ..core.tune import around, choose
from ..fields.report import Comparison, arm, compared, errors
from ..fields.run import label
from ..speed import jobs
from ..speed.timing import interleaved, ratio
from .coordinates import COORDINATES, NETWORKS, Arm, CoordinateRun, Fit, first_trial, psnr

#: The four that the README's picture shows come first.
ARMS: list[Arm] = [
    ("none", "adam", "none"), ("none", "soap", "none"), ("none", "soap", "whitened"), ("none", "muon", "none"),
    ("none", "adam", "whitened"), ("none", "muon", "whitened"),
    *product(["layernorm"], ["adam", "muon", "soap"], ["none"]),
]  # fmt: skip
#: Crops of 64 × 64 pixels: those that trials learn are of a photograph by itself.
TUNED_ON = (12, 13, 14, 15)
SHOWN = tuple(range(2, 12))
#: Steps of Adam, whose time every arm has.
STEPS = 500
#: Searches of bare Adam by other seeds, which tell how much of a difference tuning alone can make.
AGAIN = (100, 200)
#: Deviations of the frequencies that bare Adam and SOAP try at their first learning rates, judged by held-out pixels.
DEVIATIONS = (1.5, 3.0, 6.0, 12.0)
_HUES = {"adam": "tab:blue", "muon": "tab:orange", "soap": "tab:green"}


def like(arm: Arm, **settings: Any) -> CoordinateRun:
    """Return the first trial of an arm, with some of its settings replaced."""
    return replace(first_trial(CoordinateRun("china, flower, hopper", "none", network="fourier"), arm), **settings)


def measured_prices(rounds: int) -> Result:
    """Ratios of the arms' steps to bare Adam's in processor time, taken in turn, ten steps at a time."""
    runs = {label(run): run for run in (like(arm, lr=1e-3) for arm in ARMS)}
    seconds = interleaved({name: jobs.fit(Fit(run), run) for name, run in runs.items()}, rounds)
    adam = seconds[label(like(ARMS[0]))]
    return {
        "part": "prices",
        "time_ratio": {name: ratio(own, adam) for name, own in seconds.items()},
        "adam_ms": 100 * statistics.median(adam),
    }


def prices(store: Store) -> dict[str, dict[str, Any]]:
    """Label of an arm → the ratio of its step's time to that of Adam's."""
    return store.read("prices")[0]["time_ratio"]


def _on(run: CoordinateRun, crops: Iterable[int], seed: int = 0) -> list[CoordinateRun]:
    return [replace(run, crop=crop, seed=seed + crop) for crop in crops]


def _chosen(first: CoordinateRun, trials: int, store: Store, part: str = "search", seed: int = 0) -> CoordinateRun:
    each = partial(_on, crops=TUNED_ON, seed=seed)
    search = around(first, trials)
    (best,) = choose([search], COORDINATES, store, lambda error: -psnr(error), part=part, each=each)
    return best


def _run(options: argparse.Namespace, store: Store) -> None:
    measure(store, {"prices": partial(measured_prices, options.rounds)})
    shown, chosen = SHOWN[: options.crops], dict[Arm, CoordinateRun]()
    for each in ARMS:
        steps = round(options.steps / prices(store)[label(like(each))]["median"])
        chosen[each] = _chosen(like(each, steps=max(1, steps), time_of=options.steps), options.trials, store)
        run_all(_on(chosen[each], shown), COORDINATES, store)
    for run in chosen.values():
        run_all(_on(replace(run, steps=options.steps, time_of=None), shown), COORDINATES, store)
    for run in chosen.values():
        run_all(_on(replace(run, held_out=True), shown), COORDINATES, store)
    adam = like(ARMS[0], steps=options.steps, time_of=options.steps)
    for seed in AGAIN:
        again = _chosen(adam, options.trials, store, _part(seed), seed)
        run_all(_on(again, shown), COORDINATES, store, part=_part(seed))
    for each, deviation in product(ARMS[:2], DEVIATIONS):
        run = like(each, steps=options.steps, held_out=True, deviation=deviation)
        run_all(_on(run, TUNED_ON), COORDINATES, store, part="deviation")


def _part(seed: int) -> str:
    return f"again-{seed}"


def _trials(results: Iterable[Result], of: Callable[[Result], Any]) -> dict[Any, int]:
    """Arm → how many settings its trials tried."""
    points = {(of(r), r["settings"]["lr"], r["settings"].get("damping")) for r in results}
    return {key: len(each) for key, each in grouped(points, lambda point: point[0]).items()}


def _gain(results: Sequence[Result], bare: Sequence[Result]) -> str | Cell:
    """By how much an arm is ahead of the bare optimizer, crop by crop."""
    difference, p, n = Comparison(*compared(errors(results), errors(bare), psnr))
    return Cell(f"{difference:+.1f} ({p:.2g})", {"difference": difference, "p": p, "n": n}) if n > 1 else ""


def _decibels(results: Sequence[Result]) -> str | Cell:
    return estimate([psnr(error) for error in errors(results).values()], 1) if results else ""


def _again(store: Store, count: int) -> list[Row]:
    """A row for every further search of bare Adam: its rate, and what it reaches on the crops that are shown."""
    rows = list[Row]()
    for number, seed in enumerate(AGAIN, start=2):
        runs = store.read(_part(seed))
        if shown := [r for r in runs if r["settings"]["crop"] not in TUNED_ON]:
            trials = _trials((r for r in runs if r not in shown), lambda _: None)[None]
            settings, values = shown[-1]["settings"], [psnr(r["score"]) for r in shown]
            cells = [exact(settings["lr"]), "", exact(trials), exact(1.0, ".2f"), exact(settings["steps"])]
            name = f"{label(settings)}, tuned by other seeds ({number})"
            rows.append([name, *cells, estimate(values, 1), *[""] * (count - 7)])
    return rows


def _table(store: Store, kinds: Sequence[dict[Arm, list[Result]]]) -> Table:
    times, trials = prices(store), _trials(store.read("search"), lambda r: arm(r)[:3])
    in_time, in_steps, held_out = kinds
    header = ["arm", "learning rate", "damping", "trials", "time per step", "steps in equal time"]
    header += ["PSNR in equal time, dB", "against the bare optimizer (p)"]
    header += ["PSNR after equal steps, dB", "against the bare optimizer after equal steps (p)"]
    header.append("PSNR of held-out pixels, dB")
    rows = list[tuple[float, Row]]()
    for key, results in in_time.items():
        settings, bare = results[0]["settings"], ("none", key[1], "none")
        cells: list[str | Cell] = [label(settings), exact(settings["lr"]), exact(settings.get("damping"))]
        cells += [exact(trials.get(key)), exact(times[label(settings)]["median"], ".2f"), exact(settings["steps"])]
        for kind in (in_time, in_steps):
            own = kind.get(key, [])
            cells += [_decibels(own), "" if key == bare else _gain(own, kind.get(bare, []))]
        cells.append(_decibels(held_out.get(key, [])))
        rows.append((statistics.fmean(map(psnr, errors(results).values())), cells))
    rows.sort(key=lambda row: -row[0])
    return Table(header, [*(row for _, row in rows), *_again(store, len(header))])


def _figure(results: dict[Arm, list[Result]], times: dict[str, Any], title: str, path: Path) -> None:
    """Draw PSNR against time, in steps of bare Adam: the mean over crops."""
    with panels([""], title, path, ylabel="PSNR, dB", xlabel="time, in steps of bare Adam") as (axis,):
        for (norm, optimizer, method), runs in results.items():
            name = label(runs[0]["settings"])
            x = [times[name]["median"] * step for step in runs[0]["steps"]]
            curves = [[psnr(error) for error in run["error"]] for run in runs if None not in run["error"]]
            style = "-" if method == "whitened" else ":" if norm == "layernorm" else "--"
            means = [statistics.fmean(values) for values in zip(*curves, strict=True)]
            axis.plot(x, means, style, color=_HUES[optimizer], label=name)


def report(store: Store, name: str, folder: Path) -> Sections:
    """One table and one figure."""
    found = store.read()
    kinds = [
        grouped((r for r in found if is_of(r["settings"])), lambda r: arm(r)[:3])
        for is_of in (
            lambda s: "time_of" in s and "held_out" not in s, lambda s: "time_of" not in s, lambda s: "held_out" in s,
        )
    ]  # fmt: skip
    network, budget = NETWORKS["fourier"], next(iter(kinds[0].values()))[0]["settings"]["time_of"]
    heading = (
        f"{network.layers} linear layers of width {network.width}, ReLU, behind {network.frequencies} Fourier features; 64 "
        f"× 64 pixels, all in every step, the time of {budget} steps of Adam"
    )
    _figure(kinds[0], prices(store), heading, folder / f"{name}.png")
    measured = store.read("prices")[0]
    widest = max((high - low) / (high + low) for low, high in (each["quartiles"] for each in _ratios(measured)))
    caption = (
        "Mean ± standard error over crops of two photographs, each by its own seed; p is of the paired t test over the "
        "crops. Learning rate and damping are the best of an arm's trials after equal time, each on four crops of a third "
        "photograph, and serve for equal steps and held-out pixels as well. Time per step is processor time, a ratio to "
        f"Adam's {measured['adam_ms']:.1f} ms: the median of {_ratios(measured)[0]['rounds']} rounds of ten steps in turn, "
        f"with quartiles within ± {100 * widest:.0f} %. Learning rates rise over 20 steps and fall to 0 by a cosine. Muon "
        "trains the matrices inside the network, Adam the rest at the same rate. Held out is every other pixel, after as "
        f"many steps as in equal time. {machine(found[0]['environment'])}"
    )
    return {name: Section([f"**{heading}**", _table(store, kinds), caption])}


def _ratios(measured: Result) -> list[dict[str, Any]]:
    return list(measured["time_ratio"].values())


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trials", type=int, default=10, help="that choose an arm's learning rate and damping")
    parser.add_argument("--crops", type=int, default=len(SHOWN), help="this many at most")
    parser.add_argument("--steps", type=int, default=STEPS, help="of bare Adam, whose time each arm has")
    parser.add_argument("--rounds", type=int, default=41, help="that measure the prices of steps")
    add_progress_arguments(parser)


STUDIES = {
    "fourier": Study(
        "a picture learned behind Fourier features, by bare and wrapped optimizers in equal time", _run, report,
        _arguments, makes=[Recipe(0.8)], smoke="--trials 1 --crops 1 --steps 2 --rounds 1",
        page="docs/results/fields.md",
    ),
}  # fmt: skip
