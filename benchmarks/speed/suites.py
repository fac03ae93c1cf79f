"""Time and memory of layers, training steps and optimizers; in another precision, or on a GPU, if asked."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from adiv_optim import BatchIdeal, Correction, Disproportional, InputScaled, Proportional, Whitened
from adiv_optim.layers import AffineLikeLinear, NormLikeLinear, PatchNormConv2d
from examples.gpt import PRESETS

from ..core.arms import label
from ..core.runs import check_known, measure
from ..core.store import Result, Store
from ..core.study import Recipe, Sections, Study
from ..core.tables import Cell, Row, Section, Table, exact, machine
from ..problems.pictures import CoordinateRun, Fit
from ..studies.coordinates import ALL
from ..train import ten_steps
from . import jobs
from .timing import ASKED, SpeedOptions, allocator, device, row

#: How ratios come about.
IN_TURN = "within one interleaved run, by processor time if there is one thread: median and quartiles of the rounds"


def layer_row(what: str, layer: Callable[[], jobs.RunLayer], rule: Correction) -> dict[str, Any]:
    """A row of a table: a layer by a rule beside the same layer without."""
    run = layer()
    job, plain = (lambda each=each: partial(layer(), each) for each in (rule, None))
    return row(what, job, plain, 100, (partial(run, rule), partial(run, None)))


def layers() -> dict[str, Any]:
    """Corrected layers, and what else computes the same, against plain torch."""
    rows, rule, rules = [], BatchIdeal(per_sample=False), (Proportional(), Disproportional())
    large = ((8192, 4096, 4096),) * (device() == "cuda")
    shapes = ((512, 1024, 1024), (128, 512, 512), (32, 3072, 32), *large)
    for shape, first, each in product(shapes, (False, True), rules):
        what = f"Linear {shape}{' first' * first}, {type(each).__name__}"
        rows.append(layer_row(what, partial(jobs.layer, shape[:2], shape[2], first=first), each))
    for shape in ((128, 512, 512), (32, 1024, 1024), (512, 1024, 1024), (2048, 512, 512), *large):
        rows.append(layer_row(f"Linear {shape}, BatchIdeal", partial(jobs.layer, shape[:2], shape[2]), rule))
    images = (((32, 64, 16, 16), 3, False), ((32, 256, 8, 8), 1, False), ((32, 3, 32, 32), 3, True))
    for (image, kernel, first), correction in product(images, (Proportional(), rule)):
        what = f"Conv2d {kernel}×{kernel}, {image} → 64{' first' * first}, {type(correction).__name__}"
        rows.append(layer_row(what, partial(jobs.layer, image, 64, kernel, first), correction))
    peers = {"torch.func per-sample gradients": jobs.per_sample, "Opacus per-sample hooks": jobs.opacus}
    for name in list(peers)[: 2 if find_spec("opacus") else 1]:  # an extra
        job, plain = partial(peers[name], 512, 1024, 1024), lambda: partial(jobs.layer((512, 1024), 1024), None)
        rows.append(row(f"Linear (512, 1024, 1024), {name}", job, plain, rounds=10))
    # Explicit Jacobians of (512, 1024, 1024) would take 4.3 GB per row: their price shows on whole training steps.
    for sizes in ((64, 32, 32, 10), (3072, 32, 32, 10)):
        for by_jacobians, name, rounds in ((False, "GradientOnly", 200), (True, "jacobian.backward", 20)):
            step = partial(jobs.training_step, sizes, Proportional(), by_jacobians)
            what = f"training step {list(sizes)}, batch 32, Adam, {name}"
            rows.append(row(what, step, partial(jobs.training_step, sizes), rounds))
        what = f"training step {list(sizes)}, batch 32, SGD, GradientOnly with BatchIdeal"
        ideal = partial(jobs.training_step, sizes, BatchIdeal(), sgd=True)
        rows.append(row(what, ideal, partial(jobs.training_step, sizes, sgd=True), rounds=200))
    return {
        "of": "forward and backward; ratio to plain torch",
        "note": f"Linear is (rows, in, out), weights in float32; ratios {IN_TURN}. Peak memory counts inputs, "
        "parameters and gradients. A layer marked first has an input that needs no gradient.",
        "rows": rows,
    }


def structural() -> dict[str, Any]:
    """Structural layers against RMSNorm → Linear and Conv2d → BatchNorm2d, compiled and eager."""
    rows: list[dict[str, Any]] = []
    # A token model's layer, and the pixels of a ResNet's second stage.
    for count, width in ((4096, 512), (32 * 28 * 28, 128)):
        plain = nn.Sequential(nn.RMSNorm(width, elementwise_affine=False), nn.Linear(width, width))
        for kind in (AffineLikeLinear, NormLikeLinear):
            name = f"{kind.__name__} {(count, width, width)}"
            rows += _compiled_and_eager(name, kind(width, width), plain, torch.randn(count, width))
    # Channels, height and width, kernel, stride: the layers of a ResNet-18's second stage, 128 channels wide.
    for channels, size, kernel, stride in ((128, 28, 3, 1), (64, 56, 3, 2), (64, 56, 1, 2)):
        options: dict[str, Any] = {"kernel_size": kernel, "stride": stride, "padding": kernel // 2}
        plain = nn.Sequential(nn.Conv2d(channels, 128, bias=False, **options), nn.BatchNorm2d(128))
        for form in ("affine-like", "norm-like"):
            name = f"PatchNormConv2d {kernel}×{kernel}, stride {stride}, {(32, channels, size, size)} → 128, {form}"
            layer = PatchNormConv2d(channels, 128, form=form, **options)
            rows += _compiled_and_eager(name, layer, plain, torch.randn(32, channels, size, size))
    return {
        "of": "forward and backward; ratio to RMSNorm → Linear, Conv2d → BatchNorm2d",
        "note": "In training, float32, input gradients included. Linear is (rows, in, out), its RMSNorm without "
        "parameters; the convolutions are those of a ResNet-18's second stage at batch 32, the plain ones without a "
        "bias. Compiled layers (torch.compile, fullgraph) are timed against compiled ones, eager against eager, "
        f"{IN_TURN}. Peak memory counts activations and all gradients.",
        "rows": rows,
    }


def _compiled_and_eager(name: str, layer: nn.Module, plain: nn.Module, input: Tensor) -> list[dict[str, Any]]:
    layer, plain, input = layer.to(device()), plain.to(device()), input.to(device())
    torch.compiler.reset()  # torch compiles one forward eight times and no more
    compiled: Any = [torch.compile(module, fullgraph=True) for module in (layer, plain)]
    rows = []
    for how, pair in (("compiled", compiled), ("eager", (layer, plain))):
        run, plain_run = (jobs.module(module, input) for module in pair)
        run(), plain_run()  # to compile both
        job, plain_job = (partial(jobs.module, module, input.clone()) for module in pair)
        rows.append(row(f"{name}, {how}", job, plain_job, 40, (run, plain_run)))
    return rows


def unit_consistent() -> dict[str, Any]:
    """Steps of UnitConsistent(AdamW) against foreach AdamW's own."""
    rows = []
    for width, keeps in ((1600, False), (1600, True), (256, True)):
        with allocator(keeps) as process:
            for every in (1, 10):
                what = f"4 layers of {width}, {4 * width * width / 1e6:.1f} M, scales every {every}"
                what += (", memory kept" if keeps else ", memory fresh") * (width == 1600)
                job, plain = partial(jobs.ten_steps, width, 4, every), partial(jobs.ten_steps, width, 4)
                rows.append(process.submit(row, what, job, plain, 25).result())
    return {
        "of": "ten optimizer steps; ratio to foreach AdamW",
        "note": f"ReLU network with biases, float32; ratios {IN_TURN}. Peak memory counts "
        "parameters, gradients and optimizer state. Freed memory is kept by the process, or that of large tensors is "
        "fresh at every step: glibc's allocator does either, after what ran before.",
        "rows": rows,
    }


