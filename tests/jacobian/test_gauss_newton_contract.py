"""GaussNewton as an optimizer of torch: checkpoints, copies, hooks, memory, and what it refuses."""

import copy
import pickle

import pytest
import torch
from torch import distributed, nn
from torch.nn.utils import parametrizations

from adiv_optim import GaussNewton, Proportional, attach
from adiv_optim.jacobian import laplacian
from adiv_optim.jacobian.terms import step_bytes
from tests.helpers.modules import Model
from tests.jacobian.test_gauss_newton import equation, inside, network, on_the_sides, weights

TERMS = "adiv_optim.jacobian.terms"

pytestmark = pytest.mark.usefixtures("in_float64")


def test_training_resumes_bit_for_bit_and_copies_are_whole():
    model, terms = network(), equation()
    optimizer = GaussNewton(model)
    for _ in range(3):
        optimizer.step(terms)
    terms = [(lambda model, x: 100 * (model(x) - 1), torch.rand(8, 2))]  # more than twice the last loss
    saved, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    pair, pickled = copy.deepcopy((model, optimizer)), pickle.loads(pickle.dumps((model, optimizer)))
    fresh = network()
    fresh.load_state_dict(saved)
    resumed = GaussNewton(fresh)
    resumed.load_state_dict(state)
    for _ in range(3):
        optimizer.step(terms)
    for other, twin in [(fresh, resumed), pair, pickled]:
        for _ in range(3):
            twin.step(terms)
        assert torch.equal(weights(other), weights(model))
        assert twin.param_groups[0]["damping"] == optimizer.param_groups[0]["damping"]


def test_hooks_of_steps_run_and_it_prints_what_it_is():
    model, seen = network(), []
    optimizer = GaussNewton(model, damping=1e-8)
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    assert optimizer.metrics() == {}
    optimizer.step(equation())
    assert seen == ["before", "after"]
    assert repr(GaussNewton(model, damping=1e-8)) == "GaussNewton(Sequential, damping=1e-08, chunk_size=None)"
    assert optimizer.metrics().keys() == {"loss_before", "loss_after", "damping", "alpha", "tries"}


REGRESSION = [(lambda model, x: model(x), torch.rand(3, 2))]
REFUSED = {
    "no-list": (network, 3, TypeError, "takes a list of terms, .* no closure, .* found 3"),
    "no-tensor": (network, [(inside,)], TypeError, r"terms\[0\] is not \(residual, tensor, …\)"),
    "lengths": (network, [(on_the_sides, torch.rand(3, 2), torch.rand(2))], ValueError, "have 3, 2 rows"),
    "empty": (network, [(inside, torch.rand(0, 2))], ValueError, "at least 1"),
    "batchnorm": (
        lambda: nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), REGRESSION, ValueError,
        r"1: BatchNorm1d mixes the samples of a batch.*\.eval\(\)",
    ),
    "batchnorm-without-statistics": (
        lambda: nn.Sequential(nn.BatchNorm1d(2, track_running_stats=False)).eval(), REGRESSION, ValueError,
        r"0: BatchNorm1d mixes the samples.*build it with track_running_stats=True",
    ),
    "attached": (
        lambda: nn.Sequential(attach(nn.Linear(2, 1), Proportional())), REGRESSION, ValueError,
        r"layer '0' already has a correction .*detach\(model\) first",
    ),
    "attention": (
        lambda: nn.MultiheadAttention(2, 1, dropout=0.1), REGRESSION, ValueError, "MultiheadAttention drops inputs",
    ),
    "dropout": (
        lambda: nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.1)), REGRESSION, ValueError, r"1: Dropout drops inputs",
    ),
    "spectral-norm": (
        lambda: parametrizations.spectral_norm(nn.Linear(2, 1)), REGRESSION, ValueError,
        r"parametrizations.weight.0: _SpectralNorm updates its buffers as it runs, .*\.eval\(\)",
    ),
    "hook-of-spectral-norm": (
        lambda: nn.utils.spectral_norm(nn.Linear(2, 1)), REGRESSION, ValueError, "Linear updates its buffers as it",
    ),
    "instance-norm": (
        lambda: nn.Sequential(nn.Linear(2, 2), nn.InstanceNorm1d(2, track_running_stats=True)), REGRESSION, ValueError,
        r"1: InstanceNorm1d updates its buffers as it runs",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_cannot_step_on_is_refused(name):
    model, terms, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        GaussNewton(model().double()).step(terms)


def tied_by_data():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].weight.data = model[1].weight.data.T
    return model


