"""A language model of characters: the settings of a run, its optimizers, its training, and what is kept of it."""

import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from examples.gpt import GPT, NORMS, PRESETS, Preset, Text, all_windows, next_character_loss, rate_factor

from ..core.runs import NOBODY, Kind, Run, Watch, fingerprint, set_rates
from ..data import load_text
from ..methods import METHODS, Method
from ..optimizers import OF_LANGUAGE, made_by


@dataclass(frozen=True)
class TextRun(Run):
    """The settings of one run."""

    norm: str
    lr: float  # at its peak
    weight_decay: float = 0.0  # of all optimizers
    steps: int = 1000
    seed: int = 0  # draws the initialisation and, by itself, the batches: they are the same for every method
    preset: str = "small"
    embedding_deviation: float | None = None  # at first; see `GPT`
    embedding_lr: float | None = None  # at its peak, of the AdamW that trains them; None is that of all it trains
    clip: float | None = None  # what the norm of all gradients is cut to

    kind = "language"

    def __post_init__(self) -> None:
        self.check(("lr", "steps"), norm=NORMS, preset=PRESETS)
        if METHODS[self.method].damped and self.damping is None:
            raise ValueError(f"method {self.method!r} needs a damping.")
        optimizer = METHODS[self.method].optimizer
        if not callable(optimizer) and optimizer not in OF_LANGUAGE:
            known = f"{', '.join(OF_LANGUAGE)}, or a function such as SGD"
            raise ValueError(f"method {self.method!r} needs an optimizer that there is, found {optimizer!r}; {known}.")

    @property
    def size(self) -> Preset:
        """Of the network and its batches."""
        return PRESETS[self.preset]

    def computes(self) -> str:
        """A hash of what its method and normaliser compute; of its optimizer itself only the name counts."""
        return _computes(METHODS[self.method], self.norm)


@cache
def _computes(method: Method, norm: str) -> str:
    tokens = torch.arange(64).square().view(8, PRESETS["tiny"].context) % 7
    return fingerprint(method, GPT(PRESETS["tiny"], 7, norm), tokens, tokens.roll(1, 0))


def build_optimizers(model: GPT, run: TextRun) -> list[Optimizer]:
    """The optimizers of a run, the first in the method's coordinates or on its corrected gradients."""
    method = run.make_method()
    kind: Any = method.optimizer
    first, *others = made_by(model, run, kind) if callable(kind) else OF_LANGUAGE[kind](model, run)
    tokens = torch.zeros(1, run.size.context, dtype=torch.long, device=model.head.weight.device)
    return [method.wrap(first, model, tokens), *others]


def dampings(method: str, given: Iterable[float]) -> list[Any]:
    """The dampings to run a method with: None, once, if it has none."""
    return list(given) if method in METHODS and METHODS[method].damped else [None]


#: Measurements in a run, beside the one before its first step, and windows of the validation text that each reads.
MEASUREMENTS, VALIDATION_WINDOWS = 20, 256


@dataclass
class History:
    """What a run leaves behind, by measurement; losses are nats per character, None where they are not finite."""

    steps: list[int] = field(default_factory=list)  # taken before
    validation_loss: list[float | None] = field(default_factory=list)
    train_loss: list[float | None] = field(default_factory=list)  # mean over the steps since the measurement before
    seconds: list[float] = field(default_factory=list)  # of training, evaluation left out
    test_loss: float | None = None  # on all of the test text, after the last step
    diverged: bool = False  # whether a loss was not finite, which ended the run


def train(run: TextRun, text: Text, watch: Watch = NOBODY) -> History:
    """Train one run on a text that is on its device; a part shorter than a window is a ValueError."""
    trainer = Trainer(run, text, watch)
    trainer.measure(0, [])
    every, losses = max(1, round(run.steps / MEASUREMENTS)), list[float]()
    for number, windows in enumerate(batches(run, text.train), start=1):
        losses.append(trainer.step(number, windows))
        watch.tick()
        if number % every == 0 or number == run.steps or not math.isfinite(losses[-1]):
            trainer.measure(number, losses)
            losses = []
        if trainer.history.diverged:
            return trainer.history
    trainer.history.test_loss = _finite(trainer.evaluate(_windows(text.test, run)))
    return trainer.history


