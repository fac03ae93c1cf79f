"""Everything that wants a GPU, in the order of its worth, for as many minutes as there are.

Every piece adds to a file of results of its own, of which nothing that is finished is lost or made again. What the
minutes did not suffice for is printed; the same command goes on with it.
"""

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import tyro

from examples.gpt import DEFAULT

from ..core.runs import DEVICE, console
from ..core.store import Store, environment
from ..core.study import Options, Piece, Sections, Study
from ..core.tables import Section, Table, exact

ROOT = Path(__file__).parents[2]
#: Tests that are skipped without a CUDA device.
TESTS = [
    "tests/integration/test_cuda_graphs.py", "tests/integration/test_waits.py", "tests/functional/test_precision.py",
    "tests/gauge/scales/test_network.py", "tests/gauge/scales/test_rz_limits.py",
]  # fmt: skip

#: Runs a command of the benchmarks; returns its exit code.
Command = Callable[[list[str]], int]


@dataclass
class GpuOptions(Options):
    """Options of `gpu`."""

    minutes: float = 8.0
    """stop after so many"""
    device: Literal["cuda", "cpu"] = "cuda" if DEVICE == "cuda" else "cpu"
    """cpu is for a trial"""
    text: str = DEFAULT
    """a file of text for the language model"""
    images: str = "cifar10"
    """data of Table 1"""
    command: tyro.conf.Suppress[Command | None] = None  # the command line, which sets it


class Job(NamedTuple):
    """One command: arguments of `python -m benchmarks`, or of pytest."""

    name: str
    arguments: tuple[str, ...]
    tests: bool = False


def jobs(studies: Mapping[str, Study], options: GpuOptions) -> list[Job]:
    """The tests and all studies' pieces, the most valuable first; on a CPU small ones, to see that they run."""
    data = {"text": ["--data", options.text], "images": ["--data", options.images]}

    def job(name: str, piece: Piece, how: str) -> Job:
        where = [*data.get(studies[name].data, []), *how.split(), "--device", options.device]
        return Job(piece.name, (name, *where, "--name", f"gpu-{name.removesuffix('-devices')}"))

    pieces = sorted(((name, piece) for name, study in studies.items() for piece in study.pieces),
                    key=lambda each: each[1].worth)  # fmt: skip
    hows = [(name, piece, piece.small if options.device == "cpu" else piece.options) for name, piece in pieces]
    tests = Job("cuda-tests", ("-q", "-n", "0", "-k", "cuda or capture or synchronize", *TESTS), tests=True)
    return [tests, *(job(name, piece, how) for name, piece, how in hows if how is not None)]


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


def _run(every: Sequence[Job], options: GpuOptions, store: Store) -> None:
    """Run what is not there yet until the minutes are over; print what is left."""
    end = time.monotonic() + 60 * options.minutes
    left, failed = [job for job in every if not store.has(f"{job.name}, {options.device}")], dict[str, str]()
    with deadline(60 * options.minutes):
        for job in list(left):
            start = time.monotonic()
            console.rule(f"{job.name}: {(end - start) / 60:.1f} minutes left")
            try:
                found = _tests(job) if job.tests else _study(job, options)
            except Exception as error:  # an unlucky piece must not cost the others their minutes
                failed[job.name] = f" (failed: {type(error).__name__}: {str(error).partition(chr(10))[0]})"
                continue
            about = {"piece": job.name, "device": options.device, "seconds": time.monotonic() - start}
            store.add(f"{job.name}, {options.device}", {**found, **about, "environment": environment()})
            left.remove(job)
    print(f"{len(every) - len(left)} of {len(every)} pieces are done, in {options.out}")
    for job in left:
        print(f"left: {job.name}{failed.get(job.name, '')}")
    if left:
        print("the same command goes on with them.")
    if failed:
        raise ValueError(f"failed: {', '.join(failed)}; the reasons stand above.")


def _study(job: Job, options: GpuOptions) -> dict[str, Any]:
    assert options.command is not None
    code = options.command([*job.arguments, "--out", str(options.out)])
    if code == 130:  # it has caught the alarm, and says that finished runs are kept
        raise KeyboardInterrupt
    if code:
        raise RuntimeError(f"exit code {code}: python -m benchmarks {' '.join(job.arguments)}")
    return {}


def _tests(job: Job) -> dict[str, Any]:
    """Run tests in a process of their own, which a fault of the device may end."""
    line = [sys.executable, "-m", "pytest", *job.arguments]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
    last = (done.stdout.strip().splitlines() or [done.stderr.strip()])[-1]
    if done.returncode:
        print(done.stdout[-5000:])
        raise RuntimeError(last)
    return {"tests": last}


def report(store: Store, name: str, folder: Path) -> Sections:
    """Which pieces are done, and how long each took."""
    rows = [[r["piece"], r["device"], exact(r["seconds"], ".0f"), r.get("tests", "")] for r in store.read()]
    return {name: Section([Table(["piece", "device", "seconds", "tests"], rows)])}


def study(studies: Mapping[str, Study]) -> Study:
    """The study that runs the pieces of others."""

    def run(options: GpuOptions, store: Store) -> None:
        _run(jobs(studies, options), options, store)

    what = "all that wants a GPU, the most valuable first, for some minutes"
    return Study(what, run, report, GpuOptions(), smoke="--device cpu --minutes 4 --text text.txt")
