"""Table and figures of the language models, from result files alone."""

import statistics
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from ..pictures import panels, plt
from ..tables import Result, markdown, mean_and_error
from .methods import METHODS, REST_LR, WARM_UP
from .model import NORM_LABELS
from .search import final_validation_loss
from .train import VALIDATION_WINDOWS

#: The colour of every method, in all figures.
_PAIRS = plt.get_cmap("tab20").colors  # type: ignore[attr-defined]
COLORS = dict(zip(METHODS, [*_PAIRS[::2], "black", *_PAIRS[1::2]], strict=False))

#: What distinguishes the rows of one table, in their order; all other settings but the seed distinguish tables.
ROW = ("norm", "steps", "method", "lr", "damping")


#: What the figures can have on their horizontal axis.
AXES = {"steps": "steps", "time": "time, in steps of AdamW"}


def section(results: list[Result], searched: list[Result], times: list[Result], name: str, folder: Path) -> str:
    """Draw the figures into `folder`; return heading, table and caption of every protocol as Markdown.

    Args:
        results: the runs of one folder.
        searched: the runs that chose their rates, if any did.
        times: of a step, by method; without one there is no figure against time.
        name: of the figures.
        folder: where they go.
    """
    groups: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        groups[_protocol(result)].append(result)
    parts = []
    for number, (protocol, group) in enumerate(groups.items(), start=1):
        own = name if len(groups) == 1 else f"{name}-{number}"
        tried = [result for result in searched if _protocol(result) == protocol]
        settings = group[0]["settings"]
        time = next((t for t in times if all(t[key] == settings[key] for key in ("preset", "device"))), None)
        for quantity in ("steps", "time") if time else ("steps",):
            figure(group, quantity, time, folder / f"{own}-{quantity}.png")
        parts.append(f"**{title(group)}**\n\n{table(group, tried, time)}\n\n{caption(group, tried, time)}")
    return "\n\n".join(parts)


def _protocol(result: Result) -> str:
    return str(sorted((key, value) for key, value in result["settings"].items() if key not in (*ROW, "seed")))


def rows(results: Iterable[Result]) -> list[list[Result]]:
    """The seeds of every combination of settings, in the order in which tables show them."""
    found: dict[tuple[int | float, ...], list[Result]] = defaultdict(list)
    for result in results:
        settings = result["settings"]
        places = list(NORM_LABELS).index(settings["norm"]), list(METHODS).index(settings["method"])
        key = (places[0], settings["steps"], places[1], settings["lr"], settings.get("damping", 0.0))
        found[key].append(result)
    return [found[key] for key in sorted(found)]


def table(results: list[Result], searched: list[Result], time: Result | None) -> str:
    """A Markdown table: losses (mean ± standard error over seeds) and time of every combination of settings."""
    ratios = time["time_ratio"] if time else {}
    cells = []
    for seeds in rows(results):
        settings = seeds[0]["settings"]
        same = [result for result in searched if _choice(result) == _choice(seeds[0])]
        cells.append(
            [
                METHODS[settings["method"]].label,
                NORM_LABELS[settings["norm"]],
                *(_chosen(settings.get(key), [r["settings"].get(key) for r in same]) for key in ("lr", "damping")),
                str(settings["steps"]),
                _loss(seeds, [r["test_loss"] for r in seeds]),
                _loss(seeds, [r["validation_loss"][-1] for r in seeds]),
                f"{ratios[settings['method']]['median']:.2f}" if settings["method"] in ratios else "",
            ]
        )
    header = ["method", "normaliser", "rate", "damping", "steps", "test loss", "validation loss", "time per step"]
    return markdown(header, cells)


def _choice(result: Result) -> tuple[str, str, int]:
    """What rate and damping are chosen for."""
    settings = result["settings"]
    return settings["method"], settings["norm"], settings["steps"]


def _by_choice(results: list[Result]) -> list[list[Result]]:
    return [[r for r in results if _choice(r) == choice] for choice in {_choice(result) for result in results}]


def _chosen(value: float | None, tried: list[float | None]) -> str:
    """A setting, marked if it is the first or the last of several that were tried."""
    if value is None:
        return ""
    known = {other for other in tried if other is not None}
    return f"{value:g}*" if len(known) > 1 and value in (min(known), max(known)) else f"{value:g}"


def _loss(seeds: list[Result], losses: list[float | None]) -> str:
    finite = [loss for loss in losses if loss is not None]
    if len(finite) < len(seeds):
        return f"diverged, {len(seeds) - len(finite)} of {len(seeds)}"
    mean, error = mean_and_error(finite)
    return f"{mean:.4f} ± {error:.4f}" if len(finite) > 1 else f"{mean:.4f}"


