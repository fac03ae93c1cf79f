"""Trials of settings, trained side by side: the members of one ensemble, each with a rate and a decay of its own."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.func import vmap

from .data import Dataset
from .runs import Run
from .trainer import Ensemble, History, Tick, build_optimizer, follow, held_out, set_rate, take


class Trials(Ensemble):
    """An ensemble whose members start alike and see the same batches, and differ in rate and weight decay.

    Args:
        runs: of one seed each, alike in everything but lr and weight_decay.
        data: what they train on.
    """

    def __init__(self, runs: Sequence[Run], data: Dataset) -> None:
        if len({family(run) for run in runs}) != 1 or len(runs[0].seeds) != 1:
            raise ValueError("trials that train side by side have one seed and differ in rate and weight decay alone.")
        super().__init__(replace(runs[0], seeds=runs[0].seeds * len(runs)), data)
        self._captures = False
        self.runs = runs
        # A view of every member's share: each optimizer steps on its own, in the memory that vmap reads.
        self.members = [
            [stacked.detach()[number] for stacked in self.parameters.values()] for number in range(len(runs))
        ]
        method = runs[0].make_method()
        self.member_optimizers = [
            build_optimizer(run, method, views) for run, views in zip(runs, self.members, strict=True)
        ]

    def set_rate(self, progress: float) -> None:
        """Set every member's rate for a moment of the run."""
        for run, optimizer in zip(self.runs, self.member_optimizers, strict=True):
            set_rate(run, optimizer, progress)

    def _eager_step(self, index: Tensor) -> Tensor:
        inputs, labels = take(self.data, index[0])
        losses: Tensor = vmap(self._loss, in_dims=(0, 0, None, None))(self.parameters, self.buffers, inputs, labels)
        gradients = torch.autograd.grad(losses.sum(), list(self.parameters.values()))
        for number, (views, optimizer) in enumerate(zip(self.members, self.member_optimizers, strict=True)):
            for view, gradient in zip(views, gradients, strict=True):
                # Fused optimizers read a gradient as if it were laid out as its parameter is.
                view.grad = gradient[number].contiguous()
            optimizer.step()
        return losses.detach()


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
