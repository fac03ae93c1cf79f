"""Measurements as files and for loggers."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_json(path: str | Path, result: dict[str, Any]) -> None:
    """Write strict JSON, which has no name for some numbers: they become null."""
    Path(path).write_text(json.dumps(_finite(result), indent=1) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def scalars(name: str, layers: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """The numbers of each layer under "name/path/key", those within them under "name/path/key/…"."""
    found: dict[str, float] = {}
    for path, entry in layers.items():
        for key, value in entry.items():
            if isinstance(value, Mapping):
                found |= scalars(f"{name}/{path}", {key: value})
            elif isinstance(value, (int, float)):
                found[f"{name}/{path}/{key}"] = float(value)
    return found
