"""Every claim of the papers and of this library: its text, the files and runs that judge it, and how."""

from collections.abc import Iterable
from functools import partial
from typing import Any

from ..grids import ALL_HAVE, OF_PAPER
from ..problems.regression import DRAWN
from ..studies.tuned import ON_MLP
from ..train import DERIVATIVES
from . import special
from .judges import BEST, TABLE1, Claim, ahead, falls, level, level_or_ahead, rises
from .reached import Settings
from .special import below, overlap, whole


def run(method: str, **more: Any) -> Settings:
    """The settings of a method's runs."""
    return {"method": method, **more}


def runs_of(methods: Iterable[str], **more: Any) -> list[Settings]:
    """The settings of the runs of several methods."""
    return [run(method, **more) for method in methods]


STRUCTURAL = ["affine-like", "l2norm", "l2norm-half"]
_CONVENTIONAL = runs_of(name for name in OF_PAPER if name not in STRUCTURAL)
_AFFINE, _OTHERS = run("affine-like"), runs_of(name for name in OF_PAPER if name != "affine-like")
_PLAIN = run("none")
_TANH: Settings = {"activation": "tanh"}
_LEAKY: Settings = {"activation": "leaky-relu"}

BIRD = [
    Claim("A step moves the output of an affine layer too far, \\|x\\|² + 1 times (Eq. 11)", "divergence",
        special.own_gain, _PLAIN),
    Claim("Norm-like and affine-like layers and both gradient-only forms cancel that (Eqs. 17 to 21)", "divergence",
        special.own_gain, _AFFINE, runs_of(["norm-like", "proportional", "disproportional"])),
    Claim("The gradient-only form is not implementable but by full Jacobians (below Eq. 21)", "speed",
        special.needs_no_jacobians),
    Claim("Less divergence trains better", "mechanism", special.thesis),
    *(claim for activation, falling, named in (
        ("tanh", STRUCTURAL, "Structural forms"),
        # With leaky ReLU the paper's own slope of L2 norm at η is about 0.
        ("leaky-relu", ["affine-like", "l2norm-half"], "Affine-like and L2 norm at η/2"),
    ) for claim in (
        Claim(f"Affine-like has the highest mean of Table 1, {activation}", TABLE1,
            ahead, _AFFINE, _OTHERS, each=[{"activation": activation}]),
        Claim(f"{named} lose accuracy as the batch grows, {activation} (Table 1)", TABLE1,
            falls, {"activation": activation}, each=runs_of(falling)),
        Claim(f"Affine-like is ahead of norm-like at η, which scale invariance does not explain, {activation}", TABLE1,
            ahead, _AFFINE, [run("l2norm")], each=[{"activation": activation}]),
    )),
    Claim("All three structural forms are ahead of all normalisers, tanh (Fig. 6)", TABLE1,
        ahead, _TANH, _CONVENTIONAL, each=runs_of(STRUCTURAL, **_TANH)),
    Claim("No normaliser, BatchNorm and RMSNorm gain by larger batches, tanh (Fig. 6)", TABLE1,
        rises, _TANH, each=runs_of(["none", "batchnorm", "rmsnorm"])),
    Claim("LayerNorm learns fastest, affine-like passes it at about epoch 20, tanh (Fig. 2), on Table 1's network",
        TABLE1, special.overtakes, _AFFINE, [run("layernorm")], each=[{**_TANH, "batch_size": 32}]),
    Claim("Affine-like is ahead at every width and depth but [16, 16, 16], tanh (Fig. 2)", "fig2",
        whole(partial(special.along, keep=lambda panel, place: not ("3 hidden" in panel and place == 16))),
        _AFFINE, _OTHERS),
    Claim("Affine-like is ahead at widths of 64 and 128, leaky ReLU (Fig. 3)", "fig3",
        whole(partial(special.along, keep=lambda panel, place: place >= 64)), _AFFINE, _OTHERS),
    Claim("With leaky ReLU BatchNorm and LayerNorm alone drop clearly after their peak (Fig. 3), on Table 1's network",
        TABLE1, partial(special.drop, of=["batchnorm", "layernorm"]), _LEAKY,
        runs_of(name for name in OF_PAPER if name not in ("batchnorm", "layernorm"))),
    Claim("Affine-like and norm-like at η are ahead of all normalisers, leaky ReLU (Fig. 3), on Table 1's network",
        TABLE1, ahead, _LEAKY, _CONVENTIONAL, each=runs_of(["affine-like", "l2norm"], **_LEAKY)),
    Claim("Affine-like is ahead from a width of 1 on, tanh (Fig. 4)", "fig4",
        whole(special.along), _AFFINE, _OTHERS, each=[_TANH]),
    Claim("Without an activation norm-like layers are ahead of BatchNorm and of none, which are linear (Fig. 5)",
        "fig5", whole(special.along), run("l2norm"), runs_of(["batchnorm", "none"])),
    Claim("In convolutions with pooling no normaliser is ahead of LayerNorm, or within a point (Fig. 8)", "cnn-pool",
        whole(level_or_ahead), _PLAIN, [run("layernorm")], 1.0),
    Claim("In convolutions without pooling BatchNorm is ahead of all others (Fig. 9)", "cnn",
        whole(ahead), run("batchnorm"), runs_of(name for name in OF_PAPER if name != "batchnorm")),
]  # fmt: skip

