"""Whitened: against explicit covariances, against BatchIdeal, and everything else an optimizer must keep."""

import copy
import gc
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adiv_optim import BatchIdeal, GradientOnly, UnitConsistent, Whitened
from tests.helpers.cases import relative_error
from tests.helpers.covering import paired
from tests.helpers.revive import revived

pytestmark = pytest.mark.usefixtures("in_float64")
EXACT = 1e-9


def linear() -> nn.Module:
    return nn.Linear(5, 3)


LAYERS = {
    "linear": (linear, (7, 5)),
    "linear, few rows": (linear, (2, 5)),
    "linear, tokens": (linear, (2, 4, 5)),
    "linear, no bias": (lambda: nn.Linear(5, 3, bias=False), (7, 5)),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3, padding=1), (2, 4, 5, 5)),
    "conv2d, groups, stride, dilation": (lambda: nn.Conv2d(4, 6, 3, 2, 2, 2, groups=2), (2, 4, 9, 9)),
    "conv2d, same, reflect": (lambda: nn.Conv2d(2, 3, 2, padding="same", padding_mode="reflect"), (2, 2, 5, 5)),
    "conv1d, depthwise": (lambda: nn.Conv1d(3, 6, 3, groups=3, bias=False), (2, 3, 8)),
}
each_layer = pytest.mark.parametrize(("build", "shape"), LAYERS.values(), ids=LAYERS)


def backward(model: nn.Module, x: Tensor, seed: int = 0) -> Tensor:
    output = model(x)
    g = torch.randn(output.shape, generator=torch.Generator().manual_seed(seed)).to(output.dtype)
    (output * g).sum().backward()
    return output


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
        torch.optim.AdamW([parameter], lr=0.1, weight_decay=0.3).step()
        return parameter.detach()

    wanted = explicit_step(start, x, gradient, 0.5, adamw)
    optimizer.step()
    found = torch.cat([model.weight, model.bias[:, None]], 1).detach()
    before = torch.cat([start.weight, start.bias[:, None]], 1).detach()
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


def small(seed: int = 0, **options):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 4))
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    return model, Whitened(inner, model, **{"every": 2, **options})


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(16, 6, generator=generator, dtype=torch.float64), torch.randint(4, (16,), generator=generator))
        for _ in range(count)
    ]


def train(model: nn.Module, optimizer, data) -> list[Tensor]:
    for x, y in data:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


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
    fresh.load_state_dict({k: v for k, v in saved["optimizer"].items() if k != "chart"})  # without what it remembers
    found = train(fresh_model, fresh, data[3:])
    assert not all(torch.equal(one, other) for one, other in zip(found, whole, strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_step_without_a_rate_changes_no_bit(dtype):
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(4 * 4, 3)).to(dtype)
    with torch.no_grad():
        model[2].weight[0, :2] = torch.tensor([0.0, -0.0])
    optimizer = Whitened(torch.optim.AdamW(model.parameters(), lr=0.0), model)
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
    optimizer.chart.layers[0].armed = True
    model(100 * data[0][0])  # it does if the optimizer is not told that it was for nothing
    model.zero_grad()
    model(data[0][0])
    assert optimizer.chart.layers[0].pending_rows == 32


def test_rows_are_kept_by_a_zero_grad_between_forward_and_backward():
    (x, y), (model, optimizer) = batches(1)[0], small()
    wanted = train(*small(), [(x, y)])
    output = model(x)
    optimizer.zero_grad()
    F.cross_entropy(output, y).backward()
    optimizer.step()
    assert all(torch.equal(p.detach(), other) for p, other in zip(model.parameters(), wanted, strict=True))


def test_copies_of_the_model_and_forgotten_optimizers_gather_nothing():
    model, optimizer = small()
    train(model, optimizer, batches(1))
    average = copy.deepcopy(model)
    assert all(hook.covariance() is None for m in average for hook in m._forward_pre_hooks.values())
    average(batches(1)[0][0])
    plain = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 4))
    assert len(pickle.dumps(model)) < len(pickle.dumps(plain)) + 2000
    assert sum(len(m._forward_pre_hooks) for m in model) == 2
    del optimizer
    gc.collect()
    assert not any(m._forward_pre_hooks for m in model)


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


