"""Whitened behind other optimizers, with schedulers and scalers, and what its errors say."""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from adiv_optim import Preconditioned, UnitConsistent, Whitened
from adiv_optim.optim import reparametrized
from tests.helpers.cases import relative_error
from tests.helpers.whitened import backward, batches, small, train

pytestmark = pytest.mark.usefixtures("in_float64")


@pytest.mark.parametrize("build", [torch.optim.SGD, torch.optim.AdamW])
def test_fused_optimizers_read_gradients_in_the_layout_of_the_weights(build):
    def run(fused):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 4, 4))
        model.to(memory_format=torch.channels_last)
        model[2].weight = nn.Parameter(torch.randn(8 * 4, 4).t())
        optimizer = Whitened(build(model.parameters(), lr=0.1, fused=fused, foreach=False), model)
        backward(model, torch.randn(4, 3, 4, 4))
        optimizer.step()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    assert relative_error(run(True), run(False)) <= 1e-12


@pytest.mark.parametrize("root", ["eigh", "newton-schulz"])
def test_small_damping_is_near_the_exact_step(root):
    torch.manual_seed(0)
    model = nn.Linear(200, 10).float()
    wide, x = copy.deepcopy(model).double(), torch.randn(50, 200).float()
    before = wide.weight.detach().clone()
    for net in (model, wide):
        optimizer = Whitened(torch.optim.SGD(net.parameters(), lr=1e-3), net, damping=1e-4, root=root)
        backward(net, x.to(net.weight.dtype))
        optimizer.step()
    assert relative_error(model.weight.detach().double() - before, wide.weight.detach() - before) <= 2e-2


def test_two_wrappers_on_disjoint_parameters():
    def run(split: bool):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))
        if split:
            optimizers = [
                Whitened(torch.optim.SGD(layer.parameters(), lr=0.1), model, every=1) for layer in (model[0], model[2])
            ]
        else:
            optimizers = [Whitened(torch.optim.SGD(model.parameters(), lr=0.1), model, every=1)]
        for x, y in batches(3):
            model.zero_grad()
            F.cross_entropy(model(x), y).backward()
            for optimizer in optimizers:
                optimizer.step()
        return [p.detach() for p in model.parameters()]

    assert all(torch.equal(one, other) for one, other in zip(run(True), run(False), strict=True))


def test_muon_behind_it_orthogonalises_in_white_coordinates():
    model, x = nn.Linear(6, 4, bias=False).float(), torch.randn(32, 6) * torch.logspace(0, -2, 6)
    optimizer = Whitened(torch.optim.Muon(model.parameters(), lr=0.1, weight_decay=0.0), model, damping=1e-3)
    before = model.weight.detach().clone()
    backward(model, x.float())
    optimizer.step()
    (inverse_root,) = optimizer.method.measured["weight"]
    step = (model.weight.detach() - before) @ inverse_root.inverse.matrix
    values = torch.linalg.svdvals(step)
    assert values.max() / values.min() < 2.5  # Muon's five iterations leave a factor of about 1.7
    values = torch.linalg.svdvals(model.weight.detach() - before)
    assert values.max() / values.min() > 5


def test_scheduler_and_grad_scaler():
    moved = []
    for factor in (1.0, 0.5):
        model, optimizer = small()
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=factor)
        train(model, optimizer, batches(1))
        schedule.step()
        before = model[0].weight.detach().clone()
        train(model, optimizer, batches(2)[1:])
        moved.append(model[0].weight.detach() - before)
    assert relative_error(moved[1], moved[0] / 2) <= 1e-9
    model, optimizer = small()
    before, scaler = model[0].weight.detach().clone(), torch.amp.GradScaler("cpu")
    x, y = batches(1)[0]
    scaler.scale(F.cross_entropy(model(x), y)).backward()
    model[0].weight.grad[0, 0] = torch.inf
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(model[0].weight, before)


def step_within_autocast(build, enabled: bool):
    torch.manual_seed(0)
    model, x = nn.Linear(20, 10).float(), torch.randn(64, 20).float()
    optimizer = build(torch.optim.SGD(model.parameters(), lr=0.1), model)
    backward(model, x)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
        optimizer.step()
    return model.weight.detach()


@pytest.mark.parametrize("build", [Whitened, Preconditioned])
def test_step_within_autocast_rounds_no_map(build, monkeypatch):
    plain = step_within_autocast(build, False)
    assert torch.equal(step_within_autocast(build, True), plain)
    monkeypatch.setattr(reparametrized, "without_autocast", lambda device: nullcontext())
    assert relative_error(step_within_autocast(build, True), plain) > 1e-5


