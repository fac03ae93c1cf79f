"""Every claim of the papers and of this library, in a line each, judged by the committed results."""

from collections.abc import Mapping
from functools import partial
from itertools import groupby
from pathlib import Path

from ..core.claims import Claim, Finding, Sample, Stores, ahead, best, every, image, level, table
from ..core.store import Store
from ..core.study import Digest
from ..methods import METHODS, PAPERS_OWN
from . import judges as by
from .judges import TABLE1

BIRD, UHLMANN = "Bird 2025, The Affine Divergence", "Uhlmann, Unit-Consistent (UC) Adjoint"
JOUDAKI, SU = "Joudaki, Daneshmand and Bach 2023, isometry", "Su 2025, DyT and DyISRU"
OURS = "This library"
STRUCTURAL = ["affine-like", "l2norm", "l2norm-half"]
_NOT_AFFINE = [name for name in PAPERS_OWN if name != "affine-like"]
CONVENTIONAL = [name for name in PAPERS_OWN if name not in STRUCTURAL]

_TUNED = partial(image, "cifar10-trials", activation="tanh", epochs=15)
_LONG = partial(image, "cifar10-long")
_IDEAL, _AFFINE, _SGD = (
    _TUNED(method="batch-ideal", optimizer="sgd"), _TUNED(method="affine-like", optimizer="adam"),
    _TUNED(method="none", optimizer="sgd"),
)  # fmt: skip
_CNN, _POOL = partial(image, "cnn"), partial(image, "cnn-pool")
_REPRODUCE = "python -m benchmarks reproduce "


def _rivals(file: str, names: list[str], own: str) -> Mapping[str, Sample]:
    return {METHODS[name].label: image(file, method=name) for name in names if name != own}


