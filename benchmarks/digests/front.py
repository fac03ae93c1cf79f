"""The rows of README: what a wrapper does for each kind of network, in two numbers."""

import statistics
from pathlib import Path

from ..core.study import Digest
from ..core.tables import Cell, Section, Table
from .calls import CALLS
from .reached import ACCURACY, Settings, Stores, measure_of, reached

_SAID = "[as well without it](docs/results/index.md)"
#: In place of a task: the equation of README's picture, which GaussNewton solves and no wrapper.
BURGERS = "burgers"
#: What a reader has, what is written, and the task of the table of calls whose runs are compared.
ROWS = [
    ("a picture, as above, SOAP", "`Whitened(SOAP(…), model, damping=0.1)`",
        "picture, Fourier features, equal time, SOAP"),
    ("the same, Adam", "`Whitened(Adam(…), model, damping=0.1)`", "picture, Fourier features, equal time, Adam"),
    ("a CNN without norms, Adam", "`Whitened(Adam(…), model, rank=16, damping=0.1)`",
        "CNN without a normaliser, Adam"),
    ("a small tanh MLP, plain SGD", "`GradientOnly(SGD(…), model, BatchIdeal(damping=0.3, per_sample=False))`",
        "tanh MLP, SGD"),
    ("a nonlinear differential equation, SOAP", "[`GaussNewton(network)`](docs/gauss-newton.md), no rate to tune",
        BURGERS),
    ("a network with its norms, Muon", "**don't**: it trains about " + _SAID, ""),
]  # fmt: skip


def _mean(stores: Stores, file: str, settings: Settings) -> float:
    return measure_of(stores, file).mean(reached(stores, file, **settings))


def _error(stores: Stores, optimizer: str) -> float:
    """The median of an optimizer's errors on Burgers' equation."""
    return statistics.median(
        reached(stores, "equations", equation=BURGERS, optimizer=optimizer, method="none").values()
    )


def _front(stores: Stores, name: str, folder: Path) -> Section:
    rows, calls = [], {call.task: call for call in CALLS}
    for have, write, task in ROWS:
        cells: list[str | Cell] = ["", ""]
        if task == BURGERS:
            alone, own = (_error(stores, optimizer) for optimizer in ("soap", "gauss-newton"))
            cells[0] = Cell(f"error {alone:.0e} → {own:.0e}", {"alone": alone, "wrapped": own})
        elif task:
            call = calls[task]
            alone, wrapped = (_mean(stores, call.file, {**call.among, **own}) for own in (call.bare, call.wrapped))
            unit = "%" if measure_of(stores, call.file) is ACCURACY else "dB"
            price = call.price_of_step(stores) or 0.0
            cells = [
                Cell(f"{alone:.1f} → {wrapped:.1f} {unit}", {"alone": alone, "wrapped": wrapped}),
                Cell(f"{price:.1f} ×", {"": price}),
            ]
        rows.append([have, write, *cells])
    muon, normalised = (
        _mean(stores, "cnn-pool-tuned", {"method": method, "optimizer": "muon"}) for method in ("none", "batchnorm")
    )
    dyt = _mean(stores, "mlp-tuned", {"method": "dyt", "optimizer": "sgd", "activation": "tanh"})
    caption = (
        "Pictures: PSNR after equal time, mean of ten others. Networks: test accuracy on CIFAR-10, mean of five "
        f"seeds, after equal epochs, not time, with more trials for the wrapped; Muon alone trains that CNN to "
        f"{muon:.1f} %, with BatchNorm to {normalised:.1f}; DyT that MLP to {dyt:.1f}. The equation: Burgers', "
        "relative error after a minute, median of five seeds; self-scaled BFGS solves it to "
        f"{_error(stores, 'self-scaled-bfgs'):.0e}. Prices are of a step, in steps of the optimizer alone."
    )
    return Section([Table(["you have", "write", "alone → wrapped", "price"], rows), caption])


DIGESTS = {
    "front": Digest(
        ("fourier", "equations", "cnn", "cnn-pool", "cnn-pool-tuned", "mlp-tuned", "speed"), _front, ("README.md",)
    ),
}
