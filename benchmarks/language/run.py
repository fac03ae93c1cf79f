"""One method on one language model, one seed: the settings of a run, and the optimizers that train it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from examples.gpt import GPT, NORMS, PRESETS, Preset, warm_up_steps

from ..core.run import Run, fingerprint
from ..methods import METHODS, Method

#: Peak rate of the AdamW that trains what Muon leaves: embeddings, head, normalisers and biases. The same for all.
REST_LR = 3e-3


@dataclass(frozen=True)
class TextRun(Run):
    """The settings of one run."""

    norm: str
    lr: float  # at its peak
    weight_decay: float = 0.0  # of all optimizers
    steps: int = 1000
    seed: int = 0  # draws the initialisation and, by itself, the batches: they are the same for every method
    preset: str = "small"

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


def matrices(model: GPT) -> list[Tensor]:
    """The weights of the linear layers inside the blocks: what Muon is for."""
    return [module.weight for module in model.blocks.modules() if isinstance(module, nn.Linear)]


def _muon(model: GPT, run: TextRun) -> list[Optimizer]:
    inside = {id(matrix) for matrix in matrices(model)}
    rest = [parameter for parameter in model.parameters() if id(parameter) not in inside]
    # Updates of AdamW's size: so the rates of one grid mean much the same for both.
    muon = torch.optim.Muon(matrices(model), lr=run.lr, weight_decay=run.weight_decay, adjust_lr_fn="match_rms_adamw")
    return [muon, AdamW(rest, lr=REST_LR, weight_decay=run.weight_decay)]


def _schedule_free(model: GPT, run: TextRun) -> list[Optimizer]:
    from schedulefree import AdamWScheduleFree

    options = {"lr": run.lr, "weight_decay": run.weight_decay, "warmup_steps": warm_up_steps(run.steps)}
    return [AdamWScheduleFree(model.parameters(), **options)]


def _soap(model: GPT, run: TextRun) -> list[Optimizer]:
    from pytorch_optimizer import SOAP

    return [SOAP(model.parameters(), lr=run.lr, weight_decay=run.weight_decay)]


#: (model, run) → optimizers of disjoint sets of parameters; the first is what a method wraps.
OPTIMIZERS: dict[str, Callable[[GPT, TextRun], list[Optimizer]]] = {
    "adamw": lambda model, run: [AdamW(model.parameters(), lr=run.lr, weight_decay=run.weight_decay)],
    "sgd": lambda model, run: [SGD(model.parameters(), lr=run.lr, momentum=0.9, weight_decay=run.weight_decay)],
    "muon": _muon,
    "schedulefree": _schedule_free,
    "soap": _soap,
}
#: What must be installed for them.
PACKAGES = {"schedulefree": "schedulefree", "soap": "pytorch_optimizer"}


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
    if optimizer == "muon" and not hasattr(torch.optim, "Muon"):
        return f"torch.optim.Muon, of torch 2.9 or newer; this is torch {torch.__version__}"
    return None


def dampings(method: str, given: list[float]) -> list[float] | list[None]:
    """The dampings to run a method with: none, once, if it has none."""
    return given if method in METHODS and METHODS[method].damped else [None]
