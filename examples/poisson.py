"""A physics-informed network: Poisson's equation on the unit square, by bare and by whitened optimizers, in one PNG.

    pip install '.[bench]'
    python -m examples.poisson

−Δu = 2π² sin πx sin πy with u = 0 on all sides, in float64. The Laplacian is carried forward with the values, and
`Whitened` counts the rows of derivatives beside those of inputs. SOAP is pytorch_optimizer's.
"""

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from matplotlib.colors import LogNorm
from pytorch_optimizer import SOAP
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from adiv_optim import Whitened

from .arguments import picture_file, positive

WIDTHS, INNER, BOUNDARY, WARM_UP = (2, 64, 64, 48, 48, 1), 900, 120, 20
#: All of the library's part in this program. Its learning rates are of a few trials.
FITS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "Adam": lambda model: Adam(model.parameters(), lr=0.01),
    "SOAP": lambda model: SOAP(model.parameters(), lr=0.013, weight_decay=0.0),
    "Whitened SOAP": lambda model: Whitened(SOAP(model.parameters(), lr=0.01, weight_decay=0.0), model, damping=0.001),
}


def network() -> nn.Sequential:
    """A tanh network of two coordinates."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(WIDTHS):
        layers += [nn.Linear(inputs, outputs), nn.Tanh()]
    return nn.Sequential(*layers[:-1]).double()


def solution(points: Tensor) -> Tensor:
    """What solves the equation, to measure the error."""
    return (math.pi * points).sin().prod(-1)


def laplacian(model: nn.Module, x: Tensor, optimizer: Optimizer) -> Tensor:
    """Δu at every point, by the chain rule from layer to layer; each of them multiplies rows of derivatives."""
    first, second = torch.eye(2, dtype=x.dtype).expand(len(x), 2, 2), torch.zeros_like(x)
    for layer in model.children():
        if isinstance(layer, nn.Linear):
            rows = torch.cat([first, second.unsqueeze(1)], 1)
            if isinstance(optimizer, Whitened):
                optimizer.count_rows(layer, rows)
            x, rows = layer(x), rows @ layer.weight.T
            first, second = rows[:, :-1], rows[:, -1]
        else:
            x = layer(x)
            slope = 1 - x.square()
            second = slope * (second - 2 * x * first.square().sum(1))
            first = slope.unsqueeze(1) * first
    return second.squeeze(-1)


def relative_error(model: nn.Module, points: Tensor) -> float:
    """The L2 error over that of 0."""
    with torch.no_grad():
        return ((model(points).squeeze(-1) - solution(points)).norm() / solution(points).norm()).item()


def train(build: Callable[[nn.Module], Optimizer], steps: int, tick: Callable[[float], None]) -> nn.Module:
    """Solve the equation with points that stay."""
    torch.manual_seed(0)
    model = network()
    inner, sides = torch.rand(INNER, 2, dtype=torch.float64), torch.rand(BOUNDARY, 2, dtype=torch.float64)
    number = torch.arange(BOUNDARY)
    sides[number, number % 2] = (number % 4 // 2).double()  # a quarter on each side
    test = torch.rand(9000, 2, dtype=torch.float64)
    optimizer = build(model)
    schedule = LambdaLR(optimizer, lambda n: min(1, (n + 1) / WARM_UP) * (1 + math.cos(math.pi * n / steps)) / 2)
    for step in range(steps):
        optimizer.zero_grad()
        residual = laplacian(model, inner, optimizer) + 2 * math.pi**2 * solution(inner)
        loss = (residual.square().mean() + model(sides).square().mean()) / 2
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 10 == 9 or step == steps - 1:
            tick(relative_error(model, test))
    return model


@torch.no_grad()
def draw(models: Mapping[str, nn.Module], path: Path) -> None:
    """Write the solution, and the error of every network, side by side."""
    axis = torch.linspace(0, 1, 128, dtype=torch.float64)
    points = torch.cartesian_prod(axis, axis)
    wanted = solution(points)
    fig, axes = plt.subplots(1, len(models) + 1, figsize=(2.6 * (len(models) + 1), 3.0), layout="constrained")
    fig.colorbar(axes[0].imshow(wanted.view(128, 128), origin="lower"), ax=axes[0], location="bottom")
    axes[0].set_title("u", fontsize=11)
    for place, (name, model) in zip(axes[1:], models.items(), strict=True):
        wrong = (model(points).squeeze(-1) - wanted).abs().clamp_min(1e-12).view(128, 128)
        shown = place.imshow(wrong, origin="lower", cmap="magma", norm=LogNorm(1e-6, 1))
        title = f"{name}: {relative_error(model, points):.2g}"
        place.set_title(title, fontsize=11, fontweight="bold" if name.startswith("Whitened") else "normal")
    fig.colorbar(shown, ax=axes[1:], location="bottom", label="absolute error; in the titles the relative L2 error")
    for place in axes:
        place.set_axis_off()
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=110)


def main(arguments: Sequence[str] | None = None) -> None:
    """Solve the equation in each way, and write the PNG."""
    parser = argparse.ArgumentParser(prog="python -m examples.poisson", description=__doc__.partition("\n")[0])
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    parser.add_argument("--steps", type=positive, default=600, help="of each optimizer")
    parser.add_argument("--out", type=picture_file, default=Path("runs/poisson.png"), help="where the PNG goes")
    options = parser.parse_args(arguments)
    models: dict[str, nn.Module] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as progress:
        for name, build in FITS.items():
            task = progress.add_task(name, total=options.steps)

            def tick(error: float, task: TaskID = task, name: str = name) -> None:
                progress.update(task, advance=10, description=f"{name}: relative error {error:.2g}")

            models[name] = train(build, options.steps, tick)
            progress.update(task, completed=options.steps)
    draw(models, options.out)
    print(f"picture: {options.out}")


if __name__ == "__main__":
    main()
