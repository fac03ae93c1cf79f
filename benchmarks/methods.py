"""Methods: how each builds its network and treats its optimizer; a study lists those that it compares by their names.

Those of the language model name an optimizer of their own. A Python file of a user adds to them; see `added`.
"""

import runpy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from adiv_optim import UnitConsistent
from adiv_optim.corrections import BatchIdeal, Correction, Disproportional, Proportional
from adiv_optim.gauge import LayerGauge, NetworkGauge
from adiv_optim.layers import AffineLikeLinear, DyISRU, DyT, L2Norm, NormLikeLinear, PatchNormConv2d
from adiv_optim.optim import GradientOnly, InputScaled, Preconditioned, Whitened
from adiv_optim.optim.wrapper import OptimizerWrapper

from .optimizers import peer

#: Of MAC's mean, for each forward pass.
DECAY = 0.95


class MAC(OptimizerWrapper):
    """Multiply gradients of linear layers and convolutions by I − āāᵀ / (ρ + |ā|²), with ā the mean of x~ = (x, 1).

    That is ρ times the inverse of A ≈ āāᵀ + ρI by Sherman and Morrison (Seung, Lee and Ko 2025, arXiv 2506.08464);
    nothing is mapped back. ā is a running mean. The damping is ρ in units of |ā|²/d, the mean eigenvalue of āāᵀ, where
    the paper has an adaptive one. Convolutions have one group.
    """

    def __init__(self, optimizer: Optimizer, model: nn.Module, damping: float) -> None:
        super().__init__(optimizer)
        self.damping, self.means = damping, dict[Any, Tensor]()
        for module in model.modules():
            if isinstance(module, (nn.Linear, nn.Conv2d)):
                module.register_forward_pre_hook(partial(_average, self.means))

    @torch.no_grad()
    def _inner_step(self, *args: Any, **kwargs: Any) -> None:
        for module, mean in self.means.items():
            parameters: list[Any] = [*module.parameters()]
            if any(parameter.grad is None for parameter in parameters):
                continue
            widths = [parameter[0].numel() for parameter in parameters]
            mean = mean[: sum(widths)]
            joined = torch.cat([p.grad.flatten(1) if p.dim() > 1 else p.grad[:, None] for p in parameters], 1)
            ridge = 1 + self.damping / len(mean)
            joined -= (joined @ mean / (mean.square().sum() * ridge)).outer(mean)
            for parameter, part in zip(parameters, joined.split(widths, 1), strict=True):
                parameter.grad = part.reshape(parameter.shape).contiguous()  # as fused optimizers read it
        super()._inner_step(*args, **kwargs)


def _average(means: dict[Any, Tensor], module: Any, inputs: Iterable[Tensor]) -> None:
    if not (module.training and torch.is_grad_enabled()):
        return
    (x,) = inputs
    x = x.detach()
    if isinstance(module, nn.Conv2d):
        x = F.unfold(x, module.kernel_size, module.dilation, module.padding, module.stride).mT  # type: ignore[arg-type]
    mean = F.pad(x.flatten(0, -2).mean(0), (0, 1), value=1.0)
    means[module] = means[module].lerp(mean, 1 - DECAY) if module in means else mean


def k_fac(optimizer: Optimizer, model: nn.Module) -> Any:
    """K-FAC of the package singd in place of SGD, at its rate and momentum, with factors of blocks of 30 inputs."""
    options = optimizer.defaults
    return peer("SINGD", "singd", "singd.optim.optimizer")(
        model, lr=options["lr"], momentum=options["momentum"], weight_decay=options["weight_decay"],
        kfac_like=True, alpha1=0.0, normalize_lr_cov=True, structures=("block30diagonal", "dense"),
        preconditioner_dtype=(torch.float32,) * 2,  # its blocks know no float64
    )  # fmt: skip


