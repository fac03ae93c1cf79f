"""What one step of every method does to the activations, side by side; and whether less divergence trains better.

That is asked of the divergence of real steps along tuned runs, beside the accuracy they end at.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import seaborn as sns
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adiv_optim import BatchIdeal, attach
from adiv_optim.diagnostics import Divergence, divergence
from adiv_optim.layers import NormLikeLinear

from ..core.figure import panels, seaborn
from ..core.runs import NOBODY, Watch, interleaved, ratio, run_all, step
from ..core.store import Result, Store, public_name
from ..core.study import Recipe, Sections, Study, Training, measurement
from ..core.tables import Cell, Row, Section, Table, estimate, exact, in_order, machine, spearman
from ..data import Dataset, load
from ..ensemble import IMAGES, Loops, accuracy, epoch_orders, set_rate
from ..methods import METHODS, Method
from ..problems.images import ACTIVATIONS, ImageRun, again, mlp, network, take, trained

BATCH_SIZE, UNEVEN_ROWS, WARM_UP, EPOCHS, HIDDEN = 32, 3, 50, 5, (32, 32)
STAGES = {"start": f"at the start (Adam: after {WARM_UP} steps)", "trained": f"after {EPOCHS} epochs"}


class Subject(NamedTuple):
    """One row of the comparison."""

    method: Method
    lr: float  # of the training between the stages; what is measured is per unit of it
    adam: bool = False  # measure Adam's real step, in the state it is in; else the gradient step, which SGD takes


#: Rates are rough: enough to train the network in a few epochs, tuned for nobody.
SUBJECTS = {
    "none": Subject(METHODS["none"], 0.1),
    "proportional": Subject(METHODS["proportional"], 1.0),
    "disproportional": Subject(METHODS["disproportional"], 1.0),
    "batch-ideal, 0.001": Subject(Method(correction=BatchIdeal(1e-3, per_sample=False)), 1.0),
    "batch-ideal, 0.3": Subject(METHODS["batch-ideal"], 3.0),
    "affine-like": Subject(METHODS["affine-like"], 1.0),
    "norm-like": Subject(Method(linear=NormLikeLinear), 0.5),
    "L2 norm": Subject(METHODS["l2norm"], 0.5),
    "LayerNorm": Subject(METHODS["layernorm"], 0.1),
    "RMSNorm": Subject(METHODS["rmsnorm"], 0.1),
    "BatchNorm": Subject(METHODS["batchnorm"], 0.1),
    "none, Adam": Subject(METHODS["none"], 1e-3, adam=True),
    "proportional, Adam": Subject(METHODS["proportional"], 1e-3, adam=True),
    "batch-ideal 0.3, Adam": Subject(METHODS["batch-ideal"], 1e-3, adam=True),
}


def compare(data: str = "digits", *, batches: int = 50, uneven: int = 200, timed_rounds: int = 50) -> dict[str, Any]:
    """Measure every subject at both stages, and what measuring costs.

    Batches have 32 rows; uneven ones 3, each scaled by e^(2n) with n normal, for the share of steps that go uphill.
    """
    tensors = load(data).to("cpu", torch.float32)
    sizes = [tensors.features, *HIDDEN, tensors.classes]
    about: dict[str, Any] = {"data": public_name(data), "sizes": sizes, "stages": STAGES, "batch_size": BATCH_SIZE}
    about |= {"batches": batches, "uneven_batches": uneven}
    subjects = {name: _subject(subject, tensors, batches, uneven) for name, subject in SUBJECTS.items()}
    return {**about, "subjects": subjects, "cost": _cost(tensors, timed_rounds)}


def _prepared(subject: Subject, data: Dataset) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """A network, its optimizer, and that again if its real step is to be measured, or None."""
    torch.manual_seed(0)
    model = mlp(subject.method, (data.features, *HIDDEN, data.classes), "tanh")
    if subject.method.correction:
        attach(model, subject.method.correction)
    kind = torch.optim.Adam if subject.adam else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=subject.lr)
    return model, optimizer, optimizer if subject.adam else None


def _subject(subject: Subject, data: Dataset, batches: int, uneven: int) -> dict[str, Any]:
    model, optimizer, measured = _prepared(subject, data)
    # Two, so that how much is measured does not change what is trained.
    generator, order = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)

    def measure(count: int, rows: int, scatter: float) -> Iterator[Divergence]:
        for _ in range(count):
            index = torch.randint(len(data.train_labels), (rows,), generator=generator)
            inputs = data.train_inputs[index] * torch.exp(scatter * torch.randn(rows, 1, generator=generator))
            yield divergence(model, F.cross_entropy, inputs, data.train_labels[index], optimizer=measured)

    def stage() -> dict[str, Any]:
        found = list(measure(batches, BATCH_SIZE, 0.0))
        with torch.no_grad():
            right = model.eval()(data.test_inputs).argmax(-1) == data.test_labels
        model.train()
        return {
            "accuracy": 100 * right.double().mean().item(),
            "layers": [_pooled(layers) for layers in zip(*(each.layers.values() for each in found), strict=True)],
            "not_downhill": statistics.fmean(not each.descent > 0 for each in found),
            "not_downhill_uneven": statistics.fmean(not each.descent > 0 for each in measure(uneven, UNEVEN_ROWS, 2.0)),
        }

    def train(steps: int) -> None:
        for _ in range(steps):
            index = torch.randint(len(data.train_labels), (BATCH_SIZE,), generator=order)
            step(model, optimizer, data.train_inputs[index], data.train_labels[index])

    train(WARM_UP if subject.adam else 0)
    start = stage()
    train(EPOCHS * len(data.train_labels) // BATCH_SIZE)
    return {"adam": subject.adam, "lr": subject.lr, "start": start, "trained": stage()}


def _pooled(layers: Sequence[Any]) -> dict[str, Any]:
    """Quartiles over the rows of all batches; variances within a batch, their mean over batches."""
    summaries, mean = [layer.summary() for layer in layers], statistics.fmean
    rows = {name: torch.cat([getattr(layer, name) for layer in layers]) for name in ("cosine", "gain", "interference")}
    return {
        **{name: values.nanquantile(values.new_tensor([0.25, 0.5, 0.75])).tolist() for name, values in rows.items()},
        "gain_mean": rows["gain"].nanmean().item(),
        "gain_variance": mean(s["gain_variance"] for s in summaries),
        "squared_norm_variance": mean(s["squared_norm_variance"] for s in summaries),
        "weight_share": mean(s["responsibility"]["weight"] for s in summaries),
    }


def _cost(data: Dataset, rounds: int) -> list[dict[str, Any]]:
    """Time of one call of `divergence`, as a multiple of one training step of the same network and optimizer."""
    rows = []
    for name in ("none", "proportional", "batch-ideal, 0.3", "affine-like", "none, Adam"):
        model, optimizer, watched = _prepared(SUBJECTS[name], data)
        inputs, labels = data.train_inputs[:BATCH_SIZE], data.train_labels[:BATCH_SIZE]
        measured = partial(divergence, model, F.cross_entropy, inputs, labels, optimizer=watched)
        seconds = interleaved({"step": partial(step, model, optimizer, inputs, labels), "measured": measured}, rounds)
        found = {"what": name, "time_ratio": ratio(seconds["measured"], seconds["step"])}
        rows.append({**found, "milliseconds": 1e3 * statistics.median(seconds["measured"])})
    return rows


def table(result: dict[str, Any], stage: str) -> Table:
    """The table of one stage; three numbers in a cell are the three layers."""
    rows = list[dict[str, str | Cell]]()
    for name, subject in result["subjects"].items():
        found = subject[stage]
        layers = found["layers"]
        gains = [(layer["gain_mean"], layer["gain_variance"] ** 0.5) for layer in layers]
        rows.append({
            "method": name,
            "cosine": _by_layer(exact(layer["cosine"][1], ".2f") for layer in layers),
            "own gain": _by_layer(Cell(f"{mean:.3g} ± {d:.2g}", {"": mean, "deviation": d}) for mean, d in gains),
            "interference": _by_layer(exact(layer["interference"][1], ".2f") for layer in layers),
            "weight share": _by_layer(exact(layer["weight_share"], ".2f") for layer in layers),
            "Var\\|x\\|²": _by_layer(exact(layer["squared_norm_variance"], ".2g") for layer in layers),
            "uphill, %": exact(100 * found["not_downhill"], ".0f"),
            f"uphill, {UNEVEN_ROWS} uneven rows, %": exact(100 * found["not_downhill_uneven"], ".1f"),
            "accuracy, %": exact(found["accuracy"], ".1f"),
        })  # fmt: skip
    return Table.of(rows, name=stage)


def _by_layer(cells: Iterable[Cell]) -> Cell:
    every = list(cells)
    numbers = {f"layer {at} {name}".strip(): n for at, cell in enumerate(every, 1) for name, n in cell.numbers.items()}
    return Cell(", ".join(cell.text for cell in every), numbers)


def section_of_steps(result: dict[str, Any], name: str, folder: Path) -> Section:
    """Both tables, the cost, and what their numbers are."""
    _figure_of_steps(result, folder / f"{name}.png")
    rows = list[Row]()
    for row in result["cost"]:
        (low, high), middle = row["time_ratio"]["quartiles"], row["time_ratio"]["median"]
        quartiles = Cell(f"{low:.1f} to {high:.1f}", {"low": low, "high": high})
        rows.append([row["what"], exact(middle, ".1f"), quartiles, exact(row["milliseconds"], ".1f")])
    cost = Table(["one `divergence`, in training steps", "median", "quartiles", "ms"], rows, name="cost")
    about = "Medians over rows; own gain is mean ± deviation within a batch. With Adam all else is of its real step."
    stages = [part for stage, heading in STAGES.items() for part in (f"**{heading}:**", table(result, stage))]
    return Section([*stages, cost, f"{about} {machine(result['environment'])}"])


def _figure_of_steps(result: dict[str, Any], path: Path) -> None:
    """Draw own gain, cosine and interference of every method, a row of panels per stage, quartiles as bars."""
    names = list(result["subjects"])
    quantities = {"gain": "own gain γ (ideal: 1)", "cosine": "cosine with −g", "interference": "interference share"}
    places = [(stage, quantity) for stage in result["stages"] for quantity in quantities]
    titles = [f"{quantities[quantity]}: {stage}" for stage, quantity in places]
    title = f"The effect of one step on each layer's outputs: {result['data']}, {result['sizes']}"
    with panels(titles, title, path, height=4.4) as axes:
        for axis, (stage, quantity) in zip(axes, places, strict=True):
            for layer, mark in enumerate("os^"):  # shape as well as colour: colour alone does not carry to everyone
                layers = [subject[stage]["layers"][layer] for subject in result["subjects"].values()]
                low, middle, high = np.array([each[quantity] for each in layers]).T
                heights = np.arange(len(names)) + 0.24 * (layer - 1)
                bars, label = (middle - low, high - middle), f"layer {layer + 1}"
                axis.errorbar(middle, heights, xerr=bars, fmt=mark, markersize=4, label=label)
            for at in range(0, len(names), 2):
                axis.axhspan(at - 0.5, at + 0.5, color="0.95", zorder=0)
            axis.axvline(0.0 if quantity == "interference" else 1.0, color="0.4", linewidth=0.8, linestyle=":")
            axis.set_xscale("log" if quantity == "gain" else "linear")
        axes[0].set(yticks=range(len(names)), yticklabels=names, ylim=(len(names) - 0.5, -0.5))


#: Measurements along a run, from before its first step on, and the batches of each.
POINTS, BATCHES = 8, 4
#: What is measured → what tables call it.
QUANTITIES = {"cosine": "cosine with −g", "gain_spread": "spread of the own gain", "interference": "part across g"}


def follow(run: ImageRun, data: Dataset, watch: Watch = NOBODY) -> Result:
    """Train a run by plain loops; return divergence by point, means over layers, batches and seeds, and accuracies."""
    trainer, found = Loops(run, data), []
    generator = torch.Generator().manual_seed(1)
    held = [torch.randint(len(data.train_labels), (run.batch_size,), generator=generator) for _ in range(BATCHES)]
    steps = IMAGES.steps(run, data)
    points = [round(point * (steps - 1) / (POINTS - 1)) for point in range(POINTS)]
    batches = chain.from_iterable(order.unbind(1) for order in epoch_orders(run, len(data.train_labels)))
    for taken, index in enumerate(batches):
        set_rate(run, trainer.optimizers, taken / steps)
        if taken in points:
            found.append(_measured(trainer, [take(data, rows) for rows in held]))
            watch.note(taken, {name: [value] for name, value in found[-1].items()})
        trainer.step(index)
        watch.tick()
    columns = {name: [point[name] for point in found] for name in QUANTITIES}
    about = {"features": data.features, "classes": data.classes}
    return {**about, "steps": points, **columns, "accuracy": [accuracy(model, data) for model in trainer.models]}


def _measured(trainer: Loops, batches: Sequence[tuple[Tensor, Tensor]]) -> dict[str, float | None]:
    """Of the step that each seed's optimizer would take on each batch; None where nothing is finite."""
    values: dict[str, list[float]] = defaultdict(list)
    for model, optimizer in zip(trainer.models, trainer.optimizers, strict=True):
        for inputs, labels in batches:
            layers = divergence(model, F.cross_entropy, inputs, labels, optimizer=optimizer).layers.values()
            for summary in (layer.summary() for layer in layers):
                values["cosine"].append(summary["cosine_median"])
                values["interference"].append(summary["interference_median"])
                values["gain_spread"].append(summary["gain_variance"] ** 0.5 / summary["gain_mean"])
    finite = {name: [value for value in values[name] if math.isfinite(value)] for name in QUANTITIES}
    return {name: float(f"{statistics.fmean(each):.6g}") if each else None for name, each in finite.items()}


