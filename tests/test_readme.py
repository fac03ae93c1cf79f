"""The code of README and docs runs."""

import contextlib
import io
import re
import textwrap
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "benchmarks" / "README.md"]
PAGES += sorted(page for ending in ("md", "rst") for page in (ROOT / "docs").rglob(f"*.{ending}"))
PAGES = [page for page in PAGES if page.parent.name != "stories"]  # written by the gallery, whose stories run there

FENCED = re.compile(
    r"^ *```(?:python|\{code-block\} python|(?P<diff>diff))\n(?P<code>.*?)^ *```$"
    r"(?:\n+^ *```text\n(?P<output>.*?)^ *```$)?",
    re.MULTILINE | re.DOTALL,
)
INDENTED = re.compile(r"^ *\.\. code-block:: python\n(?P<code>(?: +.*\n|\n)+)", re.MULTILINE)


class Block(NamedTuple):
    """Python on a page, and what the page says that it prints, if it says so."""

    code: str
    output: str | None = None


def python_blocks(page):
    """The Python blocks of a page of Markdown or reStructuredText, in order; of a diff, what it leads to."""
    found = []
    for match in (INDENTED if page.suffix == ".rst" else FENCED).finditer(page.read_text()):
        parts = match.groupdict()
        code = textwrap.dedent(parts["code"])
        if parts.get("diff"):
            code = "".join(line[1:] or "\n" for line in code.splitlines(keepends=True) if not line.startswith("-"))
        output = parts.get("output")
        found.append(Block(code, None if output is None else textwrap.dedent(output)))
    return found


def run(page):
    namespace: dict[str, object] = {}
    for code, output in python_blocks(page):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, str(page), "exec"), namespace)
        if output is not None:
            assert printed.getvalue() == output


WITH_CODE = [page for page in PAGES if python_blocks(page)]
#: What stands at the beginning of a page that needs more than this package.
NEEDS = re.compile(r"^<!-- needs: (.*) -->$", re.MULTILINE)


def parameter(page):
    """A page; marked, if it needs other packages."""
    marks = [pytest.mark.integration] if NEEDS.search(page.read_text()) else []
    return pytest.param(page, id=str(page.relative_to(ROOT)), marks=marks)


@pytest.mark.parametrize("page", [parameter(page) for page in WITH_CODE])
def test_python_blocks_run_in_order_and_print_what_the_page_says(page, frameworks):
    for package in " ".join(NEEDS.findall(page.read_text())).split():
        pytest.importorskip(package)
    run(page)


def test_readme_is_short_and_shows_coverage():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 110
    assert len(text.split()) <= 900
    assert "+print(opt.coverage())" in text


def test_pages_of_the_documentation_are_found():
    found = {str(page.relative_to(ROOT)) for page in WITH_CODE}
    assert {"README.md", "docs/quickstart.md", "docs/recipes.md", "docs/layers/affine-like.md"} <= found


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("page.md", "Text.\n\n```python\nx = 1\n```\n\n```sh\nrm\n```\n\n```python\nassert x == 2\n```\n"),
        ("page.md", "- a list\n\n  ```{code-block} python\n  assert False\n  ```\n"),
        ("page.md", "```diff\n x = 1\n-x = 2\n+x += 2\n\n assert x == 2\n```\n"),
        ("page.md", "```python\nprint(1)\n```\n\n```text\n2\n```\n"),
        ("page.rst", "Text.\n\n.. code-block:: python\n\n   x = 1\n\n   assert x == 2\n\nText.\n"),
    ],
)
def test_planted_block_that_fails_is_noticed(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    with pytest.raises(AssertionError):
        run(tmp_path / name)


#: What opens a block that is no Python; anything else may be Python that no test runs.
OTHER = {"", "sh", "md", "text", "{toctree}", "{include}", "{eval-rst}"}


def test_no_python_hides_from_the_tests():
    for page in PAGES:
        infos = [info.strip() for info in re.findall(r"^ *(?:```+|~~~+|:::+)(.*)$", page.read_text(), re.MULTILINE)]
        opened = set(infos)
        assert infos.count("text") == sum(block.output is not None for block in python_blocks(page)), page
        assert {info.split(" ")[0] for info in opened - {"python", "{code-block} python", "diff"}} <= OTHER, page
