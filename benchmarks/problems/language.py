"""Characters predicted by a small GPT: the settings of a run, its optimizers, its training; losses are nats each."""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from examples import gpt
from examples.gpt import GPT, NORMS, PRESETS, Preset, Text

from ..core.runs import NOBODY, Kind, Run, Watch, fingerprint, set_rates
from ..core.tables import grouped
from ..data import load_text
from ..methods import METHODS, Method
from ..optimizers import peer

#: Peak rate of the AdamW that trains what Muon leaves: embeddings, head, normalisers and biases. The same for all.
REST_LR = 3e-3
#: Measurements in a run, beside the one before its first step, and windows of the validation text that each reads.
MEASUREMENTS, VALIDATION_WINDOWS = 20, 256


@dataclass(frozen=True)
class TextRun(Run):
    """One method on the language model, by one seed."""

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
        if not callable(optimizer) and optimizer not in OPTIMIZERS:
            known = f"{', '.join(OPTIMIZERS)}, or a function such as SGD"
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


def dampings(method: str, given: Iterable[float]) -> list[Any]:
    """The dampings to run a method with: None, once, if it has none."""
    return list(given) if method in METHODS and METHODS[method].damped else [None]


def matrices(model: GPT) -> list[Tensor]:
    """The weights of the linear layers inside the blocks: what Muon is for."""
    return [layer.weight for layer in model.blocks.modules() if isinstance(layer, nn.Linear)]


def _of_all(model: GPT, run: TextRun, kind: Callable[..., Optimizer], **options: Any) -> list[Optimizer]:
    return [kind(model.parameters(), lr=run.lr, weight_decay=run.weight_decay, **options)]


def _of_matrices(model: GPT, run: TextRun, kind: Callable[..., Optimizer], **options: Any) -> list[Optimizer]:
    """An optimizer of the matrices, and AdamW for the rest."""
    treated = matrices(model)
    first = kind(treated, lr=run.lr, weight_decay=run.weight_decay, **options)
    return [first, _rest(model, treated, run)]


def _rest(model: GPT, treated: Iterable[Tensor], run: TextRun) -> Optimizer:
    """AdamW for what another optimizer leaves."""
    inside = {id(parameter) for parameter in treated}
    return _adamw(model, [p for p in model.parameters() if id(p) not in inside], run, REST_LR)


def _adamw(model: GPT, parameters: Iterable[Tensor], run: TextRun, lr: float) -> Optimizer:
    """AdamW, and the embeddings at a rate of their own where the run has one."""
    embeddings = {id(embedding.weight) for embedding in (model.token_embedding, model.position_embedding)}
    embedding_lr = lr if run.embedding_lr is None else run.embedding_lr
    groups = grouped(parameters, lambda parameter: embedding_lr if id(parameter) in embeddings else lr)
    return AdamW([{"params": each, "lr": rate} for rate, each in groups.items()], weight_decay=run.weight_decay)


def _normuon(parameters: list[Tensor], **options: Any) -> Optimizer:
    return peer("NorMuon")([{"params": parameters, "use_muon": True, "update_scale": "match_rms", **options}])


def _kfac(model: GPT, run: TextRun) -> list[Optimizer]:
    """K-FAC of the linear layers inside the blocks, of tokens that the loss is a mean over, and AdamW for the rest."""
    layers = [layer for layer in model.blocks.modules() if isinstance(layer, nn.Linear)]
    inside = [parameter for layer in layers for parameter in layer.parameters()]
    options = {"kfac_like": True, "alpha1": 0.0, "loss_average": "batch+sequence", "normalize_lr_cov": True}
    kind: Any = peer("SINGD", "singd", "singd.optim.optimizer")
    return [kind(model, inside, lr=run.lr, weight_decay=run.weight_decay, **options), _rest(model, inside, run)]


#: (model, run) → optimizers of disjoint sets of parameters; the first is what a method wraps.
OPTIMIZERS: dict[str, Callable[[GPT, TextRun], list[Optimizer]]] = {
    "adamw": lambda model, run: [_adamw(model, model.parameters(), run, run.lr)],
    "sgd": lambda model, run: _of_all(model, run, SGD, momentum=0.9),
    # Updates of AdamW's size: so the rates of one grid mean much the same for both.
    "muon": lambda model, run: _of_matrices(model, run, torch.optim.Muon, adjust_lr_fn="match_rms_adamw"),
    "schedulefree": lambda model, run: _of_all(
        model, run, peer("AdamWScheduleFree", "schedulefree"), warmup_steps=gpt.warm_up_steps(run.steps)
    ),
    "soap": lambda model, run: _of_all(model, run, peer("SOAP")),
    "kron": lambda model, run: _of_all(model, run, peer("Kron")),
    "mars": lambda model, run: _of_matrices(model, run, peer("MARS")),
    "normuon": lambda model, run: _of_matrices(model, run, _normuon),
    "kfac": _kfac,
}
#: Which packages they are of.
PACKAGES = {"schedulefree": "schedulefree", "kfac": "singd"}
PACKAGES |= dict.fromkeys(("soap", "kron", "mars", "normuon"), "pytorch_optimizer")


def is_installed(method: str) -> bool:
    """Whether the package of a method's optimizer is there."""
    return find_spec(PACKAGES.get(str(METHODS[method].optimizer), "torch")) is not None


