"""The command line: python -m benchmarks char-lm."""

import argparse
import json
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from .. import runs
from .methods import METHODS
from .model import NORMS, PRESETS
from .search import choose, dampings
from .settings import CharRun
from .text import DEFAULT, load
from .timing import step_times
from .train import train

console = Console()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give a parser this command's options."""
    parser.set_defaults(command=run)
    available = [name for name, method in METHODS.items() if method.lacks is None]
    parser.add_argument("--methods", nargs="+", default=available, metavar="NAME", help=", ".join(METHODS))
    parser.add_argument("--norms", nargs="+", default=list(NORMS), metavar="NAME", help=", ".join(NORMS))
    parser.add_argument("--lr", nargs="+", type=float, default=[3e-3], metavar="RATE")
    parser.add_argument("--damping", nargs="+", type=float, default=[1.0], help="of the methods that have one")
    parser.add_argument("--weight-decay", type=float, default=0.0, help="the same for all methods")
    parser.add_argument("--steps", nargs="+", type=int, default=[1000], help="lengths of the runs")
    parser.add_argument("--seeds", type=int, default=3, help="how many; seed k is k")
    parser.add_argument("--preset", default="small", help=", ".join(PRESETS))
    parser.add_argument("--data", default=DEFAULT, help=f"a file of text in UTF-8, or {DEFAULT}, which Python ships")
    parser.add_argument(
        "--choose", action="store_true",
        help="first seed 0 alone over all rates and dampings; the other seeds where its validation loss is lowest",
    )  # fmt: skip
    parser.add_argument("--time", action="store_true", help="train nothing; time the methods' steps in turn")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")


def run(options: argparse.Namespace) -> None:
    """Run every combination of the options; with --choose, the search and then the seeds at its choice."""
    if options.time:
        text = load(options.data).to(options.device)
        times = step_times(options.methods, options.preset, text, options.data, options.device)
        runs.write(options.out / f"time-{options.preset}-{options.device}.json", times)
        return
    if options.seeds < 1:
        raise ValueError(f"seeds is {options.seeds}; a run needs at least one.")
    folder, everything = options.out, _planned(options)
    if not options.choose:
        run_all([replace(each, seed=seed) for each in everything for seed in range(options.seeds)], folder)
        return
    search = folder / "search"
    run_all(everything, search)
    chosen = choose(everything, [_result(search, trial) for trial in everything])
    for trial in chosen:
        # Its first seed has been trained already.
        runs.write(folder / trial.filename, _result(search, trial))
    run_all([replace(trial, seed=seed) for trial in chosen for seed in range(1, options.seeds)], folder)


def _planned(options: argparse.Namespace) -> list[CharRun]:
    """Every combination, at seed 0."""
    return [
        CharRun(
            method=method,
            norm=norm,
            lr=lr,
            damping=damping,
            weight_decay=options.weight_decay,
            steps=steps,
            preset=options.preset,
            data=options.data,
            device=options.device,
        )
        for steps in options.steps
        for norm in options.norms
        for method in options.methods
        for lr in options.lr
        for damping in dampings(method, options.damping)
    ]


def _result(folder: Path, trial: CharRun) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / trial.filename).read_text())
    return found


def run_all(planned: list[CharRun], folder: Path) -> None:
    """Train what has no result file yet."""
    waiting = [each for each in planned if not (folder / each.filename).exists()]
    if len(waiting) < len(planned):
        console.print(f"{len(planned) - len(waiting)} of {len(planned)} runs are in {folder} already")
    if not waiting:
        return
    text = load(waiting[0].data).to(waiting[0].device)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        overall = progress.add_task("runs", total=len(waiting))
        for each in waiting:
            task = progress.add_task(f"{each.method}, {each.norm}, {each.lr:g}, seed {each.seed}", total=each.steps)
            history = train(each, text, tick=partial(progress.advance, task))
            result = {
                "kind": "char-lm",
                "settings": each.settings(),
                "environment": each.environment(),
                "size": asdict(each.size),
                "characters": sum(len(part) for part in text[:3]),
                "vocabulary": len(text.vocabulary),
                **asdict(history),
            }
            runs.write(folder / each.filename, result)
            progress.remove_task(task)
            progress.advance(overall)