#: Runs that are followed while they train.
FOLLOWED = IMAGES._replace(
    family=lambda run: run, train=lambda runs, data, watch: [follow(run, data, watch) for run in runs]
)


@dataclass
class MechanismOptions(Training):
    """Options of this study."""

    tuned: Path = Path("runs/digits-tuned.jsonl")  # a file of tuned runs, whose settings are followed
    data: str = "digits"  # what these runs were trained on
    seeds: int = 3  # how many; seed k is k


def _run(options: MechanismOptions, store: Store) -> None:
    """Follow every run that the tuned file shows, at its settings."""
    own = {"data": options.data, "backend": "loop", "seeds": tuple(range(options.seeds))}
    runs = [again(result, **own) for result in Store(options.tuned).read()]
    if not runs:
        raise ValueError(f"--tuned {options.tuned} has no runs to follow; make it by digits-tuned or cifar10-tuned.")
    run_all(runs, FOLLOWED, store, download=options.download)


def runs_of(results: Sequence[Result]) -> pd.DataFrame:
    """A row for each run: method, activation, optimizer, accuracies and their mean, and every quantity's mean."""
    rows = []
    for result in results:
        row = {name: result["settings"][name] for name in ("method", "activation", "optimizer")}
        row |= {"accuracies": result["accuracy"], "accuracy": statistics.fmean(result["accuracy"])}
        for name in QUANTITIES:
            finite = [value for value in result[name] if value is not None]
            row[name] = statistics.fmean(finite) if finite else math.nan
        rows.append({**row, "method": METHODS[row["method"]].label})
    return pd.DataFrame(rows)


