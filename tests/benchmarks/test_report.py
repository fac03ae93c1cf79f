"""Tables and figures say what the result files say."""

import re
import shutil
from fnmatch import fnmatch
from pathlib import Path

import pytest

from benchmarks.__main__ import TABLES, main
from benchmarks.catalogue import STUDIES
from benchmarks.core.study import files, insert, report, shown
from benchmarks.core.tables import Section, Table
from benchmarks.digests import DIGESTS, values

from .conftest import RESULTS, ROOT, STORES, reported, result, stored


def test_other_protocols_are_other_tables(tmp_path):
    others = {
        "compare": {"lr": 0.01}, "table1": {"lr": 0.01}, "departures": {"lr": 0.01}, "rates": {"schedule": "cosine"},
        "cifar10-tuned": {"schedule": "cosine"}, "uc-sweep": {"epochs": 3}, "uc-rescaled": {"epochs": 3},
    }  # fmt: skip
    for study, other in others.items():
        same = {"rescaled": 1.0} if study == "uc-rescaled" else {}
        (folder := tmp_path / study).mkdir()
        sections = reported(folder, study, [result(**same), result(**same, **other, accuracies=((30.0, 30.0),))])
        assert ["42.00" in section for section in sections.values()] == [True, False], study
        assert set(sections) == {"name-1", "name-2"}


def test_table1_shows_what_is_there_and_what_is_not(tmp_path):
    cells = [*(("none", size) for size in (8, 16, 32, 64, 128)), ("l2norm", 128), ("l2norm", 64)]
    runs = [result(method, batch_size=size, accuracies=[[50 - size / 8] * 5]) for method, size in cells]
    table = reported(tmp_path, "table1", runs)["name"]
    assert "| 49.00 ± 0.00 | 48.00 ± 0.00 | 46.00 ± 0.00 | 42.00 ± 0.00 | 34.00 ± 0.00 | 43.80 ± 0.00 | -12.50" in table
    assert "| tanh | L2 norm, η |  |  |  | 42.00 ± 0.00 | 34.00 ± 0.00 |  |  | 49.93" in table


@pytest.mark.parametrize(
    ("place", "shown", "wrong", "message"),
    [
        ("results:one without n; p", "| name |\n| --- |\n| one |\n", "results:one without q",
         "unknown column of one on .*/page.md 'q'; known are name, n, p"),
        ("link:t* one", "All rows: [two.csv](./two.csv), [one.csv](./one.csv).", "link:one three*",
         "unknown results on .*/page.md 'three\\*'; known are one, two"),
    ],
    ids=["columns", "links"],
)  # fmt: skip
def test_a_place_on_a_page_is_filled_alike_twice_or_refused(place, shown, wrong, message, tmp_path):
    sections = {name: Section([Table(["name", "n", "p"], [[name, "2", "3"]])]) for name in ("one", "two")}
    page = tmp_path / "page.md"
    page.write_text(f"<!-- {place} --><!-- end -->")
    filled = insert(page, sections, tmp_path)
    assert shown in filled
    page.write_text(filled)
    assert insert(page, sections, tmp_path) == filled
    page.write_text(f"<!-- {wrong} --><!-- end -->")
    with pytest.raises(ValueError, match=message):
        insert(page, sections, tmp_path)


def test_report_fills_all_pages_or_none(tmp_path, capsys):
    stored(tmp_path, "compare", [result()], "mine")
    pages = [tmp_path / "one.md", tmp_path / "two.md"]
    for page, name in zip(pages, ("mine", "other"), strict=True):
        page.write_text(f"<!-- results:{name} -->\n<!-- end -->\n")
    command = ["report", "--out", str(tmp_path), "--pages", *map(str, pages)]
    assert main(command) == 2
    assert "two.md 'other'; known are mine" in capsys.readouterr().err
    assert "42.00" not in pages[0].read_text()
    pages[1].write_text("<!-- results:mine -->\n<!-- end -->\n")
    assert main([*command, "--figures", str(tmp_path / "figures")]) == 0
    assert (tmp_path / "mine.csv").read_text().count("\n") == 2
    assert all("| none | 42.00 ± 2.00 | 2.00 |" in page.read_text() for page in pages)
    assert [path.name for path in tmp_path.glob("*/*.png")] == ["mine.png"]


@pytest.fixture(scope="module")
def fresh():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("matplotlib.figure.Figure.savefig", lambda *_, **__: None)  # they stay, and drawing takes longest
        yield report([store.path for store in STORES.values()], STUDIES, DIGESTS)


PAGES = [ROOT / page for page in (*shown(STUDIES, DIGESTS), *values.PAGES)]


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_pages_quote_the_committed_results(page, fresh):
    text = page.read_text()
    assert values.filled(insert(page, fresh, ROOT / TABLES), STORES, files(fresh)) == text
    assert len(re.findall("<!-- results:", text)) in (0, 1, 2), "more than two sections with tables that are made"


def test_committed_tables_are_whole(fresh):
    whole = {f"{file}.csv": table.csv() for file, table in files(fresh).items()}
    assert {path.name: path.read_text() for path in (ROOT / TABLES).iterdir()} == whole


def test_every_section_and_figure_of_the_committed_results_is_on_its_page(fresh):
    own = {name: STUDIES[store.study].page for name, store in STORES.items()}
    for name in fresh:
        (longest,) = sorted((file for file in own if name.startswith(file)), key=len)[-1:] or [None]
        text = (ROOT / (DIGESTS[name].page if name in DIGESTS else own[longest])).read_text()
        places = re.findall(r"<!-- (?:results|link):(.+?)(?: without .*?)? -->", text)
        assert any(fnmatch(name, pattern) for pattern in " ".join(places).split()), name
    text = "".join(page.read_text() for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
    shown = set(re.findall(r"\(\S*figures/(\S+\.png)\)", text))
    assert {figure.name for figure in (ROOT / "docs" / "figures").glob("*.png")} == shown


def test_without_one_of_its_studies_there_is_no_verdict(tmp_path):
    path = Path(shutil.copy(RESULTS / "cifar10.jsonl", tmp_path))
    assert set(report([path], STUDIES, DIGESTS)) == {"cifar10"}
