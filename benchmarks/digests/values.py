"""Numbers in the sentences of pages, by name: `report --pages` writes them into `<!-- value:NAME -->…<!-- -->`."""

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..studies import equations, table1
from .calls import CALLS
from .comparisons import beside, settings, table
from .reached import Stores, measure_of, reached, timings

#: What a phrase is filled from: gain, loss (its negative), interval and p of a difference, the factor between errors
#: whose logarithms differ so, and what it is between; or low and high.
Numbers = Mapping[str, Any]


def lead(stores: Stores, file: str, runs: str, others: str) -> Numbers:
    """How far some runs are ahead of others, with the digits of p that sentences have."""
    (ours,) = settings(runs)
    samples = [reached(stores, file, **each) for each in (ours, *beside(ours, others))]
    measure = measure_of(stores, file)
    gain, p, low, high, _ = measure.difference(*samples)
    shown = "p < 0.001" if p < 0.001 else f"p = {p:.{2 if p >= 0.0145 else 3}f}"
    means = dict(zip(("ours", "theirs"), map(measure.mean, samples), strict=True))
    medians = {
        f"{whose}_median": statistics.median(each.values())
        for whose, each in zip(("our", "their"), samples, strict=True)
    }
    return {
        "gain": gain, "loss": -gain, "low": low, "high": high, "p": shown, "times": 10 ** abs(gain), **means, **medians,
    }  # fmt: skip


def between(values: Sequence[float]) -> Numbers:
    """The least and the greatest of some values."""
    return {"low": min(values), "high": max(values)}


def times(stores: Stores, suite: str, pattern: str, file: str = "speed") -> Numbers:
    """Medians of the rows of a suite of timings in whose names a pattern is found, and the per cent more than plain."""
    ratios = between([row["time_ratio"]["median"] for row in timings(stores, suite, pattern, file).values()])
    return {**ratios, "more": 100 * (ratios["high"] - 1)}


def memory(stores: Stores, suite: str, pattern: str, file: str = "speed") -> Numbers:
    """The same of the peaks of memory."""
    return between([row["memory_ratio"] for row in timings(stores, suite, pattern, file).values()])


def measurement(stores: Stores) -> Numbers:
    """The time of one `divergence`, in training steps."""
    (result,) = stores["divergence"].read()
    return between([row["time_ratio"]["median"] for row in result["cost"]])


def ranked(stores: Stores, activation: str) -> Numbers:
    """Spearman's ρ of the means over batch sizes with the paper's, after 100 epochs."""
    rank, _ = table1.ranked(stores["table1"].read(), activation)
    return {"rank": rank.statistic, "p": rank.pvalue}


def price(stores: Stores, task: str) -> Numbers:
    """The price of a step of a task in the table of calls."""
    (call,) = (call for call in CALLS if call.task == task)
    return {"price": call.price_of_step(stores)}


def newton_step(stores: Stores) -> Numbers:
    """The price of a step of GaussNewton at 300 residuals and ten thousand parameters, in plain steps."""
    (r,) = (r for r in stores["speed-gauss-newton"].read() if r["rows"] == 300 and 1e4 <= r["parameters"] < 2e4)
    return between([r["ratios"]["step"]["median"]])


def on_gpu(stores: Stores, pattern: str) -> Numbers:
    """Times of `Whitened` on a GPU, and the greatest of its memory."""
    suite, file = "whitened-cuda-bfloat16-gpu", "gpu-speed"
    return {**times(stores, suite, pattern, file), "memory": memory(stores, suite, pattern, file)["high"]}


def points_that_stay(stores: Stores, optimizer: str) -> Numbers:
    """The errors of an optimizer alone on Korteweg and de Vries' equation, with points that are new, and that stay."""
    of_arm = equations.varied(stores["equations"])["korteweg-de-vries", equations.SOAP._replace(optimizer=optimizer)]
    return {"before": of_arm["as above"], "after": of_arm["points that stay"]}


def initialisation(stores: Stores) -> Numbers:
    """The largest factor between an error by Xavier's initialisation and by PyTorch's."""
    every = equations.varied(stores["equations"]).values()
    ratios = [(e["PyTorch's initialisation"] or math.inf) / (e["as above"] or math.inf) for e in every]
    return {"factor": max(max(ratio, 1 / ratio) for ratio in ratios)}


def tuned_twice(stores: Stores, equation: str) -> Numbers:
    """The medians of SOAP by the settings of two searches."""
    return dict(zip(("first", "second"), equations.tuned_twice(stores["equations"])[equation], strict=True))


