"""Time and memory of layers, training steps and the ensemble trainer; in another precision, or compiled, if asked."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from ..core.runs import DEVICE, measure
from ..core.store import Result, Store
from ..core.study import Options, Recipe, Sections, Study
from ..core.tables import Section, machine
from .suites import SUITES
from .timing import setup, table

DTYPES = {"float32": None, "bfloat16": torch.bfloat16}
MODES = {"eager": None, "compiled": "default", "graphs": "reduce-overhead"}


@dataclass
class SpeedOptions(Options):
    """Options of this study."""

    data: str = "fake"
    """data set of the trainer comparison"""
    only: tuple[str, ...] = tuple(SUITES)
    """these measurements"""
    device: str = DEVICE
    """cpu or cuda"""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """of forward passes, by autocast"""
    mode: Literal["eager", "compiled", "graphs"] = "eager"
    """how forward passes of linear layers and language models are run"""
    preset: str = "small"
    """size of the language models"""
    rounds: int | None = None
    """of every timing at most, to see that it runs"""


def _run(options: SpeedOptions, store: Store) -> None:
    if unknown := set(options.only) - SUITES.keys():
        raise ValueError(f"unknown measurement {min(unknown)!r}; known are {', '.join(SUITES)}.")
    how = {name: getattr(options, name) for name in ("device", "dtype", "mode", "preset")}
    usual = {"device": "cpu", "dtype": "float32", "mode": "eager", "preset": "small"}
    other = [value for name, value in how.items() if value != usual[name]]
    measure(store, {"-".join([name, *other]): partial(_measured, name, options, how) for name in options.only})


def _measured(name: str, options: SpeedOptions, how: dict[str, str]) -> Result:
    given = {**how, "dtype": DTYPES[options.dtype], "mode": MODES[options.mode], "rounds": options.rounds}
    with setup(**given):
        return {**SUITES[name](options.data), "how": how}


#: What the names of the rows have that a page shows of a suite with many.
WORTH = {
    "layers": r"\(512, 1024, 1024\), |\(32, 3072, 32\) first, D|training step \[3072|3×3, \(32, 64",
    "whitened": r"every 10(, rank 16)?$",
}


def report(store: Store, name: str, folder: Path) -> Sections:
    """A table for every suite."""
    sections = Sections()
    for result in store.read():
        how, asked = result.get("how", {"device": "cpu", "mode": "eager"}), ""
        if "how" in result:
            asked = f"Here on {how['device']}, {how['dtype']}, {how['mode']}, of the preset {how['preset']}. "
        # While something is compiled, memory is that of the compiler's trials.
        rows = table(result["of"], result["rows"], WORTH.get(result["key"], ""), memory=how["mode"] == "eager")
        caption = f"{result['note']} {asked}{machine(result['environment'], how['device'])}"
        sections[f"{name}-{result['key']}"] = Section([rows, caption])
    return sections


STUDIES = {
    "speed": Study(
        "time and memory of corrected layers and of the ensemble trainer", _run, report, SpeedOptions(),
        makes=[
            Recipe(0.7),
            Recipe(0.1, "gpu-speed", ("--preset gpu --dtype bfloat16 --device cuda --only layers whitened",)),
        ],
        data="images", page="docs/results/costs.md",
    )
}  # fmt: skip
