"""Every claim of the papers and of this library: its text, the files and runs that judge it, and how."""

from collections.abc import Iterable
from functools import partial
from typing import Any

from ..grids import OF_PAPER
from ..problems.regression import DRAWN
from ..studies.fourier import STEPS
from ..train import DERIVATIVES
from . import special
from .judges import TABLE1, Claim, ahead, falls, no_worse, rises
from .reached import NONLINEAR, Settings
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
    Claim("Affine-like is ahead with one hidden layer of 16 and of 64, tanh (Fig. 2)", "fig2-long",
        whole(special.along), _AFFINE, _OTHERS),
    Claim("Affine-like is ahead of all normalisers with one hidden layer of 16 and of 64, tanh (Fig. 2)", "fig2-long",
        whole(special.along), _AFFINE, _CONVENTIONAL),
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
        whole(no_worse), _PLAIN, [run("layernorm")]),
    Claim("In convolutions without pooling BatchNorm is ahead of all others (Fig. 9)", "cnn",
        whole(ahead), run("batchnorm"), runs_of(name for name in OF_PAPER if name != "batchnorm")),
]  # fmt: skip

_SGD: Settings = {"optimizer": "sgd"}
_GAUGED, _NORMED = run("uc-network", **_SGD), [run("batchnorm", **_SGD)]
UHLMANN = [
    Claim("Training takes the same path in every gauge", "uc-rescaled",
        special.same_path, run("uc-network"), [_PLAIN], each=[_SGD, {"optimizer": "adam"}]),
    Claim("A normaliser becomes optional (D.3), within a point of BatchNorm after 5 epochs", "uc-sweep",
        no_worse, _GAUGED, _NORMED),
    Claim("A normaliser becomes optional (D.3), within a point of BatchNorm after 30 epochs", "uc-long",
        no_worse, _GAUGED, _NORMED),
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

#: Optimizer → what pages call it.
_NAMES = {"sgd": "SGD", "momentum": "momentum", "adam": "Adam", "muon": "Muon", "soap": "SOAP", "adamw": "AdamW"}


def _gains(
    where: str, call: str, file: str, own: Settings, optimizers: str, each: Settings | None = None, **bare: Any
) -> list[Claim]:
    """A wrapper is ahead of the same optimizer without it: a claim for each optimizer.

    Args:
        where: what all runs have learned.
        call: what pages call the wrapper.
        file: of results.
        own: settings of its runs.
        optimizers: names of them.
        each: settings of its runs and of the others'.
        bare: settings in which the others differ, beside the method.
    """
    return [
        Claim(f"{where}: `{call}`", file, ahead, {"optimizer": name, **own},
            [{"optimizer": name, **own, "method": "none", **bare}], each=[each or {}], against=_NAMES[name])
        for name in optimizers.split()
    ]  # fmt: skip


def _gains_on_text(
    where: str, call: str, method: str, optimizers: str, file: str = "norm-free", **beside: Any
) -> list[Claim]:
    """The same of a language model, whose methods name an optimizer."""
    return [
        Claim(f"{where}: `{call}`", file, ahead, run(method.format(name)), [run(name)], each=[beside],
            against=_NAMES[name])
        for name in optimizers.split()
    ]  # fmt: skip


_LAYERNORM: Settings = {"norm": "layernorm", "embedding_deviation": None, "embedding_lr": None}
_DRAWN: Settings = {"norm": "none", "embedding_deviation": 1.0, "embedding_lr": None}
_FAST: Settings = {"embedding_lr": 3e-2}
_IDEAL_SGD: Settings = {**run("batch-ideal"), "optimizer": "sgd"}
OURS = [
    *_gains("Tanh MLP, tuned", "BatchIdeal", "mlp-tuned", run("batch-ideal"), "sgd momentum adam muon", _TANH),
    *_gains("Tanh MLP, tuned", "Whitened(rank=16)", "mlp-tuned", run("whitened-16"), "sgd momentum adam muon soap",
        _TANH),
    *_gains("Tanh MLP, tuned", "Proportional", "mlp-tuned", run("proportional"), "sgd momentum adam muon", _TANH),
    *_gains("Tanh MLP, tuned", "Disproportional", "mlp-tuned", run("disproportional"), "sgd", _TANH),
    *_gains("Tanh MLP, weight decay tuned too", "BatchIdeal", "cifar10-trials", run("batch-ideal"), "sgd",
        {**_TANH, "epochs": 15}),
    *_gains("Tanh MLP, 40 epochs, decided on by test accuracy", "BatchIdeal", "cifar10-long",
        run("batch-ideal"), "sgd"),
    Claim("The lead of `BatchIdeal` shrinks as the network grows to [128, 128, 128]", "cifar10-trials-128",
        special.shrinks, _IDEAL_SGD, [{**_PLAIN, "optimizer": "sgd"}], each=[{"epochs": 15}]),
    Claim("MLP, leaky ReLU, Adam 10⁻³: `BatchIdeal`", "cifar10", ahead, run("batch-ideal"), [run("batchnorm")],
        each=[_LEAKY], against="BatchNorm"),
    Claim("Table 1, leaky ReLU: `Proportional`", TABLE1, ahead, run("proportional"), [_PLAIN], each=[_LEAKY],
        against="Adam 10⁻³"),
    Claim("On digits one learning rate serves `BatchIdeal()` at batches of 8, 32 and 128", "rates",
        special.flat_rates, run("batch-ideal-default")),
    *_gains("CNN, tuned", "Whitened(rank=16)", "cnn-pool-tuned", run("whitened-16"), "adam muon"),
    *_gains("CNN, tuned", "Whitened", "cnn-pool-tuned", run("whitened"), "adam muon soap"),
    *_gains("CNN, tuned", "BatchIdeal", "cnn-pool-tuned", run("batch-ideal"), "adam"),
    *_gains("CNN, tuned", "Proportional", "cnn-pool-tuned", run("proportional"), "adam"),
    *_gains("CNN, tuned", "InputScaled", "cnn-pool-tuned", run("input-scaled"), "adam muon"),
    *(Claim("CNN, tuned: `Whitened(rank=16)`", "cnn-pool-tuned", ahead, run("whitened-16"),
        [run("batchnorm")], each=[{"optimizer": name}], against=f"{_NAMES[name]} with BatchNorm")
      for name in ("adam", "muon")),
    *_gains_on_text("Transformer, LayerNorm", "Whitened", "whitened-{}", "adamw muon", **_LAYERNORM),
    *_gains_on_text("Transformer, LayerNorm", "Whitened(rank=16)", "whitened-{}-16", "adamw muon", **_LAYERNORM),
    *_gains_on_text("Transformer, LayerNorm, 2,000 steps", "Whitened(rank=16)", "whitened-{}-16", "muon",
        "char-lm-2000", norm="layernorm"),
    *_gains_on_text("Transformer, LayerNorm", "Whitened", "whitened-{}", "soap sgd", "char-lm", norm="layernorm"),
    *_gains_on_text("Transformer, LayerNorm", "BatchIdeal", "batch-ideal-{}", "adamw", "char-lm", norm="layernorm"),
    *_gains_on_text("Transformer, no norms", "Whitened(rank=16)", "whitened-{}-16", "adamw muon", **_DRAWN),
    *_gains_on_text("Transformer, no norms", "InputScaled", "input-scaled-{}", "adamw soap", **_DRAWN),
    *_gains_on_text("Transformer, no norms", "InputScaled(hold=True)", "input-held-{}", "adamw muon", **_DRAWN),
    *_gains_on_text("Transformer, no norms, twelve layers", "InputScaled(hold=True)", "input-held-{}", "muon",
        "norm-free-deep", **_DRAWN),
    *_gains_on_text("Transformer, one LayerNorm, 2,000 steps", "InputScaled(hold=True)", "input-held-{}", "muon",
        "norm-free-2000", norm="head-layernorm", embedding_deviation=1.0, **_FAST),
    Claim("Transformer, no norms, 2,000 steps: `InputScaled(hold=True)`", "norm-free-2000", ahead,
        {**run("input-held-muon"), **_DRAWN, **_FAST}, [{**run("muon"), **_LAYERNORM, **_FAST}],
        against="Muon with LayerNorm"),
    *_gains("MLP, leaky ReLU, 5 epochs", "UnitConsistent", "uc-sweep", run("uc-network"), "sgd momentum adam"),
    *_gains("MLP, leaky ReLU, 5 epochs", "UnitConsistent(gauge=LayerGauge())", "uc-sweep", run("uc-layer"), "adam"),
]  # fmt: skip


def _arm(method: str, norm: str = "none", rows: str | None = None) -> Settings:
    return {"norm": norm, "method": method, "rows": rows}


_ALL = "adam muon soap"
_EQUAL_TIME: Settings = {"time_of": STEPS}
#: Rivals of GaussNewton: what pages call them, optimizer and method.
_RIVALS = (
    ("self-scaled BFGS", "self-scaled-bfgs", "none"), ("SOAP", "soap", "none"), ("Whitened SOAP", "soap", "whitened"),
    ("SPRING", "spring", "none"), ("1,000 random features", "random-features", "none"),
)  # fmt: skip


def _picture(network: str, batch_size: int | None = None) -> Settings:
    return {"network": network, "size": 64, "batch_size": batch_size}


def _behind(condition: int) -> Settings:
    """The data sets behind maps of a condition."""
    return {"data_set": {f"{name}-{condition}" for name in DRAWN}}


_WHITE = partial(_gains, call="Whitened", own=_arm("whitened"))
FIELDS = [
    *_WHITE("Picture, Fourier features, equal time", file="fourier", optimizers=_ALL,
        each={**_EQUAL_TIME, "held_out": None}),
    *_WHITE("Picture, Fourier features, held-out pixels", file="fourier", optimizers=_ALL,
        each={**_EQUAL_TIME, "held_out": True}),
    *_WHITE("Picture, ReLU alone", file="initialisation", optimizers="adam soap", each=_picture("relu")),
    *_WHITE("Picture, ReLU, He's initialisation", file="initialisation", optimizers="adam soap",
        each=_picture("he")),
    *_WHITE("Picture, ReLU, twenty layers", file="initialisation", optimizers="adam", each=_picture("deep")),
    Claim("Picture, ReLU, twenty layers: `Whitened`", "initialisation", ahead, _arm("whitened"),
        [_arm("none", "batchnorm")], each=[{**_picture("deep"), "optimizer": "adam"}], against="Adam with BatchNorm"),
    *_gains("Picture, ReLU alone", "Whitened(graft_norm=False)", "initialisation", _arm("whitened-free"), "adam soap",
        _picture("relu")),
    *_WHITE("Picture, ReLU, batches of 512 pixels", file="coordinates", optimizers=_ALL, each=_picture("relu", 512)),
    *_gains("Picture, ReLU, BatchNorm", "Whitened", "coordinates", _arm("whitened", "batchnorm"), _ALL,
        _picture("relu")),
    *_gains("Picture, ReLU alone", "Preconditioned", "coordinates", _arm("preconditioned"), "muon", _picture("relu")),
    *(claim._replace(against=f"{claim.against}, {name}") for equation, name in NONLINEAR.items() for claim in
      _gains("Nonlinear, a minute", "Whitened", "equations", _arm("whitened", rows=DERIVATIVES),
        "muon soap" if equation == "burgers" else "soap", {"equation": equation}, rows=None)),
    *(claim for condition in (1, 10000) for claim in
      _WHITE(f"Features of condition {condition:,}", file="tabular", optimizers=_ALL, each=_behind(condition))),
    *(Claim("Features of condition 10,000: `Whitened`", "tabular", ahead, _arm("whitened"),
        [_arm("none", norm)], each=[{**_behind(10000), "optimizer": name}], against=f"{_NAMES[name]}{rival}")
      for norm, rival in (("batchnorm", " with BatchNorm"), ("columns", ", columns whitened once"))
      for name in _ALL.split()),
    *(Claim(f"Nonlinear, a minute, {name}: `GaussNewton`", "equations", ahead, {"optimizer": "gauss-newton"},
        [{"optimizer": optimizer, "method": method}], each=[{"equation": equation}], against=rival)
      for equation, name in NONLINEAR.items() for rival, optimizer, method in _RIVALS),
]  # fmt: skip

#: Source → its claims.
CLAIMS = {
    "Bird 2025": BIRD,
    "Uhlmann": UHLMANN,
    "Joudaki et al. 2023": JOUDAKI,
    "Su 2025": SU,
    "This library": [*OURS, *FIELDS],
}
