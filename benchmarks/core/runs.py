"""Runs, the one loop that makes those which have no result yet, and the file that keeps what they reached.

The results of a study are one file of JSON lines, to which whole lines are added and of which nothing is changed. It
begins with what it is of, `{"study": …, "settings": …}`: the settings of the first run. Then stand environments, each
before the first run made in it, and runs, each with the settings in which it differs from the first.
"""

import argparse
import fcntl
import hashlib
import json
import math
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import date
from functools import cache, lru_cache, partial
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

import adiv_optim

from ..methods import METHODS, Method
from .table import grouped

console = Console()
#: A line as it is read: "settings" and "environment" whole, "key", "part", and what was measured.
Result = dict[str, Any]


def setting(*names: str) -> Callable[[Result], Any]:
    """What reads a setting of results, or a tuple of several."""
    read = itemgetter(*names)
    return lambda result: read(result["settings"])


def digest(value: Any) -> str:
    """Eight letters that tell values of JSON apart."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:8]


class Store:
    """The file of one study's results.

    A line has a key, which says what was run, and a hash of what its method computes. A line whose key came
    before takes the place of the earlier one; so a rule that has changed is run again, and the new line counts.

    Args:
        path: the file.
        study: whose results these are, of a file that is not there yet.
        log: where runs write scalars while they train, a folder for each; None is nowhere.
    """

    def __init__(self, path: Path, study: str | None = None, log: Path | None = None) -> None:
        self.path, self._study, self.log = path, study, log

    @property
    def study(self) -> str:
        """Whose results these are."""
        first = next(_lines(self.path), {}) if self._study is None else {"study": self._study}
        if "study" not in first:
            raise ValueError(f"{self.path} does not begin with the study that it is of; it is no file of results.")
        return first["study"]

    def read(self, part: str | None = None) -> list[Result]:
        """The results of a part: "search" and "trials" hold what chose settings, None is what tables show.

        They are to be read only: whoever asks again is given the same ones.
        """
        return [result for result in self._results().values() if result.get("part") == part]

    def has(self, key: str, computes: str | None = None) -> bool:
        """Whether a line of this key is there, computed as now."""
        return (key, computes) in self.computed().items()

    def computed(self) -> dict[str, str | None]:
        """The key of every line, and the hash of what its method computed."""
        return {key: found.get("computes") for key, found in self._results().items()}

    def add(self, key: str, result: Mapping[str, Any]) -> None:
        """Write one result as one whole line; a torn last line, as a killed process may leave one, is cut off.

        It must have an "environment"; "settings", "part", and what it "computes" belong to what tells it from others.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # ranks share a file
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
            known = list(_lines(self.path))
            settings, place = dict(result.get("settings", {})), digest(result["environment"])
            lines: list[dict[str, Any]] = []
            if not known:
                lines.append({"study": self.study, "settings": settings})
            if not any(line.get("id") == place for line in known):
                lines.append({"id": place, **result["environment"]})
            first = (known or lines)[0]["settings"]
            names = [name for name in {**first, **settings} if first.get(name) != settings.get(name)]
            own = {name: settings.get(name) for name in names}
            lines.append({"key": key, **result, "environment": place, "settings": own})
            text = (json.dumps(line, separators=(",", ":"), ensure_ascii=False) + "\n" for line in lines)
            data = "".join(text).encode()
            if os.write(file.fileno(), data) < len(data):
                raise OSError(f"{self.path}: the disk took part of a line; free some space and run again.")

    def _results(self) -> Mapping[str, Result]:
        if not self.path.exists():
            return {}
        stat = self.path.stat()
        return _results(self.path, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=64)
