"""All seeds of a run as one batched program, and the plain loops that it must agree with."""

import math
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import chain, repeat
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, stack_module_state, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.optim import Optimizer

from adiv_optim import attach

from .core.runs import NOBODY, Kind, Watch, set_rates
from .data import Dataset, load
from .methods import Method
from .optimizers import ELEMENTWISE, OF_PARAMETERS
from .problems.images import ImageRun, build_models, depart, held_out, take

#: Steps after which an ensemble is compiled: it takes as long as some thousand of them, and halves or thirds the rest.
COMPILE_AFTER = 1000
#: Any of these will do.
COMPILERS = ("g++", "clang++", "cl")


def build_optimizer(run: ImageRun, method: Method, parameters: Any) -> Optimizer:
    """Return the method's own optimizer, or the run's."""
    extra = {} if run.weight_decay is None else {"weight_decay": run.weight_decay}
    make = method.optimizer if callable(method.optimizer) else OF_PARAMETERS[run.optimizer]
    return make(parameters, lr=run.lr * method.lr_factor, **extra)


def epoch_orders(run: ImageRun, samples: int) -> Iterator[Tensor]:
    """Yield for every epoch the order of the samples: shape (seeds, steps, batch size)."""
    seeds = run.seeds if run.rescaled is None else run.seeds[:1] * len(run.seeds)
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    steps = samples // run.batch_size
    if steps == 0:
        raise ValueError(f"batch_size is {run.batch_size}, but the training set has only {samples} samples.")
    for _ in range(run.epochs):
        orders = [torch.randperm(samples, generator=generator) for generator in generators]
        yield torch.stack([order[: steps * run.batch_size].view(steps, run.batch_size) for order in orders])


def family(run: ImageRun) -> ImageRun:
    """What runs that train side by side have in common: of one seed, all but rate and weight decay."""
    alone = len(run.seeds) > 1 or run.backend != "ensemble"
    return run if alone else replace(run, lr=1.0, weight_decay=0.0)


def set_rate(run: ImageRun, optimizers: Sequence[Optimizer], progress: float) -> None:
    """Set the learning rates for a moment of the run, from 0 at its start to 1 at its end."""
    if run.schedule == "cosine":
        set_rates(optimizers, (1 + math.cos(math.pi * progress)) / 2)


def _wrapped(run: ImageRun, method: Method, model: nn.Module, data: Dataset) -> Optimizer:
    return method.wrap(build_optimizer(run, method, model.parameters()), model, data.train_inputs[:2])


@torch.no_grad()
def accuracy(model: nn.Module, data: Dataset) -> float:
    """Return the accuracy on the test set, in per cent."""
    model.eval()
    predicted = torch.cat([model(part).argmax(-1) for part in data.test_inputs.split(1000)])
    model.train()
    return 100 * (predicted == data.test_labels).double().mean().item()


class Ensemble:
    """The models of all seeds with their tensors stacked and run by vmap.

    One optimizer steps on the stacked tensors: Adam and SGD act elementwise, so that stacking does not mix seeds. What
    does not, or has settings of its own for every member, has an optimizer for each, on views of the stack. The only
    seed of several runs of one `family` has the same start and the same batches in all of them.
    """

    def __init__(self, runs: Sequence[ImageRun], data: Dataset) -> None:
        run, self.data = runs[0], data
        method, self.models = run.make_method(), [model for each in runs for model in build_models(each, data)]
        self._shares_batches = len(runs) > 1
        self.skeleton = deepcopy(self.models[0]).to("meta")
        if method.correction:
            attach(self.skeleton, method.correction)
        stacked, self.buffers = stack_module_state(self.models)
        self.parameters = {name: parameter.detach() for name, parameter in stacked.items()}
        for number, model in enumerate(self.models):
            for name, tensor in chain(model.named_parameters(), model.named_buffers()):
                tensor.data = (self.parameters | self.buffers)[name][number]  # its share of what vmap reads
        elementwise = run.optimizer in ELEMENTWISE and not callable(method.optimizer)
        self._by_member = self._shares_batches or method.gauge is not None or not elementwise
        if self._by_member:
            own, members = replace(method, correction=None), [each for each in runs for _ in each.seeds]
            self.optimizers = [_wrapped(*each, data) for each in zip(members, repeat(own), self.models)]
        else:
            self.optimizers = [build_optimizer(run, method, self.parameters.values())]
        each = None if self._shares_batches else 0
        self._gradients: Callable[..., Any] = vmap(grad_and_value(self._loss), in_dims=(0, 0, each, each))
        self._steps_taken = 0

    def step(self, index: Tensor) -> Tensor:
        """Take one step on the samples at `index`, (seeds, batch size), and return the losses of all members."""
        # Several runs share one batch: it is taken once.
        batch = take(self.data, index[0] if self._shares_batches else index)
        self._steps_taken += 1
        if self._steps_taken == COMPILE_AFTER:
            self._compile(*batch)
        gradients, losses = self._gradients(self.parameters, self.buffers, *batch)
        # Fused optimizers read a gradient as if it were laid out as its parameter is.
        gradients = {name: gradient.contiguous() for name, gradient in gradients.items()}
        if not self._by_member:
            for name, parameter in self.parameters.items():
                parameter.grad = gradients[name]
            self.optimizers[0].step()
            return losses
        for number, finite in enumerate(losses.isfinite().tolist()):
            if finite:  # else it has diverged: weights without magnitude have no gauge
                for name, parameter in self.models[number].named_parameters():
                    parameter.grad = gradients[name][number]
                self.optimizers[number].step()
        return losses

    def _compile(self, *batch: Tensor) -> None:
        """Compile losses and gradients, for batches of this shape."""
        if not any(map(shutil.which, COMPILERS)):
            what = f"no C++ compiler is there ({', '.join(COMPILERS)}): steps take two to three times as long"
            warnings.warn(what, stacklevel=2)
            return
        buffers = {name: buffer.clone() for name, buffer in self.buffers.items()}  # tracing runs a step
        # torch.compile over vmap does not see the backward of an autograd.Function; what make_fx has traced is plain.
        eager = self._gradients
        traced = make_fx(lambda *arguments: eager(*arguments))(self.parameters, buffers, *batch)
        self._gradients = torch.compile(traced, dynamic=False)

    def _loss(self, parameters: Any, buffers: Any, inputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(self.skeleton, (parameters, buffers), (inputs,)), labels)


