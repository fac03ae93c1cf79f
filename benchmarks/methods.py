"""The methods compared: how each builds its network, and what it does to the gradient."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn
from torch.optim import Optimizer

from adiv_optim import BatchIdeal, Correction, Disproportional, Proportional, UnitConsistent, Whitened
from adiv_optim.gauge import Gauge, LayerGauge, NetworkGauge
from adiv_optim.layers import AffineLikeLinear, L2Norm, NormLikeLinear, PatchNormConv2d

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {"tanh": nn.Tanh, "leaky-relu": nn.LeakyReLU}


@dataclass(frozen=True)
class Method:
    """One row of the comparison.

    Args:
        linear: the affine layer.
        convolution: the convolution.
        normalizer: shape of a sample → the parameterless normaliser before every affine layer and convolution, the
            first included.
        correction: what the optimizer's side does to the gradient.
        lr_factor: multiplies the protocol's learning rate.
        gauge: whose coordinates the optimizer steps in.
        whitening: damping of `Whitened`, whose coordinates it steps in; trained by plain loops, whose forward passes it
            sees.
        rank: of the whitening; see `Whitened`.
    """

    linear: Callable[[int, int], nn.Module] = nn.Linear
    convolution: Callable[..., nn.Module] = nn.Conv2d
    normalizer: Callable[[tuple[int, ...]], nn.Module] | None = None
    correction: Correction | None = None
    lr_factor: float = 1.0
    gauge: Gauge | None = None
    whitening: float | None = None
    rank: int | None = None

    def wrap(self, optimizer: Optimizer, model: nn.Module, example: Tensor) -> Optimizer:
        """Put the method's coordinates around an optimizer."""
        if self.whitening is not None:
            return Whitened(optimizer, model, damping=self.whitening, rank=self.rank)
        if self.gauge is not None:
            return UnitConsistent(optimizer, model, gauge=self.gauge, example_input=example)
        return optimizer

    @property
    def damped(self) -> bool:
        """Whether the method has a damping."""
        return self.whitening is not None or isinstance(self.correction, BatchIdeal)

    def normalizers(self, shape: tuple[int, ...]) -> list[nn.Module]:
        """Return the normaliser for samples of a shape, if the method has one."""
        return [self.normalizer(shape)] if self.normalizer else []


def _l2_norm(shape: tuple[int, ...]) -> nn.Module:
    return L2Norm(dim=tuple(range(-len(shape), 0)))


def _batch_norm(shape: tuple[int, ...]) -> nn.Module:
    return (nn.BatchNorm1d if len(shape) == 1 else nn.BatchNorm2d)(shape[0], affine=False)


_NORM_LIKE_CONV = partial(PatchNormConv2d, form="norm-like")

METHODS: dict[str, Method] = {
    "none": Method(),
    "batchnorm": Method(normalizer=_batch_norm),
    "layernorm": Method(normalizer=partial(nn.LayerNorm, elementwise_affine=False)),
    "rmsnorm": Method(normalizer=partial(nn.RMSNorm, elementwise_affine=False)),
    "l2norm": Method(normalizer=_l2_norm),
    "l2norm-half": Method(normalizer=_l2_norm, lr_factor=0.5),
    "l2-patch": Method(linear=NormLikeLinear, convolution=_NORM_LIKE_CONV),
    "l2-patch-half": Method(linear=NormLikeLinear, convolution=_NORM_LIKE_CONV, lr_factor=0.5),
    "affine-like": Method(linear=AffineLikeLinear, convolution=PatchNormConv2d),
    "proportional": Method(correction=Proportional()),
    "disproportional": Method(correction=Disproportional()),
    # The damping is from exploratory runs on CIFAR-10 that looked at test accuracy: a report should say so.
    "batch-ideal": Method(correction=BatchIdeal(damping=0.3, per_sample=False)),
    "uc-network": Method(gauge=NetworkGauge()),
    "uc-layer": Method(gauge=LayerGauge()),
    "whitened": Method(whitening=1.0),
    "whitened-16": Method(whitening=1.0, rank=16),
}


def natural_backend(method: str) -> str:
    """Whether a method's seeds can train as one program, "ensemble", or only one after the other, "loop"."""
    # An unknown method is for `Run` to refuse.
    return "loop" if method in METHODS and METHODS[method].whitening is not None else "ensemble"


#: What a comparison leaves out unless asked for. Gauges: tanh leaves them nothing to rescale, and the layer gauge wants
#: other learning rates. Whitening: its networks train one after the other. Norms of patches: only in convolutional
#: networks do they differ from norms of layers.
_ON_REQUEST = {"l2-patch", "l2-patch-half", "uc-network", "uc-layer", "whitened", "whitened-16"}
DEFAULT = [name for name in METHODS if name not in _ON_REQUEST]

#: What tables and figures call them.
LABELS = {
    "none": "none",
    "batchnorm": "BatchNorm",
    "layernorm": "LayerNorm",
    "rmsnorm": "RMSNorm",
    "l2norm": "L2 norm, η",
    "l2norm-half": "L2 norm, η/2",
    "l2-patch": "L2 norm of patches, η",
    "l2-patch-half": "L2 norm of patches, η/2",
    "affine-like": "affine-like",
    "proportional": "gradient-only proportional",
    "disproportional": "gradient-only disproportional",
    "batch-ideal": "gradient-only batch-ideal",
    "uc-network": "unit-consistent, network gauge",
    "uc-layer": "unit-consistent, layer gauge",
    "whitened": "whitened",
    "whitened-16": "whitened, rank 16",
}
