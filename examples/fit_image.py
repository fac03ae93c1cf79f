"""A coordinate network that learns a picture: colours from (x, y), by bare and by whitened optimizers, in one PNG.

    pip install '.[bench]'
    python -m examples.fit_image

It takes a picture that scikit-learn ships; `--image FILE` takes your own. SOAP is pytorch_optimizer's.
"""

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from pytorch_optimizer import SOAP
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from sklearn.datasets import load_sample_image
from torch import Tensor, nn
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from adiv_optim import Whitened

from .arguments import picture_file, positive

LAYERS, WIDTH, WARM_UP = 10, 28, 20


class Fit(NamedTuple):
    """One way to train the network; all of the library's part in this program is in `FITS`."""

    optimizer: Callable[[nn.Module], Optimizer]
    batch_norm: bool = False


#: Learning rates and dampings are those that the benchmark's trials chose, on crops of two photographs of which this
#: is one; see docs/results/fields.md.
FITS = {
    "Adam": Fit(lambda model: Adam(model.parameters(), lr=0.042)),
    "BatchNorm, Adam": Fit(lambda model: Adam(model.parameters(), lr=0.024), batch_norm=True),
    "Whitened Adam": Fit(lambda model: Whitened(Adam(model.parameters(), lr=0.056), model, damping=0.1)),
    "SOAP": Fit(lambda model: SOAP(model.parameters(), lr=0.056, weight_decay=0.0)),
    "Whitened SOAP": Fit(
        lambda model: Whitened(SOAP(model.parameters(), lr=0.1, weight_decay=0.0), model, damping=0.01)
    ),
}


def network(batch_norm: bool) -> nn.Sequential:
    """Ten linear layers with ReLU, from (x, y) to red, green and blue."""
    layers: list[nn.Module] = []
    for place in range(LAYERS):
        inputs, outputs = 2 if place == 0 else WIDTH, 3 if place == LAYERS - 1 else WIDTH
        layers += [nn.Linear(inputs, outputs), *([nn.BatchNorm1d(outputs)] * batch_norm), nn.ReLU()]
    return nn.Sequential(*layers[: -2 - batch_norm], layers[-2 - batch_norm])


def read(path: Path) -> np.ndarray:
    """The file's numbers, (height, width) of grey or (height, width, 3), between 0 and 1."""
    try:
        with Image.open(path) as file:
            if file.mode.startswith("I;16") or (file.mode == "I" and file.format == "PNG"):
                return np.asarray(file) / 65535
            if file.mode not in ("I", "F"):
                return np.asarray(file.convert("RGB")) / 255
    except OSError as error:
        raise SystemExit(f"--image {path}: it cannot be read as a picture ({error}); take a PNG or JPEG.") from error
    raise SystemExit(f"--image {path}: its colours have 32 bits and no known range; take a picture of 8 or 16.")


def picture(path: Path | None, size: int) -> Tensor:
    """A square from the middle of a picture, averaged to size × size pixels: (size, size, 3) between -1 and 1."""
    image = load_sample_image("china.jpg") / 255 if path is None else read(path)
    pixels = torch.tensor(image[..., :3] if image.ndim == 3 else image[..., None].repeat(3, -1)).float()
    height, width, _ = pixels.shape
    side = min(height, width)
    if side < size:
        raise SystemExit(f"--image {path}: it is {width} × {height} pixels; --size is {size}, take at most {side}.")
    top, left = (height - side) // 2, (width - side) // 2
    square = pixels[top : top + side, left : left + side].permute(2, 0, 1)
    return F.adaptive_avg_pool2d(square, size).permute(1, 2, 0) * 2 - 1


def psnr(found: Tensor, wanted: Tensor) -> float:
    """The peak signal-to-noise ratio in dB; colours have a range of 2."""
    return 10 * math.log10(4 / F.mse_loss(found, wanted).item())


def train(fit: Fit, wanted: Tensor, steps: int, tick: Callable[[float], None]) -> Tensor:
    """Learn a picture, and return what was learned."""
    torch.manual_seed(0)
    size = len(wanted)
    axis = (torch.arange(size) + 0.5) / size * 2 - 1
    points, colours = torch.cartesian_prod(axis, axis), wanted.reshape(-1, 3)
    model = network(fit.batch_norm)
    optimizer = fit.optimizer(model)
    schedule = LambdaLR(optimizer, lambda n: min(1, (n + 1) / WARM_UP) * (1 + math.cos(math.pi * n / steps)) / 2)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.mse_loss(model(points), colours)
        loss.backward()
        optimizer.step()
        schedule.step()
        tick(10 * math.log10(4 / loss.item()))
    with torch.no_grad():
        return model(points).view_as(wanted)


def draw(pictures: dict[str, Tensor], wanted: Tensor, path: Path) -> None:
    """Write the picture and what was learned of it, side by side."""
    fig, axes = plt.subplots(1, len(pictures) + 1, figsize=(1.9 * (len(pictures) + 1), 2.5), layout="constrained")
    for axis, (name, found) in zip(axes, {"the picture": wanted, **pictures}.items(), strict=True):
        axis.imshow(((found + 1) / 2).clamp(0, 1))
        axis.set_axis_off()
        title = name if found is wanted else f"{name}\n{psnr(found, wanted):.1f} dB"
        axis.set_title(title, fontsize=11, fontweight="bold" if name.startswith("Whitened") else "normal")
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=110)


def main(arguments: Sequence[str] | None = None) -> None:
    """Learn the picture in each way, and write the PNG."""
    parser = argparse.ArgumentParser(prog="python -m examples.fit_image", description=__doc__.partition("\n")[0])
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    parser.add_argument("--image", type=Path, help="a file that Pillow reads; else scikit-learn's china.jpg")
    parser.add_argument("--size", type=positive, default=64, help="pixels a side, of a square from the middle")
    parser.add_argument("--steps", type=positive, default=500, help="of each optimizer, with all pixels")
    parser.add_argument("--out", type=picture_file, default=Path("runs/fit_image.png"), help="where the PNG goes")
    options = parser.parse_args(arguments)
    wanted, pictures = picture(options.image, options.size), dict[str, Tensor]()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as progress:
        for name, fit in FITS.items():
            task = progress.add_task(name, total=options.steps)

            def tick(decibels: float, task: TaskID = task, name: str = name) -> None:
                progress.update(task, advance=1, description=f"{name}: {decibels:.1f} dB")

            pictures[name] = train(fit, wanted, options.steps, tick)
    draw(pictures, wanted, options.out)
    print(f"picture: {options.out}")


if __name__ == "__main__":
    main()
