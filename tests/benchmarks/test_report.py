"""Tables and figures say what the result files say."""

import math
import re
import shutil
from pathlib import Path

import pytest
from scipy.stats import ttest_ind_from_stats

from benchmarks.__main__ import TABLES, main
from benchmarks.catalogue import RECIPES, STUDIES
from benchmarks.core.store import Store
from benchmarks.core.study import files, insert, report, shown, write_tables
from benchmarks.core.tables import Section, Table, estimate, exact, mean_and_error
from benchmarks.digests import DIGESTS, values
from benchmarks.studies.table1 import MISSING

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def result(method="none", activation="tanh", backend="ensemble", accuracies=((10.0, 20.0), (40.0, 44.0)), **settings):
    return {
        "settings": {
            "data": "digits",
            "method": method,
            "activation": activation,
            "hidden": [8],
            "batch_size": 4,
            "optimizer": "adam",
            "lr": 0.001,
            "schedule": "constant",
            "epochs": 2,
            "seeds": [0, 1],
            "backend": backend,
            "device": "cpu",
            **settings,
        },
        "environment": {"processor": "a processor", "threads": 1, "torch": "2", "gpu": None},
        "features": 64,
        "classes": 10,
        "steps_per_epoch": 100,
        "train_loss": [[1.0, 1.0]] * 2,
        "test_accuracy": [list(epoch) for epoch in accuracies],
        "seconds": [0.4, 0.2],
    }


def reported(folder, study, results, name="name"):
    """The sections of some results, added to what is there."""
    store = Store(folder / f"{name}.jsonl", study)
    for number, each in enumerate(results, start=len(store.read()) + len(store.read("trials"))):
        store.add(str(number), each)
    return {own: section.text for own, section in report([store.path], STUDIES).items()}


def is_drawn(path):
    return path.read_bytes().startswith(PNG_SIGNATURE)


def test_sweep_names_the_best_rate_and_its_neighbours(tmp_path, drawn):
    found = ((0.1, 30.0), (0.3, 50.0), (1.0, 49.0), (3.0, 10.0))
    runs = [result(lr=lr, optimizer="sgd", accuracies=((a, a),), validation=True) for lr, a in found]
    section = reported(tmp_path, "uc-sweep", runs)["name"]
    assert "| sgd | none | 0.3 | 50.00 ± 0.00 | 0.3, 1 |" in section
    assert "a tenth of the training set, held out" in section
    assert is_drawn(tmp_path / "name.png")
    lower = result(lr=0.03, optimizer="sgd", accuracies=((60.0, 60.0),), validation=True)
    section = reported(tmp_path, "uc-sweep", [lower])["name"]
    assert "| sgd | none | 0.03, at the sweep's edge | 60.00 ± 0.00 | 0.03 |" in section


def test_sweep_takes_the_best_rate_at_every_place_and_names_what_tells_panels_apart(tmp_path, drawn):
    runs = [
        result(method, gain=gain, lr=lr, activation=activation, accuracies=((10.0, 10.0), (top + 100 * lr, top)))
        for method, top in (("none", 40.0), ("layernorm", 60.0))
        for gain in (0.1, 3.0)
        for lr in (0.01, 0.03)
        for activation in ("tanh", "leaky-relu")
    ]
    section = reported(tmp_path, "uc-init", runs)["name"]
    assert "|  | method | 0.1 | 3 |" in section
    assert "| tanh | none | 41.50 ± 1.50 | 41.50 ± 1.50 |" in section
    assert section.count("| leaky-relu |") == 2
    assert "each at the best of 2 rates" in section
    assert is_drawn(tmp_path / "name.png")
    sections = reported(tmp_path, "fig4", [result(), result(hidden=[16]), result(epochs=3)], "other")
    assert set(sections) == {"other-1", "other-2"}
    assert "| method | 8 | 16 |" in sections["other-1"]


def test_standard_error_is_that_of_the_mean():
    mean, error = mean_and_error([1.0, 2.0, 3.0, 6.0])
    assert mean == 3.0
    assert error == pytest.approx(math.sqrt(14 / 3 / 4), rel=1e-15)
    assert math.isnan(mean_and_error([1.0])[1])


