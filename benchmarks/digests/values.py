"""Numbers in the sentences of pages, by name: `report --pages` writes them into `<!-- value:NAME -->…<!-- -->`."""

import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..methods import METHODS
from ..studies import equations, mechanism, table1
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
    our_median, their_median = (statistics.median(each.values()) for each in samples)
    by_medians = max(our_median, their_median) / min(our_median, their_median)
    return {
        "gain": gain, "loss": -gain, "low": low, "high": high, "p": shown, "times": 10 ** abs(gain),
        "our_median": our_median, "their_median": their_median, "by_medians": by_medians, **means,
    }  # fmt: skip


def between(values: Sequence[float]) -> Numbers:
    """The least and the greatest of some values."""
    return {"low": min(values), "high": max(values)}


def times(stores: Stores, suite: str, pattern: str, file: str = "speed") -> Numbers:
    """Medians and peaks of memory of the rows in whose names a pattern is found, and the per cent more than plain."""
    rows = timings(stores, suite, pattern, file).values()
    ratios = between([row["time_ratio"]["median"] for row in rows])
    memory = {f"memory_{end}": peak for end, peak in between([row["memory_ratio"] for row in rows]).items()}
    return {**ratios, **memory, "more": 100 * (ratios["high"] - 1)}


def divergence(stores: Stores) -> Numbers:
    """The time of one `divergence`, in training steps."""
    (result,) = stores["divergence"].read()
    return between([row["time_ratio"]["median"] for row in result["cost"]])


def ranked(stores: Stores, activation: str) -> Numbers:
    """Spearman's ρ of the means over batch sizes with the paper's, after 100 epochs."""
    rank, _ = table1.ranked(stores["table1"].read(), activation)
    return {"rank": rank.statistic, "p": rank.pvalue}


def correlated(stores: Stores, file: str, quantity: str) -> Numbers:
    """The rank correlation of accuracy and a measure of divergence over tuned runs, and the ends of those of groups."""
    everywhere, *groups = (mechanism.rank(each, quantity) for each in mechanism.groups(stores[file].read()).values())
    return {"rank": everywhere.statistic, "p": everywhere.pvalue, **between([rank.statistic for rank in groups])}


def cosines(stores: Stores, method: str) -> Numbers:
    """The mean cosines of a method's runs with SGD."""
    runs = mechanism.runs_of(stores["mechanism"].read())
    return between([*runs[(runs["method"] == METHODS[method].label) & (runs["optimizer"] == "sgd")]["cosine"]])


def price(stores: Stores, task: str) -> Numbers:
    """The price of a step of a task in the table of calls."""
    (call,) = (call for call in CALLS if call.task == task)
    return {"price": call.price_of_step(stores)}


def newton_step(stores: Stores) -> Numbers:
    """The price of a step of GaussNewton at 300 residuals and ten thousand parameters, in plain steps."""
    (r,) = (r for r in stores["speed-gauss-newton"].read() if r["rows"] == 300 and 1e4 <= r["parameters"] < 2e4)
    return between([r["ratios"]["step"]["median"]])


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


def chosen_again(stores: Stores, method: str) -> Numbers:
    """The mean test losses of a language model by the settings of two searches, over the seeds that both have."""
    files = {"first": "char-lm", "second": "char-lm-again"}
    samples = {which: reached(stores, file, method=method, norm="layernorm") for which, file in files.items()}
    shared = samples["first"].keys() & samples["second"].keys()
    return {which: statistics.fmean(sample[seed] for seed in shared) for which, sample in samples.items()}


#: Name → a row of `values.csv`: a phrase, the function of its numbers, and the words that this is told.
VALUES = {row["name"]: row for row in table("values")}
NUMBERS: dict[str, Callable[..., Numbers]] = {
    each.__name__: each
    for each in (
        lead, times, divergence, ranked, correlated, cosines, price, newton_step, points_that_stay, initialisation,
        tuned_twice, chosen_again,
    )
}  # fmt: skip
#: Pages with such phrases that show no results beside.
PAGES = (Path("README.md"), Path("docs/layers/affine-like.md"), Path("docs/coordinates/unit-consistent.md"))
_PLACE = re.compile(r"(<!-- value:(\S+) -->)(.*?)(<!-- -->)", re.DOTALL)


def phrase(name: str, stores: Stores) -> str:
    """What a value says."""
    if name not in VALUES:
        raise ValueError(f"no value is called {name!r}; there are {', '.join(VALUES)}.")
    row = VALUES[name]
    words = filter(None, (row["of"], row["what"], row["beside"]))
    return row["phrase"].format(**NUMBERS[row["numbers"]](stores, *words))


def filled(text: str, stores: Stores) -> str:
    """Return a page with the phrases of its places as the results have them.

    A place is `<!-- value:NAME -->phrase<!-- -->`, which pages do not show.

    Raises:
        ValueError: no value has the name, or a place begins a line, which Markdown would show as it is written.
    """
    if begins := re.search(r"^[ \t]*<!-- value:(\S+) -->", text, re.MULTILINE):
        raise ValueError(f"the place of {begins[1]!r} begins a line, which Markdown takes for HTML; put a word before.")
    return _PLACE.sub(lambda place: place[1] + phrase(place[2], stores) + place[4], text)
