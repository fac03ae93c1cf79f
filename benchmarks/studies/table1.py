"""The paper's Table 1, and the corrections beside it: accuracy and slope over batch sizes, after a hundred epochs."""

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..core.progress import console, run_all
from ..core.store import Result, Store
from ..core.study import Sections, Study
from ..data import Dataset
from ..images.ensemble import Ensemble, Loops, epoch_orders
from ..images.run import Grid, ImageRun, add_arguments, expand
from ..images.train import IMAGES
from ..methods import DEFAULT
from .batch_size import SIZES, caption, draw, table
from .comparison import PAPERS
from .images import network

#: From the largest batch on, which is the soonest done.
_PAPER = {**PAPERS, "method": DEFAULT, "batch_size": SIZES[::-1], "epochs": 100, "seeds": 5}
PRESETS: dict[str, Grid] = {
    "paper": _PAPER,
    "reduced": {**_PAPER, "epochs": 20, "seeds": 3},
    "smoke": {**_PAPER, "data": "digits", "method": ["none", "affine-like"], "epochs": 1, "seeds": 2},
}
#: Steps that are timed, behind some that warm up.
_WARM_UP, _TIMED = 3, 10


def _run(options: argparse.Namespace, store: Store) -> None:
    runs = expand([PRESETS[options.preset]], vars(options))
    waiting = [run for run in runs if not store.has(run.key(), run.computes())]
    console.print(f"{len(runs) - len(waiting)} of {len(runs)} cells are there")
    if waiting:
        hours = _estimate(waiting, IMAGES.load(waiting[0], options.download)) / 3600
        console.print(f"the other {len(waiting)} will take about {hours:.2g} hours of training here")
    if not options.estimate:
        run_all(runs, IMAGES, store, download=options.download)


def _estimate(runs: Sequence[ImageRun], data: Dataset) -> float:
    """Seconds that runs will take, from a few steps of every method at every batch size."""
    found: dict[tuple[str, int], float] = {}
    for run in runs:
        if (key := (run.method, run.batch_size)) not in found:
            found[key] = _seconds_per_step(run, data)
    return sum(found[run.method, run.batch_size] * IMAGES.steps(run, data) for run in runs)


def _seconds_per_step(run: ImageRun, data: Dataset) -> float:
    trainer = Ensemble(run, data) if run.backend == "ensemble" else Loops(run, data)
    order = next(epoch_orders(replace(run, epochs=1), len(data.train_labels))).to(data.train_inputs.device)
    steps = order.unbind(1)[: _WARM_UP + _TIMED]
    for index in steps[:_WARM_UP]:
        trainer.step(index)
    start = time.perf_counter()
    losses = [trainer.step(index) for index in steps[_WARM_UP:]]
    torch.stack(losses).sum().item()  # waits for the device
    return (time.perf_counter() - start) / len(losses)


def report(store: Store, name: str, folder: Path) -> Sections:
    """A table and a figure for every preset of which there are cells."""
    sections: Sections = {}
    for preset, grid in PRESETS.items():
        same = partial(_belongs, grid)
        if results := list(filter(same, store.read())):
            own = name if preset == "paper" else f"{name}-{preset}"
            heading = f"{network(results[0]).rpartition(',')[0]}, {grid['epochs']} epochs: the paper's Table 1"
            draw(results, heading, folder / f"{own}.png", paper=True)
            planned = [(run.method, run.activation, run.batch_size) for run in expand([grid], {})]
            there = {tuple(r["settings"][key] for key in ("method", "activation", "batch_size")) for r in results}
            share = f"{len(there & set(planned))} of the preset's {len(planned)} cells are there."
            drawn = "In the figure the paper's lines are dotted."
            text = f"{table(results, planned)}\n\n{caption(results)} {share} {drawn}"
            sections[own] = f"**{heading}**\n\n{text}"
    return sections


def _belongs(grid: Grid, result: Result) -> bool:
    """Whether a result is of a preset, whatever images it was run on."""
    settings = result["settings"]
    wanted: dict[str, Any] = {"epochs": grid["epochs"], "seeds": list(range(grid["seeds"]))}
    return all(settings[name] == value for name, value in wanted.items())


def _arguments(parser: argparse.ArgumentParser) -> None:
    add_arguments(parser, "data", "method", "activation", "batch_size", "device")
    parser.add_argument("--preset", choices=PRESETS, default="paper", help="paper: days on two cores")
    parser.add_argument(
        "--estimate", action="store_true", help="say what is there and how long the rest takes; no more"
    )


STUDIES = {"table1": Study("the paper's Table 1: accuracy and slope over batch sizes", _run, report, _arguments)}
