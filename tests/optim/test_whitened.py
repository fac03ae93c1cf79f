"""Whitened: against explicit covariances and BatchIdeal, and what an optimizer must keep."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adiv_optim import BatchIdeal, GradientOnly, Whitened
from tests.helpers.cases import relative_error
from tests.helpers.covering import paired
from tests.helpers.revive import revived
from tests.helpers.whitened import EXACT, LAYERS, backward, batches, small, train

pytestmark = pytest.mark.usefixtures("in_float64")


def twins(build, shape, damping: float) -> tuple[nn.Module, nn.Module, Tensor, float]:
    """A layer stepped by Whitened(SGD), the same stepped by BatchIdeal, the input, and how many rows it has."""
    torch.manual_seed(0)
    one, x = build(), torch.randn(shape)
    other = copy.deepcopy(one)
    output = one(x)
    conv = isinstance(one, nn.modules.conv._ConvNd)
    rows = output[:, 0].numel() if conv else output[..., 0].numel()
    columns = one.weight[0].numel() + (one.bias is not None)
    white = Whitened(
        torch.optim.SGD(one.parameters(), lr=1.0), one, damping=damping, decay=0.0, every=1, graft_norm=False
    )
    ideal = GradientOnly(
        torch.optim.SGD(other.parameters(), lr=1.0), other, BatchIdeal(damping * rows / columns, per_sample=False)
    )
    before = copy.deepcopy(one.state_dict())
    for model, optimizer in ((one, white), (other, ideal)):
        backward(model, x)
        optimizer.step()
    return before, one, other, rows


@paired("layer damping", LAYERS, {"0.1": 0.1, "3": 3.0})
def test_whitened_sgd_is_batch_ideal_times_the_rows(layer, damping):
    build, shape = layer
    before, one, other, rows = twins(build, shape, damping)
    for name, start in before.items():
        found, wanted = one.state_dict()[name] - start, rows * (other.state_dict()[name] - start)
        assert relative_error(found, wanted) <= EXACT
        assert relative_error(found, wanted / rows) > 0.1


def explicit_step(model: nn.Linear, x: Tensor, gradient: Tensor, damping: float, step) -> Tensor:
    """What W~ becomes, with A, its roots by an SVD, and a step taken by hand."""
    rows = torch.cat([x.reshape(-1, x.shape[-1]), torch.ones(x[..., 0].numel(), 1)], 1)
    covariance = rows.T @ rows / len(rows)
    level = covariance.trace() / len(covariance)
    matrix = (covariance + damping * level * torch.eye(len(covariance))) / (level * (1 + damping))
    u, s, _ = torch.linalg.svd(matrix)
    root, inverse = u @ s.sqrt().diag() @ u.T, u @ s.rsqrt().diag() @ u.T
    joint = torch.cat([model.weight, model.bias[:, None]], 1).detach()
    moved = step(joint @ root, gradient @ inverse) - joint @ root
    back = moved @ inverse
    return joint + back * moved.norm() / back.norm()


@pytest.mark.parametrize("shape", [(7, 5), (2, 3, 5)])
def test_step_behind_adamw_is_the_formula(shape):
    model, x = nn.Linear(5, 3), torch.randn(shape)
    start = copy.deepcopy(model)
    optimizer = Whitened(torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.3), model, damping=0.5, every=1)
    backward(model, x)
    gradient = torch.cat([model.weight.grad, model.bias.grad[:, None]], 1)
    kept = model.weight.grad

    def adamw(weight, g):
        parameter = nn.Parameter(weight.clone())
        parameter.grad = g
        torch.optim.AdamW([parameter], lr=0.1, weight_decay=0.0).step()
        return parameter.detach()

    before = torch.cat([start.weight, start.bias[:, None]], 1).detach()
    wanted = explicit_step(start, x, gradient, 0.5, adamw) - 0.1 * 0.3 * before
    optimizer.step()
    found = torch.cat([model.weight, model.bias[:, None]], 1).detach()
    assert relative_error(found - before, wanted - before) <= EXACT
    assert model.weight.grad is kept
    assert relative_error(adamw(before, gradient) - before, wanted - before) > 1e-2


@pytest.mark.parametrize("build", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop])
def test_infinite_damping_is_the_optimizer_unchanged(build):
    def run(damping):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))
        optimizer = build(model.parameters(), lr=0.01)
        optimizer = optimizer if damping is None else Whitened(optimizer, model, damping=damping, every=1)
        for seed in range(5):
            optimizer.zero_grad()
            backward(model, torch.randn(6, 5, generator=torch.Generator().manual_seed(seed)), seed)
            optimizer.step()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    assert relative_error(run(1e12), run(None)) <= EXACT
    assert relative_error(run(1.0), run(None)) > 1e-3


@pytest.mark.parametrize("options", [{}, {"graft_norm": False, "every": 1}, {"max_dim": 4}, {"rank": 3}], ids=str)
def test_resume_and_copies_are_bit_exact(options):
    data = batches(7)
    whole = train(*small(**options), data)
    model, optimizer = small(**options)
    train(model, optimizer, data[:3])
    saved = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    for again in (*revived(optimizer, small(seed=1, **options)[1]), optimizer):
        found = train(again.model, again, data[3:])
        assert all(torch.equal(one, other) for one, other in zip(found, whole, strict=True))
    fresh_model, fresh = small(seed=1, **options)
    fresh_model.load_state_dict(saved["model"])
    fresh.load_state_dict({k: v for k, v in saved["optimizer"].items() if k != "method"})  # without what it remembers
    found = train(fresh_model, fresh, data[3:])
    assert not all(torch.equal(one, other) for one, other in zip(found, whole, strict=True))


@pytest.mark.parametrize("rank", [None, 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_step_without_a_rate_changes_no_bit(dtype, rank):
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(4 * 4, 3)).to(dtype)
    with torch.no_grad():
        model[2].weight[0, :2] = torch.tensor([0.0, -0.0])
    unknown = type("Unknown", (torch.optim.AdamW,), {})  # which may read the weights: they are mapped for it
    optimizer = Whitened(unknown(model.parameters(), lr=0.0), model, rank=rank)
    before = [p.detach().clone() for p in model.parameters()]
    backward(model, torch.randn(5, 2, 4, 4, dtype=dtype))
    optimizer.step()
    assert "whitened" in optimizer.coverage().treated["2.weight"]
    integer = {torch.float64: torch.int64, torch.float32: torch.int32, torch.bfloat16: torch.int16}[dtype]
    for p, saved in zip(model.parameters(), before, strict=True):
        assert torch.equal(p.detach().view(integer), saved.view(integer))


def test_exception_inside_the_step_leaves_the_weights():
    model, optimizer = small()

    def fail(*_):
        assert not torch.equal(model[0].weight, before[0])
        raise RuntimeError("planted")

    optimizer.inner.register_step_pre_hook(fail)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match="planted"):
        train(model, optimizer, batches(1))
    assert all(torch.equal(p, saved) for p, saved in zip(model.parameters(), before, strict=True))


def test_micro_batches_add_up():
    (x, y), parts = batches(1)[0], 4
    model, optimizer = small(graft_norm=False)
    whole = train(model, optimizer, [(x, y)])
    model, optimizer = small(graft_norm=False)
    for rows, labels in zip(x.chunk(parts), y.chunk(parts), strict=True):
        (F.cross_entropy(model(rows), labels) / parts).backward()
    optimizer.step()
    for found, wanted in zip(model.parameters(), whole, strict=True):
        assert relative_error(found.detach(), wanted) <= EXACT


def test_evaluation_and_no_grad_do_not_touch_the_average():
    data = batches(4)
    wanted = train(*small(), data)
    model, optimizer = small()
    for batch in data:
        with torch.no_grad():
            model(100 * batch[0])
        model.eval()
        model(100 * batch[0])
        model.train()
        found = train(model, optimizer, [batch])
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    model(100 * data[0][0])  # nor does a training pass whose gradients zero_grad drops
    wanted = train(*small(), data + data)
    assert all(torch.equal(one, other) for one, other in zip(train(model, optimizer, data), wanted, strict=True))
    optimizer.method.layers[0].armed = True
    model(100 * data[0][0])  # it does if the optimizer is not told that it was for nothing
    model.zero_grad()
    model(data[0][0])
    assert optimizer.method.layers[0].pending_rows == 32


def test_rows_are_kept_by_a_zero_grad_between_forward_and_backward():
    (x, y), (model, optimizer) = batches(1)[0], small()
    wanted = train(*small(), [(x, y)])
    output = model(x)
    optimizer.zero_grad()
    F.cross_entropy(output, y).backward()
    optimizer.step()
    assert all(torch.equal(p.detach(), other) for p, other in zip(model.parameters(), wanted, strict=True))


def test_layers_of_two_precisions_step_as_by_themselves():
    class Converted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 4, dtype=torch.float32)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x).tanh().float())

    torch.manual_seed(0)
    model, x = Converted(), torch.randn(9, 6)
    alone = copy.deepcopy(model)
    optimizers = [Whitened(torch.optim.AdamW(model.parameters(), lr=0.1), model)]
    optimizers += [Whitened(torch.optim.AdamW(m.parameters(), lr=0.1), m) for m in alone.children()]
    for _ in range(2):
        for each in (model, alone):
            backward(each, x)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for p, wanted in zip(model.parameters(), alone.parameters(), strict=True):
        assert p.dtype == wanted.dtype
        assert torch.equal(p, wanted)
