"""A nonlinear differential equation of your own, by GaussNewton and by SOAP in equal time, in one PNG.

    pip install '.[bench]'
    python -m examples.equation

Change what stands between the lines of dashes: residuals at one point, where each holds, and the solution if it is
known. Here it is a travelling wave of Burgers' equation u_t + u u_x = 0.05 u_xx. Points are drawn for every step.
"""

import argparse
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from matplotlib.colors import LogNorm
from pytorch_optimizer import SOAP
from rich.progress import Progress, TaskID
from torch import Tensor, nn

from adiv_optim import GaussNewton
from adiv_optim.jacobian import derivatives

from .arguments import picture_file, positive

# ----------------------------------------------------------------------------------------------------------------------
DOMAIN = [(-1.0, 1.0), (0.0, 1.0)]  # of x and t


def inside(u: nn.Module, point: Tensor) -> Tensor:
    """The equation."""
    (value,), ((u_x, u_t),), ((u_xx, _),) = derivatives(u, point)
    return u_t + value * u_x - 0.05 * u_xx


def given(u: nn.Module, point: Tensor) -> Tensor:
    """A value at a point; the factor weighs it."""
    return 10 * (u(point)[0] - wave(point))


#: A residual, how many points, and {coordinate: its value there}.
CONDITIONS: list[tuple[Callable[..., Tensor], int, dict[int, float]]] = [
    (inside, 300, {}), (given, 20, {1: 0.0}), (given, 20, {0: -1.0}), (given, 20, {0: 1.0}),
]  # fmt: skip


def wave(points: Tensor) -> Tensor:
    """The values at (…, 2) points."""
    x, t = points.unbind(-1)
    return 1 - ((x - t) / 0.1).tanh()


#: None if it is not known.
SOLUTION: Callable[[Tensor], Tensor] | None = wave
# ----------------------------------------------------------------------------------------------------------------------
WIDTHS = (2, 16, 16, 16, 1)
#: Takes a step, and is told which share of the time is over.
Step = Callable[[float], object]


def draw_points(count: int, fixed: dict[int, float], generator: torch.Generator) -> Tensor:
    """Points of the domain, with the values that some of their coordinates have."""
    low, high = torch.tensor(DOMAIN, dtype=torch.float64).T
    points = low + (high - low) * torch.rand(count, 2, dtype=torch.float64, generator=generator)
    for coordinate, value in fixed.items():
        points[:, coordinate] = value
    return points


def terms(generator: torch.Generator) -> list[tuple[Callable[..., Tensor], Tensor]]:
    """The loss of a step: residuals, and points that are drawn for them."""
    return [(residual, draw_points(count, fixed, generator)) for residual, count, fixed in CONDITIONS]


def network() -> nn.Sequential:
    """A tanh network by Xavier's initialisation, whose first layer maps the domain to (−1, 1)."""
    torch.manual_seed(0)
    linears = [nn.Linear(inputs, outputs).double() for inputs, outputs in pairwise(WIDTHS)]
    for linear in linears:
        nn.init.xavier_normal_(linear.weight)
        nn.init.zeros_(linear.bias)
    first, (low, high) = linears[0], torch.tensor(DOMAIN, dtype=torch.float64).T
    with torch.no_grad():
        first.weight.mul_(2 / (high - low))
        first.bias.sub_(first.weight @ (high + low) / 2)
    return nn.Sequential(*(layer for linear in linears for layer in (linear, nn.Tanh())))[:-1]


def by_gauss_newton(model: nn.Module, generator: torch.Generator) -> Step:
    """All of the library's part in this program."""
    optimizer = GaussNewton(model)
    return lambda progress: optimizer.step(terms(generator))


