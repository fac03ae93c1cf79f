"""What is published: wheel and sdist, both installed away from the repository."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
import torch

import adiv_optim

ROOT = Path(__file__).resolve().parents[1]
PUBLISHED = ("pyproject.toml", "MANIFEST.in", "README.md", "CHANGELOG.md", "CITATION.cff", "LICENSE")


def run(*command, cwd=None, **environment):
    """Standard output of a command that does not see this repository, and may not ask an index for packages."""
    inherited = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment = {**inherited, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INDEX": "1", **environment}
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    """What a release builds, without git and what earlier builds left behind: the sdist, and a wheel of it."""
    copy, out = (tmp_path_factory.mktemp(name) for name in ("tree", "released"))
    for folder in ("adiv_optim", "benchmarks", "tests"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__", "results"))
    for file in PUBLISHED:
        shutil.copy(ROOT / file, copy)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, copy)
    return out


@pytest.fixture(scope="module")
def wheel(released):
    (built,) = released.glob("*.whl")
    return built


def test_wheel_holds_the_files_of_the_package_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        found = {name: archive.read(name) for name in archive.namelist()}
    package = {name: text for name, text in found.items() if ".dist-info" not in name}
    files = [*(ROOT / "adiv_optim").rglob("*.py"), ROOT / "adiv_optim" / "py.typed"]
    assert package == {path.relative_to(ROOT).as_posix(): path.read_bytes() for path in files}
    assert any(name.endswith("licenses/LICENSE") for name in found)


def test_sdist_holds_what_is_published_and_no_tests(released):
    (sdist,) = released.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {*PUBLISHED, "adiv_optim/layers/__init__.py", "adiv_optim/py.typed"} <= names
    assert not any(name.startswith(("tests", "benchmarks", "layers")) for name in names)


def test_index_would_show_the_release(released):
    run(sys.executable, "-m", "twine", "check", "--strict", *released.iterdir())


def test_wheel_of_the_sdist_works_in_an_empty_environment(wheel, tmp_path):
    elsewhere, environment = tmp_path / "elsewhere", tmp_path / "environment"
    elsewhere.mkdir()
    venv.create(environment, symlinks=os.name != "nt")
    (python,) = [*environment.glob("bin/python"), *environment.glob("Scripts/python.exe")]
    site = Path(run(python, "-c", "import site; print(site.getsitepackages()[0])", cwd=elsewhere).strip())
    before = {path.name for path in site.iterdir()}
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "-q", wheel)
    assert {path.name.partition("-")[0] for path in site.iterdir()} - before == {"adiv_optim"}
    # The torch that runs the tests; a .pth file's folder is searched after the environment's own.
    (site / "torch.pth").write_text(str(Path(torch.__file__).parents[1]))
    first, second = run(python, ROOT / "tests" / "first_program.py", cwd=elsewhere).splitlines()
    assert Path(first) == site / "adiv_optim" / "__init__.py"
    assert Path(second) == site / "adiv_optim" / "layers" / "__init__.py"


def test_every_file_names_the_same_release():
    version = adiv_optim.__version__
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == version
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert f'\n  version: "{version}"\n' in (ROOT / "conda" / "recipe.yaml").read_text()
    headings = re.findall(r"^## \[(.*?)\](?: - \d{4}-\d\d-\d\d)?$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[:2] == ["Unreleased", version]
