"""Everything that wants a GPU, in the order of its worth, for as many minutes as there are.

Every piece adds to a file of results of its own, of which nothing that is finished is lost or made again. What the
minutes did not suffice for is printed; the same command goes on with it.
"""

import argparse
import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from examples.gpt import DEFAULT

from ..core.progress import console
from ..core.run import DEVICE, environment
from ..core.store import Store
from ..core.study import Sections, Study
from ..core.table import markdown

ROOT = Path(__file__).parents[2]
#: Tests that are skipped without a CUDA device.
TESTS = [
    "tests/integration/test_cuda_graphs.py", "tests/integration/test_waits.py", "tests/functional/test_precision.py",
    "tests/gauge/scales/test_network.py", "tests/gauge/scales/test_rz_limits.py",
]  # fmt: skip

#: Runs a command of the benchmarks; returns its exit code.
Command = Callable[[list[str]], int]


class Piece(NamedTuple):
    """One command: arguments of `python -m benchmarks`, or of pytest."""

    name: str
    arguments: tuple[str, ...]
    tests: bool = False


def pieces(options: argparse.Namespace) -> list[Piece]:
    """All pieces, the most valuable first; on a CPU small ones, to see that they run."""
    small = options.device == "cpu"
    device = ["--device", options.device]

    def speed(suite: str, dtype: str, mode: str) -> Piece:
        how = ["--only", suite, "--dtypes", dtype, "--modes", mode, "--size", "small" if small else "full"]
        return Piece(f"speed-{suite}-{dtype}-{mode}", ("speed-devices", *how, *device, "--name", "gpu-speed"))

    methods = ["adamw", "whitened-adamw-16"] if small else ["muon", "whitened-muon-16", "adamw", "whitened-adamw-16"]
    length = ["--preset", "tiny", "--steps", "4"] if small else ["--preset", "gpu", "--steps", "1000"]
    char_lm = ["--data", options.text, "--methods", *methods, "--norms", "layernorm", "--seeds", "1", *length]
    cells = ["--preset", "smoke", "--methods", "none", "--activations", "tanh", "--batch-size", "64"]
    table1 = cells if small else ["--preset", "paper", "--data", options.images]
    # What compiles takes a compiler and, on a CPU, minutes.
    modes = ["eager"] if small else ["eager", "compiled", "graphs"]
    first, *others = product(("bfloat16", "float32"), modes)
    return [
        Piece("cuda-tests", ("-q", "-n", "0", "-k", "cuda or capture or synchronize", *TESTS), tests=True),
        speed("steps", *first),
        speed("layers", *first),
        speed("unit-consistent", "float32", "eager"),
        Piece("char-lm", ("char-lm", *char_lm, *device, "--name", "gpu-char-lm")),
        *(speed(suite, *how) for how in others for suite in ("steps", "layers")),
        Piece("table1", ("table1", *table1, *device, "--name", "gpu-table1")),
    ]


@contextlib.contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Let Ctrl-C be pressed once the time is up, and go on behind the block."""
    over = False

    def ring(*_: Any) -> None:
        nonlocal over
        over = True
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, ring)
    # Again and again: within the end of an object Python cannot raise, and only prints.
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3), 5.0)
    try:
        yield
    except KeyboardInterrupt:
        if not over:
            raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _run(options: argparse.Namespace, store: Store) -> None:
    """Run what is not there yet until the minutes are over; print what is left."""
    end, every = time.monotonic() + 60 * options.minutes, pieces(options)
    left, failed = [piece for piece in every if not store.has(f"{piece.name}, {options.device}")], dict[str, str]()
    with deadline(60 * options.minutes):
        for piece in list(left):
            start = time.monotonic()
            console.rule(f"{piece.name}: {(end - start) / 60:.1f} minutes left")
            try:
                found = _tests(piece) if piece.tests else _study(piece, options.out, options.command)
            except Exception as error:  # an unlucky piece must not cost the others their minutes
                failed[piece.name] = f" (failed: {type(error).__name__}: {str(error).partition(chr(10))[0]})"
                continue
            about = {"piece": piece.name, "device": options.device, "seconds": time.monotonic() - start}
            store.add(f"{piece.name}, {options.device}", {**found, **about, "environment": environment()})
            left.remove(piece)
    print(f"{len(every) - len(left)} of {len(every)} pieces are done, in {options.out}")
    for piece in left:
        print(f"left: {piece.name}{failed.get(piece.name, '')}")
    if left:
        print("the same command goes on with them.")
    if failed:
        raise ValueError(f"failed: {', '.join(failed)}; the reasons stand above.")


def _study(piece: Piece, out: Path, command: Command) -> dict[str, Any]:
    code = command([*piece.arguments, "--out", str(out)])
    if code == 130:  # it has caught the alarm, and says that finished runs are kept
        raise KeyboardInterrupt
    if code:
        raise RuntimeError(f"exit code {code}: python -m benchmarks {' '.join(piece.arguments)}")
    return {}


def _tests(piece: Piece) -> dict[str, Any]:
    """Run tests in a process of their own, which a fault of the device may end."""
    line = [sys.executable, "-m", "pytest", *piece.arguments]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
    last = (done.stdout.strip().splitlines() or [done.stderr.strip()])[-1]
    if done.returncode:
        print(done.stdout[-5000:])
        raise RuntimeError(last)
    return {"tests": last}


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=float, default=8.0, help="stop after so many")
    parser.add_argument("--device", choices=["cuda", "cpu"], default=DEVICE["default"], help="cpu is for a trial")
    parser.add_argument("--text", default=DEFAULT, help="a file of text for the language model")
    parser.add_argument("--images", default="cifar10", help="data of Table 1")


def report(store: Store, name: str, folder: Path) -> Sections:
    """Which pieces are done, and how long each took."""
    rows = [[r["piece"], r["device"], f"{r['seconds']:.0f}", r.get("tests", "")] for r in store.read()]
    return {name: markdown(["piece", "device", "seconds", "tests"], rows)}


STUDIES = {"gpu": Study("all that wants a GPU, the most valuable first, for some minutes", _run, report, _arguments)}
