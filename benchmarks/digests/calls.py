"""What a wrapper gains in every field over its own optimizer, at which price, and with which settings."""

import inspect
import math
import statistics
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from scipy.stats import ttest_1samp, ttest_ind

from ..core.arms import Arm, arm, chosen, errors, label, pace
from ..core.store import Result
from ..core.study import Digest
from ..core.tables import Cell, Row, Section, Table, exact, grouped
from ..methods import METHODS
from ..problems.pictures import psnr
from ..train import DERIVATIVES
from .judges import Stores, reached, runs


class Evidence(NamedTuple):
    """What the runs of a call say, beside those of its optimizer alone."""

    gain: Cell
    n: str
    trials: tuple[int, int]  # with the wrapper, without it
    price: float | None
    rival: Cell
    rates: tuple[float, float]  # learning rates, without the wrapper and with it
    damping: float | None


class Call(NamedTuple):
    """A row: a task, what is written for it, and how its evidence is found."""

    task: str
    write: str
    evidence: Callable[[Stores], Evidence]
    wrapper: Any  # a wrapper or a rule, whose rank and `every` the settings show
    worth: bool = True  # whether pages show what it gains
    typical: bool = True  # whether pages show its settings


def from_this_library(method: str) -> bool:
    """Whether a method's optimizer is wrapped by this library."""
    entry = METHODS[method]
    by_inputs = getattr(entry.by_inputs, "func", entry.by_inputs)
    own = by_inputs is not None and by_inputs.__module__.startswith("adiv_optim")
    return own or entry.correction is not None or entry.gauge is not None


def _amount(value: float, low: float, high: float, spec: str, unit: str) -> Cell:
    ends = [f"{end:,.0f}" if unit == "×" and end >= 100 else f"{end:{spec}}" for end in (low, high)]
    shown = f"× {value:,.2g}" if unit == "×" and value < 100 else f"× {value:,.0f}" if unit == "×" else ""
    text = f"{shown or f'{value:{spec}} {unit}'} [{ends[0]}, {ends[1]}]"
    return Cell(text, {"": value, "low": low, "high": high})


def _pace(stores: Stores, own: list[Result], bare: list[Result]) -> float:
    """The price of a step by the processor time of the runs themselves."""
    return statistics.median(map(pace, own)) / statistics.median(map(pace, bare))


def _untimed(stores: Stores, own: list[Result], bare: list[Result]) -> None:
    """The price of a step where runs are of different days, and no rows were timed in turn."""


def _whitened_picture(optimizer: str) -> Callable[..., float]:
    """The price of a step with all pixels, by rows that were timed in turn."""

    def price(stores: Stores, own: list[Result], bare: list[Result]) -> float:
        rows = next(r for r in stores["speed"].read() if r["key"] == "coordinates")["rows"]
        times = {row["what"]: row["time_ratio"]["median"] for row in rows} | {"Adam": 1.0}
        return float(times[f"whitened {optimizer}"] / times[optimizer])

    return price