def test_freezing_a_bias_afterwards_is_refused_and_changes_nothing():
    model, optimizer = small()
    model[0].bias.requires_grad_(False)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ValueError, match=r"'0.weight' or its bias has no gradient"):
        train(model, optimizer, batches(1))
    assert all(torch.equal(p, saved) for p, saved in zip(model.parameters(), before, strict=True))


def test_added_parameters_are_whitened():
    model, _ = small()
    optimizer = Whitened(torch.optim.SGD(model[0].parameters(), lr=0.1), model)
    train(model, optimizer, batches(1))
    total = optimizer.chart.layers[0].total
    optimizer.add_param_group({"params": list(model[3].parameters())})
    assert optimizer.chart.layers[0].total is total
    assert optimizer.coverage().never_seen["3.weight"] == "9 columns"
    train(model, optimizer, batches(1))
    assert optimizer.coverage().treated["3.weight"] == "whitened, 9 columns"


def test_attention_is_left_alone_and_said_so():
    model = nn.TransformerEncoderLayer(8, 2, 4, batch_first=True)
    with pytest.warns(
        UserWarning,
        match="treats less than half of the elements .* MultiheadAttention is not a layer whose rows are known",
    ):
        found = Whitened(torch.optim.SGD(model.parameters(), lr=0.1), model).coverage()
    assert found.skipped["self_attn.out_proj.weight"] == "MultiheadAttention uses it without calling the layer"
    assert found.skipped["self_attn.in_proj_weight"] == "MultiheadAttention is not a layer whose rows are known"
    assert found.never_seen["linear1.weight"] == "9 columns"


def test_export_is_not_seen():
    model, optimizer = small()
    torch.export.export(model, (torch.randn(2, 6),), strict=False)
    assert optimizer.chart.layers[0].pending is None


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


def test_average_is_decayed_by_measurement():
    model, optimizer = small(every=1, decay=0.5)
    data = batches(3)
    train(model, optimizer, data)
    rows = [torch.cat([x, torch.ones(16, 1)], 1) for x, _ in data]
    weights = [0.25, 0.5, 1.0]
    wanted = sum(w * r.T @ r for w, r in zip(weights, rows, strict=True)) / (16 * sum(weights))
    (found,) = optimizer.chart.layers[0].mean()
    assert relative_error(found, wanted) <= 1e-12


def test_measurements_come_at_powers_of_two_and_then_regularly():
    model, optimizer = small(every=6)
    seen = []
    for step, batch in enumerate(batches(20)):
        before = optimizer.chart.layers[0].total
        train(model, optimizer, [batch])
        if optimizer.chart.layers[0].total is not before:
            seen.append(step)
    assert seen == [0, 1, 2, 4, 6, 12, 18]


def test_wide_layers_keep_blocks():
    model, optimizer = small(max_dim=4)
    data = batches(3)
    assert optimizer.coverage().never_seen["0.weight"] == "2 blocks of 3 to 4 columns"
    train(model, optimizer, data)
    shapes = [block.shape for block in optimizer.chart.layers[0].total]
    assert shapes == [(1, 3, 3), (1, 4, 4)]
    one, two = optimizer.chart.layers[0].mean()
    full_model, full = small()
    train(full_model, full, data[:1])
    model, optimizer = small(max_dim=4)
    train(model, optimizer, data[:1])
    (whole,) = full.chart.layers[0].mean()
    one, two = optimizer.chart.layers[0].mean()
    assert relative_error(whole[:3, :3], one) <= 1e-12
    assert relative_error(whole[3:, 3:], two) <= 1e-12


