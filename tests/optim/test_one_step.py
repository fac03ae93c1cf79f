"""With plain SGD three of the steps that repair the gradient are one."""

import pytest
import torch
from torch import nn

from adiv_optim import BatchIdeal, GradientOnly, Preconditioned, Whitened

BATCH = {"damping": 0.5, "decay": 0.0, "every": 1}  # of the present batch alone
ROWS, INPUTS, OUTPUTS = 16, 8, 4
WRAPPERS = {
    "Whitened": lambda sgd, layer: Whitened(sgd, layer, graft_norm=False, **BATCH),
    "Preconditioned": lambda sgd, layer: Preconditioned(sgd, layer, **BATCH),
}


def stepped(wrap):
    torch.manual_seed(0)
    layer = nn.Linear(INPUTS, OUTPUTS).double()
    x, y = torch.randn(ROWS, INPUTS).double(), torch.randn(ROWS, OUTPUTS).double()
    optimizer = wrap(torch.optim.SGD(layer.parameters(), lr=0.1), layer)
    nn.functional.mse_loss(layer(x), y).backward()
    optimizer.step()
    return torch.cat([layer.weight, layer.bias[:, None]], 1).detach()


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_with_plain_sgd_the_step_is_that_of_batch_ideal(wrapper):
    damping = BATCH["damping"] * ROWS / (INPUTS + 1)
    ideal = stepped(lambda sgd, layer: GradientOnly(sgd, layer, BatchIdeal(damping)))
    torch.testing.assert_close(stepped(WRAPPERS[wrapper]), ideal, rtol=1e-9, atol=1e-12)
