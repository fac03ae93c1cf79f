"""What is made from several files of results: who wins on three networks, and Muon for as long as whitening takes."""

import statistics
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import seaborn as sns

from ..core.figure import plt, saved
from ..core.study import Digest
from ..core.tables import Cell, Section, Table, estimate, exact, in_order, pivot, welch
from ..core.tables import Row as Cells
from ..grids import best_optimizer
from ..methods import METHODS
from ..studies.language import curve, draw
from .reached import Settings, Stores, best_runs, reached


class Row(NamedTuple):
    """What stands in a network or around its optimizer, by what the studies call it."""

    label: str
    image: str | None  # a method of the studies on images
    language: tuple[str, str] = ("", "")  # norm; method behind an optimizer
    convolutions: str | None = None  # a method of theirs, if it is another


ROWS = [
    Row("no normaliser", "none", ("none", "{}")),
    Row("BatchNorm", "batchnorm"),
    Row("LayerNorm", "layernorm", ("layernorm", "{}")),
    Row("RMSNorm", "rmsnorm", ("rmsnorm", "{}")),
    Row("`DyT`", "dyt", ("dyt", "{}")),
    Row("affine-like layers", "affine-like"),
    # In an MLP they are L2 norm in front of a linear layer.
    Row("norm-like layers", "l2norm", convolutions="l2-patch"),
    Row("`Proportional`", "proportional"),
    Row("`Disproportional`", "disproportional"),
    Row("`BatchIdeal`", "batch-ideal"),
    Row("`Whitened(rank=16)`", "whitened-16", ("none", "whitened-{}-16")),
    Row("`InputScaled`", "input-scaled", ("none", "input-scaled-{}")),
    Row("`InputScaled(hold=True)`", None, ("none", "input-held-{}")),
    Row("LayerNorm, `Whitened(rank=16)`", None, ("layernorm", "whitened-{}-16")),
]


#: The panel whose unit is nats, where the others have per cent.
TEXT = "language model"


def _seeds(stores: Stores) -> pd.DataFrame:
    """What every seed reached, of all rows that have run: each panel is a network, trained in the ways of two marks."""

    def mlp(row: Row, **more: str) -> Settings:
        return {"method": row.image, "activation": "tanh", **more}

    def tuned(row: Row) -> Settings:
        return mlp(row, optimizer=best_optimizer(stores["mlp-tuned"], row.image, "tanh"))

    def cnn(row: Row, optimizer: str) -> Settings:
        return {"method": row.convolutions or row.image, "optimizer": optimizer}

    def text(row: Row, optimizer: str) -> Settings:
        return {"method": row.language[1].format(optimizer), "norm": row.language[0]}

    first, longer = (stores[name].read()[0]["settings"]["epochs"] for name in ("cifar10", "mlp-tuned"))
    ways: list[tuple[str, str, str, Callable[[Row], Settings]]] = [
        ("tanh MLP", f"Adam 10⁻³, {first} epochs", "cifar10", mlp),
        ("tanh MLP", f"best optimizer, tuned, {longer} epochs", "mlp-tuned", tuned),
        ("CNN", "Adam", "cnn-pool-tuned", partial(cnn, optimizer="adam")),
        ("CNN", "Muon", "cnn-pool-tuned", partial(cnn, optimizer="muon")),
        (TEXT, "AdamW", "norm-free", partial(text, optimizer="adamw")),
        (TEXT, "Muon", "norm-free", partial(text, optimizer="muon")),
    ]
    found = list[tuple[str, str, str, float]]()
    for (panel, mark, file, settings), row in product(ways, ROWS):
        with suppress(LookupError):
            found += [(panel, mark, row.label, each) for each in reached(stores, file, **settings(row)).values()]
    return pd.DataFrame(found, columns=["panel", "mark", "row", "value"])


def _verdict(stores: Stores, name: str, folder: Path) -> Section:
    """Table, figure and caption; beside the best of a column stands p of all others against it."""
    seeds, cells = _seeds(stores), dict[tuple[str, str], Cell]()
    _figure(seeds, folder / f"{name}.png")
    for (panel, mark), column in seeds.groupby(["panel", "mark"], sort=False):
        unit, digits, better = ("nats", 3, min) if panel == TEXT else ("%", 2, max)
        rows = {label: list(values) for label, values in column.groupby("row", sort=False)["value"]}
        best = better(rows.values(), key=statistics.fmean)
        for label, values in rows.items():
            text, numbers = estimate(values, digits)
            p = {} if values is best else {"p against the best": welch(values, best).p}
            cells[label, f"{panel}, {mark}, {unit}"] = Cell(text, {**numbers, **p})
    table = pivot([""], {row.label: row.label for row in ROWS}, {title: title for _, title in cells}, cells)
    caption = (
        "Test accuracy on CIFAR-10 and test loss on characters: mean ± standard error over seeds. What is empty has "
        "not run; docs/results/index.md says how settings were chosen."
    )
    return Section([table, caption])


