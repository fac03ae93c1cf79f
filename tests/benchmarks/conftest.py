"""What tests of the benchmarks share: committed results, results that are made up, and figures that are not drawn."""

from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure

from benchmarks.catalogue import STUDIES
from benchmarks.core.store import Store
from benchmarks.core.study import report
from benchmarks.data import DATA, Dataset
from benchmarks.studies import isometry_training
from examples import gpt as text

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
STORES = {path.stem: Store(path) for path in sorted(RESULTS.glob("*.jsonl"))}
ENVIRONMENT = {"processor": "a processor", "threads": 1, "torch": "2", "gpu": None}


def result(method="none", activation="tanh", accuracies=((10.0, 20.0), (40.0, 44.0)), **settings):
    """A result of two epochs and two seeds; `settings` are those that differ."""
    usual = {"data": "digits", "hidden": [8], "batch_size": 4, "optimizer": "adam", "lr": 0.001, "epochs": 2}
    usual |= {"schedule": "constant", "seeds": [0, 1], "backend": "ensemble", "device": "cpu"}
    return {
        "settings": {**usual, "method": method, "activation": activation, **settings},
        "environment": ENVIRONMENT,
        "features": 64,
        "classes": 10,
        "steps_per_epoch": 100,
        "train_loss": [[1.0, 1.0]] * 2,
        "test_accuracy": [list(epoch) for epoch in accuracies],
        "seconds": [0.4, 0.2],
    }


def stored(folder, study, results, name=None):
    """A file of some results, added to those that are there; a key of their own for each."""
    store = Store(folder / f"{name or study}.jsonl", study)
    for number, each in enumerate(results, start=len(store.read())):
        store.add(str(number), {"environment": ENVIRONMENT, **each, "key": str(number), "computes": None})
    return store


def reported(folder, study, results):
    """The text of every section of some results, added to what is there."""
    sections = report([stored(folder, study, results, "name").path], STUDIES)
    return {name: section.text for name, section in sections.items()}


@pytest.fixture(scope="module")
def few():
    """A small data set called "few", a batch of it for studies of isometry."""

    def load(argument="", download=False):
        generator = torch.Generator().manual_seed(0)
        inputs, labels = torch.rand(80, 32, generator=generator), torch.randint(3, (80,), generator=generator)
        labels[0] = 2
        return Dataset(inputs[:64], labels[:64], inputs[64:], labels[64:])

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(DATA, "few", load)
        patch.setattr(isometry_training, "BATCH_SIZE", 64)
        yield


@pytest.fixture(autouse=True)
def _figures(monkeypatch):
    """Leave files of figures empty: drawing takes longer than the rest."""

    def leave_empty(figure: Figure, path: Path, **options: Any) -> None:
        path.write_bytes(b"")

    monkeypatch.setattr(Figure, "savefig", leave_empty)


@pytest.fixture(scope="session")
def sample():
    return text.split(text.python_reference()[:20_000])


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "texts" / "sample.txt"
    path.parent.mkdir()
    path.write_text(text.python_reference()[:5_000], encoding="utf-8")
    return path
