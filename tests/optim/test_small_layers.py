"""Small layers of one shape are multiplied together, and step as each would by itself."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adiv_optim import Whitened
from tests.helpers.cases import relative_error
from tests.helpers.steps import BY_COVARIANCE

pytestmark = pytest.mark.usefixtures("in_float64")

EXACT = 1e-12


def trained(together: bool, method: str, inner: Any, bias: bool) -> list[Tensor]:
    """The weights of layers that one optimizer trains, the first in a group of its own; or one for each layer."""
    torch.manual_seed(0)
    model = nn.ModuleList([*(nn.Linear(5, 5, bias=bias) for _ in range(4)), nn.Linear(5, 2)])
    first, *rest = [{"params": list(layer.parameters())} for layer in model]
    first |= {"weight_decay": 0.3, "lr": 0.05}
    groups = [[first], *([part] for part in rest)]
    if together:
        groups = [[first, {"params": [p for part in rest for p in part["params"]]}]]
    optimizers = [BY_COVARIANCE[method](inner(each), model, every=3) for each in groups]
    for step in range(9):
        model.zero_grad()
        x = torch.randn(7, 5)
        for place, layer in enumerate(model):
            if place != 3 or step % 2 == 0:
                x = torch.tanh(layer(x))
        x.square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("inner", [torch.optim.AdamW, lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9)])
@pytest.mark.parametrize("method", BY_COVARIANCE)
def test_layers_of_one_optimizer_step_as_if_each_had_its_own(method, inner, bias):
    found, wanted = (trained(together, method, inner, bias) for together in (True, False))
    assert all(relative_error(*pair) <= EXACT for pair in zip(found, wanted, strict=True))


def test_layer_without_a_root_leaves_those_of_its_shape_theirs(monkeypatch):
    """The covariance of the second layer alone has none."""
    model = nn.Sequential(*(nn.Linear(5, 5) for _ in range(3)))
    opt = Whitened(torch.optim.SGD(model.parameters(), lr=0.1), model, every=1)
    eigh = torch.linalg.eigh

    def failing(matrix: Tensor) -> Any:
        if (matrix.diagonal(dim1=-2, dim2=-1).amax(-1) > 2.5).any():
            raise torch.linalg.LinAlgError("planted")
        return eigh(matrix)

    monkeypatch.setattr(torch.linalg, "eigh", failing)
    model[0].weight.data[0] = 1e3  # of which the second reads one large entry
    model(torch.randn(7, 5)).square().mean().backward()
    with pytest.warns(UserWarning, match=r"1\.weight: no eigenvalues found of a matrix of shape \(1, 6, 6\)"):
        opt.step()
    treated = opt.coverage().treated
    assert {"0.weight", "2.weight"} <= treated.keys()
    assert "1.weight" not in treated
