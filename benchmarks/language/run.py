"""One method on the language model, one seed: the settings of a run, alone and on the command line; its optimizers."""

import argparse
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from examples import gpt
from examples.gpt import DEFAULT, GPT, NORMS, PRESETS, Preset

from ..core.runs import DEVICE, Run, add_progress_arguments, fingerprint
from ..core.table import grouped
from ..methods import METHODS, Method

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


#: Peak rate of the AdamW that trains what Muon leaves: embeddings, head, normalisers and biases. The same for all.
REST_LR = 3e-3


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
    kind = method.optimizer
    first, *others = _of_all(model, run, kind) if callable(kind) else OPTIMIZERS[kind or ""](model, run)
    tokens = torch.zeros(1, run.size.context, dtype=torch.long, device=model.head.weight.device)
    return [method.wrap(first, model, tokens), *others]


def lacks(method: str) -> str | None:
    """What has to be installed for a method to run, or None."""
    optimizer = METHODS[method].optimizer
    if callable(optimizer):
        return None
    if optimizer not in OPTIMIZERS:
        return f"an optimizer that there is, found {optimizer!r}; {', '.join(OPTIMIZERS)}, or a function such as SGD"
    package = PACKAGES.get(optimizer)
    if package and find_spec(package) is None:
        return f"the package {package}; pip install '.[peers]' brings it"
    return None


def dampings(method: str, given: list[float]) -> list[float] | list[None]:
    """The dampings to run a method with: none, once, if it has none."""
    return given if method in METHODS and METHODS[method].damped else [None]
