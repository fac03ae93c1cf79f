"""The methods of networks for images; a run brings the optimizer."""

from collections.abc import Mapping
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from adiv_optim.corrections import BatchIdeal, Disproportional, Proportional
from adiv_optim.gauge import LayerGauge, NetworkGauge
from adiv_optim.layers import AffineLikeLinear, DyISRU, DyT, L2Norm, NormLikeLinear, PatchNormConv2d
from adiv_optim.optim import InputScaled, Preconditioned, Whitened

from .mac import MAC
from .method import Method, Search


def _l2_norm(shape: tuple[int, ...]) -> nn.Module:
    return L2Norm(dim=tuple(range(-len(shape), 0)))


def _batch_norm(shape: tuple[int, ...]) -> nn.Module:
    return (nn.BatchNorm1d if len(shape) == 1 else nn.BatchNorm2d)(shape[0], affine=False)


_PATCHES: dict[str, Any] = {"linear": NormLikeLinear, "convolution": partial(PatchNormConv2d, form="norm-like")}
_LAYER_NORM, _RMS_NORM = (partial(norm, elementwise_affine=False) for norm in (nn.LayerNorm, nn.RMSNorm))


def _kfac(optimizer: Optimizer, model: nn.Module, inputs: str = "dense") -> Any:
    """K-FAC in the place of SGD, at its rate and momentum; all but a factor's structure is as its package has it."""
    if find_spec("singd") is None:
        raise ValueError("method 'singd' needs the package singd; pip install '.[peers]' brings it.")
    options = optimizer.defaults
    own = {} if inputs == "dense" else {"preconditioner_dtype": (torch.float32,) * 2}  # its blocks know no float64
    return import_module("singd.optim.optimizer").SINGD(
        model, lr=options["lr"], momentum=options["momentum"], weight_decay=options["weight_decay"],
        kfac_like=True, alpha1=0.0, normalize_lr_cov=True, structures=(inputs, "dense"), **own,
    )  # fmt: skip


# The damping is from exploratory runs on CIFAR-10 that looked at test accuracy: a report should say so.
BATCH_IDEAL = BatchIdeal(damping=0.3, per_sample=False)
WHITE, WHITE_16 = partial(Whitened, damping=1.0), partial(Whitened, damping=1.0, rank=16)
SCALED, HELD = partial(InputScaled), partial(InputScaled, hold=True)
SOLVED = partial(Preconditioned, damping=1.0)
BY_MEAN = partial(MAC, damping=1.0)

#: What `uc-sweep` tries, by optimizer; the layer gauge wants rates of its own: typical canonical weights are about 1.
_PLAIN, _CANONICAL = (
    {
        "adam": (3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1), "sgd": (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0),
        "momentum": (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3),
    },
    {
        "adam": (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1), "sgd": (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0),
        "momentum": (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0),
    },
)  # fmt: skip


def _swept(rates: Mapping[str, tuple[float, ...]], *optimizers: str) -> tuple[Search, ...]:
    return tuple(Search("uc-sweep", (optimizer,), rates[optimizer]) for optimizer in optimizers or rates)


def _best(study: str, **rates: float) -> tuple[Search, ...]:
    """Around a rate that another search found best with an optimizer."""
    return tuple(Search(study, (optimizer,), (rate,)) for optimizer, rate in rates.items())