@each_layer
def test_all_eigenvectors_but_one_give_the_whole_step(build, shape):
    def step(**options):
        torch.manual_seed(0)
        layer, x = build(), torch.randn(shape)
        optimizer = Whitened(torch.optim.AdamW(layer.parameters(), lr=0.1), layer, every=1, **options)
        start = layer.weight.detach().clone()
        backward(layer, x)
        optimizer.step()
        return layer.weight.detach() - start

    size = build().weight[0].numel() + (build().bias is not None)
    assert relative_error(step(rank=size), step()) <= EXACT
    assert relative_error(step(rank=size - 1), step()) <= EXACT
    assert relative_error(step(rank=1), step()) > 1e-3


class Tied(nn.Module):
    """One weight in two linear layers, one in an embedding and a linear layer, one frozen, one parametrized."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(4, 4)
        self.frozen.weight.requires_grad_(False)
        self.normed = torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))

    def forward(self, index: Tensor) -> Tensor:
        return self.head(self.normed(self.frozen(self.second(torch.tanh(self.first(self.embed(index)))))))


def test_shared_frozen_and_other_weights():
    torch.manual_seed(0)
    model = Tied()
    with pytest.warns(UserWarning, match="treats less than half"):
        optimizer = Whitened(torch.optim.SGD(model.parameters(), lr=0.1), model, every=1)
    index = torch.randint(7, (3, 5))
    inputs = {}
    for name in ("first", "second"):
        model.get_submodule(name).register_forward_pre_hook(lambda m, args, name=name: inputs.update({name: args[0]}))
    backward(model, index)
    optimizer.step()
    found = optimizer.coverage()
    assert found.treated == {"first.weight": "whitened, 4 columns"}
    assert found.skipped == {
        "embed.weight": "Embedding is not a layer whose rows are known",
        "frozen.bias": "a bias without its weight",
        "frozen.weight": "frozen when the optimizer was wrapped",
        "normed.bias": "parametrized",
        "normed.parametrizations.weight.original0": "ParametrizationList is not a layer whose rows are known",
        "normed.parametrizations.weight.original1": "ParametrizationList is not a layer whose rows are known",
    }
    rows = torch.cat([inputs[name].detach().reshape(-1, 4) for name in ("first", "second")])
    (mean,) = optimizer.chart.layers[0].mean()
    assert relative_error(mean, rows.T @ rows / len(rows)) <= 1e-12


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


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has Muon from 2.9 on")
def test_muon_behind_it_orthogonalises_in_white_coordinates():
    model, x = nn.Linear(6, 4, bias=False).float(), torch.randn(32, 6) * torch.logspace(0, -2, 6)
    optimizer = Whitened(torch.optim.Muon(model.parameters(), lr=0.1, weight_decay=0.0), model, damping=1e-3)
    before = model.weight.detach().clone()
    backward(model, x.float())
    optimizer.step()
    (both,) = optimizer.chart.measured["weight"]
    step = (model.weight.detach() - before) @ both[1].matrix
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


def test_batch_with_nan_is_left_out_of_the_average():
    model, optimizer = small(every=1)
    train(model, optimizer, batches(1))
    before = optimizer.chart.layers[0].total
    model(torch.full((2, 6), torch.nan)).sum().backward()
    optimizer.zero_grad()
    optimizer.step()
    assert optimizer.chart.layers[0].total is before


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
    assert not any(m._forward_pre_hooks for m in model)
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
                {**torch.optim.SGD(m.parameters()).state_dict(), "chart": {"layers": {"9.weight": {}}}}
            ),
            ValueError,
            r"state_dict\['chart'\] lacks 'steps'",
        ),
        (
            lambda m: Whitened(torch.optim.SGD(m.parameters()), m, max_dim=4).load_state_dict(stepped_state(m)),
            ValueError,
            r"\['chart'\]\['layers'\]\['0.weight'\]\['total'\] is a list of 1, wanted a list of 2",
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
