"""What is timed: a layer or a training step, plainly, with a correction, and by other means.

Each function creates the tensors of one job and returns what runs it once; a layer's takes a correction, or None.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.optim import SGD, Adam, Optimizer

from adiv_optim import Correction, GradientOnly, UnitConsistent, functional, jacobian
from adiv_optim.gauge import NetworkGauge
from examples.gpt import GPT, PRESETS, next_character_loss

from ..core.runs import ten_times
from ..methods import METHODS
from ..optimizers import matrices
from ..problems.images import mlp
from .timing import ASKED, Run, autocast, device

RunLayer = Callable[[Correction | None], None]


def layer(shape: tuple[int, ...], outputs: int, kernel: int | None = None, first: bool = False) -> RunLayer:
    """Forward and backward of a linear layer or a convolution; one that is first needs no gradient of its input."""
    plain: Any = nn.Conv2d(shape[1], outputs, kernel, padding=kernel // 2) if kernel else nn.Linear(shape[1], outputs)
    layer, x = plain.to(device()), torch.randn(shape, device=device(), requires_grad=not first)
    g, weight, bias = torch.randn_like(layer(x)), layer.weight, layer.bias

    def run(correction: Correction | None) -> None:
        x.grad = weight.grad = bias.grad = None
        with autocast():
            if correction is None:
                z = layer(x)
            elif kernel:
                z = functional.conv2d(x, weight, bias, padding=layer.padding, correction=correction)
            else:
                z = functional.linear(x, weight, bias, correction)
        z.backward(g.to(z.dtype))

    return run


def per_sample(rows: int, inputs: int, outputs: int) -> Run:
    """The correction by torch.func's per-sample gradients: built, rescaled and summed."""
    x, g = torch.randn(rows, inputs, device=device()), torch.randn(rows, outputs, device=device())
    layer = nn.Linear(inputs, outputs, device=device())
    parameters = {name: p.detach() for name, p in layer.named_parameters()}

    def weighted(parameters: dict[str, Tensor], row: Tensor, g_row: Tensor) -> Tensor:
        return functional_call(layer, parameters, (row,)) @ g_row

    def run() -> None:
        gradients = vmap(grad(weighted), in_dims=(None, 0, 0))(parameters, x, g)
        scale = 1 / (x.square().sum(1) + 1)
        for gradient in gradients.values():
            torch.tensordot(scale, gradient, 1)

    return run


def opacus(rows: int, inputs: int, outputs: int) -> Run:
    """The correction by Opacus's per-sample hooks: built, rescaled and summed."""
    from opacus import GradSampleModule  # an optional extra

    x = torch.randn(rows, inputs, device=device(), requires_grad=True)
    g = torch.randn(rows, outputs, device=device())
    model = GradSampleModule(nn.Linear(inputs, outputs, device=device()), loss_reduction="sum")

    def run() -> None:
        model.zero_grad(set_to_none=True)
        x.grad = None
        model(x).backward(g)
        scale = 1 / (x.detach().square().sum(1) + 1)
        for parameter in model.parameters():
            torch.tensordot(scale, parameter.grad_sample, 1)
            parameter.grad_sample = None

    return run


def training_step(
    sizes: tuple[int, ...], correction: Correction | None = None, by_jacobians: bool = False, sgd: bool = False
) -> Run:
    """A whole training step of the benchmark's network: forward, backward and an optimizer's step."""
    x, labels = torch.rand(32, sizes[0], device=device()), torch.randint(sizes[-1], (32,), device=device())
    model = mlp(METHODS["none"], sizes, "tanh").to(device())
    parameters = model.parameters()
    optimizer: Optimizer = SGD(parameters, lr=0.3, fused=True) if sgd else Adam(parameters, fused=True)
    if correction and not by_jacobians:
        optimizer = GradientOnly(optimizer, model, correction)

    def run() -> None:
        optimizer.zero_grad()
        if by_jacobians:
            jacobian.backward(model, F.cross_entropy, x, labels, correction)
        else:
            F.cross_entropy(model(x), labels).backward()
        optimizer.step()

    return run


def ten_steps(width: int, layers: int, every: int | None = None) -> Run:
    """Ten steps of AdamW on a ReLU network, plainly or in the network gauge measured `every` so many steps."""
    stack = [module for _ in range(layers) for module in (nn.Linear(width, width), nn.ReLU())]
    model = nn.Sequential(*stack[:-1]).to(device())
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    if every:
        example = torch.randn(2, width, device=device())
        optimizer = UnitConsistent(optimizer, model, example_input=example, gauge=NetworkGauge(every))
    for parameter in model.parameters():
        parameter.grad = 1e-3 * torch.randn_like(parameter)

    return ten_times(optimizer.step)


def language_model(
    kind: Callable[..., Optimizer], batch_size: int, wrap: Callable[[Optimizer, nn.Module], Optimizer] | None,
    norm: str = "layernorm", embedding_deviation: float | None = None,
) -> Run:  # fmt: skip
    """Ten training steps of the language model, forward and backward included; plainly, or in a wrapper.

    Muon takes the matrices of the blocks alone, and nothing else trains then: the difference is the optimizer's.
    """
    size = PRESETS[ASKED.get().preset]
    model = GPT(size, 65, norm, embedding_deviation).to(device())
    matrices_only = kind is torch.optim.Muon
    optimizer = kind(matrices(model) if matrices_only else list(model.parameters()), lr=1e-3)
    if wrap is not None:
        optimizer = wrap(optimizer, model)
    windows = torch.randint(65, (batch_size, size.context + 1), device=device())

    def step() -> None:
        model.zero_grad()
        with autocast():
            loss = next_character_loss(model, windows)
        loss.backward()
        optimizer.step()

    return ten_times(step)


def module(module: nn.Module, input: Tensor) -> Run:
    """A module in training, forward and backward, to its input and its parameters."""
    input = input.detach().requires_grad_()
    grad_output = torch.randn_like(module(input))

    def run() -> None:
        input.grad = None
        module.zero_grad()
        module(input).backward(grad_output)

    return run
