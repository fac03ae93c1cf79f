"""The claims of the papers, and how committed results judge them."""

import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial

from ..core.store import Result
from ..grids import OF_PAPER
from ..methods import METHODS
from ..studies import isometry_training, mechanism
from ..studies.papers import cells
from .judges import (
    TABLE1,
    Claim,
    Finding,
    Judge,
    Sample,
    Stores,
    ahead,
    at_length,
    best,
    compare,
    every,
    later,
    level,
    reached,
    rivals,
    row,
    runs,
    slope,
    tested,
)  # fmt: skip

STRUCTURAL = ["affine-like", "l2norm", "l2norm-half"]
CONVENTIONAL = [name for name in OF_PAPER if name not in STRUCTURAL]
_NOT_AFFINE = [name for name in OF_PAPER if name != "affine-like"]


# Table 1 and the figures along widths.
def slopes(methods: list[str], activation: str, sign: int) -> Judge:
    """All of several methods fall with batch size, or rise."""
    return every([slope(method, activation, sign) for method in methods])


def lead(methods: list[str], others: list[str], activation: str) -> Judge:
    """All of several methods are better than the best of the others, in their means over batch sizes."""
    of = partial(row, activation=activation)
    return every([best(of(method), rivals(others, of)) for method in methods])


@later
def along(
    stores: Stores, file: str, own: str, others: Sequence[str],
    keep: Callable[[str, float], bool] = lambda panel, place: True, **wanted: object,
) -> Finding:  # fmt: skip
    """Own is better than the best of the others at every place of a sweep that counts; one at least has to."""

    def last(results: list[Result]) -> Sample:
        return lambda stores: results[0]["test_accuracy"][-1]

    found = [
        best(last(methods[own][place]), {name: last(methods[name][place]) for name in others})(stores).holds
        for panel, methods in cells(runs(stores, file, **wanted), "width").items()
        for place in methods.get(own, ())
        if keep(panel, place)
    ]
    if not found:
        raise LookupError(f"{file}: no width or depth of those that the claim is about.")
    won, lost = found.count(True), found.count(False)
    figure = f"ahead at {won} of {len(found)} widths and depths, behind at {lost}"
    return Finding(True if won == len(found) else False if lost else None, figure)


def overtakes(stores: Stores) -> Finding:
    """Affine-like passes LayerNorm, which learns faster, at about the twentieth epoch."""
    alike = partial(runs, stores, TABLE1, activation="tanh", batch_size=32)
    norm, own = (alike(method=name)[0]["test_accuracy"] for name in ("layernorm", "affine-like"))
    means = enumerate(zip(map(statistics.fmean, norm), map(statistics.fmean, own), strict=True), start=1)
    last = max((epoch for epoch, (other, ours) in means if other > ours), default=0)
    return Finding(10 <= last <= 30, f"behind until epoch {last} of {len(norm)}", str(len(norm[0])))


# What a step does.
def _gains(stores: Stores, *names: str) -> dict[str, list[tuple[float, float]]]:
    subjects = stores["divergence"].read()[-1]["subjects"]
    return {n: [(layer["gain"][0], layer["gain"][2]) for layer in subjects[n]["start"]["layers"]] for n in names}


def plain_gain(stores: Stores) -> Finding:
    """Every row's own gain of the plain layer is above 1."""
    gains = _gains(stores, "none")["none"]
    figure = " and ".join(f"{low:.2f} to {high:.2f}" for low, high in gains)
    return Finding(all(low > 1 for low, _ in gains), f"own gain {figure} (quartiles, by layer)")


def own_gain(stores: Stores) -> Finding:
    """It is 1, or 2, in the forms that cancel it."""
    found = _gains(stores, "affine-like", "norm-like", "proportional", "disproportional")
    wanted = {name: 2.0 if name == "norm-like" else 1.0 for name in found}
    off = max(abs(end / wanted[name] - 1) for name, layers in found.items() for layer in layers for end in layer)
    return Finding(off < 1e-4, f"own gain 1, 2 with norm-like layers at η; largest deviation {off:.0e}")


