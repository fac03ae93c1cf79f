"""Tables and figures from result files alone."""

import statistics
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from . import attention, batch_size, divergence, plane, rescaling, sweep
from .char_lm import report as char_lm
from .isometry import report as isometry
from .methods import ACTIVATIONS, LABELS, METHODS
from .pictures import COLORS, panels
from .runs import read
from .tables import Result, accuracy, markdown, mean_and_error, network, title

#: Settings that distinguish rows and columns within one table; all others distinguish tables.
_WITHIN_TABLE = ("method", "activation", "backend", "seeds", "epochs")


#: What recognises its own runs by the settings that vary among them, and reports them in its own way.
PROTOCOLS = (rescaling, batch_size, sweep)


def grouped(results: Iterable[Result]) -> list[list[Result]]:
    """Split training results into tables: runs that share data, network, batch size, rate and device."""
    groups: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        key = {name: value for name, value in result["settings"].items() if name not in _WITHIN_TABLE}
        groups[str(sorted(key.items()))].append(result)
    return list(groups.values())


def _milliseconds(result: Result) -> float:
    """Time of one step of one seed, from the median epoch."""
    seconds = sorted(result["seconds"])
    return 1e3 * seconds[len(seconds) // 2] / result["steps_per_epoch"] / len(result["settings"]["seeds"])


def table(group: list[Result]) -> str:
    """A Markdown table: test accuracy after the last epoch (mean ± standard error), and the cost of each path."""
    found = {
        (r["settings"]["method"], r["settings"]["activation"], r["settings"]["backend"]): r
        for r in sorted(group, key=lambda r: r["settings"]["epochs"])
    }
    methods = [name for name in LABELS if any(key[0] == name for key in found)]
    activations = [name for name in ACTIVATIONS if any(key[1] == name for key in found)]
    backends = [name for name in ("ensemble", "loop", "jacobian") if any(key[2] == name for key in found)]
    columns = [f"{activation}, %" for activation in activations]
    columns += [f"{backend}, ms/step" for backend in backends]
    rows = []
    for method in methods:
        cells = []
        for activation in activations:
            runs = [found[key] for backend in backends if (key := (method, activation, backend)) in found]
            cells.append(accuracy(runs[0]) if runs else "")
        for backend in backends:
            runs = [found[key] for activation in activations if (key := (method, activation, backend)) in found]
            cells.append(f"{_milliseconds(runs[0]):.2f}" if runs else "")
        rows.append([LABELS[method], *cells])
    return markdown(["method", *columns], rows)


def caption(group: list[Result]) -> str:
    """Say under a table what its numbers are."""
    environment = group[0]["environment"]
    where = environment["gpu"] if group[0]["settings"]["device"].startswith("cuda") else environment["processor"]
    runs = "; ".join(
        f"{backend}: epochs {epochs}, seeds {seeds}"
        for backend, epochs, seeds in sorted(
            {(r["settings"]["backend"], r["settings"]["epochs"], len(r["settings"]["seeds"])) for r in group}
        )
    )
    return (
        f"Test accuracy after the last epoch, mean ± standard error over seeds ({runs}; accuracies are the first "
        f"one's). Time is per step and seed, training only, {where}, {environment['threads']} thread(s), "
        f"torch {environment['torch']}."
    )


def figure(group: list[Result], path: Path) -> None:
    """Draw test accuracy against epoch, one panel per activation, a band of one standard error."""
    backend = "ensemble" if any(r["settings"]["backend"] == "ensemble" for r in group) else None
    runs = [r for r in group if backend in (None, r["settings"]["backend"])]
    activations = [name for name in ACTIVATIONS if any(r["settings"]["activation"] == name for r in runs)]
    with panels(activations, title(group), path) as axes:
        for axis, activation in zip(axes, activations, strict=True):
            for method, label in LABELS.items():
                for run in (
                    r for r in runs if (r["settings"]["method"], r["settings"]["activation"]) == (method, activation)
                ):
                    means, errors = zip(*(mean_and_error(epoch) for epoch in run["test_accuracy"]), strict=True)
                    epochs = range(1, len(means) + 1)
                    low, high = zip(*((m - e, m + e) for m, e in zip(means, errors, strict=True)), strict=True)
                    # Gradient-only methods are dashed, coordinates dotted as well: colour alone does not carry to
                    # everyone.
                    rule = METHODS[method]
                    style = "--" if rule.correction else "-." if rule.whitening is not None or rule.gauge else "-"
                    axis.plot(epochs, means, style, color=COLORS[method], label=label, linewidth=1.6)
                    axis.fill_between(epochs, low, high, color=COLORS[method], alpha=0.2, linewidth=0)
            axis.set_xlabel("epoch")
            axis.xaxis.get_major_locator().set_params(integer=True)
        axes[0].set_ylabel("test accuracy, %")


def tuned_table(results: list[Result]) -> str:
    """A Markdown table: test accuracy of every method at its chosen rate, by activation and optimizer."""
    found = {(r["settings"]["method"], r["settings"]["activation"], r["settings"]["optimizer"]): r for r in results}
    columns = sorted({key[1:] for key in found}, key=lambda c: (list(ACTIVATIONS).index(c[0]), c[1]))
    rows = []
    for method in (name for name in LABELS if any(key[0] == name for key in found)):
        runs = [found.get((method, *column)) for column in columns]
        cells = [f"{accuracy(run)} ({run['settings']['lr']:g})" if run else "" for run in runs]
        rows.append([LABELS[method], *cells])
    return markdown(["method", *(f"{activation}, {optimizer}, %" for activation, optimizer in columns)], rows)


def tuned_caption(results: list[Result]) -> str:
    """Say under a table of tuned runs what its numbers are."""
    settings, environment = results[0]["settings"], results[0]["environment"]
    return (
        f"Test accuracy after {settings['epochs']} epochs, mean ± standard error over {len(settings['seeds'])} seeds, "
        f"in brackets the learning rate, falling to 0 by a cosine. Rates were chosen on a tenth of the training set "
        f"held out, one seed, from one grid for all methods. torch {environment['torch']}."
    )


def trials_table(results: list[Result]) -> str:
    """A Markdown table: test accuracy of every method at the settings its trials chose, best first."""
    rows = []
    several = len({result["settings"]["activation"] for result in results}) > 1
    for result in sorted(results, key=lambda r: -mean_and_error(r["test_accuracy"][-1])[0]):
        settings = result["settings"]
        seconds = statistics.median(result["seconds"]) * settings["epochs"] / len(settings["seeds"])
        rows.append(
            [
                LABELS[settings["method"]],
                *([settings["activation"]] * several),
                settings["optimizer"],
                f"{settings['lr']:g}",
                f"{settings['damping']:g}" if "damping" in settings else "",
                f"{settings['weight_decay']:g}",
                str(settings["epochs"]),
                accuracy(result),
                f"{seconds:.0f}",
            ]
        )
    return markdown(
        [
            "method", *["activation"] * several, "optimizer", "rate", "damping", "weight decay", "epochs",
            "test accuracy, %", "seconds",
        ],
        rows,
    )  # fmt: skip


def trials_caption(results: list[Result], searched: list[Result]) -> str:
    """Say under a table of trials what its numbers are."""
    settings, environment = results[0]["settings"], results[0]["environment"]
    keys = [tuple(r["settings"][name] for name in ("method", "activation", "optimizer")) for r in searched]
    counts = {keys.count(key) for key in keys}
    return (
        f"Mean ± standard error over {len(settings['seeds'])} seeds after the last epoch, rates falling to 0 by a "
        f"cosine. Every row's settings are the best of {' or '.join(map(str, sorted(counts)))} combinations of rate, "
        "weight decay and (batch-ideal, whitened) damping, each run for "
        f"{min(r['settings']['epochs'] for r in searched)} epochs with one seed and judged on a tenth of the training "
        "set held out. Weight decay is torch's: AdamW's for adam, SGD's own. Seconds are epochs × the median epoch, "
        f"for one seed of an ensemble of {len(settings['seeds'])}, {environment['threads']} thread(s), on a machine "
        f"busy with other runs: compare them loosely. torch {environment['torch']}."
    )


def speed_table(result: Result) -> str:
    """A Markdown table of measured ratios."""
    rows = [
        [
            row["what"],
            f"{row['time_ratio']['median']:.3f}",
            f"{row['time_ratio']['quartiles'][0]:.3f} to {row['time_ratio']['quartiles'][1]:.3f}",
            f"{row['memory_ratio']:.3f}" if row["memory_ratio"] is not None else "",
        ]
        for row in result["rows"]
    ]
    return markdown([result["of"], "time", "quartiles", "peak memory"], rows)


def report(folder: Path) -> dict[str, str]:
    """Write a figure for every table under `folder`; return Markdown by name.

    Training results lie in sub-folders of `folder`, whose names name their tables; speed results in `speed`.
    """
    sections: dict[str, str] = {}
    for part in sorted(path for path in folder.glob("*") if path.is_dir()):
        results = read(part)
        for result in (r for r in results if r["kind"] == "speed"):
            environment = result["environment"]
            sections[result["name"]] = (
                f"{speed_table(result)}\n\n{result['note']} {environment['processor']}, "
                f"{environment['threads']} thread(s), torch {environment['torch']}."
            )
        for result in (r for r in results if r["kind"] == "divergence"):
            divergence.figure(result, folder / "divergence.png")
            sections["divergence"] = divergence.section(result)
        for result in (r for r in results if r["kind"] == "attention"):
            sections["attention"] = attention.table(result)
        for result in (r for r in results if r["kind"] == "plane"):
            sections[result["name"]] = plane.section(result, folder / f"{result['name']}.png")
        for result in (r for r in results if r["kind"] == "isometry-depth"):
            sections[result["name"]] = isometry.depth_section(result, folder)
        watched = [r for r in results if r["kind"] == "isometry-training"]
        if watched:
            sections["isometry-training"] = isometry.training_section(watched, folder)
        characters = [r for r in results if r["kind"] == "char-lm"]
        times = [r for r in results if r["kind"] == "char-lm-time"]
        if characters:
            sections[part.name] = char_lm.section(characters, read(part / "search"), times, part.name, folder)
        tuned = [r for r in results if r["kind"] == "tuned"]
        if tuned:
            heading = f"**{network(tuned[0])}, rates tuned**"
            sections[part.name] = f"{heading}\n\n{tuned_table(tuned)}\n\n{tuned_caption(tuned)}"
        tried = [r for r in results if r["kind"] == "trials"]
        if tried:
            caption_ = trials_caption(tried, read(part / "trials"))
            activations = " and ".join(sorted({r["settings"]["activation"] for r in tried}))
            heading = f"**{network(tried[0])}, {activations}, every setting tuned**"
            sections[part.name] = f"{heading}\n\n{trials_table(tried)}\n\n{caption_}"
        trained = [r for r in results if r["kind"] == "train"]
        if protocol := next((known for known in PROTOCOLS if known.applies(trained)), None):
            sections[part.name] = protocol.section(trained, folder / f"{part.name}.png")
            continue
        groups = grouped(trained)
        for number, group in enumerate(groups):
            name = part.name if len(groups) == 1 else f"{part.name}-{number + 1}"
            figure(group, folder / f"{name}.png")
            sections[name] = f"**{title(group)}**\n\n{table(group)}\n\n{caption(group)}"
    if not sections:
        raise FileNotFoundError(f"no results under {folder}/*/; run `python -m benchmarks train` first.")
    return sections


def insert(readme: Path, sections: dict[str, str]) -> str:
    """Return the text of `readme` with every `<!-- results:NAME -->` … `<!-- end -->` filled from `sections`."""
    pieces = readme.read_text().split("<!-- results:")
    text = pieces[0]
    for piece in pieces[1:]:
        name, _, rest = piece.partition(" -->")
        if name not in sections:
            raise ValueError(f"{readme} wants results {name!r}; there are {', '.join(sections)}.")
        text += f"<!-- results:{name} -->\n\n{sections[name]}\n\n<!-- end -->" + rest.partition("<!-- end -->")[2]
    return text
