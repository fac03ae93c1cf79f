"""A batch whose loss is NaN, under GradScaler: for every wrapper it is as if the batch had not been there."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.helpers.covering import paired
from tests.helpers.loops import adamw, images, network
from tests.helpers.revive import leaves
from tests.helpers.revive import same_leaves as same
from tests.wrappers import Wrapper, each_wrapper


def built(wrap: Wrapper) -> Any:
    model = network()
    return wrap(adamw(model), model, images(1)[0][0])


#: What one row of x is filled with, or x stays as it is; and what the loss is multiplied by.
POISONS = {"nan-loss": (None, torch.nan), "nan-row": (torch.nan, 1.0), "infinite-row": (torch.inf, 1.0)}
#: How a training loop may drop gradients.
BY_OPTIMIZER: dict[str, Callable[[Any], None]] = {
    "optimizer": lambda optimizer: optimizer.zero_grad(),
    "optimizer-in-place": lambda optimizer: optimizer.zero_grad(set_to_none=False),
}
BY_MODEL: dict[str, Callable[[Any], None]] = {
    "model": lambda optimizer: optimizer.model.zero_grad(),
    "model-in-place": lambda optimizer: optimizer.model.zero_grad(set_to_none=False),
}


def step(optimizer: Any, scaler: Any, x: Tensor, y: Tensor, clear: Callable[[Any], None], poison: Any = None) -> None:
    row, factor = poison or (None, 1.0)
    x = x if row is None else x.index_fill(0, torch.tensor([1]), row)
    clear(optimizer)
    scaler.scale(factor * F.cross_entropy(optimizer.model(x), y)).backward()
    scaler.step(optimizer)
    scaler.update()


@each_wrapper
@paired("poison clear", POISONS, BY_OPTIMIZER)
def test_poisoned_batch_under_grad_scaler_is_as_if_it_had_not_been(wrap, poison, clear):
    optimizer, clean = built(wrap), built(wrap)
    scaler, other = (torch.amp.GradScaler("cpu", init_scale=2.0**10) for _ in range(2))
    for number, (x, y) in enumerate(images(6)):
        if number in (0, 3):
            before = copy.deepcopy(leaves(optimizer))
            step(optimizer, scaler, x, y, clear, poison)
            assert same(leaves(optimizer), before)
        step(optimizer, scaler, x, y, clear)
        step(clean, other, x, y, clear)
    assert scaler.get_scale() == other.get_scale() / 4
    assert same(leaves(optimizer), leaves(clean))


@each_wrapper
@paired("poison clear", POISONS, BY_MODEL)
def test_poisoned_batch_under_grad_scaler_leaves_everything_finite(wrap, poison, clear):
    # Whitened, which has no part in a model's zero_grad, may count the rows of the batch; see its docstring.
    optimizer, scaler = built(wrap), torch.amp.GradScaler("cpu")
    for number, (x, y) in enumerate(images(6)):
        if number in (0, 3):
            step(optimizer, scaler, x, y, clear, poison)
        before = optimizer.model[0].weight.detach().clone()
        step(optimizer, scaler, x, y, clear)
        assert not torch.equal(optimizer.model[0].weight, before)
    assert all(value.isfinite().all() for value in leaves(optimizer) if isinstance(value, Tensor))
