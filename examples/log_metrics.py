"""What a logger shows of `Whitened`: its metrics(), layer by layer, while a coordinate network learns a picture.

    pip install '.[bench]'
    python -m examples.log_metrics

One PNG of the RMS of each layer's inputs, drawn with matplotlib from the numbers that a logger would be given.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import Tensor

from adiv_optim import Whitened
from examples.fit_image import network, picture

from .arguments import picture_file, positive


def train(wanted: Tensor, steps: int, every: int) -> list[tuple[int, dict[str, float]]]:
    """Learn a picture, and return the step and the metrics of every so many steps."""
    torch.manual_seed(0)
    axis = (torch.arange(len(wanted)) + 0.5) / len(wanted) * 2 - 1
    points, colours = torch.cartesian_prod(axis, axis), wanted.reshape(-1, 3)
    model = network(2)
    optimizer = Whitened(torch.optim.Adam(model.parameters(), lr=0.03), model, damping=0.03)
    logged = []
    for step in range(steps):
        optimizer.zero_grad()
        F.mse_loss(model(points), colours).backward()
        optimizer.step()
        if step % every == 0:
            logged.append((step, optimizer.metrics()))  # here a logger takes them
    return logged


def draw(logged: Sequence[tuple[int, dict[str, float]]], path: Path) -> None:
    """Write the panel, a line for each layer, first to last."""
    fig, axis = plt.subplots(figsize=(5, 2.8), layout="constrained")
    names = [name for name in logged[-1][1] if name.endswith("/input_rms")]
    for place, name in enumerate(names):
        points = [(step, numbers[name]) for step, numbers in logged if name in numbers]
        colour = plt.get_cmap("viridis")(0.9 * place / max(1, len(names) - 1))
        label = {0: "first layer", len(names) - 1: "last layer"}.get(place)
        axis.plot(*zip(*points, strict=True), color=colour, linewidth=1.2, label=label)
    axis.set(xlabel="step", ylabel="RMS of inputs")
    axis.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=110)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, and write the PNG."""
    parser = argparse.ArgumentParser(prog="python -m examples.log_metrics", description=__doc__.partition("\n")[0])
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    parser.add_argument("--size", type=positive, default=64, help="pixels a side")
    parser.add_argument("--steps", type=positive, default=300, help="of Adam, with all pixels")
    parser.add_argument("--every", type=positive, default=5, help="steps between two looks at the metrics")
    parser.add_argument("--out", type=picture_file, default=Path("runs/metrics.png"), help="where the PNG goes")
    options = parser.parse_args(arguments)
    draw(train(picture(None, options.size), options.steps, options.every), options.out)
    print(f"picture: {options.out}")


if __name__ == "__main__":
    main()
