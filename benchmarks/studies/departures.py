"""What the paper's Table 1 leaves open, one thing at a time: whether another reading brings its accuracies."""

from pathlib import Path

from ..core.store import Result
from ..core.study import Recipe, apart
from ..core.table import Cell, Section, Table, estimate, in_order, machine, spread, welch
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
    rows, there = [], {departure for departure, _ in found}
    for departure in (name for name in [None, *DEPARTURES] if name in there):
        cells = [_cell(found, departure, method) for method in methods]
        rows.append([DEPARTURES[departure].label if departure else "as in the tables above", *cells])
    heading = f"{subject(results)}, batch {settings['batch_size']}, {settings['activation']}"
    caption = (
        f"Test accuracy in per cent, {settings['optimizer']} {settings['lr']:g}, mean ± standard error over "
        f"{len(settings['seeds'])} seeds; in brackets the difference to the first row and Welch's p. "
        f"{machine(results[0]['environment'], settings['device'])}"
    )
    table = Table(["", *(METHODS[method].label for method in methods)], rows)
    return Section([f"**{heading}, {settings['epochs']} epochs**", table, caption])


def _cell(found: dict[tuple[str | None, str], list[float]], departure: str | None, method: str) -> str | Cell:
    own, base = found.get((departure, method)), found.get((None, method))
    if own is None:
        return ""
    if departure is None or base is None:
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
