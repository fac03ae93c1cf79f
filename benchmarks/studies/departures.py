"""What the paper's Table 1 leaves open, one thing at a time: whether another reading brings its accuracies."""

from pathlib import Path

from ..core.store import Result
from ..core.study import Recipe, apart
from ..core.table import Cell, Section, estimate, in_order, machine, pivot, spread, welch
from ..images.departures import DEPARTURES
from ..images.run import Grid
from ..methods import METHODS, having
from .comparison import PAPERS, Presets, grid_study, subject

_GRID: Grid = {
    **PAPERS, "method": having("departures"), "activation": ["tanh"], "batch_size": 128,
    "departure": [None, *DEPARTURES],
}  # fmt: skip
_SMOKE = {"data": "fake", "method": ["affine-like"], "epochs": 1, "seeds": 2}
_REDUCED = {"method": ["none", "affine-like"], "seeds": 3}
PRESETS: Presets = {
    "paper": [{**_GRID, "epochs": 100}],
    "reduced": [{**_GRID, **_REDUCED}],
    "smoke": [{**_GRID, **_SMOKE}],
}


def section(results: list[Result], name: str, folder: Path) -> Section:
    """A row for every departure that is there."""
    settings = results[0]["settings"]
    methods = in_order(METHODS, (r["settings"]["method"] for r in results))
    found = {(r["settings"].get("departure"), r["settings"]["method"]): r["test_accuracy"][-1] for r in results}
    there = {departure for departure, _ in found}
    labels = {None: "as in the tables above"} | {name: departure.label for name, departure in DEPARTURES.items()}
    rows = {name: [label] for name, label in labels.items() if name in there}
    cells = {key: _cell(own, found.get((None, key[1])) if key[0] else None) for key, own in found.items()}
    heading = f"{subject(results)}, batch {settings['batch_size']}, {settings['activation']}"
    caption = (
        f"Test accuracy in per cent, {settings['optimizer']} {settings['lr']:g}, mean ± standard error over "
        f"{len(settings['seeds'])} seeds; in brackets the difference to the first row and Welch's p. "
        f"{machine(results[0]['environment'], settings['device'])}"
    )
    table = pivot([""], rows, {method: METHODS[method].label for method in methods}, cells)
    return Section([f"**{heading}, {settings['epochs']} epochs**", table, caption])


def _cell(own: list[float], base: list[float] | None) -> Cell:
    if base is None:
        return estimate(own)
    difference, p = welch(own, base)
    text = f"{estimate(own).text} ({difference:+.2f}, p {p:.2g})"
    return Cell(text, {**spread(own), "difference": difference, "p": p})


_REPORT = apart(section, "departure", "method", "backend")
_LONG = "--preset paper --departure none centred jpeg --methods affine-like"
STUDIES = {
    "departures": grid_study(
        "what the paper's Table 1 leaves open, read otherwise", PRESETS, _REPORT, page="docs/results/mlp.md",
        makes=[Recipe(0.4, options=("--preset reduced",)), Recipe(0.7, "departures-long", (_LONG,))],
    )
}  # fmt: skip
