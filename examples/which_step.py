"""Where one step moves the outputs of a layer, and where the loss asked them to go: the picture of docs/which-step.md.

    pip install '.[bench]'
    python -m examples.which_step

Six rows that are much alike pass through one linear layer with two outputs. Every panel is one real step.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from adiv_optim import GradientOnly, Proportional, Whitened

from .arguments import picture_file

ROWS, FEATURES, RATE = 6, 6, 1e-3
STEPS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "SGD": lambda layer: SGD(layer.parameters(), lr=RATE),
    "Proportional, SGD": lambda layer: GradientOnly(SGD(layer.parameters(), lr=RATE), layer, Proportional()),
    "Whitened, SGD": lambda layer: whitened(SGD(layer.parameters(), lr=RATE), layer),
    "Adam": lambda layer: Adam(layer.parameters(), lr=RATE),
    "Whitened, Adam": lambda layer: whitened(Adam(layer.parameters(), lr=RATE), layer),
}


def whitened(optimizer: Optimizer, layer: nn.Module) -> Whitened:
    """By the rows of this step alone, and hardly damped."""
    return Whitened(optimizer, layer, damping=1e-4, decay=0.0, every=1, graft_norm=False)


def moved(build: Callable[[nn.Module], Optimizer]) -> tuple[Tensor, Tensor]:
    """The movement of every row's outputs that the loss asks for, and the movement that a step makes."""
    torch.manual_seed(0)
    layer = nn.Linear(FEATURES, 2).double()
    x = 1.5 + torch.randn(ROWS, FEATURES, dtype=torch.float64)  # alike: they have a mean in common
    angles = torch.arange(ROWS) * (2 * torch.pi / ROWS)
    wanted = torch.stack([angles.cos(), angles.sin()], 1).double()  # every row asks for a direction of its own
    optimizer = build(layer)
    before = layer(x)
    (-before * wanted).sum().backward()
    optimizer.step()
    return wanted, (layer(x) - before).detach()


def cosine(asked: Tensor, movement: Tensor) -> float:
    """The cosine between all rows' movements and what was asked, taken as one vector."""
    return torch.cosine_similarity(asked.flatten(), movement.flatten(), dim=0).item()


def draw(path: Path) -> None:
    """Write a line for every step: what each row asks for in grey, what it gets in red, of one mean length."""
    fig, axes = plt.subplots(len(STEPS), figsize=(6.4, 1.25 * len(STEPS)), sharex=True, layout="constrained")
    places = torch.arange(ROWS, dtype=torch.float64)
    for axis, (name, build) in zip(axes, STEPS.items(), strict=True):
        wanted, movement = moved(build)
        look = {"angles": "xy", "scale_units": "xy", "scale": 2.6}
        for arrows, colour, width in ((wanted, "0.75", 0.009), (movement, "tab:red", 0.005)):
            scaled = arrows / arrows.norm(dim=1).mean()
            axis.quiver(places, 0 * places, *scaled.T, color=colour, width=width, **look)
        axis.set_title(f"{name}: cosine {cosine(wanted, movement):.2f}", fontsize=12, loc="left")
        axis.set(xlim=(-0.8, ROWS - 0.2), ylim=(-0.65, 0.55), aspect="equal", yticks=[])
        axis.set_xticks(range(ROWS), [f"row {row + 1}" for row in range(ROWS)], fontsize=11)
        for side in ("top", "right", "left", "bottom"):
            axis.spines[side].set_visible(False)
        axis.tick_params(length=0)
    fig.savefig(path, dpi=130)
    plt.close(fig)


def main(arguments: Sequence[str] | None = None) -> None:
    """Take the steps, and write the PNG."""
    parser = argparse.ArgumentParser(prog="python -m examples.which_step", description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=picture_file, default="runs/which-step.png", help="where the PNG goes")
    options = parser.parse_args(arguments)
    draw(options.out)
    print(f"picture: {options.out}")


if __name__ == "__main__":
    main()
