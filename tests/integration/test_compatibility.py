"""The compatibility table stands on tests that there are, and shows what they gave."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.compatibility import (
    COLUMNS,
    FOLDER,
    MARKERS,
    PAGE,
    REASONS,
    SECTIONS,
    cell,
    column,
    section,
    told,
)

FUNCTIONS = {f.partition("[")[0] for rows in SECTIONS.values() for functions in rows.values() for f in functions}


@pytest.fixture(scope="module")
def collected(request):
    """module::test of all tests of this folder; modules whose packages are missing have none."""
    config = request.config
    whole = any(FOLDER.is_relative_to(Path(config.invocation_params.dir / each).resolve()) for each in config.args)
    if whole and not config.option.markexpr and not config.option.keyword:
        nodes = [item.nodeid for item in request.session.items]
    else:
        modules = sorted({str(FOLDER / function.partition("::")[0]) for function in FUNCTIONS})
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *modules]
        nodes = subprocess.run(command, capture_output=True, text=True, cwd=FOLDER.parents[1]).stdout.splitlines()
    return {Path(node.partition("[")[0]).name + node[len(node.partition("[")[0]) :] for node in nodes}


def gone(functions, collected):
    """Tests that the table stands on and that are not in their modules, of those modules that could be collected."""
    there = {test.partition("::")[0] for test in collected}
    known = {test.partition("[")[0] for test in collected}
    return {each for each in functions if each.partition("::")[0] in there and each not in known}


def test_every_test_that_the_table_stands_on_is_there(collected):
    assert len({function.partition("::")[0] for function in FUNCTIONS} & {t.partition("::")[0] for t in collected}) > 10
    assert gone(FUNCTIONS, collected) == set()


def test_a_test_that_is_gone_is_noticed(collected):
    there = {test.partition("::")[0] for test in collected}
    function = next(each for each in sorted(FUNCTIONS) if each.partition("::")[0] in there)
    assert gone([f"{function}_gone"], collected) == {f"{function}_gone"}


def test_table_has_every_situation_and_refusals_lead_to_their_reasons():
    page = PAGE.read_text()
    shown = page.partition(MARKERS[0])[2].partition(MARKERS[1])[0]
    for title, rows in SECTIONS.items():
        own = shown.partition(f"### {title}\n")[2].partition("\n### ")[0]
        assert [each for each in rows if not re.search(rf"(?:: |; ){re.escape(each)}[;.]", own)] == []
    headings = {line[4:].lower().replace(" ", "-") for line in page.splitlines() if line.startswith("### ")}
    assert set(re.findall(r"\[refused\]\(#(.*?)\)", shown)) <= set(REASONS.values()) <= headings
    assert REASONS.keys() <= FUNCTIONS


@pytest.mark.parametrize(
    ("test", "wrapper"),
    [
        ("test_ddp[plain-proportional]", "proportional"),
        ("test_ddp[plain-disproportional]", "disproportional"),
        ("test_ddp[preconditioned-plain]", "preconditioned"),
        ("test_ddp[plain-batch-ideal]", "batch-ideal"),
        ("test_ddp[whitened-rank]", "whitened"),
        ("test_state[input-scaled-unit-consistent]", "input-scaled"),
        ("test_ddp", None),
    ],
)
def test_wrapper_is_read_off_the_id(test, wrapper):
    assert column(test) == wrapper


def test_cells_show_what_passed_is_refused_or_has_not_run():
    refusal = f"{min(REASONS)}[ddp]"
    assert cell({refusal: "passed"}) == f"[refused](#{REASONS[min(REASONS)]})"
    assert cell({"a.py::test_b[2]": "passed", "a.py::test_b[1]": "needs a GPU", refusal: "passed"}) == "✓"
    assert cell({"a.py::test_b": "needs a GPU"}) == "not run"
    assert cell({}) == "–"


def test_section_has_a_line_for_what_is_known_of_the_same_wrappers():
    outcomes = {f"tests/a.py::test_{case}[one-{name}]": "passed" for name in COLUMNS for case in "bc"}
    outcomes |= {"tests/a.py::test_b[two-proportional]": "passed", "tests/a.py::test_b[two-whitened]": "needs a GPU"}
    situations = {"here": ["a.py::test_b[one"], "there": ["a.py::test_b[two"], "too": ["a.py::test_c"]}
    assert section("Loops", told(situations, outcomes)).splitlines() == [
        "### Loops",
        "",
        "- ✓ with all seven: here; too.",
        "- ✓ with `Proportional`, not run with `Whitened`: there.",
    ]
    with pytest.raises(LookupError, match="no test of"):
        told({"there": ["a.py::test_d"]}, outcomes)
