"""The claims of the papers, and how committed results judge them."""

from functools import partial

from . import judges as by
from .judges import PAPERS_OWN, TABLE1, Claim, ahead, best, every, short, tanh

STRUCTURAL = ["affine-like", "l2norm", "l2norm-half"]
CONVENTIONAL = [name for name in PAPERS_OWN if name not in STRUCTURAL]
_NOT_AFFINE = [name for name in PAPERS_OWN if name != "affine-like"]
_fig8, _fig9 = (partial(by.reached, name) for name in ("fig8", "fig9"))
_elementwise = partial(by.reached, "elementwise", activation="tanh")


def _by_activation(activation: str) -> list[Claim]:
    """What is claimed of Table 1 for both activations."""
    row = partial(by.row, activation=activation)
    shorter = partial(row, file=by.SHORT)
    # With leaky ReLU the paper's own slope of L2 norm at η is about 0.
    falling, named = (
        (STRUCTURAL, "Structural forms")
        if activation == "tanh"
        else (["affine-like", "l2norm-half"], "Affine-like and L2 norm at η/2")
    )
    return [
        Claim(f"Affine-like has the highest mean of Table 1, {activation}", TABLE1,
            best(row("affine-like"), by.rivals(_NOT_AFFINE, row)),
            best(shorter("affine-like"), by.rivals(_NOT_AFFINE, shorter))),
        Claim(f"{named} lose accuracy as the batch grows, {activation} (Table 1)", TABLE1,
            by.slopes(falling, activation, -1), by.slopes(falling, activation, -1, by.SHORT)),
        Claim(f"Affine-like is ahead of norm-like at η, which scale invariance does not explain, {activation}", TABLE1,
            ahead(row("affine-like"), row("l2norm")), ahead(shorter("affine-like"), shorter("l2norm"))),
    ]  # fmt: skip


BIRD = [
    Claim("A step moves the output of an affine layer too far, \\|x\\|² + 1 times (Eq. 11)", "divergence",
        by.plain_gain),
    Claim("Norm-like and affine-like layers and both gradient-only forms cancel that (Eqs. 17 to 21)", "divergence",
        by.own_gain),
    Claim("The gradient-only form is not implementable but by full Jacobians (below Eq. 21)", "speed", by.cheap),
    Claim("Less divergence trains better", "mechanism", by.thesis("mechanism"), by.thesis("digits-mechanism")),
    *_by_activation("tanh"),
    *_by_activation("leaky-relu"),
    Claim("All three structural forms are ahead of all normalisers, tanh (Fig. 6)", TABLE1,
        every([best(tanh(name), by.rivals(CONVENTIONAL, tanh)) for name in STRUCTURAL]),
        every([best(short(name), by.rivals(CONVENTIONAL, short)) for name in STRUCTURAL])),
    Claim("No normaliser, BatchNorm and RMSNorm gain by larger batches, tanh (Fig. 6)", TABLE1,
        by.slopes(["none", "batchnorm", "rmsnorm"], "tanh", +1),
        by.slopes(["none", "batchnorm", "rmsnorm"], "tanh", +1, by.SHORT)),
    Claim("LayerNorm learns fastest, affine-like passes it at about epoch 20, tanh (Fig. 2), on Table 1's network",
        TABLE1,
        by.overtakes(TABLE1), hint=by.overtakes("cifar10")),
    Claim("Affine-like is ahead at every width and depth but [16, 16, 16], tanh (Fig. 2)", "fig2",
        by.along("fig2", "affine-like", _NOT_AFFINE, lambda panel, place: not ("3 hidden" in panel and place == 16))),
    Claim("Affine-like is ahead at widths of 64 and 128, leaky ReLU (Fig. 3)", "fig3",
        by.along("fig3", "affine-like", _NOT_AFFINE, lambda panel, place: place >= 64)),
    Claim("With leaky ReLU BatchNorm and LayerNorm alone drop clearly after their peak (Fig. 3), on Table 1's network",
        TABLE1,
        by.drop(["batchnorm", "layernorm"], PAPERS_OWN, "leaky-relu")),
    Claim("Affine-like and norm-like at η are ahead of all normalisers, leaky ReLU (Fig. 3), on Table 1's network",
        TABLE1,
        every([best(by.leaky(name), by.rivals(CONVENTIONAL, by.leaky)) for name in ("affine-like", "l2norm")]),
        every([best(by.short_leaky(name), by.rivals(CONVENTIONAL, by.short_leaky))
            for name in ("affine-like", "l2norm")])),
    Claim("Affine-like is ahead from a width of 1 on, tanh (Fig. 4)", "fig4",
        by.along("fig4", "affine-like", _NOT_AFFINE, lambda panel, place: "tanh" in panel)),
    Claim("Without an activation norm-like layers are ahead of BatchNorm and of none, which are linear (Fig. 5)",
        "fig5", by.along("fig5", "l2norm", ["batchnorm", "none"])),
    Claim("In convolutions with pooling no normaliser is ahead of LayerNorm, or within a point (Fig. 8)", "fig8",
        by.level(_fig8("none"), _fig8("layernorm"), 1.0, or_ahead=True),
        by.level(by.pool("none"), by.pool("layernorm"), 1.0, or_ahead=True)),
    Claim("In convolutions without pooling BatchNorm is ahead of all others (Fig. 9)", "fig9",
        best(_fig9("batchnorm"), by.rivals(PAPERS_OWN, _fig9, "batchnorm")),
        best(by.cnn("batchnorm"), by.rivals(PAPERS_OWN, by.cnn, "batchnorm"))),
]  # fmt: skip

