"""Rows count when a backward pass has gone by their call to the weight and step() follows, and only then."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from adiv_optim import Preconditioned, Whitened
from tests.helpers.cases import relative_error
from tests.helpers.remembered import covariance_of, memory, rows_counted
from tests.helpers.steps import each_by_inputs, inputs, network, same, sgd

pytestmark = pytest.mark.usefixtures("in_float64")


def loss(model: nn.Module, seed: int = 0) -> Tensor:
    return model(inputs(seed)).square().sum()


def is_evaluated_with_derivatives(model: Any, optimizer: Any) -> Any:
    x = inputs(0).requires_grad_()
    (first,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    return torch.autograd.grad(first.sum(), x, create_graph=True)


def is_cleared_in_between(model: Any, optimizer: Any) -> None:
    value = loss(model)
    optimizer.zero_grad()
    value.backward()


def is_cleared_by_the_model(model: Any, optimizer: Any) -> None:
    loss(model, 1).backward()
    model.zero_grad()
    loss(model).backward()


def has_two_losses(model: Any, optimizer: Any) -> None:
    output = model(inputs(0))
    output.square().sum().backward(retain_graph=True)
    output.sum().backward()


def has_two_gradients_by_hand(model: Any, optimizer: Any) -> None:
    every = [torch.autograd.grad(loss(model, seed), list(model.parameters())) for seed in (0, 1)]
    for p, *found in zip(model.parameters(), *every, strict=True):
        p.grad = sum(found)


def has_copies_of_its_parameters(model: Any, optimizer: Any) -> None:
    copies = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    for seed in (0, 1):
        functional_call(model, copies, (inputs(seed),)).square().sum().backward()
    for name, p in model.named_parameters():
        p.grad = copies[name].grad


def has_a_target_network(model: Any, optimizer: Any) -> None:
    frozen = {name: p.detach() for name, p in model.named_parameters()}
    x = inputs(1).requires_grad_()
    (loss(model) + functional_call(model, frozen, (x,)).sum()).backward()


def is_checkpointed(model: Any, optimizer: Any) -> None:
    checkpoint(model, inputs(0), use_reentrant=False).square().sum().backward()


def is_checkpointed_with_a_pass_of_its_own(model: Any, optimizer: Any) -> None:
    checkpoint(model, inputs(0).requires_grad_(), use_reentrant=True).square().sum().backward()


def is_partly_checkpointed(model: Any, optimizer: Any) -> None:
    layer, x = model[0], inputs(0).requires_grad_()  # 4 features to 5
    middle = checkpoint(layer, layer(x)[:, :4], use_reentrant=True)
    model[2](layer(middle[:, :4])).sum().backward()


def has_second_derivatives_after_zero_grad(model: Any, optimizer: Any) -> None:
    x = inputs(0).requires_grad_()
    (first,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad((first**3).sum(), x, create_graph=True)
    optimizer.zero_grad()
    (second.square().sum() + first.sum()).backward()


def has_rows_of_derivatives_at_once(model: Any, optimizer: Any) -> None:
    x = inputs(0).requires_grad_()
    (found,) = torch.autograd.grad(
        model(x), x, torch.eye(3)[:, None].expand(3, 8, 3), is_grads_batched=True, create_graph=True
    )
    found.square().sum().backward()


#: What a training does before a step, and how many rows of each layer count then.
PASSES: dict[Callable[..., Any], tuple[int, int]] = {
    is_evaluated_with_derivatives: (0, 0),
    is_cleared_in_between: (8, 8),
    is_cleared_by_the_model: (8, 8),
    has_two_losses: (8, 8),
    has_two_gradients_by_hand: (16, 16),
    has_copies_of_its_parameters: (16, 16),
    has_a_target_network: (8, 8),
    is_checkpointed: (8, 8),
    is_checkpointed_with_a_pass_of_its_own: (8, 8),
    is_partly_checkpointed: (24, 8),
    has_second_derivatives_after_zero_grad: (8, 8),
    has_rows_of_derivatives_at_once: (8, 8),
}


def step(model: nn.Module, optimizer: Any) -> None:
    """Step with gradients, from wherever those come that no backward pass has brought."""
    for p in model.parameters():
        p.grad = torch.ones_like(p) if p.grad is None else p.grad
    optimizer.step()


@pytest.mark.parametrize("passes", PASSES, ids=lambda passes: passes.__name__)
def test_rows_count_where_the_model(passes):
    model = network()
    model[1] = nn.Tanh()
    optimizer = Whitened(sgd(model), model, graft_norm=False)
    kept = passes(model, optimizer)
    step(model, optimizer)
    assert tuple(rows_counted(optimizer).values()) == PASSES[passes]
    if PASSES[passes] == (8, 8):
        x = torch.cat([inputs(0), torch.ones(8, 1)], 1)
        assert relative_error(covariance_of(optimizer, model[0]), x.T @ x / 8) <= 1e-12
    del kept


@each_by_inputs
def test_an_evaluation_before_the_step_changes_nothing(wrapper):
    """Not of NaN either, in a buffer of numpy's, which is written to without a new version of the tensor."""
    buffer, found = pytest.importorskip("numpy").zeros((8, 4)), []
    x = torch.from_numpy(buffer)
    for evaluated in (False, True):
        model, kept = network(), []
        optimizer = wrapper(sgd(model, lr=0.01), model, every=1)
        for seed in range(3):
            buffer[:] = torch.nan if seed % 2 else 1e6
            kept += [model(x), is_evaluated_with_derivatives(model, optimizer)] if evaluated else []
            buffer[:] = inputs(seed).numpy()
            value = model(x).square().sum()
            optimizer.zero_grad()
            value.backward()
            kept += [loss(model, 11), is_evaluated_with_derivatives(model, optimizer)] if evaluated else []
            optimizer.step()
        found.append([*model.parameters(), *memory(optimizer)])
    assert same(*found)


