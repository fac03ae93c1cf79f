"""A coordinate network that learns a picture behind Fourier features, by four optimizers in equal time, in one PNG.

    pip install '.[bench]'
    python -m examples.fit_image

It takes a picture that scikit-learn ships; `--image FILE` takes your own. SOAP is pytorch_optimizer's.
"""

import argparse
import math
import time
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
from torch.optim import Adam, Muon, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from adiv_optim import ChainedOptimizer, Whitened

from .arguments import picture_file, positive

LAYERS, WIDTH, FREQUENCIES, DEVIATION, WARM_UP = 10, 28, 32, 3.0, 20
#: Of Adam; the others have as many as take the same time.
STEPS = 500


def muon(model: nn.Module, lr: float) -> Optimizer:
    """Muon for the matrices inside the network, Adam for the rest."""
    inside = [p for p in model.parameters() if p.dim() == 2][1:-1]
    rest = [p for p in model.parameters() if all(p is not matrix for matrix in inside)]
    matrices = Muon(inside, lr=lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    return ChainedOptimizer([matrices, Adam(rest, lr=lr)])


class Fit(NamedTuple):
    """One way to train the network; all of the library's part in this program is in `FITS`."""

    optimizer: Callable[[nn.Module], Optimizer]
    steps: int  # that take the time of 500 steps of Adam


#: Learning rates, damping and steps are those of the benchmark "fourier", whose trials learned another photograph; see
#: docs/results/fields.md. Its Muon works in float32; torch's works in bfloat16, whose steps take longer on a CPU.
FITS = {
    "Adam": Fit(lambda model: Adam(model.parameters(), lr=0.018), 500),
    "Muon": Fit(lambda model: muon(model, lr=0.042), 471),
    "SOAP": Fit(lambda model: SOAP(model.parameters(), lr=0.042, weight_decay=0.0), 422),
    "Whitened SOAP": Fit(
        lambda model: Whitened(SOAP(model.parameters(), lr=0.056, weight_decay=0.0), model, damping=0.1), 316
    ),
}


def features(points: Tensor) -> Tensor:
    """The sines and cosines of random projections of the points (Tancik et al. 2020): (pixels, 64)."""
    angles = points @ (math.pi * DEVIATION * torch.randn(2, FREQUENCIES))
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


def network(inputs: int, *, batch_norm: bool = False) -> nn.Sequential:
    """Ten linear layers with ReLU, from the inputs to red, green and blue."""
    layers: list[nn.Module] = []
    for place in range(LAYERS):
        columns, rows = inputs if place == 0 else WIDTH, 3 if place == LAYERS - 1 else WIDTH
        layers += [nn.Linear(columns, rows), *([nn.BatchNorm1d(rows)] * batch_norm), nn.ReLU()]
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
        raise SystemExit(f"--size {size}: {path or 'china.jpg'} is {width} × {height} pixels; take at most {side}.")
    top, left = (height - side) // 2, (width - side) // 2
    square = pixels[top : top + side, left : left + side].permute(2, 0, 1)
    return F.adaptive_avg_pool2d(square, size).permute(1, 2, 0) * 2 - 1


def psnr(learned: Tensor, wanted: Tensor) -> float:
    """The peak signal-to-noise ratio in dB; colours have a range of 2."""
    return 10 * math.log10(4 / F.mse_loss(learned, wanted).item())


def steps_of(fit: Fit, steps: int) -> int:
    """How many steps take the time of so many of Adam's."""
    return max(1, round(fit.steps * steps / STEPS))


def train(fit: Fit, wanted: Tensor, steps: int, tick: Callable[[float], None] = lambda decibels: None) -> Tensor:
    """Learn a picture in so many steps, and return what was learned."""
    torch.manual_seed(0)
    axis = (torch.arange(len(wanted)) + 0.5) / len(wanted) * 2 - 1
    inputs, colours = features(torch.cartesian_prod(axis, axis)), wanted.reshape(-1, 3)
    model = network(inputs.shape[1])
    optimizer = fit.optimizer(model)
    schedule = LambdaLR(optimizer, lambda n: min(1, (n + 1) / WARM_UP) * (1 + math.cos(math.pi * n / steps)) / 2)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.mse_loss(model(inputs), colours)
        loss.backward()
        optimizer.step()
        schedule.step()
        tick(10 * math.log10(4 / loss.item()))
    with torch.no_grad():
        return model(inputs).view_as(wanted)


def draw(pictures: dict[str, Tensor], wanted: Tensor, path: Path) -> None:
    """Write the picture and what was learned of it with the PSNR, and below how far every pixel is off."""
    columns = {"the picture": wanted, **pictures}
    fig, axes = plt.subplots(2, len(columns), figsize=(1.9 * len(columns), 4.5), layout="constrained")
    for (above, below), (name, learned) in zip(axes.T, columns.items(), strict=True):
        is_picture, weight = learned is wanted, "bold" if name.startswith("Whitened") else "normal"
        above.imshow(((learned + 1) / 2).clamp(0, 1))
        above.set_title(name, fontsize=11, fontweight=weight)
        size = f"{wanted.shape[0]} × {wanted.shape[1]} pixels"
        above.set_xlabel(size if is_picture else f"{psnr(learned, wanted):.1f} dB", fontsize=11, fontweight=weight)
        if is_picture:
            below.text(0.5, 0.5, "errors, 10 times\nas large: black is none", ha="center", va="center", fontsize=10)
        else:
            below.imshow((5 * (learned - wanted).abs()).clamp(0, 1))
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[])
        axis.spines[:].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=110)
    plt.close(fig)


def main(arguments: Sequence[str] | None = None) -> None:
    """Learn the picture in each way, and write the PNG."""
    parser = argparse.ArgumentParser(prog="python -m examples.fit_image", description=__doc__.partition("\n")[0])
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    parser.add_argument("--image", type=Path, help="a file that Pillow reads; else scikit-learn's china.jpg")
    parser.add_argument("--size", type=positive, default=64, help="pixels a side, of a square from the middle")
    parser.add_argument("--steps", type=positive, default=STEPS, help="of Adam; the others have its time")
    parser.add_argument("--out", type=picture_file, default=Path("runs/fit_image.png"), help="where the PNG goes")
    options = parser.parse_args(arguments)
    wanted, pictures, lines = picture(options.image, options.size), dict[str, Tensor](), list[str]()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns) as progress:
        for name, fit in FITS.items():
            steps, start = steps_of(fit, options.steps), time.process_time()
            task = progress.add_task(name, total=steps)

            def tick(decibels: float, task: TaskID = task, name: str = name) -> None:
                progress.update(task, advance=1, description=f"{name}: {decibels:.1f} dB")

            pictures[name] = train(fit, wanted, steps, tick)
            seconds = time.process_time() - start
            lines.append(f"{name}: {psnr(pictures[name], wanted):.1f} dB, {steps} steps, {seconds:.1f} s")
    draw(pictures, wanted, options.out)
    print("\n".join([*lines, f"picture: {options.out}"]))


if __name__ == "__main__":
    main()
