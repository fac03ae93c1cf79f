"""How results judge the claims of papers and of this library: what `verdicts` is made of."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence

from ..core.claims import Finding, Judge, Sample, Stores, best, every, image, runs, shown
from ..core.store import Result
from ..methods import METHODS, PAPERS_OWN
from . import isometry_training, mechanism
from .char_lm import best_rows
from .sweep import cells
from .table1 import PAPER, SIZES, line, over_sizes, series

TABLE1 = "table1"


# Table 1 and the figures along widths.
def row(method: str, activation: str, file: str = TABLE1) -> Sample:
    """Every seed's mean over the paper's batch sizes."""

    def sample(stores: Stores) -> list[float]:
        by_size = series(stores[file].read()).get((method, activation), {})
        if set(by_size) != set(SIZES):
            raise LookupError(f"{file} has not every batch size of {method}, {activation}.")
        return over_sizes(by_size)

    return sample


def others(names: list[str], activation: str, own: str = "", file: str = TABLE1) -> Mapping[str, Sample]:
    """The rows of several methods, by label."""
    return {METHODS[name].label: row(name, activation, file) for name in names if name != own}


def slope(method: str, activation: str, sign: int, file: str = TABLE1) -> Judge:
    """The line of accuracy over batch size falls (sign −1) or rises."""

    def judge(stores: Stores) -> Finding:
        row(method, activation, file)(stores)
        fitted = line(series(stores[file].read())[method, activation])
        holds = fitted.slope * sign > 0 if fitted.pvalue < 0.05 else None
        figure = f"{METHODS[method].label} {100 * fitted.slope:+.2f} ± {100 * fitted.stderr:.2f} points per 100"
        return Finding(
            holds, figure, str(len(SIZES) * len(row(method, activation, file)(stores))), f"{fitted.pvalue:.2g}"
        )

    return judge


def slopes(methods: list[str], activation: str, sign: int, file: str = TABLE1) -> Judge:
    """All of several methods fall with batch size, or rise."""
    return every([slope(method, activation, sign, file) for method in methods])


def at_20(method: str, activation: str) -> Sample:
    """Accuracies of the comparison at the paper's rate, after twenty epochs."""
    return image("cifar10", method=method, activation=activation)


def best_at_20(activation: str) -> Judge:
    """Affine-like is ahead of the best of the others there."""
    rivals = {METHODS[name].label: at_20(name, activation) for name in PAPERS_OWN if name != "affine-like"}
    return best(at_20("affine-like", activation), rivals)


def along(
    file: str, own: str, rivals: Sequence[str], keep: Callable[[str, float], bool] = lambda panel, place: True
) -> Judge:
    """Own is better than the best of the others at every place of a sweep that counts."""

    def judge(stores: Stores) -> Finding:
        found, judges = cells(runs(stores, file), "width"), []
        for panel, methods in found.items():
            for place in methods.get(own, ()):
                if keep(panel, place):
                    where = {name: _fixed(methods[name][place]) for name in rivals}
                    judges.append(best(_fixed(methods[own][place]), where))
        results = [one(stores) for one in judges]
        against = sum(one.holds is False for one in results)
        won = sum(bool(one.holds) for one in results)
        holds = True if won == len(results) else False if against else None
        return Finding(holds, f"ahead at {won} of {len(results)} widths and depths, behind at {against}")

    return judge


def _fixed(results: list[Result]) -> Sample:
    return lambda stores: results[0]["test_accuracy"][-1]


def overtakes(file: str) -> Judge:
    """Affine-like passes LayerNorm, which learns faster, at about the twentieth epoch."""

    def judge(stores: Stores) -> Finding:
        wanted = {"activation": "tanh", "batch_size": 32}
        curves = [
            [statistics.fmean(epoch) for epoch in runs(stores, file, method=name, **wanted)[0]["test_accuracy"]]
            for name in ("layernorm", "affine-like")
        ]
        behind = [epoch for epoch, (norm, own) in enumerate(zip(*curves, strict=True), start=1) if norm > own]
        last = max(behind, default=0)
        n = str(len(runs(stores, file, method="layernorm", **wanted)[0]["test_accuracy"][0]))
        return Finding(10 <= last <= 30, f"behind until epoch {last} of {len(curves[0])}", n)

    return judge


# What a step does.
def _gains(stores: Stores, *names: str) -> dict[str, list[tuple[float, float]]]:
    subjects = runs_alone(stores, "divergence")["subjects"]
    return {n: [(layer["gain"][0], layer["gain"][2]) for layer in subjects[n]["start"]["layers"]] for n in names}