class Trainer:
    """A model, its optimizers, and the record of its training."""

    def __init__(self, run: TextRun, text: Text, watch: Watch = NOBODY) -> None:
        self.run, self.history, self._watch = run, History(), watch
        self.model = build_model(run, len(text.vocabulary))
        self.optimizers = build_optimizers(self.model, run)
        windows = _windows(text.validation, run)
        self._validation = windows[:: math.ceil(len(windows) / VALIDATION_WINDOWS)]
        self._started = time.perf_counter()
        self._set_mode(training=True)

    def step(self, number: int, windows: Tensor) -> float:
        """Take the step of this number, from 1, and return the loss before it; a loss not finite is not stepped on."""
        # A schedule-free optimizer warms up by itself, and stays.
        if METHODS[self.run.method].optimizer != "schedulefree":
            set_rates(self.optimizers, rate_factor(number, self.run.steps))
        self.model.zero_grad()
        loss = next_character_loss(self.model, windows)
        value = loss.item()
        if math.isfinite(value):
            loss.backward()
            if self.run.clip is not None:
                nn.utils.clip_grad_norm_(self.model.parameters(), self.run.clip)
            for optimizer in self.optimizers:
                optimizer.step()
        return value

    def measure(self, step: int, losses: list[float]) -> None:
        """Record the state after `step` steps, `losses` being those since the last measurement."""
        if self.run.device.startswith("cuda"):
            torch.cuda.synchronize()
        history, spent = self.history, time.perf_counter() - self._started
        training = _finite(math.fsum(losses) / len(losses)) if losses else None
        validation = _finite(self.evaluate(self._validation))
        history.steps.append(step)
        history.seconds.append(history.seconds[-1] + spent if history.seconds else 0.0)
        history.train_loss.append(training)
        history.validation_loss.append(validation)
        history.diverged = validation is None or (step > 0 and training is None)
        self._watch.note(step, {"train loss": [training], "validation loss": [validation]})
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
            getattr(optimizer, "train" if training else "eval", lambda: None)()


def build_model(run: TextRun, vocabulary: int) -> GPT:
    """Draw the network of a run; on the CPU, so that every device starts from the same numbers."""
    torch.manual_seed(run.seed)
    return GPT(run.size, vocabulary, run.norm, run.embedding_deviation).to(run.device)


def batches(run: TextRun, text: Tensor) -> Iterator[Tensor]:
    """Yield the windows of every step, (batch, context + 1): drawn by the seed, whatever the method."""
    generator = torch.Generator().manual_seed(run.seed)
    size = _windows(text, run).shape[1]
    inside = torch.arange(size, device=text.device)
    for _ in range(run.steps):
        starts = torch.randint(len(text) - size + 1, (run.size.batch_size, 1), generator=generator)
        yield text[starts.to(text.device) + inside]


def _windows(text: Tensor, run: TextRun) -> Tensor:
    if len(text) <= run.size.context:
        window = run.size.context + 1
        raise ValueError(f"a part of the text has {len(text)} characters, fewer than one window's {window}.")
    return all_windows(text, run.size)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def final_validation_loss(result: dict[str, Any]) -> float | None:
    """The loss after the last step; None if the run diverged."""
    return None if result["diverged"] else result["validation_loss"][-1]


def worth(loss: float | None) -> float:
    """A loss to choose by: infinity, where a run diverged."""
    return math.inf if loss is None else loss


def title(result: dict[str, Any]) -> str:
    """Text and network of a run."""
    size = result["size"]
    return (
        f"Characters of {result['settings']['data']}, GPT of {size['layers']} layers, width {size['width']}, "
        f"{size['heads']} heads, context {size['context']}, batch {size['batch_size']}"
    )


def _results(runs: list[TextRun], text: Text, watch: Watch) -> list[dict[str, Any]]:
    about = {"characters": sum(len(part) for part in text[:3]), "vocabulary": len(text.vocabulary)}
    return [{"size": asdict(run.size), **about, **asdict(train(run, text, watch))} for run in runs]


#: How runs of the language model are made.
LANGUAGE = Kind(
    load=lambda run, download: load_text(run.data, download).to(run.device),
    steps=lambda run, text: run.steps,
    train=_results,
    score=final_validation_loss,
)
