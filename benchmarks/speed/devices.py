"""Layers and training steps by precision and by the way they are run: eagerly, compiled, as CUDA graphs."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch

from adiv_optim.corrections import BatchIdeal, Disproportional, Proportional
from adiv_optim.optim import GradientOnly, InputScaled, Preconditioned, Whitened

from ..core.runs import DEVICE, measure
from ..core.store import Result, Store
from ..core.study import Options, Sections, Study
from ..core.tables import Section, grouped, machine
from . import jobs
from .suites import layer_row
from .timing import row, setup, table

DTYPES = {"float32": None, "bfloat16": torch.bfloat16}
MODES = {"eager": None, "compiled": "default", "graphs": "reduce-overhead"}
#: What is timed around AdamW in a training step; two of them where all is small.
WRAPPERS: dict[str, Callable[[Any, Any], Any]] = {
    "Whitened, rank 16": partial(Whitened, rank=16),
    "Whitened": Whitened,
    "InputScaled, held": partial(InputScaled, hold=True, floor=0.1),
    "Preconditioned": Preconditioned,
    "Proportional": lambda inner, model: GradientOnly(inner, model, Proportional()),
    "BatchIdeal": lambda inner, model: GradientOnly(inner, model, BatchIdeal()),
}
#: Name of a row → what measures it.
Rows = dict[str, Callable[[], Result]]


def layers(*, small: bool) -> Rows:
    """Forward and backward of corrected linear layers, beside the plain ones."""
    shapes = ((16, 8, 8),) if small else ((8192, 4096, 4096), (512, 1024, 1024))
    rules = (Proportional(), Disproportional(), BatchIdeal(per_sample=False))
    named = {f"Linear {shape}, {type(rule).__name__}": (shape, rule) for shape, rule in product(shapes, rules)}
    return {
        what: partial(layer_row, what, partial(jobs.linear_layer, *shape), rule, _rounds(small))
        for what, (shape, rule) in named.items()
    }


def steps(*, small: bool) -> Rows:
    """Ten training steps of the language model around AdamW, beside AdamW's own."""
    size, batch_size, count = ("tiny", 4, 2) if small else ("gpu", 64, None)
    job = partial(jobs.language_model, torch.optim.AdamW, batch_size, size=size)
    return {
        name: partial(row, name, partial(job, wrap=wrap), partial(job, wrap=None), _rounds(small))
        for name, wrap in list(WRAPPERS.items())[:count]
    }


def unit_consistent(*, small: bool) -> Rows:
    """Ten steps of UnitConsistent(AdamW) on four layers, beside foreach AdamW's own."""
    width = 8 if small else 4096
    named = {f"UnitConsistent, 4 layers of {width}, scales every {every}": every for every in (10, 1)}
    job = partial(jobs.ten_steps, width, 4)
    return {what: partial(row, what, partial(job, every), job, _rounds(small)) for what, every in named.items()}


def _rounds(small: bool) -> int:
    return 1 if small else 20


SUITES: dict[str, Callable[..., Rows]] = {"layers": layers, "steps": steps, "unit-consistent": unit_consistent}


@dataclass
class DeviceOptions(Options):
    """Options of this study."""

    only: tuple[Literal["layers", "steps", "unit-consistent"], ...] = ("layers", "steps", "unit-consistent")
    """these measurements"""
    dtypes: tuple[Literal["float32", "bfloat16"], ...] = ("float32", "bfloat16")
    """precisions"""
    modes: tuple[Literal["eager", "compiled", "graphs"], ...] = ("eager", "compiled", "graphs")
    """eagerly, compiled, as CUDA graphs"""
    size: Literal["full", "small"] = "full"
    """of the networks"""
    device: str = DEVICE
    """cpu or cuda"""


def _run(options: DeviceOptions, store: Store) -> None:
    wanted: dict[str, Callable[[], Result]] = {}
    for suite, dtype, mode in product(options.only, options.dtypes, options.modes):
        about = {"suite": suite, "dtype": dtype, "mode": mode, "device": options.device, "size": options.size}
        for what, run in SUITES[suite](small=options.size == "small").items():
            wanted[", ".join([*about.values(), what])] = partial(_measured, about, run)
    measure(store, wanted)


def _measured(about: dict[str, str], run: Callable[[], Result]) -> Result:
    torch.compiler.reset()  # torch compiles one forward eight times and no more
    with setup(device=about["device"], dtype=DTYPES[about["dtype"]], mode=MODES[about["mode"]]):
        return {**about, **run()}


def report(store: Store, name: str, folder: Path) -> Sections:
    """A table for every suite, precision and mode."""
    groups = grouped(store.read(), lambda r: "-".join(r[key] for key in ("suite", "dtype", "mode", "device")))
    sections: Sections = {}
    for group, results in groups.items():
        first = results[0]
        # While something is compiled, memory is that of the compiler's trials.
        found = table(group, results, memory=first["mode"] == "eager", plain=True)
        sections[f"{name}-{group}"] = Section([found, machine(first["environment"], first["device"])])
    return sections


STUDIES = {"speed-devices": Study("time and memory by precision, eager and compiled", _run, report, DeviceOptions())}
