"""Whitened and Preconditioned where inputs are hard to factorise, layers come and go, or nothing is seen."""

import copy
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adiv_optim import Preconditioned, Whitened
from tests.helpers.cases import relative_error
from tests.helpers.remembered import covariance_of, rows_counted
from tests.helpers.steps import same, sgd, stepped, weights

WRAPPERS = {"whitened": Whitened, "preconditioned": Preconditioned}
each_wrapper = pytest.mark.parametrize("wrapper", WRAPPERS.values(), ids=WRAPPERS)


def one_hot(rows: int, features: int) -> Tensor:
    return torch.eye(features)[torch.randint(features, (rows,))]


def mostly_dead(rows: int, features: int) -> Tensor:
    return torch.randn(rows, features).relu() * (torch.rand(features) < 0.1)


@pytest.mark.parametrize("drawn", [one_hot, mostly_dead])
@pytest.mark.parametrize("rank", [None, 16])
def test_inputs_that_are_mostly_zero_are_factorised_in_float32(drawn, rank):
    for seed in range(5):
        torch.manual_seed(seed)
        model, x = nn.Linear(512, 8), drawn(64, 512)
        optimizer = Whitened(sgd(model), model, rank=rank)
        assert all(p.isfinite().all() for p in stepped(model, optimizer, x, x, x))
        assert optimizer.metrics()["Whitened/failed_factorisations"] == 0


def eigh_fails(monkeypatch) -> None:
    def failing(matrix: Tensor):
        raise torch.linalg.LinAlgError("planted")

    monkeypatch.setattr(torch.linalg, "eigh", failing)


def cholesky_fails(monkeypatch) -> None:
    real = torch.linalg.cholesky_ex
    failed = lambda matrix: (real(matrix)[0], torch.ones(matrix.shape[:-2], dtype=torch.int32))  # noqa: E731
    monkeypatch.setattr(torch.linalg, "cholesky_ex", failed)


def large_vectors(monkeypatch) -> None:
    real = torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda matrix: (real(matrix)[0], 1e30 * torch.ones_like(matrix)))


#: A wrapper, what fails in it, and what it says.
FAILURES = {
    "eigenvalues": (Whitened, eigh_fails, "no eigenvalues found"),
    "of a rank": (partial(Whitened, rank=2), eigh_fails, "no eigenvalues"),
    "of values": (Whitened, large_vectors, "no finite root found"),
    "cholesky": (Preconditioned, cholesky_fails, "no Cholesky factor found"),
}
each_failure = pytest.mark.parametrize(("wrapper", "fail", "message"), FAILURES.values(), ids=FAILURES)


def with_what_was_measured(model: nn.Linear, optimizer: Any, *batches: Tensor) -> list[Tensor]:
    """The weights after steps on gradients of batches whose rows are not counted."""
    for x in batches:
        uncounted = copy.deepcopy(model)
        uncounted(x).square().mean().backward()
        for p, other in zip(model.parameters(), uncounted.parameters(), strict=True):
            p.grad = other.grad
        optimizer.step()
    return weights(model)


