"""Count the code that a training step of `Whitened(Adam)` of an MLP runs through: `python -m tests.step_size`.

A training step is the forward pass with its hooks, the backward pass and the optimizer's step. A round of `every` steps
is profiled after a warm-up: one of them measures, the others do not. Counted are the files of adiv_optim whose
functions are called, all lines of these files, these functions, and the lines of these functions.
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Collection
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
from torch import nn

import adiv_optim
from adiv_optim import Whitened

LIBRARY = Path(adiv_optim.__file__).parent
EVERY = 10
WARM_UP = 4 * EVERY
#: They count as a part of the function around them.
COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")


class Size(NamedTuple):
    """How much code some functions are."""

    files: int
    lines: int
    functions: int
    lines_of_functions: int

    def __str__(self) -> str:
        return f"{self.files} files of {self.lines:,} lines, {self.functions} functions of {self.lines_of_functions:,}"


#: No step runs through more than this.
LIMIT = Size(files=10, lines=1900, functions=100, lines_of_functions=884)


def training_step() -> Callable[[], None]:
    """A step of an MLP of four layers, two of them of one shape."""
    torch.manual_seed(0)
    widths = [(10, 32), (32, 32), (32, 32), (32, 3)]
    model = nn.Sequential(*(part for ends in widths for part in (nn.Linear(*ends), nn.ReLU())))
    optimizer = Whitened(torch.optim.Adam(model.parameters()), model, every=EVERY)
    x = torch.randn(16, 10)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step


def functions_called(call: Callable[[], None], folder: Path = LIBRARY) -> set[CodeType]:
    """The functions of Python files in a folder that a call runs through."""
    codes: set[CodeType] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            codes.add(frame.f_code)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    inside = {code for code in codes if folder in Path(code.co_filename).parents}
    return {code for code in inside if code.co_name not in COMPREHENSIONS}


def size_of(functions: Collection[CodeType]) -> Size:
    """How many files and lines some functions take, with their docstrings and comments."""
    lines: dict[str, set[int]] = defaultdict(set)
    for code in functions:
        last = max(line for _, _, line in code.co_lines() if line is not None)
        lines[code.co_filename].update(range(code.co_firstlineno, last + 1))
    all_lines = sum(len(Path(file).read_text().splitlines()) for file in lines)
    return Size(len(lines), all_lines, len(functions), sum(map(len, lines.values())))


def functions_by_step() -> list[set[CodeType]]:
    """The functions that each step of a round runs through, the least first: the last of these steps measures."""
    step = training_step()
    for _ in range(WARM_UP):
        step()
    return sorted((functions_called(step) for _ in range(EVERY)), key=len)


def main() -> None:
    """Print the size of a step that measures and of one that does not."""
    plain, *_, measuring = functions_by_step()
    print(f"a step that measures: {size_of(measuring)}")
    print(f"a step that does not: {size_of(plain)}")


if __name__ == "__main__":
    main()
