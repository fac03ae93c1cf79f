"""A number in a sentence about results is quoted from them, or it is no result: the others stand in tables alone."""

import re
from functools import cache

import pytest

from .quotes import QUOTES
from .test_report import ROOT

#: Page → numbers that are no results: settings, sizes, versions and equations.
SETTINGS = {
    "README.md": "64 0.003 0.1 1 0.001 3.11 2.9",
    "docs/results/mlp.md": "3072 32 10 0 15 40 128 10⁻³ 8 1,797 2025 1 30 2 5 16",
    "docs/results/costs.md": "1,024 10 2 3",
    "docs/results/convolutions.md": "3 2 10⁻³ 1 2025",
    "docs/results/unit-consistency.md": "3072 32 10 30 2 2025",
    "docs/results/isometry.md": "512 1 0 1000 10 2023",
    "docs/results/language-model.md": "400 128 3 8 1 16 2,000 0.02 64 256 1,024",
    "docs/results/index.md": "1",
    "docs/results/fields.md": "2.2·10⁻⁵ 2405.15603 2402.01868 512 256 10⁴ 1",
    "docs/verdicts.md": "0.05",
    "docs/chooser.md": "16",
    "docs/index.md": "",
    "docs/which-step.md": "1 2",
    "docs/coordinates/whitened.md": "1 2 1507.00210 2017 2022 2410.23970 2021",
}
NUMBER = re.compile(r"(?<![\w.\-−])[−+]?\d[\d,]*(?:\.\d+)?(?:·10)?[⁻⁰¹²³⁴⁵⁶⁷⁸⁹]*")


def prose(page):
    """The sentences of a page: no generated sections, blocks, tables' rules, formulas or comments."""
    text = (ROOT / page).read_text()
    text = re.sub(
        r"<!-- (?:results|caption|link):.*?<!-- end -->|^ *```.*?^ *```$|\$\$.*?\$\$|<!--.*?-->",
        "",
        text,
        flags=re.DOTALL | re.MULTILINE,
    )
    return " ".join(text.split())


@cache
def quoted(page):
    """What the results say, as a page has it."""
    return [template.format(*values()) for template, values in QUOTES.get(page, [])]


@pytest.mark.parametrize("page", QUOTES)
def test_sentences_say_what_the_results_say(page):
    text = prose(page)
    missing = [quote for quote in quoted(page) if quote not in text]
    assert not missing, "\n".join([f"The results say, and {page} does not:", *missing])


@pytest.mark.parametrize("page", SETTINGS)
def test_no_other_number_stands_in_a_sentence(page):
    text = re.sub(r"\]\([^)]*\)|`[^`]*`|!\[[^\]]*\]", "]", left_over(page))
    found = {number.rstrip(",") for number in NUMBER.findall(text)}
    assert found <= set(SETTINGS[page].split()), found - set(SETTINGS[page].split())


def left_over(page):
    """A page without what is quoted."""
    text = prose(page)
    for quote in quoted(page):
        text = text.replace(quote, "")
    return text


def test_planted_number_is_noticed(monkeypatch):
    page = "docs/results/mlp.md"
    monkeypatch.setattr(f"{__name__}.prose", lambda _: prose_of_planted)
    prose_of_planted = "The gap falls by 97.3 % here."
    with pytest.raises(AssertionError, match=r"97\.3"):
        test_no_other_number_stands_in_a_sentence(page)
    with pytest.raises(AssertionError) as caught:
        test_sentences_say_what_the_results_say(page)
    assert all(quote in str(caught.value) for quote in quoted(page))