@dataclass(frozen=True)
class Method:
    """One row of a comparison."""

    label: str = ""  # what tables and figures call it
    color: str = "black"
    linear: Callable[[int, int], nn.Module] = nn.Linear
    convolution: Callable[..., nn.Module] = nn.Conv2d
    #: Shape of a sample → the parameterless normaliser before every affine layer and convolution, the first included.
    normalizer: Callable[[tuple[int, ...]], nn.Module] | None = None
    correction: Correction | None = None  # what the optimizer's side does to the gradient
    lr_factor: float = 1.0  # of the protocol's learning rate
    gauge: NetworkGauge | None = None  # whose coordinates the optimizer steps in
    #: (optimizer, model) → an optimizer that reads inputs of layers, so that plain loops have to train it.
    by_inputs: Callable[..., Any] | None = None
    #: Of a language model, the name of its optimizer; networks for images have that of their protocol. Or a function of
    #: parameters, lr and weight_decay in place of either: torch.optim.RMSprop, say.
    optimizer: str | Callable[..., Any] | None = None

    @property
    def applies(self) -> str:
        """What it trains: networks for "images", a "language" model, or both."""
        return "images language" if callable(self.optimizer) else "language" if self.optimizer else "images"

    @property
    def damped(self) -> bool:
        """Whether the method has a damping."""
        by_inputs = self.by_inputs and signature(self.by_inputs).parameters
        return isinstance(self.correction, BatchIdeal) or "damping" in (by_inputs or ())

    def with_damping(self, damping: float | None) -> "Method":
        """The method with another damping, or as it is."""
        if damping is None:
            return self
        if isinstance(self.correction, BatchIdeal):
            return replace(self, correction=replace(self.correction, damping=damping))
        return replace(self, by_inputs=self.by_inputs and partial(self.by_inputs, damping=damping))

    def wrap(self, optimizer: Optimizer, model: nn.Module, example: Tensor) -> Optimizer:
        """Put the method's correction or coordinates around an optimizer."""
        if self.correction is not None:
            return GradientOnly(optimizer, model, self.correction)
        if self.by_inputs is not None:
            return self.by_inputs(optimizer, model)
        if self.gauge is not None:
            return UnitConsistent(optimizer, model, gauge=self.gauge, example_input=example)
        return optimizer

    def normalizers(self, shape: tuple[int, ...]) -> list[nn.Module]:
        """The normaliser for samples of a shape, if the method has one."""
        return [self.normalizer(shape)] if self.normalizer else []

    def affine(self, inputs: int, outputs: int) -> list[nn.Module]:
        """An affine layer behind the normaliser, if the method has one."""
        return [*self.normalizers((inputs,)), self.linear(inputs, outputs)]


def _l2_norm(shape: tuple[int, ...]) -> nn.Module:
    return L2Norm(dim=tuple(range(-len(shape), 0)))


def _batch_norm(shape: tuple[int, ...]) -> nn.Module:
    return (nn.BatchNorm1d if len(shape) == 1 else nn.BatchNorm2d)(shape[0], affine=False)


_PATCHES: dict[str, Any] = {"linear": NormLikeLinear, "convolution": partial(PatchNormConv2d, form="norm-like")}
_LAYER_NORM, _RMS_NORM = (partial(norm, elementwise_affine=False) for norm in (nn.LayerNorm, nn.RMSNorm))

# The damping is from exploratory runs on CIFAR-10 that looked at test accuracy: a report should say so.
BATCH_IDEAL = BatchIdeal(damping=0.3, per_sample=False)
WHITE, WHITE_16 = partial(Whitened, damping=1.0), partial(Whitened, damping=1.0, rank=16)
SCALED, HELD = InputScaled, partial(InputScaled, hold=True)
SOLVED = partial(Preconditioned, damping=1.0)
BY_MEAN = partial(MAC, damping=1.0)

