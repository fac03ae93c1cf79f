"""Options of commands: the fields of a dataclass, each with its text below it; tyro makes the flags."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import tyro

#: Options that count something: none of them may be 0.
COUNTS = ("steps", "trials", "crops", "rounds", "minutes", "width", "seeds", "epochs", "threads")
#: Where to train by default.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass
class Options:
    """What every command has."""

    name: str = ""
    """of the file of results and of the table"""
    out: Path = Path("runs")
    """folder of the result files"""
    threads: int | None = None
    """CPU threads; torch's choice by default"""
    method_file: Path | None = None
    """a Python file whose METHODS are known beside the others"""


@dataclass
class Training(Options):
    """What every study has that trains."""

    download: bool = False
    """fetch CIFAR-10 or tinyshakespeare into ./data"""
    log: Literal["tensorboard"] | None = None
    """also write losses while they train, to OUT/NAME.tensorboard"""


Given = TypeVar("Given", bound=Options)


def parsed(command: str, help: str, defaults: Given, arguments: list[str]) -> Given:
    """The options of a command; what is not given is as in `defaults`. A flag that there is not ends the program.

    Raises:
        ValueError: a number is negative, or a count is 0.
    """
    defaults = replace(defaults, name=defaults.name or command)
    options: Any = tyro.cli(
        type(defaults), prog=f"python -m benchmarks {command}", description=help, args=arguments, default=defaults,
        config=(tyro.conf.FlagCreatePairsOff,),
    )  # fmt: skip
    for name, value in vars(options).items():
        for number in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(number, int) and (number < 0 or (number == 0 and name in COUNTS and number is not False)):
                raise ValueError(f"--{name.replace('_', '-')} is {number}; it must be positive.")
    return options
