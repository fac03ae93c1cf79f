"""Time and memory, always as a ratio to plain torch within one interleaved run."""

import argparse
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from adiv_optim import BatchIdeal, Correction, Disproportional, GradientOnly, Proportional

from .. import data as datasets
from ..core.progress import measure
from ..core.store import Store
from ..core.study import Sections, Study
from ..core.table import machine, markdown
from ..images.ensemble import Ensemble, build_model, build_optimizer, epoch_orders
from ..images.run import ImageRun
from ..methods import METHODS
from .jobs import (
    Layer,
    conv_layer,
    isaac_layer,
    language_model_job,
    linear_layer,
    opacus_job,
    optimizer_job,
    per_sample_job,
    training_job,
)
from .structural import structural
from .timing import Job, device, measured, peak_memory, ratio

#: What is timed; neither number has a part in the cost.
IDEAL = BatchIdeal(1e-3, per_sample=False)


def _row(what: str, job: Job, plain: Job, rounds: int) -> dict[str, Any]:
    return measured(what, job(), plain(), rounds, peak_memory(job) / peak_memory(plain))


def _layer_row(what: str, layer: Layer, correction: Correction, rounds: int = 100) -> dict[str, Any]:
    # Both run on the same tensors: where memory happens to lie can cost more than what is measured here.
    run = layer()
    memory = peak_memory(lambda: partial(layer(), correction)) / peak_memory(lambda: partial(layer(), None))
    return measured(what, partial(run, correction), partial(run, None), rounds, memory)


def layers(data: str) -> dict[str, Any]:
    """Corrected layers, and what else computes the same, against plain torch."""
    rows = []
    for shape in ((512, 1024, 1024), (128, 512, 512), (32, 3072, 32)):
        for input_grad in (True, False):
            for correction in (Proportional(), Disproportional()):
                what = f"Linear {shape}{'' if input_grad else ' first'}, {type(correction).__name__}"
                rows.append(_layer_row(what, linear_layer(*shape, input_grad), correction))
    for shape in ((128, 512, 512), (32, 1024, 1024), (512, 1024, 1024), (2048, 512, 512)):
        rows.append(_layer_row(f"Linear {shape}, BatchIdeal", linear_layer(*shape, True), IDEAL))
    images: tuple[tuple[tuple[int, ...], int, int, bool], ...] = (
        ((32, 64, 16, 16), 64, 3, True),
        ((32, 256, 8, 8), 64, 1, True),
        ((32, 3, 32, 32), 64, 3, False),
    )
    for image, outputs, kernel, input_grad in images:
        for rule in (Proportional(), IDEAL):
            where = f"{image} → {outputs}{'' if input_grad else ' first'}"
            what = f"Conv2d {kernel}×{kernel}, {where}, {type(rule).__name__}"
            rows.append(_layer_row(what, conv_layer(image, outputs, kernel, input_grad), rule))

    shape = (512, 1024, 1024)

    def plain_linear() -> Callable[[], None]:
        return partial(linear_layer(*shape, True)(), None)

    peers = {"torch.func per-sample gradients": per_sample_job, "Opacus per-sample hooks": opacus_job}
    if not find_spec("opacus"):
        del peers["Opacus per-sample hooks"]
        print("opacus is not installed (extra `peers`); its row is left out")
    for name, peer in peers.items():
        rows.append(_row(f"Linear {shape}, {name}", peer(*shape), plain_linear, rounds=10))
    # Explicit Jacobians of (512, 1024, 1024) would take 4.3 GB per row: their price shows on whole training steps.
    for sizes in ((64, 32, 32, 10), (3072, 32, 32, 10)):
        plain = training_job(sizes, None)
        for by_jacobians, name, rounds in ((False, "GradientOnly", 200), (True, "jacobian.backward", 20)):
            job = training_job(sizes, Proportional(), by_jacobians)
            rows.append(_row(f"training step {list(sizes)}, batch 32, Adam, {name}", job, plain, rounds))
    return {
        "of": "forward and backward; ratio to plain torch",
        "note": "Linear is (rows, in, out), float32; ratios within one interleaved run, median and quartiles of the "
        "rounds. Peak memory counts inputs, parameters and gradients. A layer marked first has an "
        "input that needs no gradient.",
        "rows": rows,
    }


