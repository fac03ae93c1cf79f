"""This library's own claims, and how committed results judge them."""

import math
import statistics
from functools import partial
from typing import Any

from ..core.store import setting
from ..core.table import grouped
from ..methods import METHODS, having
from ..studies.coordinates import psnr
from ..studies.poisson import DERIVATIVES
from ..studies.tuned import ALL_HAVE, best_optimizer
from .judges import (
    TABLE1,
    Claim,
    Finding,
    Sample,
    Stores,
    ahead,
    ahead_in_pairs,
    best,
    compare,
    every,
    level,
    reached,
    rivals,
    row,
    runs,
    slope,
)  # fmt: skip

_at_20, _long, _swept, _cnn, _pool = (
    partial(reached, name) for name in ("cifar10", "cifar10-long", "uc-sweep", "cnn", "cnn-pool")
)
_tuned, _tuned_muon = (partial(reached, "cnn-pool-tuned", optimizer=name) for name in ("adam", "muon"))
_sgd, _adam = (
    partial(reached, "cifar10-trials", activation="tanh", epochs=15, optimizer=optimizer)
    for optimizer in ("sgd", "adam")
)


def _mlp(method: str, optimizer: str | None = None) -> Sample:
    """With tanh, tuned; without an optimizer the one that is best on held-out data."""

    def sample(stores: Stores) -> list[float]:
        own = optimizer or best_optimizer(stores["mlp-tuned"], method, "tanh")
        return reached("mlp-tuned", method, activation="tanh", optimizer=own)(stores)

    return sample


def one_rate(stores: Stores) -> Finding:
    """How far BatchIdeal ends below its best, at rates from 0.3 to 3, over all batch sizes."""
    found = grouped(runs(stores, "rates", method="batch-ideal-default"), setting("batch_size"))
    means = [{r["settings"]["lr"]: statistics.fmean(r["test_accuracy"][-1]) for r in own} for own in found.values()]
    worst = max(max(at.values()) - min(at[lr] for lr in (0.3, 1.0, 3.0)) for at in means)
    sizes = ", ".join(map(str, sorted(found)))
    return Finding(worst < 2, f"at most {worst:.1f} points below its best from 0.3 to 3, batches of {sizes}")


def _text(norm: str, method: str, **more: float | None) -> dict[str, Any]:
    return {"norm": norm, "method": method, **more}


_loss = partial(compare, lower=True)
_FAST: dict[str, Any] = {"embedding_lr": 3e-2}
_LAYERNORM = _text("layernorm", "muon", embedding_deviation=None, embedding_lr=None)
_HELD = _text("none", "input-held-muon", embedding_deviation=1.0, embedding_lr=None)
_WIDE = "cifar10-trials-128"


def _shrinks(stores: Stores) -> Finding:
    """The lead over plain SGD, tuned, at two sizes."""
    leads = []
    for file in ("cifar10-trials", _WIDE):
        own, plain = (reached(file, m, optimizer="sgd", epochs=15)(stores) for m in ("batch-ideal", "none"))
        leads.append(sum(own) / len(own) - sum(plain) / len(plain))
    return Finding(leads[1] < leads[0], f"{leads[0]:+.2f} and {leads[1]:+.2f} points over plain SGD")