def _paired(
    stores: Stores, *, file: str, wanted: Mapping[str, Any], optimizer: str, rows: str | None = None,
    searched: Mapping[str, Any], shown: Callable[[float], float], unit: str,
    price: Callable[..., float | None] = _pace,
) -> Evidence:  # fmt: skip
    """A call whose arms learned the same problems, by the paired t test's interval."""
    arms = grouped(chosen(runs(stores, file, **wanted)), arm)
    own, bare = Arm("none", optimizer, "whitened", rows=rows), Arm("none", optimizer, "none")
    lower = unit == "×"

    def gain(other: Arm) -> Cell:
        ours, theirs = errors(arms[own]), errors(arms[other])
        differences = [shown(ours[key]) - shown(theirs[key]) for key in ours if key in theirs]
        low, high = ttest_1samp(differences, 0.0).confidence_interval(0.95)
        mean, spec = statistics.fmean(differences), ".2g" if lower else "+.1f"
        return _amount(10**mean, 10**low, 10**high, spec, unit) if lower else _amount(mean, low, high, spec, unit)

    rivals = [key for key in arms if not from_this_library(key[2])]
    best = (min if lower else max)(rivals, key=lambda key: statistics.fmean(map(shown, errors(arms[key]).values())))
    trials = {
        (arm(r), r["settings"]["lr"], r["settings"].get("damping"))
        for r in stores[file].read("search")
        if all(r["settings"].get(name) == value for name, value in searched.items())
    }
    counts = [sum(key == wanted for key, *_ in trials) for wanted in (own, bare)]
    first, plain = arms[own][0]["settings"], arms[bare][0]["settings"]
    return Evidence(
        gain(bare),
        f"{len(arms[own])}",
        (counts[0], counts[1]),
        price(stores, arms[own], arms[bare]),
        _rival("itself" if best == bare else label(arms[best][0]["settings"]), gain(best)),
        (plain["lr"], first["lr"]),
        first.get("damping"),
    )


def _rival(name: str, gain: Cell) -> Cell:
    if name == "itself":
        return Cell("the optimizer alone", {"": "the optimizer alone"})
    return Cell(
        f"{name}: {gain.text}", {"": name} | {f"difference {key}".strip(): v for key, v in gain.numbers.items()}
    )


_Settings = Mapping[str, Any]
#: What makes a run that others of its file are compared with.
_KEYS = ("norm", "method", "optimizer", "embedding_deviation", "embedding_lr")


def _settings_of(results: list[Result], values: list[float], lower: bool) -> _Settings:
    """The settings of the runs that reached some values."""
    last = {r["test_loss"] if lower else tuple(r["test_accuracy"][-1]): r["settings"] for r in results}
    return last[values[0] if lower else tuple(values)]


def _unpaired(
    stores: Stores, *, file: str, own: _Settings, bare: _Settings, among: _Settings, price: Callable[[Stores], float],
    lower: bool = False,
) -> Evidence:  # fmt: skip
    """A call whose arms have seeds of their own, by Welch's interval; rivals are the runs with some settings."""
    unit, spec = ("nats", "+z.3f") if lower else ("points", "+z.1f")

    def sample(settings: _Settings) -> list[float]:
        return reached(stores, file, **settings)

    def gain(other: list[float]) -> Cell:
        low, high = ttest_ind(ours, other, equal_var=False).confidence_interval(0.95)
        return _amount(statistics.fmean(ours) - statistics.fmean(other), low, high, spec, unit)

    ours, theirs = sample(own), sample(bare)
    places = grouped(runs(stores, file, **among), lambda r: tuple((k, r["settings"].get(k)) for k in _KEYS))
    rivals = {key: sample(dict(key)) for key in places if not from_this_library(str(dict(key)["method"]))}
    best = (min if lower else max)(rivals, key=lambda key: statistics.fmean(rivals[key]))
    name = "itself" if rivals[best] == theirs else _label(dict(best))

    def trials(settings: _Settings) -> int:
        return sum(settings.items() <= {k: r["settings"].get(k) for k in settings}.items()
                   for r in stores[file].read("search"))  # fmt: skip

    results = stores[file].read()
    first, plain = (_settings_of(results, values, lower) for values in (ours, theirs))
    n = f"{len(ours)}, {len(theirs)}"
    return Evidence(
        gain(theirs), n, (trials(own), trials(bare)), price(stores), _rival(name, gain(rivals[best])),
        (plain["lr"], first["lr"]), first.get("damping"),
    )  # fmt: skip


def _label(settings: _Settings) -> str:
    """A rival: its normaliser or method, and its optimizer."""
    method = METHODS[settings["method"]]
    norms = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm", "none": "no normaliser"}
    if method.applies == "language":
        drawn = ", embeddings of 1" if settings["embedding_deviation"] == 1.0 else ""
        return f"{method.label}, {norms.get(settings['norm'], settings['norm'])}{drawn}"
    name = "no normaliser" if settings["method"] == "none" else method.label
    return f"{name}, {({'sgd': 'SGD', 'adam': 'Adam', 'muon': 'Muon', 'soap': 'SOAP'}).get(settings['optimizer'])}"


