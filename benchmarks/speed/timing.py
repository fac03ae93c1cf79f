"""Ratios of time and memory, measured in turn within one run."""

import ctypes
import gc
import multiprocessing
import re
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch

from ..core.options import DEVICE
from ..core.tables import Table

Run = Callable[[], Any]
#: Creates the tensors of a job and returns what runs it once.
Job = Callable[[], Run]

F = TypeVar("F", bound=Callable[..., Any])


class Setup(NamedTuple):
    """How jobs are run."""

    device: str = DEVICE
    dtype: torch.dtype | None = None  # of autocast in their forward passes; None is none
    mode: str | None = None  # torch.compile's, of forward passes; "reduce-overhead" is a CUDA graph, None is eager


_setups = [Setup()]


@contextmanager
def setup(**options: Any) -> Iterator[None]:
    """Create and run jobs so for a while; see `Setup`."""
    _setups.append(Setup(**options))
    try:
        yield
    finally:
        _setups.pop()


def device() -> str:
    """Where everything is timed."""
    return _setups[-1].device


def autocast() -> Any:
    """The context of a forward pass."""
    dtype = _setups[-1].dtype
    return torch.autocast(device(), dtype=dtype or torch.bfloat16, enabled=dtype is not None)


def compiled(forward: F) -> F:
    """A forward pass as it is to be run: itself, or compiled."""
    mode = _setups[-1].mode
    return forward if mode is None else torch.compile(forward, mode=mode)  # type: ignore[return-value]


@contextmanager
def allocator(keeps: bool) -> Iterator[Executor]:
    """A process in which freed memory is kept, or that of tensors over 8 MiB given back to the system.

    glibc does either, after what ran before.
    """
    how = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, how, _set_allocator, (keeps, torch.get_num_threads())) as process:
        yield process


def _set_allocator(keeps: bool, threads: int) -> None:
    torch.set_num_threads(threads)
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):  # of glibc; its constants are those of malloc.h
        mmap_threshold, trim_threshold = -3, -1
        mallopt(mmap_threshold, 2**25 if keeps else 2**23)
        mallopt(trim_threshold, 2**31 - 1 if keeps else 2**25)


def ten_times(step: Run) -> Callable[[], None]:
    """What takes ten steps, as often as a wrapper measures."""

    def run() -> None:
        for _ in range(10):
            step()

    return run


def interleaved(runs: dict[str, Run], rounds: int) -> dict[str, list[float]]:
    """Time everything once per round, in turn, after two rounds of warm-up; return seconds by name."""
    # Other programs do not move processor time; of several threads, or a GPU, it says nothing.
    alone = torch.get_num_threads() == 1 and not torch.cuda.is_available()
    clock = time.process_time if alone else time.perf_counter
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 2):
        for name, run in runs.items():
            start = clock()
            run()
            if device() == "cuda":
                torch.cuda.synchronize()
            if number >= 2:
                seconds[name].append(clock() - start)
    return seconds


def ratio(numerator: list[float], denominator: list[float]) -> dict[str, Any]:
    """Ratios round by round: their median, quartiles and number."""
    ratios = [a / b for a, b in zip(numerator, denominator, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return {"median": middle, "quartiles": [low, high], "rounds": len(ratios)}


def peak_memory(job: Job) -> int:
    """Bytes allocated at the highest moment of a job's set-up and one run, from the allocator's own events."""
    gc.collect()
    if device() == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        job()()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        job()()
    # The profiler's public tables give sums per operator, not the height of the tide.
    waiting, totals = list(profile.profiler.kineto_results.experimental_event_tree()), []
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.tag == torch._C._profiler._EventType.Allocation:
            totals.append((event.start_time_ns, event.extra_fields.total_allocated, event.extra_fields.alloc_size))
    _, first_total, first_size = min(totals)
    return max(total for _, total, _ in totals) - (first_total - first_size)


def row(what: str, job: Job, plain: Job, rounds: int, runs: tuple[Run, Run] | None = None) -> dict[str, Any]:
    """One row of a table: a job beside its plain counterpart, timed in turn.

    Args:
        what: the name of the row.
        job: is made anew for its memory.
        plain: likewise.
        rounds: of the timing.
        runs: of both, on the same tensors: where memory happens to lie can cost more than the difference.
    """
    run, plain_run = runs or (job(), plain())
    seconds = interleaved({"plain": plain_run, "job": run}, rounds)
    memory, median = peak_memory(job) / peak_memory(plain), statistics.median(seconds["plain"])
    times = {"time_ratio": ratio(seconds["job"], seconds["plain"]), "plain_ms": 1e3 * median}
    return {"what": what, **times, "memory_ratio": memory}


_COLUMNS = {
    "time": "{time:.3f}", "quartiles": "{quartiles low:.3f} to {quartiles high:.3f}", "peak memory": "{peak memory:.3f}",
}  # fmt: skip


def table(what: str, rows: list[dict[str, Any]], worth: str = "", *, memory: bool = True, plain: bool = False) -> Table:
    """Ratios of time and memory, with the plain counterpart's own time if it is wanted.

    Args:
        what: is measured.
        rows: of the table.
        worth: a page shows the rows in whose names this pattern is found.
        memory: whether memory is shown.
        plain: whether the plain counterpart's time is.
    """
    records = []
    for each in rows:
        time, (low, high) = each["time_ratio"], each["time_ratio"]["quartiles"]
        times = {"time": time["median"], "time n": time["rounds"], "quartiles low": low, "quartiles high": high}
        records.append({what: each["what"], **times, "peak memory": each["memory_ratio"] if memory else None})
        if plain:
            records[-1]["plain, ms"] = each["plain_ms"]
    columns = {what: f"{{{what}}}", **_COLUMNS, **({"plain, ms": "{plain, ms:.2f}"} if plain else {})}
    return Table.of(records, columns, worth=[re.search(worth, each["what"]) is not None for each in rows])