def _language(
    network: str, variants: Mapping[str, Any], batch_sizes: Mapping[int, tuple[int, int]], *model: Any
) -> dict[str, Any]:
    """Batch sizes come with how many rounds there are, and how many of the variants."""
    rows, size = [], PRESETS[ASKED.get().preset]
    for name, (batch_size, (rounds, count)) in product(("AdamW", "Muon"), batch_sizes.items()):
        kind = getattr(torch.optim, name)
        for variant, wrap in list(variants.items())[:count]:
            job, plain = (partial(jobs.language_model, kind, batch_size, each, *model) for each in (wrap, None))
            rows.append(row(f"{name}, batch {batch_size}{variant}", job, plain, rounds))
    return {
        "of": "ten training steps of the small language model; ratio to the optimizer alone",
        "note": f"Forward and backward included; GPT{network} of {size.layers} layers, width {size.width}, context "
        f"{size.context}, weights in float32. Muon trains the matrices of the blocks, AdamW all parameters. Ratios "
        f"{IN_TURN}. Peak memory counts parameters, gradients, optimizer state and activations.",
        "rows": rows,
    }


def whitened() -> dict[str, Any]:
    """Training steps of the language model with Whitened optimizers against the same ones plainly."""
    variants = {
        ", every 10": Whitened,
        ", every 10, rank 16": partial(Whitened, rank=16),
        ", every 10, blocks of 256": partial(Whitened, max_dim=257),
        ", every 50": partial(Whitened, every=50),
    }
    return _language("", variants, {16: (15, 6), 128: (5, 3)})


