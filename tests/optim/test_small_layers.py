"""Small layers of one shape are multiplied together, and step as each would by itself."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adiv_optim import Preconditioned, Whitened
from tests.helpers.cases import relative_error

pytestmark = pytest.mark.usefixtures("in_float64")

EXACT = 1e-12
METHODS = {
    "whitened": lambda opt, model: Whitened(opt, model, every=3),
    "rank": lambda opt, model: Whitened(opt, model, every=3, rank=2),
    "preconditioned": lambda opt, model: Preconditioned(opt, model, every=3),
}


class Tower(nn.Module):
    """Four layers of one shape, of which the last is called in every other step alone, and one of another shape."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5, bias=bias) for _ in range(4))
        self.head = nn.Linear(5, 2)

    def forward(self, x: Tensor, all_layers: bool) -> Tensor:
        """Return the head's outputs."""
        for layer in list(self.layers)[: 3 + all_layers]:
            x = torch.tanh(layer(x))
        return self.head(x)


def parts(model: Tower) -> list[dict[str, Any]]:
    """A parameter group for each layer; the first has settings of its own."""
    first, *rest = [{"params": list(layer.parameters())} for layer in [*model.layers, model.head]]
    return [{**first, "weight_decay": 0.3, "lr": 0.05}, *rest]


def together(model: Tower) -> list[list[dict[str, Any]]]:
    """The groups of one optimizer of all layers, of which all but the first are in one group."""
    first, *rest = parts(model)
    return [[first, {"params": [p for part in rest for p in part["params"]]}]]


def apart(model: Tower) -> list[list[dict[str, Any]]]:
    """The groups of an optimizer for each layer."""
    return [[part] for part in parts(model)]


def trained(groups: Callable[..., Any], method: str, inner: Any, bias: bool) -> list[Tensor]:
    torch.manual_seed(0)
    model = Tower(bias)
    optimizers = [METHODS[method](inner(each), model) for each in groups(model)]
    for step in range(9):
        model.zero_grad()
        model(torch.randn(7, 5), step % 2 == 0).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("inner", [torch.optim.AdamW, lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9)])
@pytest.mark.parametrize("method", METHODS)
def test_layers_of_one_optimizer_step_as_if_each_had_its_own(method, inner, bias):
    found, wanted = (trained(groups, method, inner, bias) for groups in (together, apart))
    assert all(relative_error(*pair) <= EXACT for pair in zip(found, wanted, strict=True))


def test_layer_without_a_root_leaves_those_of_its_shape_theirs(monkeypatch):
    """The covariance of the second layer alone has none."""
    torch.manual_seed(0)
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
