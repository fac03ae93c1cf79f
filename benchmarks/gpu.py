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

from .catalogue import STUDIES
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
    images: str = "cifar10"  # data of Table 1


_METHODS = "muon whitened-muon-16 adamw whitened-adamw-16"
#: Studies and their options, the most valuable first.
COMMANDS = [
    ("speed", "--preset gpu --dtype bfloat16 --only layers whitened"),
    ("speed", "--preset gpu --only layers whitened unit-consistent"),
    ("char-lm", f"--preset gpu --steps 1000 --norms layernorm --seeds 1 --methods {_METHODS}"),
    ("table1", "--preset paper"),
]


def commands(options: GpuOptions) -> list[list[str]]:
    """What follows `python -m`; on a CPU every study once, as small as it can be."""
    is_trial, data = options.device == "cpu", {"text": options.text, "images": options.images}
    every = [["pytest", "-q", "-n", "0", "-k", "cuda or capture or synchronize", *(str(ROOT / test) for test in TESTS)]]
    for name, how in [(name, STUDIES[name].smoke) for name in dict(COMMANDS)] if is_trial else COMMANDS:
        where = ["--device", options.device, "--out", str(options.out), "--name", f"gpu-{name}"]
        of = ["--data", data[STUDIES[name].data]] if STUDIES[name].data else []
        every.append(["benchmarks", name, *how.split(), *of, *where])
    return every


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