def test_table_shows_last_epoch_and_cost(tmp_path, drawn):
    runs = [
        result(),
        result("proportional", accuracies=((1.0, 1.0), (50.0, 50.0))),
        result(backend="jacobian", seeds=[0], accuracies=((0.0,),)),
    ]
    section = reported(tmp_path, "compare", runs)["name"]
    assert "| none | 42.00 ± 2.00 | 2.00 | 4.00 |" in section
    assert "| gradient-only proportional | 50.00 ± 0.00 | 2.00 |  |" in section
    assert "digits, [64, 8, 10], batch 4, adam 0.001, cpu" in section
    assert is_drawn(tmp_path / "name.png")


def test_accuracies_are_of_the_longest_runs_whatever_came_last(tmp_path):
    runs = [
        result("none"),
        result("whitened", backend="loop", accuracies=((0.0, 0.0), (60.0, 60.0))),
        result("layernorm", epochs=1, accuracies=((70.0, 70.0),)),
        result("none", epochs=1, accuracies=((20.0, 20.0),)),
    ]
    section = reported(tmp_path, "compare", runs)["name"]
    assert "| none | 42.00 ± 2.00 | 2.00 |  |" in section
    assert "| LayerNorm |  | 2.00 |  |" in section  # one epoch is not to stand beside two
    assert "| whitened | 60.00 ± 0.00 |  | 2.00 |" in section
    assert (
        "(ensemble: epochs 2, seeds 2; ensemble: epochs 1, seeds 2; loop: epochs 2, seeds 2; accuracies are" in section
    )


def test_other_protocols_are_other_tables(tmp_path):
    others = {
        "compare": {"lr": 0.01}, "table1": {"lr": 0.01}, "departures": {"lr": 0.01}, "rates": {"schedule": "cosine"},
        "cifar10-tuned": {"epochs": 3}, "uc-sweep": {"epochs": 3}, "uc-rescaled": {"epochs": 3},
    }  # fmt: skip
    for study, other in others.items():
        same = {"rescaled": 1.0} if study == "uc-rescaled" else {}
        (folder := tmp_path / study).mkdir()
        sections = reported(folder, study, [result(**same), result(**same, **other, accuracies=((30.0, 30.0),))])
        assert ["42.00" in section for section in sections.values()] == [True, False], study
        assert set(sections) == {"name-1", "name-2"}


def test_batch_size_table_has_the_slope_of_the_line(tmp_path, drawn):
    runs = [
        result(method, batch_size=size, accuracies=[[0.0, 0.0], [50 + slope * size] * 2])
        for size in (8, 16, 32)
        for method, slope in (("none", -0.5), ("affine-like", 0.25))
    ]
    section = reported(tmp_path, "table1", runs)["name"]
    assert (
        "| tanh | none | 46.00 ± 0.00 | 42.00 ± 0.00 | 34.00 ± 0.00 | 40.67 ± 0.00 | -50.00 ± 0.00 | 38.35 ± 0.50 |"
        in section
    )
    assert (
        "| tanh | affine-like | 52.00 ± 0.00 | 54.00 ± 0.00 | 58.00 ± 0.00 | 54.67 ± 0.00 | +25.00 ± 0.00 |" in section
    )
    assert is_drawn(tmp_path / "name.png")


def test_table1_shows_what_is_there_and_what_is_not(tmp_path):
    paper = {"epochs": 100, "seeds": [0, 1, 2, 3, 4]}

    def cell(method, size):
        return result(method, batch_size=size, accuracies=[[50 - size / 8] * 5], **paper)

    runs = [*(cell("none", size) for size in (8, 16, 32, 64, 128)), cell("l2norm", 128), cell("l2norm", 64)]
    runs.append(result(epochs=1, batch_size=8))  # of the preset smoke
    sections = reported(tmp_path, "table1", runs)
    assert set(sections) == {"name-1", "name-2"}
    table = sections["name-1"]
    assert "| 49.00 ± 0.00 | 48.00 ± 0.00 | 46.00 ± 0.00 | 42.00 ± 0.00 | 34.00 ± 0.00 | 43.80 ± 0.00 | -12.50" in table
    assert (
        f"| tanh | L2 norm, η | {MISSING} | {MISSING} | {MISSING} | 42.00 ± 0.00 | 34.00 ± 0.00 |  |  | 49.93" in table
    )
    assert table.count(f"| {MISSING} | {MISSING} | {MISSING} | {MISSING} | {MISSING} |") == 18
    assert "7 of the preset's 100 cells are there." in table
    assert "after 100 epochs" in table


def test_no_results_say_what_to_run():
    with pytest.raises(FileNotFoundError, match="python -m benchmarks digits"):
        report([], STUDIES)


