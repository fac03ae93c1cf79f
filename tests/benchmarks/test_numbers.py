"""A number in a sentence about results is quoted from them, or it is no result: the others stand in tables alone."""

import re
from functools import cache

import pytest

from .quotes import QUOTES
from .test_report import ROOT

#: Page → numbers that are no results: settings, sizes, versions and equations.
SETTINGS = {
    "README.md": "32 15 40 1 3.11 2.9 400 2.15 64 500 512 0.1 0.001 10⁻³ 2.2·10⁻⁵ 20 21 2015 2022 2024 2025",
    "docs/results/mlp.md": "3072 3,072 32 10 0 1 −1 100 15 20 40 0.3 3 0.1 8 128 10⁻³ 1,797 50 75 2025 30 2 4 5 16 64 "
    "256 21 35 37",
    "docs/results/costs.md": "512 128 1,024 8,192 10 3 2 1",
    "docs/results/convolutions.md": "3 2 10⁻³ 1 16 2025",
    "docs/results/unit-consistency.md": "3072 32 10 30 0.1 0.01 4·10⁻⁵ 4·10⁻³ 1 2 0 10⁻¹⁰ 2025",
    "docs/results/isometry.md": "512 1 0 30 1000 10 0.5 0.01 2023 2025",
    "docs/results/language-model.md": "100 400 128 3 0.3 1 0.1 10 16 2,000 0.02 0 5 0.03 0.01 0.003 0.005 8 1,024 256 "
    "64 4",
    "docs/results/index.md": "400 10⁴",
    "docs/results/fields.md": "2.2·10⁻⁵ 2405.15603 60 64 512 128 2,000 16 100 10⁴ 1 32 256",
    "docs/verdicts.md": "0.05 95",
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
