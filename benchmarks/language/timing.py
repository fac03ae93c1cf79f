"""What a training step of every method takes, all of them in one interleaved run."""

import statistics
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

from ..speed.timing import interleaved, ratio
from .run import TextRun, dampings
from .text import Text
from .trainer import Trainer, batches

#: The whitenings measure once in so many steps.
STEPS = 10
#: Neither is compared here: any rate and damping cost the same.
_LR, _DAMPING = 1e-3, 1.0


def step_times(methods: list[str], preset: str, text: Text, data: str, device: str, rounds: int = 21) -> dict[str, Any]:
    """Time `STEPS` steps of every method with LayerNorm, in turn; ratios to AdamW's, and its milliseconds per step.

    Args:
        methods: keys of `METHODS`.
        preset: a key of `PRESETS`.
        text: what to train on, on the device.
        data: its --data argument.
        device: where.
        rounds: how many times.
    """
    jobs = {}
    for method in dict.fromkeys(["adamw", *methods]):
        (damping,) = dampings(method, [_DAMPING])
        run = TextRun(data, method, "layernorm", _LR, preset=preset, damping=damping, device=device)
        jobs[method] = _job(replace(run, steps=STEPS * (rounds + 2)), text)
    seconds = interleaved(jobs, rounds)
    return {
        "preset": preset,
        "device": device,
        "adamw_ms": 1e3 * statistics.median(seconds["adamw"]) / STEPS,
        "time_ratio": {method: ratio(times, seconds["adamw"]) for method, times in seconds.items()},
    }


def _job(run: TextRun, text: Text) -> Callable[[], None]:
    trainer, windows, numbers = Trainer(run, text), batches(run, text.train), count(1)

    def steps() -> None:
        for _ in range(STEPS):
            trainer.step(next(numbers), next(windows))

    return steps
