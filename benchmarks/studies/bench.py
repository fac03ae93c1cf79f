"""What to look at first: a picture and an equation that networks learn, and digits, with and without this library.

Picture and equation are learned as `examples.fit_image` and `examples.equation` learn them, in equal time. On digits
every method has the optimizer, the learning rate and the damping that `digits-optimizers` chose for it on held-out
data, and trains anew.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from adiv_optim.corrections import BatchIdeal
from examples import equation
from examples.fit_image import FITS, STEPS, draw, picture, psnr, steps_of, train

from ..core.runs import DEVICE, measure, run_all
from ..core.store import Result, Store, setting
from ..core.study import Options, Sections, Study, check_length
from ..core.tables import SIGNIFICANT, Section, Table, against, estimate, exact, mean_and_error, welch
from ..ensemble import IMAGES
from ..grids import best_optimizer
from ..methods import METHODS
from ..problems.images import again, network, trained

#: Whose settings the digits are learned with.
CHOSEN = Path(__file__).parents[1] / "results" / "digits-optimizers.jsonl"


def _drawn(store: Store, ending: str, wanted: dict[str, Any], draw: Callable[[Path], None]) -> None:
    """Make the measurements of one picture, and draw it; all of it anew where anything is missing."""
    path = store.path.with_name(f"{store.path.stem}-{ending}.png")
    if not path.exists() or not all(map(store.has, wanted)):
        measure(store, wanted, again=True)
        draw(path)


def _fit(store: Store, steps: int) -> None:
    """Learn the picture in every way."""
    wanted, learned = picture(None, 64), {}

    def learn(name: str) -> Result:
        start, count = time.process_time(), steps_of(FITS[name], steps)
        learned[name] = train(FITS[name], wanted, count)
        about = {"settings": {"time_of": steps}, "fit": name, "steps": count, "seconds": [time.process_time() - start]}
        return {**about, "psnr": psnr(learned[name], wanted)}

    ways = {f"{name}, {steps_of(fit, steps)} steps": partial(learn, name) for name, fit in FITS.items()}
    _drawn(store, "picture", ways, lambda path: draw(learned, wanted, path))


def _solve(store: Store, seconds: float) -> None:
    """Solve the equation in every way."""
    solved = {}

    def solve(name: str) -> Result:
        solved[name] = equation.solve(name, seconds)
        error = equation.relative_error(solved[name], equation.wave)
        return {"settings": {"seconds": seconds}, "solver": name, "error": [error], "seconds": [seconds]}

    ways = {f"{name}, {seconds:g} seconds": partial(solve, name) for name in equation.FITS}
    _drawn(store, "equation", ways, lambda path: equation.draw(solved, path))


@dataclass
class BenchOptions(Options):
    """Options of this study."""

    steps: int = STEPS  # of Adam with the picture; the others have its time
    seconds: float = 6.0  # of processor time with the equation, for each way to solve it
    epochs: int = 20  # passes over the digits
    seeds: int = 5  # with the digits; they begin at 1
    device: str = DEVICE  # where to train: cpu, cuda, cuda:1, …


def _run(options: BenchOptions, store: Store) -> None:
    chosen = Store(CHOSEN)
    at_best = [r for r in chosen.read() if r["settings"]["optimizer"] == _optimizer(chosen, r["settings"])]
    seeds = tuple(range(1, options.seeds + 1))
    runs = [again(result, device=options.device, seeds=seeds, epochs=options.epochs) for result in at_best]
    check_length(store, time_of=options.steps)
    check_length(store, seconds=options.seconds)
    check_length(store, epochs=options.epochs, seeds=list(seeds))
    _fit(store, options.steps)
    _solve(store, options.seconds)
    run_all(runs, IMAGES, store)


def _optimizer(chosen: Store, settings: Mapping[str, Any]) -> str:
    """The better one on held-out data; of BatchIdeal SGD, as the README has it."""
    if isinstance(METHODS[settings["method"]].correction, BatchIdeal):
        return "sgd"
    return best_optimizer(chosen, settings["method"], settings["activation"])


def _label(result: Result) -> str:
    method, optimizer = setting("method", "optimizer")(result)
    return f"{METHODS[method].label} with {optimizer}"


def _wraps(result: Result) -> bool:
    method = METHODS[result["settings"]["method"]]
    return method.correction is not None or method.by_inputs is not None


def _accuracies(result: Result) -> list[float]:
    return result["test_accuracy"][-1]


def verdict(fits: dict[str, float], errors: dict[str, float], digits: list[Result]) -> str:
    """Who won: the best of the wrapped optimizers beside the best of the others, and the solvers of the equation.

    Args:
        fits: way to learn the picture → PSNR.
        errors: way to solve the equation → relative error.
        digits: runs, the best first.
    """
    ways = [max((name for name in fits if name.startswith("Whitened") is own), key=fits.__getitem__)
            for own in (True, False)]  # fmt: skip
    first, other = sorted(ways, key=lambda name: -fits[name])
    text = f"the picture, in equal time: {first} wins, {fits[first]:.1f} dB; {other} has {fits[other]:.1f} dB"
    (solver, least), *others = sorted(errors.items(), key=lambda each: each[1])
    text += f". The equation, in equal time: {solver} wins, relative error {least:.1g}"
    text += "".join(f"; {name} has {error:.1g}" for name, error in others)
    best = [r for r in digits if _wraps(r)][:1] + [r for r in digits if not _wraps(r)][:1]
    if len(best) < 2 or len(_accuracies(best[0])) < 2:
        return text
    values = [f"{_label(each)} has {mean_and_error(_accuracies(each))[0]:.1f} %" for each in best]
    p = welch(*map(_accuracies, best)).p
    who = f"{_label(min(best, key=digits.index))} wins" if p < SIGNIFICANT else "nobody wins"
    return f"{text}. Digits: {who}; {', '.join(values)} (p = {p:.2g})"


def report(store: Store, name: str, folder: Path) -> Sections:
    """The tables, and the verdict."""
    found = store.read()
    fits, solved = ([r for r in found if what in r] for what in ("fit", "solver"))
    digits = sorted((r for r in found if "test_accuracy" in r), key=lambda r: -mean_and_error(_accuracies(r))[0])
    tables = [
        Table(["the picture", "steps", "PSNR, dB", "seconds"], [
            [r["fit"], exact(r["steps"]), exact(r["psnr"], ".1f"), exact(sum(r["seconds"]), ".1f")] for r in fits
        ], name="picture"),
        Table(["the equation", "relative error", "seconds"], [
            [r["solver"], exact(r["error"][-1], ".1g"), exact(r["seconds"][-1], ".1f")] for r in solved
        ], name="equation"),
        Table(["digits", "optimizer", "learning rate", "damping", "test accuracy, %", "against the first (p)"], [[
            METHODS[r["settings"]["method"]].label, r["settings"]["optimizer"], exact(r["settings"]["lr"]),
            exact(r["settings"].get("damping")), estimate(_accuracies(r)),
            "" if r is digits[0] or len(_accuracies(r)) < 2 else against(_accuracies(r), _accuracies(digits[0])),
        ] for r in digits], name="digits"),
    ]  # fmt: skip
    if not digits:  # its runs are stopped before
        return {name: Section(tables)}
    caption = (
        "The picture: 64 × 64 pixels, one seed, in equal time. The equation: Burgers' wave, one seed, relative error. "
        f"Digits: {network(digits[0])}, mean ± standard error, with settings that another seed chose on held-out data; "
        f"p is Welch's. {trained(digits)}"
    )
    who = verdict({r["fit"]: r["psnr"] for r in fits}, {r["solver"]: r["error"][-1] for r in solved}, digits)
    return {name: Section([*tables, caption], who)}


STUDIES = {
    "bench": Study(
        "what to look at first: a picture, an equation and digits; two minutes", _run, report, BenchOptions(),
        smoke="--steps 2 --seconds 0.1 --epochs 1 --seeds 2 --device cpu",
    )
}  # fmt: skip
