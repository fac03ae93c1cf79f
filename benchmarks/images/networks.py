"""The networks compared, as every method builds them, their optimizers, and what papers leave open of both."""

from collections.abc import Callable, Iterable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from math import isqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from ..data import Dataset
from ..methods import Method

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {"tanh": nn.Tanh, "leaky-relu": nn.LeakyReLU, "identity": nn.Identity}


def mlp(method: Method, sizes: tuple[int, ...], activation: str) -> nn.Sequential:
    """Affine layers of these sizes, each behind the method's normaliser, activations between them."""
    first, *others = (method.affine(inputs, outputs) for inputs, outputs in pairwise(sizes))
    return nn.Sequential(*first, *(layer for each in others for layer in (ACTIVATIONS[activation](), *each)))


class Skip(nn.Sequential):
    """Its layers one after the other, added to their input."""

    def forward(self, x: Tensor) -> Tensor:
        """Map rows to rows of the same size."""
        return x + super().forward(x)


def residual(method: Method, sizes: tuple[int, ...], activation: str) -> nn.Sequential:
    """An affine layer, a skip around activation, normaliser and affine layer for each further width, and the outputs.

    The paper's Appendix B.3 has no network of its own: this is the one of `mlp` with skips around its hidden layers.
    """
    if len(set(sizes[1:-1])) > 1:
        raise ValueError(f"hidden is {list(sizes[1:-1])}; skips need hidden layers of one width.")
    first, *inside, last = (method.affine(inputs, outputs) for inputs, outputs in pairwise(sizes))
    act = ACTIVATIONS[activation]
    return nn.Sequential(*first, *(Skip(act(), *layers) for layers in inside), act(), *last)


def cnn(method: Method, sizes: tuple[int, ...], activation: str, *, pool: bool) -> nn.Sequential:
    """3×3 convolutions of stride 2, an activation behind each, and an affine layer, all behind the method's normaliser.

    Sizes are features of the flattened images, channels, classes; each convolution halves the images. The pixels that
    are left are averaged, if pooled, or handed on as they are.
    """
    features, *channels, classes = sizes
    inputs = next((channels for channels in (1, 3) if isqrt(features // channels) ** 2 * channels == features), None)
    if inputs is None:
        raise ValueError(f"{features} features are no square image of 1 or 3 channels; choose --network mlp.")
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
    "residual": residual,
    "cnn-pool": partial(cnn, pool=True),
    "cnn": partial(cnn, pool=False),
}


def _peer(name: str) -> Callable[..., Optimizer]:
    if find_spec("pytorch_optimizer") is None:
        raise ValueError(f"optimizer {name!r} needs the package pytorch_optimizer; pip install '.[peers]' brings it.")
    return getattr(import_module("pytorch_optimizer"), name)


def _muon(parameters: Iterable[Tensor], *, weight_decay: float = 0.0, fused: bool, **options: Any) -> Any:
    """Muon for the matrices and kernels inside a network, Adam for its last layer and its vectors."""
    everything = list(parameters)
    inside = [parameter for parameter in everything if parameter.dim() > 1][:-1]
    rest = [parameter for parameter in everything if all(parameter is not other for other in inside)]
    options["weight_decay"] = weight_decay
    # Steps of Adam's size: so one rate means much the same for both.
    groups = [
        {"params": inside, "use_muon": True, "use_adjusted_lr": True, **options},
        {"params": rest, "use_muon": False, "betas": (0.9, 0.999), "eps": 1e-8, **options},
    ]
    return _peer("Muon")([group for group in groups if group["params"]])


def _soap(parameters: Iterable[Tensor], *, weight_decay: float = 0.0, fused: bool, **options: Any) -> Any:
    # Of 3,072 inputs a step would take a quarter of a second: so long a side of a weight is left as it is.
    return _peer("SOAP")(list(parameters), weight_decay=weight_decay, max_precondition_dim=1024, **options)


#: AdamW without decay is Adam.
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "adam": partial(AdamW, weight_decay=0.0),
    "sgd": SGD,
    "momentum": partial(SGD, momentum=0.9),
    "muon": _muon,
    "soap": _soap,
}
#: Those that step every number by itself, so that tensors of several models may be stacked.
ELEMENTWISE = ("adam", "sgd", "momentum")


class Departure(NamedTuple):
    """What is done to the pixels of both parts of the data, given the training set, and to a network's layers."""

    label: str
    inputs: Callable[[Tensor, Tensor], Tensor] = lambda pixels, train: pixels
    layer: Callable[[Any], object] = lambda layer: None


def _images(pixels: Tensor) -> Tensor:
    return pixels.view(len(pixels), 3, isqrt(pixels.shape[1] // 3), -1)


def _standardised(pixels: Tensor, train: Tensor) -> Tensor:
    deviation, mean = torch.std_mean(_images(train), (0, 2, 3), keepdim=True)
    return ((_images(pixels) - mean) / deviation).flatten(1)


def _compressed(pixels: Tensor, train: Tensor) -> Tensor:
    from torchvision.io import decode_jpeg, encode_jpeg

    images = (255 * _images(pixels)).round().byte().cpu()
    again = torch.stack([decode_jpeg(encode_jpeg(image, quality=50)) for image in images])
    return again.to(pixels).flatten(1) / 255


def _drawn(draw: Callable[[Tensor], Tensor]) -> Callable[[Any], object]:
    return lambda layer: (draw(layer.weight), nn.init.zeros_(layer.bias))


#: Name → departure; the first four are of the inputs, the rest of the layers.
DEPARTURES = {
    "centred": Departure("pixels from −1 to 1", lambda pixels, train: 2 * pixels - 1),
    "standardised": Departure("channels of mean 0 and variance 1", _standardised),
    "bytes": Departure("pixels from 0 to 255", lambda pixels, train: 255 * pixels),
    "jpeg": Departure("images compressed once more, at JPEG's quality 50", _compressed),
    "xavier": Departure("Xavier's uniform weights, biases 0", layer=_drawn(nn.init.xavier_uniform_)),
    "he": Departure("He's normal weights, biases 0", layer=_drawn(nn.init.kaiming_normal_)),
    "zero-bias": Departure("biases 0", layer=lambda layer: nn.init.zeros_(layer.bias)),
    "no-bias": Departure("no biases", layer=lambda layer: layer.register_parameter("bias", None)),
}


def depart(data: Dataset, name: str) -> Dataset:
    """The data with its pixels, from 0 to 1, read otherwise."""
    inputs = DEPARTURES[name].inputs
    train, test = inputs(data.train_inputs, data.train_inputs), inputs(data.test_inputs, data.train_inputs)
    return data._replace(train_inputs=train, test_inputs=test)
