"""Command line: python -m benchmarks {quick,train,tune,speed,divergence,attention,char-lm,isometry,plane,report}."""

import argparse
import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from . import attention, divergence, plane, runs, speed, tune
from .char_lm import command as char_lm
from .data import DATA, load
from .isometry import command as isometry
from .methods import ACTIVATIONS, DEFAULT, METHODS, natural_backend
from .networks import CONVOLUTIONAL
from .report import insert, report
from .runs import BACKENDS, OPTIMIZERS, SCHEDULES, Run
from .trainer import train
from .trials import family, train_trials

console = Console()

#: What `tune` compares by default: both sides of the question, and the plain network.
TUNED = ["none", "layernorm", "l2norm", "affine-like", "proportional", "batch-ideal"]


def main(arguments: list[str] | None = None) -> int:
    """Parse the command line and run; a mistake in it is one line on standard error."""
    options = _parser().parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    try:
        options.command(options)
    except (ValueError, FileNotFoundError) as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; finished runs are kept, the same command resumes.", file=sys.stderr)
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    quick = commands.add_parser("quick", help="all methods on the embedded digits, with table and figure; minutes")
    quick.set_defaults(command=_quick)

    training = commands.add_parser("train", help="train methods on a data set; one JSON per run, finished runs skipped")
    training.set_defaults(command=_train)
    training.add_argument("--methods", nargs="+", default=DEFAULT, metavar="NAME", help=", ".join(METHODS))
    training.add_argument("--activations", nargs="+", default=list(ACTIVATIONS), metavar="NAME")
    training.add_argument("--hidden", nargs="+", type=int, default=[32, 32], metavar="WIDTH")
    training.add_argument("--network", default="mlp", help=", ".join(("mlp", *CONVOLUTIONAL)))
    training.add_argument("--batch-size", nargs="+", type=int, default=[32], metavar="SIZE")
    training.add_argument("--optimizer", default="adam", help=", ".join(OPTIMIZERS))
    training.add_argument("--lr", nargs="+", type=float, default=[1e-3], metavar="RATE", help="several: a sweep")
    training.add_argument("--schedule", default="constant", help=", ".join(SCHEDULES))
    training.add_argument("--epochs", type=int, default=20)
    training.add_argument("--seeds", type=int, default=5, help="how many; seed k is k")
    training.add_argument("--validation", action="store_true", help="measure accuracy on a tenth of the training set")
    training.add_argument(
        "--rescaled", nargs="+", type=float, default=[None], metavar="SIGMA",
        help="start all seeds from one network, its hidden units rescaled at random by so much",
    )  # fmt: skip
    training.add_argument("--backend", default=None, help=f"{', '.join(BACKENDS)}; what fits the method by default")
    training.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")

    tuning = commands.add_parser("tune", help="choose every method's learning rate on a validation split, then train")
    tuning.set_defaults(command=_tune)
    tuning.add_argument("--methods", nargs="+", default=TUNED, metavar="NAME", help=", ".join(METHODS))
    tuning.add_argument("--activations", nargs="+", default=list(ACTIVATIONS), metavar="NAME")
    tuning.add_argument("--optimizers", nargs="+", default=list(OPTIMIZERS), metavar="NAME")
    tuning.add_argument("--search-epochs", type=int, default=4)
    tuning.add_argument(
        "--epochs", nargs="+", type=int, default=[20], help="lengths of the final runs; trials have the first"
    )
    tuning.add_argument(
        "--trials", type=int, default=0, help="trials of rate, weight decay and damping around the grid's choice"
    )
    for name, default in (("--lr", None), ("--weight-decay", [None]), ("--damping", [None])):
        tuning.add_argument(
            name, nargs="+", type=float, default=default,
            help="with --lr: choose from this grid, at full length, instead of the built-in rates and trials",
        )  # fmt: skip
    tuning.add_argument("--seeds", type=int, default=5)
    tuning.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")

    timing = commands.add_parser("speed", help="time and memory of corrected layers and of the ensemble trainer")
    timing.set_defaults(command=_speed)
    timing.add_argument("--data", default="fake", help="data set of the trainer comparison")
    timing.add_argument("--only", choices=list(speed.SUITES), default=None)

    diverging = commands.add_parser("divergence", help="what one step of every method does to the activations")
    diverging.set_defaults(command=_divergence)

    attending = commands.add_parser("attention", help="the ideal logit step: alignment, price, a small training")
    attending.set_defaults(command=_attention)

    characters = commands.add_parser("char-lm", help="optimizers and normalisers on a small language model")
    char_lm.add_arguments(characters)

    orthogonal = commands.add_parser("isometry", help="isometry of random and trained networks, layer by layer")
    isometry.add_arguments(orthogonal)

    drawing = commands.add_parser("plane", help="what normalisers make of a thousand points of the plane")
    drawing.set_defaults(command=_plane)

    reporting = commands.add_parser("report", help="tables and figures from result files")
    reporting.set_defaults(command=_report)
    reporting.add_argument("--readme", type=Path, help="also fill this file's results sections")

    for command in (training, tuning, diverging, orthogonal):
        command.add_argument("--data", default="digits", help=f"{', '.join(DATA)}; imagefolder as imagefolder:PATH")
        command.add_argument("--download", action="store_true", help="let torchvision fetch the data set")

    folders = (
        (quick, "runs"),
        (training, "runs/train"),
        (tuning, "runs/tuned"),
        (timing, "runs/speed"),
        (diverging, "runs/divergence"),
        (attending, "runs/attention"),
        (characters, "runs/char-lm"),
        (orthogonal, "runs/isometry"),
        (drawing, "runs/normalisers-plane"),
        (reporting, "runs"),
    )
    for command, out in folders:
        command.add_argument("--out", type=Path, default=Path(out), help="folder of the result files")
        command.add_argument("--threads", type=int, default=None, help="CPU threads; torch's choice by default")
    return parser


