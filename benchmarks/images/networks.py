"""The networks compared, as every method builds them; drawn by PyTorch's default initialisation."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from math import isqrt

from torch import Tensor, nn

from ..methods import Method

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "tanh": nn.Tanh,
    "leaky-relu": nn.LeakyReLU,
    "identity": nn.Identity,
}


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
