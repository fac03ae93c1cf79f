"""What the papers leave open, read otherwise than here: the inputs, and how networks are drawn."""

from collections.abc import Callable
from math import isqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..data import Dataset


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