def _results(path: Path, time: int, size: int) -> Mapping[str, Result]:
    """Every result of a file by its key, read once for a time and a size: lines are only added."""
    found: dict[str, Result] = {}
    environments, first = dict[str, Any](), dict[str, Any]()
    for line in _lines(path):
        if "study" in line:
            first = line["settings"]
        elif "id" in line:
            environments[line.pop("id")] = line
        else:
            settings = {name: value for name, value in {**first, **line["settings"]}.items() if value is not None}
            place = environments[line["environment"]]
            found[line["key"]] = {**line, "settings": settings, "environment": place}
    return found


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Every whole line; what stands behind the last end of line was cut off while it was written."""
    whole = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    for number, line in enumerate(whole, start=1):
        try:
            yield json.loads(line)
        except json.JSONDecodeError as error:
            what = f"{path}, line {number} is no JSON ({error}); restore the file or delete the line."
            raise ValueError(what) from error


#: Of every parser's --device.
DEVICE: dict[str, Any] = {
    "default": "cuda" if torch.cuda.is_available() else "cpu",
    "metavar": "NAME",
    "help": "where to train: cpu, cuda, cuda:1, …",
}


def check_device(name: str) -> None:
    """Raise a ValueError if there is no such device, or it does not work here."""
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:  # an assertion is what a build without CUDA raises
        reason = str(error).splitlines()[0].rstrip(".")
        raise ValueError(f"--device {name}: {reason}. --device cpu works everywhere.") from error


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
            if getattr(self, name) not in values:
                raise ValueError(f"unknown {name} {getattr(self, name)!r}; known are {', '.join(map(str, values))}.")
        for name in positive:
            if (value := getattr(self, name)) is not None and not value > 0:
                raise ValueError(f"{name} is {value}; it must be positive.")
        if self.damping is not None and not METHODS[self.method].damped:
            raise ValueError(f"damping is {self.damping}, but method {self.method!r} has none.")

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


def public_name(data: str) -> str:
    """The name of a data set without the path it was read from: the folder's or file's own name says which it is."""
    kind, colon, argument = data.partition(":")
    return f"{kind}:{Path(argument).name}" if colon else Path(kind).name


def environment() -> dict[str, Any]:
    """Return what a reader needs to judge a number: command, versions, commit, date and hardware."""
    info = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*: (.+)$", info.read_text(), re.MULTILINE) if info.exists() else []
    # Not where data and results happen to lie.
    pairs = zip(sys.argv, sys.argv[1:], strict=False)
    arguments = [public_name(a) if before == "--data" or Path(a).is_absolute() else a for before, a in pairs]
    return {
        "command": " ".join(["python -m benchmarks", *arguments]),
        "adiv_optim": adiv_optim.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": f"{names[0]} × {os.cpu_count()}" if names else platform.processor(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "commit": _commit(),
        "date": date.today().isoformat(),
    }


@cache
def _commit() -> str | None:
    """Of the clone, if this is one; what results and their pages add to it changes nothing that is computed."""
    try:
        head, changed = (
            subprocess.run(["git", *command.split()], cwd=Path(__file__).parents[2], capture_output=True, check=True)
            for command in ("rev-parse --short=12 HEAD", "diff HEAD --name-only -- *.py")
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.decode().strip() + "-dirty" * bool(changed.stdout)


class Watch(NamedTuple):
    """Whom a run tells while it trains."""

    tick: Callable[[], object] = lambda: None  # called after every step
    #: Called with how far a run is, in epochs or steps, and what was measured: name → a value for each seed or run.
    note: Callable[[int, Mapping[str, Sequence[float | None]]], object] = lambda at, measured: None


NOBODY = Watch()
R = TypeVar("R", bound=Run)


class Kind(NamedTuple):
    """How runs of one kind are made."""

    load: Callable[[Any, bool], Any]  # (run, whether to download) → data of that run and all others of its command
    steps: Callable[[Any, Any], int]  # (run, data) → how many steps it takes
    family: Callable[[Any], Hashable]  # run → what runs that train side by side have in common
    train: Callable[[list[Any], Any, Watch], Sequence[dict[str, Any]]]  # (runs of one family, data, watch) → results
    score: Callable[[dict[str, Any]], float | None]  # result → what choosing settings reads; None if it broke down
    alike: Callable[[Any], Hashable]  # run → what runs have in common whose steps take as long


def add_progress_arguments(parser: argparse.ArgumentParser) -> None:
    """Give a parser the options of every study that trains by `run_all`."""
    parser.add_argument("--download", action="store_true", help="fetch CIFAR-10 or tinyshakespeare into ./data")
    where = "also write losses while they train, to OUT/NAME.tensorboard"
    parser.add_argument("--log", choices=["tensorboard"], help=where)


def summary_writer() -> Any:
    """The class of torch's own writer; a ValueError without the package whose format it writes."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        why = "--log tensorboard needs the package tensorboard; pip install tensorboard brings it."
        raise ValueError(why) from error
    return SummaryWriter


