"""The compatibility table names tests that there are, and shows what they gave."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.compatibility import (
    COLUMNS,
    FOLDER,
    MARKERS,
    NAMES,
    PAGE,
    REASONS,
    SECTIONS,
    cell,
    column,
    listing,
    names,
    table,
)

#: A test in a cell.
NAMED = re.compile(r"`(test_\w+(?:\[[^`]*\])?)`")
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


def missing(page, collected):
    """Tests named in a page that are in none of the modules it can mean, if all of those could be collected."""
    there = {test.partition("::")[0] for test in collected}
    found = set()
    for name in NAMED.findall(page):
        modules = {f.partition("::")[0] for f in FUNCTIONS if f.partition("::")[2] == name.partition("[")[0]}
        if modules <= there and not {f"{module}::{name}" for module in modules} & collected:
            found.add(name)
    return found


def test_every_name_is_of_a_test(collected):
    page = NAMES.read_text()
    assert len(set(NAMED.findall(page))) > 200
    assert not missing(page, collected), "run make compatibility"


def test_every_test_that_the_pages_want_is_named():
    named = {name.partition("[")[0] for name in NAMED.findall(NAMES.read_text())}
    waiting = {"test_captured_backward_and_eager_step", "test_captured_step"}  # for a GPU
    waiting |= {"test_capture_of_what_remembers_is_refused"}
    assert {function.partition("::")[2] for function in FUNCTIONS} - named == waiting


def test_table_has_every_situation_and_refusals_lead_to_their_reasons():
    page = PAGE.read_text()
    shown = page.partition(MARKERS[0])[2].partition(MARKERS[1])[0]
    assert all(f"\n| {situation} | " in shown for rows in SECTIONS.values() for situation in rows)
    headings = {line[4:].lower().replace(" ", "-") for line in page.splitlines() if line.startswith("### ")}
    assert set(re.findall(r"\[refused\]\(#(.*?)\)", shown)) <= set(REASONS.values()) <= headings
    assert REASONS.keys() <= FUNCTIONS


def test_name_of_a_test_that_is_gone_is_noticed(collected):
    assert missing("- DDP: `test_ddp[plain-proportional]`", collected) == set()
    assert missing("- DDP: `test_ddp[gone-proportional]`", collected) == {"test_ddp[gone-proportional]"}


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


def test_names_say_what_passed_or_why_nothing_ran():
    assert names({"a.py::test_b[2]": "passed", "a.py::test_b[1]": "passed"}) == "`test_b[1]` and 1 more"
    assert names({"a.py::test_b": "needs a GPU"}) == "*needs a GPU*"


def test_table_has_a_column_for_every_wrapper():
    outcomes = {f"tests/a.py::test_b[one-{name}]": "passed" for name in COLUMNS}
    outcomes["tests/a.py::test_b[two-proportional]"] = "passed"
    head, rule, row = table({"here": ["a.py::test_b[one"]}, outcomes)
    assert head.count("|") == rule.count("|") == row.count("|") == len(COLUMNS) + 2
    assert row.startswith("| here | ✓ | ✓ |")
    assert list(listing({"here": ["a.py::test_b"]}, outcomes))[:2] == [
        "- here",
        "  - `Proportional`: `test_b[one-proportional]` and 1 more",
    ]
    with pytest.raises(LookupError, match="no test of"):
        list(table({"there": ["a.py::test_c"]}, outcomes))