def test_batch_with_nan_is_left_out_of_the_average():
    model, optimizer = small(every=1)
    train(model, optimizer, batches(1))
    before = optimizer.method.layers[0].memory
    model(torch.full((2, 6), torch.nan)).sum().backward()
    optimizer.zero_grad()
    optimizer.step()
    assert optimizer.method.layers[0].memory is before


def test_dead_input_keeps_its_own_coordinates():
    model = nn.Linear(3, 2, bias=False)
    optimizer = Whitened(torch.optim.SGD(model.parameters(), lr=0.1), model)
    backward(model, torch.zeros(4, 3))
    model.weight.grad = torch.ones(2, 3)
    before = model.weight.detach().clone()
    optimizer.step()
    assert relative_error(before - model.weight.detach(), torch.full((2, 3), 0.1)) <= 1e-12


def test_detached_it_is_the_optimizer():
    model, optimizer = small()
    train(model, optimizer, batches(1))
    assert optimizer.detach() is model
    assert not any(m._forward_hooks for m in model)
    plain_model, plain = copy.deepcopy((model, optimizer.inner))
    for one, other in zip(train(model, optimizer, batches(2)), train(plain_model, plain, batches(2)), strict=True):
        assert torch.equal(one, other)


def stepped_state(model: nn.Module) -> dict:
    optimizer = Whitened(torch.optim.SGD(model.parameters(), lr=0.0), model)
    train(model, optimizer, batches(1))
    return optimizer.state_dict()


@pytest.mark.parametrize(
    ("action", "error", "message"),
    [
        (lambda m: Whitened(torch.optim.LBFGS(m.parameters()), m), TypeError, "cannot wrap LBFGS"),
        (lambda m: Whitened(torch.optim.SGD(m.parameters()), m, damping=0.0), ValueError, "damping is 0.0"),
        (lambda m: Whitened(torch.optim.SGD(m.parameters()), m, decay=1.0), ValueError, "decay is 1.0"),
        (lambda m: Whitened(torch.optim.SGD(m.parameters()), m, every=0), ValueError, "every is 0"),
        (lambda m: Whitened(torch.optim.SGD(m.parameters()), m, rank=0), ValueError, "rank is 0"),
        (lambda m: Whitened(torch.optim.SGD(m.parameters()), m, root="svd"), ValueError, "unknown root 'svd'"),
        (
            lambda m: Whitened(torch.optim.SGD(m[2].parameters()), m),
            ValueError,
            r"no tensor the optimizer holds .*: 2.weight \(LayerNorm is not a layer whose rows are known\); 2.bias",
        ),
        (
            lambda m: UnitConsistent(Whitened(torch.optim.SGD(m.parameters()), m), m, example_input=torch.ones(1, 6)),
            ValueError,
            "UnitConsistent around Whitened: the inner one would measure .*; choose one",
        ),
        (
            lambda m: Whitened(torch.optim.SGD(m.parameters()), m).load_state_dict(
                {**torch.optim.SGD(m.parameters()).state_dict(), "method": {"layers": {"9.weight": {}}}}
            ),
            ValueError,
            r"state_dict\['method'\] lacks 'steps'",
        ),
        (
            lambda m: Whitened(torch.optim.SGD(m.parameters()), m, max_dim=4).load_state_dict(stepped_state(m)),
            ValueError,
            r"state_dict\['method'\] was saved with max_dim=1024, this has max_dim=4; load what",
        ),
        (
            lambda m: Whitened(torch.optim.SGD((z := nn.Sequential(nn.LazyLinear(3))).parameters()), z),
            ValueError,
            "'weight' of layer '0' .* has no shape yet",
        ),
    ],
)
def test_mistakes_are_named(action, error, message):
    model, _ = small()
    with pytest.raises(error, match=message):
        action(model)


@pytest.mark.parametrize("groups", [1, 8])
def test_weights_in_another_order_in_memory_step_alike_where_they_are_read(groups):
    """Those of 1×1 and depthwise convolutions have strides that no reshape keeps."""

    def run(memory_format):
        torch.manual_seed(0)
        size = 1 if groups == 1 else 3
        model = nn.Conv2d(8, 8, size, groups=groups, bias=False).to(memory_format=memory_format)
        optimizer = Whitened(torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1), model, rank=2)
        for _ in range(2):
            optimizer.zero_grad()
            backward(model, torch.randn(4, 8, 5, 5).to(memory_format=memory_format))
            optimizer.step()
        return model.weight.detach()

    assert relative_error(run(torch.channels_last), run(torch.contiguous_format)) <= 1e-12
