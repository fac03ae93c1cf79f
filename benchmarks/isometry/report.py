"""Tables and figures of isometry, from result files alone."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..pictures import panels, plt
from ..tables import DATA_LABELS, Result, markdown

#: Panels of the figure with the bound; those that compare ways to end a layer have all activations.
BOUNDED = ("sigmoid", "tanh", "ReLU", "GELU")
#: Line, colour and label of every way to end a layer.
STYLES: dict[str, tuple[str, str, str]] = {
    "layernorm": ("-", "tab:blue", "centred and normalised"),
    "centred": ("--", "tab:red", "centred only"),
    "mean-field-centred": ("-.", "tab:green", "mean-field centred,\nnormalised"),
    "mean-field": ("--", "tab:orange", "MeanFieldNorm"),
}
#: Steps of training over which a loss is averaged.
WINDOW = 20


def depth_section(result: Result, folder: Path) -> str:
    """Draw the three figures of gap against depth into `folder`; return table and caption as Markdown."""
    found = result["activations"]
    where = f"width {result['width']}, {result['samples']} samples"
    with panels(BOUNDED, f"Isometry gap by depth, and its bound ({where})", folder / "isometry-depth.png", 3.4) as axes:
        for axis, name in zip(axes, BOUNDED, strict=True):
            _line(axis, found[name]["measured"]["layernorm"], "layernorm", "measured")
            axis.plot(found[name]["mean_field"], ":", color="black", label="infinite width")
            axis.plot(found[name]["bound"], "--", color="tab:purple", label="bound by β")
        _by_depth(axes)
        axes[0].set_ylim(1e-4, 1)
    title = f"Isometry gap by depth, with and without normalising ({where})"
    _compare(found, ("layernorm", "centred"), title, folder / "isometry-unnormalised.png")
    title = f"Isometry gap by depth, by measured and by mean-field constants ({where})"
    _compare(found, ("layernorm", "mean-field-centred", "mean-field"), title, folder / "isometry-mean-field.png")
    return f"{_depth_table(result)}\n\n{_depth_caption(result)}"


def _compare(found: dict[str, Any], variants: Sequence[str], title: str, path: Path) -> None:
    with panels(list(found), title, path, 3.2) as axes:
        for axis, name in zip(axes, found, strict=True):
            for variant in variants:
                _line(axis, found[name]["measured"][variant], variant, STYLES[variant][2])
        _by_depth(axes)


def _line(axis: Any, quartiles: list[list[float] | None], variant: str, label: str) -> None:
    """Median with a band of quartiles, as far as there are numbers."""
    depths, shown = zip(*((depth, three) for depth, three in enumerate(quartiles) if three), strict=True)
    low, middle, high = zip(*shown, strict=True)
    line, color, _ = STYLES[variant]
    axis.plot(depths, middle, line, color=color, label=label, linewidth=1.6)
    axis.fill_between(depths, low, high, color=color, alpha=0.2, linewidth=0)
    if len(depths) < len(quartiles):
        axis.plot(depths[-1], middle[-1], "x", color=color, markersize=8)


def _by_depth(axes: Sequence[Any]) -> None:
    for axis in axes:
        axis.set(xlabel="layers", yscale="log")
    axes[0].set_ylabel("isometry gap")


def _depth_table(result: Result) -> str:
    deep = result["depth"]
    rows = []
    for name, found in result["activations"].items():
        strength = found["strength"]
        cells = [_three(found["measured"][variant][deep]) for variant in STYLES]
        limit = f"{found['mean_field'][deep]:.2g}"
        rows.append(
            [name, f"{strength:.4f}", f"{(2 - strength) ** 2:.3f}", limit, f"{found['bound'][deep]:.2g}", *cells]
        )
    header = ["activation", "β", "(2 − β)²", "infinite width", "bound"]
    return markdown([*header, *(label.replace("\n", " ") for *_, label in STYLES.values())], rows)


def _three(quartiles: list[float] | None) -> str:
    return "{1:.2g} ({0:.2g} to {2:.2g})".format(*quartiles) if quartiles else "out of range"


def _depth_caption(result: Result) -> str:
    start = result["activations"]["ReLU"]["mean_field"][0]
    return (
        f"Isometry gap after {result['depth']} layers of width {result['width']}, weights N(0, 1/width), linear → "
        f"activation → centre → normalise, of {result['samples']} samples any two of which have a correlation of "
        f"{result['correlation']:g} at depth 0 (gap {start:.3f}): median and quartiles over {result['seeds']} draws of "
        "the weights, float64. Infinite width: the recursion of the Gram matrix. Bound: "
        "`diagnostics.mean_field_bound`, the gap at the start until it says more. It is one of infinite width, whose "
        "gap vanishes, where that of a finite width ends in noise of order samples / width. Out of range, a cross in "
        "the figures: in one of the draws the activations have left float64 or its precision. "
        f"torch {result['environment']['torch']}."
    )


def training_section(results: list[Result], folder: Path) -> str:
    """Draw isometry by layer and convergence into `folder`; return table and caption as Markdown."""
    results = sorted(results, key=lambda r: r["strength"])
    settings = results[0]["settings"]
    data = DATA_LABELS.get(settings["data"], settings["data"])
    layers = next((r for r in results if r["settings"]["activation"] == "tanh"), results[0])
    _layers_figure(layers, data, folder / "isometry-layers.png")
    _convergence_figure(results, data, folder / "isometry-convergence.png")
    return f"{_training_table(results)}\n\n{_training_caption(results, data)}"


def _layers_figure(result: Result, data: str, path: Path) -> None:
    """Isometry of every layer's outputs, a panel before and one after training; the norms' own are shaded."""
    settings = result["settings"]
    stages = {"start": "at initialisation", "trained": f"after {settings['steps']} steps"}
    title = f"Isometry of {result['samples']} samples, layer by layer: {data}, {settings['activation']}"
    with panels(list(stages.values()), title, path, 7.0) as axes:
        for axis, stage in zip(axes, stages, strict=True):
            found = result["isometry"][stage]
            places, values = range(len(found)), [layer["isometry"] for layer in found]
            axis.plot(places, values, color="0.6", linewidth=1, zorder=1)
            for kind, mark, color, label in (
                ("norm", "o", "tab:blue", "normalisation"),
                ("fc", "s", "0.4", "linear"),
                ("act", "^", "tab:orange", "activation"),
            ):
                at = [place for place in places if found[place]["path"].startswith(kind)]
                axis.plot(at, [values[place] for place in at], mark, color=color, markersize=5, label=label)
                if kind == "norm":
                    for place in at:
                        axis.axvspan(place - 1, place, color=color, alpha=0.1, linewidth=0)
            axis.set_xticks(places, [layer["path"] for layer in found], rotation=90, fontsize=7)
            axis.set_xlim(-1, len(found) - 0.5)
        axes[0].set_ylim(bottom=0)
        axes[0].set_ylabel("isometry")


def _convergence_figure(results: list[Result], data: str, path: Path) -> None:
    """Training loss by step, and by β at the end of the first epoch and of training."""
    colors = plt.get_cmap("viridis")
    settings = results[0]["settings"]
    low, high = results[0]["strength"], results[-1]["strength"]
    ends = _ends(results[0])
    title = f"Convergence: {data}, {settings['layers']} layers of {settings['width']}, SGD {settings['lr']:g}"
    with panels(["by step", *(f"at the end of {end}, by β" for end in ends)], title, path, 4.6) as axes:
        for number, result in enumerate(results):
            name, strength = result["settings"]["activation"], result["strength"]
            color = colors(0.9 * (strength - low) / max(high - low, 1e-9))
            mark, style = "os^Dv<>"[number % 7], ("-", "--", "-.", ":")[number % 4]
            steps = range(min(WINDOW, settings["steps"]), settings["steps"] + 1)
            curve = [_loss(result, step) for step in steps]
            label = f"{name}, β = {strength:.3f}"
            axes[0].plot(steps, curve, style, color=color, label=label, marker=mark, markersize=7, markevery=[-1])
            for axis, step in zip(axes[1:], ends.values(), strict=True):
                axis.plot(strength, _loss(result, step), mark, color=color, markersize=9)
        axes[0].set(xlabel="step", ylabel=f"training loss, mean of {WINDOW} steps")
        for axis in axes[1:]:
            axis.set(xlabel="isometry strength β")
            axis.margins(x=0.2, y=0.1)


def _ends(result: Result) -> dict[str, int]:
    """Where losses are compared: while every sample is new, if that lasts long enough, and in the end."""
    epoch, steps = result["training_samples"] // result["settings"]["batch_size"], result["settings"]["steps"]
    return {"epoch 1": epoch, "training": steps} if WINDOW <= epoch < steps else {"training": steps}


def _loss(result: Result, step: int) -> float:
    return statistics.fmean(result["train_loss"][max(0, step - WINDOW) : step])


def _training_table(results: list[Result]) -> str:
    rows, ends = [], _ends(results[0])
    for result in results:
        stages = [[layer["isometry"] for layer in result["isometry"][stage]] for stage in ("start", "trained")]
        # Layers come in threes, norm, linear, activation, and end with a norm.
        gains = [min(after - before for before, after in zip(s[2::3], s[3::3], strict=True)) for s in stages]
        rows.append(
            [
                result["settings"]["activation"],
                f"{result['strength']:.4f}",
                *(f"{s[0]:.3f}, {s[-1]:.3f}" for s in stages),
                ", ".join(f"{gain:+.1g}" for gain in gains),
                *(f"{_loss(result, step):.3f}" for step in ends.values()),
                f"{result['test_accuracy']:.1f}",
            ]
        )
    header = [
        "activation",
        "β",
        "isometry after the first and the last norm",
        "trained",
        "least gain by a norm, trained",
    ]
    return markdown([*header, *(f"loss, end of {end}" for end in ends), "test accuracy, %"], rows)


def _training_caption(results: list[Result], data: str) -> str:
    settings, result = results[0]["settings"], results[0]
    epochs = settings["steps"] * settings["batch_size"] / result["training_samples"]
    correlations = ""
    if len(results) > 2:
        strengths = _ranks([r["strength"] for r in results])
        columns = {
            f"the loss at the end of {end}": [_loss(r, step) for r in results] for end, step in _ends(result).items()
        }
        columns["test accuracy"] = [r["test_accuracy"] for r in results]
        found = (f"{name} {statistics.correlation(strengths, _ranks(column)):+.2f}" for name, column in columns.items())
        correlations = f"Rank correlation of β over {len(results)} activations with {', with '.join(found)}. "
    return (
        f"{data}, {settings['layers']} layers of {settings['width']}, LayerNorm without parameters → linear → "
        f"activation, weights N(0, 1/fan_in), SGD {settings['lr']:g}, {settings['steps']} steps of "
        f"{settings['batch_size']} ({epochs:.1f} epochs), one seed. Isometry, at initialisation and trained, is that "
        f"of {result['samples']} training samples, mean of {result['batches']} batches; a norm centres before it "
        f"normalises, and that may lower it. Training losses are means of {WINDOW} steps. {correlations}"
        f"torch {result['environment']['torch']}."
    )


def _ranks(values: Sequence[float]) -> list[int]:
    return [sorted(values).index(value) for value in values]