def _bird() -> list[Claim]:
    claims = [
        Claim(BIRD, "A step moves the output of an affine layer too far, \\|x\\|² + 1 times (Eq. 11)", ("divergence",),
            by.plain_gain),
        Claim(BIRD, "Norm-like and affine-like layers and both gradient-only forms cancel that (Eqs. 17 to 21)",
            ("divergence",), by.own_gain),
        Claim(BIRD, "The gradient-only form is prohibitively expensive (below Eq. 21)", ("speed",), by.cheap,
            page="costs"),
        Claim(BIRD, "Its summary: BatchNorm reaches 49.08 with tanh", (TABLE1,), by.misprint),
        Claim(BIRD, "Less divergence trains better", ("mechanism",), by.thesis("mechanism"), _REPRODUCE + "mechanism",
            "mlp", by.thesis("digits-mechanism")),
        Claim(BIRD, "A correction of attention logits is intractable (B.4)", ("attention",), by.intractable,
            page="attention"),
    ]  # fmt: skip
    for activation in ("tanh", "leaky-relu"):
        first = best(by.row("affine-like", activation), by.others(PAPERS_OWN, activation, "affine-like"))
        short = by.slopes(["affine-like", "l2norm"], activation, -1, "batch-size")
        claims += [
            Claim(BIRD, f"Affine-like has the highest mean of Table 1, {activation}", (TABLE1,), first,
                _REPRODUCE + "table1", "mlp", by.best_at_20(activation)),
            Claim(BIRD, f"Structural forms lose accuracy as the batch grows, {activation} (Table 1)", (TABLE1,),
                by.slopes(STRUCTURAL, activation, -1), _REPRODUCE + "table1", "mlp", short),
            Claim(BIRD,
                f"Affine-like is ahead of norm-like at η, which scale invariance does not explain, {activation}",
                (TABLE1,), ahead(by.row("affine-like", activation), by.row("l2norm", activation)),
                _REPRODUCE + "table1"),
        ]  # fmt: skip
    three = every([best(by.row(name, "tanh"), by.others(CONVENTIONAL, "tanh")) for name in STRUCTURAL])
    rising = by.slopes(["none", "batchnorm", "rmsnorm"], "tanh", +1)
    return [
        *claims,
        Claim(BIRD, "All three structural forms are ahead of all normalisers, tanh (Fig. 6)", (TABLE1,), three,
            _REPRODUCE + "table1"),
        Claim(BIRD, "No normaliser, BatchNorm and RMSNorm gain by larger batches, tanh (Fig. 6)", (TABLE1,), rising,
            _REPRODUCE + "table1"),
        Claim(BIRD,
            "Interference lowers accuracy in larger batches, so `Proportional`, which leaves it in, falls (tanh)",
            ("batch-size",), by.slope("proportional", "tanh", -1, "batch-size"), page="mlp"),
        Claim(BIRD, "LayerNorm learns fastest, affine-like passes it at about epoch 20, tanh (Fig. 2)", (TABLE1,),
            by.overtakes(TABLE1), _REPRODUCE + "table1", hint=by.overtakes("cifar10")),
        Claim(BIRD, "Affine-like is ahead at every width and depth but [16, 16, 16], tanh (Fig. 2)", ("fig2",),
            by.along("fig2", "affine-like", _NOT_AFFINE, lambda panel,
            place: not ("3 hidden" in panel and place == 16)), _REPRODUCE + "fig2"),
        Claim(BIRD, "Affine-like is ahead at widths of 64 and 128, leaky ReLU (Fig. 3)", ("fig3",), by.along("fig3",
            "affine-like", _NOT_AFFINE, lambda panel, place: place >= 64), _REPRODUCE + "fig3"),
        Claim(BIRD, "Affine-like is ahead from a width of 1 on, tanh and leaky ReLU (Fig. 4)", ("fig4",),
            by.along("fig4", "affine-like", _NOT_AFFINE), _REPRODUCE + "fig4"),
        Claim(BIRD,
            "Without an activation norm-like layers are ahead of BatchNorm and of none, which are linear (Fig. 5)",
            ("fig5",), by.along("fig5", "l2norm", ["batchnorm", "none"]), _REPRODUCE + "fig5"),
        Claim(BIRD, "In convolutions with pooling no normaliser is level with LayerNorm or ahead of it (Fig. 8)",
            ("fig8",), ahead(image("fig8", method="none"), image("fig8", method="layernorm")), _REPRODUCE + "fig8",
            "convolutions", ahead(_POOL(method="none"), _POOL(method="layernorm"))),
        Claim(BIRD, "In convolutions without pooling BatchNorm is ahead of all others (Fig. 9)", ("fig9",),
            best(image("fig9", method="batchnorm"), _rivals("fig9", PAPERS_OWN, "batchnorm")), _REPRODUCE + "fig9",
            "convolutions", best(_CNN(method="batchnorm"), _rivals("cnn", PAPERS_OWN, "batchnorm"))),
    ]  # fmt: skip


_UHLMANN = [
    Claim(UHLMANN, "Training takes the same path in every gauge", ("uc-rescaled",), every([by.spread("uc-network",
        "sgd"), by.spread("uc-network", "adam")]), page="unit-consistency"),
    Claim(UHLMANN, "A normaliser becomes optional (D.3), after 5 epochs", ("uc-sweep",), ahead(by.swept("uc-network",
        "sgd"), by.swept("batchnorm", "sgd")), page="unit-consistency"),
    Claim(UHLMANN, "A normaliser becomes optional (D.3), after convergence", ("uc-long",), ahead(image("uc-long",
        method="uc-network", optimizer="sgd"), image("uc-long", method="batchnorm", optimizer="sgd")),
        _REPRODUCE + "uc-long"),
    Claim(UHLMANN, "Small batches cost it less than the plain optimizer (D.3)", ("uc-batch",), by.worst("uc-batch",
        "batch"), _REPRODUCE + "uc-batch"),
    Claim(UHLMANN, "The size of the first parameters costs it less (D.3)", ("uc-init",), by.worst("uc-init", "gain"),
        _REPRODUCE + "uc-init"),
    Claim(UHLMANN, "Depth costs it less (D.3)", ("uc-depth",), by.worst("uc-depth", "depth"), _REPRODUCE + "uc-depth"),
]  # fmt: skip

