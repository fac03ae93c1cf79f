"""A training program that can be killed at any moment, and goes on from its last checkpoint as if it had not been."""

import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import OneCycleLR

from tests.wrappers import WRAPPERS

STEPS, SAVE_EVERY = 10, 3
SHAPE = (2, 5, 5)


@dataclass
class Death:
    """SIGKILL after so many calls of functions, Python's and C's, within a part of the program.

    Args:
        part: "training", which is all of it, "step" or "writing".
        calls: None is never.
    """

    part: str = "training"
    calls: int | None = None
    seen: Counter[str] = field(default_factory=Counter)

    @contextmanager
    def within(self, part: str) -> Iterator[None]:
        """Count the calls that are made inside."""

        def count(frame: Any, event: str, argument: Any) -> None:
            if event.endswith("call"):
                self.seen[part] += 1
                if part == self.part and self.seen[part] == self.calls:
                    os.kill(os.getpid(), signal.SIGKILL)
                if outer is not None:
                    outer(frame, event, argument)

        outer = sys.getprofile()
        sys.setprofile(count)
        try:
            yield
        finally:
            sys.setprofile(outer)


def save(state: dict[str, Any], path: Path) -> None:
    """Write a checkpoint so that there is a whole one under its name at any moment: the old, then the new."""
    part = path.with_suffix(".part")
    torch.save(state, part)
    os.replace(part, path)


def train(folder: Path, wrapper: str, death: Death, rank: int | None = None, store: str = "") -> None:
    """Train from the checkpoint in the folder, if there is one, to the end; leave the final weights there.

    With a rank, as one of two processes that meet in `store` and have half of every batch each; the first one writes.
    """
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(36, 8), nn.ReLU(), nn.Linear(8, 3)
    )
    optimizer = WRAPPERS[wrapper](AdamW(model.parameters(), lr=1e-2, eps=1e-3), model, torch.zeros(1, *SHAPE))
    schedule = OneCycleLR(optimizer, max_lr=2e-2, total_steps=STEPS)
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
    path, begin = folder / "checkpoint.pt", 0
    if path.exists():
        state = torch.load(path, weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(state[name])
        torch.set_rng_state(state["random"])
        begin = state["step"]
    replica: nn.Module = model
    if rank is not None:
        # A file needs no free port.
        distributed.init_process_group(
            "gloo", f"file://{folder / store}", timedelta(seconds=60), rank=rank, world_size=2
        )
        replica = nn.parallel.DistributedDataParallel(model)
    with death.within("training"):
        for step in range(begin, STEPS):
            x, y = (tensor if rank is None else tensor.chunk(2)[rank] for tensor in batch(step))
            optimizer.zero_grad()
            F.cross_entropy(replica(x), y).backward()
            with death.within("step"):
                optimizer.step()
            schedule.step()
            if (step + 1) % SAVE_EVERY == 0 and not rank:
                with death.within("writing"):
                    state = {name: part.state_dict() for name, part in parts.items()}
                    save({**state, "random": torch.get_rng_state(), "step": step + 1}, path)
    if not rank:
        torch.save({"weights": model.state_dict(), "calls": dict(death.seen), "begin": begin}, folder / "final.pt")
    if rank is not None:
        # Older gloo waits for ever in a destructor if the other process has left before.
        del replica
        distributed.barrier()
        distributed.destroy_process_group()


def batch(step: int) -> tuple[Tensor, Tensor]:
    """The batch of a step, whichever process asks for it."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, *SHAPE, generator=generator), torch.randint(3, (8,), generator=generator)
