"""Runs the commands of README and benchmarks/README in a fresh clone, at smoke sizes: python -m tests.commands.

The blocks of commands run as they stand, with `python`, `pip` and `make` of this module's own first on the PATH:
`python` adds to a study the options that make it small, `pip` installs the package itself and takes what it needs from
the environment that runs this, and `make`, which would install everything once more, only says what it would do.
"""

import os
import re
import subprocess
import sys
import venv
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torchvision.utils import save_image

from benchmarks.catalogue import STUDIES
from benchmarks.core.study import UNTRIED

ROOT = Path(__file__).resolve().parents[1]
PAGES = ["README.md", "benchmarks/README.md"]
#: Command → options, behind those that a page gives it; a measurement that has none for its size says what it can do.
SMOKE = {**{name: f"--threads 1 {study.smoke}" for name, study in STUDIES.items()}, "reproduce": "--list"}
SMOKE["gpu"] = "--device cpu --minutes 4 --text text.txt"
#: What a study is made of → its option, small.
DATA = {"images": "--data imagefolder:PATH/cifar10-jpeg", "text": "--data text.txt", "": ""}
#: All that trains or draws.
TRIED = [name for name, study in STUDIES.items() if study.smoke != UNTRIED and study.makes]
PYTHON = r"""#!/usr/bin/env bash
case "$2 $3" in
    {cases}
    "benchmarks report" | "benchmarks --help" | "adiv_optim "* | "examples.char_lm "*) more="" ;;
    "examples.fit_image "* | "examples.poisson "*) more="--steps 2" ;;
    *) echo "no smoke options for: python $*" >&2; exit 1 ;;
esac
# What is committed stays, for `report` to fill the pages from.
[ -z "$more" ] || set -- "${{@/benchmarks\/results/smoke}}"
TIMEFORMAT="+ python $* $more: %0R s, %0U s of them busy"
time "{python}" "$@" $more
"""
PIP = """#!/usr/bin/env bash
exec "{python}" -m pip "$1" --no-deps --no-build-isolation --no-index --quiet {options} "${{@:2}}"
"""
MAKE = """#!/usr/bin/env bash
exec "{make}" --dry-run "$@" > /dev/null
"""


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```sh\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def tools(folder: Path, *, editable: bool) -> str:
    """Make an environment that sees the packages of this one, and the commands; return the PATH that has them first."""
    venv.create(folder / "environment", symlinks=True)
    python = folder / "environment" / "bin" / "python"
    (site,) = (folder / "environment").glob("lib/python*/site-packages")
    # A .pth file's folder is searched after the environment's own, and .pth files in it are not read.
    (site / "outside.pth").write_text(str(Path(torch.__file__).parents[1]))
    cases = "\n    ".join(f'"benchmarks {name}") more="{options}" ;;' for name, options in SMOKE.items())
    make = subprocess.run(["which", "make"], capture_output=True, text=True, check=True).stdout.strip()
    (folder / "bin").mkdir()
    for name, text in {
        "python": PYTHON.format(python=python, cases=cases),
        "pip": PIP.format(python=python, options="--editable" if editable else ""),
        "make": MAKE.format(make=make),
    }.items():
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    return os.pathsep.join([str(folder / "bin"), os.environ["PATH"]])


def data(clone: Path) -> None:
    """Put where the pages have their data sets something small in their shape."""
    generator = torch.Generator().manual_seed(0)
    for part, label in ((part, label) for part in ("train", "test") for label in "ab"):
        folder = clone / "PATH" / "cifar10-jpeg" / part / label
        folder.mkdir(parents=True)
        for number in range(20):
            save_image(torch.rand(3, 32, 32, generator=generator), folder / f"{number}.png")
    for page in PAGES:  # Python files of the reader's own, named in their first line
        for name, text in re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```$", (clone / page).read_text(), re.M | re.S):
            (clone / name).write_text(text)
    (clone / "text.txt").write_text("the quick brown fox jumps over the lazy dog; " * 40)


def run(block: str, clone: Path, environment: dict[str, str]) -> None:
    """Run a block of commands, saying how long each took; if one fails, raise an error with what it said."""
    command = ["bash", "-c", f"set -euo pipefail\n{block}"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=clone, env=environment, **pipes) as process:
        said = []
        for line in process.stdout:
            said.append(line)
            if line.startswith("+ "):
                print(line, end="", flush=True)
    if process.returncode:
        raise RuntimeError("".join(said[-60:]))


def check(*, editable: bool, results: bool) -> None:
    """Clone, install and run either all studies behind the committed results or all else; raises where one fails."""
    with TemporaryDirectory() as name:
        folder, clone = Path(name), Path(name) / "clone"
        subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
        environment = {**os.environ, "PATH": tools(folder, editable=editable), "OMP_NUM_THREADS": "1"}
        environment.pop("PYTHONPATH", None)
        data(clone)
        *others, committed = [block for page in PAGES for block in blocks(clone / page)]
        for block in [committed] if results else others:
            run(block, clone, environment)
        for name in TRIED if results else ():
            data_option = DATA[STUDIES[name].data]
            run(f"python -m benchmarks {name} {data_option} --out benchmarks/results", clone, environment)
        if editable:
            # Type checkers read paths in .pth files, and no import hooks.
            assert any(str(clone) in path.read_text().splitlines() for path in folder.glob("environment/**/*.pth"))
        if results:
            changed = subprocess.run(["git", "status", "--short", "*.md"], cwd=clone, capture_output=True, text=True)
            assert not changed.stdout, f"report changes {changed.stdout}; run it and commit what it writes."
            assert set(TRIED) == {path.stem for path in (clone / "smoke").glob("*.jsonl")}


def main() -> int:
    """Check both ways to install, side by side."""
    with ThreadPoolExecutor() as pool:
        ways = [(False, True), (False, False), (True, False)]  # what takes longest first
        for done in [pool.submit(check, editable=editable, results=results) for editable, results in ways]:
            done.result()
    return 0


if __name__ == "__main__":
    sys.exit(main())
