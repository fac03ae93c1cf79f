"""What every test shares: the suite is imported as the package `tests`, from the repository root."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.helpers.seeds import manual_seed


@pytest.fixture(autouse=True)
def _seed() -> None:
    manual_seed(0)


def pytest_collection_finish() -> None:
    """Spare every later collection of garbage the modules and tests, which stay to the end."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()


@pytest.fixture
def in_float64():
    """Make float64 the default; a module asks for it by `pytestmark = pytest.mark.usefixtures("in_float64")`."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def frameworks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Let DeepXDE and Keras compute with torch, and all write into a folder of the test."""
    monkeypatch.chdir(tmp_path)
    for name, value in {"DDE_BACKEND": "pytorch", "KERAS_BACKEND": "torch", "KERAS_HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    yield
    torch.set_default_device(None)  # DeepXDE sets it to a GPU if there is one


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Let torch.compile know of no graph, and count graphs and breaks from nothing."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def everything(pytestconfig) -> bool:
    """Whether a sweep is to take all that it can, in place of a share that holds each of its parts once."""
    return pytestconfig.getoption("--slow")


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="also run what takes many minutes")
    parser.addoption("--fuzz", type=int, default=0, metavar="N", help="compare N more random networks of fresh seeds")
    parser.addoption("--fuzz-seed", type=int, metavar="SEED", help="compare the random network of this seed alone")


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--slow"):
        for item in items:
            if "slow" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="takes many minutes; run with --slow"))
