"""torch.compile of the model, and of the whole training step, without changing a step."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.helpers.loops import (
    DIFFERENT,
    EXACT,
    METHODS,
    Batch,
    deviation,
    each_method,
    plain_loop,
    sgd,
    train,
    weights,
)

# The compiler's front end and autograd's tracing, which is where hooks, Functions and optimizers are met.
BACKEND = "aot_eager"

pytestmark = [
    pytest.mark.usefixtures("in_float64", "fresh_compiler"),
    # The compiler's own, where a graph ends with a tensor that is no leaf.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def rows(count: int = 3) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 6, generator=generator), torch.randint(3, (8,), generator=generator)) for _ in range(count)]


@each_method
def test_compiled_model(method):
    model = mlp()
    optimizer = method.wrap(sgd(model), model, rows(1)[0][0])
    train(torch.compile(model, backend=BACKEND), optimizer, rows())
    wanted = plain_loop(method, rows(), build=mlp, inner=sgd)
    assert deviation(weights(model), wanted) <= EXACT
    bare = mlp()
    train(bare, sgd(bare), rows())
    assert deviation(weights(bare), wanted) > DIFFERENT


@pytest.mark.parametrize("name", ["proportional", "unit-consistent"])
def test_wrapper_of_a_compiled_model(name):
    """What torch.compile returned is a model too."""
    method, model = METHODS[name], mlp()
    compiled = torch.compile(model, backend=BACKEND)
    train(compiled, method.wrap(sgd(model), compiled, rows(1)[0][0]), rows())
    assert deviation(weights(model), plain_loop(method, rows(), build=mlp, inner=sgd)) <= EXACT


@each_method
def test_compiled_step(method):
    model = mlp()
    optimizer = method.wrap(sgd(model), model, rows(1)[0][0])

    @torch.compile(backend=BACKEND)
    def step(x, y):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    for x, y in rows():
        step(x, y)
    assert deviation(weights(model), plain_loop(method, rows(), build=mlp, inner=sgd)) <= EXACT
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 12  # without the wrapper there are 3
