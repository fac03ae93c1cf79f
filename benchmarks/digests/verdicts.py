"""Every claim of the papers and of this library, in a line each, judged by the committed results."""

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ..core.claims import HEADER, Claim, Finding, Sample, Stores, ahead, best, every, image, level, line
from ..core.store import Store
from ..core.study import Digest
from ..core.table import Row, Section, Table, exact
from ..fields.report import ahead_in_pairs
from ..methods import METHODS, having
from ..studies import RECIPES
from ..studies.coordinates import psnr
from ..studies.factorial import ALL_HAVE, best_optimizer
from ..studies.poisson import DERIVATIVES
from . import judges as by
from .judges import TABLE1

#: Table 1 after a fifth of its epochs.
SHORT = "table1-reduced"
PAPERS_OWN = having("papers")
STRUCTURAL = ["affine-like", "l2norm", "l2norm-half"]
CONVENTIONAL = [name for name in PAPERS_OWN if name not in STRUCTURAL]
_NOT_AFFINE = [name for name in PAPERS_OWN if name != "affine-like"]


_FILES = ("cifar10", "uc-sweep", "cifar10-long", "cnn", "cnn-pool", "fig8", "fig9")
_at_20, _swept, _long, _cnn, _pool, _fig8, _fig9 = (partial(image, name) for name in _FILES)
_tuned, _tuned_muon = (partial(image, "cnn-pool-tuned", optimizer=name) for name in ("adam", "muon"))
_elementwise = partial(image, "elementwise", activation="tanh")
_sgd, _adam = (
    partial(image, "cifar10-trials", activation="tanh", epochs=15, optimizer=optimizer) for optimizer in ("sgd", "adam")
)


def _mlp(method: str, optimizer: str | None = None) -> Sample:
    """With tanh, tuned; without an optimizer the one that is best on held-out data."""

    def sample(stores: Stores) -> list[float]:
        own = optimizer or best_optimizer(stores["mlp-tuned"], method, "tanh")
        return image("mlp-tuned", method, activation="tanh", optimizer=own)(stores)

    return sample


def _texts(file: str, own: tuple[str, str], other: tuple[str, str]) -> by.Judge:
    """One normaliser and method has a lower test loss than another."""
    return ahead(by.text(file, *own), by.text(file, *other), lower=True)


#: Test losses after 400 steps, at the better of the embeddings that were run.
_embedded = partial(by.at_best_embeddings, "norm-free")


def _by_activation(activation: str) -> list[Claim]:
    """What is claimed of Table 1 for both activations."""
    row = partial(by.row, activation=activation)
    short = partial(row, file=SHORT)
    # With leaky ReLU the paper's own slope of L2 norm at η is about 0.
    falling, named = (
        (STRUCTURAL, "Structural forms")
        if activation == "tanh"
        else (["affine-like", "l2norm-half"], "Affine-like and L2 norm at η/2")
    )
    return [
        Claim(f"Affine-like has the highest mean of Table 1, {activation}", TABLE1,
            best(row("affine-like"), by.rivals(_NOT_AFFINE, row)),
            best(short("affine-like"), by.rivals(_NOT_AFFINE, short))),
        Claim(f"{named} lose accuracy as the batch grows, {activation} (Table 1)", TABLE1,
            by.slopes(falling, activation, -1), by.slopes(falling, activation, -1, SHORT)),
        Claim(f"Affine-like is ahead of norm-like at η, which scale invariance does not explain, {activation}", TABLE1,
            ahead(row("affine-like"), row("l2norm")), ahead(short("affine-like"), short("l2norm"))),
    ]  # fmt: skip