def runs_alone(stores: Stores, file: str) -> Result:
    """The result of a study that is one measurement."""
    if file not in stores:
        raise LookupError(f"{file} has not been measured.")
    return stores[file].read()[-1]


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
    """A corrected layer takes at least twice the time."""
    (suite,) = (r for r in stores["speed"].read() if r["key"] == "layers")
    times = [
        row["time_ratio"]["median"] for row in suite["rows"] if row["what"] == "Linear (512, 1024, 1024), Proportional"
    ]
    return Finding(times[0] > 2, f"{times[0]:.2f} times the plain layer's step, Linear of 1024 at 512 rows")


def misprint(stores: Stores) -> Finding:
    """What the summary says is not what the paper says."""
    mean, error, *_ = PAPER["batchnorm", "tanh"]
    return Finding(False, f"the paper's text has {mean:.2f} ± {error:.2f}, its summary 49.08")


def intractable(stores: Stores) -> Finding:
    """The least squares solution points where it should."""
    alignment = runs_alone(stores, "attention")["alignment"]
    cosines = [
        row["cosine"] for case in alignment if case["sequences"] == 1
        for row in case["rows"] if row["method"] == "ideal, joint (damping 0.001)"
    ]  # fmt: skip
    return Finding(False, f"solved as least squares: cosine {shown(sorted(cosines), 2)} of one sequence", "20 draws")


def thesis(file: str) -> Judge:
    """Cosine and accuracy of tuned runs have a positive rank correlation."""

    def judge(stores: Stores) -> Finding:
        members = mechanism.groups(stores[file].read())["all"]
        rank = mechanism.rank(members, "cosine")
        holds = rank.statistic > 0 if rank.pvalue < 0.05 else None
        return Finding(
            holds,
            f"rank correlation of cosine and accuracy {rank.statistic:+.2f}",
            str(len(members)),
            f"{rank.pvalue:.2g}",
        )

    return judge


# Unit consistency.
def spread(method: str, optimizer: str, *, at: float = 2.0) -> Judge:
    """A method's accuracies over gauges lie within two points."""

    def judge(stores: Stores) -> Finding:
        (run,) = runs(stores, "uc-rescaled", method=method, optimizer=optimizer, rescaled=at)
        (plain,) = runs(stores, "uc-rescaled", method="none", optimizer=optimizer, rescaled=at)
        found, other = run["test_accuracy"][-1], plain["test_accuracy"][-1]
        ends = f"{min(found):.2f} to {max(found):.2f}"
        figure = f"{optimizer}: {ends} over gauges of σ = {at:g}, plain {min(other):.2f} to {max(other):.2f}"
        return Finding(max(found) - min(found) < 2, figure, str(len(found)))

    return judge


def swept(method: str, optimizer: str) -> Sample:
    """Accuracies at the best rate of the sweep."""
    return image("uc-sweep", method=method, optimizer=optimizer)


def worst(file: str, along: str) -> Judge:
    """Unit-consistent SGD loses less from the easiest place to the hardest than plain SGD does."""

    def judge(stores: Stores) -> Finding:
        found = {}
        for method in ("uc-network", "none"):
            by_place = cells(runs(stores, file, method=method, optimizer="sgd"), along)
            means = [statistics.fmean(max((r["test_accuracy"][-1] for r in at), key=statistics.fmean))
                     for methods in by_place.values() for at in methods[method].values()]  # fmt: skip
            found[method] = max(means) - min(means)
        figure = f"falls by {found['uc-network']:.1f} points, plain SGD by {found['none']:.1f}"
        return Finding(found["uc-network"] < found["none"] - 1, figure)

    return judge


# Isometry.
def depth_quartiles(stores: Stores, activation: str, variant: str, quantity: str = "measured") -> list[float] | None:
    """Quartiles over draws behind the last layer."""
    result = runs_alone(stores, "isometry-depth")
    return result["activations"][activation][quantity][variant][result["depth"]]


def _gap(activation: str, own: str, other: str, relation: str, quantity: str = "measured") -> Judge:
    """Quartiles over draws overlap ("level"), or those of the one lie below those of the other ("below")."""

    def judge(stores: Stores) -> Finding:
        ours, theirs = (depth_quartiles(stores, activation, variant, quantity) for variant in (own, other))
        n = f"{runs_alone(stores, 'isometry-depth')['seeds']} draws"
        words = ["out of range" if each is None else f"{each[1]:.2g}" for each in (ours, theirs)]
        figure = f"{activation} {words[0]} against {words[1]}"
        if ours is None or theirs is None:
            return Finding(relation == "below" and theirs is None and ours is not None, figure, n)
        overlap = ours[0] <= theirs[2] and theirs[0] <= ours[2]
        holds = overlap if relation == "level" else None if overlap else ours[1] < theirs[1]
        return Finding(holds, figure, n)

    return judge


