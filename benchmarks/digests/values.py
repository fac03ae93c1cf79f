"""Numbers in the sentences of pages, by name: `report --pages` writes them into `<!-- value:NAME -->…<!-- -->`."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from scipy.stats import ttest_ind

from ..core.arms import arm, chosen, compared, errors
from ..core.store import Store
from ..core.tables import spearman, welch
from ..problems.pictures import psnr
from ..studies import table1
from .judges import reached, runs

Stores = Mapping[str, Store]
#: What a phrase is filled from: gain, loss (its negative) and p of a difference; or low and high.
Numbers = Mapping[str, Any]


def difference(gain: float, p: float) -> Numbers:
    """A difference and its p, with the digits that sentences have."""
    return {"gain": gain, "loss": -gain, "p": "p < 0.001" if p < 0.001 else f"p = {p:.{2 if p >= 0.0145 else 3}f}"}


def between(values: Sequence[float]) -> Numbers:
    """The least and the greatest of some values."""
    return {"low": min(values), "high": max(values)}


def lead(stores: Stores, file: str, method: str, rival: str, **wanted: Any) -> Numbers:
    """How many points a method is ahead of another one."""
    return difference(*welch(*(reached(stores, file, name, **wanted) for name in (method, rival))))


def speed(
    stores: Stores, suite: str, parts: str, *, of: str = "time_ratio", scale: float = 1, less: float = 0
) -> Numbers:  # fmt: skip
    """Medians of the rows of a suite whose names have all parts, which a bar divides."""
    (result,) = (r for r in stores["speed"].read() if r["key"] == suite)
    rows = [row[of] for row in result["rows"] if all(part in row["what"] for part in parts.split("|"))]
    return between([scale * ((row["median"] if isinstance(row, dict) else row) - less) for row in rows])


def measurement(stores: Stores) -> Numbers:
    """The time of one `divergence`, in training steps, but of affine-like layers."""
    (result,) = stores["divergence"].read()
    return between([row["time_ratio"]["median"] for row in result["cost"] if row["what"] != "affine-like"])


def ranked(stores: Stores, activation: str) -> Numbers:
    """Spearman's ρ of the means over batch sizes with the paper's, after 100 epochs."""
    methods, series = [m for m, a in table1.PAPER if a == activation], table1.series(stores["table1"].read())
    means = [fmean(table1.over_sizes(series[method, activation])) for method in methods]
    rank = spearman(means, [table1.PAPER[method, activation][0] for method in methods])
    return {"rank": rank.statistic, "p": rank.pvalue}


def newton_step(stores: Stores) -> Numbers:
    """The price of a step of GaussNewton at 300 residuals and ten thousand parameters, in plain steps."""
    (r,) = (r for r in stores["speed-gauss-newton"].read() if r["rows"] == 300 and 1e4 <= r["parameters"] < 2e4)
    return between([r["ratios"]["step"]["median"]])


#: Of the language model: file, normaliser, deviation of the embeddings, method, rate of the embeddings.
Arm = tuple[str, str, float | None, str, float | None]


def text(stores: Stores, arm: Arm) -> list[float]:
    """Test losses, by seed."""
    file, norm, drawn, method, rate = arm
    return reached(stores, file, method, norm=norm, embedding_deviation=drawn, embedding_lr=rate)


def losses(stores: Stores, own: Arm, other: Arm) -> Numbers:
    """The difference of test losses, in nats."""
    return difference(*welch(text(stores, own), text(stores, other)))


HELD: Arm = ("norm-free", "none", 1.0, "input-held-muon", None)
MUON: Arm = ("norm-free", "layernorm", None, "muon", None)


def interval(stores: Stores) -> Numbers:
    """That of the difference of the held wrapper to LayerNorm, with 95 %."""
    return between(ttest_ind(text(stores, HELD), text(stores, MUON), equal_var=False).confidence_interval(0.95))


def longer(norm: str = "none", rate: float | None = None) -> Callable[[Stores], Numbers]:
    """How far the held wrapper ends above LayerNorm after 2,000 steps, whose embeddings have the best rate."""
    own: Arm = ("norm-free-2000", norm, 1.0, "input-held-muon", rate)
    return partial(losses, own=own, other=("norm-free-2000", "layernorm", None, "muon", 3e-2))


def pictures(stores: Stores, own: tuple[str, str], other: tuple[str, str]) -> Numbers:
    """The difference in dB of two arms without normalisers of the ReLU network: (optimizer, wrapper)."""
    results = chosen(runs(stores, "coordinates", network="relu", size=64, batch_size=None))
    pair = [errors(r for r in results if arm(r) == ("none", *each, None, None)) for each in (own, other)]
    return difference(*compared(pair[0], pair[1], psnr)[:2])


def whitened(stores: Stores) -> Numbers:
    """The gains of whitening on pictures without features."""
    return between([pictures(stores, (o, "whitened"), (o, "none"))["gain"] for o in ("adam", "muon", "soap")])


def features(stores: Stores, optimizer: str, held_out: bool | None = None) -> Numbers:
    """The gain in dB of whitening behind Fourier features, in equal time."""
    results = [r for r in runs(stores, "fourier") if "time_of" in r["settings"]]
    results = [r for r in results if r["settings"].get("held_out") == held_out]
    pair = [errors(r for r in results if arm(r)[:3] == ("none", optimizer, how)) for how in ("whitened", "none")]
    return difference(*compared(pair[0], pair[1], psnr)[:2])


def heated(stores: Stores) -> Numbers:
    """log₁₀ of what whitened Adam's error of the heat equation is of Adam's."""
    results = chosen(runs(stores, "poisson", equation="heat", points="fixed", steps=2000))
    arms = ("none", "adam", "whitened", None, "derivatives"), ("none", "adam", "none", None, None)
    pair = [errors(r for r in results if arm(r) == each) for each in arms]
    return difference(*compared(pair[0], pair[1], math.log10)[:2])


_MLP: dict[str, Any]
_ADAM: dict[str, Any]
_MLP, _ADAM = {"optimizer": "sgd", "activation": "tanh"}, {"optimizer": "adam"}
_UC = partial(speed, suite="unit-consistent")
#: Name → a phrase, and its numbers.
VALUES: dict[str, tuple[str, Callable[[Stores], Numbers]]] = {
    "features-soap": ("{gain:.1f} dB ({p})", partial(features, optimizer="soap")),
    "features-muon": ("{gain:.1f} ({p})", partial(features, optimizer="muon")),
    "features-adam": ("{gain:.1f}", partial(features, optimizer="adam")),
    "held-out": ("{loss:.1f} dB", partial(features, optimizer="soap", held_out=True)),
    "held-out-soap": ("{loss:.1f} dB to SOAP's ({p})", partial(features, optimizer="soap", held_out=True)),
    "held-out-muon": ("{loss:.1f}", partial(features, optimizer="muon", held_out=True)),
    "held-out-adam": ("{gain:.1f}", partial(features, optimizer="adam", held_out=True)),
    "pictures": ("{low:.0f} to {high:.0f} dB", whitened),
    "mac-picture": ("{gain:.1f} dB to Adam** ({p})", partial(pictures, own=("adam", "mac"), other=("adam", "none"))),
    "mac-whitened": ("{gain:.1f} less than `Whitened` ({p})", partial(
        pictures, own=("adam", "whitened"), other=("adam", "mac"))),
    "mac-muon": ("{loss:.1f}", partial(pictures, own=("muon", "mac"), other=("muon", "none"))),
    "heat-adam": ("{p}", heated),
    "dyt": ("{gain:.1f} points below ({p})", partial(
        lead, file="mlp-tuned", method="batch-ideal", rival="dyt", **_MLP)),
    "rank-tanh": ("{rank:+.2f}, p = {p:.4f}", partial(ranked, activation="tanh")),
    "rank-leaky": ("{rank:+.2f}, p = {p:.2f}", partial(ranked, activation="leaky-relu")),
    "batch-32": ("{gain:.1f}", partial(
        lead, file="table1", method="affine-like", rival="batch-ideal", activation="tanh", batch_size=32)),
    "mac-cnn": ("{gain:.1f} points over no normaliser ({p})", partial(
        lead, file="cnn-pool-tuned", method="mac", rival="none", **_ADAM)),
    "mac-cnn-whitened": ("{gain:.1f} below `Whitened` ({p})", partial(
        lead, file="cnn-pool-tuned", method="whitened", rival="mac", **_ADAM)),
    "uc-long": ("{loss:.1f} points behind BatchNorm** ({p})", partial(
        lead, file="uc-long", method="uc-network", rival="batchnorm")),
    "jacobian": ("{low:.0f} to {high:.0f} times", partial(speed, suite="layers", parts="jacobian.backward")),
    "divergence": ("{low:.1f} to {high:.1f} training steps", measurement),
    "scaled": ("{low:.2f} to {high:.2f}×", partial(speed, suite="input-scaled", parts="batch 16")),
    "uc-fresh": ("{low:.1f} to {high:.1f} times", partial(_UC, parts="memory fresh")),
    "uc-kept": ("{low:.1f} to {high:.1f} times", partial(_UC, parts="memory kept")),
    "uc-small": ("{low:.1f} to {high:.1f} times", partial(_UC, parts="0.3 M")),
    "uc": ("{low:.1f} to {high:.1f} times", partial(_UC, parts="10.2 M")),
    "uc-memory": ("{low:.1f} times", partial(_UC, parts="10.2 M", of="memory_ratio")),
    "gauss-newton": ("{low:.1f} plain steps", newton_step),
    "affine": ("{high:.0f} %", partial(
        speed, suite="structural", parts="AffineLikeLinear|compiled", scale=100, less=1)),
    "white-adamw": ("{loss:.2f} nats off AdamW", partial(
        losses, own=("norm-free", "layernorm", None, "whitened-adamw", None), other=(*MUON[:3], "adamw", None))),
    "white-muon": ("{loss:.3f} off Muon", partial(
        losses, own=("norm-free", "layernorm", None, "whitened-muon", None), other=MUON)),
    "held-muon": ("{loss:.3f} nats", partial(losses, own=HELD, other=(*HELD[:3], "muon", None))),
    "muon-alone": ("{gain:.3f} nats of Muon with LayerNorm ({p})", partial(
        losses, own=(*HELD[:3], "muon", None), other=MUON)),
    "held-interval": ("from {low:+.3f} to {high:+.3f}", interval),
    "soap-above": ("{gain:.3f} above it ({p})", partial(losses, own=(*HELD[:3], "soap", None), other=HELD)),
    "held-longer": ("{gain:.3f} nats", longer()),
    "held-fast": ("{gain:.3f}", longer(rate=3e-2)),
    "held-head": ("{loss:.3f}", longer("head-layernorm", 3e-2)),
}  # fmt: skip
#: Pages with such phrases that show no results beside.
PAGES = (Path("docs/layers/affine-like.md"), Path("docs/coordinates/unit-consistent.md"))
_PLACE = re.compile(r"(<!-- value:(\S+) -->)(.*?)(<!-- -->)", re.DOTALL)


def filled(text: str, stores: Stores) -> str:
    """Return a page with the phrases of its places as the results have them.

    A place is `<!-- value:NAME -->phrase<!-- -->`, which pages do not show.

    Raises:
        ValueError: no value has the name, or a place begins a line, which Markdown would show as it is written.
    """
    if begins := re.search(r"^[ \t]*<!-- value:(\S+) -->", text, re.MULTILINE):
        raise ValueError(f"the place of {begins[1]!r} begins a line, which Markdown takes for HTML; put a word before.")

    def phrase(place: re.Match[str]) -> str:
        if place[2] not in VALUES:
            raise ValueError(f"no value is called {place[2]!r}; there are {', '.join(VALUES)}.")
        template, numbers = VALUES[place[2]]
        return place[1] + template.format(**numbers(stores)) + place[4]

    return _PLACE.sub(phrase, text)