def cheap(stores: Stores) -> Finding:
    """What a corrected layer costs without Jacobians, and what whole steps cost without and with them."""
    rows = next(suite for suite in stores["speed"].read() if suite["key"] == "layers")["rows"]

    def times(part: str, end: str) -> list[float]:
        return [row["time_ratio"]["median"] for row in rows if part in row["what"] and row["what"].endswith(end)]

    linear, without, by_jacobians = (
        times("Linear", "Proportional"),
        times("step", "GradientOnly"),
        times("", "backward"),
    )
    ends = (f"{min(found):.3g} to {max(found):.3g}" for found in (linear, without, by_jacobians))
    figure = "{} times the plain linear layer, whole steps of small networks {} times, by Jacobians {}".format(*ends)
    return Finding(False, figure)


@later
def drop(stores: Stores, own: Sequence[str], methods: Sequence[str], activation: str) -> Finding:
    """From their best epoch to the last each of own loses more than any other method, at every batch size there is."""
    lost: dict[int, dict[str, float]] = {}
    for result in runs(stores, TABLE1, activation=activation):
        if result["settings"]["method"] in methods:
            means = [statistics.fmean(seeds) for seeds in result["test_accuracy"]]
            lost.setdefault(result["settings"]["batch_size"], {})[result["settings"]["method"]] = max(means) - means[-1]
    pairs = [
        ([by_method[name] for name in own], [by_method[name] for name in methods if name not in own])
        for by_method in lost.values() if len(by_method) == len(methods)
    ]  # fmt: skip
    if not pairs:
        raise LookupError(f"{TABLE1} has not every method at any batch size, {activation}.")
    ours, others = ([each for pair in pairs for each in pair[side]] for side in (0, 1))
    figure = f"lose {min(ours):.1f} to {max(ours):.1f} points, others {min(others):.1f} to {max(others):.1f}"
    return Finding(all(min(a) > max(b) for a, b in pairs), figure, f"{len(pairs)} batch sizes")


def thesis(stores: Stores) -> Finding:
    """Cosine and accuracy of tuned runs have a positive rank correlation."""
    members = mechanism.groups(stores["mechanism"].read())["all"]
    rank = mechanism.rank(members, "cosine")
    figure = f"rank correlation of cosine and accuracy {rank.statistic:+.2f}"
    return tested(rank.statistic > 0, rank.pvalue, figure, len(members))


# Unit consistency.
@later
def spread(stores: Stores, method: str, optimizer: str) -> Finding:
    """A method's accuracies over gauges of σ = 2 lie within two points."""
    alike = partial(runs, stores, "uc-rescaled", optimizer=optimizer, rescaled=2.0)
    found, other = (alike(method=name)[0]["test_accuracy"][-1] for name in (method, "none"))
    ends = f"{min(found):.2f} to {max(found):.2f}"
    figure = f"{optimizer}: {ends} over gauges of σ = 2, plain {min(other):.2f} to {max(other):.2f}"
    return Finding(max(found) - min(found) < 2, figure, str(len(found)))


#: Accuracy of guessing one of ten classes, %.
CHANCE = 10.0


@later
def worst(stores: Stores, file: str, along: str, rival: str = "none") -> Finding:
    """Unit-consistent SGD loses less from its easiest place to the hardest than a rival with SGD does.

    The hardest place is that of the rival's lowest accuracy, where one of the two learns something.
    """
    means = []
    for method in (rival, "uc-network"):
        by_place = cells(runs(stores, file, method=method, optimizer="sgd"), along)
        places = [at for methods in by_place.values() for at in methods[method].values()]
        means.append([max(statistics.fmean(r["test_accuracy"][-1]) for r in at) for at in places])
    learned = [pair for pair in zip(*means, strict=True) if max(pair) > CHANCE + 1]
    other, own = (max(of) - at for of, at in zip(means, min(learned), strict=True))
    return Finding(own < other - 1, f"falls by {own:.1f} points, {METHODS[rival].label} by {other:.1f}")