def gaps(activations: str, own: str, other: str, relation: str, quantity: str = "measured") -> Judge:
    """`_gap` of several activations."""
    return every([_gap(name, own, other, relation, quantity) for name in activations.split(", ")])


def bounded(stores: Stores) -> Finding:
    """The gap at infinite width lies below its bound at every depth."""
    found = runs_alone(stores, "isometry-depth")["activations"]
    pairs = [pair for each in found.values() for pair in zip(each["mean_field"], each["bound"], strict=True)]
    return Finding(all(gap <= bound for gap, bound in pairs), f"{len(found)} activations, every depth")


def by_activation(stores: Stores, file: str, layers: int) -> dict[str, list[Result]]:
    """The seeds of every activation at a depth, by isometry strength."""
    found: dict[str, list[Result]] = {}
    for result in runs(stores, file, layers=layers):
        found.setdefault(result["settings"]["activation"], []).append(result)
    return dict(sorted(found.items(), key=lambda item: item[1][0]["strength"]))


def least_gain(stores: Stores) -> Finding:
    """No norm of any network lowers isometry."""
    found = by_activation(stores, "isometry-training", 10)
    stages = {
        s: min(min(isometry_training.least_gains(seeds, s)) for seeds in found.values()) for s in ("start", "trained")
    }
    figure = f"least change {stages['start']:+.1g} at the start and {stages['trained']:+.1g} trained"
    return Finding(min(stages.values()) >= 0, figure, str(sum(map(len, found.values()))))


def faster(file: str, layers: int, *, wanted: bool) -> Judge:
    """The training loss falls with β over activations; or does not, if that is what is claimed."""

    def judge(stores: Stores) -> Finding:
        found = by_activation(stores, file, layers)
        rank = isometry_training.correlations(found)["the loss at the end of training"]
        correlated = rank.statistic < 0 if rank.pvalue < 0.05 else None
        figure = f"rank correlation of β with the training loss {rank.statistic:+.2f}, {layers} layers"
        return Finding(
            correlated if wanted or correlated is None else not correlated,
            figure,
            str(len(found)),
            f"{rank.pvalue:.2g}",
        )

    return judge


def widths(stores: Stores) -> Finding:
    """The gap behind the last norm is the same within a tenth."""
    if "isometry-widths" not in stores:
        raise LookupError("isometry-widths has not been measured.")
    last = sorted(-math.log(r["isometry"]["start"][-1]["isometry"]) for r in stores["isometry-widths"].read())
    return Finding(last[-1] < 1.1 * last[0], f"gap {last[0]:.2f} to {last[-1]:.2f} behind five layers", "4 networks")


# Language models.
def text(file: str, norm: str, method: str, of: str = "test_loss") -> Sample:
    """Losses of every seed at the best rate and damping, of the longest runs."""

    def sample(stores: Stores) -> list[float]:
        return [
            r["test_loss"] if of == "test_loss" else r[of][-1] for r in best_rows(stores[file].read())[norm, method]
        ]

    return sample


def norm_free(file: str, norm: str, drawn: float | None, method: str, of: str = "test_loss") -> Sample:
    """Losses of every seed, of the comparison without normalisers."""

    def sample(stores: Stores) -> list[float]:
        found = [
            r for r in runs(stores, file, norm=norm, method=method) if r["settings"].get("embedding_deviation") == drawn
        ]
        return [r["test_loss"] if of == "test_loss" else r[of][-1] for r in found]

    return sample


def one_rate(stores: Stores) -> Finding:
    """How far BatchIdeal ends below its best, at rates from 0.3 to 3, over all batch sizes."""
    found: dict[int, dict[float, float]] = {}
    for r in runs(stores, "rates", method="batch-ideal-default"):
        found.setdefault(r["settings"]["batch_size"], {})[r["settings"]["lr"]] = statistics.fmean(
            r["test_accuracy"][-1]
        )
    worst = max(max(at.values()) - min(at[lr] for lr in (0.3, 1.0, 3.0)) for at in found.values())
    return Finding(
        worst < 2, f"at most {worst:.1f} points below its best from 0.3 to 3, batches of {shown(sorted(found), 0)}"
    )
