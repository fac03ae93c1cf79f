"""The optimizers compared: each as a function from a model to the optimizers that train it."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from adiv_optim import BatchIdeal, Correction, Disproportional, GradientOnly, Proportional, UnitConsistent, Whitened

from .model import GPT

#: Share of the steps in which the rate rises to its peak.
WARM_UP = 0.05
#: Peak rate of the AdamW that trains what Muon leaves: embeddings, head, normalisers and biases. The same for all.
REST_LR = 3e-3
#: Steps between two measurements of a whitening.
EVERY = 10

#: Eigenvectors that the cheap whitenings tell apart.
RANK = 16

#: model, rate, weight decay, damping, steps in all → optimizers of disjoint sets of parameters.
Build = Callable[[GPT, float, float, float | None, int], list[Optimizer]]


def matrices(model: GPT) -> list[Tensor]:
    """The weights of the linear layers inside the blocks: what Muon is for."""
    return [module.weight for module in model.blocks.modules() if isinstance(module, nn.Linear)]


def rest(model: GPT) -> list[Tensor]:
    """Every other parameter."""
    inside = {id(matrix) for matrix in matrices(model)}
    return [parameter for parameter in model.parameters() if id(parameter) not in inside]


def _adamw(model: GPT, lr: float, weight_decay: float, damping: float | None, total_steps: int) -> list[Optimizer]:
    return [AdamW(model.parameters(), lr=lr, weight_decay=weight_decay)]


def _sgd(model: GPT, lr: float, weight_decay: float, damping: float | None, total_steps: int) -> list[Optimizer]:
    return [SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=weight_decay)]


def _muon(model: GPT, lr: float, weight_decay: float, damping: float | None, total_steps: int) -> list[Optimizer]:
    # Updates of AdamW's size: so the rates of one grid mean much the same for both.
    muon = torch.optim.Muon(matrices(model), lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
    return [muon, AdamW(rest(model), lr=REST_LR, weight_decay=weight_decay)]


def _corrected_adamw(rule: Callable[[float | None], Correction]) -> Build:
    """AdamW on corrected gradients; `rule` is given the damping."""

    def build(model: GPT, lr: float, weight_decay: float, damping: float | None, total_steps: int) -> list[Optimizer]:
        (adamw,) = _adamw(model, lr, weight_decay, damping, total_steps)
        return [GradientOnly(adamw, model, rule(damping))]

    return build


def _batch_ideal(damping: float | None) -> Correction:
    assert damping is not None
    return BatchIdeal(damping, per_sample=False)


def _unit_consistent_adamw(
    model: GPT, lr: float, weight_decay: float, damping: float | None, total_steps: int
) -> list[Optimizer]:
    (adamw,) = _adamw(model, lr, weight_decay, damping, total_steps)
    tokens = torch.zeros(1, model.position_embedding.num_embeddings, dtype=torch.long, device=model.head.weight.device)
    return [UnitConsistent(adamw, model, example_input=tokens)]


def _whitened(plain: Build, rank: int | None = None) -> Build:
    """The first optimizer of a method, whitened; the others as they are."""

    def build(model: GPT, lr: float, weight_decay: float, damping: float | None, total_steps: int) -> list[Optimizer]:
        first, *others = plain(model, lr, weight_decay, damping, total_steps)
        assert damping is not None
        return [Whitened(first, model, damping=damping, every=EVERY, rank=rank), *others]

    return build


def _schedule_free(
    model: GPT, lr: float, weight_decay: float, damping: float | None, total_steps: int
) -> list[Optimizer]:
    from schedulefree import AdamWScheduleFree

    warm_up = warm_up_steps(total_steps)
    return [AdamWScheduleFree(model.parameters(), lr=lr, weight_decay=weight_decay, warmup_steps=warm_up)]


def _soap(model: GPT, lr: float, weight_decay: float, damping: float | None, total_steps: int) -> list[Optimizer]:
    from pytorch_optimizer import SOAP

    return [SOAP(model.parameters(), lr=lr, weight_decay=weight_decay)]


@dataclass(frozen=True)
class Method:
    """One row of the comparison.

    Args:
        build: makes its optimizers.
        label: what tables and figures call it.
        damped: whether it has a damping.
        scheduled: whether the rate follows the common schedule; if not, the method warms up by itself.
        package: what must be installed for it.
        muon: whether it needs torch's Muon.
    """

    build: Build
    label: str
    damped: bool = False
    scheduled: bool = True
    package: str | None = None
    muon: bool = False

    @property
    def lacks(self) -> str | None:
        """What has to be installed for it to run, or None."""
        if self.package and find_spec(self.package) is None:
            return f"the package {self.package}; pip install '.[peers]' brings it"
        if self.muon and not hasattr(torch.optim, "Muon"):
            return f"torch.optim.Muon, of torch 2.9 or newer; this is torch {torch.__version__}"
        return None


METHODS: dict[str, Method] = {
    "adamw": Method(_adamw, "AdamW"),
    "muon": Method(_muon, "Muon", muon=True),
    "batch-ideal-adamw": Method(_corrected_adamw(_batch_ideal), "batch-ideal, AdamW", damped=True),
    "whitened-adamw": Method(_whitened(_adamw), "whitened AdamW", damped=True),
    "whitened-muon": Method(_whitened(_muon), "whitened Muon", damped=True, muon=True),
    "whitened-adamw-16": Method(_whitened(_adamw, RANK), f"whitened AdamW, rank {RANK}", damped=True),
    "whitened-muon-16": Method(_whitened(_muon, RANK), f"whitened Muon, rank {RANK}", damped=True, muon=True),
    "sgd": Method(_sgd, "SGD, momentum 0.9"),
    "whitened-sgd": Method(_whitened(_sgd), "whitened SGD, momentum 0.9", damped=True),
    "schedulefree": Method(_schedule_free, "schedule-free AdamW", scheduled=False, package="schedulefree"),
    "soap": Method(_soap, "SOAP", package="pytorch_optimizer"),
    "proportional-adamw": Method(_corrected_adamw(lambda _: Proportional()), "proportional, AdamW"),
    "disproportional-adamw": Method(_corrected_adamw(lambda _: Disproportional()), "disproportional, AdamW"),
    "unit-consistent-adamw": Method(_unit_consistent_adamw, "unit-consistent AdamW"),
}


def warm_up_steps(total_steps: int) -> int:
    """How many steps the rate rises."""
    return max(1, round(WARM_UP * total_steps))
