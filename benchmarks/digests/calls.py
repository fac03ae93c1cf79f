"""What a wrapper gains in every field over its own optimizer, at which price, and with which settings."""

import inspect
import statistics
from collections.abc import Callable
from functools import partial
from operator import truediv
from pathlib import Path
from typing import Any, NamedTuple

from ..core.arms import label, pace
from ..core.store import Result, setting
from ..core.study import Digest
from ..core.tables import Cell, Row, Section, Table, exact, grouped
from ..methods import METHODS
from ..studies.fourier import STEPS, prices
from ..train import DERIVATIVES
from .reached import NONLINEAR, Sample, Settings, Stores, arm, best_runs, measure_of, runs, timings, trials, values

#: What makes a run that others of its file are compared with.
_KEYS = ("norm", "method", "optimizer", "rows", "embedding_deviation", "embedding_lr")
#: The price of a step, in steps of the bare optimizer; None where nothing says it.
Price = Callable[[Stores], float | None]


class Call(NamedTuple):
    """A row: a task, what is written for it, and the runs that are compared."""

    task: str
    write: str
    wrapper: Any  # a wrapper or a rule, whose rank and `every` the settings show
    file: str
    wrapped: Settings
    bare: Settings
    among: Settings  # of all runs that are compared, rivals too
    price: Price
    worth: bool = True  # whether pages show what it gains
    typical: bool = True  # whether pages show its settings

    def runs(self, stores: Stores, settings: Settings) -> list[Result]:
        """The best runs with some settings, among those that are compared."""
        return best_runs(stores, self.file, **{**self.among, **settings})

    def lead(self, stores: Stores) -> Cell:
        """How far it is ahead of the best of the rivals, by a t test's interval."""
        measure, (own, alone) = measure_of(stores, self.file), self.samples(stores)
        groups = grouped(runs(stores, self.file, **self.among), lambda r: tuple(map(r["settings"].get, _KEYS)))
        rivals = [dict(zip(_KEYS, key, strict=True)) for key in groups if not from_this_library(*key[1:3])]
        samples = {place: values(self.runs(stores, rival)) for place, rival in enumerate(rivals)}
        place = measure.best(samples)
        if samples[place] == alone:
            return Cell("the optimizer alone", {"": "the optimizer alone"})
        name, cell = _label(rivals[place]), measure.amount(measure.difference(own, samples[place]))
        numbers = {f"difference {key}".strip(): value for key, value in cell.numbers.items()}
        return Cell(f"{name}: {cell.text}", {"": name, **numbers})

    def samples(self, stores: Stores) -> list[Sample]:
        """What was reached with the wrapper, and without it."""
        return [values(self.runs(stores, settings)) for settings in (self.wrapped, self.bare)]


def from_this_library(method: str, optimizer: str | None = None) -> bool:
    """Whether a method's optimizer is wrapped by this library, or is of it."""
    entry = METHODS[method]
    by_inputs = getattr(entry.by_inputs, "func", entry.by_inputs)
    is_wrapper = by_inputs is not None and by_inputs.__module__.startswith("adiv_optim")
    return optimizer == "gauss-newton" or is_wrapper or entry.correction is not None or entry.gauge is not None


def _label(settings: Settings) -> str:
    """A rival: an arm, or its normaliser or method, and its optimizer."""
    method = METHODS[settings["method"]]
    norms = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm", "none": "no normaliser"}
    if method.applies == "language":
        drawn = ", embeddings of 1" if settings["embedding_deviation"] == 1.0 else ""
        return f"{method.label}, {norms.get(settings['norm'], settings['norm'])}{drawn}"
    if settings["norm"] is not None:
        return label(settings)
    name = "no normaliser" if settings["method"] == "none" else method.label
    return f"{name}, {({'sgd': 'SGD', 'adam': 'Adam', 'muon': 'Muon', 'soap': 'SOAP'}).get(settings['optimizer'])}"


def _pace(equation: str, optimizer: str) -> Price:
    """By the processor time of runs of one equation, network and number of points, if there are."""

    def price(stores: Stores) -> float | None:
        paces = []
        for own in (arm(optimizer, "whitened", DERIVATIVES), arm(optimizer)):
            alike = grouped(runs(stores, "equations", equation=equation, **own), setting("hidden", "inner"))
            paces.append({key: statistics.median(map(pace, each)) for key, each in alike.items()})
        with_it, without = paces
        ratios = [with_it[key] / without[key] for key in with_it if key in without]
        return statistics.median(ratios) if ratios else None

    return price


