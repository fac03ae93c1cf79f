"""One method on one network for images, all seeds: the settings of a run."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from ..core.runs import Run, fingerprint
from ..methods import METHODS, Method
from .networks import ACTIVATIONS, DEPARTURES, NETWORKS, OPTIMIZERS

BACKENDS = ("ensemble", "loop", "jacobian")
SCHEDULES = ("constant", "cosine")


@dataclass(frozen=True)
class ImageRun(Run):
    """The settings of one run."""

    activation: str
    hidden: tuple[int, ...] = (32, 32)  # widths of the hidden layers; of a convolutional network, the channels
    batch_size: int = 32  # an epoch drops the last incomplete batch
    optimizer: str = "adam"
    lr: float = 1e-3  # before the method's own factor
    schedule: str = "constant"  # or "cosine", from the rate to 0 over the run
    epochs: int = 20
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)  # each draws its own initialisation and its own order of samples
    #: All seeds as one batched program, one after the other ("loop"), or likewise by explicit Jacobians ("jacobian").
    backend: str = "ensemble"
    validation: bool = False  # hold out a tenth of the training set and measure accuracy on it
    weight_decay: float | None = None
    #: Start every seed from the first one's network with its hidden units rescaled at random, by e^s with s normal of
    #: this deviation, and let all see the same batches: they differ in nothing else.
    rescaled: float | None = None
    network: str | None = None  # a key of `NETWORKS`; None is fully connected
    gain: float | None = None  # what all parameters are multiplied by before training
    departure: str | None = None  # a key of `DEPARTURES`: what a paper leaves open, read otherwise

    kind = "images"

    def __post_init__(self) -> None:
        self.check(
            ("batch_size", "lr", "epochs", "gain"), schedule=SCHEDULES, backend=BACKENDS, network=NETWORKS,
            activation=ACTIVATIONS, optimizer=OPTIMIZERS, departure=[None, *DEPARTURES],
        )  # fmt: skip
        if not self.seeds:
            raise ValueError("seeds is empty; a run needs at least one.")
        if not all(width > 0 for width in self.hidden):
            raise ValueError(f"hidden is {list(self.hidden)}; every width must be positive.")
        if METHODS[self.method].by_inputs is not None and self.backend != "loop":
            raise ValueError(f"method {self.method!r} sees forward passes, which only backend 'loop' makes one by one.")

    def computes(self) -> str:
        """A hash of what its method computes on a network of its kind."""
        return _computes(METHODS[self.method], self.network)


@cache
def _computes(method: Method, network: str | None) -> str:
    # More rows and columns than a whitening of rank 16 tells apart.
    inputs = torch.arange(24 * 64, dtype=torch.float64).square().sin().view(24, 64)
    hidden = {None: (20,), "residual": (20, 20)}.get(network, (3, 3))
    model = NETWORKS[network](method, (64, *hidden, 3), "leaky-relu")
    return fingerprint(method, model, inputs, torch.arange(24) % 3)


def again(result: Mapping[str, Any], **own: Any) -> ImageRun:
    """The run of a result, with some settings of one's own."""
    settings = {name: tuple(v) if isinstance(v, list) else v for name, v in result["settings"].items()}
    return ImageRun(**{**settings, **own})
