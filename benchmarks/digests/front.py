"""The rows of README: what a wrapper does for each kind of network, in two numbers."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ..core.study import Digest
from ..core.tables import Cell, Section, Table
from ..studies.fourier import STEPS, prices
from .calls import CALLS
from .reached import ACCURACY, Settings, Stores, best_runs, measure_of, values


class Front(NamedTuple):
    """What a row compares."""

    file: str
    alone: Settings
    wrapped: Settings
    price: Callable[[Stores], float]  # of a step


def _learned(optimizer: str, name: str) -> Front:
    """A picture in equal time behind Fourier features."""

    def price(stores: Stores) -> float:
        times = prices(stores["fourier"])
        return float(times[f"whitened {name}"]["median"] / times[name]["median"])

    common = {"norm": "none", "optimizer": optimizer, "time_of": STEPS, "held_out": None}
    return Front("fourier", {**common, "method": "none"}, {**common, "method": "whitened"}, price)


def _called(task: str) -> Front:
    """A row of the table of calls."""
    call = next(call for call in CALLS if call.task == task)
    return Front(call.file, {**call.among, **call.bare}, {**call.among, **call.wrapped},
                 lambda stores: float(call.evidence(stores).price or 0.0))  # fmt: skip


def _mean(stores: Stores, file: str, settings: Settings) -> float:
    return measure_of(stores, file).mean(values(best_runs(stores, file, **settings)))


_SAID = "[as well without it](docs/results/index.md)"
ROWS: list[tuple[str, str, Front | None]] = [
    ("a picture, as above, SOAP", "`Whitened(SOAP(…), model, damping=0.1)`", _learned("soap", "SOAP")),
    ("the same, Adam", "`Whitened(Adam(…), model, damping=0.1)`", _learned("adam", "Adam")),
    ("a CNN without norms, Adam", "`Whitened(Adam(…), model, rank=16, damping=0.1)`",
        _called("CNN without a normaliser, Adam")),
    ("a small tanh MLP, plain SGD", "`GradientOnly(SGD(…), model, BatchIdeal(damping=0.3, per_sample=False))`",
        _called("tanh MLP, SGD")),
    ("a nonlinear differential equation", "[`GaussNewton(network)`](docs/gauss-newton.md), no rate to tune", None),
    ("a network with its norms, Muon", "**don't**: it trains about " + _SAID, None),
]  # fmt: skip


def _front(stores: Stores, name: str, folder: Path) -> Section:
    rows = []
    for have, write, front in ROWS:
        cells: list[str | Cell] = ["", ""]
        if front is not None:
            alone, wrapped = (_mean(stores, front.file, settings) for settings in (front.alone, front.wrapped))
            unit, price = "%" if measure_of(stores, front.file) is ACCURACY else "dB", front.price(stores)
            cells = [
                Cell(f"{alone:.1f} → {wrapped:.1f} {unit}", {"alone": alone, "wrapped": wrapped}),
                Cell(f"{price:.1f} ×", {"": price}),
            ]
        rows.append([have, write, *cells])
    muon = _mean(stores, "cnn-pool-tuned", {"method": "none", "optimizer": "muon"})
    caption = (
        "Pictures: PSNR after equal time, the mean of ten others. Networks: test accuracy on CIFAR-10, the mean of "
        f"five seeds, after equal epochs and not equal time; Muon alone trains that CNN to {muon:.1f} %. A price is "
        "that of a step, in steps of the optimizer alone."
    )
    return Section([Table(["you have", "write", "alone → wrapped", "price"], rows), caption])


DIGESTS = {
    "front": Digest(("fourier", "cnn", "cnn-pool", "cnn-pool-tuned", "mlp-tuned", "speed"), _front, ("README.md",)),
}