def _untimed(stores: Stores) -> None:
    """Runs are of different days, and no rows were timed in turn."""


def _timed(suite: str, name: str, over: str = "") -> Price:
    """By a row of a suite of timings, over that of another row."""

    def price(stores: Stores) -> float:
        times = {what: float(row["time_ratio"]["median"]) for what, row in timings(stores, suite).items()}
        return times[name] / times.get(over, 1.0)

    return price


def _convolutions(stores: Stores) -> float:
    """The higher of the prices in the two networks of convolutions."""
    ratios = []
    for file in ("cnn", "cnn-pool"):
        times = (runs(stores, file, method=method)[0]["seconds"] for method in ("whitened-16", "none"))
        ratios.append(truediv(*map(statistics.median, times)))
    return max(ratios)


_ARMS = {"adam": "Adam", "muon": "Muon", "soap": "SOAP"}


def _fields(
    task: str, file: str, among: Settings, worth: str, typical: str, price: Callable[[str], Price],
    rows: str | None = None, optimizers: str = "adam muon soap",
) -> list[Call]:  # fmt: skip
    """A row for each optimizer, with its price."""
    return [
        Call(f"{task}, {_ARMS[optimizer]}",
            f"`Whitened({_ARMS[optimizer]}(…), model, damping=…)`" + ", float64" * (file == "equations"),
            METHODS["whitened"].by_inputs, file, arm(optimizer, "whitened", rows), arm(optimizer), among,
            price(optimizer), optimizer in worth.split(), optimizer in typical.split())
        for optimizer in optimizers.split()
    ]  # fmt: skip


def _characters(task: str, write: str, own: str, bare: str, norm: str, drawn: float | None, price: Price) -> Call:
    # In a network without a normaliser rivals have none either.
    among = {"embedding_lr": None} | ({"norm": "none"} if norm == "none" else {})
    like = {"norm": norm, "embedding_deviation": drawn}
    return Call(task, write, METHODS[own].by_inputs, "norm-free", {**like, "method": own}, {**like, "method": bare},
        among, price, typical=own != "whitened-muon")  # fmt: skip


def _cifar(task: str, write: str, file: str, own: str, optimizer: str, among: Settings, price: Price) -> Call:
    like, wrapper = {"optimizer": optimizer}, METHODS[own].by_inputs or METHODS[own].correction
    return Call(task, write, wrapper, file, {**like, "method": own}, {**like, "method": "none"}, among, price,
        typical=optimizer != "muon")  # fmt: skip


def _in_turn(optimizer: str) -> Price:
    """By ten layers that were timed in turn; ratios are to Adam, whose row is not among them."""
    return _timed("coordinates", f"whitened {_ARMS[optimizer]}", over=_ARMS[optimizer])


def _behind_features(optimizer: str) -> Price:
    def price(stores: Stores) -> float:
        times, name = prices(stores["fourier"]), _ARMS[optimizer]
        return float(times[f"whitened {name}"]["median"] / times[name]["median"])

    return price