_ALL = "sigmoid, tanh, ReLU, GELU, exp"
_JOUDAKI = [
    Claim(JOUDAKI, "A normaliser, its centring included, never lowers isometry (Fig. 2)", ("isometry-training",),
        by.least_gain, page="isometry"),
    Claim(JOUDAKI, "The gap is bounded by β at infinite width (Theorem 4)", ("isometry-depth",), by.bounded),
    Claim(JOUDAKI, "Mean-field centring stands in for centring (Fig. 4)", ("isometry-depth",), by.gaps(_ALL,
        "mean-field-centred", "layernorm", "level"), page="isometry"),
    Claim(JOUDAKI, "Without normalising the gap is larger (Fig. 5)", ("isometry-depth",),
        by.gaps("tanh, ReLU, GELU, exp", "layernorm", "centred", "below"), page="isometry"),
    Claim(JOUDAKI, "Mean-field constants stand in for normalising with tanh and sigmoid (Fig. 6)", ("isometry-depth",),
        by.gaps("tanh, sigmoid", "mean-field", "layernorm", "level"), page="isometry"),
    Claim(JOUDAKI, "… and with ReLU", ("isometry-depth",), by.gaps("ReLU", "mean-field", "layernorm", "level"),
        page="isometry"),
    Claim(JOUDAKI, "… and not with exp", ("isometry-depth",), by.gaps("exp", "layernorm", "mean-field", "below"),
        page="isometry"),
    Claim(JOUDAKI, "Networks of ten layers train faster with a larger β (Fig. 7)", ("isometry-fig7",),
        by.faster("isometry-fig7", 10, wanted=True), _REPRODUCE + "isometry-fig7", "isometry",
        by.faster("isometry-training", 10, wanted=True)),
    Claim(JOUDAKI, "… and deeper ones do not", ("isometry-fig7",), by.faster("isometry-fig7", 20, wanted=False),
        _REPRODUCE + "isometry-fig7"),
    Claim(JOUDAKI, "SELU and tanh need constants only (Fig. 8)", ("isometry-depth",), by.gaps("SELU, tanh",
        "mean-field", "layernorm", "level"), page="isometry"),
    Claim(JOUDAKI, "Normalised before the activation a network ends less isometric (Fig. 8), ReLU", ("isometry-depth",),
        by.gaps("ReLU", "layernorm", "normalised-first", "below"), page="isometry"),
    Claim(JOUDAKI, "… SELU and tanh", ("isometry-depth",), by.gaps("SELU, tanh", "layernorm", "normalised-first",
        "below"), page="isometry"),
    Claim(JOUDAKI, "Normalising keeps a network near its infinite width (Fig. 9), ReLU", ("isometry-depth",),
        by.gaps("ReLU", "layernorm", "mean-field", "below", "error"), page="isometry"),
    Claim(JOUDAKI, "Mean-field constants are better than Xavier's gain (Fig. B.3), SELU and both ReLUs",
        ("isometry-depth",), by.gaps("SELU, leaky ReLU, ReLU", "mean-field", "xavier", "below"), page="isometry"),
    Claim(JOUDAKI, "… and tanh", ("isometry-depth",), by.gaps("tanh", "mean-field", "xavier", "below"),
        page="isometry"),
    Claim(JOUDAKI, "The widths of hidden layers do not matter (Fig. B.4), within a tenth", ("isometry-widths",),
        by.widths, page="isometry"),
]  # fmt: skip

_FORMS = {METHODS[name].label: image("elementwise", method=name, activation="tanh") for name in ("dyt", "dyt-sqrt-d")}
_SU = [
    Claim(SU, "DyT trains no language model as well as LayerNorm, AdamW and Muon", ("char-lm",),
        every([ahead(by.text("char-lm", "layernorm", name), by.text("char-lm", "dyt", name),
        lower=True) for name in ("adamw", "muon")]), page="language-model"),
    Claim(SU, "√d is better kept than absorbed, tanh MLP", ("elementwise",), ahead(image("elementwise",
        method="dyt-sqrt-d", activation="tanh"), image("elementwise", method="dyt", activation="tanh")),
        _REPRODUCE + "elementwise"),
    Claim(SU, "DyISRU is the best elementwise form, tanh MLP", ("elementwise",), best(image("elementwise",
        method="dyisru", activation="tanh"), _FORMS), _REPRODUCE + "elementwise"),
]  # fmt: skip

