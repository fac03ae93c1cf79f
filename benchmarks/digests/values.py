"""Numbers in the sentences of pages, by name: `report --pages` writes them into `<!--value:NAME-->…<!---->`."""

import math
import re
import statistics
from collections.abc import Callable, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

from ..core.store import setting
from ..core.tables import Table, grouped
from ..studies import equations, table1
from .reached import Settings, Stores, beside, matching, measure_of, reached, settings, table

#: What a phrase is filled from: gain, loss (its negative), interval and p of a difference, the factor between errors
#: whose logarithms differ so, and what it is between; or those of some cells.
Numbers = Mapping[str, Any]
#: Name of a file in `docs/results/tables` → the table.
Tables = Mapping[str, Table]


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


def cells(tables: Tables, table: str, rows: str, columns: str) -> Numbers:
    """The numbers in columns of a table, of the rows whose words and whole numbers in front a pattern is found in.

    More is per cent above 1, p that of the first number.
    """
    frame, names = tables[table].frame, columns.split("; ")
    fronts = (takewhile(lambda value: not isinstance(value, float), row) for row in frame.to_numpy())
    words = [", ".join(str(value) for value in front if value != "") for front in fronts]
    found = frame[[re.search(rows, each) is not None for each in words]]
    values = [value for name in names for value in found[name] if value != ""]
    low, high, (p, *_) = min(values), max(values), found.get(f"{names[0]} p", [math.nan])
    return {"low": low, "high": high, "first": values[0], "last": values[-1], "more": 100 * (high - 1), "p": p}


def ranked(stores: Stores, activation: str) -> Numbers:
    """Spearman's ρ of the means over batch sizes with the paper's, after 100 epochs."""
    rank = table1.ranked(stores["table1"].read(), activation)
    return {"rank": rank.statistic, "p": rank.pvalue}


def newton_in_study(stores: Stores) -> Numbers:
    """How many steps of Adam a step of GaussNewton takes the time of, by equation, at 300 points and 50 units."""
    wanted: Settings = {"hidden": 50, "inner": 300, "method": "none", "draws": "anew", "init": None}
    alike = grouped(matching(stores["equations"].read(), wanted), setting("equation", "optimizer"))
    steps = {key: statistics.median(r["steps"][-1] for r in same) for key, same in alike.items()}
    both = [equation for equation, name in steps if name == "adam" and (equation, "gauss-newton") in steps]
    ratios = [steps[equation, "adam"] / steps[equation, "gauss-newton"] for equation in both]
    return {"low": min(ratios), "high": max(ratios)}


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
_ALL = (lead, cells, ranked, newton_in_study, tuned_twice, chosen_again)
NUMBERS: dict[str, Callable[..., Numbers]] = {each.__name__: each for each in _ALL}
#: Pages with such phrases that show no results beside.
PAGES = (Path("README.md"), Path("docs/layers/affine-like.md"), Path("docs/coordinates/unit-consistent.md"))


def phrase(name: str, stores: Stores, tables: Tables) -> str:
    """What a value says."""
    if name not in VALUES:
        raise ValueError(f"no value is called {name!r}; there are {', '.join(VALUES)}.")
    _, text, numbers, *words = filter(None, VALUES[name].values())
    return text.format(**NUMBERS[numbers](tables if numbers == "cells" else stores, *words))


def filled(text: str, stores: Stores, tables: Tables) -> str:
    """Return a page with the phrases of its places as the results have them.

    A place is `<!--value:NAME-->phrase<!---->`, which pages do not show.

    Raises:
        ValueError: no value has the name, or a place begins a line, which Markdown would show as it is written.
    """
    if begins := re.search(r"^[ \t]*<!--value:(\S+?)-->", text, re.MULTILINE):
        raise ValueError(f"the place of {begins[1]!r} begins a line, which Markdown takes for HTML; put a word before.")
    place = re.compile(r"(<!--value:(\S+?)-->).*?(<!---->)", re.DOTALL)
    return place.sub(lambda found: found[1] + phrase(found[2], stores, tables) + found[3], text)