def _timed(suite: str, *parts: str) -> Callable[[Stores], float]:
    """The price of a step by the first row of a suite of timings whose name has all parts."""

    def price(stores: Stores) -> float:
        rows = next(r for r in stores["speed"].read() if r["key"] == suite)["rows"]
        return float(next(row for row in rows if all(p in row["what"] for p in parts))["time_ratio"]["median"])

    return price


def _convolutions(stores: Stores) -> float:
    """The higher of the prices in the two networks of convolutions."""
    ratios = []
    for file in ("cnn", "cnn-pool"):
        own, bare = (runs(stores, file, method=method)[0]["seconds"] for method in ("whitened-16", "none"))
        ratios.append(statistics.median(own) / statistics.median(bare))
    return max(ratios)


def _whitened(optimizer: str) -> Any:
    return METHODS["whitened-16" if optimizer == "16" else "whitened"].by_inputs


_ARMS = {"adam": "Adam", "muon": "Muon", "soap": "SOAP"}


def _pictures(task: str, network: str, worth: set[str], **more: Any) -> list[Call]:
    wanted = {"network": network, "size": 64, "batch_size": None, **more}
    return [
        Call(f"{task}, {name}", f"`Whitened({name}(…), model, damping=…)`", partial(
            _paired, file="coordinates", wanted=wanted, searched=wanted, optimizer=optimizer, shown=psnr, unit="dB",
            price=_untimed if more else _whitened_picture(name)), _whitened(optimizer), optimizer in worth,
            network == "fourier" and optimizer != "muon")
        for optimizer, name in _ARMS.items()
    ]  # fmt: skip


def _solved(task: str, equation: str, rows: str | None, length: Mapping[str, Any], worth: set[str]) -> list[Call]:
    points = {"equation": equation, "points": "fixed"}
    return [
        Call(f"{task}, {name}", f"`Whitened({name}(…), model, damping=…)`, float64", partial(
            _paired, file="poisson", wanted={**points, **length}, searched=points, rows=rows,
            optimizer=optimizer, shown=math.log10, unit="×"), _whitened(optimizer), optimizer in worth,
            equation == "poisson" and optimizer == "soap")
        for optimizer, name in _ARMS.items()
    ]  # fmt: skip


def _text(norm: str, method: str, drawn: float | None) -> _Settings:
    return {"norm": norm, "method": method, "embedding_deviation": drawn, "embedding_lr": None}


def _characters(
    task: str, write: str, own: str, bare: str, norm: str, drawn: float | None, price: Callable[[Stores], float]
) -> Call:
    # In a network without a normaliser rivals have none either.
    among = {"embedding_lr": None} | ({"norm": "none"} if norm == "none" else {})
    return Call(task, write, partial(
        _unpaired, file="norm-free", own=_text(norm, own, drawn), bare=_text(norm, bare, drawn), among=among,
        price=price, lower=True), METHODS[own].by_inputs, typical=own != "whitened-muon")  # fmt: skip


def _cifar(task: str, write: str, file: str, own: str, optimizer: str, price: Callable[[Stores], float]) -> Call:
    arms: list[_Settings] = [{"method": method, "optimizer": optimizer} for method in (own, "none")]
    if file == "mlp-tuned":
        arms = [{**each, "activation": "tanh"} for each in arms]
    among = {"activation": "tanh"} if file == "mlp-tuned" else {}
    wrapper = METHODS[own].by_inputs or METHODS[own].correction
    return Call(task, write, partial(
        _unpaired, file=file, own=arms[0], bare=arms[1], among=among, price=price),
        wrapper, typical=optimizer != "muon")  # fmt: skip