def batch_ideal(data: str) -> dict[str, Any]:
    """BatchIdeal against the package isaac, on the case that package supports: a linear layer on two-dimensional input.

    Raises:
        ModuleNotFoundError: the package is not installed.
    """
    if not find_spec("isaac"):
        raise ModuleNotFoundError("the package isaac is not installed; pip install adiv_optim[peers], or leave it out.")
    shapes = ((128, 512, 512), (32, 1024, 1024), (512, 1024, 1024), (60, 784, 1600), (2048, 512, 512))
    return {
        "of": "forward and backward of BatchIdeal; ratio to isaac.Linear",
        "note": "Linear is (rows, in, out), float32, on the same tensors; (60, 784, 1600) is that package's own MNIST "
        "example. Ratios within one interleaved run, median and quartiles of the rounds; below 1, BatchIdeal is "
        f"faster. isaac {version('isaac')}.",
        "rows": [_layer_row(f"Linear {shape}", isaac_layer(*shape), IDEAL, rounds=60) for shape in shapes],
    }


def unit_consistent(data: str) -> dict[str, Any]:
    """Steps of UnitConsistent(AdamW) against foreach AdamW's own."""
    rows = []
    for width, layers_ in ((1600, 4), (256, 4)):
        plain = optimizer_job(width, layers_, None)
        for compiled in (False, True):
            for every in (1, 10):
                what = f"{layers_} layers of {width}, {layers_ * width * width / 1e6:.1f} M, scales every {every}"
                job = optimizer_job(width, layers_, every, compiled)
                rows.append(_row(what + (", compiled" if compiled else ""), job, plain, rounds=25))
    return {
        "of": "ten optimizer steps; ratio to foreach AdamW",
        "note": "ReLU network with biases, float32; ratios within one interleaved run, median and quartiles of the "
        "rounds. Peak memory counts parameters, gradients and optimizer state.",
        "rows": rows,
    }


def whitened(data: str) -> dict[str, Any]:
    """Training steps of the language model with Whitened optimizers against the same ones plainly."""
    variants: dict[str, dict[str, Any]] = {
        "every 10": {},
        "every 10, rank 16": {"rank": 16},
        "every 10, blocks of 256": {"max_dim": 257},
        "every 50": {"every": 50},
        "every 10, newton-schulz": {"root": "newton-schulz"},
    }
    rows = []
    optimizers = {"AdamW": torch.optim.AdamW, "Muon": getattr(torch.optim, "Muon", None)}
    for name, optimizer in optimizers.items():
        if optimizer is None:
            print(f"this torch has no {name}; its rows are left out")
            continue
        for batch_size, rounds in ((16, 15), (128, 5)):
            plain = language_model_job(optimizer, None, batch_size)
            for variant in variants if batch_size == 16 else ("every 10", "every 10, rank 16"):
                options = variants[variant]
                job = language_model_job(optimizer, options, batch_size)
                rows.append(_row(f"{name}, batch {batch_size}, {variant}", job, plain, rounds))
    return {
        "of": "ten training steps of the small language model; ratio to the optimizer alone",
        "note": "Forward and backward included; GPT of 3 layers, width 128, context 64, float32. Muon trains "
        "the matrices of the blocks, AdamW all parameters. Ratios within one interleaved run, median and quartiles of "
        "the rounds. Peak memory counts parameters, gradients, optimizer state and activations.",
        "rows": rows,
    }