METHODS: dict[str, Method] = {
    # Of networks for images, to which a run brings the optimizer.
    "none": Method("none", "tab:blue"),
    "batchnorm": Method("BatchNorm", "tab:orange", normalizer=_batch_norm),
    "layernorm": Method("LayerNorm", "tab:green", normalizer=_LAYER_NORM),
    "rmsnorm": Method("RMSNorm", "tab:red", normalizer=_RMS_NORM),
    "l2norm": Method("L2 norm, η", "tab:purple", normalizer=_l2_norm),
    "l2norm-half": Method("L2 norm, η/2", "tab:brown", normalizer=_l2_norm, lr_factor=0.5),
    "l2-patch": Method("L2 norm of patches, η", "tab:pink", **_PATCHES),
    "l2-patch-half": Method("L2 norm of patches, η/2", "rosybrown", **_PATCHES, lr_factor=0.5),
    "affine-like": Method("affine-like", "tab:olive", linear=AffineLikeLinear, convolution=PatchNormConv2d),
    "proportional": Method("gradient-only proportional", "tab:cyan", correction=Proportional()),
    "disproportional": Method("gradient-only disproportional", "dimgray", correction=Disproportional()),
    "batch-ideal": Method("gradient-only batch-ideal", "black", correction=BATCH_IDEAL),
    "batch-ideal-default": Method("batch-ideal as it is by default", "darkslategray", correction=BatchIdeal()),
    "uc-network": Method("unit-consistent, network gauge", "crimson", gauge=NetworkGauge()),
    "uc-layer": Method("unit-consistent, layer gauge", "teal", gauge=LayerGauge()),
    "whitened": Method("whitened", "indigo", by_inputs=WHITE),
    "whitened-16": Method("whitened, rank 16", "magenta", by_inputs=WHITE_16),
    "whitened-free": Method("whitened, no graft_norm", "#54278f", by_inputs=partial(WHITE, graft_norm=False)),
    "input-scaled": Method("input-scaled", "#c5b0d5", by_inputs=SCALED),
    "preconditioned": Method("preconditioned", "#9edae5", by_inputs=SOLVED),
    "mac": Method("MAC", "#8c564b", by_inputs=BY_MEAN),
    "singd-30": Method("K-FAC (singd), blocks of 30 inputs", "darkgoldenrod", by_inputs=k_fac),
    "dyt": Method("DyT", "#7f7f7f", normalizer=lambda shape: DyT(shape)),
    "dyt-sqrt-d": Method("DyT, explicit √d", "#9467bd", normalizer=lambda shape: DyT(shape, sqrt_d=True)),
    "dyisru": Method("DyISRU", "#17becf", normalizer=lambda shape: DyISRU(shape)),
    # Shares of weights and bias in the general forms, Eqs. 35 and 37: only β/α of the one and β of the other matter.
    "affine-like-0.25": Method("affine-like, β = 0.25", "#bdc9e1", linear=partial(AffineLikeLinear, beta=0.25)),
    "affine-like-0.5": Method("affine-like, β = 0.5", "#74a9cf", linear=partial(AffineLikeLinear, beta=0.5)),
    "affine-like-2": Method("affine-like, β = 2", "#2b8cbe", linear=partial(AffineLikeLinear, beta=2.0)),
    "affine-like-4": Method("affine-like, β = 4", "#045a8d", linear=partial(AffineLikeLinear, beta=4.0)),
    "norm-like-0.1": Method("norm-like, β = 0.1", "#fdbe85", linear=partial(NormLikeLinear, beta=0.1)),
    "norm-like-0.5": Method("norm-like, β = 0.5", "#fd8d3c", linear=partial(NormLikeLinear, beta=0.5)),
    "norm-like-0.9": Method("norm-like, β = 0.9", "#d94701", linear=partial(NormLikeLinear, beta=0.9)),
    # Of the language model.
    "adamw": Method("AdamW", "tab:blue", optimizer="adamw"),
    "muon": Method("Muon", "tab:orange", optimizer="muon"),
    "batch-ideal-adamw": Method("batch-ideal, AdamW", "black", correction=BATCH_IDEAL, optimizer="adamw"),
    "whitened-adamw": Method("whitened AdamW", "indigo", by_inputs=WHITE, optimizer="adamw"),
    "whitened-muon": Method("whitened Muon", "tab:purple", by_inputs=WHITE, optimizer="muon"),
    "whitened-adamw-16": Method("whitened AdamW, rank 16", "magenta", by_inputs=WHITE_16, optimizer="adamw"),
    "whitened-muon-16": Method("whitened Muon, rank 16", "tab:pink", by_inputs=WHITE_16, optimizer="muon"),
    "mac-adamw": Method("MAC, AdamW", "peru", by_inputs=BY_MEAN, optimizer="adamw"),
    "mac-muon": Method("MAC, Muon", "sienna", by_inputs=BY_MEAN, optimizer="muon"),
    "sgd": Method("SGD, momentum 0.9", "tab:gray", optimizer="sgd"),
    "whitened-sgd": Method("whitened SGD, momentum 0.9", "tab:olive", by_inputs=WHITE, optimizer="sgd"),
    "schedulefree": Method("schedule-free AdamW", "tab:green", optimizer="schedulefree"),
    "soap": Method("SOAP", "tab:brown", optimizer="soap"),
    "whitened-soap": Method("whitened SOAP", "#637939", by_inputs=WHITE, optimizer="soap"),
    "proportional-adamw": Method("proportional, AdamW", "tab:cyan", correction=Proportional(), optimizer="adamw"),
    "input-scaled-adamw": Method("input-scaled AdamW", "#c5b0d5", by_inputs=SCALED, optimizer="adamw"),
    "input-held-adamw": Method("input-scaled AdamW, held", "#9467bd", by_inputs=HELD, optimizer="adamw"),
    "input-scaled-muon": Method("input-scaled Muon", "#ff9896", by_inputs=SCALED, optimizer="muon"),
    "input-held-muon": Method("input-scaled Muon, held", "#d62728", by_inputs=HELD, optimizer="muon"),
    "input-scaled-soap": Method("input-scaled SOAP", "#8c6d31", by_inputs=SCALED, optimizer="soap"),
    "input-scaled-normuon": Method("input-scaled NorMuon", "#ce6dbd", by_inputs=SCALED, optimizer="normuon"),
    "preconditioned-adamw": Method("DoPr (preconditioned AdamW)", "#17becf", by_inputs=SOLVED, optimizer="adamw"),
    "preconditioned-muon": Method("Newton-Muon (preconditioned Muon)", "#9edae5", by_inputs=SOLVED, optimizer="muon"),
    "normuon": Method("NorMuon", "#e377c2", optimizer="normuon"),
    "kron": Method("Kron (PSGD)", "#f7b6d2", optimizer="kron"),
    "mars": Method("MARS", "#c49c94", optimizer="mars"),
    "kfac": Method("K-FAC (singd)", "#bcbd22", optimizer="kfac"),
    "unit-consistent-adamw": Method("unit-consistent AdamW", "crimson", gauge=NetworkGauge(), optimizer="adamw"),
}


def optimizer_name(settings: Mapping[str, Any]) -> str:
    """What trains a run for images: its optimizer, or the method's own."""
    method = METHODS[settings["method"]]
    return method.label if callable(method.optimizer) else str(settings["optimizer"])


@contextmanager
def added(path: Path | None) -> Iterator[None]:
    """Let `METHODS` hold what a Python file's own METHODS does, if one is given; one without is a ValueError."""
    found = {} if path is None else runpy.run_path(str(path)).get("METHODS")
    if not isinstance(found, dict) or not all(isinstance(method, Method) for method in found.values()):
        example = 'METHODS = {"mine": Method("my method", "crimson", correction=Mine())}'
        raise ValueError(f"{path} holds no METHODS; write `from benchmarks.methods import Method`, then `{example}`.")
    if known := METHODS.keys() & found.keys():
        raise ValueError(f"{path}: there is a method {min(known)!r} already; give it another name.")
    METHODS.update(found)
    try:
        yield
    finally:
        for name in found:
            del METHODS[name]
