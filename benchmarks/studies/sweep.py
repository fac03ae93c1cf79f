"""Accuracy along one setting of the runs, such as width or rate: a table and a figure, a row for every method."""

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ..core.figure import bars, panels
from ..core.store import Result
from ..core.study import apart
from ..core.table import Section, estimate, machine, mean_and_error, pivot
from ..methods import METHODS
from .comparison import Report, subject

#: The setting that columns and horizontal axes are → its label there, and what reads it.
ALONG: dict[str, tuple[str, Callable[[dict[str, Any]], float]]] = {
    "width": ("width of the hidden layers", lambda s: s["hidden"][0]),
    "depth": ("hidden layers", lambda s: len(s["hidden"])),
    "batch": ("batch size", lambda s: s["batch_size"]),
    "rate": ("learning rate", lambda s: s["lr"]),
    "gain": ("factor on all parameters at first", lambda s: s["gain"]),
    "method": ("", lambda s: 0.0),
}
#: What tells panels of a figure apart, and groups of rows of a table.
_PANEL: list[Callable[[dict[str, Any], str], str]] = [
    lambda s, along: s["activation"],
    lambda s, along: s["optimizer"],
    lambda s, along: "" if along == "batch" else f"batch {s['batch_size']}",
    lambda s, along: "" if along == "depth" else f"{len(s['hidden'])} hidden",
    lambda s, along: "" if along == "width" else f"width {s['hidden'][0]}",
]
_WITHIN = "method", "activation", "optimizer", "hidden", "batch_size", "lr", "gain", "backend"


def sweep(along: str) -> Report:
    """A report of runs along a setting; where runs differ in nothing but their rate, the best of them counts."""
    return apart(partial(_section, along), *_WITHIN)


#: Panel → method → place along the setting → results.
Cells = dict[str, dict[str, dict[float, list[Result]]]]


def cells(results: list[Result], along: str) -> Cells:
    """Sort results into panels, methods and places; parts of a panel's name that all panels share are left out."""
    telling = [part for part in _PANEL if len({part(r["settings"], along) for r in results}) > 1]
    found: Cells = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    _, place = ALONG[along]
    for result in sorted(results, key=lambda r: list(METHODS).index(r["settings"]["method"])):
        s = result["settings"]
        panel = ", ".join(part(s, along) for part in telling)
        found[panel][s["method"]][float(place(s))].append(result)
    return found


def best(results: list[Result]) -> list[float]:
    """The accuracy of every seed after the last epoch, at the best of the rates that there are."""
    return max((r["test_accuracy"][-1] for r in results), key=lambda seeds: mean_and_error(seeds)[0])


def _section(along: str, results: list[Result], name: str, folder: Path) -> Section:
    found, (label, _), settings = cells(results, along), ALONG[along], results[0]["settings"]
    rows = {(panel, method): [*([panel] * (len(found) > 1)), METHODS[method].label]
            for panel, methods in found.items() for method in methods}  # fmt: skip
    at = {((panel, method), place): runs for panel, method in rows for place, runs in found[panel][method].items()}
    columns = {place: f"{place:g}" if label else "%" for place in sorted({place for _, place in at})}
    head = [*([""] * (len(found) > 1)), "method"]
    table = pivot(head, rows, columns, {key: estimate(best(runs)) for key, runs in at.items()})
    title = f"{subject(results)}, {settings['epochs']} epochs"
    if label:
        title += f": accuracy by {label}"
        _figure(found, label, title, folder / f"{name}.png")
    where = "a tenth of the training set, held out" if settings.get("validation") else "the test set"
    rates = max(map(len, at.values()))
    chosen = f", each at the best of {rates} rates" if rates > 1 else ""
    rate = "" if len({r["settings"]["lr"] for r in results}) > 1 else f", {settings['optimizer']} {settings['lr']:g}"
    caption = (
        f"Accuracy on {where} in per cent after {settings['epochs']} epochs{rate}{chosen}, mean ± standard error over "
        f"{len(settings['seeds'])} seeds. {machine(results[0]['environment'], settings['device'])}"
    )
    return Section([f"**{title}**", table, caption])


def _figure(found: Cells, label: str, title: str, path: Path) -> None:
    with panels(list(found), title, path, xlabel=label, xscale="log", ylabel="accuracy, %") as axes:
        for axis, methods in zip(axes, found.values(), strict=True):
            for name, by_place in methods.items():
                bars(axis, {place: best(by_place[place]) for place in sorted(by_place)}, METHODS[name])
