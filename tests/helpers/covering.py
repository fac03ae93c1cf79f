"""Rows that together hold every entry of several tables, in place of all combinations of them."""

from collections.abc import Mapping
from itertools import cycle, islice
from typing import Any

import pytest


def paired(names: str, *tables: Mapping[str, Any]) -> pytest.MarkDecorator:
    """Parametrize by a row for each entry of the longest table, in which those of the others take turns.

    For options that do not meet in the code: a fault in one shows in its row whatever stands beside it.
    """
    columns = [islice(cycle(table.items()), max(map(len, tables))) for table in tables]
    rows = [[*row] for row in zip(*columns, strict=True)]
    return pytest.mark.parametrize(
        names.split(),
        [pytest.param(*(value for _, value in row), id="-".join(name for name, _ in row)) for row in rows],
    )
