"""The tables the tests run over: every layer kind and option, and every correction."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adiv_optim import Correction, Disproportional, Proportional, functional

CORRECTIONS = {"proportional": Proportional(), "disproportional": Disproportional()}
FUNCTIONAL_CONV = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}

each_correction = pytest.mark.parametrize("correction", CORRECTIONS.values(), ids=CORRECTIONS)
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@dataclass(frozen=True)
class LayerCase:
    build: Callable[..., nn.Module]
    shape: tuple[int, ...]
    memory_format: torch.memory_format = torch.contiguous_format

    def layer(self, dtype: torch.dtype = torch.float64) -> Any:
        return self.build().to(dtype=dtype, memory_format=self.memory_format)

    def input(self, dtype: torch.dtype = torch.float64) -> Tensor:
        input = torch.randn(self.shape, dtype=torch.float64).to(dtype)
        return input.contiguous(memory_format=self.memory_format) if input.dim() >= 4 else input


def linear(*args: int, shape: tuple[int, ...], **kwargs: Any) -> LayerCase:
    return LayerCase(lambda: nn.Linear(*args, **kwargs), shape)


def conv(kind: type[nn.Module], *args: int, shape: tuple[int, ...], **kwargs: Any) -> LayerCase:
    return LayerCase(lambda: kind(*args, **kwargs), shape)


LINEAR = {
    "rows": linear(5, 3, shape=(4, 5)),
    "rows-no-bias": linear(5, 3, bias=False, shape=(4, 5)),
    "tokens": linear(5, 3, shape=(2, 3, 5)),
    "unbatched": linear(5, 3, shape=(5,)),
    "narrow-to-wide": linear(2, 17, shape=(6, 2)),
    "one-row": linear(5, 3, shape=(1, 5)),
}

CONV = {
    "conv1d": conv(nn.Conv1d, 3, 4, 3, shape=(2, 3, 8)),
    "conv1d-unbatched": conv(nn.Conv1d, 3, 4, 3, padding=1, shape=(3, 7)),
    "conv1d-every-option": conv(nn.Conv1d, 4, 6, 3, stride=2, padding=3, dilation=2, groups=2, shape=(2, 4, 11)),
    "conv1d-same-even": conv(nn.Conv1d, 3, 4, 4, padding="same", shape=(2, 3, 6)),
    "conv1d-same-reflect": conv(nn.Conv1d, 2, 3, 4, padding="same", padding_mode="reflect", shape=(2, 2, 6)),
    "conv2d": conv(nn.Conv2d, 3, 4, 3, shape=(2, 3, 5, 6)),
    "conv2d-no-bias": conv(nn.Conv2d, 3, 4, 3, bias=False, shape=(2, 3, 5, 6)),
    "conv2d-kernel-1": conv(nn.Conv2d, 3, 4, 1, shape=(2, 3, 4, 5)),
    "conv2d-one-position": conv(nn.Conv2d, 3, 4, (4, 5), shape=(3, 3, 4, 5)),
    "conv2d-stride-beyond-kernel": conv(nn.Conv2d, 3, 4, 2, stride=3, shape=(2, 3, 7, 8)),
    "conv2d-padding": conv(nn.Conv2d, 3, 4, 3, padding=(2, 1), shape=(2, 3, 5, 4)),
    "conv2d-groups": conv(nn.Conv2d, 4, 6, 3, groups=2, padding=1, shape=(2, 4, 4, 5)),
    "conv2d-depthwise": conv(nn.Conv2d, 4, 8, 3, groups=4, padding=1, shape=(2, 4, 4, 5)),
    "conv2d-every-option": conv(
        nn.Conv2d, 4, 6, (3, 2), stride=(2, 1), padding=(1, 2), dilation=(1, 2), groups=2, shape=(2, 4, 6, 5)
    ),
    "conv2d-same-dilation": conv(nn.Conv2d, 3, 4, (2, 3), dilation=(3, 2), padding="same", shape=(2, 3, 6, 6)),
    "conv2d-valid": conv(nn.Conv2d, 3, 4, 3, padding="valid", shape=(2, 3, 5, 6)),
    "conv2d-circular": conv(nn.Conv2d, 3, 4, 3, padding=1, padding_mode="circular", stride=2, shape=(2, 3, 5, 4)),
    "conv2d-same-circular": conv(
        nn.Conv2d, 4, 4, 2, padding="same", padding_mode="circular", groups=2, shape=(2, 4, 4, 5)
    ),
    "conv2d-unbatched-same-even": conv(nn.Conv2d, 3, 4, 2, padding="same", shape=(3, 5, 4)),
    "conv2d-channels-last": LayerCase(
        lambda: nn.Conv2d(4, 6, 3, padding=1, groups=2), (2, 4, 5, 4), torch.channels_last
    ),
    "conv3d": conv(nn.Conv3d, 2, 3, 2, shape=(2, 2, 3, 4, 3)),
    "conv3d-every-option": conv(
        nn.Conv3d, 2, 4, (2, 3, 1), stride=(1, 2, 1), padding=(1, 1, 0), dilation=(2, 1, 1), groups=2,
        shape=(2, 2, 4, 5, 3),
    ),
    "conv3d-replicate": conv(nn.Conv3d, 2, 3, 2, padding=1, padding_mode="replicate", shape=(1, 2, 2, 3, 2)),
}  # fmt: skip

LAYERS = {**{f"linear-{name}": case for name, case in LINEAR.items()}, **CONV}

# torch's own notice about its own layer, once per process; the corrected layer pads without it.
quiet_same = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")


each_layer = pytest.mark.parametrize(
    "case", [pytest.param(case, id=name, marks=quiet_same if "same" in name else ()) for name, case in LAYERS.items()]
)


def apply(layer: Any, input: Tensor, correction: Correction | None) -> Tensor:
    """Call adiv_optim.functional with the weights and options of a torch layer."""
    if isinstance(layer, nn.Linear):
        return functional.linear(input, layer.weight, layer.bias, correction)
    padding = layer.padding
    if layer.padding_mode != "zeros":
        input = F.pad(input, layer._reversed_padding_repeated_twice, mode=layer.padding_mode)
        padding = 0
    return FUNCTIONAL_CONV[layer.weight.dim() - 2](
        input, layer.weight, layer.bias, layer.stride, padding, layer.dilation, layer.groups, correction
    )


def gradients(output: Tensor, layer: nn.Module, grad_output: Tensor) -> dict[str, Tensor]:
    """Gradients of a layer's trainable parameters for a given output gradient."""
    trained = {name: p for name, p in layer.named_parameters() if p.requires_grad}
    return dict(zip(trained, torch.autograd.grad(output, list(trained.values()), grad_output), strict=True))


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """Greatest deviation over greatest magnitude."""
    assert found.shape == wanted.shape
    difference = (found.double() - wanted.double()).abs().max().item()
    return difference / max(wanted.double().abs().max().item(), 1e-300)
