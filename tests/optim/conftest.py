"""What tests of optimizers share."""

import pytest
from torch import distributed


@pytest.fixture
def one_process():
    """A process group of this process alone, in which all that needs one can be built."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()
