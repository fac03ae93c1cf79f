"""The command line: python -m benchmarks isometry."""

import argparse
import re
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from .. import data, runs
from . import depth, training

PARTS = ("depth", "training")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give a parser this command's options."""
    parser.set_defaults(command=run)
    parser.add_argument("--only", choices=PARTS, default=None, help="random networks by depth, or trained ones")
    parser.add_argument("--activations", nargs="+", default=list(training.ACTIVATIONS), metavar="NAME")
    parser.add_argument("--steps", type=int, default=200, help="of training")
    parser.add_argument("--width", type=int, default=training.WIDTH, help="of the hidden layers that are trained")


def run(options: argparse.Namespace) -> None:
    """Measure what has no result file yet."""
    if unknown := set(options.activations) - set(training.ACTIVATIONS):
        raise ValueError(f"unknown activation {min(unknown)!r}; known are {', '.join(training.ACTIVATIONS)}.")
    for name in ("steps", "width"):
        if getattr(options, name) < 1:
            raise ValueError(f"{name} is {getattr(options, name)}; it must be positive.")
    by_depth = options.out / "depth.json"
    if options.only != "training" and not by_depth.exists():
        Console().print("random networks …")
        runs.write(by_depth, depth.measure())
    if options.only != "depth":
        _train(options)


def _train(options: argparse.Namespace) -> None:
    name = runs.public_name(options.data)
    waiting: dict[str, Path] = {}
    for activation in options.activations:
        slug = re.sub(r"[^a-z0-9.]+", "-", f"training-{name}-{activation}-{options.width}-{options.steps}".lower())
        if not (options.out / f"{slug}.json").exists():
            waiting[activation] = options.out / f"{slug}.json"
    if not waiting:
        return
    tensors = data.load(options.data, options.download).to("cpu", torch.float32)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as progress:
        for activation, path in waiting.items():
            task = progress.add_task(activation, total=options.steps)
            tick = partial(progress.advance, task)
            runs.write(path, training.run(activation, tensors, name, options.steps, options.width, tick))
