"""Training runs of networks for images, alone or side by side, and what is kept of them."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..core.runs import NOBODY, Kind, Watch
from ..core.table import mean_and_error
from ..data import Dataset, load
from .ensemble import Ensemble, Loops, epoch_orders, family
from .networks import depart
from .run import ImageRun


@dataclass
class History:
    """What a run leaves behind, by epoch; inner lists run over seeds."""

    train_loss: list[list[float]] = field(default_factory=list)  # mean over the epoch's steps
    test_accuracy: list[list[float]] = field(default_factory=list)  # per cent
    seconds: list[float] = field(default_factory=list)  # of training, evaluation left out
    step_losses: list[list[float]] = field(default_factory=list)  # every step's


def held_out(data: Dataset) -> Dataset:
    """The training set split in nine tenths to train on and one to choose settings by."""
    order = torch.randperm(len(data.train_labels), generator=torch.Generator().manual_seed(0))
    order = order.to(data.train_labels.device)
    train, test = order.split([len(order) - len(order) // 10, len(order) // 10])
    return Dataset(data.train_inputs[train], data.train_labels[train], data.train_inputs[test], data.train_labels[test])


def train(
    run: ImageRun, data: Dataset, watch: Watch = NOBODY, *,
    trials: Sequence[ImageRun] = (), max_steps: int | None = None,
) -> History:  # fmt: skip
    """Train every seed of a run, or trials in their place; `max_steps` cuts every epoch.

    Parameters have the dtype and device of the data.
    """
    data = held_out(data) if run.validation else data
    data = data if run.departure is None else depart(data, run.departure)
    trainer = Ensemble(run, data, trials) if run.backend == "ensemble" else Loops(run, data)
    history = History()
    for epoch, order in enumerate(epoch_orders(trainer.run, len(data.train_labels))):
        start = time.perf_counter()
        losses = []
        indices = order[:, :max_steps].to(data.train_inputs.device).unbind(1)
        for number, index in enumerate(indices):
            trainer.set_rate((epoch + number / len(indices)) / run.epochs)
            losses.append(trainer.step(index))
            watch.tick()
        stacked = torch.stack(losses)
        history.step_losses += stacked.tolist()  # waits for the device, so the clock is read after it
        history.seconds.append(time.perf_counter() - start)
        history.train_loss.append(stacked.mean(0).tolist())
        history.test_accuracy.append(trainer.accuracy())
        watch.note(epoch + 1, {"train loss": history.train_loss[-1], "accuracy": history.test_accuracy[-1]})
    return history


def train_trials(runs: Sequence[ImageRun], data: Dataset, watch: Watch = NOBODY) -> list[History]:
    """Train runs of one family side by side; each gets what `train` gives it alone, its seconds are a share of all."""
    found = train(runs[0], data, watch, trials=runs)
    shares = [seconds / len(runs) for seconds in found.seconds]
    curves = (found.train_loss, found.test_accuracy, found.step_losses)
    own = ([[[each[number]] for each in curve] for curve in curves] for number in range(len(runs)))
    return [History(losses, accuracies, shares, steps) for losses, accuracies, steps in own]


def _steps_per_epoch(run: ImageRun, data: Dataset) -> int:
    samples = len(data.train_labels)
    return (samples - run.validation * (samples // 10)) // run.batch_size


def _results(runs: list[ImageRun], data: Dataset, watch: Watch) -> list[dict[str, Any]]:
    histories = [train(runs[0], data, watch)] if len(runs) == 1 else train_trials(runs, data, watch)
    steps = _steps_per_epoch(runs[0], data)
    about = {"features": data.features, "classes": data.classes, "data_hash": data.hash, "steps_per_epoch": steps}
    kept = ("train_loss", "test_accuracy", "seconds")
    return [about | {name: getattr(history, name) for name in kept} for history in histories]


#: How runs of networks for images are made.
IMAGES = Kind(
    load=lambda run, download: load(run.data, download).to(run.device, torch.float32),
    steps=lambda run, data: run.epochs * _steps_per_epoch(run, data),
    family=family,
    train=_results,
    score=lambda result: mean_and_error(result["test_accuracy"][-1])[0],
    alike=lambda run: (run.method, run.network, run.hidden, run.batch_size, len(run.seeds), run.backend),
)
