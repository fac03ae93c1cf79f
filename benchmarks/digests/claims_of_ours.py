"""This library's own claims, and how committed results judge them."""

import math
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

from ..core.arms import arm, errors
from ..core.store import setting
from ..core.tables import grouped
from ..grids import ALL_HAVE, OF_PAPER, best_optimizer
from ..methods import METHODS
from ..problems.pictures import psnr
from ..problems.poisson import DERIVATIVES
from ..studies.tuned import ON_MLP
from .judges import (
    TABLE1,
    Claim,
    Finding,
    Judge,
    Sample,
    Stores,
    ahead,
    ahead_in_pairs,
    best,
    compare,
    every,
    judged_in_pairs,
    later,
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
    Claim("`BatchIdeal` with SGD is ahead of plain SGD on the tuned tanh MLP after 15 epochs", "cifar10-trials",
        ahead(_sgd("batch-ideal"), _sgd("none"))),
    Claim("`BatchIdeal` with SGD is ahead of plain SGD on the tuned tanh MLP after 40 epochs", "cifar10-long",
        ahead(_long("batch-ideal"), _long("none"))),
    Claim("With settings tuned `BatchIdeal` with SGD leads eleven methods with each of four optimizers, tanh",
        "mlp-tuned", best(_mlp("batch-ideal", "sgd"), {f"{METHODS[name].label}, {optimizer}": _mlp(name, optimizer)
        for name in ON_MLP if name != "batch-ideal" for optimizer in ALL_HAVE})),
    Claim("`Whitened(rank=16)` is ahead of no normaliser on the tuned tanh MLP, each with its best optimizer",
        "mlp-tuned", ahead(_mlp("whitened-16"), _mlp("none"))),
    Claim("The lead of `BatchIdeal` shrinks as the network grows to [128, 128, 128]", _WIDE, _shrinks),
    Claim("Tuned plain SGD is behind affine-like layers with AdamW after 15 epochs", "cifar10-trials",
        ahead(_adam("affine-like"), _sgd("none"))),
    Claim("Tuned plain SGD is ahead of affine-like layers with AdamW after 40 epochs", "cifar10-long",
        ahead(_long("none"), _long("affine-like"))),
    Claim("With AdamW `BatchIdeal` gains little over affine-like layers, within a point", "cifar10-trials",
        level(_adam("batch-ideal"), _adam("affine-like"), 1.0)),
    Claim("At Adam 10⁻³ `BatchIdeal` leads with tanh", "cifar10",
        best(_at_20("batch-ideal", activation="tanh"),
            rivals(OF_PAPER, partial(_at_20, activation="tanh")))),
    Claim("At Adam 10⁻³ `BatchIdeal` is ahead of BatchNorm with leaky ReLU", "cifar10",
        ahead(*(_at_20(name, activation="leaky-relu") for name in ("batch-ideal", "batchnorm")))),
    Claim("`BatchIdeal` gains by larger batches, tanh, after 20 epochs", "table1-reduced",
        slope("batch-ideal", "tanh", +1, "table1-reduced")),
    Claim("`BatchIdeal` gains by larger batches, tanh, after 100 epochs", TABLE1,
        slope("batch-ideal", "tanh", +1)),
    Claim("`Proportional`, which leaves interference in, loses accuracy as the batch grows, tanh", TABLE1,
        slope("proportional", "tanh", -1)),
    Claim("`Proportional` is ahead of no normaliser, tanh and leaky ReLU", TABLE1,
        every([ahead(row("proportional", each), row("none", each)) for each in ("tanh", "leaky-relu")])),
    Claim("On digits one learning rate serves `BatchIdeal()` at batches of 8, 32 and 128", "rates", one_rate),
    Claim("`Whitened(rank=16)` is ahead of no normaliser in CNNs", "cnn, cnn-pool",
        every([ahead(of("whitened-16"), of("none")) for of in (_cnn, _pool)])),
    Claim("`Whitened(rank=16)` is level with BatchNorm in the CNN without pooling, Adam 10⁻³, within a point", "cnn",
        level(_cnn("whitened-16"), _cnn("batchnorm"), 1.0)),
    Claim("`Whitened(rank=16)` is level with BatchNorm in the CNN with pooling, Adam 10⁻³, within a point", "cnn-pool",
        level(_pool("whitened-16"), _pool("batchnorm"), 1.0)),
    Claim("`Whitened(rank=16)` is level with BatchNorm in the CNN with pooling, Adam, tuned, within a point",
        "cnn-pool-tuned",
        level(_tuned("whitened-16"), _tuned("batchnorm"), 1.0)),
    Claim("`Whitened(rank=16)` is level with BatchNorm in the CNN with pooling, Muon, tuned, within a point",
        "cnn-pool-tuned",
        level(_tuned_muon("whitened-16"), _tuned_muon("batchnorm"), 1.0)),
    Claim("`InputScaled` is ahead of no normaliser in CNNs, tuned with Adam", "cnn-pool-tuned",
        ahead(_tuned("input-scaled"), _tuned("none"))),
    Claim("`BatchIdeal` is ahead of no normaliser in CNNs", "cnn, cnn-pool",
        every([ahead(of("batch-ideal"), of("none")) for of in (_cnn, _pool)])),
    *(Claim(f"Transformer, LayerNorm: `Whitened` {label} is ahead of {label}, test loss", "norm-free",
        _loss("norm-free", _text("layernorm", f"whitened-{name}"), _text("layernorm", name)), name == "muon")
        for name, label in (("adamw", "AdamW"), ("muon", "Muon"))),
    *(Claim(f"Transformer, LayerNorm: `Whitened(rank=16)` {label} is ahead of {label}, test loss", "norm-free",
        _loss("norm-free", _text("layernorm", f"whitened-{name}-16"), _text("layernorm", name)), name == "adamw")
        for name, label in (("adamw", "AdamW"), ("muon", "Muon"))),
    Claim("Transformer, no norms: `Whitened(rank=16)` AdamW is ahead of AdamW, test loss", "norm-free",
        _loss("norm-free", *(_text("none", m) | {"embedding_deviation": 1.0} for m in ("whitened-adamw-16", "adamw"))),
        in_calls=True),
    Claim("Transformer, LayerNorm, 2,000 steps: `Whitened(rank=16)` Muon is ahead of Muon, test loss",
        "char-lm-2000", _loss("char-lm-2000", _text("layernorm", "whitened-muon-16"), _text("layernorm", "muon"))),
    Claim("`BatchIdeal` in front of AdamW is ahead of AdamW, test loss", "char-lm",
        _loss("char-lm", _text("layernorm", "batch-ideal-adamw"), _text("layernorm", "adamw"))),
    *(Claim(f"Transformer, no norms: {label} is level with Muon and LayerNorm, within 0.03 nats",
        "norm-free", _loss("norm-free", _HELD | {"method": name}, _LAYERNORM, margin=0.03))
        for name, label in (("input-held-muon", "`InputScaled(hold=True)` Muon"), ("muon", "Muon alone"))),
    Claim("Transformer, no norms: `InputScaled(hold=True)` Muon is level with Muon and LayerNorm after 2,000 "
        "steps, within 0.03 nats", "norm-free-2000",
        _loss("norm-free-2000", _HELD, _LAYERNORM, margin=0.03)),
    Claim("Transformer, no norms: `InputScaled(hold=True)` Muon is level with Muon and LayerNorm after 2,000 "
        "steps, embeddings at 0.03, within 0.03 nats", "norm-free-2000",
        _loss("norm-free-2000", _HELD | _FAST, _LAYERNORM | _FAST, margin=0.03)),
    Claim("Transformer, one LayerNorm, 2,000 steps: `InputScaled(hold=True)` Muon is ahead of "
        "Muon and LayerNorm everywhere, test loss", "norm-free-2000",
        _loss("norm-free-2000", _HELD | _FAST | {"norm": "head-layernorm"}, _LAYERNORM | _FAST)),
    Claim("Twelve layers without normalisers: `InputScaled(hold=True)` Muon is ahead of Muon, test loss",
        "norm-free-deep", _loss("norm-free-deep", _HELD, _HELD | {"method": "muon"})),
    *(Claim(f"Transformer, no norms: `InputScaled(hold=True)` Muon is ahead of {label}, test loss",
        "norm-free", _loss("norm-free", _HELD, _HELD | {"method": name}))
        for name, label in (("soap", "SOAP"), ("muon", "Muon"))),
    Claim("`UnitConsistent` is ahead of its optimizer from PyTorch's own initialisation", "uc-sweep",
        every([ahead(_swept("uc-network", optimizer=o), _swept("none", optimizer=o))
            for o in ("sgd", "momentum", "adam")])),
    Claim("The layer gauge with Adam is ahead of Adam", "uc-sweep",
        ahead(*(_swept(name, optimizer="adam") for name in ("uc-layer", "none")))),
]  # fmt: skip
_MINUTE = {"equation": "poisson", "points": "fixed", "seconds": 60.0}
_HEAT = {"equation": "heat", "points": "fixed", "steps": 2000}
_ADAM, _MUON, _SOAP = _RIVALS = [("adam", "Adam"), ("muon", "Muon"), ("soap", "SOAP")]
#: Normaliser, optimizer, wrapper, its steps between measurements, the rows that it counts.
_Arm = tuple[str, str, str, None, str | None]


