"""Trials of settings, trained side by side: the members of one ensemble, each with a rate and a decay of its own."""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor
from torch.func import vmap

from .data import Dataset
from .runs import Run
from .trainer import Ensemble, History, Tick, follow, held_out, take


class Trials(Ensemble):
    """An ensemble whose members start alike and see the same batches, and differ in rate and weight decay.

    Args:
        runs: of one seed each, alike in everything but lr and weight_decay.
        data: what they train on.
    """

    def __init__(self, runs: Sequence[Run], data: Dataset) -> None:
        if len({family(run) for run in runs}) != 1 or len(runs[0].seeds) != 1:
            raise ValueError("trials that train side by side have one seed and differ in rate and weight decay alone.")
        super().__init__(replace(runs[0], seeds=runs[0].seeds * len(runs)), data, member_runs=runs)

    def _losses_at(self, index: Tensor) -> Tensor:
        inputs, labels = take(self.data, index[0])
        losses: Tensor = vmap(self._loss, in_dims=(0, 0, None, None))(self.parameters, self.buffers, inputs, labels)
        return losses


def family(run: Run) -> Run:
    """What trials that train side by side have in common."""
    return replace(run, lr=1.0, weight_decay=0.0)


def train_trials(runs: Sequence[Run], data: Dataset, *, tick: Tick = lambda: None) -> list[History]:
    """Train runs side by side; each gets the history that `train` gives it alone, but for its seconds, a share of all.

    Args:
        runs: as in `Trials`.
        data: the data set.
        tick: called after every step.
    """
    trainer = Trials(runs, held_out(data) if runs[0].validation else data)
    together = follow(trainer, tick, max_steps=None)
    return [
        History(
            train_loss=[[epoch[number]] for epoch in together.train_loss],
            test_accuracy=[[epoch[number]] for epoch in together.test_accuracy],
            seconds=[seconds / len(runs) for seconds in together.seconds],
            step_losses=[[step[number]] for step in together.step_losses],
        )
        for number in range(len(runs))
    ]