OURS = [
    Claim("`BatchIdeal` with SGD leads the tuned tanh MLP after 15 epochs", "cifar10-trials",
        best(_sgd("batch-ideal"), {"affine-like, AdamW": _adam("affine-like"),
        "L2 norm, AdamW": _adam("l2norm"), "none, SGD": _sgd("none")})),
    Claim("… and plain SGD after 40", "cifar10-long", ahead(_long("batch-ideal"), _long("none"))),
    Claim("With settings tuned `BatchIdeal` with SGD leads eleven methods with each of four optimizers, tanh",
        "mlp-tuned", best(_mlp("batch-ideal", "sgd"), {f"{METHODS[name].label}, {optimizer}": _mlp(name, optimizer)
        for name in having("mlp-tuned") if name != "batch-ideal" for optimizer in ALL_HAVE})),
    Claim("… and there BatchNorm is ahead of no normaliser, each with its best optimizer", "mlp-tuned",
        ahead(_mlp("batchnorm"), _mlp("none"))),
    Claim("… and `Whitened(rank=16)`", "mlp-tuned", ahead(_mlp("whitened-16"), _mlp("none"))),
    Claim("Its lead shrinks as the network grows to [128, 128, 128]", _WIDE, _shrinks),
    Claim("Tuned plain SGD is behind affine-like layers with AdamW after 15 epochs", "cifar10-trials",
        ahead(_adam("affine-like"), _sgd("none"))),
    Claim("… and ahead of affine-like layers with AdamW after 40", "cifar10-long",
        ahead(_long("none"), _long("affine-like"))),
    Claim("With AdamW `BatchIdeal` gains little over affine-like layers, within a point", "cifar10-trials",
        level(_adam("batch-ideal"), _adam("affine-like"), 1.0)),
    Claim("At Adam 10⁻³ `BatchIdeal` leads with tanh", "cifar10",
        best(_at_20("batch-ideal", activation="tanh"),
            rivals(having("papers"), partial(_at_20, activation="tanh")))),
    Claim("At Adam 10⁻³ BatchNorm leads with leaky ReLU", "cifar10",
        ahead(*(_at_20(name, activation="leaky-relu") for name in ("batchnorm", "batch-ideal")))),
    Claim("`BatchIdeal` gains by larger batches, tanh, after 20 epochs", "table1-reduced",
        slope("batch-ideal", "tanh", +1, "table1-reduced")),
    Claim("… and after 100", TABLE1, slope("batch-ideal", "tanh", +1)),
    Claim("`Proportional`, which leaves interference in, loses accuracy as the batch grows, tanh", TABLE1,
        slope("proportional", "tanh", -1)),
    Claim("`Proportional` is ahead of no normaliser, tanh and leaky ReLU", TABLE1,
        every([ahead(row("proportional", each), row("none", each)) for each in ("tanh", "leaky-relu")])),
    Claim("On digits one learning rate serves `BatchIdeal()` at batches of 8, 32 and 128", "rates", one_rate),
    Claim("`Whitened(rank=16)` is ahead of no normaliser in CNNs", "cnn, cnn-pool",
        every([ahead(of("whitened-16"), of("none")) for of in (_cnn, _pool)])),
    Claim("… and gives what BatchNorm gives without pooling, within a point", "cnn",
        level(_cnn("whitened-16"), _cnn("batchnorm"), 1.0)),
    Claim("… and with pooling", "cnn-pool", level(_pool("whitened-16"), _pool("batchnorm"), 1.0)),
    Claim("… and with pooling, learning rates and damping tuned, with Adam", "cnn-pool-tuned",
        level(_tuned("whitened-16"), _tuned("batchnorm"), 1.0)),
    Claim("… and with Muon", "cnn-pool-tuned",
        level(_tuned_muon("whitened-16"), _tuned_muon("batchnorm"), 1.0)),
    Claim("`InputScaled` is ahead of no normaliser in CNNs, tuned with Adam", "cnn-pool-tuned",
        ahead(_tuned("input-scaled"), _tuned("none"))),
    Claim("`BatchIdeal` is ahead of no normaliser in CNNs", "cnn, cnn-pool",
        every([ahead(of("batch-ideal"), of("none")) for of in (_cnn, _pool)])),
    *(Claim(f"`Whitened` {label} is ahead of {label} with LayerNorm, test loss", "norm-free",
        _loss("norm-free", _text("layernorm", f"whitened-{name}"), _text("layernorm", name)))
        for name, label in (("adamw", "AdamW"), ("muon", "Muon"))),
    *(Claim(f"… of rank 16, {label}", "norm-free",
        _loss("norm-free", _text("layernorm", f"whitened-{name}-16"), _text("layernorm", name)))
        for name, label in (("adamw", "AdamW"), ("muon", "Muon"))),
    Claim("`Whitened(rank=16)` AdamW without normalisers is ahead of AdamW with LayerNorm, test loss", "norm-free",
        _loss("norm-free", _text("none", "whitened-adamw-16"), _text("layernorm", "adamw"))),
    Claim("`Whitened(rank=16)` Muon is ahead of Muon with LayerNorm after 2,000 steps", "char-lm-2000",
        _loss("char-lm-2000", _text("layernorm", "whitened-muon-16"), _text("layernorm", "muon"))),
    Claim("`BatchIdeal` in front of AdamW is ahead of AdamW, test loss", "char-lm",
        _loss("char-lm", _text("layernorm", "batch-ideal-adamw"), _text("layernorm", "adamw"))),
    Claim("Norm-free by `InputScaled(hold=True)` with Muon: level with LayerNorm after 400 steps, within 0.03",
        "norm-free",
        _loss("norm-free", _HELD, _LAYERNORM, margin=0.03)),
    Claim("… and after 2,000", "norm-free-2000",
        _loss("norm-free-2000", _HELD, _LAYERNORM, margin=0.03)),
    Claim("… and after 2,000 with a learning rate of 0.03 for the embeddings of both", "norm-free-2000",
        _loss("norm-free-2000", _HELD | _FAST, _LAYERNORM | _FAST, margin=0.03)),
    Claim("… and with a single LayerNorm, before the head, ahead after 2,000", "norm-free-2000",
        _loss("norm-free-2000", _HELD | _FAST | {"norm": "head-layernorm"}, _LAYERNORM | _FAST)),
    Claim("… and with twelve layers ahead after 400, of LayerNorm with the better of two embeddings", "norm-free-deep",
        _loss("norm-free-deep", _HELD, _text("layernorm", "muon"))),
    Claim("… and of Muon alone without normalisers, with the same embeddings", "norm-free-deep",
        _loss("norm-free-deep", _HELD, _HELD | {"method": "muon"})),
    *(Claim(f"… and without normalisers ahead of {label}, after 400", "norm-free",
        _loss("norm-free", _HELD, _HELD | {"method": name}))
        for name, label in (("soap", "its nearest rival, SOAP"), ("muon", "Muon alone"))),
    Claim("The network gauge is behind the plain optimizer from PyTorch's own initialisation", "uc-sweep",
        every([ahead(_swept("none", optimizer=o), _swept("uc-network", optimizer=o))
            for o in ("sgd", "momentum", "adam")])),
    Claim("The layer gauge with Adam is ahead of Adam", "uc-sweep",
        ahead(*(_swept(name, optimizer="adam") for name in ("uc-layer", "none")))),
]  # fmt: skip
_CROPS: dict[str, Any] = {"network": "relu", "size": 64, "batch_size": None}
_fits = partial(ahead_in_pairs, "coordinates", _CROPS, shown=psnr)
_RIVALS = [("adam", "Adam"), ("muon", "Muon"), ("soap", "SOAP")]
#: What is learned, how arms are compared in it, and the optimizers that ran with BatchNorm.
_OTHER_NETWORKS = [
    (what, partial(ahead_in_pairs, "coordinates", {**_CROPS, **wanted}, shown=psnr), rivals)
    for what, wanted, rivals in (
        ("Batches of 512 pixels", {"batch_size": 512}, _RIVALS),
        ("Fourier features", {"network": "fourier"}, _RIVALS),
        ("128 × 128 pixels", {"size": 128}, _RIVALS[:2]),
    )
]
_fits_wide = partial(ahead_in_pairs, "coordinates", {**_CROPS, "network": "wide"}, shown=psnr)
_MINUTE = {"equation": "poisson", "points": "fixed", "seconds": 60.0}
_solves = partial(ahead_in_pairs, "poisson", _MINUTE, shown=math.log10, lower=True)
#: Normaliser, optimizer, wrapper, its steps between measurements, the rows that it counts.
_Arm = tuple[str, str, str, None, str | None]