_LAYERNORM, _HELD = ("layernorm", None, "muon"), ("none", 1.0, "input-held-muon")
_OURS = [
    Claim(OURS, "`BatchIdeal` behind SGD leads the tuned tanh MLP after 15 epochs", ("cifar10-trials",), best(_IDEAL,
        {"affine-like, AdamW": _AFFINE, "L2 norm, AdamW": _TUNED(method="l2norm", optimizer="adam"),
        "none, SGD": _SGD}), page="mlp"),
    Claim(OURS, "… and plain SGD after 40", ("cifar10-long",), ahead(_LONG(method="batch-ideal"), _LONG(method="none")),
        page="mlp"),
    Claim(OURS, "Its lead shrinks as the network grows to [128, 128, 128]", ("cifar10-trials-128",),
        lambda stores: _shrinks(stores),
        "python -m benchmarks cifar10-trials --hidden 128 128 128 --name cifar10-trials-128"),
    Claim(OURS, "Tuned plain SGD is behind affine-like layers after 15 epochs", ("cifar10-trials",), ahead(_AFFINE,
        _SGD), page="mlp"),
    Claim(OURS, "… and ahead of them after 40", ("cifar10-long",), ahead(_LONG(method="none"),
        _LONG(method="affine-like")), page="mlp"),
    Claim(OURS, "Behind AdamW `BatchIdeal` gains little over affine-like layers, within a point", ("cifar10-trials",),
        level(_TUNED(method="batch-ideal", optimizer="adam"), _AFFINE, 1.0), page="mlp"),
    Claim(OURS, "At Adam 10⁻³ `BatchIdeal` leads with tanh", ("cifar10",), best(by.at_20("batch-ideal", "tanh"),
        {METHODS[n].label: by.at_20(n, "tanh") for n in PAPERS_OWN}), page="mlp"),
    Claim(OURS, "At Adam 10⁻³ BatchNorm leads with leaky ReLU", ("cifar10",), ahead(by.at_20("batchnorm", "leaky-relu"),
        by.at_20("batch-ideal", "leaky-relu")), page="mlp"),
    Claim(OURS, "`BatchIdeal` gains by larger batches, tanh", ("batch-size",), by.slope("batch-ideal", "tanh", +1,
        "batch-size"), page="mlp"),
    Claim(OURS, "`Proportional` is ahead of no normaliser, tanh and leaky ReLU", ("cifar10",),
        every([ahead(by.at_20("proportional", a), by.at_20("none", a)) for a in ("tanh", "leaky-relu")]), page="mlp"),
    Claim(OURS, "One rate serves `BatchIdeal()` at every batch size", ("rates",), by.one_rate, page="mlp"),
    Claim(OURS, "`Whitened(rank=16)` is ahead of no normaliser in CNNs", ("cnn", "cnn-pool"),
        every([ahead(of(method="whitened-16"), of(method="none")) for of in (_CNN, _POOL)]), page="convolutions"),
    Claim(OURS, "… and gives what BatchNorm gives without pooling, within a point", ("cnn",),
        level(_CNN(method="whitened-16"), _CNN(method="batchnorm"), 1.0), page="convolutions"),
    Claim(OURS, "… and with pooling", ("cnn-pool",), level(_POOL(method="whitened-16"), _POOL(method="batchnorm"), 1.0),
        page="convolutions"),
    Claim(OURS, "`BatchIdeal` is ahead of no normaliser in CNNs", ("cnn", "cnn-pool"),
        every([ahead(of(method="batch-ideal"), of(method="none")) for of in (_CNN, _POOL)]), page="convolutions"),
    Claim(OURS, "`Whitened` AdamW is ahead of AdamW with LayerNorm, test loss", ("char-lm",), ahead(by.text("char-lm",
        "layernorm", "whitened-adamw"), by.text("char-lm", "layernorm", "adamw"), lower=True), page="language-model"),
    Claim(OURS, "`Whitened` Muon is ahead of Muon with LayerNorm, test loss", ("char-lm",), ahead(by.text("char-lm",
        "layernorm", "whitened-muon"), by.text("char-lm", "layernorm", "muon"), lower=True), page="language-model"),
    Claim(OURS, "… and after 2,000 steps, rank 16", ("char-lm-2000",), ahead(by.text("char-lm-2000", "layernorm",
        "whitened-muon-16"), by.text("char-lm-2000", "layernorm", "muon"), lower=True), page="language-model"),
    Claim(OURS, "`BatchIdeal` in front of AdamW is ahead of AdamW, test loss", ("char-lm",), ahead(by.text("char-lm",
        "layernorm", "batch-ideal-adamw"), by.text("char-lm", "layernorm", "adamw"), lower=True),
        page="language-model"),
    Claim(OURS, "Norm-free by `InputScaled(hold=True)` behind Muon: level with LayerNorm after 400 steps, within 0.03",
        ("norm-free",), level(by.norm_free("norm-free", *_HELD), by.norm_free("norm-free", *_LAYERNORM), 0.03,
        lower=True), page="language-model"),
    Claim(OURS, "… and after 2,000", ("norm-free-2000",), level(by.norm_free("norm-free-2000", *_HELD),
        by.norm_free("norm-free-2000", *_LAYERNORM), 0.03, lower=True), _REPRODUCE + "norm-free-2000"),
    Claim(OURS, "The network gauge is behind the plain optimizer from PyTorch's own initialisation", ("uc-sweep",),
        every([ahead(by.swept("none", o), by.swept("uc-network", o)) for o in ("sgd", "momentum", "adam")]),
        page="unit-consistency"),
    Claim(OURS, "The layer gauge behind Adam is ahead of Adam", ("uc-sweep",), ahead(by.swept("uc-layer", "adam"),
        by.swept("none", "adam")), page="unit-consistency"),
]  # fmt: skip