class Shard(torch.Tensor):
    """A tensor of another type, as DTensor is."""


@pytest.mark.parametrize(("model", "error", "message"), [
    (lambda: 3, TypeError, "network must be a torch.nn.Module, found int"),
    (lambda: nn.Linear(2, 2).requires_grad_(False), ValueError, "no trainable parameter"),
    (lambda: nn.LazyLinear(2), ValueError, "has no shape yet"),
    (lambda: nn.ParameterList([nn.Parameter(torch.ones(2).as_subclass(Shard))]), TypeError, "0 is a Shard; sharded"),
    (lambda: nn.Linear(2, 2, dtype=torch.complex128), TypeError, "are torch.complex128 on cpu"),
    (lambda: nn.Sequential(nn.Linear(2, 2).float(), nn.Linear(2, 2)), TypeError, r"Call network.double\(\)"),
    (tied_by_data, ValueError, "'0.weight': it shares its memory with 1.weight, and would be stepped on twice; tie"),
])  # fmt: skip
def test_networks_that_it_cannot_step_are_refused(model, error, message):
    with pytest.raises(error, match=message):
        GaussNewton(model())


def test_a_network_that_processes_share_is_refused():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(TypeError, match=r"DistributedDataParallel, which .*; pass network.module"):
            GaussNewton(nn.parallel.DistributedDataParallel(network()))
    finally:
        distributed.destroy_process_group()