def _bare(norm: str, optimizer: str) -> _Arm:
    return norm, optimizer, "none", None, None


def _white(norm: str, optimizer: str, rows: str | None = None) -> _Arm:
    return norm, optimizer, "whitened", None, rows


FIELDS = [
    Claim("Coordinate network: `Whitened` Adam alone is ahead of Adam with BatchNorm, dB", "coordinates",
        _fits(_white("none", "adam"), _bare("batchnorm", "adam"))),
    *(Claim(f"… `Whitened` {name} without a normaliser is ahead of {name}", "coordinates",
        _fits(_white("none", optimizer), _bare("none", optimizer)))
      for optimizer, name in (("adam", "Adam"), ("muon", "Muon"), ("soap", "SOAP"))),
    *(Claim(f"… `Whitened` SOAP alone is ahead of {name} with BatchNorm", "coordinates",
        _fits(_white("none", "soap"), _bare("batchnorm", optimizer)))
      for optimizer, name in (("adam", "Adam"), ("muon", "Muon"), ("soap", "SOAP"))),
    *(Claim(f"… with BatchNorm `Whitened` {name} is more than 1 dB ahead of {name}", "coordinates",
        _fits(_white("batchnorm", optimizer), _bare("batchnorm", optimizer), margin=1.0))
      for optimizer, name in (("adam", "Adam"), ("muon", "Muon"), ("soap", "SOAP"))),
    Claim("… `Preconditioned` Muon (Newton-Muon) is behind Muon, so that the coordinates are what gains", "coordinates",
        _fits(_bare("none", "muon"), ("none", "muon", "preconditioned", None, None))),
    *(Claim(f"{what}: `Whitened` {name} alone is ahead of {name} with BatchNorm, dB", "coordinates",
        fits(_white("none", optimizer), _bare("batchnorm", optimizer)))
      for what, fits, rivals in _OTHER_NETWORKS for optimizer, name in rivals),
    *(Claim(f"Five layers of 256 behind Fourier features: `Whitened` {name} is ahead of {name}, dB", "coordinates",
        _fits_wide(_white("none", optimizer), _bare("none", optimizer)))
      for optimizer, name in _RIVALS[:2]),
    *(Claim(f"Poisson's equation after 60 seconds: `Whitened` SOAP has less than half the error of {name}, log₁₀",
        "poisson", _solves(_white("none", "soap"), _bare("none", optimizer), margin=math.log10(2)))
      for optimizer, name in (("soap", "SOAP"), ("muon", "Muon"), ("adam", "Adam"), ("lbfgs", "LBFGS"))),
    *(Claim(f"… rows of derivatives lower the error of `Whitened` {name}, log₁₀", "poisson",
        _solves(_white("none", optimizer, DERIVATIVES), _white("none", optimizer)))
      for optimizer, name in (("soap", "SOAP"), ("muon", "Muon"), ("adam", "Adam"))),
]  # fmt: skip
