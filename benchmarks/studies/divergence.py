"""What one step of every method does to the activations of the benchmark's network, side by side."""

import statistics
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from adiv_optim import BatchIdeal, attach
from adiv_optim.diagnostics import Divergence, divergence
from adiv_optim.layers import NormLikeLinear

from .. import data as datasets
from ..core.figure import panels
from ..core.runs import interleaved, ratio, step
from ..core.store import public_name
from ..core.study import Recipe, measurement
from ..core.tables import Cell, Row, Section, Table, exact, machine
from ..methods import METHODS, Method
from ..problems.images import mlp

BATCH_SIZE, UNEVEN_ROWS, WARM_UP, EPOCHS, HIDDEN = 32, 3, 50, 5, (32, 32)
STAGES = {"start": f"at the start (Adam: after {WARM_UP} steps)", "trained": f"after {EPOCHS} epochs"}


class Subject(NamedTuple):
    """One row of the comparison."""

    method: Method
    lr: float  # of the training between the stages; what is measured is per unit of it
    adam: bool = False  # measure Adam's real step, in the state it is in; else the gradient step, which SGD takes


#: Rates are rough: enough to train the network in a few epochs, tuned for nobody.
SUBJECTS: dict[str, Subject] = {
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
    tensors = datasets.load(data).to("cpu", torch.float32)
    sizes = [tensors.features, *HIDDEN, tensors.classes]
    about: dict[str, Any] = {"data": public_name(data), "sizes": sizes, "stages": STAGES, "batch_size": BATCH_SIZE}
    about |= {"batches": batches, "uneven_batches": uneven}
    subjects = {name: _subject(subject, tensors, batches, uneven) for name, subject in SUBJECTS.items()}
    return {**about, "subjects": subjects, "cost": _cost(tensors, timed_rounds)}


def _prepared(subject: Subject, data: datasets.Dataset) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = mlp(subject.method, (data.features, *HIDDEN, data.classes), "tanh")
    if subject.method.correction:
        attach(model, subject.method.correction)
    kind = torch.optim.Adam if subject.adam else torch.optim.SGD
    return model, kind(model.parameters(), lr=subject.lr)


def _subject(subject: Subject, data: datasets.Dataset, batches: int, uneven: int) -> dict[str, Any]:
    model, optimizer = _prepared(subject, data)
    # Two, so that how much is measured does not change what is trained.
    generator, order = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
    measured = optimizer if subject.adam else None

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
        climbing = [not each.descends for each in measure(uneven, UNEVEN_ROWS, 2.0)]
        return {
            "accuracy": 100 * right.double().mean().item(),
            "layers": [_pooled([list(each.layers.values())[at] for each in found]) for at in range(len(HIDDEN) + 1)],
            "not_downhill": sum(not each.descends for each in found) / len(found),
            "not_downhill_uneven": sum(climbing) / len(climbing) if climbing else None,
        }

    def train(steps: int) -> None:
        for _ in range(steps):
            index = torch.randint(len(data.train_labels), (BATCH_SIZE,), generator=order)
            step(model, optimizer, data.train_inputs[index], data.train_labels[index])

    train(WARM_UP if subject.adam else 0)
    start = stage()
    train(EPOCHS * len(data.train_labels) // BATCH_SIZE)
    return {"adam": subject.adam, "lr": subject.lr, "start": start, "trained": stage()}


def _pooled(layers: list[Any]) -> dict[str, Any]:
    """Quartiles over the rows of all batches; variances within a batch, their mean over batches."""
    summaries, mean = [layer.summary() for layer in layers], statistics.fmean
    rows = {name: torch.cat([getattr(layer, name) for layer in layers]) for name in ("cosine", "gain", "interference")}
    return {
        **{name: values.nanquantile(values.new_tensor([0.25, 0.5, 0.75])).tolist() for name, values in rows.items()},
        "gain_mean": rows["gain"].nanmean().item(),
        "gain_variance": mean(s["gain_variance"] for s in summaries),
        "squared_norm_variance": mean(s["squared_norm_variance"] for s in summaries),
        "weight_share": mean(s["responsibility"]["weight"] for s in summaries),
        "not_downhill": sum(not s["descends"] for s in summaries) / len(summaries),
    }


def _cost(data: datasets.Dataset, rounds: int) -> list[dict[str, Any]]:
    """Time of one call of `divergence`, as a multiple of one training step of the same network and optimizer."""
    rows = []
    for name in ("none", "proportional", "batch-ideal, 0.3", "affine-like", "none, Adam"):
        subject = SUBJECTS[name]
        model, optimizer = _prepared(subject, data)
        inputs, labels = data.train_inputs[:BATCH_SIZE], data.train_labels[:BATCH_SIZE]
        watched = optimizer if subject.adam else None
        measured = partial(divergence, model, F.cross_entropy, inputs, labels, optimizer=watched)
        seconds = interleaved({"step": partial(step, model, optimizer, inputs, labels), "measured": measured}, rounds)
        found = {"what": name, "time_ratio": ratio(seconds["measured"], seconds["step"])}
        rows.append({**found, "milliseconds": 1e3 * statistics.median(seconds["measured"])})
    return rows


def table(result: dict[str, Any], stage: str) -> Table:
    """The table of one stage; three numbers in a cell are the three layers."""
    rows, title = list[Row](), result["stages"][stage]
    for name, subject in result["subjects"].items():
        found = subject[stage]
        layers, uneven = found["layers"], found["not_downhill_uneven"]
        gains = [(layer["gain_mean"], layer["gain_variance"] ** 0.5) for layer in layers]
        columns = (
            [exact(layer["cosine"][1], ".2f") for layer in layers],
            [Cell(f"{mean:.3g} ± {d:.2g}", {"": mean, "deviation": d}) for mean, d in gains],
            [exact(layer["interference"][1], ".2f") for layer in layers],
            [exact(layer["weight_share"], ".2f") for layer in layers],
            [exact(layer["squared_norm_variance"], ".2g") for layer in layers],
        )
        whole = [exact(100 * found["not_downhill"], ".0f"), exact(None if uneven is None else 100 * uneven, ".1f")]
        rows.append([name, *map(_by_layer, columns), *whole, exact(found["accuracy"], ".1f")])
    header = ["method", "cosine", "own gain", "interference", "weight share", "Var\\|x\\|²"]
    header += ["uphill, %", f"uphill, {UNEVEN_ROWS} uneven rows, %", "accuracy, %"]
    return Table(header, rows, name=stage, heading=title[0].upper() + title[1:])


def _by_layer(cells: list[Cell]) -> Cell:
    numbers = {f"layer {at} {name}".strip(): value for at, cell in enumerate(cells, 1) for name, value in
               cell.numbers.items()}  # fmt: skip
    return Cell(", ".join(cell.text for cell in cells), numbers)


def section(result: dict[str, Any], name: str, folder: Path) -> Section:
    """Both tables, the cost, and what their numbers are."""
    figure(result, folder / f"{name}.png")
    rows = list[Row]()
    for row in result["cost"]:
        (low, high), middle = row["time_ratio"]["quartiles"], row["time_ratio"]["median"]
        quartiles = Cell(f"{low:.1f} to {high:.1f}", {"low": low, "high": high})
        rows.append([row["what"], exact(middle, ".1f"), quartiles, exact(row["milliseconds"], ".1f")])
    cost = Table(["one `divergence`, in training steps", "median", "quartiles", "ms"], rows, name="cost")
    about = "Medians over rows; own gain is mean ± deviation within a batch. With Adam all else is of its real step."
    return Section([*(table(result, stage) for stage in STAGES), cost, f"{about} {machine(result['environment'])}"])


def figure(result: dict[str, Any], path: Path) -> None:
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


STUDIES = {
    "divergence": measurement(
        "what one step of every method does to the activations", "divergence", compare, section,
        makes=[Recipe(0.1)], page="docs/results/mlp.md",
    )
}  # fmt: skip