class Loops:
    """The same by plain loops, one seed after the other."""

    def __init__(self, run: ImageRun, data: Dataset) -> None:
        self.data, self.method, self.models = data, run.make_method(), build_models(run, data)
        self.optimizers = [_wrapped(run, self.method, model, data) for model in self.models]

    def step(self, index: Tensor) -> Tensor:
        """Take one step per seed on the samples at `index`, shape (seeds, batch size); return the losses."""
        losses = []
        for model, optimizer, rows in zip(self.models, self.optimizers, index, strict=True):
            optimizer.zero_grad()
            inputs, labels = take(self.data, rows)
            loss = F.cross_entropy(model(inputs), labels)
            loss.backward()
            if self.method.gauge is None or loss.isfinite():  # as in an ensemble
                optimizer.step()
            losses.append(loss.detach())
        return torch.stack(losses)


def _steps_per_epoch(run: ImageRun, data: Dataset) -> int:
    samples = len(data.train_labels)
    return (samples - run.validation * (samples // 10)) // run.batch_size


def train(runs: Sequence[ImageRun], data: Dataset, watch: Watch = NOBODY) -> list[dict[str, Any]]:
    """Train runs of one family side by side; each gets what it gets alone, but that seconds are a share of all.

    Results are by epoch, inner lists by seed: the mean loss over the steps, the accuracy in per cent after it, and the
    seconds of training, evaluation left out. Parameters have the dtype and device of the data.
    """
    run, steps = runs[0], _steps_per_epoch(runs[0], data)
    about = {"features": data.features, "classes": data.classes, "data_hash": data.hash, "steps_per_epoch": steps}
    results: list[dict[str, Any]] = [about | {"train_loss": [], "test_accuracy": [], "seconds": []} for _ in runs]
    data = held_out(data) if run.validation else data
    data = data if run.departure is None else depart(data, run.departure)
    trainer: Ensemble | Loops = Ensemble(runs, data) if run.backend == "ensemble" else Loops(run, data)
    for epoch, order in enumerate(epoch_orders(run, len(data.train_labels))):
        start, losses = time.perf_counter(), []
        for number, index in enumerate(order.to(data.train_inputs.device).unbind(1)):
            set_rate(run, trainer.optimizers, (epoch + number / steps) / run.epochs)
            losses.append(trainer.step(index))
            watch.tick()
        means = torch.stack(losses).mean(0).tolist()  # waits for the device, so the clock is read after it
        seconds, accuracies = time.perf_counter() - start, [accuracy(model, data) for model in trainer.models]
        watch.note(epoch + 1, {"train loss": means, "accuracy": accuracies})
        for place, result in enumerate(results):
            own = slice(place * len(run.seeds), (place + 1) * len(run.seeds))
            result["train_loss"].append(means[own])
            result["test_accuracy"].append(accuracies[own])
            result["seconds"].append(seconds / len(runs))
    return results


#: How runs of networks for images are made.
IMAGES = Kind(
    load=lambda run, download: load(run.data, download).to(run.device, torch.float32),
    steps=lambda run, data: run.epochs * _steps_per_epoch(run, data),
    family=family,
    train=train,
    score=lambda result: fmean(result["test_accuracy"][-1]),
)
