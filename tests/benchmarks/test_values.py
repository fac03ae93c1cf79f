"""Numbers in sentences are written into pages from the results."""

import re

import pytest

from benchmarks.digests.values import VALUES, filled, phrase

from .conftest import ROOT, STORES


def test_a_place_is_filled_with_its_phrase_and_a_wrong_number_goes():
    page = "SOAP gains <!-- value:features-soap -->99.9 dB<!-- -->, and 3 stays."
    assert filled(page, STORES) == page.replace("99.9 dB", phrase("features-soap", STORES))
    with pytest.raises(ValueError, match="no value is called 'nothing'; there are features-soap"):
        filled("It is <!-- value:nothing -->1<!-- -->", STORES)
    with pytest.raises(ValueError, match="place of 'features-soap' begins a line"):
        filled("SOAP gains\n<!-- value:features-soap -->1.9 dB<!-- -->.", STORES)


def test_every_phrase_stands_on_a_page():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    named = {name for page in pages for name in re.findall(r"<!-- value:(\S+) -->", page.read_text())}
    assert named == VALUES.keys()