#: Name → a phrase, what its numbers are of, and the words that this is told.
VALUES: dict[str, tuple[Any, ...]] = {
    **{row["name"]: (row["phrase"], lead, row["file"], row["runs"], row["others"]) for row in table("values")},
    "rank-tanh": ("{rank:+.2f}, p = {p:.4f}", ranked, "tanh"),
    "rank-leaky": ("{rank:+.2f}, p = {p:.2f}", ranked, "leaky-relu"),
    "jacobian": ("{low:.0f} to {high:.0f} times", times, "layers", "jacobian.backward"),
    "step-1024": ("{low:.2f} to {high:.2f} times", times, "whitened", "^AdamW, batch 16, every 10(, rank 16)?$"),
    "step-8192": ("{low:.2f} to {high:.2f}", times, "whitened", "^AdamW, batch 128, every 10(, rank 16)?$"),
    "divergence": ("{low:.1f} to {high:.1f} training steps", measurement),
    "scaled": ("{low:.2f} to {high:.2f}×", times, "input-scaled", "batch 16"),
    "uc-fresh": ("{low:.1f} to {high:.1f} times", times, "unit-consistent", "memory fresh"),
    "uc-kept": ("{low:.1f} to {high:.1f} times", times, "unit-consistent", "memory kept"),
    "uc-small": ("{low:.1f} to {high:.1f} times", times, "unit-consistent", "0.3 M"),
    "uc": ("{low:.1f} to {high:.1f} times", times, "unit-consistent", "10.2 M"),
    "uc-memory": ("{low:.1f} times", memory, "unit-consistent", "10.2 M"),
    "gpu-adamw": ("{low:.1f} to {high:.1f}", on_gpu, r"^AdamW, batch \d+, every 10(, blocks of 256)?$"),
    "gpu-adamw-rank": ("{low:.1f} to {high:.1f}", on_gpu, "^AdamW.*rank 16"),
    "gpu-adamw-50": ("{high:.1f}", on_gpu, "^AdamW.*every 50"),
    "gpu-muon": ("{low:.1f} to {high:.1f}", on_gpu, r"^Muon, batch \d+, every 10(, blocks of 256)?$"),
    "gpu-muon-rank": ("{low:.1f} to {high:.1f}", on_gpu, "^Muon.*rank 16"),
    "gpu-muon-50": ("{high:.1f}", on_gpu, "^Muon.*every 50"),
    "gpu-memory": ("{memory:.2f} times", on_gpu, ""),
    "gauss-newton": ("{low:.1f} plain steps", newton_step),
    "points-stay": ("{before:.0e} → {after:.0e}", points_that_stay, "gauss-newton"),
    "points-stay-soap": ("{before:.0e} → {after:.0e}", points_that_stay, "soap"),
    "start": ("{factor:.0f}", initialisation),
    "tuned-twice": ("{first:.1e} and {second:.1e}", tuned_twice, "burgers"),
    "tuned-twice-reaction": ("{first:.1e} and {second:.1e}", tuned_twice, "reaction"),
    "price-picture-soap": ("{price:.1f} ×", price, "picture, Fourier features, equal time, SOAP"),
    "price-picture-adam": ("{price:.1f} ×", price, "picture, Fourier features, equal time, Adam"),
    "price-cnn": ("{price:.1f} ×", price, "CNN without a normaliser, Adam"),
    "price-mlp": ("{price:.1f} ×", price, "tanh MLP, SGD"),
    "affine": ("{more:.0f} %", times, "structural", "AffineLikeLinear.*compiled"),
}
#: Pages with such phrases that show no results beside.
PAGES = (Path("README.md"), Path("docs/layers/affine-like.md"), Path("docs/coordinates/unit-consistent.md"))
_PLACE = re.compile(r"(<!-- value:(\S+) -->)(.*?)(<!-- -->)", re.DOTALL)


def phrase(name: str, stores: Stores) -> str:
    """What a value says."""
    if name not in VALUES:
        raise ValueError(f"no value is called {name!r}; there are {', '.join(VALUES)}.")
    template, numbers, *words = VALUES[name]
    return str(template.format(**numbers(stores, *words)))


def filled(text: str, stores: Stores) -> str:
    """Return a page with the phrases of its places as the results have them.

    A place is `<!-- value:NAME -->phrase<!-- -->`, which pages do not show.

    Raises:
        ValueError: no value has the name, or a place begins a line, which Markdown would show as it is written.
    """
    if begins := re.search(r"^[ \t]*<!-- value:(\S+) -->", text, re.MULTILINE):
        raise ValueError(f"the place of {begins[1]!r} begins a line, which Markdown takes for HTML; put a word before.")
    return _PLACE.sub(lambda place: place[1] + phrase(place[2], stores) + place[4], text)