def test_a_page_has_the_rows_worth_it_or_none_and_a_link_to_all(tmp_path):
    rows = [["one", estimate([1.0, 2.0])], ["`two`", exact(1 / 3, ".1f")], ["three", ""]]
    table = Table(["name", "figure, % (p)"], rows, [True, False, False], "whole")
    section = Section(["**Heading**", table, "Caption."])
    page = tmp_path / "docs" / "page.md"
    page.parent.mkdir()
    page.write_text("<!-- results:x --><!-- end --><!-- caption:x --><!-- end --><!-- link:x --><!-- end -->")
    shown, caption = insert(page, {"x": section}, tmp_path / "docs" / "tables").split("<!-- caption:x -->")
    caption, _, link = caption.partition("<!-- link:x -->")
    assert link == "\n\nAll rows: [x-whole.csv](tables/x-whole.csv).\n\n<!-- end -->"
    for text in (shown, caption):
        assert "**Heading**" in text
        assert "Caption. All rows: [x-whole.csv](tables/x-whole.csv)." in text
    assert "| one | 1.50 ± 0.50 |\n\nCaption" in shown
    assert "|" not in caption
    assert all(row in section.text for row in ("| one | 1.50 ± 0.50 |", "| `two` | 0.3 |", "| three |  |"))
    write_tables({"x": section}, tmp_path / "tables")
    assert (tmp_path / "tables" / "x-whole.csv").read_text().splitlines() == [
        'name,"figure, %","figure, % error","figure, % n"',
        "one,1.5,0.5,2",
        f"two,{1 / 3},,",
        "three,,,",
    ]


def test_a_page_leaves_out_columns_that_there_are(tmp_path):
    section, page = Section([Table(["name", "n", "p"], [["one", "2", "3"]])]), tmp_path / "page.md"
    page.write_text("<!-- results:x without n; p --><!-- end -->")
    filled = insert(page, {"x": section}, tmp_path)
    assert "| name |\n| --- |\n| one |\n" in filled
    page.write_text(filled)
    assert insert(page, {"x": section}, tmp_path) == filled
    page.write_text("<!-- results:x without q --><!-- end -->")
    with pytest.raises(ValueError, match="leaves out a column 'q' of x, which has name, n, p"):
        insert(page, {"x": section}, tmp_path)


def test_one_link_leads_to_the_tables_of_several_sections(tmp_path):
    sections, page = {name: Section([Table(["name"], [[name]])]) for name in ("one", "two")}, tmp_path / "page.md"
    page.write_text("<!-- link:one two --><!-- end -->")
    filled = insert(page, sections, tmp_path)
    assert "All rows: [one.csv](./one.csv), [two.csv](./two.csv)." in filled
    page.write_text(filled)
    assert insert(page, sections, tmp_path) == filled
    page.write_text("<!-- link:one three --><!-- end -->")
    with pytest.raises(ValueError, match="wants results 'three'"):
        insert(page, sections, tmp_path)


def test_report_fills_all_pages_or_none(tmp_path, capsys):
    reported(tmp_path, "compare", [result()], name="mine")
    pages = [tmp_path / "one.md", tmp_path / "two.md"]
    for page, name in zip(pages, ("mine", "other"), strict=True):
        page.write_text(f"<!-- results:{name} -->\n<!-- end -->\n")
    command = ["report", "--out", str(tmp_path), "--pages", *map(str, pages)]
    assert main(command) == 2
    assert "two.md wants results 'other'" in capsys.readouterr().err
    assert "42.00" not in pages[0].read_text()
    pages[1].write_text("<!-- results:mine -->\n<!-- end -->\n")
    assert main([*command, "--figures", str(tmp_path / "figures"), "--tables", str(tmp_path / "tables")]) == 0
    assert (tmp_path / "tables" / "mine.csv").read_text().count("\n") == 2
    assert all("| none | 42.00 ± 2.00 | 2.00 |" in page.read_text() for page in pages)
    assert [path.name for path in tmp_path.glob("*/*.png")] == ["mine.png"]


def test_what_has_not_run_is_listed(tmp_path):
    there = dict.fromkeys(RECIPES.keys() - {"fig2", "speed"})
    section = DIGESTS["not-run"].section(there, "not-run", tmp_path).text
    assert [line.split(" | ")[0] for line in section.splitlines()[2:]] == ["| `fig2`", "| `speed`"]


