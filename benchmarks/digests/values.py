"""Numbers in the sentences of pages, by name: `report --pages` writes them into `<!-- value:NAME -->…<!-- -->`."""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..problems.regression import DRAWN
from ..studies import table1
from ..studies.fourier import STEPS
from ..train import DERIVATIVES
from .reached import Settings, Stores, arm, measure_of, reached, timings

#: What a phrase is filled from: gain, loss (its negative), interval and p of a difference, the factor between errors
#: whose logarithms differ so; or low and high.
Numbers = Mapping[str, Any]


def lead(stores: Stores, file: str, own: Settings, other: Settings) -> Numbers:
    """How far some runs are ahead of others, with the digits of p that sentences have."""
    ours, theirs = (reached(stores, file, **settings) for settings in (own, other))
    gain, p, low, high, _ = measure_of(stores, file).difference(ours, theirs)
    shown = "p < 0.001" if p < 0.001 else f"p = {p:.{2 if p >= 0.0145 else 3}f}"
    return {"gain": gain, "loss": -gain, "low": low, "high": high, "p": shown, "times": 10 ** abs(gain)}


def leads(file: str, own: Settings, other: Settings, **beside: Any) -> Callable[[Stores], Numbers]:
    """What says that of runs which have some settings in common."""
    return partial(lead, file=file, own={**beside, **own}, other={**beside, **other})


def between(values: Sequence[float]) -> Numbers:
    """The least and the greatest of some values."""
    return {"low": min(values), "high": max(values)}


def timed(
    suite: str, pattern: str, *, of: str = "time_ratio", scale: float = 1, less: float = 0
) -> Callable[[Stores], Numbers]:  # fmt: skip
    """Medians of the rows of a suite of timings in whose names a pattern is found."""

    def numbers(stores: Stores) -> Numbers:
        rows = [row[of] for row in timings(stores, suite, pattern).values()]
        return between([scale * ((row["median"] if isinstance(row, dict) else row) - less) for row in rows])

    return numbers


def measurement(stores: Stores) -> Numbers:
    """The time of one `divergence`, in training steps, but of affine-like layers."""
    (result,) = stores["divergence"].read()
    return between([row["time_ratio"]["median"] for row in result["cost"] if row["what"] != "affine-like"])


def ranked(stores: Stores, activation: str) -> Numbers:
    """Spearman's ρ of the means over batch sizes with the paper's, after 100 epochs."""
    rank, _ = table1.ranked(stores["table1"].read(), activation)
    return {"rank": rank.statistic, "p": rank.pvalue}


def newton_step(stores: Stores) -> Numbers:
    """The price of a step of GaussNewton at 300 residuals and ten thousand parameters, in plain steps."""
    (r,) = (r for r in stores["speed-gauss-newton"].read() if r["rows"] == 300 and 1e4 <= r["parameters"] < 2e4)
    return between([r["ratios"]["step"]["median"]])


def text(norm: str, drawn: float | None, method: str, rate: float | None = None) -> Settings:
    """A language model: normaliser, deviation of the embeddings, method, rate of the embeddings."""
    return {"norm": norm, "embedding_deviation": drawn, "method": method, "embedding_lr": rate}


pictures = partial(leads, "coordinates", network="relu", size=64, batch_size=None)
losses = partial(leads, "norm-free")


def plain(optimizer: str, own: str, other: str) -> Callable[[Stores], Numbers]:
    """The gain in dB of a network and a method over another pair, without features."""
    (network, method), (rival, without) = own.split(), other.split()
    pair = ({**arm(optimizer, method), "network": network}, {**arm(optimizer, without), "network": rival})
    return leads("initialisation", *pair)


def features(optimizer: str, held_out: bool | None = None) -> Callable[[Stores], Numbers]:
    """The gain in dB of whitening behind Fourier features, in equal time."""
    return leads("fourier", arm(optimizer, "whitened"), arm(optimizer), time_of=STEPS, held_out=held_out)


def longer(norm: str = "none", rate: float | None = None) -> Callable[[Stores], Numbers]:
    """How far the held wrapper ends above LayerNorm after 2,000 steps, whose embeddings have the best rate."""
    return leads("norm-free-2000", text(norm, 1.0, "input-held-muon", rate), text("layernorm", None, "muon", 3e-2))


def methods(file: str, own: str, other: str, **beside: Any) -> Callable[[Stores], Numbers]:
    """How many points a method is ahead of another one."""
    return leads(file, {"method": own}, {"method": other}, **beside)


HELD, MUON = text("none", 1.0, "input-held-muon"), text("layernorm", None, "muon")
_UC = partial(timed, "unit-consistent")


def _step(what: str) -> Callable[[Stores], Numbers]:
    """The time of a step of `Whitened`, by rank 16 and by a whole root, in steps of the optimizer."""
    return timed("whitened", f"^{what}, every 10(, rank 16)?$")


