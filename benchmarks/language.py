"""A small language model of characters: the settings of a run, the optimizers that train it, and its training."""

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from examples import gpt
from examples.gpt import DEFAULT, GPT, NORMS, PRESETS, Preset, Text, all_windows, next_character_loss, rate_factor

from .core.progress import NOBODY, Kind, Watch, add_progress_arguments
from .core.run import DEVICE, Run, fingerprint, set_rates
from .core.table import grouped
from .data import load_text
from .methods import METHODS, Method
from .speed.timing import interleaved, ratio, ten_times

#: Measurements in a run, beside the one before its first step, and windows of the validation text that each reads.
MEASUREMENTS, VALIDATION_WINDOWS = 20, 256
#: Peak rate of the AdamW that trains what Muon leaves: embeddings, head, normalisers and biases. The same for all.
REST_LR = 3e-3
#: Options that make one small run.
SMOKE = "--preset tiny --steps 2 --seeds 1 --device cpu"


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


def _layers(model: GPT) -> list[nn.Linear]:
    """The linear layers inside the blocks."""
    return [module for module in model.blocks.modules() if isinstance(module, nn.Linear)]


def matrices(model: GPT) -> list[Tensor]:
    """Their weights: what Muon is for."""
    return [layer.weight for layer in _layers(model)]


def _for_matrices(model: GPT, run: TextRun, kind: Callable[..., Optimizer], **options: Any) -> list[Optimizer]:
    """An optimizer of the matrices, and AdamW for the rest."""
    first = kind(matrices(model), lr=run.lr, weight_decay=run.weight_decay, **options)
    return [first, _rest(model, matrices(model), run)]


def _rest(model: GPT, treated: Iterable[Tensor], run: TextRun) -> AdamW:
    """AdamW for what another optimizer leaves."""
    inside = {id(parameter) for parameter in treated}
    return _adamw(model, [p for p in model.parameters() if id(p) not in inside], run, REST_LR)


def _adamw(model: GPT, parameters: Iterable[Tensor], run: TextRun, lr: float) -> AdamW:
    """AdamW, and the embeddings at a rate of their own where the run has one."""
    embeddings = {id(embedding.weight) for embedding in (model.token_embedding, model.position_embedding)}
    own = lr if run.embedding_lr is None else run.embedding_lr
    groups = grouped(parameters, lambda parameter: own if id(parameter) in embeddings else lr)
    return AdamW([{"params": each, "lr": rate} for rate, each in groups.items()], weight_decay=run.weight_decay)


def _normuon(parameters: list[Tensor], **options: Any) -> Optimizer:
    group = {"params": parameters, "use_muon": True, "update_scale": "match_rms", **options}
    return import_module("pytorch_optimizer").NorMuon([group])


def _kfac(model: GPT, run: TextRun) -> list[Optimizer]:
    """K-FAC of the linear layers inside the blocks, of tokens that the loss is a mean over, and AdamW for the rest."""
    inside = [parameter for layer in _layers(model) for parameter in layer.parameters()]
    options = {"kfac_like": True, "alpha1": 0.0, "loss_average": "batch+sequence", "normalize_lr_cov": True}
    kind = import_module("singd.optim.optimizer").SINGD
    return [kind(model, inside, lr=run.lr, weight_decay=run.weight_decay, **options), _rest(model, inside, run)]


def _of_all(model: GPT, run: TextRun, kind: Callable[..., Optimizer], **options: Any) -> list[Optimizer]:
    return [kind(model.parameters(), lr=run.lr, weight_decay=run.weight_decay, **options)]


def _schedule_free(model: GPT, run: TextRun) -> list[Optimizer]:
    kind = import_module("schedulefree").AdamWScheduleFree
    return _of_all(model, run, kind, warmup_steps=gpt.warm_up_steps(run.steps))


#: (model, run) → optimizers of disjoint sets of parameters; the first is what a method wraps.
OPTIMIZERS: dict[str, Callable[[GPT, TextRun], list[Optimizer]]] = {
    "adamw": lambda model, run: [_adamw(model, model.parameters(), run, run.lr)],
    "sgd": lambda model, run: _of_all(model, run, SGD, momentum=0.9),
    # Updates of AdamW's size: so the rates of one grid mean much the same for both.
    "muon": lambda model, run: _for_matrices(model, run, torch.optim.Muon, adjust_lr_fn="match_rms_adamw"),
    "schedulefree": _schedule_free,
    "soap": lambda model, run: _of_all(model, run, import_module("pytorch_optimizer").SOAP),
    "kron": lambda model, run: _of_all(model, run, import_module("pytorch_optimizer").Kron),
    "mars": lambda model, run: _for_matrices(model, run, import_module("pytorch_optimizer").MARS),
    "normuon": lambda model, run: _for_matrices(model, run, _normuon),
    "kfac": _kfac,
}
#: What must be installed for them.
PACKAGES = {"schedulefree": "schedulefree", **dict.fromkeys(("soap", "kron", "mars", "normuon"), "pytorch_optimizer")}
PACKAGES["kfac"] = "singd"


