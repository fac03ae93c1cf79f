"""Optimizers of PyTorch's database that take sparse gradients do so in a wrapper."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from adiv_optim import UnitConsistent
from tests.helpers import torch_database
from tests.helpers.cases import relative_error
from tests.helpers.steps import same
from tests.wrappers import WRAPPERS

pytestmark = [
    pytest.mark.usefixtures("in_float64"),
    pytest.mark.filterwarnings("ignore:InputScaled treats less"),  # rightly, of so small a network
    # torch's own notice about Adagrad's state.
    pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning"),
]
EXACT = 1e-9  # float64, relative to what three small steps move
WORDS = 10


def words(sparse: bool = True) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(WORDS, 4, sparse=sparse), nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))


def train(model: nn.Module, optimizer) -> nn.Module:
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        x = torch.randint(WORDS - 1, (8,), generator=generator)  # the last word never comes
        optimizer.zero_grad()
        F.cross_entropy(model(x), x % 3).backward()
        optimizer.step()
    return model


@pytest.mark.parametrize("wrapper", [name for name in WRAPPERS if name != "unit-consistent"])
@pytest.mark.parametrize("name", ["SGD", "Adagrad"])
def test_sparse_gradients_step_as_dense_ones(wrapper, name):
    wrap = WRAPPERS[wrapper]
    info = torch_database.optimizers()[name]
    assert info.supports_sparse
    options, _ = info.metadata_for_sparse
    trained = []
    for sparse in (True, False):
        model = words(sparse)
        train(model, wrap(info.optim_cls(model.parameters(), **options), model, torch.arange(8)))
        assert model[0].weight.grad.is_sparse == sparse
        trained.append(model)
    for p, q, start in zip(*(model.parameters() for model in (*trained, words())), strict=True):
        assert relative_error(p - start, q - start) <= EXACT


def test_scales_of_sparse_gradients_are_refused_with_what_to_do():
    model, x = words(), torch.arange(8)
    optimizer = UnitConsistent(torch.optim.SGD(model.parameters(), lr=0.1), model, example_input=x)
    with pytest.raises(ValueError, match=r"the gradient of '0\.weight' is sparse; build the layer without sparse=True"):
        train(model, optimizer)
    assert same(model.parameters(), words().parameters())
    optimizer = UnitConsistent(torch.optim.SGD(model.parameters(), lr=0.1), model, example_input=x, skip=["0"])
    train(model, optimizer)
    assert not torch.equal(model[0].weight, words()[0].weight)


def sparse_adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SparseAdam(model[0].parameters(), lr=0.04)


def test_sparse_adam_on_an_embedding_is_the_bare_optimizer_bit_for_bit():
    bare = words()
    train(bare, sparse_adam(bare))
    for wrap in (wrap for wrap in WRAPPERS.values() if wrap.rule):
        model = words()
        train(model, wrap(sparse_adam(model), model, None))
        assert all(map(torch.equal, model.parameters(), bare.parameters()))
    assert relative_error(bare[0].weight, words()[0].weight) > 1e-2
