"""`python -m benchmarks gpu`: everything that wants a GPU, the most valuable first, for as many minutes as there are.

Every command is a process of its own, which a fault of the device may end, and adds to a file of results, of which
nothing is lost or made again: what the minutes did not suffice for is printed, and the same command goes on with it.
"""

import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from examples.gpt import DEFAULT

from .core.runs import DEVICE, console
from .core.study import Absent, Options

ROOT = Path(__file__).parents[1]
#: Tests that are skipped without a CUDA device.
TESTS = [
    "tests/integration/test_cuda_graphs.py", "tests/integration/test_waits.py", "tests/functional/test_precision.py",
    "tests/gauge/test_network.py", "tests/gauge/test_rz_limits.py",
]  # fmt: skip


@dataclass
class GpuOptions(Options):
    """Options of `gpu`."""

    name: Absent[str] = ""
    threads: Absent[int | None] = None
    method_file: Absent[Path | None] = None
    minutes: float = 8.0  # stop after so many
    device: Literal["cuda", "cpu"] = "cuda" if DEVICE == "cuda" else "cpu"  # cpu is for a trial, with everything small
    text: str = DEFAULT  # a file of text for the language model
    images: str = "cifar10"  # data of Table 1; digits in a trial


def commands(options: GpuOptions) -> list[list[str]]:
    """What follows `python -m`, the most valuable first; on a CPU small, to see that it runs."""
    is_trial = options.device == "cpu"
    text, table, images = "--norms layernorm --seeds 1", "--preset paper", options.images
    size, suites, others = "--preset gpu", "layers whitened", " unit-consistent"
    ways = [f"--mode {mode} --dtype {dtype}" for mode in ("compiled", "graphs") for dtype in ("bfloat16", "float32")]
    if is_trial:  # what compiles takes a compiler and, on a CPU, minutes
        size, suites, others, ways = "--preset tiny --rounds 1", "input-scaled", "", []
        images, table = (
            "digits",
            "--preset reduced --epochs 1 --seeds 2 --methods none --activations tanh --batch-size 64",
        )
        text += " --methods adamw whitened-adamw-16 --preset tiny --steps 4"
    else:
        text += " --methods muon whitened-muon-16 adamw whitened-adamw-16 --preset gpu --steps 1000"
    studies: list[tuple[str, str, list[str]]] = [
        ("speed", f"{size} --dtype bfloat16 --only {suites}", []),
        ("speed", f"{size} --only {suites}{others}", []),
        ("char-lm", text, ["--data", options.text]),
        *(("speed", f"{size} {way} --only {suites}", []) for way in ways),
        ("table1", table, ["--data", images]),
    ]
    where = ["--device", options.device, "--out", str(options.out)]
    tests = [str(ROOT / path) for path in TESTS]
    return [
        ["pytest", "-q", "-n", "0", "-k", "cuda or capture or synchronize", *tests],
        *(["benchmarks", name, *how.split(), *data, *where, "--name", f"gpu-{name}"] for name, how, data in studies),
    ]


def run(options: GpuOptions) -> int:
    """Run what is not there yet until the minutes are over, print what is left, and return 2 if something failed."""
    every, left, end = commands(options), dict[str, int | None](), time.monotonic() + 60 * options.minutes
    for command in every:
        name, seconds = " ".join(command), max(0.0, end - time.monotonic())
        console.rule(f"{name}: {seconds / 60:.1f} minutes left")
        try:
            code = subprocess.run([sys.executable, "-m", *command], timeout=seconds).returncode
        except subprocess.TimeoutExpired:
            code = None
        if code != 0:
            left[name] = code
    print(f"{len(every) - len(left)} of {len(every)} commands are done; results are in {options.out}")
    for name, code in left.items():
        print(f"left: {name}" + f" (failed: exit code {code})" * (code is not None))
    return 2 if any(left.values()) else 0
