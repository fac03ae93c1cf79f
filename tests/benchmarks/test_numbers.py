"""Every number in a sentence about results is what the committed results say."""

import re

import pytest

from .quotes import QUOTES, SETTINGS
from .test_report import ROOT

NUMBER = re.compile(r"(?<![\w.\-−])[−+]?\d[\d,]*(?:\.\d+)?(?:·10)?[⁻⁰¹²³⁴⁵⁶⁷⁸⁹]*")


def prose(page):
    """The sentences of a page: no generated sections, blocks, tables' rules, formulas or comments."""
    text = (ROOT / page).read_text()
    text = re.sub(
        r"<!-- results:.*?<!-- end -->|^ *```.*?^ *```$|\$\$.*?\$\$|<!--.*?-->",
        "",
        text,
        flags=re.DOTALL | re.MULTILINE,
    )
    return " ".join(text.split())


@pytest.mark.parametrize(
    ("page", "number"), [(page, at) for page, quotes in QUOTES.items() for at in range(len(quotes))]
)
def test_sentence_says_what_the_results_say(page, number):
    template, values = QUOTES[page][number]
    assert template.format(*values()) in prose(page)


@pytest.mark.parametrize("page", SETTINGS)
def test_no_other_number_stands_in_a_sentence(page):
    text = re.sub(r"\]\([^)]*\)|`[^`]*`|!\[[^\]]*\]", "]", left_over(page))
    found = {number.rstrip(",") for number in NUMBER.findall(text)}
    assert found <= set(SETTINGS[page].split()), found - set(SETTINGS[page].split())


def left_over(page):
    """A page without what is quoted."""
    text = prose(page)
    for template, values in QUOTES.get(page, []):
        text = text.replace(template.format(*values()), "")
    return text


def test_planted_number_is_noticed(monkeypatch):
    page = "docs/results/attention.md"
    monkeypatch.setattr(f"{__name__}.prose", lambda _: prose_of_planted)
    prose_of_planted = "The ideal step reaches 97.3 % here."
    with pytest.raises(AssertionError, match=r"97\.3"):
        test_no_other_number_stands_in_a_sentence(page)
    with pytest.raises(AssertionError):
        test_sentence_says_what_the_results_say(page, 0)