IMAGES: dict[str, Method] = {
    "none": Method("none", "tab:blue",
        studies="papers compared mlp-tuned cnn-tuned cifar10-tuned digits-tuned departures elementwise proportions",
        searches=_swept(_PLAIN) + _best("uc-best", sgd=0.03, adam=3e-4) + _best("cifar10-trials", sgd=0.1)),
    "batchnorm": Method("BatchNorm", "tab:orange", normalizer=_batch_norm,
        studies="papers compared mlp-tuned cnn-tuned cifar10-tuned departures",
        searches=_swept(_PLAIN, "sgd") + _best("uc-best", sgd=0.01)),
    "layernorm": Method("LayerNorm", "tab:green", normalizer=_LAYER_NORM,
        studies="papers compared mlp-tuned cnn-tuned cifar10-tuned digits-tuned elementwise",
        searches=_best("uc-best", sgd=0.03)),  # that of the plain network: it is not in the sweep
    "rmsnorm": Method("RMSNorm", "tab:red", normalizer=_RMS_NORM, studies="papers compared mlp-tuned elementwise"),
    "l2norm": Method("L2 norm, η", "tab:purple", normalizer=_l2_norm,
        studies="papers compared mlp-tuned cifar10-tuned departures proportions",
        searches=_best("cifar10-trials", adam=3e-3)),
    "l2norm-half": Method("L2 norm, η/2", "tab:brown", normalizer=_l2_norm, lr_factor=0.5, studies="papers compared"),
    "l2-patch": Method("L2 norm of patches, η", "tab:pink", **_PATCHES, studies="cnn mlp-tuned"),
    "l2-patch-half": Method("L2 norm of patches, η/2", "rosybrown", **_PATCHES, lr_factor=0.5, studies="cnn"),
    "affine-like": Method("affine-like", "tab:olive", linear=AffineLikeLinear, convolution=PatchNormConv2d,
        studies="papers compared mlp-tuned cifar10-tuned digits-tuned departures proportions",
        searches=_best("cifar10-trials", adam=3e-3)),
    "proportional": Method("gradient-only proportional", "tab:cyan", correction=Proportional(),
        studies="compared mlp-tuned cifar10-tuned"),
    "disproportional": Method("gradient-only disproportional", "dimgray", correction=Disproportional(),
        studies="compared"),
    "batch-ideal": Method("gradient-only batch-ideal", "black", correction=BATCH_IDEAL,
        studies="compared mlp-tuned cifar10-tuned digits-tuned",
        searches=_best("cifar10-trials", sgd=10.0, momentum=1.0, adam=1e-3)),
    "batch-ideal-default": Method("batch-ideal as it is by default", "darkslategray", correction=BatchIdeal()),
    "uc-network": Method("unit-consistent, network gauge", "crimson", gauge=NetworkGauge(),
        searches=_swept(_PLAIN) + _best("uc-best", sgd=0.01, adam=1e-4)),
    "uc-layer": Method("unit-consistent, layer gauge", "teal", gauge=LayerGauge(),
        searches=_swept(_CANONICAL) + _best("uc-best", adam=0.01)),
    "whitened": Method("whitened", "indigo", by_inputs=WHITE, studies="cnn-tuned digits-tuned"),
    "whitened-16": Method("whitened, rank 16", "magenta", by_inputs=WHITE_16,
        studies="cnn cnn-tuned mlp-tuned digits-optimizers"),
    "input-scaled": Method("input-scaled", "#c5b0d5", by_inputs=SCALED,
        studies="cnn-tuned mlp-tuned digits-optimizers"),
    "preconditioned": Method("preconditioned", "#9edae5", by_inputs=SOLVED),
    "mac": Method("MAC", "#8c564b", by_inputs=BY_MEAN),
    "singd": Method("K-FAC (singd)", "goldenrod", by_inputs=partial(_kfac)),
    "singd-30": Method("K-FAC (singd), blocks of 30 inputs", "darkgoldenrod",
        by_inputs=partial(_kfac, inputs="block30diagonal")),
    "dyt": Method("DyT", "#7f7f7f", normalizer=lambda shape: DyT(shape), studies="mlp-tuned elementwise"),
    "dyt-sqrt-d": Method("DyT, explicit √d", "#9467bd", normalizer=lambda shape: DyT(shape, sqrt_d=True),
        studies="elementwise"),
    "dyisru": Method("DyISRU", "#17becf", normalizer=lambda shape: DyISRU(shape), studies="elementwise"),
    # Shares of weights and bias in the general forms, Eqs. 35 and 37: only β/α of the one and β of the other matter.
    **{f"affine-like-{beta:g}": Method(f"affine-like, β = {beta:g}", color, linear=partial(AffineLikeLinear, beta=beta),
        studies="proportions")
       for beta, color in {0.25: "#bdc9e1", 0.5: "#74a9cf", 2.0: "#2b8cbe", 4.0: "#045a8d"}.items()},
    **{f"norm-like-{beta:g}": Method(f"norm-like, β = {beta:g}", color, linear=partial(NormLikeLinear, beta=beta),
        studies="proportions")
       for beta, color in {0.1: "#fdbe85", 0.5: "#fd8d3c", 0.9: "#d94701"}.items()},
}  # fmt: skip
