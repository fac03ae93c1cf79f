"""Layers and training steps by precision and by the way they are run: eagerly, compiled, as CUDA graphs."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from adiv_optim.corrections import BatchIdeal, Disproportional, Proportional
from adiv_optim.optim import GradientOnly, InputScaled, Preconditioned, Whitened

from ..core.runs import DEVICE, measure
from ..core.store import Result, Store
from ..core.study import Options, Piece, Sections, Study
from ..core.tables import Section, grouped, machine
from . import jobs
from .suites import layer_row
from .timing import row, setup, table

DTYPES = {"float32": None, "bfloat16": torch.bfloat16}
MODES = {"eager": None, "compiled": "default", "graphs": "reduce-overhead"}


class Sizes(NamedTuple):
    """How large everything is."""

    layers: tuple[tuple[int, int, int], ...]
    preset: str
    batch_size: int
    width: int
    rounds: int
    whole: bool = True  # or a few rows of each kind, and none that torch.compile fuses


SIZES = {
    "full": Sizes(((8192, 4096, 4096), (512, 1024, 1024)), "gpu", 64, 4096, 20),
    "small": Sizes(((16, 8, 8),), "tiny", 4, 8, 1, whole=False),
}

#: What is timed around AdamW in a training step.
WRAPPERS: dict[str, Callable[[Any, Any], Any]] = {
    "Whitened, rank 16": partial(Whitened, rank=16),
    "Whitened": Whitened,
    "InputScaled, held": partial(InputScaled, hold=True, floor=0.1),
    "Preconditioned": Preconditioned,
    "Proportional": lambda inner, model: GradientOnly(inner, model, Proportional()),
    "BatchIdeal": lambda inner, model: GradientOnly(inner, model, BatchIdeal()),
}

Row = Callable[[], Result]


def layers(size: Sizes) -> Iterator[tuple[str, Row]]:
    """Forward and backward of corrected linear layers, beside the plain ones."""
    for shape, rule in product(size.layers, (Proportional(), Disproportional(), BatchIdeal(per_sample=False))):
        what = f"Linear {shape}, {type(rule).__name__}"
        yield what, partial(layer_row, what, partial(jobs.linear_layer, *shape), rule, size.rounds)


def steps(size: Sizes) -> Iterator[tuple[str, Row]]:
    """Ten training steps of the language model around AdamW, beside AdamW's own."""
    for name, wrap in list(WRAPPERS.items())[: None if size.whole else 2]:
        job, plain = (
            partial(jobs.language_model, torch.optim.AdamW, size.batch_size, each, size=size.preset)
            for each in (wrap, None)
        )
        yield name, partial(row, name, job, plain, size.rounds)


def unit_consistent(size: Sizes) -> Iterator[tuple[str, Row]]:
    """Ten steps of UnitConsistent(AdamW) on four layers, beside foreach AdamW's own."""
    for every in (10, 1):
        what = f"UnitConsistent, 4 layers of {size.width}, scales every {every}"
        job, plain = partial(jobs.ten_steps, size.width, 4, every), partial(jobs.ten_steps, size.width, 4)
        yield what, partial(row, what, job, plain, size.rounds)


SUITES = {"layers": layers, "steps": steps, "unit-consistent": unit_consistent}


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
        for what, run in SUITES[suite](SIZES[options.size]):
            wanted[", ".join([*about.values(), what])] = partial(_measured, about, run)
    measure(store, wanted)


def _measured(about: dict[str, str], run: Row) -> Result:
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


def _piece(worth: int, suite: str, dtype: str, mode: str) -> Piece:
    """One table; what compiles takes a compiler and, on a CPU, minutes."""
    how = f"--only {suite} --dtypes {dtype} --modes {mode}"
    small = f"{how} --size small" if mode == "eager" else None
    return Piece(worth, f"speed-{suite}-{dtype}-{mode}", f"{how} --size full", small)


_FIRST = ("bfloat16", "eager")
_HOWS = [how for how in product(("bfloat16", "float32"), MODES) if how != _FIRST]
_PIECES = [
    _piece(0, "steps", *_FIRST), _piece(0, "layers", *_FIRST), _piece(0, "unit-consistent", "float32", "eager"),
    *(_piece(2, suite, *how) for how in _HOWS for suite in ("steps", "layers")),
]  # fmt: skip
STUDIES = {
    "speed-devices": Study(
        "time and memory by precision, eager and compiled", _run, report, DeviceOptions(), pieces=_PIECES
    )
}