@each_failure
def test_layer_that_cannot_be_factorised_keeps_what_was_measured_before(wrapper, fail, message, monkeypatch):
    model, x = nn.Linear(6, 3), torch.randn(20, 6)
    optimizer = wrapper(sgd(model), model, every=1)
    stepped(model, optimizer, x)
    plain = copy.deepcopy((model, optimizer))
    fail(monkeypatch)
    with pytest.warns(UserWarning, match=f"weight: {message}.*; the layer keeps what was measured before"):
        stepped(model, optimizer, 2 * x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stepped(model, optimizer, x)  # told once
    assert same(model.parameters(), with_what_was_measured(*plain, 2 * x, x))
    assert optimizer.coverage().treated["weight"].endswith("2 factorisations failed")
    assert optimizer.metrics()[f"{type(optimizer).__name__}/failed_factorisations"] == 2


@each_failure
def test_layer_that_was_never_factorised_takes_plain_steps_and_says_so(wrapper, fail, message, monkeypatch):
    model, x = nn.Linear(6, 3), torch.randn(20, 6)
    plain = copy.deepcopy(model)
    fail(monkeypatch)
    optimizer = wrapper(sgd(model), model, every=1)
    with (
        pytest.warns(UserWarning, match="takes plain steps: no covariance could be factorised"),
        pytest.warns(UserWarning, match=message),
    ):
        stepped(model, optimizer, x, x)
    stepped(plain, sgd(plain), x, x)
    assert torch.equal(model.weight, plain.weight)


@each_wrapper
def test_a_layer_that_was_replaced_is_treated_with_its_own_inputs(wrapper):
    model, x = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)), torch.randn(20, 6)
    options = {"graft_norm": False} if wrapper is Whitened else {}
    optimizer = wrapper(sgd(model), model, every=1, **options)
    stepped(model, optimizer, x, x)
    old, model[2] = model[2], nn.Linear(5, 2)
    optimizer.add_param_group({"params": list(model[2].parameters())})
    assert not old._forward_hooks
    assert "2.weight" in optimizer.coverage().never_seen
    rows = torch.cat([torch.tanh(model[0](x)).detach(), torch.ones(20, 1)], 1)
    stepped(model, optimizer, x)
    assert "2.weight" in optimizer.coverage().treated
    assert rows_counted(optimizer)["2.weight"] == 20
    assert relative_error(covariance_of(optimizer, model[2]), rows.T @ rows / 20) <= 1e-4


@each_wrapper
def test_an_optimizer_that_sees_nothing_says_so_once(wrapper):
    model, x = nn.Linear(4, 3), torch.randn(7, 4)
    optimizer = wrapper(sgd(model), model)

    def step():
        model.weight.grad, model.bias.grad = torch.ones(3, 4), torch.ones(3)
        optimizer.step()

    step()
    with pytest.warns(UserWarning, match=f"{wrapper.__name__} takes plain steps: no layer has seen a row"):
        step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step()
        stepped(model, wrapper(sgd(model), model), x, x, x)


@pytest.mark.parametrize("leave_out", ["freeze", "skip"])
def test_a_great_table_that_is_frozen_or_skipped_is_not_warned_of(leave_out):
    model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 2))
    model[0].requires_grad_(leave_out != "freeze")
    optimizer = Whitened(sgd(model), model, skip=["0"] if leave_out == "skip" else ())  # a warning is an error
    assert optimizer.coverage().skipped["0.weight"] == {"freeze": "frozen", "skip": "named in skip"}[leave_out]


def test_layers_called_by_keyword_and_in_evaluation_mode_are_seen():
    model, x = nn.Linear(4, 3).eval(), torch.randn(7, 4)  # as those are that are fine-tuned
    optimizer = Whitened(sgd(model), model)
    model(input=x).sum().backward()
    optimizer.step()
    assert optimizer.coverage().parameter_share == 1


@each_wrapper
def test_an_empty_batch_counts_no_row(wrapper):
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(12, 2))
    optimizer = wrapper(sgd(model), model)
    before = weights(model)
    model(torch.randn(0, 2, 4, 4)).sum().backward()
    optimizer.step()
    assert same(model.parameters(), before)
    assert not optimizer.coverage().treated


@each_wrapper
@pytest.mark.parametrize("norm", [nn.utils.weight_norm, nn.utils.spectral_norm], ids=["weight", "spectral"])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_weights_that_are_computed_in_the_old_way_take_the_plain_step(wrapper, norm):
    model, x = nn.Sequential(nn.Linear(9, 4), norm(nn.Linear(4, 3))), torch.randn(7, 9)
    optimizer = wrapper(sgd(model), model)
    stepped(model, optimizer, x, x, x)
    why = {name: reason for name, reason in optimizer.coverage().skipped.items() if "bias" not in name}
    assert set(why.values()) == {"not a weight that the layer uses as it is"}