def build_optimizers(model: GPT, run: TextRun) -> list[Optimizer]:
    """The optimizers of a run, the first in the method's coordinates or on its corrected gradients."""
    if missing := lacks(run.method):
        raise ValueError(f"method {run.method!r} needs {missing}.")
    method = run.make_method()
    first, *others = OPTIMIZERS[method.optimizer or ""](model, run)
    tokens = torch.zeros(1, run.size.context, dtype=torch.long, device=model.head.weight.device)
    return [method.wrap(first, model, tokens), *others]


def lacks(method: str) -> str | None:
    """What has to be installed for a method to run, or None."""
    optimizer = METHODS[method].optimizer
    package = PACKAGES.get(optimizer or "")
    if package and find_spec(package) is None:
        return f"the package {package}; pip install '.[peers]' brings it"
    return None


def dampings(method: str, given: list[float]) -> list[float] | list[None]:
    """The dampings to run a method with: none, once, if it has none."""
    return given if method in METHODS and METHODS[method].damped else [None]


@dataclass
class History:
    """What a run leaves behind, by measurement; losses are nats per character, None where they are not finite."""

    steps: list[int] = field(default_factory=list)  # taken before
    validation_loss: list[float | None] = field(default_factory=list)
    train_loss: list[float | None] = field(default_factory=list)  # mean over the steps since the measurement before
    seconds: list[float] = field(default_factory=list)  # of training, evaluation left out
    test_loss: float | None = None  # on all of the test text, after the last step
    #: RMS of the residual stream before every block and after the last, and of the logits, at the end; on validation.
    rms: list[float | None] = field(default_factory=list)
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
    trainer.history.rms = trainer.sizes()
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

    @torch.no_grad()
    def sizes(self) -> list[float | None]:
        """RMS of the residual stream before every block and after the last, and of the logits."""
        found: list[Tensor] = []
        seen = [*self.model.blocks, self.model.norm]
        handles = [part.register_forward_pre_hook(lambda module, inputs: found.append(inputs[0])) for part in seen]
        found.append(self.model(self._validation[: self.run.size.batch_size, :-1]))
        for handle in handles:
            handle.remove()
        return [_finite(x.square().mean().sqrt().item()) for x in found]

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
    family=lambda run: run,
    train=_results,
    score=final_validation_loss,
    alike=lambda run: (run.method, run.norm, run.preset),
)


def add_arguments(parser: argparse.ArgumentParser, preset: str, weight_decay: float = 0.0) -> None:
    """Give a parser the options of every study of the language model."""
    parser.add_argument("--weight-decay", type=float, default=weight_decay, help="the same for all methods")
    parser.add_argument("--preset", default=preset, help=", ".join(PRESETS))
    parser.add_argument("--data", default=DEFAULT, help=f"a file of text, or {DEFAULT}, which Python ships")
    parser.add_argument("--device", **DEVICE)
    add_progress_arguments(parser)


def described(options: argparse.Namespace, **more: Any) -> TextRun:
    """A run with these options; what a study compares takes the place of its method, normaliser and rate."""
    common = {"weight_decay": options.weight_decay, "preset": options.preset, "device": options.device}
    return TextRun(options.data, "adamw", "layernorm", 1e-3, **common, **more)


def step_times(methods: Sequence[str], like: TextRun, rounds: int = 21) -> dict[str, Any]:
    """Time ten steps of every method in turn, as often as a whitening measures; ratios to AdamW's, and its own.

    All have the data, size and device of `like`; no rate and no damping costs more than another.
    """
    text = load_text(like.data).to(like.device)

    def job(run: TextRun) -> Callable[[], None]:
        trainer, steps = Trainer(run, text), enumerate(batches(run, text.train), start=1)
        return ten_times(lambda: trainer.step(*next(steps)))

    like = replace(like, steps=10 * (rounds + 2))
    names = dict.fromkeys(["adamw", *methods])
    seconds = interleaved({m: job(replace(like, method=m, damping=dampings(m, [1.0])[0])) for m in names}, rounds)
    ratios = {method: ratio(times, seconds["adamw"]) for method, times in seconds.items()}
    return {"adamw_ms": 1e3 * statistics.median(seconds["adamw"]) / 10, "time_ratio": ratios}
