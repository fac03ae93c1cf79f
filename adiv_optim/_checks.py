"""Checks of settings and of checkpoints, and warnings that name the line outside of this package."""

import math
import sys
import warnings
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import Any

from torch import Tensor


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


def _check(where: str, settings: Mapping[str, Any], kind: type, fits: Callable[[Any], bool], wanted: str) -> None:
    for name, value in settings.items():
        if isinstance(value, bool) or not isinstance(value, kind) or not fits(value):
            raise ValueError(f"{where}: {name} is {value!r}; it must be {wanted}.")


def check_dict(found: Any, path: str, remedy: str) -> None:
    """Raise a ValueError that names `path` if part of a checkpoint is no dict."""
    if not isinstance(found, Mapping):
        raise ValueError(f"{path} is {shown(found)}, wanted a dict; {remedy}.")


def check_like(found: Any, own: Any, path: str, remedy: str) -> None:
    """Raise a ValueError at the first place where part of a checkpoint is not like one's own.

    Dicts have the same keys, tensors the same shape and no NaN or inf; numbers are finite, at least 0, and whole where
    the own one is.

    Args:
        found: part of a checkpoint.
        own: what would be saved now.
        path: where `found` stands, for the message.
        remedy: what to do about it, likewise.

    Raises:
        ValueError: names the place, what was found there, what was wanted, and the remedy.

    Example:
        >>> check_like({"steps": 3, "rows": 8.0}, {"steps": 0, "rows": 0.0}, "state", "save it again")
        >>> check_like({"steps": -1, "rows": 8.0}, {"steps": 0, "rows": 0.0}, "state", "save it again")
        Traceback (most recent call last):
        ValueError: state['steps'] is -1 (int), wanted an integer of at least 0; save it again.
    """
    if isinstance(own, Mapping):
        check_dict(found, path, remedy)
        differences = [f"lacks {key!r}" for key in own if key not in found]
        differences += [f"has an unknown {key!r}" for key in found if key not in own]
        if differences:
            raise ValueError(f"{path} {differences[0]}: it is {shown(found)}, wanted {shown(own)}; {remedy}.")
        for key in own:
            check_like(found[key], own[key], f"{path}[{key!r}]", remedy)
    elif isinstance(own, Tensor):
        fits = isinstance(found, Tensor) and found.is_floating_point() and found.shape == own.shape
        if not fits or not bool(found.isfinite().all()):
            wanted = f"a floating-point tensor of shape {tuple(own.shape)} without NaN or inf"
            raise ValueError(f"{path} is {shown(found)}, wanted {wanted}; {remedy}.")
    else:
        whole = isinstance(own, int)
        kind = int if whole else (int, float)
        if isinstance(found, bool) or not isinstance(found, kind) or not 0 <= found < math.inf:
            wanted = f"{'an integer' if whole else 'a finite number'} of at least 0"
            raise ValueError(f"{path} is {shown(found)}, wanted {wanted}; {remedy}.")


def shown(value: Any) -> str:
    """Say in a few words what a value is."""
    if isinstance(value, Tensor):
        poisoned = value.is_floating_point() and not bool(value.isfinite().all())
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}" + " with NaN or inf" * poisoned
    if isinstance(value, Mapping):
        keys = [repr(key) for key in value]
        return f"a dict of {', '.join(keys[:10])}{', …' * (len(keys) > 10)}" if keys else "an empty dict"
    if isinstance(value, (list, tuple)):
        return f"a {type(value).__name__} of {len(value)}"
    return f"{repr(value)[:60]} ({type(value).__name__})"


#: This package, and torch, whose decorators and compiled code call it.
_INSIDE = ("adiv_optim.", "torch.")


def warn(message: str) -> None:
    """Give a UserWarning for the line outside of this package and of torch that led here."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_INSIDE):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, UserWarning, stacklevel=level)