def _figure(seeds: pd.DataFrame, path: Path) -> None:
    """A panel per network, in it a line per row that has run, and a mark for each of two ways to train."""
    panels = dict(iter(seeds.groupby("panel", sort=False)))
    lines = [in_order((row.label for row in ROWS), panel["row"]) for panel in panels.values()]
    # Narrow and high, so that its letters can be read where it is 400 pixels wide.
    size, shares = (6.4, 0.25 * sum(map(len, lines)) + 3.2), [len(rows) + 1 for rows in lines]
    fig, axes = plt.subplots(len(panels), figsize=size, height_ratios=shares, layout="constrained")
    with saved(fig, path):
        for axis, (name, panel), rows in zip(axes, panels.items(), lines, strict=True):
            look: dict[str, Any] = {"palette": ["tab:orange", "tab:blue"], "linestyle": "none", "markersize": 6}
            look |= {"capsize": 0.3, "err_kws": {"linewidth": 1.5}}
            sns.pointplot(panel, x="value", y="row", hue="mark", order=rows, errorbar="se", ax=axis, **look)
            is_loss = name == TEXT
            means = panel.groupby(["row", "mark"])["value"].mean().sort_values(ascending=is_loss)
            for mark, style in zip(panel["mark"].unique(), (":", "-"), strict=True):
                axis.axvline(means[rows[0], mark], color="0.6", linewidth=0.8, linestyle=style)
            first, *_, last, far = means
            if abs(far - first) > 1.5 * abs(last - first):  # the worst is cut, to its number
                edge = last + 0.08 * (last - first)
                axis.set_xlim(*sorted((edge, first - 0.08 * (last - first))))
                axis.annotate(
                    f"← {far:.3g}", (edge, rows.index(means.index[-1][0])), (4, 0), textcoords="offset points"
                )
            axis.set(xlabel=f"test {'loss, nats' if is_loss else 'accuracy, %'} (better →)", ylabel="")
            axis.set_yticks(range(len(rows)), [label.replace("`", "") for label in rows], fontsize=11)
            axis.grid(alpha=0.3)
            corner: dict[str, Any] = {"xycoords": ("figure fraction", "axes fraction"), "textcoords": "offset points"}
            axis.annotate(name, (0, 1), (4, 7), **corner, fontsize=12, weight="bold")
            axis.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, frameon=False, borderpad=0)
            if is_loss:
                axis.invert_xaxis()


def _equal_seconds(stores: Stores, name: str, folder: Path) -> Section:
    """Figure and table of Muon for as long as whitening takes."""
    times = stores["char-lm-equal-time"].read("time")[0]["time_ratio"]
    lengths = {r["settings"]["steps"] for r in stores["char-lm-equal-time"].read()}
    pairs = []
    for file in ("char-lm", "char-lm-2000"):
        seeds = best_runs(stores, file, norm="layernorm", method="whitened-muon-16")
        more = min(steps for steps in lengths if steps > seeds[0]["settings"]["steps"])
        longer = best_runs(stores, "char-lm-equal-time", norm="layernorm", method="muon", steps=more)
        pairs.append((longer, seeds))
    names = [" and ".join(f"{seeds[0]['settings']['steps']} steps" for seeds in pair) for pair in pairs]
    title, rows, time = "Muon for as long as its whitened form takes", list[Cells](), "time, in steps of AdamW"
    draw(dict(zip(names, pairs, strict=True)), title, folder / f"{name}.png", times)
    for seeds in (seeds for pair in pairs for seeds in pair):
        settings = seeds[0]["settings"]
        losses = ([r["test_loss"] for r in seeds], [r["validation_loss"][-1] for r in seeds])
        label, length = METHODS[settings["method"]].label, exact(settings["steps"])
        end = times[settings["method"]]["median"] * curve(seeds)["steps"].max()
        rows.append([label, length, exact(end, ".0f"), *(estimate(each, 4) for each in losses)])
    return Section([Table(["method", "steps", time, "test loss", "validation loss"], rows)])


DIGESTS = {
    "verdict": Digest(("cifar10", "mlp-tuned", "cnn-pool-tuned", "norm-free"), _verdict, "docs/results/index.md"),
    "equal-seconds": Digest(
        ("char-lm", "char-lm-2000", "char-lm-equal-time"), _equal_seconds, "docs/results/language-model.md"
    ),
}
