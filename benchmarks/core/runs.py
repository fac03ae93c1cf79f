"""Runs: their settings, what tells them apart, and the one loop that makes those which have no result yet."""

import os
import statistics
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

from ..methods import METHODS, Method
from .store import Store, digest, environment, public_name
from .tables import grouped

console = Console()
#: Where to train by default.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def check_device(name: str) -> None:
    """Raise a ValueError if there is no such device, or it does not work here."""
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:  # an assertion is what a build without CUDA raises
        reason = str(error).splitlines()[0].rstrip(".")
        raise ValueError(f"--device {name}: {reason}. --device cpu works everywhere.") from error


def check_known(what: str, given: Iterable[Any], known: Iterable[Any]) -> None:
    """Raise a ValueError that names the first of the given values which is not known."""
    known = list(known)
    if unknown := [value for value in given if value not in known]:
        raise ValueError(f"unknown {what} {unknown[0]!r}; known are {', '.join(map(str, known))}.")


@dataclass(frozen=True)
class Run:
    """The settings that all runs have."""

    data: str  # the --data argument
    method: str
    damping: float | None = field(default=None, kw_only=True)  # of methods that have one, in place of their own
    device: str = field(default="cpu", kw_only=True)

    kind = ""  # which methods are for runs of this kind; see `Method.applies`

    def check(self, positive: Collection[str], **known: Collection[Any]) -> None:
        """Refuse settings that are not positive, or not among the known; and a damping that goes nowhere."""
        known = {"method": [name for name, method in METHODS.items() if self.kind in method.applies], **known}
        for name, values in known.items():
            check_known(name, [getattr(self, name)], values)
        for name in positive:
            if (value := getattr(self, name)) is not None and not value > 0:
                raise ValueError(f"{name} is {value}; it must be positive.")
        if self.damping is not None and not self.damped:
            raise ValueError(f"damping is {self.damping}, but method {self.method!r} has none.")

    @property
    def damped(self) -> bool:
        """Whether there is a damping to choose."""
        return METHODS[self.method].damped

    def make_method(self) -> Method:
        """The method, with this run's damping."""
        return METHODS[self.method].with_damping(self.damping)

    def settings(self) -> dict[str, Any]:
        """What identifies the run: everything that is set, but for where its data happens to lie; as JSON has it."""
        values = {**asdict(self), "data": public_name(self.data)}
        return {n: list(v) if isinstance(v, tuple) else v for n, v in values.items() if v is not None}

    def key(self, part: str | None = None) -> str:
        """What tells the run's result from others: its settings, and what it is for."""
        return digest([self.settings(), part])

    def computes(self) -> str:
        """A hash of what its method computes; see `fingerprint`."""
        raise NotImplementedError


def step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor, labels: Tensor) -> Tensor:
    """Take a training step on the cross entropy, and return that of before."""
    optimizer.zero_grad()
    loss = F.cross_entropy(model(inputs).flatten(0, -2), labels.flatten())
    loss.backward()
    optimizer.step()
    return loss.detach()


def set_rates(optimizers: Iterable[torch.optim.Optimizer], factor: float) -> None:
    """Set every learning rate to a share of what it was at first."""
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["lr"] = factor * group.setdefault("initial_lr", group["lr"])


def fingerprint(method: Method, model: nn.Module, inputs: Tensor, labels: Tensor) -> str:
    """A hash of what a method computes: of the losses of three steps on a small problem that never changes.

    It tells rules apart by their numbers, to six decimals in float64: another way to write one leaves it as it is.
    """
    model = model.double()
    with torch.no_grad():
        for place, parameter in enumerate(model.parameters()):
            wave = torch.arange(parameter.numel(), dtype=torch.float64).add(place).sin()
            parameter.copy_(0.3 * wave.view_as(parameter))
    kind = method.optimizer if callable(method.optimizer) else torch.optim.SGD
    optimizer = method.wrap(kind(model.parameters(), lr=0.3 * method.lr_factor), model, inputs[:2])
    return digest([f"{step(model, optimizer, inputs, labels).item():.6f}" for _ in range(3)])


@dataclass(frozen=True)
class Watch:
    """Whom a run tells while it trains."""

    tick: Callable[[], object] = lambda: None  # called after every step
    writer: Any = None  # of scalars; see `summary_writer`

    def note(self, at: int, measured: Mapping[str, Sequence[float | None]]) -> None:
        """Write what was measured after so many epochs or steps: name → a value for each seed or run."""
        for name, values in measured.items():
            for number, value in enumerate(values):
                if self.writer and value is not None:
                    self.writer.add_scalar(f"{name}/{number}" if len(values) > 1 else name, value, at)


NOBODY = Watch()
R = TypeVar("R", bound=Run)


