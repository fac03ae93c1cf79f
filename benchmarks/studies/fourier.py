"""A picture learned behind Fourier features, as practitioners do: bare, whitened, and with LayerNorm.

Arms are compared after equal time: each has as many steps as take the time of 500 steps of bare Adam, by the price of
a step, which is measured first. Settings are chosen after that time, too, on crops of a photograph of its own.
"""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from ..core.arms import Arm, Look, arm, compete, first_trial, label, style, variants
from ..core.figure import panels
from ..core.runs import in_turn, measure, run_all
from ..core.store import Result, Store
from ..core.study import Recipe, Sections, Study, Training, check_length
from ..core.tables import Cell, Section, Table, estimate, exact, grouped, in_words, machine
from ..problems.pictures import COORDINATES, NETWORKS, CoordinateRun, Fit, by_crop, psnr
from ..train import ten_steps

#: The four that the README's picture shows come first.
ARMS = [
    Arm("none", "adam", "none"), Arm("none", "soap", "none"), Arm("none", "soap", "whitened"),
    Arm("none", "muon", "none"), Arm("none", "adam", "whitened"), Arm("none", "muon", "whitened"),
    *(Arm("layernorm", optimizer, "none") for optimizer in ("adam", "muon", "soap")),
]  # fmt: skip
#: Crops of 64 × 64 pixels: those that trials learn are of a photograph by itself.
TUNED_ON = (12, 13, 14, 15)
SHOWN = tuple(range(2, 12))
#: Steps of Adam, whose time every arm has.
STEPS = 500
#: Deviations of the frequencies that bare Adam and SOAP try at their first learning rates, judged by held-out pixels.
DEVIATIONS = (1.5, 3.0, 6.0, 12.0)
_LOOK = Look(psnr, partial(estimate, digits=1), "PSNR, dB", "{:+.1f}".format)


def like(arm: Arm, **settings: Any) -> CoordinateRun:
    """Return the first trial of an arm, with some of its settings replaced."""
    return replace(first_trial(CoordinateRun("china, flower, hopper", "none", network="fourier"), arm), **settings)


def measured_prices(rounds: int) -> Result:
    """Ratios of the arms' steps to bare Adam's in processor time, taken in turn, ten steps at a time."""
    runs = [like(arm, lr=1e-3) for arm in ARMS]
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
    steps: int = STEPS  # of bare Adam, whose time each arm has
    rounds: int = 41  # that measure the prices of steps


def _run(options: FourierOptions, store: Store) -> None:
    check_length(store, time_of=options.steps)
    measure(store, {"prices": partial(measured_prices, options.rounds)})
    for each, deviation in product(ARMS[:2], DEVIATIONS):
        run = like(each, steps=max(1, options.steps // 2), held_out=True, deviation=deviation)
        run_all(variants(run, by_crop(TUNED_ON)), COORDINATES, store, part="deviation")
    shown, times = by_crop(SHOWN[: options.crops]), prices(store)
    for each in ARMS:
        steps = max(1, round(options.steps / times[label(like(each))]["median"]))
        first = like(each, steps=steps, time_of=options.steps)
        best = compete(first, options.trials, COORDINATES, store, lambda error: -psnr(error), shown, by_crop(TUNED_ON))
        run_all(variants(replace(best, held_out=True), shown), COORDINATES, store)
        if steps != options.steps:
            run_all(variants(replace(best, steps=options.steps, time_of=None), shown), COORDINATES, store)


def tuning_spread(trials: Mapping[Any, Mapping[int, float]]) -> float:
    """By how much two searches on different crops differ: the mean over the three ways to halve the four crops.

    Each half chooses its settings, and both choices are judged on all four crops.

    Args:
        trials: settings → crop → PSNR.
    """

    def level(crops: Iterable[int]) -> float:
        best = max(trials.values(), key=lambda each: statistics.fmean(each[crop] for crop in crops))
        return statistics.fmean(best[crop] for crop in TUNED_ON)

    first, *others = TUNED_ON
    halves = [((first, other), [crop for crop in others if crop != other]) for other in others]
    return statistics.fmean(abs(level(one) - level(rest)) for one, rest in halves)


def _trials(store: Store) -> dict[Arm, dict[Any, dict[int, float]]]:
    """Arm → settings → crop → PSNR; where a trial broke down it is that of a picture without a signal."""
    trials: dict[Arm, dict[Any, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for r in store.read("search"):
        s, error = r["settings"], r["score"]
        trials[arm(r)][s["lr"], s.get("damping")][s["crop"]] = psnr(error) if error is not None else 0.0
    return trials


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
            "trials": exact(len(trials[key])), "spread of tuning, dB": exact(tuning_spread(trials[key]), ".1f"),
            "time per step": exact(times[label(settings)]["median"], ".2f"),
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


def _deviations(store: Store) -> str:
    """What each deviation of the features reaches on held-out pixels of the crops that trials learn."""
    trials = grouped(store.read("deviation"), lambda r: r["settings"]["deviation"])
    means = {deviation: statistics.fmean(psnr(r["score"]) for r in runs) for deviation, runs in trials.items()}
    return ", ".join(f"{mean:.1f} dB at {deviation:g}" for deviation, mean in means.items())


def report(store: Store, name: str, folder: Path) -> Sections:
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
    fewest = min(len(tried) for tried in _trials(store).values())
    crops = len({r["settings"]["crop"] for r in learned})
    caption = (
        f"Mean ± standard error over {crops} crops of two photographs; p is of the paired t test. Learning rate and "
        f"damping are the best of {in_words(fewest, 'trial')} in equal time, each on four crops of a third photograph. "
        f"Time per step is processor time, in Adam's {measured['adam_ms']:.1f} ms, by {ratios[0]['rounds']} rounds in "
        f"turn, with quartiles within ± {100 * widest:.0f} %. Held out is every other pixel. Trials on the third "
        f"photograph chose the features' deviation, 3; there pixels held out have {_deviations(store)}. "
        f"{machine(results[0]['environment'])}"
    )
    return {name: Section([f"**{heading}**", _table(store, [in_time, in_steps, held_out]), caption])}


STUDIES = {
    "fourier": Study(
        "a picture learned behind Fourier features, by bare and wrapped optimizers in equal time", _run, report,
        FourierOptions(), makes=[Recipe(0.8)], smoke="--trials 1 --crops 1 --steps 2 --rounds 1",
        page="docs/results/fields.md",
    ),
}  # fmt: skip
