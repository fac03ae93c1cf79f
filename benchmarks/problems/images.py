"""Networks for images: the settings of a run, the networks as every method builds them, and what papers leave open."""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain, pairwise
from math import isqrt
from typing import Any

import torch
from torch import Tensor, nn

from adiv_optim import gauge

from ..core.runs import Run, fingerprint
from ..core.store import Result
from ..core.tables import machine
from ..data import Dataset
from ..methods import METHODS, Method
from ..optimizers import OF_PARAMETERS

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {"tanh": nn.Tanh, "leaky-relu": nn.LeakyReLU, "identity": nn.Identity}


class Skip(nn.Sequential):
    """Its layers one after the other, added to their input."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


def mlp(method: Method, sizes: tuple[int, ...], activation: str, *, skips: bool = False) -> nn.Sequential:
    """Affine layers of these sizes, each behind the method's normaliser, activations between them.

    Skips lead around activation, normaliser and affine layer of each hidden width but the first. They are this
    library's reading: the Appendix B.3 of the paper that wants them has no network of its own.
    """
    first, *others = (method.affine(inputs, outputs) for inputs, outputs in pairwise(sizes))
    blocks = [[ACTIVATIONS[activation](), *layers] for layers in others]
    if skips:
        if len(set(sizes[1:-1])) > 1:
            raise ValueError(f"hidden is {list(sizes[1:-1])}; skips need hidden layers of one width.")
        blocks[:-1] = [[Skip(*layers)] for layers in blocks[:-1]]
    return nn.Sequential(*first, *chain.from_iterable(blocks))


def cnn(method: Method, sizes: tuple[int, ...], activation: str, *, pool: bool) -> nn.Sequential:
    """3×3 convolutions of stride 2, an activation behind each, and an affine layer, all behind the method's normaliser.

    Sizes are features of the flattened images, channels, classes; each convolution halves the images. The pixels that
    are left are averaged, if pooled, or handed on as they are.
    """
    features, *channels, classes = sizes
    inputs = next((channels for channels in (1, 3) if isqrt(features // channels) ** 2 * channels == features), 0)
    if not inputs:
        raise ValueError(f"images have {features} numbers, no square of 1 or 3 channels; crop them.")
    side = isqrt(features // inputs)
    layers: list[nn.Module] = [nn.Unflatten(1, (inputs, side, side))]
    for outputs in channels:
        layers += method.normalizers((inputs, side, side))
        layers += [method.convolution(inputs, outputs, 3, stride=2, padding=1), ACTIVATIONS[activation]()]
        inputs, side = outputs, (side + 1) // 2
    if pool:
        layers.append(nn.AdaptiveAvgPool2d(1))
        side = 1
    return nn.Sequential(*layers, nn.Flatten(), *method.affine(inputs * side**2, classes))


#: (method, sizes from features to classes, activation) → network; None is fully connected.
NETWORKS: dict[str | None, Callable[[Method, tuple[int, ...], str], nn.Sequential]] = {
    None: mlp,
    "residual": partial(mlp, skips=True),
    "cnn-pool": partial(cnn, pool=True),
    "cnn": partial(cnn, pool=False),
}


#: What may be read otherwise, where a paper leaves it open.
DEPARTURES = {"centred": "pixels from −1 to 1", "he": "He's normal weights, biases 0"}


def depart(data: Dataset, name: str) -> Dataset:
    """The data as a departure has it: its pixels are from 0 to 1 but where they are centred."""
    if name != "centred":
        return data
    return data._replace(train_inputs=2 * data.train_inputs - 1, test_inputs=2 * data.test_inputs - 1)


def take(data: Dataset, index: Tensor) -> tuple[Tensor, Tensor]:
    """Gather the rows at `index`, of any shape."""
    # index_select copies whole rows; indexing with a tensor goes element by element on the CPU.
    inputs = data.train_inputs.index_select(0, index.flatten())
    return inputs.view(*index.shape, -1), data.train_labels[index]


def held_out(data: Dataset) -> Dataset:
    """The training set split in nine tenths to train on and one to choose settings by."""
    order = torch.randperm(len(data.train_labels), generator=torch.Generator().manual_seed(0))
    order = order.to(data.train_labels.device)
    train, test = order.split([len(order) - len(order) // 10, len(order) // 10])
    return Dataset(data.train_inputs[train], data.train_labels[train], data.train_inputs[test], data.train_labels[test])


BACKENDS = ("ensemble", "loop")
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
    backend: str = "ensemble"  # all seeds as one batched program; or one after the other ("loop")
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
            activation=ACTIVATIONS, optimizer=OF_PARAMETERS, departure=[None, *DEPARTURES],
        )  # fmt: skip
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


@torch.no_grad()
def build_model(run: ImageRun, data: Dataset, seed: int) -> nn.Sequential:
    """Draw the network of one seed; on the CPU, so that every device starts from the same numbers."""
    torch.manual_seed(seed)
    method = METHODS[run.method]
    model = NETWORKS[run.network](method, (data.features, *run.hidden, data.classes), run.activation)
    if run.departure == "he":
        layers: list[Any] = [layer for layer in model.modules() if hasattr(layer, "weight")]
        for layer in layers:
            nn.init.kaiming_normal_(layer.weight)
            nn.init.zeros_(layer.bias)
    if run.gain is not None:
        for parameter in model.parameters():
            parameter.mul_(run.gain)
    return model.to(run.device, data.train_inputs.dtype)


def build_models(run: ImageRun, data: Dataset) -> list[nn.Module]:
    """Draw the networks of all seeds; of a rescaled run, the first seed's in as many gauges."""
    if run.rescaled is None:
        return [build_model(run, data, seed) for seed in run.seeds]
    model = build_model(run, data, run.seeds[0])
    graph = gauge.trace(model, data.train_inputs[:2])
    drawn = (torch.Generator().manual_seed(seed) for seed in run.seeds)
    scales = [gauge.random_gauge(graph, run.rescaled, generator=generator) for generator in drawn]
    return [gauge.apply_gauge(deepcopy(model), graph, each) for each in scales]


def data_label(name: str) -> str:
    """What tables and figures call a data set. The JPEG copy's pixels differ slightly from the original release's."""
    return {"imagefolder:cifar10-jpeg": "CIFAR-10 (JPEG copy)", "cifar10": "CIFAR-10"}.get(name, name)


def subject(results: Sequence[Result]) -> str:
    """Data of some runs, and their layer sizes where these are the same."""
    sizes = {str([r["features"], *r["settings"]["hidden"], r["classes"]]) for r in results}
    return ", ".join([data_label(results[0]["settings"]["data"]), *(sizes if len(sizes) == 1 else ())])


def network(result: Result) -> str:
    """Data, layer sizes and batch size of a run."""
    return f"{subject([result])}, batch {result['settings']['batch_size']}"


def trained(results: Sequence[Result]) -> str:
    """How long some runs have trained, by how many seeds and where, for the end of a caption."""
    settings, of_devices = results[0]["settings"], {r["settings"]["device"]: r["environment"] for r in results[::-1]}
    length = f"{settings['epochs']} epoch(s), {len(settings['seeds'])} seed(s)"
    return f"{length}. {' '.join(machine(environment, device) for device, environment in of_devices.items())}"
