"""What tests of the benchmarks share."""

from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from examples import gpt as text


@pytest.fixture(autouse=True)
def _figures(request, monkeypatch):
    """Leave files of figures empty where a test does not ask for `drawn`: drawing takes longer than the rest."""

    def leave_empty(figure: Figure, path: Path, **options: Any) -> None:
        path.write_bytes(b"")

    if "drawn" not in request.fixturenames:
        monkeypatch.setattr(Figure, "savefig", leave_empty)


@pytest.fixture
def drawn(monkeypatch):
    """Draw figures, of few dots and with what they hold where it is, for a test that looks at them."""
    savefig = Figure.savefig

    def draw(figure: Figure, path: Path, **options: Any) -> None:
        figure.set_layout_engine("none")  # moving it about takes as long as drawing it
        savefig(figure, path, **{**options, "dpi": 40})

    monkeypatch.setattr(Figure, "savefig", draw)


@pytest.fixture(scope="session")
def sample():
    """A short text, split."""
    return text.split(text.python_reference()[:20_000])


@pytest.fixture
def file(tmp_path):
    """A file of text."""
    path = tmp_path / "texts" / "sample.txt"
    path.parent.mkdir()
    path.write_text(text.python_reference()[:5_000], encoding="utf-8")
    return path