def _bare(norm: str, optimizer: str) -> _Arm:
    return norm, optimizer, "none", None, None


def _white(norm: str, optimizer: str, rows: str | None = None) -> _Arm:
    return norm, optimizer, "whitened", None, rows


def _learned(network: str = "relu", size: int = 64, batch_size: int | None = None) -> Callable[..., Judge]:
    wanted = {"network": network, "size": size, "batch_size": batch_size}
    return partial(ahead_in_pairs, "coordinates", wanted, shown=psnr)


@later
def _regresses(stores: Stores, condition: int, own: _Arm, other: _Arm) -> Finding:
    """An arm has a lower test error than another behind maps of a condition."""
    results = [r for r in runs(stores, "tabular") if r["settings"]["data_set"].endswith(f"-{condition}")]
    arms = [errors(r for r in results if arm(r) == each) for each in (own, other)]
    return judged_in_pairs(arms[0], arms[1], math.log10, lower=True)


#: A picture and how arms are compared in it; the optimizers of which both the bare and the whitened one ran.
_PICTURES = [
    ("Picture, ReLU", _learned(), _RIVALS),
    ("Picture, ReLU, batches of 512 pixels", _learned(batch_size=512), _RIVALS),
    ("Picture, Fourier features", _learned("fourier"), _RIVALS),
]
_solves = partial(ahead_in_pairs, "poisson", shown=math.log10, lower=True)
FIELDS = [
    *(Claim(f"{what}: `Whitened` {name} is ahead of {name}, dB", "coordinates",
        learned(_white("none", optimizer), _bare("none", optimizer)), in_calls=True)
      for what, learned, rivals in _PICTURES for optimizer, name in rivals),
    *(Claim(f"{what}: `Whitened` {name} alone is ahead of {name} with BatchNorm, dB", "coordinates",
        learned(_white("none", optimizer), _bare("batchnorm", optimizer)))
      for what, learned, rivals in [*_PICTURES, ("Picture, 128 × 128 pixels", _learned(size=128), [_ADAM, _MUON])]
      for optimizer, name in rivals),
    *(Claim(f"Picture, ReLU, BatchNorm: `Whitened` {name} is ahead of {name}, dB", "coordinates",
        _learned()(_white("batchnorm", optimizer), _bare("batchnorm", optimizer))) for optimizer, name in _RIVALS),
    Claim("Picture, ReLU: `Preconditioned` Muon (Newton-Muon) is ahead of Muon, dB", "coordinates",
        _learned()(("none", "muon", "preconditioned", None, None), _bare("none", "muon"))),
    *(Claim(f"Poisson's equation, a minute: `Whitened` {name} has a lower error than {name}, log₁₀", "poisson",
        _solves(_MINUTE, _white("none", optimizer), _bare("none", optimizer))) for optimizer, name in _RIVALS),
    *(Claim(f"Poisson's equation, a minute: rows of derivatives lower the error of `Whitened` {name}, log₁₀", "poisson",
        _solves(_MINUTE, _white("none", optimizer, DERIVATIVES), _white("none", optimizer)))
      for optimizer, name in _RIVALS),
    *(Claim(f"Heat equation, 2,000 steps: `Whitened` {name} has a lower error than {name}, log₁₀", "poisson",
        _solves(_HEAT, _white("none", optimizer, DERIVATIVES), _bare("none", optimizer)))
      for optimizer, name in _RIVALS),
    *(Claim(f"Features of condition {condition:,}: `Whitened` {name} has a lower test error than {name}, log₁₀",
        "tabular", _regresses(condition, _white("none", optimizer), _bare("none", optimizer)))
      for condition in (1, 10000) for optimizer, name in _RIVALS),
    *(Claim(f"Features of condition 10,000: `Whitened` {name} has a lower test error than {name} with BatchNorm, log₁₀",
        "tabular", _regresses(10000, _white("none", optimizer), _bare("batchnorm", optimizer)))
      for optimizer, name in _RIVALS),
]  # fmt: skip