def _quick(options: argparse.Namespace) -> None:
    digits = [Run("digits", method, activation) for activation in ACTIVATIONS for method in DEFAULT]
    # The Jacobian path is there for its price: one seed and one epoch show it.
    priced = [replace(run, backend="jacobian", seeds=(0,), epochs=1) for run in digits if run.activation == "tanh"]
    run_all([*digits, *priced], options.out / "digits", download=False)
    show(options.out)


def _train(options: argparse.Namespace) -> None:
    planned = [
        Run(
            data=options.data,
            method=method,
            activation=activation,
            hidden=tuple(options.hidden),
            batch_size=batch_size,
            optimizer=options.optimizer,
            lr=lr,
            schedule=options.schedule,
            epochs=options.epochs,
            seeds=tuple(range(options.seeds)),
            backend=options.backend or natural_backend(method),
            device=options.device,
            validation=options.validation,
            rescaled=rescaled,
            network=None if options.network == "mlp" else options.network,
        )
        for rescaled in options.rescaled
        for lr in options.lr
        for batch_size in options.batch_size
        for activation in options.activations
        for method in options.methods
    ]
    run_all(planned, options.out, options.download)


def _tune(options: argparse.Namespace) -> None:
    final = [
        Run(
            data=options.data,
            method=method,
            backend=natural_backend(method),
            activation=activation,
            optimizer=optimizer,
            schedule="cosine",
            epochs=options.epochs[0],
            seeds=tuple(range(options.seeds)),
            device=options.device,
        )
        for activation in options.activations
        for optimizer in options.optimizers
        for method in options.methods
    ]
    if options.lr:
        grid = tune.grid(final, options.lr, options.weight_decay, options.damping)
        run_all(grid, options.out / "trials", options.download)
        chosen = tune.choose(final, runs.read(options.out / "trials"))
    else:
        run_all(tune.search(final, options.search_epochs), options.out / "search", options.download)
        chosen = tune.choose(final, runs.read(options.out / "search"))
    if options.trials and not options.lr:
        run_all(tune.trials(chosen, options.trials), options.out / "trials", options.download)
        chosen = tune.choose(final, runs.read(options.out / "trials"))
    lengths = [replace(run, epochs=epochs) for epochs in options.epochs for run in chosen]
    run_all(lengths, options.out, options.download, kind="trials" if options.trials or options.lr else "tuned")


def _speed(options: argparse.Namespace) -> None:
    for name in [options.only] if options.only else speed.SUITES:
        console.print(f"measuring {name} …")
        runs.write(options.out / f"{name}.json", speed.SUITES[name](options.data))
    show(options.out.parent)


def _divergence(options: argparse.Namespace) -> None:
    result = divergence.compare(options.data, download=options.download)
    runs.write(options.out / "divergence.json", result)
    show(options.out.parent)


def _attention(options: argparse.Namespace) -> None:
    runs.write(options.out / "attention.json", attention.measure())
    show(options.out.parent)


def _plane(options: argparse.Namespace) -> None:
    runs.write(options.out / "plane.json", plane.measure())
    show(options.out.parent)


def _report(options: argparse.Namespace) -> None:
    sections = show(options.out)
    if options.readme:
        options.readme.write_text(insert(options.readme, sections))


def show(folder: Path) -> dict[str, str]:
    """Print every table under a folder of results, and draw every figure."""
    sections = report(folder)
    for name, section in sections.items():
        print(f"\n## {name}\n\n{section}")
    for path in sorted(folder.glob("*.png")):
        print(f"figure: {path}")
    return sections


def run_all(planned: list[Run], folder: Path, download: bool, kind: str = "train") -> None:
    """Train what has no result file yet; under torchrun, this rank's share of it."""
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    mine = planned[rank::world]
    waiting = [run for run in mine if not (folder / run.filename).exists()]
    if len(waiting) < len(mine):
        console.print(f"{len(mine) - len(waiting)} of {len(mine)} runs are in {folder} already")
    if not waiting:
        return
    if waiting[0].device == "cuda" and world > 1:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)))
    data = load(waiting[0].data, download).to(waiting[0].device, torch.float32)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    # Runs of one seed that differ in rate and decay alone train side by side.
    batches: dict[Run, list[Run]] = {}
    for run in waiting:
        together = len(run.seeds) == 1 and run.backend == "ensemble"
        batches.setdefault(family(run) if together else run, []).append(run)
    with Progress(*columns, console=console) as progress:
        overall = progress.add_task("runs", total=len(waiting))
        for batch in batches.values():
            first = batch[0]
            samples = len(data.train_labels) - first.validation * (len(data.train_labels) // 10)
            steps = samples // first.batch_size
            name = f"{first.method}, {first.activation}, " + (
                f"{first.lr:g}" if len(batch) == 1 else f"{len(batch)} runs"
            )
            task = progress.add_task(name, total=first.epochs * steps)
            tick = partial(progress.advance, task)
            histories = [train(first, data, tick=tick)] if len(batch) == 1 else train_trials(batch, data, tick=tick)
            for run, history in zip(batch, histories, strict=True):
                runs.write(
                    folder / run.filename,
                    {
                        "kind": kind,
                        "settings": run.settings(),
                        "environment": runs.environment(),
                        "features": data.features,
                        "classes": data.classes,
                        "steps_per_epoch": steps,
                        "train_loss": history.train_loss,
                        "test_accuracy": history.test_accuracy,
                        "seconds": history.seconds,
                    },
                )
            progress.remove_task(task)
            progress.advance(overall, len(batch))


if __name__ == "__main__":
    sys.exit(main())