class Kind(NamedTuple):
    """How runs of one kind are made."""

    steps: Callable[[Any, Any], int]  # (run, data) → how many steps it takes
    train: Callable[[list[Any], Any, Watch], Sequence[dict[str, Any]]]  # (runs of one family, data, watch) → results
    score: Callable[[dict[str, Any]], float | None]  # result → what choosing settings reads; None if it broke down
    family: Callable[[Any], Hashable] = lambda run: run  # run → what runs that train side by side have in common
    #: (run, whether to download) → data of that run and all others of its command.
    load: Callable[[Any, bool], Any] = lambda run, download: None


def summary_writer() -> Any:
    """The class of torch's own writer; a ValueError without the package whose format it writes."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        why = "--log tensorboard needs the package tensorboard; pip install tensorboard brings it."
        raise ValueError(why) from error
    return SummaryWriter


def run_all(
    runs: Sequence[R], kind: Kind, store: Store, *, part: str | None = None, download: bool = False, wait: bool = False
) -> None:
    """Run what the store lacks, under torchrun this rank's share of it; of runs that choose settings keep the score.

    With `wait`, or of runs that choose settings, it waits for the other ranks' as well: all go on from the same.
    """
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    mine = list(dict.fromkeys(runs))[rank::world]
    waiting = [run for run in mine if not store.has(run.key(part), run.computes())]
    console.print(f"{len(mine) - len(waiting)} of {len(mine)} runs are in {store.path} already")
    if waiting:
        _run_mine(waiting, kind, store, part, download)
    while (part or wait) and world > 1 and not all(store.has(run.key(part), run.computes()) for run in runs):
        time.sleep(1)


def _run_mine(waiting: Sequence[R], kind: Kind, store: Store, part: str | None, download: bool) -> None:
    if waiting[0].device == "cuda" and "LOCAL_RANK" in os.environ:  # else what is current, as without torchrun
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    data = kind.load(waiting[0], download)
    families = list(grouped(waiting, kind.family).values())
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        for family in progress.track(families, description="all"):
            settings = family[0].settings()
            names = ("method", "activation", "norm", "optimizer", "batch_size", "lr")
            shown = [str(settings[name]) for name in names if name in settings]
            task = progress.add_task(", ".join(shown), total=kind.steps(family[0], data))
            folder = store.log and store.log / "-".join([*shown, family[0].key(part)])
            with summary_writer()(str(folder), flush_secs=1) if folder else nullcontext() as writer:
                results = kind.train(family, data, Watch(partial(progress.advance, task), writer))
            for run, result in zip(family, results, strict=True):
                kept = result if part is None else {"part": part, "score": kind.score(result)}
                about = {"computes": run.computes(), "settings": run.settings(), "environment": environment()}
                store.add(run.key(part), {**about, **kept})
            progress.remove_task(task)


def ten_times(step: Callable[[], object]) -> Callable[[], None]:
    """What takes ten steps, as often as a wrapper measures."""

    def run() -> None:
        for _ in range(10):
            step()

    return run


def interleaved(runs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Time everything once per round, in turn, after two rounds of warm-up; return seconds by name."""
    # Other programs do not move processor time; of several threads, or a GPU, it says nothing.
    alone = torch.get_num_threads() == 1 and not torch.cuda.is_available()
    clock = time.process_time if alone else time.perf_counter

    def seconds(run: Callable[[], Any]) -> float:
        start = clock()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return clock() - start

    every = [{name: seconds(run) for name, run in runs.items()} for _ in range(rounds + 2)]
    return {name: [found[name] for found in every[2:]] for name in runs}


def ratio(numerator: list[float], denominator: list[float]) -> dict[str, Any]:
    """Ratios round by round: their median, quartiles and number."""
    ratios = [a / b for a, b in zip(numerator, denominator, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return {"median": middle, "quartiles": [low, high], "rounds": len(ratios)}


def in_turn(runs: dict[str, Callable[[], Any]], rounds: int) -> tuple[dict[str, dict[str, Any]], float]:
    """Time everything in turn; return the ratios to the first, by name, and its median in milliseconds."""
    seconds = interleaved(runs, rounds)
    first = next(iter(seconds.values()))
    return {name: ratio(own, first) for name, own in seconds.items()}, 1e3 * statistics.median(first)


def measure(store: Store, wanted: dict[str, Callable[[], dict[str, Any]]], *, again: bool = False) -> None:
    """Make those of the wanted measurements, by key, that are not there yet; or all of them again."""
    if there := 0 if again else sum(map(store.has, wanted)):
        console.print(f"{there} of {len(wanted)} measurements are in {store.path} already; another --name has new ones")
    for key, measured in wanted.items():
        if again or not store.has(key):
            console.print(f"measuring {key} …")
            store.add(key, {**measured(), "environment": environment()})