def _shrinks(stores: Stores) -> Finding:
    """The lead over plain SGD, tuned, at two sizes."""
    leads = []
    for file in ("cifar10-trials", "cifar10-trials-128"):
        own, plain = (image(file, method=m, optimizer="sgd", epochs=15)(stores) for m in ("batch-ideal", "none"))
        leads.append(sum(own) / len(own) - sum(plain) / len(plain))
    return Finding(leads[1] < leads[0], f"{leads[0]:+.2f} and {leads[1]:+.2f} points over plain SGD")


#: More seeds, where the committed ones do not decide.
_MORE = {
    "cifar10": "cifar10 --seeds 10",
    "cnn": "cnn --preset reduced --epochs 10 --batch-size 128 --seeds 10",
    "char-lm": "char-lm --seeds 10",
    "char-lm-2000": "char-lm-2000 --seeds 10",
    "uc-sweep": "uc-sweep --seeds 10",
}
CLAIMS = [
    claim if claim.decide or claim.files[0] not in _MORE
    else claim._replace(decide=f"python -m benchmarks {_MORE[claim.files[0]]}")
    for claim in (*_bird(), *_UHLMANN, *_JOUDAKI, *_SU, *_OURS)
]  # fmt: skip


def _verdicts(stores: Mapping[str, Store], name: str, folder: Path) -> str:
    """A table for every source, below how many of its claims hold."""
    parts = []
    for source, claims in groupby(CLAIMS, key=lambda claim: claim.source):
        own = list(claims)
        found = [claim.found(stores).holds for claim in own]
        counts = f"{found.count(True)} hold, {found.count(False)} do not, {found.count(None)} are undecided."
        parts.append(f"## {source}\n\n{counts}\n\n{table(own, stores, files=True)}")
    return "\n\n".join(parts)


#: Without these there is little to judge: one's own runs want no verdicts.
_ANY = ("cifar10", "char-lm")


def _of(page: str) -> Digest:
    own = [claim for claim in CLAIMS if claim.page == page]
    return Digest(_ANY, lambda stores, name, folder: table(own, stores, files=False))


PAGES = sorted({claim.page for claim in CLAIMS if claim.page})
DIGESTS = {"verdicts": Digest(_ANY, _verdicts), **{f"claims-{page}": _of(page) for page in PAGES}}
