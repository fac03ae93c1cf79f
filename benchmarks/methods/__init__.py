"""The methods compared, by their names."""

import runpy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .images import IMAGES
from .language import LANGUAGE
from .method import Method, Search

__all__ = ["METHODS", "Method", "Search", "added", "having", "optimizer_name", "searched"]

METHODS: dict[str, Method] = {**IMAGES, **LANGUAGE}


def having(study: str) -> list[str]:
    """The methods of a comparison, by their names."""
    return [name for name, method in METHODS.items() if study in method.studies.split()]


def searched(study: str) -> list[tuple[str, Search]]:
    """What the methods name for a comparison that chooses their rates and dampings."""
    return [(name, each) for name, method in METHODS.items() for each in method.searches if each.study == study]


def optimizer_name(settings: Mapping[str, Any]) -> str:
    """What trains a run for images: its optimizer, or the method's own."""
    method = METHODS[settings["method"]]
    return method.label if callable(method.optimizer) else str(settings["optimizer"])


@contextmanager
def added(path: Path | None) -> Iterator[None]:
    """Let `METHODS` hold what a Python file's own METHODS does, if one is given; one without is a ValueError."""
    found = {} if path is None else runpy.run_path(str(path)).get("METHODS")
    if not isinstance(found, dict) or not all(isinstance(method, Method) for method in found.values()):
        example = 'METHODS = {"mine": Method("my method", "crimson", correction=Mine())}'
        raise ValueError(f"{path} holds no METHODS; write `from benchmarks.methods import Method`, then `{example}`.")
    if known := METHODS.keys() & found.keys():
        raise ValueError(f"{path}: there is a method {min(known)!r} already; give it another name.")
    METHODS.update(found)
    try:
        yield
    finally:
        for name in found:
            del METHODS[name]
