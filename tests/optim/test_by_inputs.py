"""Whitened and Preconditioned where inputs are hard to factorise, layers come and go, or nothing is seen."""

import copy
import warnings
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from adiv_optim import Preconditioned, Whitened
from adiv_optim._linalg import roots as roots_module
from adiv_optim._linalg.roots import NoRootError, Whole, eigh, subspace_iteration, inverse_root
from tests.helpers.cases import relative_error
from tests.helpers.inputs import mean_of
from tests.helpers.steps import same, sgd, stepped, weights
from tests.wrappers import WRAPPERS as WRAPPERS_OF_ALL

WRAPPERS = {"whitened": Whitened, "preconditioned": Preconditioned}
each_wrapper = pytest.mark.parametrize("wrapper", WRAPPERS.values(), ids=WRAPPERS)


def one_hot(rows: int, features: int) -> Tensor:
    return torch.eye(features)[torch.randint(features, (rows,))]


def mostly_dead(rows: int, features: int) -> Tensor:
    return torch.randn(rows, features).relu() * (torch.rand(features) < 0.1)


def bag_of_words(rows: int, features: int) -> Tensor:
    return (torch.rand(rows, features) < 0.01).float()


@pytest.mark.parametrize("drawn", [one_hot, mostly_dead, bag_of_words])
@pytest.mark.parametrize("rank", [None, 16])
def test_inputs_that_are_mostly_zero_are_factorised_in_float32(drawn, rank):
    for seed in range(5):
        torch.manual_seed(seed)
        model, x = nn.Linear(512, 8), drawn(64, 512)
        optimizer = Whitened(sgd(model), model, rank=rank)
        assert all(p.isfinite().all() for p in stepped(model, optimizer, x, x, x))
        assert optimizer.metrics()["Whitened/failed_factorisations"] == 0


def lapack_fails_in_float32(monkeypatch, also_in_float64: bool = False, error: Exception | None = None) -> None:
    real = torch.linalg.eigh

    def failing(matrix: Tensor):
        if matrix.dtype == torch.float32 or also_in_float64:
            raise error or torch.linalg.LinAlgError("planted")
        return real(matrix)

    monkeypatch.setattr(roots_module.torch.linalg, "eigh", failing)


@pytest.mark.parametrize("error", [None, RuntimeError("cusolver error: CUSOLVER_STATUS_EXECUTION_FAILED, when …")])
def test_failure_in_float32_is_mended_in_float64(error, monkeypatch):
    x = torch.randn(40, 6)
    matrix = x.T @ x / 40
    basis = torch.eye(6)[:, :2]

    def factorised() -> list[Tensor]:
        values, _ = subspace_iteration(matrix @ basis, basis, matrix.trace() / 6)
        return [inverse_root(matrix, torch.tensor(0.1), condition=10.0), values]

    wanted = factorised()
    lapack_fails_in_float32(monkeypatch, error=error)
    found = factorised()
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == torch.float32
        assert relative_error(one, other) <= 1e-5


def test_other_errors_than_a_factorisations_are_raised(monkeypatch):
    lapack_fails_in_float32(monkeypatch, error=RuntimeError("an illegal memory access was encountered"))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        eigh(torch.eye(3))


def test_matrix_without_eigenvalues_is_named_and_nothing_else_is_raised():
    for bad in (torch.nan, torch.inf):
        with pytest.raises(NoRootError, match=r"no eigenvalues found of a matrix of shape \(3, 3\)"):
            eigh(torch.full((3, 3), bad))


def cholesky_fails(monkeypatch) -> None:
    real = torch.linalg.cholesky_ex
    failed = lambda matrix: (real(matrix)[0], torch.ones(matrix.shape[:-2], dtype=torch.int32))  # noqa: E731
    monkeypatch.setattr(torch.linalg, "cholesky_ex", failed)


def vectors_fail(monkeypatch) -> None:
    monkeypatch.setattr(roots_module, "eigh", lambda matrix: (matrix.diagonal(dim1=-2, dim2=-1).clone(), matrix / 0))


#: A wrapper, what fails in it, and what it says.
FAILURES = {
    "eigenvalues": (Whitened, partial(lapack_fails_in_float32, also_in_float64=True), "no eigenvalues found"),
    "of a rank": (partial(Whitened, rank=2), partial(lapack_fails_in_float32, also_in_float64=True), "no eigenvalues"),
    "of values": (Whitened, vectors_fail, "no finite root found"),
    "cholesky": (Preconditioned, cholesky_fails, "no Cholesky factor found"),
}
each_failure = pytest.mark.parametrize(("wrapper", "fail", "message"), FAILURES.values(), ids=FAILURES)