_tanh = partial(by.row, activation="tanh")
_leaky = partial(by.row, activation="leaky-relu")
_short, _short_leaky = partial(_tanh, file=SHORT), partial(_leaky, file=SHORT)
_BIRD = [
    Claim("A step moves the output of an affine layer too far, \\|x\\|² + 1 times (Eq. 11)", "divergence",
        by.plain_gain),
    Claim("Norm-like and affine-like layers and both gradient-only forms cancel that (Eqs. 17 to 21)", "divergence",
        by.own_gain),
    Claim("The gradient-only form is not implementable but by full Jacobians (below Eq. 21)", "speed", by.cheap),
    Claim("Less divergence trains better", "mechanism", by.thesis("mechanism"), by.thesis("digits-mechanism")),
    Claim("A correction of attention logits is \"perhaps intractable in general\" (B.4)", "attention",
        by.intractable),
    *_by_activation("tanh"),
    *_by_activation("leaky-relu"),
    Claim("All three structural forms are ahead of all normalisers, tanh (Fig. 6)", TABLE1,
        every([best(_tanh(name), by.rivals(CONVENTIONAL, _tanh)) for name in STRUCTURAL]),
        every([best(_short(name), by.rivals(CONVENTIONAL, _short)) for name in STRUCTURAL])),
    Claim("No normaliser, BatchNorm and RMSNorm gain by larger batches, tanh (Fig. 6)", TABLE1,
        by.slopes(["none", "batchnorm", "rmsnorm"], "tanh", +1),
        by.slopes(["none", "batchnorm", "rmsnorm"], "tanh", +1, SHORT)),
    Claim("LayerNorm learns fastest, affine-like passes it at about epoch 20, tanh (Fig. 2)", TABLE1,
        by.overtakes(TABLE1), hint=by.overtakes("cifar10")),
    Claim("Affine-like is ahead at every width and depth but [16, 16, 16], tanh (Fig. 2)", "fig2",
        by.along("fig2", "affine-like", _NOT_AFFINE, lambda panel, place: not ("3 hidden" in panel and place == 16))),
    Claim("Affine-like is ahead at widths of 64 and 128, leaky ReLU (Fig. 3)", "fig3",
        by.along("fig3", "affine-like", _NOT_AFFINE, lambda panel, place: place >= 64)),
    Claim("With leaky ReLU BatchNorm and LayerNorm alone drop clearly after their peak (Fig. 3)", TABLE1,
        by.drop(["batchnorm", "layernorm"], PAPERS_OWN, "leaky-relu")),
    Claim("Affine-like and norm-like at η are ahead of all normalisers, leaky ReLU (Fig. 3)", TABLE1,
        every([best(_leaky(name), by.rivals(CONVENTIONAL, _leaky)) for name in ("affine-like", "l2norm")]),
        every([best(_short_leaky(name), by.rivals(CONVENTIONAL, _short_leaky)) for name in ("affine-like", "l2norm")])),
    Claim("Affine-like is ahead from a width of 1 on, tanh (Fig. 4)", "fig4",
        by.along("fig4", "affine-like", _NOT_AFFINE, lambda panel, place: "tanh" in panel)),
    Claim("Without an activation norm-like layers are ahead of BatchNorm and of none, which are linear (Fig. 5)",
        "fig5", by.along("fig5", "l2norm", ["batchnorm", "none"])),
    Claim("In convolutions with pooling no normaliser is ahead of LayerNorm, or within a point (Fig. 8)", "fig8",
        level(_fig8("none"), _fig8("layernorm"), 1.0, or_ahead=True),
        level(_pool("none"), _pool("layernorm"), 1.0, or_ahead=True)),
    Claim("In convolutions without pooling BatchNorm is ahead of all others (Fig. 9)", "fig9",
        best(_fig9("batchnorm"), by.rivals(PAPERS_OWN, _fig9, "batchnorm")),
        best(_cnn("batchnorm"), by.rivals(PAPERS_OWN, _cnn, "batchnorm"))),
]  # fmt: skip

_UHLMANN = [
    Claim("Training takes the same path in every gauge", "uc-rescaled",
        every([by.spread("uc-network", "sgd"), by.spread("uc-network", "adam")])),
    Claim("A normaliser becomes optional (D.3), within a point of BatchNorm after 5 epochs", "uc-sweep",
        level(_swept("uc-network", optimizer="sgd"), _swept("batchnorm", optimizer="sgd"), 1.0, or_ahead=True)),
    Claim("… after convergence", "uc-long",
        level(image("uc-long", "uc-network", optimizer="sgd"), image("uc-long", "batchnorm", optimizer="sgd"), 1.0,
            or_ahead=True)),
    Claim("Small batches cost it less than BatchNorm (D.3)", "uc-batch",
        by.worst("uc-batch", "batch", "batchnorm")),
    Claim("The size of the first parameters costs it less (D.3)", "uc-init", by.worst("uc-init", "gain")),
    Claim("Depth costs it less (D.3)", "uc-depth", by.worst("uc-depth", "depth")),
]  # fmt: skip


