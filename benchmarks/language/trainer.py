"""Training one run, measuring it on text it does not train on, and timing the steps of all methods."""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from typing import Any

import torch
from torch import Tensor

from examples.gpt import GPT, Text, all_windows, load, next_character_loss, rate_factor

from ..core.progress import Kind, Tick
from ..methods import METHODS
from ..speed.timing import interleaved, ratio
from .run import TextRun, build_optimizers, dampings

#: Measurements in a run, beside the one before its first step.
MEASUREMENTS = 20
#: Windows of the validation text that each of them reads, spread over it evenly.
VALIDATION_WINDOWS = 256


@dataclass
class History:
    """What a run leaves behind, by measurement; losses are nats per character, None where they are not finite."""

    steps: list[int] = field(default_factory=list)  # taken before
    validation_loss: list[float | None] = field(default_factory=list)
    train_loss: list[float | None] = field(default_factory=list)  # mean over the steps since the measurement before
    seconds: list[float] = field(default_factory=list)  # of training, evaluation left out
    test_loss: float | None = None  # on all of the test text, after the last step
    diverged: bool = False  # whether a loss was not finite, which ended the run


def train(run: TextRun, text: Text, *, tick: Tick = lambda: None) -> History:
    """Train one run on a text that is on its device; a part shorter than a window is a ValueError."""
    trainer = Trainer(run, text)
    trainer.measure(0, [])
    every, losses = max(1, round(run.steps / MEASUREMENTS)), list[float]()
    for number, windows in enumerate(batches(run, text.train), start=1):
        losses.append(trainer.step(number, windows))
        tick()
        diverged = not math.isfinite(losses[-1])
        if diverged or number % every == 0 or number == run.steps:
            trainer.measure(number, losses)
            losses = []
        if trainer.history.diverged:
            return trainer.history
    trainer.history.test_loss = _finite(trainer.evaluate(_windows(text.test, run)))
    return trainer.history


class Trainer:
    """A model, its optimizers, and the record of its training."""

    def __init__(self, run: TextRun, text: Text) -> None:
        self.run, self.history = run, History()
        self.model = build_model(run, len(text.vocabulary))
        self.optimizers = build_optimizers(self.model, run)
        self._peaks = [[group["lr"] for group in optimizer.param_groups] for optimizer in self.optimizers]
        windows = _windows(text.validation, run)
        self._validation = windows[:: math.ceil(len(windows) / VALIDATION_WINDOWS)]
        self._seconds, self._started = 0.0, time.perf_counter()
        self._set_mode(training=True)

    def step(self, number: int, windows: Tensor) -> float:
        """Take the step of this number, from 1, and return the loss before it; a loss not finite is not stepped on."""
        # A schedule-free optimizer warms up by itself, and stays.
        if METHODS[self.run.method].optimizer != "schedulefree":
            factor = rate_factor(number, self.run.steps)
            for optimizer, peaks in zip(self.optimizers, self._peaks, strict=True):
                for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                    group["lr"] = factor * peak
        self.model.zero_grad()
        loss = next_character_loss(self.model, windows)
        value = loss.item()
        if math.isfinite(value):
            loss.backward()
            for optimizer in self.optimizers:
                optimizer.step()
        return value

    def measure(self, step: int, losses: list[float]) -> None:
        """Record the state after `step` steps, `losses` being those since the last measurement."""
        if self.run.device.startswith("cuda"):
            torch.cuda.synchronize()
        self._seconds += time.perf_counter() - self._started if step else 0.0
        training = _finite(math.fsum(losses) / len(losses)) if losses else None
        validation, history = _finite(self.evaluate(self._validation)), self.history
        history.steps.append(step)
        history.seconds.append(self._seconds)
        history.train_loss.append(training)
        history.validation_loss.append(validation)
        history.diverged = validation is None or (step > 0 and training is None)
        self._started = time.perf_counter()

    @torch.no_grad()
    def evaluate(self, windows: Tensor) -> float:
        """Mean loss over windows."""
        self._set_mode(training=False)
        parts = windows.split(self.run.size.batch_size)
        total = sum(next_character_loss(self.model, part).item() * len(part) for part in parts)
        self._set_mode(training=True)
        return total / len(windows)

    def _set_mode(self, *, training: bool) -> None:
        self.model.train(training)
        # Optimizers that average weights, as schedule-free ones do, decide which ones the model holds.
        for optimizer in self.optimizers:
            switch = getattr(optimizer, "train" if training else "eval", None)
            if switch:
                switch()


def build_model(run: TextRun, vocabulary: int) -> GPT:
    """Draw the network of a run; on the CPU, so that every device starts from the same numbers."""
    torch.manual_seed(run.seed)
    return GPT(run.size, vocabulary, run.norm).to(run.device)


def batches(run: TextRun, text: Tensor) -> Iterator[Tensor]:
    """Yield the windows of every step, (batch, context + 1): drawn by the seed, whatever the method."""
    generator = torch.Generator().manual_seed(run.seed)
    size = run.size.context + 1
    _check_length(text, size)
    inside = torch.arange(size, device=text.device)
    for _ in range(run.steps):
        starts = torch.randint(len(text) - size + 1, (run.size.batch_size, 1), generator=generator)
        yield text[starts.to(text.device) + inside]


def _windows(text: Tensor, run: TextRun) -> Tensor:
    _check_length(text, run.size.context + 1)
    return all_windows(text, run.size)


def _check_length(text: Tensor, size: int) -> None:
    if len(text) < size:
        raise ValueError(f"a part of the text has {len(text)} characters, fewer than one window's {size}.")


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def final_validation_loss(result: dict[str, Any]) -> float | None:
    """The loss after the last step; None if the run diverged."""
    return None if result["diverged"] else result["validation_loss"][-1]


def _result(run: TextRun, text: Text, tick: Tick) -> dict[str, Any]:
    characters = sum(len(part) for part in text[:3])
    about = {"size": asdict(run.size), "characters": characters, "vocabulary": len(text.vocabulary)}
    return {**about, **asdict(train(run, text, tick=tick))}


#: How runs of the language model are made.
LANGUAGE = Kind(
    load=lambda run, download: load(run.data).to(run.device),
    steps=lambda run, text: run.steps,
    family=lambda run: run,
    train=lambda runs, text, tick: [_result(run, text, tick) for run in runs],
    score=final_validation_loss,
)


def step_times(methods: Sequence[str], like: TextRun, rounds: int = 21) -> dict[str, Any]:
    """Time ten steps of every method in turn, as often as a whitening measures; ratios to AdamW's, and its own.

    All have the data, size and device of `like`; no rate and no damping costs more than another.
    """
    text, steps = load(like.data).to(like.device), 10

    def job(run: TextRun) -> Callable[[], None]:
        trainer, windows, numbers = Trainer(run, text), batches(run, text.train), count(1)

        def ten_steps() -> None:
            for _ in range(steps):
                trainer.step(next(numbers), next(windows))

        return ten_steps

    like = replace(like, steps=steps * (rounds + 2))
    names = dict.fromkeys(["adamw", *methods])
    seconds = interleaved({m: job(replace(like, method=m, damping=dampings(m, [1.0])[0])) for m in names}, rounds)
    ratios = {method: ratio(times, seconds["adamw"]) for method, times in seconds.items()}
    return {"adamw_ms": 1e3 * statistics.median(seconds["adamw"]) / steps, "time_ratio": ratios}
