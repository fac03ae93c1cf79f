"""Settings that are numbers within limits."""

import math
from numbers import Integral, Real
from typing import Any


def check_positive(where: str, **settings: float) -> None:
    """Raise a ValueError that names the first setting that is not a finite number above 0."""
    for name, value in settings.items():
        if not (_is(value, Real) and 0 < value < math.inf):
            raise _wrong(where, name, value, "positive and finite")


def check_not_negative(where: str, **settings: float) -> None:
    """Raise a ValueError that names the first setting that is not a finite number of at least 0."""
    for name, value in settings.items():
        if not (_is(value, Real) and 0 <= value < math.inf):
            raise _wrong(where, name, value, "finite and at least 0")


def check_finite(where: str, **settings: float) -> None:
    """Raise a ValueError that names the first setting that is not a finite number."""
    for name, value in settings.items():
        if not (_is(value, Real) and math.isfinite(value)):
            raise _wrong(where, name, value, "a finite number")


def check_count(where: str, **settings: int) -> None:
    """Raise a ValueError that names the first setting that is not an integer of at least 1."""
    for name, value in settings.items():
        if not (_is(value, Integral) and value >= 1):
            raise _wrong(where, name, value, "an integer of at least 1")


def given(**settings: Any) -> dict[str, Any]:
    """Return the settings that are not None, of those that may be."""
    return {name: value for name, value in settings.items() if value is not None}


def _is(value: object, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _wrong(where: str, name: str, value: object, wanted: str) -> ValueError:
    return ValueError(f"{where}: {name} is {value!r}; it must be {wanted}.")