# Isometry.
def depth_quartiles(stores: Stores, activation: str, variant: str, quantity: str = "measured") -> list[float] | None:
    """Quartiles over draws behind the last layer."""
    result = stores["isometry-depth"].read()[-1]
    return result["activations"][activation][quantity][variant][result["depth"]]


@later
def gap(stores: Stores, activation: str, own: str, other: str, relation: str, quantity: str = "measured") -> Finding:
    """Quartiles over draws overlap ("level"), or those of the one lie below those of the other ("below")."""
    ours, theirs = (depth_quartiles(stores, activation, variant, quantity) for variant in (own, other))
    n = f"{stores['isometry-depth'].read()[-1]['seeds']} draws"
    words = ["out of range" if each is None else f"{each[1]:.2g}" for each in (ours, theirs)]
    figure = f"{activation} {words[0]} against {words[1]}"
    if ours is None or theirs is None:
        return Finding(relation == "below" and theirs is None and ours is not None, figure, n)
    overlap = ours[0] <= theirs[2] and theirs[0] <= ours[2]
    return Finding(overlap if relation == "level" else None if overlap else ours[1] < theirs[1], figure, n)


def bounded(stores: Stores) -> Finding:
    """The gap at infinite width lies below its bound at every depth."""
    found = stores["isometry-depth"].read()[-1]["activations"]
    pairs = [pair for each in found.values() for pair in zip(each["mean_field"], each["bound"], strict=True)]
    return Finding(all(gap <= bound for gap, bound in pairs), f"{len(found)} activations, every depth")


def least_gain(stores: Stores) -> Finding:
    """No norm of any network lowers isometry."""
    found = isometry_training.by_depth(stores["isometry-training"].read())[10]
    stages = "start", "trained"
    least = {name: min(min(isometry_training.least_gains(s, at)) for at in stages) for name, s in found.items()}
    lowered = {name: change for name, change in least.items() if change < 0}
    figure = f"lowered with {', '.join(f'{name} ({change:.0e})' for name, change in lowered.items()) or 'none'}"
    return Finding(not lowered, f"{figure} of {len(found)} activations", str(sum(map(len, found.values()))))


@later
def faster(stores: Stores, layers: int, *, wanted: bool) -> Finding:
    """The training loss falls with β over activations; or does not, if that is what is claimed."""
    found = isometry_training.by_depth(stores["isometry-training"].read())[layers]
    rank = isometry_training.correlations(found)["the loss at the end of training"]
    figure = f"rank correlation of β with the training loss {rank.statistic:+.2f}, {layers} layers"
    return tested((rank.statistic < 0) is wanted, rank.pvalue, figure, len(found))


def widths(stores: Stores) -> Finding:
    """The gap behind the last norm is the same within a tenth."""
    last = sorted(-math.log(r["isometry"]["start"][-1]["isometry"]) for r in stores["isometry-widths"].read())
    return Finding(last[-1] < 1.1 * last[0], f"gap {last[0]:.2f} to {last[-1]:.2f} behind five layers", "4 networks")


_cnn, _pool = (partial(reached, name) for name in ("cnn", "cnn-pool"))
_elementwise = partial(reached, "elementwise", activation="tanh")
#: The paper's figures show networks after a hundred epochs.
_whole = partial(at_length, epochs=100)


def _by_activation(activation: str) -> list[Claim]:
    """What is claimed of Table 1 for both activations."""
    # With leaky ReLU the paper's own slope of L2 norm at η is about 0.
    falling, named = (
        (STRUCTURAL, "Structural forms")
        if activation == "tanh"
        else (["affine-like", "l2norm-half"], "Affine-like and L2 norm at η/2")
    )
    return [
        Claim(f"Affine-like has the highest mean of Table 1, {activation}", TABLE1,
            lead(["affine-like"], _NOT_AFFINE, activation)),
        Claim(f"{named} lose accuracy as the batch grows, {activation} (Table 1)", TABLE1,
            slopes(falling, activation, -1)),
        Claim(f"Affine-like is ahead of norm-like at η, which scale invariance does not explain, {activation}", TABLE1,
            ahead(row("affine-like", activation), row("l2norm", activation))),
    ]  # fmt: skip