def sound(results: Sequence[Result]) -> pd.DataFrame:
    """The runs that have not diverged: with divergence that is finite, and twice as accurate as guessing."""
    runs = runs_of(results).dropna(subset=[*QUANTITIES])
    return runs[runs["accuracy"] > 200 / results[0]["classes"]]


def groups(results: Sequence[Result]) -> dict[str, pd.DataFrame]:
    """All sound runs, and those of every activation and optimizer, where there are four at the least."""
    runs = sound(results)
    by_both = {", ".join(key): group for key, group in runs.groupby(["activation", "optimizer"], sort=False)}
    return {name: group for name, group in {"all": runs, **by_both}.items() if len(group) >= 4}


def rank(runs: pd.DataFrame, quantity: str) -> Any:
    """Spearman's rank correlation of a quantity with the accuracy."""
    return spearman(runs[quantity], runs["accuracy"])


def report(store: Store, name: str, folder: Path) -> Sections:
    """Rank correlations, the runs, a figure and a caption."""
    results = store.read()
    named, correlations = list(QUANTITIES.values()), list[Row]()
    for group, members in groups(results).items():
        ranks = [rank(members, quantity) for quantity in QUANTITIES]
        cells = [Cell(f"{r.statistic:+.2f} ({r.pvalue:.2g})", {"": r.statistic, "p": r.pvalue}) for r in ranks]
        correlations.append([group, exact(len(members)), *cells])
    ordered = runs_of(results).sort_values("accuracy", ascending=False, kind="stable")
    rows = [
        [run["method"], run["activation"], run["optimizer"], estimate(run["accuracies"]),
         *(exact(run[quantity], ".3f") for quantity in QUANTITIES)] for _, run in ordered.iterrows()
    ]  # fmt: skip
    if len(better := sound(results)):
        _figure_of_runs(better, f"{network(results[0])}: divergence and accuracy", folder / f"{name}.png")
    caption = f"Divergence of the real step, and its rank correlation with the test accuracy (p). {trained(results)}"
    first = Table(["runs", "n", *(f"accuracy and {label}" for label in named)], correlations, name="ranks")
    second = Table(["method", "activation", "optimizer", "test accuracy, %", *named], rows, name="runs")
    return {name: Section([first, second, caption])}


