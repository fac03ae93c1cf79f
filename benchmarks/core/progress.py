"""The one loop that runs what has no result yet, and shows how far it is."""

import argparse
import os
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from .log import Note, noted
from .run import Run, environment
from .store import Store
from .table import grouped

console = Console()

#: Called after every step with nothing, so that a progress bar can move.
Tick = Callable[[], None]


R = TypeVar("R", bound=Run)


class Kind(NamedTuple):
    """How runs of one kind are made."""

    load: Callable[[Any, bool], Any]  # (run, whether to download) → data of that run and all others of its command
    steps: Callable[[Any, Any], int]  # (run, data) → how many steps it takes
    family: Callable[[Any], Hashable]  # run → what runs that train side by side have in common
    #: (runs of one family, data, tick, note) → results
    train: Callable[[list[Any], Any, Tick, Note], Sequence[dict[str, Any]]]
    score: Callable[[dict[str, Any]], float | None]  # result → what choosing settings reads; None if it broke down
    alike: Callable[[Any], Hashable]  # run → what runs have in common whose steps take as long
    pace: Callable[[Any, Any], float]  # (run, data) → seconds of a step


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give a parser the options of every study that trains by `run_all`."""
    parser.add_argument("--download", action="store_true", help="fetch CIFAR-10 or tinyshakespeare into ./data")
    parser.add_argument(
        "--log", choices=["tensorboard"], help="also write losses while they train, to OUT/NAME.tensorboard"
    )


def run_all(
    runs: Sequence[R], kind: Kind, store: Store, *,
    part: str | None = None, download: bool = False, only_estimate: bool = False,
) -> None:  # fmt: skip
    """Run what the store lacks, under torchrun this rank's share of it; of runs that choose settings keep the score.

    It begins by saying how long that will take, and goes no further if it is to estimate only.
    """
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    mine = runs[rank::world]
    there = store.computed().items()
    waiting = [run for run in mine if (run.key(part), run.computes()) not in there]
    console.print(f"{len(mine) - len(waiting)} of {len(mine)} runs are in {store.path} already")
    if not waiting:
        return
    if waiting[0].device == "cuda" and world > 1:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)))
    data = kind.load(waiting[0], download)
    console.print(f"the other {len(waiting)} will take about {_hours(waiting, kind, data)} of training here")
    if only_estimate:
        return
    families = grouped(waiting, kind.family)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        overall = progress.add_task("runs", total=len(waiting))
        for family in families.values():
            settings = family[0].settings()
            shown = [str(settings[name]) for name in ("method", "activation", "norm", "batch_size") if name in settings]
            shown.append(f"{len(family)} runs" if len(family) > 1 else f"{settings['lr']:g}")
            task = progress.add_task(", ".join(shown), total=kind.steps(family[0], data))
            with noted(store.log and store.log / "-".join([*shown, family[0].key(part)])) as note:
                results = kind.train(family, data, partial(progress.advance, task), note)
            for run, result in zip(family, results, strict=True):
                kept = result if part is None else {"part": part, "score": kind.score(result)}
                about = {"computes": run.computes(), "settings": run.settings(), "environment": environment()}
                store.add(run.key(part), {**about, **kept})
            progress.remove_task(task)
            progress.advance(overall, len(family))


def _hours(runs: Sequence[R], kind: Kind, data: Any) -> str:
    """How long runs will take, by the pace of some steps of every kind of them."""
    total = sum(
        kind.pace(alike[0], data) * sum(kind.steps(run, data) for run in alike)
        for alike in grouped(runs, kind.alike).values()
    )
    return f"{total / 3600:.2g} hours" if total > 3600 else f"{total / 60:.2g} minutes"


def measure(store: Store, wanted: dict[str, Callable[[], dict[str, Any]]], *, again: bool = False) -> None:
    """Make those of the wanted measurements, by key, that are not there yet; or all of them again."""
    for key, measured in wanted.items():
        if again or not store.has(key):
            console.print(f"measuring {key} …")
            store.add(key, {**measured(), "environment": environment()})
