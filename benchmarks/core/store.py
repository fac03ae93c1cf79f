"""The file that keeps what runs reached, and the circumstances in which they did.

The results of a study are one file of JSON lines, to which whole lines are added and of which nothing is changed. It
begins with what it is of, `{"study": …, "settings": …}`: the settings of the first run. Then stand environments, each
before the first run made in it, and runs, each with the settings in which it differs from the first.
"""

import fcntl
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from datetime import date
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

import adiv_optim

#: A line as it is read: "settings" and "environment" whole, "key", "part", and what was measured.
Result = dict[str, Any]


def setting(*names: str) -> Callable[[Result], Any]:
    """What reads a setting of results, or a tuple of several; None stands for one that a run does not have."""
    if len(names) == 1:
        return lambda result: result["settings"].get(names[0])
    return lambda result: tuple(map(result["settings"].get, names))


def digest(value: Any) -> str:
    """Eight letters that tell values of JSON apart."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:8]


class Store:
    """The file of one study's results.

    A line has a key, which says what was run, and a hash of what its method computes. A line whose key came
    before takes the place of the earlier one; so a rule that has changed is run again, and the new line counts.

    Args:
        path: the file.
        study: whose results these are, of a file that is not there yet.
        log: where runs write scalars while they train, a folder for each; None is nowhere.
    """

    def __init__(self, path: Path, study: str | None = None, log: Path | None = None) -> None:
        self.path, self._study, self.log = path, study, log

    @property
    def study(self) -> str:
        """Whose results these are."""
        study = self._study or self._lines().first.get("study")
        if study is None:
            raise ValueError(f"{self.path} does not begin with the study that it is of; it is no file of results.")
        return str(study)

    def check(self) -> None:
        """Raise, before anything trains, if the file is of another study, is damaged, or its folder cannot be made."""
        if self.path.exists() and self.path.stat().st_size and (of := Store(self.path).study) != self._study:
            raise ValueError(f"{self.path} is of the study {of!r}, and not of {self._study!r}; choose another --name.")
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def read(self, part: str | None = None) -> list[Result]:
        """The results of a part: None is what tables show; "search" and "trials", say, hold what chose settings.

        They are to be read only: whoever asks again is given the same ones.
        """
        return [result for result in self._lines().results.values() if result.get("part") == part]

    def has(self, key: str, computes: str | None = None) -> bool:
        """Whether a line of this key is there, computed as now."""
        found = self._lines().results.get(key)
        return found is not None and found.get("computes") == computes

    def add(self, key: str, result: Mapping[str, Any]) -> None:
        """Write one result as one whole line; a torn last line, as a killed process may leave one, is cut off.

        It must have an "environment"; "settings", "part", and what it "computes" belong to what tells it from others.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # ranks share a file
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
            known = _lines.__wrapped__(self.path, 0, 0)  # this version of the file is not kept: a line follows
            lines = list[dict[str, Any]]()
            settings, place = dict(result.get("settings", {})), digest(result["environment"])
            if not known.first:
                lines.append({"study": self.study, "settings": settings})
            if place not in known.environments:
                lines.append({"id": place, **result["environment"]})
            first = (known.first or lines[0])["settings"]
            own = {name: settings.get(name) for name in {**first, **settings} if first.get(name) != settings.get(name)}
            lines.append({"key": key, **result, "environment": place, "settings": own})
            text = (json.dumps(line, separators=(",", ":"), ensure_ascii=False) + "\n" for line in lines)
            file.write("".join(text).encode())

    def _lines(self) -> "_Lines":
        if not self.path.exists():
            return _Lines({}, {}, {})
        stat = self.path.stat()
        return _lines(self.path, stat.st_mtime_ns, stat.st_size)


class _Lines(NamedTuple):
    """What the lines of a file say."""

    first: dict[str, Any]  # the study and its first settings
    environments: dict[str, Any]
    results: dict[str, Result]  # by their keys


@lru_cache(maxsize=64)
def _lines(path: Path, time: int, size: int) -> _Lines:
    """Every whole line of a file, read once for a time and a size: lines are only added.

    What stands behind the last end of line was cut off while it was written.
    """
    found = _Lines({}, {}, {})
    for number, text in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            line = json.loads(text)
            if number == 1:
                found.first.update(line)
            elif "id" in line:
                found.environments[line.pop("id")] = line
            else:
                merged = {**found.first["settings"], **line["settings"]}
                settings = {name: value for name, value in merged.items() if value is not None}
                environment = found.environments[line["environment"]]
                found.results[line["key"]] = {**line, "settings": settings, "environment": environment}
        except (ValueError, KeyError, TypeError, AttributeError) as error:  # of its letters, its JSON or what it holds
            why = f"{path}, line {number} is no line of results: {error!r}"
            raise ValueError(f"{why}; restore the file or delete the line.") from error
    return found


def public_name(data: str) -> str:
    """The name of a data set without the path it was read from: the folder's or file's own name says which it is."""
    kind, colon, argument = data.partition(":")
    return f"{kind}:{Path(argument).name}" if colon else Path(kind).name


def environment() -> dict[str, Any]:
    """Return what a reader needs to judge a number: command, versions, commit, date and hardware."""
    info = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*: (.+)$", info.read_text(), re.MULTILINE) if info.exists() else []
    # Not where data and results happen to lie.
    pairs = zip(sys.argv, sys.argv[1:], strict=False)
    arguments = [public_name(a) if before == "--data" or Path(a).is_absolute() else a for before, a in pairs]
    return {
        "command": " ".join(["python -m benchmarks", *arguments]),
        "adiv_optim": adiv_optim.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": f"{names[0]} × {os.cpu_count()}" if names else platform.processor(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "commit": _commit(),
        "date": date.today().isoformat(),
    }


@cache
def _commit() -> str | None:
    """Of the clone, if this is one; what results and their pages add to it changes nothing that is computed."""
    try:
        head, changed = (
            subprocess.run(["git", *command.split()], cwd=Path(__file__).parents[2], capture_output=True, check=True)
            for command in ("rev-parse --short=12 HEAD", "diff HEAD --name-only -- *.py")
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.decode().strip() + "-dirty" * bool(changed.stdout)
