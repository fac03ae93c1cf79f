"""Recipes make the committed results: their commands find every run there, and nothing else to do."""

import shutil

import pytest

from benchmarks.__main__ import main
from benchmarks.catalogue import RECIPES
from benchmarks.core.study import Recipe
from benchmarks.reproduce import ReproduceOptions, commands, run

from .conftest import RESULTS, STORES

#: Of which runs are still being made.
OPEN = {"equations"}
COMMITTED = sorted(STORES)


@pytest.fixture(scope="module")
def copies(tmp_path_factory):
    return shutil.copytree(RESULTS, tmp_path_factory.mktemp("copies") / "results")


@pytest.mark.parametrize("name", [name for name in COMMITTED if name not in OPEN])
def test_recipe_finds_every_run_of_its_file(name, copies, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("benchmarks.__main__.report", lambda *_: {})
    monkeypatch.setattr("benchmarks.__main__.check_device", lambda name: None)  # some files are of a GPU
    before = (copies / f"{name}.jsonl").read_bytes()
    # Neither is there: a run that is not in the file would want them.
    where = ReproduceOptions(
        data="imagefolder:/nowhere/cifar10-jpeg", text="/nowhere/tinyshakespeare.txt", out=copies, threads=None
    )
    assert main(commands(name, where)[0]) == 0
    assert (copies / f"{name}.jsonl").read_bytes() == before


def test_command_makes_files_by_name_and_lists_them(tmp_path, capsys, monkeypatch):
    recipe = Recipe(0.1, options=("--epochs 1 --seeds 1 --methods none",), data="")
    monkeypatch.setitem(RECIPES, "mine", ("compare", recipe))
    assert main(["reproduce", "mine", "--out", str(tmp_path), "--threads", "1"]) == 0
    assert (tmp_path / "mine.jsonl").exists()
    assert main(["reproduce", "--list"]) == 0
    printed = capsys.readouterr().out
    assert "| fig4 | fig4 --preset reduced | images |" in printed
    assert f"| cifar10 | cifar10 | images | {RECIPES['cifar10'][1].hours:g} | 20 |" in printed


def test_all_committed_files_are_made_after_those_that_they_read(tmp_path):
    made, out = [], tmp_path / "a folder with spaces"

    def note(command):
        read = {path for path in command if path.endswith(".jsonl")}
        assert read <= {str(out / f"{name}.jsonl") for name in made}, command
        made.append(command[command.index("--name") + 1])
        return len(read)

    where = ReproduceOptions(data="cifar10", text="text", out=out, threads=None, names=("committed",))
    assert run(where, note, RESULTS) > 0
    assert sorted(set(made)) == COMMITTED