#: Name → a phrase, and its numbers.
VALUES: dict[str, tuple[str, Callable[[Stores], Numbers]]] = {
    "features-soap": ("{gain:.1f} dB ({p})", features("soap")),
    "features-muon": ("{gain:.1f} ({p})", features("muon")),
    "features-adam": ("{gain:.1f}", features("adam")),
    "held-out": ("{loss:.1f} dB", features("soap", held_out=True)),
    "held-out-soap": ("{loss:.1f} dB to SOAP's ({p})", features("soap", held_out=True)),
    "held-out-muon": ("{loss:.1f}", features("muon", held_out=True)),
    "held-out-adam": ("{gain:.1f}", features("adam", held_out=True)),
    **{
        f"{name}-{optimizer}": (phrase, plain(optimizer, own, other))
        for name, phrase, own, other in (
            ("he", "{gain:.1f} dB ({p})", "he none", "relu none"),
            ("whitened", "{gain:.1f} dB ({p})", "relu whitened", "relu none"),
            ("he-whitened", "{gain:.1f} dB ({p})", "he whitened", "he none"),
            ("free", "{gain:+.1f} dB ({p})", "relu whitened-free", "relu whitened"),
        )
        for optimizer in ("adam", "soap")
    },
    **{
        f"{equation}-{optimizer}": ("{times:.1f} ({p})", leads(
            "equations", arm(optimizer, "whitened", DERIVATIVES), arm(optimizer), equation=equation))
        for equation, optimizer in (("reaction", "soap"), ("kovasznay", "soap"), ("burgers", "muon"))
    },
    "deep": ("{loss:.1f} dB ({p})", leads(
        "initialisation", arm("adam", "whitened"), {**arm("adam"), "norm": "batchnorm"}, network="deep")),
    "columns": ("{times:.1f} times", leads(
        "tabular", arm("soap", "whitened"), {**arm("soap"), "norm": "columns"},
        data_set={f"{name}-10000" for name in DRAWN})),
    "smooth": ("{times:.2f} times ({p})", leads(
        "tabular", arm("adam", "whitened"), arm("adam"), data_set={f"{name}-1" for name in DRAWN})),
    "he-mlp": ("{loss:.1f} points ({p})", leads(
        "departures", {"departure": "he"}, {"departure": None}, method="none")),
    "mac-whitened": ("{gain:.1f} dB below `Whitened` ({p})", pictures(
        arm("adam", "whitened"), arm("adam", "mac"))),
    "mac-muon": ("{loss:.1f}", pictures(arm("muon", "mac"), arm("muon"))),
    "dyt": ("{gain:.1f} points below ({p})", methods(
        "mlp-tuned", "batch-ideal", "dyt", optimizer="sgd", activation="tanh")),
    "rank-tanh": ("{rank:+.2f}, p = {p:.4f}", partial(ranked, activation="tanh")),
    "rank-leaky": ("{rank:+.2f}, p = {p:.2f}", partial(ranked, activation="leaky-relu")),
    "batch-32": ("{gain:.1f}", methods(
        "table1", "affine-like", "batch-ideal", activation="tanh", batch_size=32)),
    "mac-cnn": ("{gain:.1f} points over no normaliser ({p})", methods(
        "cnn-pool-tuned", "mac", "none", optimizer="adam")),
    "mac-cnn-whitened": ("{gain:.1f} below `Whitened` ({p})", methods(
        "cnn-pool-tuned", "whitened", "mac", optimizer="adam")),
    "uc-long": ("{loss:.1f} points behind BatchNorm** ({p})", methods(
        "uc-long", "uc-network", "batchnorm")),
    "jacobian": ("{low:.0f} to {high:.0f} times", timed("layers", "jacobian.backward")),
    "step-1024": ("{low:.2f} to {high:.2f} times", _step("AdamW, batch 16")),
    "step-8192": ("{low:.2f} to {high:.2f}", _step("AdamW, batch 128")),
    "divergence": ("{low:.1f} to {high:.1f} training steps", measurement),
    "scaled": ("{low:.2f} to {high:.2f}×", timed("input-scaled", "batch 16")),
    "uc-fresh": ("{low:.1f} to {high:.1f} times", _UC("memory fresh")),
    "uc-kept": ("{low:.1f} to {high:.1f} times", _UC("memory kept")),
    "uc-small": ("{low:.1f} to {high:.1f} times", _UC("0.3 M")),
    "uc": ("{low:.1f} to {high:.1f} times", _UC("10.2 M")),
    "uc-memory": ("{low:.1f} times", _UC("10.2 M", of="memory_ratio")),
    "gauss-newton": ("{low:.1f} plain steps", newton_step),
    "affine": ("{high:.0f} %", timed(
        "structural", "AffineLikeLinear.*compiled", scale=100, less=1)),
    "white-adamw": ("{loss:.2f} nats off AdamW", losses(
        text("layernorm", None, "whitened-adamw"), text("layernorm", None, "adamw"))),
    "white-muon": ("{loss:.3f} off Muon", losses(
        text("layernorm", None, "whitened-muon"), MUON)),
    "held-muon": ("{loss:.3f} nats", losses(HELD, text("none", 1.0, "muon"))),
    "muon-alone": ("{gain:.3f} nats of Muon with LayerNorm ({p})", losses(
        text("none", 1.0, "muon"), MUON)),
    "held-interval": ("from {low:+.3f} to {high:+.3f}", losses(HELD, MUON)),
    "soap-above": ("{gain:.3f} above it ({p})", losses(text("none", 1.0, "soap"), HELD)),
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
