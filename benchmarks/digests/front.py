"""The rows of README: what a wrapper does for each kind of network, in two numbers."""

import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ..core.arms import arm, errors
from ..core.store import Result
from ..core.study import Digest
from ..core.tables import Cell, Section, Table
from ..problems.pictures import psnr
from ..studies.fourier import prices
from .calls import CALLS
from .judges import Stores, reached


class Front(NamedTuple):
    """What stands in a cell: the optimizer alone, with the wrapper, and the price of a step."""

    alone: float
    wrapped: float
    unit: str
    price: float


def _learned(optimizer: str, name: str) -> Callable[[Stores], Front]:
    """PSNR in equal time behind Fourier features, the mean over crops."""

    def front(stores: Stores) -> Front:
        runs: list[Result] = stores["fourier"].read()
        in_time = [r for r in runs if "time_of" in r["settings"] and "held_out" not in r["settings"]]

        def mean(method: str) -> float:
            own = [r for r in in_time if arm(r)[:3] == ("none", optimizer, method)]
            return statistics.fmean(psnr(error) for error in errors(own).values())

        times = prices(stores["fourier"])
        price = times[f"whitened {name}"]["median"] / times[name]["median"]
        return Front(mean("none"), mean("whitened"), "dB", price)

    return front


def _accuracy(file: str, own: str, optimizer: str, task: str, **more: str) -> Callable[[Stores], Front]:
    def front(stores: Stores) -> Front:
        alone, wrapped = (
            statistics.fmean(reached(stores, file, method, optimizer=optimizer, **more)) for method in ("none", own)
        )
        price = next(call for call in CALLS if call.task == task).evidence(stores).price
        assert price is not None
        return Front(alone, wrapped, "%", price)

    return front


_SAID = "[as well without it](docs/results/index.md)"
ROWS: list[tuple[str, str, Callable[[Stores], Front] | None]] = [
    ("a picture, as above, SOAP", "`Whitened(SOAP(…), model, damping=0.1)`", _learned("soap", "SOAP")),
    ("the same, Adam", "`Whitened(Adam(…), model, damping=0.1)`", _learned("adam", "Adam")),
    ("a CNN without norms, Adam", "`Whitened(Adam(…), model, rank=16, damping=0.1)`", partial(
        _accuracy("cnn-pool-tuned", "whitened-16", "adam", "CNN without a normaliser, Adam"))),
    ("a small tanh MLP, plain SGD", "`GradientOnly(SGD(…), model, BatchIdeal(damping=0.3, per_sample=False))`", partial(
        _accuracy("mlp-tuned", "batch-ideal", "sgd", "tanh MLP, SGD", activation="tanh"))),
    ("a nonlinear differential equation", "[`GaussNewton(network)`](docs/gauss-newton.md), no rate to tune", None),
    ("a network with its norms, Muon", "**don't**: it trains about " + _SAID, None),
]  # fmt: skip


def _front(stores: Stores, name: str, folder: Path) -> Section:
    rows = []
    for have, write, find in ROWS:
        cells: list[str | Cell] = ["", ""]
        if find is not None:
            found = find(stores)
            text = f"{found.alone:.1f} → {found.wrapped:.1f} {found.unit}"
            cells = [
                Cell(text, {"alone": found.alone, "wrapped": found.wrapped}),
                Cell(f"{found.price:.1f} ×", {"": found.price}),
            ]
        rows.append([have, write, *cells])
    muon = statistics.fmean(reached(stores, "cnn-pool-tuned", "none", optimizer="muon"))
    caption = (
        "Pictures: PSNR after equal time, the mean of ten others. Networks: test accuracy on CIFAR-10, the mean of "
        f"five seeds, after equal epochs and not equal time; Muon alone trains that CNN to {muon:.1f} %. A price is "
        "that of a step, in steps of the optimizer alone."
    )
    return Section([Table(["you have", "write", "alone → wrapped", "price"], rows), caption])


DIGESTS = {
    "front": Digest(("fourier", "cnn", "cnn-pool", "cnn-pool-tuned", "mlp-tuned", "speed"), _front, ("README.md",)),
}
