"""What every test shares: the suite is imported as the package `tests`, from the repository root."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="also run what takes many minutes")


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--slow"):
        for item in items:
            if "slow" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="takes many minutes; run with --slow"))
