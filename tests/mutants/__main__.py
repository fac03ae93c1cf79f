"""Change one place of the code at a time and see whether the tests notice: `python -m tests.mutants`.

Each mutant of table.txt is applied to a copy of the tree, in which the tests named beside it run until one fails. What
was found is kept in .cache/mutants.jsonl: a second call runs what is not there yet, or has changed since.
"""

import argparse
import hashlib
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import traceback
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest
import torch  # with what takes long to import, and is so once: the processes of all mutants are forked from this one
import torch._dynamo
import torch.export
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).with_name("table.txt")
COPIED = ("adiv_optim", "benchmarks", "docs", "examples", "tests", "layers", "pyproject.toml", "README.md")
FOUND = {0: "survived", 1: "killed", -signal.SIGXCPU: "killed"}  # that tests never end is noticed too


class Mutant(NamedTuple):
    """One changed place, and the tests that should notice."""

    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def room(self) -> str:
        """The folder, or the module at the top."""
        parts = Path(self.file).parts
        return parts[0] if parts[0] == "benchmarks" else parts[1].removesuffix(".py")

    def key(self) -> str:
        """What tells the result from others: the change, the file it is made in, and the tests."""
        named = [ROOT / test.partition("::")[0] for test in self.tests]
        files = [part for path in named for part in (sorted(path.rglob("*.py")) if path.is_dir() else [path])]
        texts = [self.old, self.new, *self.tests, *(path.read_text() for path in [ROOT / self.file, *files])]
        return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def mutants() -> list[Mutant]:
    """All that the table has: a line for a file ⇐ its tests, and under it old text → new text, perhaps ⇐ other tests.

    Files are named from the root or from adiv_optim, tests from tests. ∅ is no text, and \\n an end of line.

    Raises:
        SystemExit: an old text does not occur exactly once in its file, or a file or test is not there.
    """
    made, wrong, file, text, tests = [], [], "", "", ""
    for line in TABLE.read_text().splitlines():
        change, _, named = line.partition(" ⇐ ")
        if not line.startswith("    "):
            file, tests = change if change.startswith("benchmarks/") else f"adiv_optim/{change}", named
            text = (ROOT / file).read_text() if (ROOT / file).exists() else ""
            continue
        old, new = (part.replace("\\n", "\n").replace("∅", "") for part in change[4:].split(" → "))
        made.append(Mutant(file, old, new, tuple(f"tests/{test}" for test in (named or tests).split())))
        if text.count(old) != 1:
            wrong.append(f"{file}: {old!r} occurs {text.count(old)} times; it must occur once.")
        missing = [path for path in made[-1].tests if not (ROOT / path.partition("::")[0]).exists()]
        wrong += [f"{file}: {old!r} names {path}, which is not there." for path in missing]
    if wrong:
        raise SystemExit("\n".join(wrong))
    return made


def run(mutant: Mutant, folder: Path, limit: int) -> int:
    """Fork a process that runs the tests on a copy of the tree with the change; return its id."""
    if pid := os.fork():
        return pid
    code = 3
    try:
        os.setpgid(0, 0)  # what it starts ends with it
        for name in COPIED:
            if (ROOT / name).is_dir() and not (ROOT / name).is_symlink():
                shutil.copytree(ROOT / name, folder / name, symlinks=True)
            else:
                shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
        if mutant.file:
            path = folder / mutant.file
            path.write_text(path.read_text().replace(mutant.old, mutant.new))
        os.chdir(folder)
        os.environ.update(PYTHONPATH=str(folder), OMP_NUM_THREADS="1")
        torch.set_num_threads(1)
        sys.path[0] = str(folder)
        for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
            del sys.modules[name]
        with open(folder / "output", "w") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5))
        code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-n", "0", *mutant.tests])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(int(code))


def outcome(mutant: Mutant, folder: Path, pid: int, status: int) -> str:
    """Clear up behind a process that has ended; return what it found."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(status)
    text = (folder / "output").read_text(errors="replace") if (folder / "output").exists() else ""
    shutil.rmtree(folder, ignore_errors=True)
    if code not in FOUND or (code and not mutant.file):
        return f"broke the tests (exit {code}): {text[-2000:]}"
    return FOUND[code]


def main() -> None:
    """Run what is asked for, and print the score of every room."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--only", default="", metavar="ROOM", help="those in files whose path contains this")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="how many at once")
    parser.add_argument("--limit", type=int, default=120, metavar="SECONDS", help="of the processor, for one mutant")
    parser.add_argument("--check", action="store_true", help="only look whether each old text occurs once")
    parser.add_argument("--control", action="store_true", help="first run all named tests without a change")
    parser.add_argument("--again", action="store_true", help="forget what was found before")
    options = parser.parse_args()
    wanted = [mutant for mutant in mutants() if options.only in mutant.file]
    if options.check:
        print(f"{len(wanted)} mutants, each old text once in its file")
        return
    store = ROOT / ".cache" / "mutants.jsonl"
    store.parent.mkdir(exist_ok=True)
    lines = store.read_text().splitlines() if store.exists() and not options.again else []
    found: dict[str, str] = dict(json.loads(line) for line in lines)
    keys = {mutant: mutant.key() for mutant in wanted}
    waiting = [mutant for mutant in wanted if keys[mutant] not in found]
    if options.control:
        waiting.insert(0, Mutant("", "", "", tuple(sorted({test for mutant in wanted for test in mutant.tests}))))
    running: dict[int, tuple[Mutant, Path]] = {}
    console = Console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    # Without a thread of its own, which a fork could meet with a lock in its hand.
    bar = Progress(*columns, console=console, auto_refresh=False)
    with bar as progress, store.open("w" if options.again else "a") as file:
        task = progress.add_task("mutants", total=len(wanted) + options.control)
        progress.advance(task, len(wanted) + options.control - len(waiting))
        while waiting or running:
            while waiting and len(running) < options.jobs:
                mutant, folder = waiting.pop(0), Path(tempfile.mkdtemp(prefix="mutant-"))
                running[run(mutant, folder, options.limit if mutant.file else 3600)] = mutant, folder
                progress.update(task, description=mutant.file or "unchanged", refresh=True)
            pid, status = os.wait()
            mutant, folder = running.pop(pid)
            what = outcome(mutant, folder, pid, status)
            progress.advance(task)
            if not mutant.file:
                if what != "survived":
                    raise SystemExit(f"the tests fail without a mutant: {what}")
                continue
            found[keys[mutant]] = what
            if what in FOUND.values():
                file.write(json.dumps([keys[mutant], what]) + "\n")
                file.flush()
    for mutant, key in keys.items():  # those of an earlier call too
        if found[key] != "killed":
            console.print(f"{found[key]}: {mutant.file}: {mutant.old!r} → {mutant.new!r}", markup=False, soft_wrap=True)
    rooms = Table("room", "killed", "of")
    for room, count in Counter(mutant.room for mutant in wanted).items():
        killed = sum(found[keys[mutant]] == "killed" for mutant in wanted if mutant.room == room)
        rooms.add_row(room, str(killed), str(count))
    rooms.add_row("all", str(sum(found[key] == "killed" for key in keys.values())), str(len(wanted)))
    console.print(rooms)


if __name__ == "__main__":
    main()
