r"""A recurrent cell, which has no closed form, trained by `Proportional`'s gradients from explicit Jacobians.

    pip install '.[bench]'
    python -m examples.recurrent

Digits are read row by row. The cell h′ = tanh(Wx + Uh + b) is called eight times, and `jacobian.backward` corrects each
call by the Jacobian that torch.func computes. Every rule has the best of its learning rates on a fifth of the digits;
the program prints accuracy on another fifth, and the price of a step. In a minute on a CPU it shows that the path
works, and no gain.
"""

import argparse
import statistics
import time

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from adiv_optim import Correction, Proportional, jacobian

from .arguments import positive

#: Rule → its gradients; None is the plain gradient by autograd.
RULES: dict[str, Correction | None] = {"plain": None, "Proportional": Proportional()}
RATES = (0.1, 0.3, 1.0, 3.0)


class Cell(nn.Module):
    """h′ = tanh(Wx + Uh + b)."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.of_input = nn.Parameter(torch.randn(width, inputs) / inputs**0.5)
        self.of_state = nn.Parameter(torch.randn(width, width) / width**0.5)
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        """Map inputs (samples, inputs) and states (samples, width) to the next states."""
        return torch.tanh(x @ self.of_input.T + state @ self.of_state.T + self.bias)


class Reader(nn.Module):
    """A cell that reads the rows of an image, and a linear layer on its last state."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.width, self.cell, self.head = width, Cell(8, width), nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (samples, rows, 8) to scores (samples, 10)."""
        state = images.new_zeros(len(images), self.width)
        for row in images.unbind(1):
            state = self.cell(row, state)
        return self.head(state)


def train(rule: Correction | None, lr: float, images: Tensor, labels: Tensor, epochs: int) -> tuple[Reader, float]:
    """Return the network after some epochs of plain SGD, and the seconds of a step."""
    torch.manual_seed(0)
    model, seconds = Reader(), []
    opt = torch.optim.SGD(model.parameters(), lr=lr)
    for _ in range(epochs):
        for batch in torch.randperm(len(labels)).split(32):
            began = time.process_time()
            opt.zero_grad()
            if rule is None:
                F.cross_entropy(model(images[batch]), labels[batch]).backward()
            else:
                jacobian.backward(model, F.cross_entropy, images[batch], labels[batch], rule)
            opt.step()
            seconds.append(time.process_time() - began)
    return model, statistics.median(seconds)


@torch.no_grad()
def accuracy(model: Reader, images: Tensor, labels: Tensor) -> float:
    """Return the share of images, in %, whose highest score is that of their label."""
    return 100 * (model(images).argmax(1) == labels).float().mean().item()


def main(arguments: list[str] | None = None) -> None:
    """Train by every rule, and print what it reached."""
    parser = argparse.ArgumentParser(prog="python -m examples.recurrent", description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=positive, default=10, help="10 where it is not given")
    options = parser.parse_args(arguments)
    pixels, digits = (torch.tensor(part) for part in load_digits(return_X_y=True))
    order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(0))
    images, labels = pixels.float()[order].view(-1, 8, 8) / 16, digits[order]
    fifth = len(labels) // 5
    parts = (slice(2 * fifth, None), slice(fifth), slice(fifth, 2 * fifth))
    learned, chosen_by, judged = ((images[part], labels[part]) for part in parts)
    for name, rule in RULES.items():
        runs = [(lr, *train(rule, lr, *learned, options.epochs)) for lr in RATES]
        lr, model, seconds = max(runs, key=lambda run: accuracy(run[1], *chosen_by))
        print(f"{name:<13}rate {lr:g}: {accuracy(model, *judged):.1f} % after {options.epochs} epochs, "
              f"{1000 * seconds:.1f} ms a step")  # fmt: skip


if __name__ == "__main__":
    main()