def _gap(text: str, activations: str, own: str, other: str, relation: str, quantity: str = "measured") -> Claim:
    judge = by.gaps(activations, own, other, relation, quantity)
    return Claim(text, "isometry-depth", judge)


_JOUDAKI = [
    Claim("A normaliser, its centring included, never lowers isometry (Fig. 2)", "isometry-training", by.least_gain),
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

_SU = [
    Claim("DyT does not \"achieve better results\" than a normaliser: LayerNorm is ahead with AdamW and Muon",
        "norm-free", every([ahead(_embedded("layernorm", name), _embedded("dyt", name), lower=True)
            for name in ("adamw", "muon")])),
    Claim("√d is better kept than absorbed, tanh MLP", "elementwise",
        ahead(_elementwise("dyt-sqrt-d"), _elementwise("dyt"))),
    Claim("DyISRU is the best elementwise form, tanh MLP", "elementwise",
        best(_elementwise("dyisru"), by.rivals(["dyt", "dyt-sqrt-d"], _elementwise))),
]  # fmt: skip

_ADAMW, _MUON = ("layernorm", "adamw"), ("layernorm", "muon")
_LAYERNORM, _HELD = ("layernorm", None, "muon"), ("none", 1.0, "input-held-muon")
_WIDE = "cifar10-trials-128"


def _shrinks(stores: Stores) -> Finding:
    """The lead over plain SGD, tuned, at two sizes."""
    leads = []
    for file in ("cifar10-trials", _WIDE):
        own, plain = (image(file, m, optimizer="sgd", epochs=15)(stores) for m in ("batch-ideal", "none"))
        leads.append(sum(own) / len(own) - sum(plain) / len(plain))
    return Finding(leads[1] < leads[0], f"{leads[0]:+.2f} and {leads[1]:+.2f} points over plain SGD")


_OURS = [
    Claim("`BatchIdeal` with SGD leads the tuned tanh MLP after 15 epochs", "cifar10-trials",
        best(_sgd("batch-ideal"), {"affine-like, AdamW": _adam("affine-like"),
        "L2 norm, AdamW": _adam("l2norm"), "none, SGD": _sgd("none")})),
    Claim("… and plain SGD after 40", "cifar10-long", ahead(_long("batch-ideal"), _long("none"))),
    Claim("With rates and dampings tuned `BatchIdeal` with SGD leads ten methods with each of four optimizers, tanh",
        "mlp-tuned", best(_mlp("batch-ideal", "sgd"), {f"{METHODS[name].label}, {optimizer}": _mlp(name, optimizer)
        for name in having("mlp-tuned") if name != "batch-ideal" for optimizer in ALL_HAVE})),
    Claim("… and there BatchNorm is ahead of no normaliser, each with its best optimizer", "mlp-tuned",
        ahead(_mlp("batchnorm"), _mlp("none"))),
    Claim("… and `Whitened(rank=16)`", "mlp-tuned", ahead(_mlp("whitened-16"), _mlp("none"))),
    Claim("Its lead shrinks as the network grows to [128, 128, 128]", _WIDE, _shrinks,
        command=f"cifar10-trials --hidden 128 128 128 --name {_WIDE}"),
    Claim("Tuned plain SGD is behind affine-like layers with AdamW after 15 epochs", "cifar10-trials",
        ahead(_adam("affine-like"), _sgd("none"))),
    Claim("… and ahead of affine-like layers with AdamW after 40", "cifar10-long",
        ahead(_long("none"), _long("affine-like"))),
    Claim("With AdamW `BatchIdeal` gains little over affine-like layers, within a point", "cifar10-trials",
        level(_adam("batch-ideal"), _adam("affine-like"), 1.0)),
    Claim("At Adam 10⁻³ `BatchIdeal` leads with tanh", "cifar10",
        best(_at_20("batch-ideal", activation="tanh"),
            by.rivals(PAPERS_OWN, partial(_at_20, activation="tanh")))),
    Claim("At Adam 10⁻³ BatchNorm leads with leaky ReLU", "cifar10",
        ahead(*(_at_20(name, activation="leaky-relu") for name in ("batchnorm", "batch-ideal")))),
    Claim("`BatchIdeal` gains by larger batches, tanh, after 20 epochs", SHORT,
        by.slope("batch-ideal", "tanh", +1, SHORT)),
    Claim("… and after 100", TABLE1, by.slope("batch-ideal", "tanh", +1)),
    Claim("`Proportional`, which leaves interference in, loses accuracy as the batch grows, tanh", TABLE1,
        by.slope("proportional", "tanh", -1), by.slope("proportional", "tanh", -1, SHORT)),
    Claim("`Proportional` is ahead of no normaliser, tanh and leaky ReLU", TABLE1,
        every([ahead(of("proportional"), of("none")) for of in (_tanh, _leaky)]),
        every([ahead(of("proportional"), of("none")) for of in (_short, _short_leaky)])),
    Claim("On digits one rate serves `BatchIdeal()` at batches of 8, 32 and 128", "rates", by.one_rate),
    Claim("`Whitened(rank=16)` is ahead of no normaliser in CNNs", "cnn, cnn-pool",
        every([ahead(of("whitened-16"), of("none")) for of in (_cnn, _pool)])),
    Claim("… and gives what BatchNorm gives without pooling, within a point", "cnn",
        level(_cnn("whitened-16"), _cnn("batchnorm"), 1.0)),
    Claim("… and with pooling", "cnn-pool", level(_pool("whitened-16"), _pool("batchnorm"), 1.0)),
    Claim("… and with pooling, rates and damping tuned, with Adam", "cnn-pool-tuned",
        level(_tuned("whitened-16"), _tuned("batchnorm"), 1.0)),
    Claim("… and with Muon", "cnn-pool-tuned",
        level(_tuned_muon("whitened-16"), _tuned_muon("batchnorm"), 1.0)),
    Claim("`InputScaled` is ahead of no normaliser in CNNs, tuned with Adam", "cnn-pool-tuned",
        ahead(_tuned("input-scaled"), _tuned("none"))),
    Claim("`BatchIdeal` is ahead of no normaliser in CNNs", "cnn, cnn-pool",
        every([ahead(of("batch-ideal"), of("none")) for of in (_cnn, _pool)])),
    *(Claim(f"`Whitened` {label} is ahead of {label} with LayerNorm, test loss", "norm-free",
        ahead(_embedded("layernorm", f"whitened-{name}"), _embedded("layernorm", name), lower=True))
        for name, label in (("adamw", "AdamW"), ("muon", "Muon"))),
    *(Claim(f"… of rank 16, {label}", "norm-free",
        ahead(_embedded("layernorm", f"whitened-{name}-16"), _embedded("layernorm", name), lower=True))
        for name, label in (("adamw", "AdamW"), ("muon", "Muon"))),
    Claim("`Whitened(rank=16)` AdamW without normalisers is ahead of AdamW with LayerNorm, test loss", "norm-free",
        ahead(_embedded("none", "whitened-adamw-16"), _embedded("layernorm", "adamw"), lower=True)),
    Claim("`Whitened(rank=16)` Muon is ahead of Muon with LayerNorm after 2,000 steps", "char-lm-2000",
        _texts("char-lm-2000", ("layernorm", "whitened-muon-16"), _MUON)),
    Claim("`BatchIdeal` in front of AdamW is ahead of AdamW, test loss", "char-lm",
        _texts("char-lm", ("layernorm", "batch-ideal-adamw"), _ADAMW)),
    Claim("Norm-free by `InputScaled(hold=True)` with Muon: level with LayerNorm after 400 steps, within 0.03",
        "norm-free",
        level(by.norm_free("norm-free", *_HELD), by.norm_free("norm-free", *_LAYERNORM), 0.03, lower=True)),
    Claim("… and after 2,000", "norm-free-2000",
        level(by.norm_free("norm-free-2000", *_HELD), by.norm_free("norm-free-2000", *_LAYERNORM), 0.03, lower=True)),
    Claim("… and after 2,000 with a rate of 0.03 for the embeddings, against LayerNorm with the same", "norm-free-2000",
        level(by.norm_free("norm-free-2000", *_HELD, embedding_lr=3e-2),
            by.norm_free("norm-free-2000", *_LAYERNORM, embedding_lr=3e-2), 0.03, lower=True)),
    Claim("… and with a single LayerNorm, before the head, ahead after 2,000", "norm-free-2000",
        ahead(by.norm_free("norm-free-2000", "head-layernorm", *_HELD[1:], embedding_lr=3e-2),
            by.norm_free("norm-free-2000", *_LAYERNORM, embedding_lr=3e-2), lower=True)),
    Claim("… and with twelve layers ahead after 400, of LayerNorm with the better of two embeddings", "norm-free-deep",
        ahead(by.norm_free("norm-free-deep", *_HELD), by.at_best_embeddings("norm-free-deep", *_MUON), lower=True)),
    Claim("… and of Muon alone without normalisers, with the same embeddings", "norm-free-deep",
        ahead(by.norm_free("norm-free-deep", *_HELD), by.norm_free("norm-free-deep", "none", 1.0, "muon"), lower=True)),
    Claim("… and without normalisers ahead of its nearest rival, SOAP, after 400", "norm-free",
        ahead(by.norm_free("norm-free", *_HELD), by.norm_free("norm-free", "none", 1.0, "soap"), lower=True)),
    Claim("The network gauge is behind the plain optimizer from PyTorch's own initialisation", "uc-sweep",
        every([ahead(_swept("none", optimizer=o), _swept("uc-network", optimizer=o))
            for o in ("sgd", "momentum", "adam")])),
    Claim("… with the three optimizers' tests combined", "uc-sweep",
        by.together([(_swept("none", optimizer=o), _swept("uc-network", optimizer=o))
            for o in ("sgd", "momentum", "adam")])),
    Claim("The layer gauge with Adam is ahead of Adam", "uc-sweep",
        ahead(*(_swept(name, optimizer="adam") for name in ("uc-layer", "none")))),
]  # fmt: skip
_CROPS: dict[str, Any] = {"network": "relu", "size": 64, "batch_size": None}
_fits = partial(ahead_in_pairs, "coordinates", _CROPS, shown=psnr)
_RIVALS = [("adam", "Adam"), ("muon", "Muon"), ("soap", "SOAP")]
#: What is learned, how arms are compared in it, and the optimizers that ran behind BatchNorm.
_OTHER_NETWORKS = [
    (what, partial(ahead_in_pairs, "coordinates", {**_CROPS, **wanted}, shown=psnr), rivals)
    for what, wanted, rivals in (
        ("Batches of 512 pixels", {"batch_size": 512}, _RIVALS),
        ("Fourier features", {"network": "fourier"}, _RIVALS),
        ("128 × 128 pixels", {"size": 128}, _RIVALS[:2]),
    )
]
_MINUTE = {"equation": "poisson", "points": "fixed", "seconds": 60.0}
_solves = partial(ahead_in_pairs, "poisson", _MINUTE, shown=math.log10, lower=True)
#: Normaliser, optimizer, wrapper, its steps between measurements, the rows that it counts.
_Arm = tuple[str, str, str, None, str | None]


def _bare(norm: str, optimizer: str) -> _Arm:
    return norm, optimizer, "none", None, None


def _white(norm: str, optimizer: str, rows: str | None = None) -> _Arm:
    return norm, optimizer, "whitened", None, rows


_FIELDS = [
    Claim("Coordinate network: `Whitened` Adam alone is ahead of Adam behind BatchNorm, dB", "coordinates",
        _fits(_white("none", "adam"), _bare("batchnorm", "adam"))),
    *(Claim(f"… `Whitened` {name} without a normaliser is ahead of {name}", "coordinates",
        _fits(_white("none", optimizer), _bare("none", optimizer)))
      for optimizer, name in (("adam", "Adam"), ("muon", "Muon"), ("soap", "SOAP"))),
    *(Claim(f"… `Whitened` SOAP alone is ahead of {name} behind BatchNorm", "coordinates",
        _fits(_white("none", "soap"), _bare("batchnorm", optimizer)))
      for optimizer, name in (("adam", "Adam"), ("muon", "Muon"), ("soap", "SOAP"))),
    *(Claim(f"… behind BatchNorm `Whitened` {name} is more than 1 dB ahead of {name}", "coordinates",
        _fits(_white("batchnorm", optimizer), _bare("batchnorm", optimizer), margin=1.0))
      for optimizer, name in (("adam", "Adam"), ("muon", "Muon"), ("soap", "SOAP"))),
    Claim("… `Preconditioned` Muon (Newton-Muon) is behind Muon, so that the coordinates are what gains", "coordinates",
        _fits(_bare("none", "muon"), ("none", "muon", "preconditioned", None, None))),
    *(Claim(f"{what}: `Whitened` {name} alone is ahead of {name} behind BatchNorm, dB", "coordinates",
        fits(_white("none", optimizer), _bare("batchnorm", optimizer)))
      for what, fits, rivals in _OTHER_NETWORKS for optimizer, name in rivals),
    *(Claim(f"Poisson's equation after 60 seconds: `Whitened` SOAP has less than half the error of {name}, log₁₀",
        "poisson", _solves(_white("none", "soap"), _bare("none", optimizer), margin=math.log10(2)))
      for optimizer, name in (("soap", "SOAP"), ("muon", "Muon"), ("adam", "Adam"), ("lbfgs", "LBFGS"))),
    *(Claim(f"… rows of derivatives lower the error of `Whitened` {name}, log₁₀", "poisson",
        _solves(_white("none", optimizer, DERIVATIVES), _white("none", optimizer)))
      for optimizer, name in (("soap", "SOAP"), ("muon", "Muon"), ("adam", "Adam"))),
]  # fmt: skip
#: Source → its claims.
CLAIMS = {
    "Bird 2025, The Affine Divergence": _BIRD,
    "Uhlmann, Unit-Consistent (UC) Adjoint": _UHLMANN,
    "Joudaki, Daneshmand and Bach 2023, isometry": _JOUDAKI,
    "Su 2025, DyT and DyISRU": _SU,
    "This library": _OURS,
    "This library, where a normaliser cannot go": _FIELDS,
}


def decide(claim: Claim) -> str:
    """The command that would decide a claim; empty where none would."""
    if claim.command:
        return f"python -m benchmarks {claim.command}"
    file = claim.files.split(", ")[0]
    study, recipe = RECIPES[file]
    if recipe.decides is None:
        return ""
    command = f"{recipe.commands(study)[0]} {recipe.decides}" if recipe.decides else f"reproduce {file}"
    return f"python -m benchmarks {command}"


def _verdicts(stores: Mapping[str, Store], name: str, folder: Path) -> Section:
    """How many claims of every source hold, and a line for each of them."""
    counts, rows = list[Row](), list[Row]()
    for source, claims in CLAIMS.items():
        found = [claim.found(stores) for claim in claims]
        verdicts = [one.holds for one in found]
        counts.append([source, *(exact(verdicts.count(each)) for each in (True, False, None))])
        for claim, one in zip(claims, found, strict=True):
            rows.append([source, *line(claim, one, decide(claim) if one.holds is None else "")])
    first = Table(["source", "hold", "do not", "undecided"], counts, name="counts")
    return Section([first, Table(["source", *HEADER], rows)])


#: Without these there is little to judge: one's own runs want no verdicts.
DIGESTS = {"verdicts": Digest(("cifar10", "char-lm"), _verdicts, ("docs/verdicts.md",))}
