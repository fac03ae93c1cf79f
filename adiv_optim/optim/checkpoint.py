"""Checks of a checkpoint before anything of it is taken; errors name the first place that is not as wanted."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor


class Fits(NamedTuple):
    """Any value that passes a test.

    Args:
        what: the test in words.
        test: the test.
    """

    what: str
    test: Callable[[Any], bool]


class Maybe(NamedTuple):
    """None, or what is wanted."""

    wanted: Any


def is_number(value: Any) -> bool:
    """Whether a value is an int or a float; True and False are neither here."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


ANYTHING = Fits("anything", lambda value: True)
COUNT = Fits("an integer of at least 0", lambda value: is_number(value) and isinstance(value, int) and value >= 0)
NUMBER = Fits("a finite number of at least 0", lambda value: is_number(value) and 0 <= value < math.inf)
POSITIVE = Fits("a finite number above 0", lambda value: is_number(value) and 0 < value < math.inf)
DICT = Fits("a dict", lambda value: isinstance(value, Mapping))
NAMES = Fits("a list of names", lambda value: isinstance(value, list) and all(isinstance(n, str) for n in value))


def numbers(shape: tuple[int, ...]) -> Fits:
    """A floating-point tensor of this shape, without NaN and inf."""

    def test(value: Any) -> bool:
        fits = isinstance(value, Tensor) and value.is_floating_point() and value.shape == shape
        return fits and bool(value.isfinite().all())

    return Fits(f"a floating-point tensor of shape {shape} without NaN or inf", test)


def check(found: Any, wanted: Any, path: str, remedy: str) -> None:
    """Raise a ValueError at the first place where `found` is not as wanted.

    Args:
        found: part of a checkpoint.
        wanted: built as `found` should be: dicts have the same keys (and any others if one of them is `...`), lists and
            tuples the same length, and what they hold is `Fits`, or `Maybe` if None will do.
        path: where `found` stands, for the message.
        remedy: what to do about it, likewise.

    Raises:
        ValueError: names the place, what was found there, what was wanted, and the remedy.

    Example:
        >>> check({"steps": 3, "rows": None}, {"steps": COUNT, "rows": Maybe(POSITIVE)}, "state", "save it again")
        >>> check({"steps": -1, "rows": None}, {"steps": COUNT, "rows": Maybe(POSITIVE)}, "state", "save it again")
        Traceback (most recent call last):
        ValueError: state['steps'] is -1 (int), wanted an integer of at least 0; save it again.
    """
    if isinstance(wanted, Maybe):
        if found is not None:
            check(found, wanted.wanted, path, remedy)
    elif isinstance(wanted, Fits):
        if not wanted.test(found):
            raise ValueError(f"{path} is {shown(found)}, wanted {wanted.what}; {remedy}.")
    elif isinstance(wanted, Mapping):
        if not isinstance(found, Mapping):
            raise ValueError(f"{path} is {shown(found)}, wanted {shown(wanted)}; {remedy}.")
        missing = [f"lacks {key!r}" for key in wanted if key not in found and key is not ...]
        unknown = [f"has an unknown {key!r}" for key in found if key not in wanted and ... not in wanted]
        for difference in missing + unknown:
            raise ValueError(f"{path} {difference}: it is {shown(found)}, wanted {shown(wanted)}; {remedy}.")
        for key in wanted:
            if key is not ...:
                check(found[key], wanted[key], f"{path}[{key!r}]", remedy)
    else:
        if not isinstance(found, (list, tuple)) or len(found) != len(wanted):
            raise ValueError(f"{path} is {shown(found)}, wanted a list of {len(wanted)}; {remedy}.")
        for place, (part, value) in enumerate(zip(found, wanted, strict=True)):
            check(part, value, f"{path}[{place}]", remedy)


def shown(value: Any) -> str:
    """Say in a few words what a value is."""
    if isinstance(value, Tensor):
        poisoned = value.is_floating_point() and not bool(value.isfinite().all())
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}" + " with NaN or inf" * poisoned
    if isinstance(value, Mapping):
        keys = ["…" if key is ... else repr(key) for key in value]
        return f"a dict of {', '.join(keys[:10])}{', …' * (len(keys) > 10)}" if keys else "an empty dict"
    if isinstance(value, (list, tuple)):
        return f"a {type(value).__name__} of {len(value)}"
    return f"{repr(value)[:60]} ({type(value).__name__})"
