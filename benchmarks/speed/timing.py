"""Ratios of time and memory, measured in turn within one run."""

import ctypes
import gc
import multiprocessing
import re
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch

from ..core.runs import DEVICE, in_turn
from ..core.tables import Cell, Row, Table, exact

Run = Callable[[], Any]
#: Creates the tensors of a job and returns what runs it once.
Job = Callable[[], Run]

F = TypeVar("F", bound=Callable[..., Any])


class Setup(NamedTuple):
    """How jobs are run."""

    device: str = DEVICE
    dtype: torch.dtype | None = None  # of autocast in their forward passes; None is none
    mode: str | None = None  # torch.compile's, of forward passes; "reduce-overhead" is a CUDA graph, None is eager
    preset: str = "small"  # of language models
    rounds: int | None = None  # of timings at most


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


def preset() -> str:
    """The size of language models."""
    return _setups[-1].preset


def autocast() -> Any:
    """The context of a forward pass."""
    dtype = _setups[-1].dtype
    return torch.autocast(device(), dtype=dtype or torch.bfloat16, enabled=dtype is not None)


def compiled(forward: F) -> F:
    """A forward pass as it is to be run: itself, or compiled."""
    mode = _setups[-1].mode
    if mode is not None:
        torch.compiler.reset()  # torch compiles one forward eight times and no more
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
    """One row of a table: what a job takes beside its plain counterpart, timed in turn.

    Args:
        what: the name of the row.
        job: creates what is timed.
        plain: likewise.
        rounds: of the timing.
        runs: of both, on the same tensors: where memory happens to lie can cost more than what is measured here.
    """
    run, plain_run = runs or (job(), plain())
    rounds = min(rounds, _setups[-1].rounds or rounds)
    ratios, milliseconds = in_turn({"plain": plain_run, "job": run}, rounds)
    memory = peak_memory(job) / peak_memory(plain)
    return {"what": what, "time_ratio": ratios["job"], "memory_ratio": memory, "plain_ms": milliseconds}


def table(what: str, rows: list[dict[str, Any]], worth: str = "", *, memory: bool = True) -> Table:
    """Ratios of time and memory.

    Args:
        what: is measured.
        rows: of the table.
        worth: a page shows the rows in whose names this pattern is found.
        memory: whether memory is shown.
    """
    cells = list[Row]()
    for row in rows:
        (low, high), middle = row["time_ratio"]["quartiles"], row["time_ratio"]["median"]
        used = exact(row["memory_ratio"] if memory else None, ".3f")
        time = Cell(f"{middle:.3f}", {"": middle, "n": row["time_ratio"]["rounds"]})
        quartiles = Cell(f"{low:.3f} to {high:.3f}", {"low": low, "high": high})
        cells.append([row["what"], time, quartiles, used])
    shown = [re.search(worth, row["what"]) is not None for row in rows]
    return Table([what, "time", "quartiles", "peak memory"], cells, shown)
