"""Processes of torch.distributed, for tests of what data parallelism must give."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, multiprocessing

#: What imports everything once and forks from there: importing takes longer than most of what is tested.
PRELOADED = ["tests.helpers.loops", "tests.helpers.resumable", "torch._dynamo", "torch.export._trace"]
START = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
if START == "forkserver":
    multiprocessing.get_context(START).set_forkserver_preload(PRELOADED)

needs_distributed = pytest.mark.skipif(not distributed.is_available(), reason="torch was built without distributed")


def on_two_processes(work: Callable[..., Any], folder: Path, *arguments: Any) -> list[Any]:
    """What `work(rank, *arguments)` returns on each of two processes that share a gloo group, in float64."""
    return on_processes(2, work, folder, *arguments)


def on_processes(count: int, work: Callable[..., Any], folder: Path, *arguments: Any) -> list[Any]:
    """What `work(rank, *arguments)` returns on each of so many processes that share a gloo group, in float64."""
    multiprocessing.start_processes(_process, (count, work, folder, arguments), nprocs=count, start_method=START)
    return [torch.load(folder / f"{rank}.pt") for rank in range(count)]


def _process(rank: int, count: int, work: Callable[..., Any], folder: Path, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    # A file needs no free port. Where processes wait for each other in vain, that shall end.
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=count, timeout=timedelta(minutes=5)
    )
    # The group ends with the process: in destroy_process_group that of torch 2.6 now and then waits for ever.
    torch.save(work(rank, *arguments), folder / f"{rank}.pt")
