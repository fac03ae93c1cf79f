"""Numbers in sentences are written into pages from the results, and no other number of a result stands there."""

import re

import pytest

from benchmarks.digests.values import VALUES, filled, phrase

from .conftest import ROOT, STORES

#: Page → numbers that are no results: settings, sizes, versions and equations.
SETTINGS = {
    "README.md": "0 64 0.003 0.1 3 32 0.3 1 100 0.001 3.11 2.9",
    "docs/results/mlp.md": "28 3 3072 32 10 0 15 20 40 100 128 10⁻³ 8 1,797 2025 1 −1 30 2 4 5 16",
    "docs/results/costs.md": "1,024 8,192 10 0.3"
    " 70 0.5 8 0.21 0.15 26.8 3.60 0.01 0.82 0.16 2.81 50.8 0.10 5,282 28 1.10 423",  # on paper
    "docs/results/convolutions.md": "3 2 10⁻³ 1 −1 2025",
    "docs/results/unit-consistency.md": "3072 32 10 30 2 2025",
    "docs/results/isometry.md": "512 1 0 1000 10 2023",
    "docs/results/language-model.md": "400 128 3 5 8 1 16 2,000 0.02 64 95",
    "docs/results/index.md": "0.05 1 2 3 10⁻³",
    "docs/results/fields.md": "32 100 128 512 256 10⁴ 1 8 59 12,288 50,307 214,787 2024",
    "docs/verdicts.md": "0.05",
    "docs/chooser.md": "16 100",
    "docs/index.md": "",
    "docs/which-step.md": "1 2",
    "docs/coordinates/whitened.md": "1 10 2 1507.00210 2017 2022 2021 2024 2025",
}
GENERATED = r"<!-- (?:results|link):.*?<!-- end -->|<!--value:.*?<!---->|^ *```.*?^ *```$|\$\$.*?\$\$|<!--.*?-->"
NUMBER = re.compile(r"(?<![\w.\-−])[−+]?\d[\d,]*(?:\.\d+)?(?:·10)?[⁻⁰¹²³⁴⁵⁶⁷⁸⁹]*")


def numbers_of_sentences(text):
    prose = re.sub(GENERATED, "", text, flags=re.DOTALL | re.MULTILINE)
    return {number.rstrip(",") for number in NUMBER.findall(re.sub(r"\]\([^)]*\)|`[^`]*`|!\[[^\]]*\]", "]", prose))}


@pytest.mark.parametrize("page", SETTINGS)
def test_no_other_number_stands_in_a_sentence(page):
    text = (ROOT / page).read_text()
    assert numbers_of_sentences(text) <= set(SETTINGS[page].split())
    assert "97.3" in numbers_of_sentences(text + "\nThe gap falls by 97.3 % here.")


def test_a_place_is_filled_with_its_phrase_and_a_wrong_number_goes():
    page = "SOAP gains <!--value:features-soap-->99.9 dB<!---->, and 3 stays."
    assert filled(page, STORES, {}) == page.replace("99.9 dB", phrase("features-soap", STORES, {}))
    with pytest.raises(ValueError, match="no value is called 'nothing'; there are features-soap"):
        filled("It is <!--value:nothing-->1<!---->", STORES, {})
    with pytest.raises(ValueError, match="place of 'features-soap' begins a line"):
        filled("SOAP gains\n<!--value:features-soap-->1.9 dB<!---->.", STORES, {})


def test_every_phrase_stands_on_a_page():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    named = {name for page in pages for name in re.findall(r"<!--value:(\S+?)-->", page.read_text())}
    assert named == VALUES.keys()