CALLS = [
    *_fields("picture, Fourier features, equal time", "fourier", {"time_of": STEPS, "held_out": None},
        "adam muon soap", "adam soap", _behind_features),
    *_fields("picture, ReLU alone", "initialisation", {"network": "relu"}, "", "", _in_turn,
        optimizers="adam soap"),
    *_fields("picture, ReLU, He's initialisation", "initialisation", {"network": "he"}, "adam soap", "", _in_turn,
        optimizers="adam soap"),
    *_fields("picture, ReLU, batches of 512 pixels", "coordinates",
        {"network": "relu", "size": 64, "batch_size": 512}, "", "", lambda optimizer: _untimed),
    *(call for equation in ("burgers", "reaction", "allen-cahn", "korteweg-de-vries", "kovasznay") for call in
      _fields(f"{NONLINEAR[equation]}, a minute", "equations", {"equation": equation}, "soap", "",
        partial(_pace, equation), DERIVATIVES, optimizers="soap")),
    *(_cifar(f"CNN without a normaliser, {name}", f"`Whitened({name}(…), model, rank=16, damping=…)`",
        "cnn-pool-tuned", "whitened-16", name.lower(), {}, _convolutions) for name in ("Adam", "Muon")),
    _characters("transformer without norms, AdamW", "`Whitened(AdamW(…), model, rank=16)`", "whitened-adamw-16",
        "adamw", "none", 1.0, _timed("whitened", "AdamW, batch 16, every 10, rank 16")),
    _characters("transformer without norms, Muon", "`InputScaled(Muon(…), model, hold=True)`", "input-held-muon",
        "muon", "none", 1.0, _timed("input-scaled", "Muon, batch 16, held")),
    _characters("transformer with LayerNorm, AdamW", "`Whitened(AdamW(…), model, rank=16)`", "whitened-adamw-16",
        "adamw", "layernorm", None, _timed("whitened", "AdamW, batch 16, every 10, rank 16")),
    _characters("transformer with LayerNorm, Muon", "`Whitened(Muon(…), model)`", "whitened-muon",
        "muon", "layernorm", None, _timed("whitened", "Muon, batch 16, every 10")),
    _cifar("tanh MLP, SGD", "`GradientOnly(SGD(…), model, BatchIdeal(…))`", "mlp-tuned", "batch-ideal", "sgd",
        {"activation": "tanh"}, _timed("layers",
            "training step [3072, 32, 32, 10], batch 32, SGD, GradientOnly with BatchIdeal")),
]  # fmt: skip


def _option(wrapper: Callable[..., Any], name: str) -> Any:
    """What a wrapper is built with: an option that it was given, or its default."""
    given = getattr(wrapper, "keywords", {})
    known = inspect.signature(getattr(wrapper, "func", type(wrapper))).parameters
    return given.get(name, known[name].default) if name in known else ""


def _name(wrapper: Any) -> str:
    """A wrapper or a rule, with the options that a page names it by."""
    given = [f"{name}={value}" for name, value in getattr(wrapper, "keywords", {}).items() if name in ("rank", "hold")]
    name = getattr(wrapper, "func", type(wrapper)).__name__
    return f"`{name}({', '.join(given)})`" if given else f"`{name}`"


def _calls(stores: Stores, name: str, folder: Path) -> Section:
    rows = list[Row]()
    for call in CALLS:
        measure, both = measure_of(stores, call.file), (call.wrapped, call.bare)
        gain = measure.difference(*call.samples(stores))
        with_it, without = (trials(stores, call.file, {**call.among, **own}) for own in both)
        tried = Cell(f"{with_it}, {without}", {"with": with_it, "without": without})
        price = exact(call.price(stores), ".2f")
        rows.append([call.task, _name(call.wrapper), measure.amount(gain), gain.n, tried, price, call.lead(stores)])
    header = ["task, optimizer", "call", "gain over the optimizer (95 %)", "n", "trials"]
    header += ["price of a step", "lead on the best without this library"]
    caption = (
        "Less is better of nats, and of ×, the factor on an error. A price is in steps of the optimizer alone. Without "
        "norms the best has none either."
    )
    return Section([Table(header, rows, [call.worth for call in CALLS]), caption])


def _settings(stores: Stores, name: str, folder: Path) -> Section:
    rows = list[Row]()
    for call in CALLS:
        wrapped, bare = (call.runs(stores, own)[0]["settings"] for own in (call.wrapped, call.bare))
        damping = exact(wrapped.get("damping", _option(call.wrapper, "damping") or None))
        rank, every = (_option(call.wrapper, option) for option in ("rank", "every"))
        rates = exact(bare["lr"]), exact(wrapped["lr"])
        rows.append([call.task, call.write, *rates, damping, "all" if rank is None else exact(rank or None),
                     exact(every or None)])  # fmt: skip
    header = ["you have", "write", "learning rate, alone", "wrapped", "`damping`", "`rank`", "`every`"]
    worth = [call.worth and call.typical for call in CALLS]
    return Section([Table(header, rows, worth), "Chosen by trials on data that no table shows."])


_OF = (
    "coordinates", "fourier", "initialisation", "equations", "cnn", "cnn-pool", "cnn-pool-tuned", "norm-free",
    "mlp-tuned", "speed",
)  # fmt: skip
DIGESTS = {
    "calls": Digest(_OF, _calls, ("docs/results/index.md",)),
    "settings": Digest(_OF, _settings, ("docs/chooser.md",)),
}
