"""The code of README and docs runs."""

import re
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted(page for ending in ("md", "rst") for page in (ROOT / "docs").rglob(f"*.{ending}"))]

FENCED = re.compile(r"^ *```(?:python|\{code-block\} python)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"^ *\.\. code-block:: python\n((?: +.*\n|\n)+)", re.MULTILINE)


def python_blocks(page):
    """The Python blocks of a page of Markdown or reStructuredText, in order."""
    pattern = INDENTED if page.suffix == ".rst" else FENCED
    return [textwrap.dedent(block) for block in pattern.findall(page.read_text())]


def run(page):
    namespace: dict[str, object] = {}
    for block in python_blocks(page):
        exec(compile(block, str(page), "exec"), namespace)


WITH_CODE = [page for page in PAGES if python_blocks(page)]
#: What stands at the beginning of a page that needs more than this package.
NEEDS = re.compile(r"^<!-- needs: (.*) -->$", re.MULTILINE)


def parameter(page):
    """A page; marked, if it needs other packages."""
    marks = [pytest.mark.integration] if NEEDS.search(page.read_text()) else []
    return pytest.param(page, id=str(page.relative_to(ROOT)), marks=marks)


@pytest.mark.parametrize("page", [parameter(page) for page in WITH_CODE])
def test_python_blocks_run_in_order(page, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # what a block saves is gone with the test
    for package in " ".join(NEEDS.findall(page.read_text())).split():
        pytest.importorskip(package)
    run(page)
    if page.name == "README.md":
        assert "0.bias: corrected by Disproportional\n1.weight: skipped" in capsys.readouterr().out


def test_pages_of_the_documentation_are_found():
    found = {str(page.relative_to(ROOT)) for page in WITH_CODE}
    assert {"README.md", "docs/quickstart.md", "docs/recipes.md", "docs/layers/affine-like.md"} <= found


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("page.md", "Text.\n\n```python\nx = 1\n```\n\n```sh\nrm\n```\n\n```python\nassert x == 2\n```\n"),
        ("page.md", "- a list\n\n  ```{code-block} python\n  assert False\n  ```\n"),
        ("page.rst", "Text.\n\n.. code-block:: python\n\n   x = 1\n\n   assert x == 2\n\nText.\n"),
    ],
)
def test_planted_block_that_fails_is_noticed(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    with pytest.raises(AssertionError):
        run(tmp_path / name)


#: What opens a block that is no Python; anything else may be Python that no test runs.
OTHER = {"", "sh", "md", "{toctree}", "{include}", "{eval-rst}"}


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_no_python_hides_from_the_tests(page):
    opened = {info.strip() for info in re.findall(r"^ *(?:```+|~~~+|:::+)(.*)$", page.read_text(), re.MULTILINE)}
    assert {info.split(" ")[0] for info in opened - {"python", "{code-block} python"}} <= OTHER