_UC_AND_NORM = ({"method": "uc-network", "optimizer": "sgd"}, {"method": "batchnorm", "optimizer": "sgd"})
UHLMANN = [
    Claim("Training takes the same path in every gauge", "uc-rescaled",
        every([by.spread("uc-network", "sgd"), by.spread("uc-network", "adam")])),
    Claim("A normaliser becomes optional (D.3), within a point of BatchNorm after 5 epochs", "uc-sweep",
        by.compare("uc-sweep", *_UC_AND_NORM, margin=1.0, or_ahead=True)),
    Claim("… after convergence", "uc-long",
        by.compare("uc-long", *_UC_AND_NORM, margin=1.0, or_ahead=True)),
    Claim("Small batches cost it less than BatchNorm (D.3)", "uc-batch",
        by.worst("uc-batch", "batch", "batchnorm")),
    Claim("The size of the first parameters costs it less (D.3)", "uc-init", by.worst("uc-init", "gain")),
    Claim("Depth costs it less (D.3)", "uc-depth", by.worst("uc-depth", "depth")),
]  # fmt: skip


def _gap(text: str, activations: str, own: str, other: str, relation: str, quantity: str = "measured") -> Claim:
    judge = by.gaps(activations, own, other, relation, quantity)
    return Claim(text, "isometry-depth", judge)


JOUDAKI = [
    Claim("LayerNorm, its centring included, which the paper keeps apart, never lowers isometry (Fig. 2)",
        "isometry-training", by.least_gain),
    Claim("The gap is bounded by β at infinite width (Theorem 4)", "isometry-depth", by.bounded),
    _gap("Mean-field centring stands in for centring (Fig. 4)", "sigmoid, tanh, ReLU, GELU, exp",
        "mean-field-centred", "layernorm", "level"),
    _gap("Without normalising the gap is larger (Fig. 5)", "tanh, ReLU, GELU, exp", "layernorm", "centred", "below"),
    _gap("Mean-field constants stand in for normalising with tanh and sigmoid (Fig. 6)", "tanh, sigmoid",
        "mean-field", "layernorm", "level"),
    _gap("… and with ReLU", "ReLU", "mean-field", "layernorm", "level"),
    _gap("… and not with exp", "exp", "layernorm", "mean-field", "below"),
    Claim("Networks of ten layers train faster with a larger β (Fig. 7)", "isometry-fig7",
        by.faster("isometry-fig7", 10, wanted=True), by.faster("isometry-training", 10, wanted=True)),
    Claim("… and deeper ones do not", "isometry-fig7", by.faster("isometry-fig7", 20, wanted=False)),
    _gap("SELU and tanh need constants only (Fig. 8)", "SELU, tanh", "mean-field", "layernorm", "level"),
    _gap("Normalised before the activation a network ends less isometric (Fig. 8), ReLU", "ReLU", "layernorm",
        "normalised-first", "below"),
    _gap("… SELU and tanh", "SELU, tanh", "layernorm", "normalised-first", "below"),
    _gap("Normalising keeps a network near its infinite width (Fig. 9), ReLU", "ReLU", "layernorm", "mean-field",
        "below", "error"),
    _gap("Mean-field constants are better than Xavier's gain (Fig. B.3), SELU and both ReLUs",
        "SELU, leaky ReLU, ReLU", "mean-field", "xavier", "below"),
    _gap("… and tanh", "tanh", "mean-field", "xavier", "below"),
    Claim("The widths of hidden layers do not matter (Fig. B.4), within a tenth", "isometry-widths", by.widths),
]  # fmt: skip

SU = [
    Claim("DyT does not \"achieve better results\" than a normaliser: LayerNorm is ahead with AdamW and Muon",
        "norm-free", every([by.compare("norm-free", *({"norm": norm, "method": name} for norm in ("layernorm", "dyt")),
            lower=True) for name in ("adamw", "muon")])),
    Claim("√d is better kept than absorbed, tanh MLP", "elementwise",
        ahead(_elementwise("dyt-sqrt-d"), _elementwise("dyt"))),
    Claim("DyISRU is the best elementwise form, tanh MLP", "elementwise",
        best(_elementwise("dyisru"), by.rivals(["dyt", "dyt-sqrt-d"], _elementwise))),
]  # fmt: skip