def test_a_step_without_a_gradient_counts_nothing():
    model = network()
    optimizer = Whitened(sgd(model), model)
    loss(model).backward()
    model.zero_grad()
    optimizer.step()
    assert rows_counted(optimizer) == {"0.weight": 0, "2.weight": 0}


def test_rows_of_other_eigenvectors_are_left_out():
    """A graph that outlives a measurement has products with the eigenvectors of before."""
    layer = nn.Linear(6, 3)
    optimizer = Whitened(sgd(layer), layer, rank=2, every=1, decay=0.0)
    kept = layer(inputs(1, features=6)).sum()
    layer(inputs(0, features=6)).sum().backward()
    optimizer.step()
    kept.backward()
    layer(inputs(0, 5, features=6)).sum().backward()
    optimizer.step()
    assert rows_counted(optimizer) == {"weight": 5}


def covariances() -> int:
    """How many tensors there are of the shape that A of seven features and the bias has."""
    return sum(type(each) is Tensor and each.shape[-2:] == (8, 8) for each in gc.get_objects())


@pytest.mark.parametrize("backward", [True, False])
def test_sums_go_with_the_last_who_may_need_them(backward):
    """After a backward pass without its graph they do, though the loss is kept; else with the loss."""
    layer = nn.Linear(7, 3)
    optimizer = Preconditioned(sgd(layer), layer, every=1000)
    for seed in range(3):  # and another step: the next one measures
        layer(inputs(seed, features=7)).sum().backward()
        optimizer.step()
    optimizer.step()
    gc.collect()
    before = covariances()
    gc.disable()  # no circle keeps them
    try:
        value = layer(inputs(3, features=7)).sum()
        assert covariances() > before
        if backward:
            value.backward()
            optimizer.step()
        else:
            del value
        assert covariances() == before
    finally:
        gc.enable()


@each_by_inputs
def test_a_pass_that_makes_a_graph_and_frees_the_old_one_brings_rows_by_its_derivatives(wrapper):
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    optimizer, x = wrapper(sgd(model), model), inputs(0).requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True, retain_graph=False)
    slope.square().sum().backward()
    optimizer.step()
    assert rows_counted(optimizer)["0.weight"] == len(x)


IN_PLACE: dict[str, Callable[[Tensor], Any]] = {
    "whole": F.relu_,
    "a slice": lambda output: output[..., 0].zero_(),
    "without a gradient": lambda output: output.detach().add_(1),
}


@each_by_inputs
@pytest.mark.parametrize("name", IN_PLACE)
@pytest.mark.parametrize("shape", [(5, 4), (2, 5, 4), (4,), (4, 1)])
def test_rows_of_an_output_that_is_changed_in_place_count_once(wrapper, name, shape):
    """With more or less than two dimensions, as without a batch, it is a view: the change gives it another node."""
    layer = nn.Conv1d(4, 3, 1) if shape == (4, 1) else nn.Linear(4, 3)
    optimizer = wrapper(sgd(layer), layer)
    kept, output = layer(torch.randn(shape)), layer(torch.randn(shape))
    IN_PLACE[name](output)
    output.square().sum().backward()
    optimizer.step()
    assert rows_counted(optimizer) == {"weight": output.numel() // 3}
    del kept
