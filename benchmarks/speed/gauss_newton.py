"""The price of a step of GaussNewton, and of its Jacobian and solution alone, in plain steps: loss, backward, Adam."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap

from adiv_optim import GaussNewton
from adiv_optim.jacobian import laplacian
from adiv_optim.jacobian.terms import Terms, solver

from ..core.runs import in_turn, measure
from ..core.store import Result, Store
from ..core.study import Options, Recipe, Sections, Study
from ..core.tables import Cell, Row, Section, Table, exact, machine
from ..train import perceptron, xavier

#: A Jacobian of more numbers is left out: a step with it needs four times its memory.
LARGEST = 10**8
PARTS = {"step": "step", "jacobian": "J", "solution": "solution"}


def network(width: int) -> nn.Module:
    """A tanh network of three hidden layers, by Xavier's initialisation."""
    torch.manual_seed(0)
    return xavier(nn.Sequential(*perceptron((2, width, width, width, 1), activation=nn.Tanh)).double())


def residual(model: nn.Module, x: Tensor) -> Tensor:
    """Poisson's equation at a point."""
    return laplacian(model, x) + 2 * math.pi**2 * (math.pi * x).sin().prod()


def jobs(rows: int, width: int) -> dict[str, Callable[[], Any]]:
    """What is timed: both kinds of step train a network of their own, with points that each step draws."""

    def points() -> Tensor:
        return torch.rand(rows, 2, dtype=torch.float64)

    plain, model = network(width), network(width)
    adam, optimizer = torch.optim.Adam(plain.parameters()), GaussNewton(model)
    weights = {name: parameter.detach() for name, parameter in network(width).named_parameters()}
    terms = Terms(model, [(residual, points())], "")
    r = terms.evaluate(weights)
    jacobian = terms.jacobian(weights, None)

    def plain_step() -> None:
        adam.zero_grad()
        (vmap(partial(residual, plain))(points()).square().mean() / 2).backward()
        adam.step()

    return {
        "plain": plain_step,
        "step": lambda: optimizer.step([(residual, points())]),
        "jacobian": torch.no_grad()(partial(terms.jacobian, weights, None)),
        "solution": lambda: solver(jacobian, 1e-10)(r),
    }


def size(width: int) -> int:
    """The parameters of a network."""
    return sum(parameter.numel() for parameter in network(width).parameters())


def row(rows: int, width: int, rounds: int) -> Result:
    """The times of one size, in turn."""
    ratios, milliseconds = in_turn(jobs(rows, width), rounds)
    ratios = {part: ratios[part] for part in PARTS}
    return {"rows": rows, "parameters": size(width), "plain_ms": milliseconds, "ratios": ratios}


def report(store: Store, name: str, folder: Path) -> Sections:
    """A row for every size."""
    results, rows = sorted(store.read(), key=lambda r: (r["parameters"], r["rows"])), list[Row]()
    for r in results:
        sizes = [exact(r["parameters"], ","), exact(r["rows"], ","), exact(r["plain_ms"], ".1f")]
        rows.append([*sizes, *(_ratio(r["ratios"][part]) for part in PARTS)])
    header = ["parameters", "residuals", "plain step, ms", *PARTS.values()]
    caption = (
        "In plain steps (loss, backward pass, Adam) of the same residuals: Poisson's equation, three hidden tanh "
        "layers, float64, the first steps of a training. Medians of rounds, processor time; the file has the shares of "
        f"Jacobian and QR. {machine(results[0]['environment'])}"
    )
    return {name: Section([Table(header, rows), caption])}


def _ratio(ratio: dict[str, Any]) -> Cell:
    (low, high), middle = ratio["quartiles"], ratio["median"]
    return Cell(f"{middle:.3g}", {"": middle, "low": low, "high": high, "n": ratio["rounds"]})


@dataclass
class CostOptions(Options):
    """Options of this study."""

    rows: tuple[int, ...] = (100, 300, 1000, 3000)  # residuals of a step
    widths: tuple[int, ...] = (20, 70, 220)  # of the network: 921, 10,221 and 98,121 parameters
    rounds: int = 15  # of each size; a third of them where J has ten million numbers or more


def _run(options: CostOptions, store: Store) -> None:
    wanted = dict[str, Callable[[], Result]]()
    for width, rows in product(options.widths, options.rows):
        if (numbers := rows * size(width)) <= LARGEST:
            rounds = options.rounds if numbers < LARGEST / 10 else math.ceil(options.rounds / 3)
            wanted[f"{rows} residuals, width {width}"] = partial(row, rows, width, rounds)
    measure(store, wanted)


STUDIES = {
    "speed-gauss-newton": Study(
        "what a step of GaussNewton costs, by residuals and parameters", _run, report, CostOptions(),
        makes=[Recipe(0.1)], smoke="--rows 3 --widths 2 --rounds 2", page="docs/gauss-newton.md",
    )
}  # fmt: skip