def by_soap(model: nn.Module, generator: torch.Generator, rate: float = 0.01) -> Step:
    """The same loss by gradients; the rate, the best of five from 0.003 to 0.03, falls to 0 by a cosine."""
    optimizer = SOAP(model.parameters(), lr=rate, weight_decay=0.0)

    def step(progress: float) -> None:
        optimizer.param_groups[0]["lr"] = rate * (1 + math.cos(math.pi * progress)) / 2
        optimizer.zero_grad()
        parts = [torch.func.vmap(partial(residual, model))(points) for residual, points in terms(generator)]
        (torch.stack([part.square().mean() for part in parts]).sum() / 2).backward()
        optimizer.step()

    return step


FITS = {"SOAP": by_soap, "GaussNewton": by_gauss_newton}


def solve(name: str, seconds: float, tick: Callable[[float], object] = lambda spent: None) -> nn.Module:
    """Solve the equation in some seconds of processor time."""
    model = network()
    step, start = FITS[name](model, torch.Generator().manual_seed(0)), time.process_time()
    while (spent := time.process_time() - start) < seconds:
        step(spent / seconds)
        tick(spent)
    return model


def grid(size: int = 120) -> Tensor:
    """Points (t, x, 2) all over the domain."""
    x, t = (torch.linspace(low, high, size, dtype=torch.float64) for low, high in DOMAIN)
    return torch.stack(torch.meshgrid(x, t, indexing="xy"), -1)


@torch.no_grad()
def relative_error(model: nn.Module, solution: Callable[[Tensor], Tensor]) -> float:
    """The L2 error over that of 0."""
    wanted = solution(grid())
    return ((model(grid())[..., 0] - wanted).norm() / wanted.norm()).item()


@torch.no_grad()
def draw(models: Mapping[str, nn.Module], file: Path) -> None:
    """Write the solution and how far each network is from it; or what they learned, where it is not known."""
    fields = {name: model(grid())[..., 0] for name, model in models.items()}
    count = len(fields) + (SOLUTION is not None)
    fig, (axes,) = plt.subplots(1, count, figsize=(11, 3.2), layout="constrained", squeeze=False)
    extent = tuple(end for ends in DOMAIN for end in ends)
    look: dict[str, Any] = {"origin": "lower", "extent": extent, "aspect": "auto"}
    if SOLUTION is not None:
        wanted = SOLUTION(grid())
        fig.colorbar(axes[0].imshow(wanted, **look), ax=axes[0])
        axes[0].set_title("the solution", fontsize=11)
    for axis, (name, field) in zip(axes[-len(fields) :], fields.items(), strict=True):
        title, weight = name, "bold" if name == "GaussNewton" else "normal"
        if SOLUTION is None:
            shown = axis.imshow(field, **look)
        else:
            title = f"{name}: {relative_error(models[name], SOLUTION):.1g}"
            shown = axis.imshow((field - wanted).abs(), norm=LogNorm(1e-8, 1), cmap="magma", **look)
        axis.set_title(title, fontsize=11, fontweight=weight)
    label = "" if SOLUTION is None else "absolute error; above: relative L2 error"
    fig.colorbar(shown, ax=axes[-len(fields) :], label=label)
    for axis in axes:
        axis.set_xlabel("x")
    axes[0].set_ylabel("t")
    fig.savefig(file, dpi=110)
    plt.close(fig)


def main(arguments: Sequence[str] | None = None) -> None:
    """Solve the equation in both ways, print the errors, and draw."""
    parser = argparse.ArgumentParser(prog="python -m examples.equation", description=__doc__.partition("\n")[0])
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    parser.add_argument("--seconds", type=positive, default=10, help="of processor time, for each")
    parser.add_argument("--out", type=picture_file, default="runs/equation.png", help="the picture")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    models = {}
    with Progress() as progress:
        for name in FITS:
            task = progress.add_task(name, total=options.seconds)

            def tick(spent: float, task: TaskID = task) -> None:
                progress.update(task, completed=spent)

            models[name] = solve(name, options.seconds, tick)
    draw(models, options.out)
    for name, model in models.items():
        print(f"{name}: relative error {relative_error(model, SOLUTION):.1g}" if SOLUTION else f"{name}: drawn")
    print(f"picture: {options.out}")


if __name__ == "__main__":
    main()