_SGD: Settings = {"optimizer": "sgd"}
_GAUGED, _NORMED = run("uc-network", **_SGD), [run("batchnorm", **_SGD)]
UHLMANN = [
    Claim("Training takes the same path in every gauge", "uc-rescaled",
        special.same_path, run("uc-network"), [_PLAIN], each=[_SGD, {"optimizer": "adam"}]),
    Claim("A normaliser becomes optional (D.3), within a point of BatchNorm after 5 epochs", "uc-sweep",
        level_or_ahead, _GAUGED, _NORMED, 1.0),
    Claim("A normaliser becomes optional (D.3), within a point of BatchNorm after 30 epochs", "uc-long",
        level_or_ahead, _GAUGED, _NORMED, 1.0),
    Claim("Small batches cost it less than BatchNorm (D.3)", "uc-batch",
        partial(special.loses_less, along="batch"), _GAUGED, _NORMED),
    *(Claim(f"{text} costs it less (D.3)", file,
        partial(special.loses_less, along=along), _GAUGED, [run("none", **_SGD)])
      for text, file, along in (
        ("The size of the first parameters", "uc-init", "gain"), ("Depth", "uc-depth", "depth"))),
]  # fmt: skip


def _gap(text: str, activations: str, own: str, judge: Any, other: str, quantity: str = "measured") -> Claim:
    """A claim of the gap of isometry with every one of some activations, by variants of the network."""
    each = [{"activation": name, "quantity": quantity} for name in activations.split(", ")]
    return Claim(text, "isometry-depth", judge, {"variant": own}, [{"variant": other}], each=each)


JOUDAKI = [
    Claim("LayerNorm, its centring included, which the paper keeps apart, never lowers isometry (Fig. 2)",
        "isometry-training", special.never_lowered),
    Claim("The gap is bounded by β at infinite width (Theorem 4)", "isometry-depth", special.bounded),
    _gap("Mean-field centring stands in for centring (Fig. 4)", "sigmoid, tanh, ReLU, GELU, exp",
        "mean-field-centred", overlap, "layernorm"),
    _gap("Without normalising the gap is larger (Fig. 5)", "tanh, ReLU, GELU, exp", "layernorm", below, "centred"),
    _gap("Mean-field constants stand in for normalising with tanh and sigmoid (Fig. 6)", "tanh, sigmoid",
        "mean-field", overlap, "layernorm"),
    _gap("Mean-field constants stand in for normalising with ReLU (Fig. 6)", "ReLU",
        "mean-field", overlap, "layernorm"),
    _gap("Mean-field constants do not stand in for normalising with exp (Fig. 6)", "exp",
        "layernorm", below, "mean-field"),
    *(Claim(f"Networks of {number} layers {verb} faster with a larger β (Fig. 7)", "isometry-training",
        partial(special.faster, layers=layers, wanted=wanted))
      for number, verb, layers, wanted in (("ten", "train", 10, True), ("twenty", "do not train", 20, False))),
    _gap("SELU and tanh need constants only (Fig. 8)", "SELU, tanh", "mean-field", overlap, "layernorm"),
    *(_gap(f"Normalised before the activation a network ends less isometric (Fig. 8), {activations}",
        activations.replace(" and ", ", "), "layernorm", below, "normalised-first")
      for activations in ("ReLU", "SELU and tanh")),
    _gap("Normalising keeps a network near its infinite width (Fig. 9), ReLU", "ReLU",
        "layernorm", below, "mean-field", "error"),
    _gap("Mean-field constants are better than Xavier's gain (Fig. B.3), SELU and both ReLUs", "SELU, leaky ReLU, ReLU",
        "mean-field", below, "xavier"),
    _gap("Mean-field constants are better than Xavier's gain (Fig. B.3), tanh", "tanh", "mean-field", below, "xavier"),
    Claim("The widths of hidden layers do not matter (Fig. B.4), within a tenth", "isometry-widths",
        special.same_at_widths),
]  # fmt: skip