@contextmanager
def logged(folder: Path | None, tick: Callable[[], object]) -> Iterator[Watch]:
    """Yield what moves a progress bar and writes scalars to a folder, in the files that TensorBoard reads."""
    if folder is None:
        yield Watch(tick)
        return
    with summary_writer()(str(folder)) as writer:

        def note(at: int, measured: Mapping[str, Sequence[float | None]]) -> None:
            for name, values in measured.items():
                for number, value in enumerate(values):
                    if value is not None:
                        writer.add_scalar(f"{name}/{number}" if len(values) > 1 else name, value, at)
            writer.flush()

        yield Watch(tick, note)


def run_all(
    runs: Sequence[R], kind: Kind, store: Store, *,
    part: str | None = None, download: bool = False, only_estimate: bool = False,
) -> None:  # fmt: skip
    """Run what the store lacks, under torchrun this rank's share of it; of runs that choose settings keep the score.

    It begins by saying how long that will take, and goes no further if it is to estimate only. Of runs that choose
    settings it waits for the other ranks' as well: all choose from the same.
    """
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    mine = runs[rank::world]
    there = store.computed().items()
    waiting = [run for run in mine if (run.key(part), run.computes()) not in there]
    console.print(f"{len(mine) - len(waiting)} of {len(mine)} runs are in {store.path} already")
    if waiting:
        _run_mine(waiting, kind, store, part, download, only_estimate)
    while part and world > 1 and {(run.key(part), run.computes()) for run in runs} - store.computed().items():
        time.sleep(1)


def _run_mine(
    waiting: Sequence[R], kind: Kind, store: Store, part: str | None, download: bool, only_estimate: bool
) -> None:
    if waiting[0].device == "cuda" and "LOCAL_RANK" in os.environ:  # else what is current, as without torchrun
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    data = kind.load(waiting[0], download)
    console.print(f"the other {len(waiting)} will take about {_hours(waiting, kind, data)} of training here")
    if only_estimate:
        return
    families = grouped(waiting, kind.family)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        overall = progress.add_task("runs", total=len(waiting))
        for family in families.values():
            settings = family[0].settings()
            shown = [str(settings[name]) for name in ("method", "activation", "norm", "batch_size") if name in settings]
            shown.append(f"{len(family)} runs" if len(family) > 1 else f"{settings['lr']:g}")
            task = progress.add_task(", ".join(shown), total=kind.steps(family[0], data))
            folder = store.log and store.log / "-".join([*shown, family[0].key(part)])
            with logged(folder, partial(progress.advance, task)) as watch:
                results = kind.train(family, data, watch)
            for run, result in zip(family, results, strict=True):
                kept = result if part is None else {"part": part, "score": kind.score(result)}
                about = {"computes": run.computes(), "settings": run.settings(), "environment": environment()}
                store.add(run.key(part), {**about, **kept})
            progress.remove_task(task)
            progress.advance(overall, len(family))


def _hours(runs: Sequence[R], kind: Kind, data: Any) -> str:
    """How long runs will take, by the pace of some steps of every kind of them."""
    groups = grouped(runs, kind.alike).values()
    total = sum(pace(alike[0], kind, data) * sum(kind.steps(run, data) for run in alike) for alike in groups)
    if total < 60:
        return f"{math.ceil(total)} seconds"
    return f"{total / 3600:.2g} hours" if total > 3600 else f"{total / 60:.2g} minutes"


class _EnoughError(Exception):
    """Ends a run whose pace is known."""


def pace(run: Run, kind: Kind, data: Any) -> float:
    """Seconds of a step, the median of the first few; nothing of a run that has but one."""
    moments: list[float] = []

    def tick() -> None:
        if run.device.startswith("cuda"):
            torch.cuda.synchronize()
        moments.append(time.perf_counter())
        if len(moments) > 8:
            raise _EnoughError

    with suppress(_EnoughError):
        kind.train([run], data, Watch(tick))
    return statistics.median(later - earlier for earlier, later in pairwise(moments)) if len(moments) > 1 else 0.0


def measure(store: Store, wanted: dict[str, Callable[[], dict[str, Any]]], *, again: bool = False) -> None:
    """Make those of the wanted measurements, by key, that are not there yet; or all of them again."""
    for key, measured in wanted.items():
        if again or not store.has(key):
            console.print(f"measuring {key} …")
            store.add(key, {**measured(), "environment": environment()})