def trainer(data: str, seeds: int = 5) -> dict[str, Any]:
    """One epoch of the ensemble trainer against as many runs of a DataLoader loop as it has seeds."""
    tensors = datasets.load(data).to(device(), torch.float32)
    loaders = {"tensors in memory": DataLoader(TensorDataset(tensors[0], tensors[1]), batch_size=32, shuffle=True)}
    kind, _, folder = data.partition(":")
    if kind == "imagefolder":
        from torchvision.datasets import ImageFolder
        from torchvision.transforms import ToTensor

        files = ImageFolder(str(Path(folder) / "train"), ToTensor())
        loaders["image files"] = DataLoader(files, batch_size=32, shuffle=True)
    rows = []
    for method in ("none", "proportional"):
        run = ImageRun(data, method, "tanh", seeds=tuple(range(seeds)), device=device())
        for source, loader in loaders.items():
            ratios = [
                _dataloader_epoch(run, loader, tensors, seed) * seeds / _ensemble_epoch(run, tensors)
                for seed in run.seeds
            ]
            rows.append(
                {
                    "what": f"{seeds} DataLoader runs ({source}), {method}",
                    "time_ratio": ratio(ratios, [1.0] * len(ratios)),
                    "memory_ratio": None,
                }
            )
    return {
        "of": f"one epoch of {len(tensors.train_labels)} samples; ratio to the ensemble of {seeds} seeds",
        "note": f"[{tensors.features}, 32, 32, {tensors.classes}], tanh, batch 32, Adam; each DataLoader run is paired "
        "with an ensemble epoch; median and quartiles of the pairs.",
        "rows": rows,
    }


def _ensemble_epoch(run: ImageRun, data: datasets.Dataset) -> float:
    ensemble = Ensemble(run, data)
    order = next(epoch_orders(run, len(data.train_labels))).to(data.train_inputs.device)
    start = time.perf_counter()
    losses = [ensemble.step(index) for index in order.unbind(1)]
    torch.stack(losses).sum().item()
    return time.perf_counter() - start


def _dataloader_epoch(run: ImageRun, loader: DataLoader, data: datasets.Dataset, seed: int) -> float:
    """The loop as a user would write it."""
    model = build_model(run, data, seed)
    method = METHODS[run.method]
    optimizer = build_optimizer(run, method, model.parameters())
    if method.correction:
        optimizer = GradientOnly(optimizer, model, method.correction)
    start = time.perf_counter()
    for inputs, labels in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs.to(run.device).flatten(1)), labels.to(run.device))
        loss.backward()
        optimizer.step()
    loss.item()
    return time.perf_counter() - start


SUITES: dict[str, Callable[[str], dict[str, Any]]] = {
    "layers": layers,
    "structural": structural,
    "batch-ideal": batch_ideal,
    "unit-consistent": unit_consistent,
    "whitened": whitened,
    "trainer": trainer,
}


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", default="fake", help="data set of the trainer comparison")
    parser.add_argument("--only", choices=list(SUITES), default=None)


def _run(options: argparse.Namespace, store: Store) -> None:
    names = [options.only] if options.only else list(SUITES)
    measure(store, {name: partial(SUITES[name], options.data) for name in names}, again=True)


def report(store: Store, name: str, folder: Path) -> Sections:
    """A table for every suite."""
    return {f"{name}-{result['key']}": _section(result) for result in store.read()}


def _section(result: dict[str, Any]) -> str:
    rows = [
        [
            row["what"],
            f"{row['time_ratio']['median']:.3f}",
            f"{row['time_ratio']['quartiles'][0]:.3f} to {row['time_ratio']['quartiles'][1]:.3f}",
            f"{row['memory_ratio']:.3f}" if row["memory_ratio"] is not None else "",
        ]
        for row in result["rows"]
    ]
    table = markdown([result["of"], "time", "quartiles", "peak memory"], rows)
    return f"{table}\n\n{result['note']} {machine(result['environment'])}"


SPEED = Study("time and memory of corrected layers and of the ensemble trainer", _run, report, _arguments)