CALLS = [
    *_pictures("picture, Fourier features", "fourier", set(_ARMS)),
    *_pictures("picture, ReLU alone", "relu", {"adam", "soap"}),
    *_pictures("picture, ReLU, batches of 512 pixels", "relu", set(), batch_size=512),
    *_solved("Poisson's equation, a minute", "poisson", None, {"seconds": 60.0}, {"adam", "soap"}),
    *_solved("heat equation, 2,000 steps", "heat", DERIVATIVES, {"steps": 2000}, {"adam", "soap"}),
    *(_cifar(f"CNN without a normaliser, {name}", f"`Whitened({name}(…), model, rank=16, damping=…)`",
        "cnn-pool-tuned", "whitened-16", name.lower(), _convolutions) for name in ("Adam", "Muon")),
    _characters("transformer without norms, AdamW", "`Whitened(AdamW(…), model, rank=16)`", "whitened-adamw-16",
        "adamw", "none", 1.0, _timed("whitened", "AdamW, batch 16, every 10, rank 16")),
    _characters("transformer without norms, Muon", "`InputScaled(Muon(…), model, hold=True)`", "input-held-muon",
        "muon", "none", 1.0, _timed("input-scaled", "Muon, batch 16, held")),
    _characters("transformer with LayerNorm, AdamW", "`Whitened(AdamW(…), model, rank=16)`", "whitened-adamw-16",
        "adamw", "layernorm", None, _timed("whitened", "AdamW, batch 16, every 10, rank 16")),
    _characters("transformer with LayerNorm, Muon", "`Whitened(Muon(…), model)`", "whitened-muon",
        "muon", "layernorm", None, _timed("whitened", "Muon, batch 16, every 10")),
    _cifar("tanh MLP, SGD", "`GradientOnly(SGD(…), model, BatchIdeal(…))`", "mlp-tuned", "batch-ideal", "sgd",
        _timed("layers", "training step [3072, 32, 32, 10]", "GradientOnly with BatchIdeal")),
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
    rows, worth = list[Row](), list[bool]()
    for call in CALLS:
        found = call.evidence(stores)
        with_it, without = found.trials
        trials = Cell(f"{with_it}, {without}", {"with": with_it, "without": without})
        rows.append(
            [call.task, _name(call.wrapper), found.gain, found.n, trials, exact(found.price, ".2f"), found.rival]
        )
        worth.append(call.worth)
    header = ["task, optimizer", "call", "gain over the optimizer (95 %)", "n", "trials"]
    header += ["price of a step", "lead on the best without this library"]
    caption = (
        "Less is better of nats, and of ×, the factor on an error. n counts crops or seeds; trials are those of the "
        "wrapped and of the bare optimizer, in whose steps the price is. Without norms the best has none either."
    )
    return Section([Table(header, rows, worth), caption])


def _settings(stores: Stores, name: str, folder: Path) -> Section:
    rows, worth = list[Row](), list[bool]()
    for call in CALLS:
        found = call.evidence(stores)
        damping = exact(found.damping) if found.damping is not None else exact(_option(call.wrapper, "damping") or None)
        rank, every = (_option(call.wrapper, option) for option in ("rank", "every"))
        rates = [exact(rate) for rate in found.rates]
        rows.append([call.task, call.write, *rates, damping, "all" if rank is None else exact(rank or None),
                     exact(every or None)])  # fmt: skip
        worth.append(call.worth and call.typical)
    header = ["you have", "write", "learning rate, alone", "wrapped", "`damping`", "`rank`", "`every`"]
    return Section([Table(header, rows, worth), "Chosen by trials on data that no table shows."])


_OF = ("coordinates", "poisson", "cnn", "cnn-pool", "cnn-pool-tuned", "norm-free", "mlp-tuned", "speed")
DIGESTS = {
    "calls": Digest(_OF, _calls, ("docs/results/index.md",)),
    "settings": Digest(_OF, _settings, ("docs/chooser.md",)),
}
