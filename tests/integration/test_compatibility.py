"""The compatibility table stands on tests that there are, and shows what they gave."""

import re
from pathlib import Path

import pytest

from tests.integration.compatibility import COLUMNS, MARKERS, PAGE, REASONS, SECTIONS, section

FUNCTIONS = {f.partition("[")[0] for rows in SECTIONS.values() for functions in rows.values() for f in functions}


def gone(functions):
    """Those of the tests that the table stands on that are not in their modules."""
    named = [each.partition("::")[::2] for each in functions]
    return {name for module, name in named if f"\ndef {name}(" not in Path(__file__).with_name(module).read_text()}


def test_every_test_that_the_table_stands_on_is_there():
    assert gone(FUNCTIONS) == set()
    assert gone([f"{min(FUNCTIONS)}_gone"]) == {min(FUNCTIONS).partition("::")[2] + "_gone"}


def test_table_has_every_situation_and_refusals_lead_to_their_reasons():
    page = PAGE.read_text()
    shown = page.partition(MARKERS[0])[2].partition(MARKERS[1])[0]
    for title, rows in SECTIONS.items():
        own = shown.partition(f"### {title}\n")[2].partition("\n### ")[0]
        assert [each for each in rows if not re.search(rf"(?:: |; ){re.escape(each)}[;.]", own)] == []
    headings = {line[4:].lower().replace(" ", "-") for line in page.splitlines() if line.startswith("### ")}
    assert set(re.findall(r"\[refused\]\(#(.*?)\)", shown)) <= set(REASONS.values()) <= headings
    assert REASONS.keys() <= FUNCTIONS


def test_section_has_a_line_for_what_is_known_of_the_same_wrappers():
    refusal = f"{min(REASONS)}[ddp-whitened]"
    outcomes = {f"tests/a.py::test_{case}[one-{name}]": "passed" for name in COLUMNS for case in "bc"}
    outcomes |= {"tests/a.py::test_b[two-disproportional]": "passed", "tests/a.py::test_b[two-whitened]": "skipped"}
    rows = {"here": ["a.py::test_b[one"], "there": ["a.py::test_b[two"], "too": ["a.py::test_c"], "no": [min(REASONS)]}
    assert section("Loops", rows, {**outcomes, f"tests/{refusal}": "passed"}).splitlines() == [
        "### Loops",
        "",
        "- ✓ with all seven: here; too.",
        "- ✓ with `Disproportional`, not run with `Whitened`: there.",
        f"- [refused](#{REASONS[min(REASONS)]}) with `Whitened`: no.",
    ]
    with pytest.raises(LookupError, match="no test of"):
        section("Loops", {"there": ["a.py::test_d"]}, outcomes)
