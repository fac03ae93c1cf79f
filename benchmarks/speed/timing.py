"""Ratios of time and memory, measured in turn within one run."""

import ctypes
import gc
import multiprocessing
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ..core.runs import DEVICE, in_turn
from ..core.study import Options

Run = Callable[[], Any]
#: Creates the tensors of a job and returns what runs it once.
Job = Callable[[], Run]


@dataclass
class SpeedOptions(Options):
    """Options of this study, and how jobs are created and run."""

    only: tuple[str, ...] = ()  # these measurements; all by default
    device: str = DEVICE  # cpu or cuda
    dtype: Literal["float32", "bfloat16"] = "float32"  # of forward passes, by autocast
    preset: str = "small"  # size of the language models
    rounds: int | None = None  # of every timing at most, to see that it runs


#: How jobs are created and run.
ASKED = ContextVar[SpeedOptions]("asked")
ASKED.set(SpeedOptions())


def device() -> str:
    """Where everything is timed."""
    return ASKED.get().device


def autocast() -> Any:
    """The context of a forward pass."""
    return torch.autocast(device(), torch.bfloat16, enabled=ASKED.get().dtype == "bfloat16")


def allocator(keeps: bool) -> Executor:
    """A process that keeps freed memory, or gives that of tensors over 8 MiB back; glibc does either, by its past."""
    how = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(1, how, _set_up, (keeps, torch.get_num_threads(), ASKED.get()))


def _set_up(keeps: bool, threads: int, asked: SpeedOptions) -> None:
    torch.set_num_threads(threads)
    ASKED.set(asked)
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

    `runs` are of both on the same tensors: where memory happens to lie can cost more than what is measured here.
    """
    run, plain_run = runs or (job(), plain())
    rounds = min(rounds, ASKED.get().rounds or rounds)
    ratios, milliseconds = in_turn({"plain": plain_run, "job": run}, rounds)
    memory = peak_memory(job) / peak_memory(plain)
    return {"what": what, "time_ratio": ratios["job"], "memory_ratio": memory, "plain_ms": milliseconds}