BIRD = [
    Claim("A step moves the output of an affine layer too far, \\|x\\|² + 1 times (Eq. 11)", "divergence", plain_gain),
    Claim("Norm-like and affine-like layers and both gradient-only forms cancel that (Eqs. 17 to 21)", "divergence",
        own_gain),
    Claim("The gradient-only form is not implementable but by full Jacobians (below Eq. 21)", "speed", cheap),
    Claim("Less divergence trains better", "mechanism", thesis),
    *_by_activation("tanh"),
    *_by_activation("leaky-relu"),
    Claim("All three structural forms are ahead of all normalisers, tanh (Fig. 6)", TABLE1,
        lead(STRUCTURAL, CONVENTIONAL, "tanh")),
    Claim("No normaliser, BatchNorm and RMSNorm gain by larger batches, tanh (Fig. 6)", TABLE1,
        slopes(["none", "batchnorm", "rmsnorm"], "tanh", +1)),
    Claim("LayerNorm learns fastest, affine-like passes it at about epoch 20, tanh (Fig. 2), on Table 1's network",
        TABLE1, overtakes),
    Claim("Affine-like is ahead at every width and depth but [16, 16, 16], tanh (Fig. 2)", "fig2",
        _whole(along("fig2", "affine-like", _NOT_AFFINE,
            lambda panel, place: not ("3 hidden" in panel and place == 16)), "fig2")),
    Claim("Affine-like is ahead at widths of 64 and 128, leaky ReLU (Fig. 3)", "fig3",
        _whole(along("fig3", "affine-like", _NOT_AFFINE, lambda panel, place: place >= 64), "fig3")),
    Claim("With leaky ReLU BatchNorm and LayerNorm alone drop clearly after their peak (Fig. 3), on Table 1's network",
        TABLE1, drop(["batchnorm", "layernorm"], OF_PAPER, "leaky-relu")),
    Claim("Affine-like and norm-like at η are ahead of all normalisers, leaky ReLU (Fig. 3), on Table 1's network",
        TABLE1, lead(["affine-like", "l2norm"], CONVENTIONAL, "leaky-relu")),
    Claim("Affine-like is ahead from a width of 1 on, tanh (Fig. 4)", "fig4",
        _whole(along("fig4", "affine-like", _NOT_AFFINE, activation="tanh"), "fig4")),
    Claim("Without an activation norm-like layers are ahead of BatchNorm and of none, which are linear (Fig. 5)",
        "fig5", _whole(along("fig5", "l2norm", ["batchnorm", "none"]), "fig5")),
    Claim("In convolutions with pooling no normaliser is ahead of LayerNorm, or within a point (Fig. 8)", "cnn-pool",
        _whole(level(_pool("none"), _pool("layernorm"), 1.0, or_ahead=True), "cnn-pool")),
    Claim("In convolutions without pooling BatchNorm is ahead of all others (Fig. 9)", "cnn",
        _whole(best(_cnn("batchnorm"), rivals(OF_PAPER, _cnn, "batchnorm")), "cnn")),
]  # fmt: skip

