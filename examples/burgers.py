"""An inverse problem: the viscosity of a fluid from noisy observations, by GaussNewton and by SOAP, in one PNG.

    pip install '.[bench]'
    python -m examples.burgers

Burgers' equation u_t + u u_x = ν u_xx holds at points that are drawn anew for every step; 200 noisy values of a
travelling wave are observed. The network and ν, which begins at 0.5, are learned together. Every residual is divided by
how far it may be off: an observation by the deviation of its noise, the equation, which holds, by much less.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from pytorch_optimizer import SOAP
from rich.progress import Progress, TaskID
from torch import Tensor, nn

from adiv_optim import GaussNewton
from adiv_optim.jacobian import derivatives

from .arguments import picture_file, positive

VISCOSITY, NOISE, TOLERANCE, OBSERVED, POINTS, WIDTHS = 0.05, 0.01, 1e-3, 200, 300, (2, 30, 30, 30, 1)


class Fluid(nn.Module):
    """A tanh network of (x, t), and the logarithm of the viscosity, which belongs to no layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(WIDTHS):
            linear = nn.Linear(inputs, outputs)
            nn.init.xavier_normal_(linear.weight)
            layers += [linear, nn.Tanh()]
        self.velocity = nn.Sequential(*layers[:-1])
        self.log_viscosity = nn.Parameter(torch.tensor(0.5).log())
        self.double()


def wave(points: Tensor) -> Tensor:
    """The true velocity at (…, 2) points."""
    x, t = points.unbind(-1)
    return 1 - torch.tanh((x - t) / (2 * VISCOSITY))


def draw(count: int, generator: torch.Generator) -> Tensor:
    """Points (x, t) with x from -1 to 1 and t from 0 to 1."""
    points = torch.rand(count, 2, dtype=torch.float64, generator=generator)
    return points * torch.tensor([2.0, 1.0]) - torch.tensor([1.0, 0.0])


def equation(fluid: Fluid, point: Tensor) -> Tensor:
    """How far the network is from solving Burgers' equation at a point, in tolerances."""
    (u,), ((u_x, u_t),), ((u_xx, _),) = derivatives(fluid.velocity, point)
    return (u_t + u * u_x - fluid.log_viscosity.exp() * u_xx) / TOLERANCE


def observation(fluid: Fluid, point: Tensor, value: Tensor) -> Tensor:
    """How far the network is from an observed value, in deviations of the noise."""
    return (fluid.velocity(point)[0] - value) / NOISE


class Learned(NamedTuple):
    """What a way to learn leaves behind: the fluid, and ν by seconds of processor time."""

    fluid: Fluid
    seconds: list[float]
    viscosity: list[float]


def by_gauss_newton(fluid: Fluid, observed: tuple[Tensor, Tensor], generator: torch.Generator) -> Callable[[], object]:
    """All of the library's part in this program."""
    optimizer = GaussNewton(fluid)
    return lambda: optimizer.step([(equation, draw(POINTS, generator)), (observation, *observed)])


def by_soap(fluid: Fluid, observed: tuple[Tensor, Tensor], generator: torch.Generator) -> Callable[[], object]:
    """The same loss by gradients."""
    optimizer = SOAP(fluid.parameters(), lr=0.01, weight_decay=0.0)
    residuals = torch.func.vmap(lambda point: equation(fluid, point))
    seen = torch.func.vmap(lambda point, value: observation(fluid, point, value))

    def step() -> None:
        optimizer.zero_grad()
        loss = residuals(draw(POINTS, generator)).square().mean() + seen(*observed).square().mean()
        (loss / 2).backward()
        optimizer.step()

    return step


FITS = {"SOAP": by_soap, "GaussNewton": by_gauss_newton}


def learn(name: str, seconds: float, tick: Callable[[float], object]) -> Learned:
    """Learn the fluid for some seconds of processor time."""
    generator = torch.Generator().manual_seed(0)
    points = draw(OBSERVED, generator)
    noise = NOISE * torch.randn(OBSERVED, dtype=torch.float64, generator=generator)
    path = Learned(Fluid(), [], [])
    step, start = FITS[name](path.fluid, (points, wave(points) + noise), generator), time.process_time()
    while True:
        path.seconds.append(spent := time.process_time() - start)
        path.viscosity.append(path.fluid.log_viscosity.exp().item())
        if spent >= seconds:
            return path
        step()
        tick(spent)


def draw_all(paths: dict[str, Learned], file: Path) -> None:
    """The true field, the error of each, and the paths of the viscosity."""
    axis = torch.linspace(-1, 1, 120, dtype=torch.float64)
    grid = torch.stack(torch.meshgrid((axis + 1) / 2, axis, indexing="ij")[::-1], -1)
    fig, axes = plt.subplots(1, len(paths) + 2, figsize=(4 * len(paths) + 6, 3.6), layout="constrained")
    extent, truth = (-1, 1, 0, 1), wave(grid)
    axes[0].imshow(truth, origin="lower", extent=extent, aspect="auto")
    axes[0].set(title="velocity", xlabel="x", ylabel="t")
    for at, (name, path) in zip(axes[1:], paths.items(), strict=False):
        with torch.no_grad():
            error = (path.fluid.velocity(grid).squeeze(-1) - truth).abs().log10()
        shown = at.imshow(error, origin="lower", extent=extent, aspect="auto", vmin=-5, vmax=0, cmap="magma")
        at.set(title=f"{name}: log₁₀ |error|", xlabel="x")
        fig.colorbar(shown, ax=at)
        axes[-1].plot(path.seconds, path.viscosity, label=name)
    axes[-1].axhline(VISCOSITY, color="0.5", linestyle=":", label="true")
    axes[-1].set(title="viscosity", xlabel="seconds of one core", yscale="log")
    axes[-1].legend()
    fig.savefig(file, dpi=110)
    plt.close(fig)


def _tick(progress: Progress, task: TaskID, spent: float) -> None:
    progress.update(task, completed=spent)


def main(arguments: list[str] | None = None) -> None:
    """Learn it in both ways, print the viscosities, and draw."""
    parser = argparse.ArgumentParser(prog="python -m examples.burgers", description=__doc__.partition("\n")[0])
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    parser.add_argument("--seconds", type=positive, default=15, help="of processor time, for each")
    parser.add_argument("--out", type=picture_file, default="runs/burgers.png", help="the picture")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    paths = {}
    with Progress() as progress:
        for name in FITS:
            task = progress.add_task(name, total=options.seconds)
            paths[name] = learn(name, options.seconds, partial(_tick, progress, task))
    for name, path in paths.items():
        off = 100 * abs(path.viscosity[-1] / VISCOSITY - 1)
        print(f"{name}: {len(path.seconds) - 1} steps, viscosity {path.viscosity[-1]:.5f}, {off:.2f} % off {VISCOSITY}")
    draw_all(paths, options.out)
    print(f"{options.out} shows the errors, and how the viscosity was found.")


if __name__ == "__main__":
    main()