SU = [
    Claim("DyT does not \"achieve better results\" than a normaliser: LayerNorm is ahead with AdamW and Muon",
        "norm-free", ahead, {"norm": "layernorm"}, [{"norm": "dyt"}], each=runs_of(["adamw", "muon"])),
    Claim("√d is better kept than absorbed, tanh MLP", "elementwise",
        ahead, run("dyt-sqrt-d"), [run("dyt")], each=[_TANH]),
    Claim("DyISRU is the best elementwise form, tanh MLP", "elementwise",
        ahead, run("dyisru"), runs_of(["dyt", "dyt-sqrt-d"]), each=[_TANH]),
]  # fmt: skip

_IDEAL, _RANK_16, _BATCHNORM = run("batch-ideal"), run("whitened-16"), [run("batchnorm")]
_TRIALS: Settings = {**_TANH, "epochs": 15}
_IDEAL_SGD: Settings = {**_IDEAL, **_SGD}
_PLAIN_SGD: Settings = {**_PLAIN, **_SGD}
#: Optimizer of a transformer → its label.
_TEXT = {"adamw": "AdamW", "muon": "Muon"}
_LAYERNORM: Settings = {"norm": "layernorm"}
_DRAWN: Settings = {"norm": "none", "embedding_deviation": 1.0}
_HELD = run("input-held-muon", **_DRAWN, embedding_lr=None)
_MUON: Settings = run("muon", **_LAYERNORM, embedding_deviation=None, embedding_lr=None)
_FAST: Settings = {"embedding_lr": 3e-2}
OURS = [
    Claim("`BatchIdeal` with SGD is ahead of plain SGD on the tuned tanh MLP after 15 epochs", "cifar10-trials",
        ahead, _IDEAL, [_PLAIN], each=[{**_TRIALS, **_SGD}]),
    Claim("`BatchIdeal` with SGD is ahead of plain SGD on the tuned tanh MLP after 40 epochs", "cifar10-long",
        ahead, _IDEAL, [_PLAIN]),
    Claim("With settings tuned `BatchIdeal` with SGD leads eleven methods with each of four optimizers, tanh",
        "mlp-tuned", ahead, _IDEAL_SGD,
        [run(name, optimizer=each) for name in ON_MLP if name != "batch-ideal" for each in ALL_HAVE], each=[_TANH]),
    Claim("`Whitened(rank=16)` is ahead of no normaliser on the tuned tanh MLP, each with its best optimizer",
        "mlp-tuned", ahead, _RANK_16, [_PLAIN], each=[{**_TANH, "optimizer": BEST}]),
    Claim("The lead of `BatchIdeal` shrinks as the network grows to [128, 128, 128]", "cifar10-trials-128",
        special.shrinks, _IDEAL, [_PLAIN], each=[{**_SGD, "epochs": 15}]),
    Claim("Tuned plain SGD is behind affine-like layers with AdamW after 15 epochs", "cifar10-trials",
        ahead, {**_AFFINE, "optimizer": "adam"}, [_PLAIN_SGD], each=[_TRIALS]),
    Claim("Tuned plain SGD is ahead of affine-like layers with AdamW after 40 epochs", "cifar10-long",
        ahead, _PLAIN, [_AFFINE]),
    Claim("With AdamW `BatchIdeal` gains little over affine-like layers, within a point", "cifar10-trials",
        level, _IDEAL, [_AFFINE], 1.0, each=[{**_TRIALS, "optimizer": "adam"}]),
    Claim("At Adam 10⁻³ `BatchIdeal` leads with tanh", "cifar10", ahead, _IDEAL, runs_of(OF_PAPER), each=[_TANH]),
    Claim("At Adam 10⁻³ `BatchIdeal` is ahead of BatchNorm with leaky ReLU", "cifar10",
        ahead, _IDEAL, _BATCHNORM, each=[_LEAKY]),
    *(Claim(f"`BatchIdeal` gains by larger batches, tanh, after {epochs} epochs", file, rises, _IDEAL, each=[_TANH])
      for epochs, file in ((20, "table1-reduced"), (100, TABLE1))),
    Claim("`Proportional`, which leaves interference in, loses accuracy as the batch grows, tanh", TABLE1,
        falls, run("proportional", **_TANH)),
    Claim("`Proportional` is ahead of no normaliser, tanh and leaky ReLU", TABLE1,
        ahead, run("proportional"), [_PLAIN], each=[_TANH, _LEAKY]),
    Claim("On digits one learning rate serves `BatchIdeal()` at batches of 8, 32 and 128", "rates",
        special.flat_rates, run("batch-ideal-default")),
    Claim("`Whitened(rank=16)` is ahead of no normaliser in CNNs", "cnn, cnn-pool", ahead, _RANK_16, [_PLAIN]),
    *(Claim(f"`Whitened(rank=16)` is level with BatchNorm in the CNN {how}, within a point", file,
        level, _RANK_16, _BATCHNORM, 1.0, each=[with_optimizer])
      for how, file, with_optimizer in (
        ("without pooling, Adam 10⁻³", "cnn", {}), ("with pooling, Adam 10⁻³", "cnn-pool", {}),
        ("with pooling, Adam, tuned", "cnn-pool-tuned", {"optimizer": "adam"}),
        ("with pooling, Muon, tuned", "cnn-pool-tuned", {"optimizer": "muon"}))),
    Claim("`InputScaled` is ahead of no normaliser in CNNs, tuned with Adam", "cnn-pool-tuned",
        ahead, run("input-scaled"), [_PLAIN], each=[{"optimizer": "adam"}]),
    Claim("`BatchIdeal` is ahead of no normaliser in CNNs", "cnn, cnn-pool", ahead, _IDEAL, [_PLAIN]),
    *(Claim(f"Transformer, LayerNorm: `{wrapper}` {label} is ahead of {label}, test loss", "norm-free",
        ahead, run(method.format(name)), [run(name)], each=[_LAYERNORM], in_calls=name == in_calls)
      for wrapper, method, in_calls in (
        ("Whitened", "whitened-{}", "muon"), ("Whitened(rank=16)", "whitened-{}-16", "adamw"))
      for name, label in _TEXT.items()),
    Claim("Transformer, no norms: `Whitened(rank=16)` AdamW is ahead of AdamW, test loss", "norm-free",
        ahead, run("whitened-adamw-16"), [run("adamw")], each=[_DRAWN], in_calls=True),
    Claim("Transformer, LayerNorm, 2,000 steps: `Whitened(rank=16)` Muon is ahead of Muon, test loss", "char-lm-2000",
        ahead, run("whitened-muon-16"), [run("muon")], each=[_LAYERNORM]),
    Claim("`BatchIdeal` in front of AdamW is ahead of AdamW, test loss", "char-lm",
        ahead, run("batch-ideal-adamw"), [run("adamw")], each=[_LAYERNORM]),
    *(Claim(f"Transformer, no norms: {label} is level with Muon and LayerNorm{after}, within 0.03 nats", file,
        level, {**_HELD, "method": method, **more}, [{**_MUON, **more}], 0.03)
      for label, method, after, file, more in (
        ("`InputScaled(hold=True)` Muon", "input-held-muon", "", "norm-free", {}),
        ("Muon alone", "muon", "", "norm-free", {}),
        ("`InputScaled(hold=True)` Muon", "input-held-muon", " after 2,000 steps", "norm-free-2000", {}),
        ("`InputScaled(hold=True)` Muon", "input-held-muon", " after 2,000 steps, embeddings at 0.03",
            "norm-free-2000", _FAST))),
    Claim("Transformer, one LayerNorm, 2,000 steps: `InputScaled(hold=True)` Muon is ahead of "
        "Muon and LayerNorm everywhere, test loss", "norm-free-2000",
        ahead, {**_HELD, **_FAST, "norm": "head-layernorm"}, [{**_MUON, **_FAST}]),
    Claim("Twelve layers without normalisers: `InputScaled(hold=True)` Muon is ahead of Muon, test loss",
        "norm-free-deep", ahead, _HELD, [{**_HELD, "method": "muon"}]),
    *(Claim(f"Transformer, no norms: `InputScaled(hold=True)` Muon is ahead of {label}, test loss", "norm-free",
        ahead, _HELD, [{**_HELD, "method": name}]) for name, label in (("soap", "SOAP"), ("muon", "Muon"))),
    Claim("`UnitConsistent` is ahead of its optimizer from PyTorch's own initialisation", "uc-sweep",
        ahead, run("uc-network"), [_PLAIN], each=[{"optimizer": name} for name in ("sgd", "momentum", "adam")]),
    Claim("The layer gauge with Adam is ahead of Adam", "uc-sweep",
        ahead, run("uc-layer"), [_PLAIN], each=[{"optimizer": "adam"}]),
]  # fmt: skip