def test_settings_groups_scalers_and_autocast_are_refused():
    model = network()
    with pytest.raises(ValueError, match="damping"):
        GaussNewton(model, damping=-1.0)
    with pytest.raises(ValueError, match="chunk_size"):
        GaussNewton(model, chunk_size=0)
    optimizer = GaussNewton(model)
    with pytest.raises(ValueError, match="in its one group already"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    with pytest.raises(TypeError, match="takes no GradScaler"):
        scaler.step(optimizer)
    with torch.autocast("cpu"), pytest.raises(RuntimeError, match="autocast is on"):
        optimizer.step(equation())


def test_a_step_that_needs_more_memory_than_is_free_says_how_many_points_fit(monkeypatch):
    model, points = network(), torch.rand(400, 2)
    count = sum(p.numel() for p in model.parameters())
    monkeypatch.setattr(f"{TERMS}.free_bytes", lambda device: step_bytes(160, count, 160, 8))
    optimizer = GaussNewton(model)
    terms = [(lambda model, x: torch.cat([model(x), laplacian(model, x)]), points)]
    message = rf"800 residuals by {count} parameters need .* draw at most 80 points a step"
    with pytest.raises(MemoryError, match=message):
        optimizer.step(terms)
    with pytest.raises(MemoryError, match="draw at most 80 points"):
        optimizer.step([(terms[0][0], points[:81])])
    optimizer.step([(terms[0][0], points[:80])])
    with pytest.raises(MemoryError, match=r"a step, or set a smaller chunk_size\.$"):
        optimizer.step([(terms[0][0], points[:84])])
    GaussNewton(model, chunk_size=10).step([(terms[0][0], points[:84])])


def test_chunks_that_are_differentiated_at_once_are_of_the_largest_term(monkeypatch):
    seen = []
    monkeypatch.setattr(f"{TERMS}.step_bytes", lambda *about: seen.append(about) or 0)
    model = network()
    terms = [(inside, torch.rand(9, 2)), (lambda model, x: model(x) - x, torch.rand(5, 2))]
    for chunk_size, at_once in ((None, 10), (4, 8), (7, 10)):
        GaussNewton(model, chunk_size=chunk_size).step(terms)
        assert seen.pop()[:3] == (19, sum(p.numel() for p in model.parameters()), at_once)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("change", [
    lambda model: model[0].requires_grad_(not model[0].weight.requires_grad),
    lambda model: setattr(model, "0", nn.Linear(2, 6)),
], ids=["freed or frozen", "replaced"])  # fmt: skip
def test_parameters_that_are_no_longer_those_of_the_group_are_refused(change, frozen):
    model = network()
    model[0].requires_grad_(not frozen)
    optimizer = GaussNewton(model)
    change(model)
    with pytest.raises(RuntimeError, match=r"0.weight.*: frozen, unfrozen or replaced .*; build another"):
        optimizer.step(equation())


def test_a_network_may_change_to_float32_and_not_to_float16():
    model, terms = network(), [(lambda model, x: model(x) - 1, torch.rand(5, 2).float())]
    optimizer = GaussNewton(model, damping=0.0)
    model.float()
    optimizer.step(terms)
    assert optimizer.metrics()["damping"] == (64 * torch.finfo(torch.float32).eps) ** 2
    model.half()
    with pytest.raises(TypeError, match=r"are torch.float16 on cpu"):
        optimizer.step(terms)


def test_a_damping_that_is_no_number_is_refused_at_the_step_and_one_above_the_most_is_the_most():
    model = network()
    optimizer, before = GaussNewton(model, damping=1e9), weights(model)
    optimizer.param_groups[0]["damping"] = float("nan")
    with pytest.raises(ValueError, match=r"GaussNewton.step: damping is nan; it must be finite and at least 0"):
        optimizer.step(equation())
    assert torch.equal(weights(model), before)
    optimizer.param_groups[0]["damping"] = 1e9
    optimizer.step(equation())
    assert (optimizer.metrics()["damping"], optimizer.metrics()["tries"]) == (1e6, 1)


@pytest.mark.parametrize("residual", [
    lambda model, x: 1.0, lambda model, x: model(x)[:0], lambda model, x: model(x).float(),
])  # fmt: skip
def test_residuals_that_are_no_tensors_of_the_parameters_type_are_refused(residual):
    message = r"GaussNewton.step: terms\[0\]: a residual is .*; it must be a tensor of torch.float64"
    with pytest.raises(TypeError, match=message):
        GaussNewton(network()).step([(residual, torch.rand(3, 2))])


@pytest.mark.parametrize(("residual", "dtype", "message"), [
    (lambda model, x: model(x) + torch.randn(1), torch.float64, "random operation"),
    (lambda model, x: model(x) if x[0] > 0.5 else -model(x), torch.float64, "data-dependent control flow"),
    (lambda model, x: model(x), torch.float32, "same dtype"),
    (lambda model, x, y: model(x) - y, torch.float64, "missing 1 required positional argument"),
])  # fmt: skip
def test_errors_of_torch_say_which_residual_and_what_to_do(residual, dtype, message):
    terms = [(lambda model, x: model(x), torch.rand(2, 2)), (residual, torch.rand(3, 2, dtype=dtype))]
    with pytest.raises((RuntimeError, TypeError), match=message) as error:
        GaussNewton(network()).step(terms)
    (note,) = error.value.__notes__
    assert note.startswith("GaussNewton.step: terms[1]: this residual is given the network and one")


def test_a_residual_that_uses_a_parameter_outside_of_the_network_is_refused():
    outside, other = nn.Parameter(torch.ones(1)), network()
    module = Model(lambda own, m, x: own.factor * m(x), factor=outside)
    for residual in (lambda m, x: outside * laplacian(m, x), lambda m, x: m(x) - other(x), module):
        model = network()
        before = [p.detach().clone() for p in model.parameters()]
        terms = [(lambda m, x: m(x), torch.rand(2, 2)), (residual, torch.rand(3, 2))]
        with pytest.raises(ValueError, match=r"terms\[1\]: this residual uses a tensor .* nn.Parameter of the"):
            GaussNewton(model).step(terms)
        assert all(map(torch.equal, before, model.parameters()))
    model = network()
    model.factor = nn.Parameter(torch.ones(1))
    GaussNewton(model).step([(lambda m, x: m.factor * m(x) - outside.detach(), torch.rand(3, 2).requires_grad_())])
    assert model.factor != 1


def test_the_state_of_another_optimizer_is_refused():
    model = network()
    with pytest.raises(ValueError, match="this is another optimizer's"):
        GaussNewton(model).load_state_dict(torch.optim.Adam(model.parameters()).state_dict())
