"""Time and memory of layers, training steps and optimizers; in another precision, or compiled, if asked."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ..core.runs import check_known, measure
from ..core.store import Result, Store
from ..core.study import Recipe, Sections, Study
from ..core.tables import Cell, Row, Section, Table, exact, machine
from .suites import SUITES
from .timing import ASKED, SpeedOptions

#: What the name of a measurement need not say.
_USUAL = {"device": "cpu", "dtype": "float32", "preset": "small"}


def _run(options: SpeedOptions, store: Store) -> None:
    check_known("measurement", options.only, SUITES)
    how = {name: getattr(options, name) for name in _USUAL}
    other = [value for name, value in how.items() if value != _USUAL[name]]

    def measured(name: str) -> Result:
        return {**SUITES[name](), "how": how}

    ASKED.set(options)
    measure(store, {"-".join([name, *other]): partial(measured, name) for name in options.only or SUITES})


def report(store: Store, name: str, folder: Path) -> Sections:
    """A table for every suite."""
    sections = Sections()
    for result in store.read():
        how, asked = result.get("how", _USUAL), ""
        if "how" in result:
            asked = f"Here on {how['device']}, {how['dtype']}, eager, of the preset {how['preset']}. "
        caption = f"{result['note']} {asked}{machine(result['environment'], how['device'])}"
        table = Table([result["of"], "time", "quartiles", "peak memory"], [*map(_cells, result["rows"])])
        sections[f"{name}-{result['key']}"] = Section([table, caption])
    return sections


def _cells(row: Mapping[str, Any]) -> Row:
    (low, high), middle = row["time_ratio"]["quartiles"], row["time_ratio"]["median"]
    time = Cell(f"{middle:.3f}", {"": middle, "n": row["time_ratio"]["rounds"]})
    quartiles = Cell(f"{low:.3f} to {high:.3f}", {"low": low, "high": high})
    return [row["what"], time, quartiles, exact(row["memory_ratio"], ".3f")]


STUDIES = {
    "speed": Study(
        "time and memory of corrected layers and of optimizers", _run, report, SpeedOptions(),
        makes=[
            Recipe(0.7),
            Recipe(0.1, "gpu-speed", ("--preset gpu --dtype bfloat16 --device cuda --only layers whitened",)),
        ],
        smoke="--preset tiny --rounds 1 --only input-scaled --device cpu", page="docs/results/costs.md",
    )
}  # fmt: skip
