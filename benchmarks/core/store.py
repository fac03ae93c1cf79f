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
from collections.abc import Callable, Iterator, Mapping
from datetime import date
from functools import cache, lru_cache
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch

import adiv_optim

#: A line as it is read: "settings" and "environment" whole, "key", "part", and what was measured.
Result = dict[str, Any]


def setting(*names: str) -> Callable[[Result], Any]:
    """What reads a setting of results, or a tuple of several."""
    read = itemgetter(*names)
    return lambda result: read(result["settings"])


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
    """

    def __init__(self, path: Path, study: str | None = None) -> None:
        self.path, self._study = path, study

    @property
    def study(self) -> str:
        """Whose results these are."""
        first = next(_lines(self.path), {}) if self._study is None else {"study": self._study}
        if "study" not in first:
            raise ValueError(f"{self.path} does not begin with the study that it is of; it is no file of results.")
        return first["study"]

    def check(self) -> None:
        """Raise, before anything trains, if the file is of another study, is damaged, or cannot be written."""
        if self.path.is_file() and self.path.stat().st_size and (of := Store(self.path).study) != self._study:
            raise ValueError(f"{self.path} is of the study {of!r}, and not of {self._study!r}; choose another --name.")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OSError(f"--out {self.path.parent} cannot be made ({error}); choose another folder.") from error
        if self.path.is_dir() or not os.access(self.path if self.path.exists() else self.path.parent, os.W_OK):
            raise OSError(f"--out {self.path.parent}: {self.path.name} cannot be written there; choose another folder.")
        self.computed()

    def read(self, part: str | None = None) -> list[Result]:
        """The results of a part: None is what tables show; "search" and "trials", say, hold what chose settings.

        They are to be read only: whoever asks again is given the same ones.
        """
        return [result for result in self._results().values() if result.get("part") == part]

    def has(self, key: str, computes: str | None = None) -> bool:
        """Whether a line of this key is there, computed as now."""
        return (key, computes) in self.computed().items()

    def computed(self) -> dict[str, str | None]:
        """The key of every line, and the hash of what its method computed."""
        return {key: found.get("computes") for key, found in self._results().items()}

    def add(self, key: str, result: Mapping[str, Any]) -> None:
        """Write one result as one whole line; a torn last line, as a killed process may leave one, is cut off.

        It must have an "environment"; "settings", "part", and what it "computes" belong to what tells it from others.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # ranks share a file
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
            known = list(_lines(self.path))
            settings, place = dict(result.get("settings", {})), digest(result["environment"])
            lines: list[dict[str, Any]] = []
            if not known:
                lines.append({"study": self.study, "settings": settings})
            if not any(line.get("id") == place for line in known):
                lines.append({"id": place, **result["environment"]})
            first = (known or lines)[0]["settings"]
            names = [name for name in {**first, **settings} if first.get(name) != settings.get(name)]
            own = {name: settings.get(name) for name in names}
            lines.append({"key": key, **result, "environment": place, "settings": own})
            text = (json.dumps(line, separators=(",", ":"), ensure_ascii=False) + "\n" for line in lines)
            data = "".join(text).encode()
            if os.write(file.fileno(), data) < len(data):
                raise OSError(f"{self.path}: the disk took part of a line; free some space and run again.")

    def _results(self) -> Mapping[str, Result]:
        if not self.path.exists():
            return {}
        stat = self.path.stat()
        return _results(self.path, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=64)
def _results(path: Path, time: int, size: int) -> Mapping[str, Result]:
    """Every result of a file by its key, read once for a time and a size: lines are only added."""
    found: dict[str, Result] = {}
    environments, first = dict[str, Any](), dict[str, Any]()
    for number, line in enumerate(_lines(path), start=1):
        try:
            if "study" in line:
                first = dict(line["settings"])
            elif "id" in line:
                environments[line.pop("id")] = line
            else:
                settings = {name: value for name, value in {**first, **line["settings"]}.items() if value is not None}
                place = environments[line["environment"]]
                found[line["key"]] = {**line, "settings": settings, "environment": place}
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(_damaged(path, number, f"no line of a result: {error!r}")) from error
    return found


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Every whole line; what stands behind the last end of line was cut off while it was written."""
    whole = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    for number, line in enumerate(whole, start=1):
        try:
            yield json.loads(line)
        except ValueError as error:  # of its letters, or of its JSON
            raise ValueError(_damaged(path, number, f"no JSON: {error}")) from error


def _damaged(path: Path, number: int, why: str) -> str:
    return f"{path}, line {number} is {why}; restore the file or delete the line."


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
