"""Checks of settings: numbers within limits, shapes that broadcast."""

import math
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import Any


def check_positive(where: str, **settings: float) -> None:
    """Raise a ValueError that names the first setting that is not a finite number above 0."""
    _check(where, settings, Real, lambda value: 0 < value < math.inf, "positive and finite")


def check_not_negative(where: str, **settings: float) -> None:
    """Raise a ValueError that names the first setting that is not a finite number of at least 0."""
    _check(where, settings, Real, lambda value: 0 <= value < math.inf, "finite and at least 0")


def check_finite(where: str, **settings: float) -> None:
    """Raise a ValueError that names the first setting that is not a finite number."""
    _check(where, settings, Real, math.isfinite, "a finite number")


def check_count(where: str, **settings: int) -> None:
    """Raise a ValueError that names the first setting that is not an integer of at least 1."""
    _check(where, settings, Integral, lambda value: value >= 1, "an integer of at least 1")


def given(**settings: Any) -> dict[str, Any]:
    """Return the settings that are not None, of those that may be."""
    return {name: value for name, value in settings.items() if value is not None}


def broadcasts(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Whether a tensor of this shape can be expanded to the wanted one.

    Example:
        >>> broadcasts((3, 1), (2, 3, 4)), broadcasts((2, 1), (2, 3, 4))
        (True, False)
    """
    sizes = zip(reversed(shape), reversed(wanted), strict=False)
    return len(shape) <= len(wanted) and all(size in (1, full) for size, full in sizes)


def _check(where: str, settings: Mapping[str, Any], kind: type, fits: Callable[[Any], bool], wanted: str) -> None:
    for name, value in settings.items():
        if isinstance(value, bool) or not isinstance(value, kind) or not fits(value):
            raise ValueError(f"{where}: {name} is {value!r}; it must be {wanted}.")
