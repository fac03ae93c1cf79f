"""What to look at first: a picture and an equation that networks learn, and digits, with and without this library.

Picture and equation are those of `examples.fit_image` and `examples.equation`, which say what each way has reached in
equal time. On digits every method has the optimizer, the learning rate and the damping that `digits-optimizers` chose
for it on held-out data, and trains anew.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from adiv_optim.corrections import BatchIdeal
from examples import equation, fit_image

from ..core.runs import DEVICE, run_all
from ..core.store import Result, Store
from ..core.study import Options, Sections, Study, check_length
from ..core.tables import Section, Table, against, estimate, exact, mean_and_error
from ..ensemble import IMAGES
from ..grids import best_optimizer
from ..methods import METHODS
from ..problems.images import again, network, trained

#: Whose settings the digits are learned with.
CHOSEN = Path(__file__).parents[1] / "results" / "digits-optimizers.jsonl"


@dataclass
class BenchOptions(Options):
    """Options of this study."""

    steps: int = fit_image.STEPS  # of Adam with the picture; the others have its time
    seconds: int = 6  # of processor time with the equation, for each way to solve it
    epochs: int = 20  # passes over the digits
    seeds: int = 5  # with the digits; they begin at 1
    device: str = DEVICE  # where to train on the digits: cpu, cuda, cuda:1, …


def _run(options: BenchOptions, store: Store) -> None:
    chosen, threads = Store(CHOSEN), torch.get_num_threads()
    at_best = [r for r in chosen.read() if r["settings"]["optimizer"] == _optimizer(chosen, r["settings"])]
    seeds = tuple(range(1, options.seeds + 1))
    check_length(store, epochs=options.epochs, seeds=list(seeds))
    lengths = (fit_image, "picture", "--steps", options.steps), (equation, "equation", "--seconds", options.seconds)
    for example, name, flag, length in lengths:
        path = store.path.with_name(f"{store.path.stem}-{name}.png")
        if path.exists():
            print(f"{path} is there already; without it the {name} is learned again")
        else:
            example.main([flag, str(length), "--out", str(path)])
    torch.set_num_threads(threads)  # an example takes one
    run_all([again(r, device=options.device, seeds=seeds, epochs=options.epochs) for r in at_best], IMAGES, store)


def _optimizer(chosen: Store, settings: Mapping[str, Any]) -> str:
    """The better one on held-out data; of BatchIdeal SGD, as the README has it."""
    if isinstance(METHODS[settings["method"]].correction, BatchIdeal):
        return "sgd"
    return best_optimizer(chosen, settings["method"], settings["activation"])


def _accuracies(result: Result) -> list[float]:
    return result["test_accuracy"][-1]


def report(store: Store, name: str, folder: Path) -> Sections:
    """The table of the digits, the best first."""
    digits = sorted(store.read(), key=lambda r: -mean_and_error(_accuracies(r))[0])
    first = _accuracies(digits[0])
    table = Table(["digits", "optimizer", "learning rate", "damping", "test accuracy, %", "against the first (p)"], [[
        METHODS[r["settings"]["method"]].label, r["settings"]["optimizer"], exact(r["settings"]["lr"]),
        exact(r["settings"].get("damping")), estimate(_accuracies(r)),
        "" if r is digits[0] or len(first) < 2 else against(_accuracies(r), first),
    ] for r in digits])  # fmt: skip
    caption = (
        f"{network(digits[0])}, mean ± standard error, with settings that another seed chose on held-out data; "
        f"p is Welch's. {trained(digits)}"
    )
    return {name: Section([table, caption])}


STUDIES = {
    "bench": Study(
        "what to look at first: a picture, an equation and digits; two minutes", _run, report, BenchOptions(),
        smoke="--steps 2 --seconds 1 --epochs 1 --seeds 2 --device cpu",
    )
}  # fmt: skip