def title(results: list[Result]) -> str:
    """One line that names text, network and batches."""
    settings, size = results[0]["settings"], results[0]["size"]
    return (
        f"Characters of {settings['data']}, GPT of {size['layers']} layers, width {size['width']}, {size['heads']} "
        f"heads, context {size['context']}, batch {size['batch_size']}"
    )


def caption(results: list[Result], searched: list[Result], time: Result | None) -> str:
    """Say under a table what its numbers are."""
    environment, settings = results[0]["environment"], results[0]["settings"]
    where = environment["gpu"] if settings["device"].startswith("cuda") else environment["processor"]
    seeds = sorted({len(row) for row in rows(results)})
    tried = sorted({len(row) for row in _by_choice(searched)})
    chosen = (
        f"Rate and damping are the best of {' or '.join(map(str, tried))} combinations by the final validation loss of "
        "seed 0, which the test text had no part in; * is an edge of what was tried. "
        if searched
        else ""
    )
    timed = (
        "Time is a whole training step's, as a ratio to AdamW's "
        f"({time['adamw_ms']:.0f} ms): medians of {time['time_ratio']['adamw']['rounds']} interleaved rounds, "
        f"{time['environment']['threads']} thread(s). "
        if time
        else ""
    )
    return (
        f"Cross entropy in nats per character, mean ± standard error over {' or '.join(map(str, seeds))} seed(s): on "
        f"the last tenth of the text (test) and on at most {VALIDATION_WINDOWS} windows of the tenth before it "
        f"(validation). {chosen}Rates rise over {WARM_UP:.0%} of the steps, then fall to 0 by a cosine (schedule-free: "
        f"stay). Muon's embeddings, head, norms and biases are AdamW's, at {REST_LR:g}. Weight decay "
        f"{settings['weight_decay']:g}. {timed}"
        f"{where}, {environment['threads']} thread(s), torch {environment['torch']}."
    )


def best_rows(results: list[Result]) -> list[list[Result]]:
    """Of the longest runs, the seeds of every method and norm at its lowest mean validation loss."""
    longest = max(result["settings"]["steps"] for result in results)
    best: dict[tuple[str, str], tuple[float, list[Result]]] = {}
    for seeds in rows(r for r in results if r["settings"]["steps"] == longest):
        key = seeds[0]["settings"]["norm"], seeds[0]["settings"]["method"]
        loss = mean_and_error([final_validation_loss(result) for result in seeds])[0]
        if key not in best or loss < best[key][0]:
            best[key] = loss, seeds
    return [seeds for _, seeds in best.values()]


def curve(seeds: list[Result]) -> tuple[list[float], list[float]]:
    """Steps and validation loss: means over seeds, as far as all of them have one."""
    measured = zip(*(zip(r["steps"], r["validation_loss"], strict=True) for r in seeds), strict=False)
    points = [list(zip(*at, strict=True)) for at in measured]
    finite = [(at, losses) for at, losses in points if None not in losses]
    return [statistics.fmean(at) for at, _ in finite], [statistics.fmean(losses) for _, losses in finite]


def figure(results: list[Result], quantity: str, time: Result | None, path: Path) -> None:
    """Draw validation loss against steps or time of training, one panel per normaliser."""
    best, ratios = best_rows(results), time["time_ratio"] if time else {}
    norms = [norm for norm in NORM_LABELS if any(seeds[0]["settings"]["norm"] == norm for seeds in best)]
    methods = [name for name in METHODS if any(seeds[0]["settings"]["method"] == name for seeds in best)]
    with panels([NORM_LABELS[norm] for norm in norms], title(results), path) as axes:
        for axis, norm in zip(axes, norms, strict=True):
            for method in methods:
                mine = [s for s in best if (s[0]["settings"]["norm"], s[0]["settings"]["method"]) == (norm, method)]
                # An empty line where a method has no run, since the first panel's lines make the legend.
                x, y = curve(mine[0]) if mine else ([], [])
                if quantity == "time":
                    x = [steps * ratios[method]["median"] for steps in x] if method in ratios else []
                    y = y[: len(x)]
                # Methods of this library are dashed: colour alone does not carry to everyone.
                style = "--" if METHODS[method].damped else "-"
                axis.plot(x, y, style, color=COLORS[method], label=METHODS[method].label, linewidth=1.6)
            axis.set_xlabel(AXES[quantity])
        # A model that has learned nothing starts about here; what rises above is on its way out.
        axes[0].set_ylim(top=max(result["validation_loss"][0] or 0.0 for result in results))
        axes[0].set_ylabel("validation loss, nats per character")