def _arm(optimizer: str, method: str = "none", norm: str = "none", rows: str | None = None) -> Settings:
    return {"norm": norm, "optimizer": optimizer, "method": method, "every": None, "rows": rows}


_OPTIMIZERS = {"adam": "Adam", "muon": "Muon", "soap": "SOAP"}


def _picture(network: str = "relu", size: int = 64, batch_size: int | None = None) -> list[Settings]:
    return [{"network": network, "size": size, "batch_size": batch_size}]


_PICTURES = {
    "Picture, ReLU": _picture(),
    "Picture, ReLU, batches of 512 pixels": _picture(batch_size=512),
    "Picture, Fourier features": _picture("fourier"),
}
_MINUTE = [{"equation": "poisson", "points": "fixed", "seconds": 60.0}]
_HEAT = [{"equation": "heat", "points": "fixed", "steps": 2000}]


def _behind(condition: int) -> list[Settings]:
    """The data sets behind maps of a condition."""
    return [{"data_set": {f"{name}-{condition}" for name in DRAWN}}]


FIELDS = [
    *(Claim(f"{where}: `Whitened` {name} is ahead of {name}, dB", "coordinates",
        ahead, _arm(optimizer, "whitened"), [_arm(optimizer)], each=each, in_calls=True)
      for where, each in _PICTURES.items() for optimizer, name in _OPTIMIZERS.items()),
    *(Claim(f"{where}: `Whitened` {name} alone is ahead of {name} with BatchNorm, dB", "coordinates",
        ahead, _arm(optimizer, "whitened"), [_arm(optimizer, norm="batchnorm")], each=each)
      for where, each in [*_PICTURES.items(), ("Picture, 128 × 128 pixels", _picture(size=128))]
      for optimizer, name in _OPTIMIZERS.items() if "128" not in where or optimizer != "soap"),
    *(Claim(f"Picture, ReLU, BatchNorm: `Whitened` {name} is ahead of {name}, dB", "coordinates",
        ahead, _arm(optimizer, "whitened", "batchnorm"), [_arm(optimizer, norm="batchnorm")], each=_picture())
      for optimizer, name in _OPTIMIZERS.items()),
    Claim("Picture, ReLU: `Preconditioned` Muon (Newton-Muon) is ahead of Muon, dB", "coordinates",
        ahead, _arm("muon", "preconditioned"), [_arm("muon")], each=_picture()),
    *(Claim(f"Poisson's equation, a minute: `Whitened` {name} has a lower error than {name}, log₁₀", "poisson",
        ahead, _arm(optimizer, "whitened"), [_arm(optimizer)], each=_MINUTE)
      for optimizer, name in _OPTIMIZERS.items()),
    *(Claim(f"Poisson's equation, a minute: rows of derivatives lower the error of `Whitened` {name}, log₁₀", "poisson",
        ahead, _arm(optimizer, "whitened", rows=DERIVATIVES), [_arm(optimizer, "whitened")], each=_MINUTE)
      for optimizer, name in _OPTIMIZERS.items()),
    *(Claim(f"Heat equation, 2,000 steps: `Whitened` {name} has a lower error than {name}, log₁₀", "poisson",
        ahead, _arm(optimizer, "whitened", rows=DERIVATIVES), [_arm(optimizer)], each=_HEAT)
      for optimizer, name in _OPTIMIZERS.items()),
    *(Claim(f"Features of condition {condition:,}: `Whitened` {name} has a lower test error than {name}{rival}, log₁₀",
        "tabular", ahead, _arm(optimizer, "whitened"), [_arm(optimizer, norm=norm)], each=_behind(condition))
      for condition, norm, rival in ((1, "none", ""), (10000, "none", ""), (10000, "batchnorm", " with BatchNorm"))
      for optimizer, name in _OPTIMIZERS.items()),
]  # fmt: skip

#: Source → its claims.
CLAIMS = {
    "Bird 2025": BIRD,
    "Uhlmann": UHLMANN,
    "Joudaki et al. 2023": JOUDAKI,
    "Su 2025": SU,
    "This library": OURS,
    "This library, pictures, equations and regression": FIELDS,
}
