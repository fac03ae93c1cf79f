"""Time and memory of structural layers, against the normaliser and the layer that they stand for."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from adiv_optim.layers import AffineLikeLinear, NormLikeLinear, PatchNormConv2d

from .timing import device, measured, peak_memory, processor_time

#: (rows, features): a token model's layer, and the pixels of a ResNet's second stage.
LINEAR = ((4096, 512), (32 * 28 * 28, 128))
#: (in_channels, height and width, kernel, stride): the layers of a ResNet-18's second stage, 128 channels wide.
CONV = ((128, 28, 3, 1), (64, 56, 3, 2), (64, 56, 1, 2))


def structural(data: str) -> dict[str, Any]:
    """Structural layers against RMSNorm → Linear and Conv2d → BatchNorm2d, compiled and eager."""
    rows = []
    for count, features in LINEAR:
        plain = nn.Sequential(nn.RMSNorm(features, elementwise_affine=False), nn.Linear(features, features))
        for kind in (AffineLikeLinear, NormLikeLinear):
            name = f"{kind.__name__} {(count, features, features)}"
            rows += _rows(name, kind(features, features), plain, torch.randn(count, features))
    for channels, size, kernel, stride in CONV:
        options: dict[str, Any] = {"kernel_size": kernel, "stride": stride, "padding": kernel // 2}
        plain = nn.Sequential(nn.Conv2d(channels, 128, bias=False, **options), nn.BatchNorm2d(128))
        for form in ("affine-like", "norm-like"):
            name = f"PatchNormConv2d {kernel}×{kernel}, stride {stride}, {(32, channels, size, size)} → 128, {form}"
            layer = PatchNormConv2d(channels, 128, form=form, **options)
            rows += _rows(name, layer, plain, torch.randn(32, channels, size, size))
    return {
        "of": "forward and backward; ratio to RMSNorm → Linear, Conv2d → BatchNorm2d",
        "note": "In training, float32, input gradients included. Linear is (rows, in, out), its RMSNorm without "
        "parameters; the convolutions are those of a ResNet-18's second stage at batch 32, the plain ones without a "
        "bias. Compiled layers (torch.compile, fullgraph) are timed against compiled ones, eager against eager, "
        "within one interleaved run, by processor time if there is one thread: median and quartiles of the rounds. "
        "Peak memory counts activations and all gradients.",
        "rows": rows,
    }


def _rows(name: str, layer: nn.Module, plain: nn.Module, input: Tensor, rounds: int = 40) -> list[dict[str, Any]]:
    layer, plain, input = layer.to(device()), plain.to(device()), input.to(device())
    torch.compiler.reset()  # torch compiles one forward eight times and no more
    compiled, compiled_plain = torch.compile(layer, fullgraph=True), torch.compile(plain, fullgraph=True)
    return [
        _row(f"{name}, compiled", compiled, compiled_plain, input, rounds),  # type: ignore[arg-type]
        _row(f"{name}, eager", layer, plain, input, rounds),
    ]


def _row(what: str, layer: nn.Module, plain: nn.Module, input: Tensor, rounds: int) -> dict[str, Any]:
    # On the same input: where memory happens to lie can cost more than what is measured here.
    run, plain_run = forward_backward(layer, input), forward_backward(plain, input)
    run(), plain_run()  # to compile both, before memory is measured
    memory, plain_memory = (peak_memory(partial(forward_backward, module, input.clone())) for module in (layer, plain))
    return measured(what, run, plain_run, rounds, memory / plain_memory, processor_time())


def forward_backward(module: nn.Module, input: Tensor) -> Callable[[], None]:
    """What runs a module forward and backward, to its input and its parameters."""
    input = input.detach().requires_grad_()
    grad_output = torch.randn_like(module(input))

    def run() -> None:
        input.grad = None
        module.zero_grad()
        module(input).backward(grad_output)

    return run
