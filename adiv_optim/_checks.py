"""Checks of settings and of checkpoints, and warnings that name the line outside of this package."""

import math
import sys
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from numbers import Integral, Real
from typing import Any

from torch import Tensor


def _check(kind: type, fits: Callable[[Any], bool], wanted: str, caller: str, /, **settings: Any) -> None:
    """Raise a ValueError that names the first setting that is not as wanted."""
    for name, value in settings.items():
        if isinstance(value, bool) or not isinstance(value, kind) or not fits(value):
            raise ValueError(f"{caller}: {name} is {value!r}; it must be {wanted}.")


#: Checks of settings: check_positive("BatchIdeal", damping=damping). Each raises a ValueError.
check_positive = partial(_check, Real, lambda value: 0 < value < math.inf, "positive and finite")
check_not_negative = partial(_check, Real, lambda value: 0 <= value < math.inf, "finite and at least 0")
check_finite = partial(_check, Real, math.isfinite, "a finite number")
check_count = partial(_check, Integral, lambda value: value >= 1, "an integer of at least 1")


def without_none(**settings: Any) -> dict[str, Any]:
    """Leave out settings that are None, for checks of those that may be None."""
    return {name: value for name, value in settings.items() if value is not None}


def check_dict(value: Any, path: str, remedy: str) -> None:
    """Raise a ValueError that names `path` if the part of a checkpoint that stands there is no dict."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{path} is {describe(value)}, wanted a dict; {remedy}.")


def check_like(saved: Any, wanted: Any, path: str, remedy: str) -> None:
    """Raise a ValueError at the first entry of a checkpoint that differs in form from what would be saved now.

    Dicts have the same keys, tensors the same shape and no NaN or inf; numbers are finite, at least 0, and whole where
    the wanted one is. `path`, where it stands, and `remedy` are for the message.

    Example:
        >>> check_like({"steps": 3, "rows": 8.0}, {"steps": 0, "rows": 0.0}, "state", "save it again")
        >>> check_like({"steps": -1, "rows": 8.0}, {"steps": 0, "rows": 0.0}, "state", "save it again")
        Traceback (most recent call last):
        ValueError: state['steps'] is -1 (int), wanted an integer of at least 0; save it again.
    """
    if isinstance(wanted, Mapping):
        check_dict(saved, path, remedy)
        differences = [f"lacks {key!r}" for key in wanted if key not in saved]
        differences += [f"has an unknown {key!r}" for key in saved if key not in wanted]
        if differences:
            raise ValueError(f"{path} {differences[0]}: it is {describe(saved)}, wanted {describe(wanted)}; {remedy}.")
        for key in wanted:
            check_like(saved[key], wanted[key], f"{path}[{key!r}]", remedy)
        return
    if isinstance(wanted, Tensor):
        form = f"a floating-point tensor of shape {tuple(wanted.shape)} without NaN or inf"
        fits = isinstance(saved, Tensor) and saved.is_floating_point() and saved.shape == wanted.shape
        fits = fits and bool(saved.isfinite().all())
    else:
        kind, form = (int, "an integer") if isinstance(wanted, int) else ((int, float), "a finite number")
        form += " of at least 0"
        fits = isinstance(saved, kind) and not isinstance(saved, bool) and 0 <= saved < math.inf
    if not fits:
        raise ValueError(f"{path} is {describe(saved)}, wanted {form}; {remedy}.")


def describe(value: Any) -> str:
    """Describe a value in a few words."""
    if isinstance(value, Tensor):
        has_nan_or_inf = value.is_floating_point() and not bool(value.isfinite().all())
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}" + " with NaN or inf" * has_nan_or_inf
    if isinstance(value, Mapping):
        keys = [repr(key) for key in value]
        return f"a dict of {', '.join(keys[:10])}{', …' * (len(keys) > 10)}" if keys else "an empty dict"
    if isinstance(value, (list, tuple)):
        return f"a {type(value).__name__} of {len(value)}"
    return f"{repr(value)[:60]} ({type(value).__name__})"


#: This package, and torch, whose decorators and compiled code call it.
_INSIDE = ("adiv_optim.", "torch.")


def warn(message: str) -> None:
    """Give a UserWarning for the line of the caller, outside of this package and of torch."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_INSIDE):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, UserWarning, stacklevel=level)