@each_failure
def test_layer_that_cannot_be_factorised_keeps_what_was_measured_before(wrapper, fail, message, monkeypatch):
    model, x = nn.Linear(6, 3), torch.randn(20, 6)
    optimizer = wrapper(sgd(model), model, every=1)
    stepped(model, optimizer, x)
    kept = optimizer.method.measured["weight"]
    fail(monkeypatch)
    with pytest.warns(UserWarning, match=f"weight: {message}.*; the layer keeps what was measured before"):
        stepped(model, optimizer, 2 * x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stepped(model, optimizer, x)  # told once
    assert optimizer.method.measured["weight"] is kept
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


def test_a_failure_is_told_once_where_warnings_are_errors(monkeypatch):
    torch.manual_seed(0)
    model, x = nn.Linear(6, 3), torch.randn(20, 6)
    optimizer = Whitened(sgd(model), model, every=1)
    stepped(model, optimizer, x)
    lapack_fails_in_float32(monkeypatch, also_in_float64=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="no eigenvalues found"):
            stepped(model, optimizer, x)
        stepped(model, optimizer, x, x)
    assert optimizer.metrics()["Whitened/failed_factorisations"] == 3


@pytest.mark.parametrize("scale", [1e-15, 1.0, 1e15])
def test_roots_do_not_depend_on_the_unit_of_the_inputs(scale):
    x = torch.randn(40, 6, dtype=torch.float64)
    matrix = x.T @ x / 40
    inverse = inverse_root(matrix, torch.tensor(0.1).double(), 100.0)
    ours = (matrix * scale**2).float()
    found = inverse_root(ours, torch.tensor(0.1 * scale**2), 100.0)
    assert relative_error(found.double() * scale, inverse) <= 1e-5
    assert relative_error(Whole(found).inverse.matrix.double() / scale, Whole(inverse).inverse.matrix) <= 1e-5


@each_wrapper
def test_a_layer_that_was_replaced_is_treated_with_its_own_inputs(wrapper):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)), torch.randn(20, 6)
    optimizer = wrapper(sgd(model), model, every=1)
    stepped(model, optimizer, x, x)
    old, model[2] = model[2], nn.Linear(5, 2)
    optimizer.add_param_group({"params": list(model[2].parameters())})
    assert not old._forward_hooks
    assert "2.weight" in optimizer.coverage().never_seen
    stepped(model, optimizer, x)
    assert "2.weight" in optimizer.coverage().treated
    (layer,) = (layer for layer in optimizer.method.layers if layer.name == "2.weight")
    rows = torch.cat([torch.tanh(model[0](x)), torch.ones(20, 1)], 1)
    assert layer.weight is model[2].weight
    assert layer.rows == 20
    assert rows.shape[1] == mean_of(layer)[0].shape[0]


@each_wrapper
def test_fine_tuning_in_evaluation_mode_is_treated(wrapper):
    model, x = nn.Sequential(nn.Linear(4, 3), nn.Dropout()).eval(), torch.randn(7, 4)
    optimizer = wrapper(sgd(model), model)
    stepped(model, optimizer, x, x)
    assert optimizer.coverage().parameter_share == 1


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


def test_the_inner_optimizers_own_step_is_a_plain_one_and_counts_for_nothing():
    model, x = nn.Linear(4, 3), torch.randn(7, 4)
    optimizer = Whitened(sgd(model), model)
    stepped(model, optimizer, x)
    wanted = [torch.add(p, p.grad, alpha=-0.1) for p in model.parameters()]
    optimizer.inner.step()
    assert same(model.parameters(), wanted)
    assert optimizer.method.steps == 1


def test_a_model_of_small_layers_beside_a_great_table_is_told():
    model = nn.Sequential(nn.Embedding(100, 8), nn.Linear(8, 3))
    with pytest.warns(
        UserWarning,
        match="less than half of the elements of Sequential .*: Embedding is not a layer whose rows are known .96.7%",
    ):
        Whitened(sgd(model), model)


@pytest.mark.parametrize("leave_out", ["freeze", "skip"])
def test_a_great_table_that_is_frozen_or_skipped_is_not_warned_of(leave_out):
    model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 2))
    model[0].requires_grad_(leave_out != "freeze")
    optimizer = Whitened(sgd(model), model, skip=["0"] if leave_out == "skip" else ())  # a warning is an error
    assert optimizer.coverage().skipped["0.weight"] == {"freeze": "frozen", "skip": "named in skip"}[leave_out]


def test_layers_called_by_keyword_are_seen():
    model, x = nn.Linear(4, 3), torch.randn(7, 4)
    optimizer = Whitened(sgd(model), model)
    model(input=x).sum().backward()
    optimizer.step()
    assert optimizer.coverage().parameter_share == 1


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize("name", sorted(WRAPPERS_OF_ALL))
def test_a_model_can_be_scripted_once_it_is_detached(name):
    model, x = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), torch.randn(7, 4)
    optimizer = WRAPPERS_OF_ALL[name](sgd(model), model, x)
    if name != "unit-consistent":  # whose model has nothing on it
        with pytest.raises((AttributeError, RuntimeError), match=r"torch\.jit\.script cannot .* call detach\(\)"):
            torch.jit.script(model)
    optimizer.detach()
    assert torch.equal(torch.jit.script(model)(x), model(x))


@each_wrapper
def test_what_it_was_built_with_is_shown(wrapper):
    model = nn.Linear(4, 3)
    optimizer = wrapper(sgd(model), model, damping=0.25, every=7)
    assert all(setting in repr(optimizer) for setting in ("damping=0.25", "decay=0.9", "every=7"))


def test_checkpoints_with_numpy_rates_are_taken():
    numpy = pytest.importorskip("numpy")
    model, x = nn.Linear(4, 3), torch.randn(7, 4)
    optimizer = Whitened(sgd(model), model)
    stepped(model, optimizer, x)
    state = optimizer.state_dict()
    state["param_groups"][0]["lr"] = numpy.float32(0.5)
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 0.5


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


@each_wrapper
def test_a_bias_that_the_optimizer_does_not_hold_has_no_part_in_the_step(wrapper):
    torch.manual_seed(0)
    one = nn.Linear(4, 3)
    other, x = copy.deepcopy(one), torch.randn(7, 4)
    for model, stale in ((one, 0.0), (other, 1e3)):
        optimizer = wrapper(torch.optim.SGD([model.weight], lr=0.1), model)
        model.bias.grad = torch.full((3,), stale)
        model(x).square().sum().backward()
        optimizer.step()
    assert torch.equal(one.weight, other.weight)