_UC_AND_NORM = ({"method": "uc-network", "optimizer": "sgd"}, {"method": "batchnorm", "optimizer": "sgd"})
UHLMANN = [
    Claim("Training takes the same path in every gauge", "uc-rescaled",
        every([spread("uc-network", "sgd"), spread("uc-network", "adam")])),
    Claim("A normaliser becomes optional (D.3), within a point of BatchNorm after 5 epochs", "uc-sweep",
        compare("uc-sweep", *_UC_AND_NORM, margin=1.0, or_ahead=True)),
    Claim("A normaliser becomes optional (D.3), within a point of BatchNorm after 30 epochs", "uc-long",
        compare("uc-long", *_UC_AND_NORM, margin=1.0, or_ahead=True)),
    Claim("Small batches cost it less than BatchNorm (D.3)", "uc-batch",
        worst("uc-batch", "batch", "batchnorm")),
    Claim("The size of the first parameters costs it less (D.3)", "uc-init", worst("uc-init", "gain")),
    Claim("Depth costs it less (D.3)", "uc-depth", worst("uc-depth", "depth")),
]  # fmt: skip


def _gap(text: str, activations: str, own: str, other: str, relation: str, quantity: str = "measured") -> Claim:
    judges = [gap(name, own, other, relation, quantity) for name in activations.split(", ")]
    return Claim(text, "isometry-depth", every(judges))


JOUDAKI = [
    Claim("LayerNorm, its centring included, which the paper keeps apart, never lowers isometry (Fig. 2)",
        "isometry-training", least_gain),
    Claim("The gap is bounded by β at infinite width (Theorem 4)", "isometry-depth", bounded),
    _gap("Mean-field centring stands in for centring (Fig. 4)", "sigmoid, tanh, ReLU, GELU, exp",
        "mean-field-centred", "layernorm", "level"),
    _gap("Without normalising the gap is larger (Fig. 5)", "tanh, ReLU, GELU, exp", "layernorm", "centred", "below"),
    _gap("Mean-field constants stand in for normalising with tanh and sigmoid (Fig. 6)", "tanh, sigmoid",
        "mean-field", "layernorm", "level"),
    _gap("Mean-field constants stand in for normalising with ReLU (Fig. 6)", "ReLU", "mean-field", "layernorm",
        "level"),
    _gap("Mean-field constants do not stand in for normalising with exp (Fig. 6)", "exp", "layernorm", "mean-field",
        "below"),
    Claim("Networks of ten layers train faster with a larger β (Fig. 7)", "isometry-training",
        faster(10, wanted=True)),
    Claim("Networks of twenty layers do not train faster with a larger β (Fig. 7)", "isometry-training",
        faster(20, wanted=False)),
    _gap("SELU and tanh need constants only (Fig. 8)", "SELU, tanh", "mean-field", "layernorm", "level"),
    _gap("Normalised before the activation a network ends less isometric (Fig. 8), ReLU", "ReLU", "layernorm",
        "normalised-first", "below"),
    _gap("Normalised before the activation a network ends less isometric (Fig. 8), SELU and tanh", "SELU, tanh",
        "layernorm", "normalised-first", "below"),
    _gap("Normalising keeps a network near its infinite width (Fig. 9), ReLU", "ReLU", "layernorm", "mean-field",
        "below", "error"),
    _gap("Mean-field constants are better than Xavier's gain (Fig. B.3), SELU and both ReLUs",
        "SELU, leaky ReLU, ReLU", "mean-field", "xavier", "below"),
    _gap("Mean-field constants are better than Xavier's gain (Fig. B.3), tanh", "tanh", "mean-field", "xavier",
        "below"),
    Claim("The widths of hidden layers do not matter (Fig. B.4), within a tenth", "isometry-widths", widths),
]  # fmt: skip

SU = [
    Claim("DyT does not \"achieve better results\" than a normaliser: LayerNorm is ahead with AdamW and Muon",
        "norm-free", every([compare("norm-free", *({"norm": norm, "method": name} for norm in ("layernorm", "dyt")),
            lower=True) for name in ("adamw", "muon")])),
    Claim("√d is better kept than absorbed, tanh MLP", "elementwise",
        ahead(_elementwise("dyt-sqrt-d"), _elementwise("dyt"))),
    Claim("DyISRU is the best elementwise form, tanh MLP", "elementwise",
        best(_elementwise("dyisru"), rivals(["dyt", "dyt-sqrt-d"], _elementwise))),
]  # fmt: skip