def _figure_of_runs(runs: pd.DataFrame, title: str, path: Path) -> None:
    """Draw accuracy against every quantity, a row of panels for each activation and a mark for each optimizer."""
    places = list(product(in_order(ACTIVATIONS, runs["activation"]), QUANTITIES))
    look = {"hue": "method", "palette": {method.label: method.color for method in METHODS.values()}, "s": 45}
    marks = {"sgd": "o", "momentum": "s", "adam": "^"}
    look |= {"style": "optimizer", "markers": marks, "style_order": in_order(marks, runs["optimizer"])}
    names = [f"{QUANTITIES[quantity]}: {activation}" for activation, quantity in places]
    with panels(names, title, path, columns=3, ylabel="test accuracy, %") as axes:
        for axis, (activation, quantity) in zip(axes, places, strict=True):
            seaborn(sns.scatterplot, axis, runs[runs["activation"] == activation], x=quantity, y="accuracy", **look)


STUDIES = {
    "divergence": measurement(
        "what one step of every method does to the activations", "divergence", compare, section_of_steps,
        makes=[Recipe(0.1)], page="docs/results/mlp.md",
    ),
    "mechanism": Study(
        "divergence along tuned runs, and whether it ranks them", _run, report, MechanismOptions(),
        makes=[  # after what they follow
            Recipe(0.05, "digits-mechanism", ("--tuned {out}/digits-tuned.jsonl",), data=""),
            Recipe(0.6, options=("--tuned {out}/cifar10-tuned.jsonl --seeds 1",)),
        ], data="images", page="docs/results/mlp.md",
    )
}  # fmt: skip
