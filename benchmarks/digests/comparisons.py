"""Tables of digests: `claims.csv` has what is claimed, `values.csv` numbers of sentences, `calls.csv` calls.

Settings of runs stand there as `method=affine-like; activation=tanh`, and of others those in which these differ.
"""

import csv
import json
from itertools import product
from pathlib import Path
from typing import Any

from .reached import Settings


def table(name: str) -> list[dict[str, str]]:
    """The rows of a table, by their columns."""
    with (Path(__file__).parent / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def settings(cell: str) -> list[Settings]:
    """All combinations of settings that a cell names.

    A value is a word or JSON's; null stands for a run without the setting, and `a|b` for runs with any of several.

    Example:
        >>> settings("method=dyt,none; lr=0.1; rows=null")
        [{'method': 'dyt', 'lr': 0.1, 'rows': None}, {'method': 'none', 'lr': 0.1, 'rows': None}]
        >>> [sorted(each["data_set"]) for each in settings("data_set=a|b")]
        [['a', 'b']]
    """
    pairs = [setting.split("=") for setting in cell.split("; ") if setting]
    values = product(*([_value(text) for text in texts.split(",")] for _, texts in pairs))
    return [dict(zip([name for name, _ in pairs], each, strict=True)) for each in values]


def beside(runs: Settings, cell: str) -> list[Settings]:
    """The settings of the runs that some are compared with, which differ as a cell says; there are none if it is empty.

    Example:
        >>> beside({"method": "dyt", "lr": 0.1}, "method=none,layernorm")
        [{'method': 'none', 'lr': 0.1}, {'method': 'layernorm', 'lr': 0.1}]
    """
    return [{**runs, **different} for different in settings(cell)] if cell else []


def _value(text: str) -> Any:
    if "|" in text:
        return set(text.split("|"))
    try:
        return json.loads(text)
    except ValueError:
        return text