def input_scaled() -> dict[str, Any]:
    """Training steps of the language model without normalisers with InputScaled against the bare optimizers."""
    network = " without normalisers, whose embeddings are drawn with a deviation of 1,"
    variants = {"": InputScaled, ", held": partial(InputScaled, hold=True)}
    return _language(network, variants, {16: (60, 2), 128: (7, 2)}, "none", 1.0)


def coordinates() -> dict[str, Any]:
    """Training steps of the coordinate network of ten layers, by every arm, against bare Adam's."""
    plain = CoordinateRun("china, flower", "none")
    runs = [replace(plain, norm=arm.norm, optimizer=arm.optimizer, method=arm.method) for arm in ALL[1:]]
    return {
        "of": "ten training steps of the coordinate network; ratio to Adam alone",
        "note": "Ten linear layers of width 28 with ReLU, 64 × 64 pixels in every step, float32; forward and backward "
        f"included. Ratios {IN_TURN}. Peak memory counts parameters, gradients, optimizer state and activations.",
        "rows": [
            row(label(run), partial(ten_steps, run, Fit(run)), partial(ten_steps, plain, Fit(plain)), 11)
            for run in runs
        ],
    }


SUITES = {
    suite.__name__.replace("_", "-"): suite
    for suite in (layers, structural, unit_consistent, whitened, input_scaled, coordinates)
}


#: What the name of a measurement need not say.
_USUAL = {"device": "cpu", "dtype": "float32", "preset": "small"}


def _run(options: SpeedOptions, store: Store) -> None:
    check_known("measurement", options.only, SUITES)
    how = {name: getattr(options, name) for name in _USUAL}
    other = [value for name, value in how.items() if value != _USUAL[name]]

    def measured(name: str) -> Result:
        return {**SUITES[name](), "how": how}

    ASKED.set(options)
    measure(store, {"-".join([name, *other]): partial(measured, name) for name in options.only or SUITES})


def report(store: Store, name: str, folder: Path) -> Sections:
    """A table for every suite."""
    sections = Sections()
    for result in store.read():
        how, asked = result.get("how", _USUAL), ""
        if "how" in result:
            asked = f"Here on {how['device']}, {how['dtype']}, eager, of the preset {how['preset']}. "
        caption = f"{result['note']} {asked}{machine(result['environment'], how['device'])}"
        table = Table([result["of"], "time", "quartiles", "peak memory"], [*map(_cells, result["rows"])])
        sections[f"{name}-{result['key']}"] = Section([table, caption])
    return sections


def _cells(row: Mapping[str, Any]) -> Row:
    (low, high), middle = row["time_ratio"]["quartiles"], row["time_ratio"]["median"]
    time = Cell(f"{middle:.3f}", {"": middle, "n": row["time_ratio"]["rounds"]})
    quartiles = Cell(f"{low:.3f} to {high:.3f}", {"low": low, "high": high})
    return [row["what"], time, quartiles, exact(row["memory_ratio"], ".3f")]


STUDIES = {
    "speed": Study(
        "time and memory of corrected layers and of optimizers", _run, report, SpeedOptions(),
        makes=[
            Recipe(0.7),
            Recipe(0.1, "gpu-speed", ("--preset gpu --dtype bfloat16 --device cuda --only layers whitened",)),
        ],
        smoke="--preset tiny --rounds 1 --only input-scaled --device cpu", page="docs/results/costs.md",
    )
}  # fmt: skip
