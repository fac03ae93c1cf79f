"""What every test shares: the suite is imported as the package `tests`, from the repository root."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
