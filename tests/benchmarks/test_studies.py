"""A study is one file and one line: with it come its command, its recipe, its page, and they go with it."""

import ast
import sys

import pytest

import benchmarks.studies as package
from benchmarks.__main__ import main
from benchmarks.catalogue import RECIPES, STUDIES, collect, recipes
from benchmarks.core.store import Store
from benchmarks.core.study import UNTRIED, shown
from benchmarks.digests import DIGESTS
from tests.test_readme import python_blocks

from .test_report import ROOT


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """The study of CONTRIBUTING.md in a file of its own, its name in the list."""
    ((code, _),) = python_blocks(ROOT / "CONTRIBUTING.md")
    (tmp_path / "planted.py").write_text(code)
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
    with monkeypatch.context() as added:
        found = collect(["planted"])
        for name, study in found.items():
            added.setitem(STUDIES, name, study)
        for name, recipe in recipes(found).items():
            added.setitem(RECIPES, name, recipe)
        yield found["mine"]
    del sys.modules["benchmarks.studies.planted"]


def test_a_study_is_one_file_and_one_line(mine, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["mine", *mine.smoke.split(), "--out", str(out)]) == 0
    assert "| sum | 1 |" in capsys.readouterr().out
    assert main(["reproduce", "mine", "--out", str(out / "again")]) == 0
    assert Store(out / "again" / "mine.jsonl").read()[0]["value"] == 6
    page = tmp_path / "page.md"
    page.write_text("<!-- results:mine --><!-- end -->")
    assert main(["report", "--out", str(out), "--pages", str(page), "--tables", str(tmp_path / "tables")]) == 0
    assert "| sum | 1 |\n\nA caption. All rows: [mine.csv](tables/mine.csv)." in page.read_text()


def test_it_goes_with_its_line(capsys):
    assert "mine" not in STUDIES.keys() | RECIPES.keys()
    assert main(["mine"]) == 2
    assert "unknown study 'mine'" in capsys.readouterr().err


def test_every_study_has_a_page_that_is_there_and_what_makes_files_is_tried_or_says_that_it_is_not():
    for name, study in STUDIES.items():
        assert bool(study.page) == bool(study.makes), name
        assert study.data in ("", "text", "images"), name
        assert study.smoke == UNTRIED or "--help" not in study.smoke, name
    assert all((ROOT / page).exists() for page in shown(STUDIES, DIGESTS))


def imported(path):
    """The files of benchmarks that a file imports, whichever way."""
    files = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
            names = [base.with_suffix(".py"), *(base / f"{alias.name}.py" for alias in node.names)]
            files |= {name for name in names if name.is_file()}
    return files


def closure(path):
    """A file, and all that it stands on."""
    whole, waiting = set(), {path}
    while waiting:
        whole |= waiting
        waiting = set().union(*map(imported, waiting)) - whole
    return whole


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks" / "studies").glob("[!_]*.py")), ids=lambda path: path.stem)
def test_a_study_stands_on_at_most_eleven_other_files(path):
    files = closure(path)
    assert ROOT / "benchmarks" / "core" / "store.py" in files
    assert len(files) <= 12, sorted(file.name for file in files)