def test_runtimes_sum_epochs_and_read_the_last_of_a_running_clock(tmp_path):
    store = Store(tmp_path / "name.jsonl", "compare")
    for key, seconds in (("a", [1800.0, 1800.0]), ("b", [3600.0, 7200.0])):
        store.add(key, {**result(lr=0.1 if key == "a" else 0.2), "seconds": seconds})
    store.add("c", {**result(lr=0.3), "part": "search", "score": 1.0})
    assert "| `name` | digits | 2 | 1 | 4 |" in report([store.path], STUDIES, DIGESTS)["runtimes"].text
    store.add("d", {**result(lr=0.4), "seconds": [3600.0, 7200.0], "validation_loss": [1.0, 1.0]})
    assert "| `name` | digits | 3 | 1 | 6 |" in DIGESTS["runtimes"].section({"name": store}, "runtimes", tmp_path).text


@pytest.fixture(scope="module")
def fresh():
    """The sections of the committed results, and the stores that they are made from."""
    paths = sorted(RESULTS.glob("*.jsonl"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("matplotlib.figure.Figure.savefig", lambda *_, **__: None)  # they stay, and drawing takes longest
        yield report(paths, STUDIES, DIGESTS), {path.stem: Store(path) for path in paths}


PAGES = [ROOT / page for page in (*shown(STUDIES, DIGESTS), *values.PAGES)]


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_pages_quote_the_committed_results(page, fresh):
    text = page.read_text()
    assert values.filled(insert(page, fresh[0], ROOT / TABLES), fresh[1]) == text
    assert len(re.findall("<!-- results:", text)) in (0, 1, 2), "more than two sections with tables that are made"


def test_committed_tables_are_whole(fresh):
    whole = {f"{file}.csv": table for name, section in fresh[0].items() for file, table in files(name, section).items()}
    assert {path.name: path.read_text() for path in (ROOT / TABLES).iterdir()} == {
        name: table.csv() for name, table in whole.items()
    }


def test_every_section_and_figure_of_the_committed_results_is_on_its_page(fresh):
    sections, stores = fresh
    own = {name: STUDIES[store.study].page for name, store in stores.items()}
    for name in sections:
        (longest,) = sorted((file for file in own if name.startswith(file)), key=len)[-1:] or [None]
        for page in DIGESTS[name].pages if name in DIGESTS else [own[longest]]:
            text = (ROOT / page).read_text()
            places = re.findall(r"<!-- (?:results|caption|link):(.+?)(?: without .*?)? -->", text)
            assert name in " ".join(places).split(), page
    text = "".join(page.read_text() for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
    shown = set(re.findall(r"\(\S*figures/(\S+\.png)\)", text))
    assert {figure.name for figure in (ROOT / "docs" / "figures").glob("*.png")} == shown


def test_verdict_shows_each_study_and_the_best_of_each_column(fresh):
    sections, stores = fresh
    rows = [line.split(" | ") for line in sections["verdict"].text.splitlines() if line.startswith("|")]
    cells = {row[0].strip("| "): [cell.strip("| ") for cell in row[1:]] for row in rows[2:]}
    (run,) = (
        r for r in stores["cifar10"].read()
        if (r["settings"]["method"], r["settings"]["activation"]) == ("batch-ideal", "tanh")
    )  # fmt: skip
    mean, error = mean_and_error(run["test_accuracy"][-1])
    assert cells["`BatchIdeal`"][0].strip("*") == f"{mean:.2f} ± {error:.2f}"
    (table,) = sections["verdict"].tables
    numbers = {row[0]: row[1:] for row in table.rows}
    for column in range(6):
        shown = {name: row[column].numbers for name, row in numbers.items() if row[column]}
        best = (max if column < 4 else min)(shown, key=lambda name: shown[name][""])
        # Welch's test by means and standard errors.
        as_good = [
            name
            for name, own in shown.items()
            if name == best
            or ttest_ind_from_stats(
                *(
                    value
                    for each in (own, shown[best])
                    for value in (each[""], each["error"] * each["n"] ** 0.5, each["n"])
                ),
                equal_var=False,
            )[1]
            >= 0.05
        ]
        assert [name for name, row in numbers.items() if row[column] and "**" in row[column].text] == as_good


def test_without_one_of_its_studies_there_is_no_verdict(tmp_path):
    path = Path(shutil.copy(RESULTS / "cifar10.jsonl", tmp_path))
    assert set(report([path], STUDIES, DIGESTS)) == {"cifar10", "runtimes"}