def build_optimizers(model: GPT, run: TextRun) -> list[Optimizer]:
    """The optimizers of a run, the first in the method's coordinates or on its corrected gradients."""
    method = run.make_method()
    kind: Any = method.optimizer
    first, *others = _of_all(model, run, kind) if callable(kind) else OPTIMIZERS[kind](model, run)
    tokens = torch.zeros(1, run.size.context, dtype=torch.long, device=model.head.weight.device)
    return [method.wrap(first, model, tokens), *others]


def build_model(run: TextRun, vocabulary: int) -> GPT:
    """Draw the network of a run; on the CPU, so that every device starts from the same numbers."""
    torch.manual_seed(run.seed)
    return GPT(run.size, vocabulary, run.norm, run.embedding_deviation).to(run.device)


def windows_of(text: Tensor, run: TextRun) -> Tensor:
    """A part of a text as windows, (windows, context + 1); a part shorter than one is a ValueError."""
    if len(text) <= run.size.context:
        window = run.size.context + 1
        raise ValueError(f"a part of the text has {len(text)} characters, fewer than one window's {window}.")
    return gpt.all_windows(text, run.size)


def batches(run: TextRun, text: Tensor) -> Iterator[Tensor]:
    """Yield the windows of every step, (batch, context + 1): drawn by the seed, whatever the method."""
    generator = torch.Generator().manual_seed(run.seed)
    size = windows_of(text, run).shape[1]
    inside = torch.arange(size, device=text.device)
    for _ in range(run.steps):
        starts = torch.randint(len(text) - size + 1, (run.size.batch_size, 1), generator=generator)
        yield text[starts.to(text.device) + inside]


@dataclass
class History:
    """What a run leaves behind, by measurement; losses are None where they are not finite."""

    steps: list[int] = field(default_factory=list)  # taken before
    validation_loss: list[float | None] = field(default_factory=list)
    train_loss: list[float | None] = field(default_factory=list)  # mean over the steps since the measurement before
    seconds: list[float] = field(default_factory=list)  # of training, evaluation left out
    test_loss: float | None = None  # on all of the test text, after the last step
    #: RMS of the residual stream before every block and after the last, and of the logits, at the end; on validation.
    rms: list[float | None] = field(default_factory=list)
    diverged: bool = False  # whether a loss was not finite, which ended the run


def train(run: TextRun, text: Text, watch: Watch = NOBODY) -> History:
    """Train one run on a text that is on its device."""
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
    trainer.history.test_loss = _finite(trainer.evaluate(windows_of(text.test, run)))
    trainer.history.rms = trainer.sizes()
    return trainer.history


class Trainer:
    """A model, its optimizers, and the record of its training."""

    def __init__(self, run: TextRun, text: Text, watch: Watch = NOBODY) -> None:
        self.run, self.history, self._watch = run, History(), watch
        self.model = build_model(run, len(text.vocabulary))
        self.optimizers = build_optimizers(self.model, run)
        windows = windows_of(text.validation, run)
        self._validation = windows[:: math.ceil(len(windows) / VALIDATION_WINDOWS)]
        self._started = time.perf_counter()
        self._set_mode(training=True)

    def step(self, number: int, windows: Tensor) -> float:
        """Take the step of this number, from 1, and return the loss before it; a loss not finite is not stepped on."""
        # A schedule-free optimizer warms up by itself, and stays.
        if METHODS[self.run.method].optimizer != "schedulefree":
            set_rates(self.optimizers, gpt.rate_factor(number, self.run.steps))
        self.model.zero_grad()
        loss = gpt.next_character_loss(self.model, windows)
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
        total = sum(gpt.next_character_loss(self.model, part).item() * len(part) for part in parts)
        self._set_mode(training=True)
        return total / len(windows)

    @torch.no_grad()
    def sizes(self) -> list[float | None]:
        """RMS of the residual stream before every block and after the last, and of the logits."""
        activations: list[Tensor] = []
        layers = [*self.model.blocks, self.model.norm]
        hooks = [each.register_forward_pre_hook(lambda module, x: activations.append(x[0])) for each in layers]
        activations.append(self.model(self._validation[: self.run.size.batch_size, :-1]))
        for hook in hooks:
            hook.remove()
        return [_finite(x.square().mean().sqrt().item()) for x in activations]

    def _set_mode(self, *, training: bool) -> None:
        self.model.train(training)
        # Optimizers that average weights, as schedule-free ones do, decide which ones the model holds.
        for optimizer in self.optimizers:
            getattr(optimizer, "train" if training else "eval", lambda: None)()


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def final_validation_loss(result: dict[str, Any]) -> float | None:
    """The loss after the last step; None if the run diverged."""
    return None if result["diverged"] else result["validation_loss"][-1]


def _results(runs: list[TextRun], text: Text, watch: Watch) -> list[dict[str, Any]]:
    about = {"characters": sum(len(part) for part in text[:3]), "vocabulary": len(text.vocabulary)}
    return [{"size": asdict(run.size), **about, **asdict(train(run, text, watch))} for run in runs]


#: How runs of the language model are made.
LANGUAGE = Kind(
    load=lambda run, download: load_text(run.data, download).to(run.device),
    steps=lambda run, text: run.steps,
    train=_results,
    score=final_validation_loss,
    alike=lambda run: (run.method, run.norm, run.preset),
)
