"""Preconditioned: the optimizer is given the formula, by micro-batches and processes as by the joined batch."""

import copy

import pytest
import torch
from torch import Tensor, nn

from adiv_optim import Preconditioned
from tests.helpers.cases import LAYERS, quiet_same, relative_error
from tests.helpers.processes import needs_distributed, on_two_processes
from tests.helpers.references import rows
from tests.helpers.revive import through_a_file

EXACT = 1e-9  # float64; the Cholesky factor squares the condition of the rows
DAMPING = 0.1

pytestmark = pytest.mark.usefixtures("in_float64")


class Noting(torch.optim.SGD):
    """Notes the weights and gradients that its last step found."""

    def step(self, closure=None):
        held = [p for group in self.param_groups for p in group["params"]]
        self.weights = [p.detach().clone() for p in held]
        self.gradients = [p.grad.clone() for p in held]
        return super().step(closure)


def wrapped(model: nn.Module, **options) -> Preconditioned:
    settings = {"damping": DAMPING, "decay": 0.0, "every": 1, **options}
    return Preconditioned(Noting(model.parameters(), lr=0.1, momentum=0.9), model, **settings)


def by_hand(gradient: Tensor, covariance: Tensor, *blocks: slice) -> Tensor:
    """G~(A + λI)⁻¹ with λ = damping × tr(A) / columns, of the whole of A or of its diagonal blocks."""
    matrix = covariance + DAMPING * covariance.trace() / len(covariance) * torch.eye(len(covariance))
    return torch.cat([gradient[:, b] @ torch.linalg.inv(matrix[b, b]) for b in blocks or (slice(None),)], 1)


def joined(parts: list[Tensor]) -> Tensor:
    """G~: weight and bias side by side."""
    weight, *bias = parts
    return torch.cat([weight.flatten(1), *(part[:, None] for part in bias)], 1)


def with_one(x: Tensor) -> Tensor:
    return torch.cat([x, torch.ones(len(x), 1)], 1)


def explicit(layer: nn.Module, input: Tensor, grad_output: Tensor) -> Tensor:
    """What the optimizer should be given, from one row after the other."""
    groups: dict[range, tuple[list[Tensor], list[Tensor]]] = {}
    for row, grad_row, channels in rows(layer, input, grad_output):
        xs, gs = groups.setdefault(channels, ([], []))
        xs.append(row.flatten())
        gs.append(grad_row)
    found = []
    for xs, gs in groups.values():
        x = torch.stack(xs) if layer.bias is None else with_one(torch.stack(xs))
        found.append(by_hand(torch.stack(gs).T @ x, x.T @ x / len(x)))
    return torch.cat(found)


#: Tokens, no bias, groups, padding by the layer and by "same", three dimensions, and another order in memory.
KINDS = (
    "linear-tokens", "linear-rows-no-bias", "conv1d-every-option", "conv2d-same-circular", "conv2d-channels-last",
    "conv3d",
)  # fmt: skip


@quiet_same
@pytest.mark.parametrize("kind", KINDS)
def test_micro_batches_give_the_formula_of_the_joined_batch(kind):
    layer, x = LAYERS[kind].layer(), torch.cat([LAYERS[kind].input() for _ in range(3)])
    optimizer = wrapped(layer)
    g = torch.randn_like(layer(x))
    optimizer.zero_grad()
    for part, grad_output in zip(x.chunk(3), g.chunk(3), strict=True):
        layer(part).backward(grad_output)
    before, kept = copy.deepcopy(layer), [p.grad for p in layer.parameters()]
    plain = [gradient.clone() for gradient in kept]
    optimizer.step()
    wanted = explicit(before, x, g)
    assert relative_error(joined(optimizer.inner.gradients), wanted) <= EXACT
    assert relative_error(joined(plain), wanted) > 1e-3
    # Fused optimizers read a gradient as if it were laid out as its weight.
    assert [p.stride() for p in optimizer.inner.gradients] == [p.stride() for p in layer.parameters()]
    assert all(torch.equal(p, found) for p, found in zip(before.parameters(), optimizer.inner.weights, strict=True))
    for parameter, gradient, value in zip(layer.parameters(), kept, plain, strict=True):
        assert parameter.grad is gradient
        assert torch.equal(gradient, value)


def test_average_is_over_rows_with_decaying_weights():
    layer, decay = nn.Linear(4, 3), 0.7
    optimizer, grams, counts = wrapped(layer, decay=decay), [], []
    for count in (5, 3, 8, 2):
        batch = torch.randn(count, 4)
        optimizer.zero_grad()
        layer(batch).square().sum().backward()
        plain = joined([p.grad for p in layer.parameters()])
        optimizer.step()
        x = with_one(batch)
        grams.append(x.T @ x)
        counts.append(count)
        ages = range(len(grams) - 1, -1, -1)
        total = sum(decay**age * gram for age, gram in zip(ages, grams, strict=True))
        number = sum(decay**age * n for age, n in zip(ages, counts, strict=True))
        assert relative_error(joined(optimizer.inner.gradients), wanted := by_hand(plain, total / number)) <= EXACT
    mean_of_means = sum(decay**age * gram / n for age, gram, n in zip(ages, grams, counts, strict=True))
    for other in (grams[-1] / counts[-1], mean_of_means / sum(decay**age for age in ages)):
        assert relative_error(by_hand(plain, other), wanted) > 1e-3


def polar(matrix: Tensor) -> Tensor:
    u, _, vt = torch.linalg.svd(matrix, full_matrices=False)
    return u @ vt


class ExactMuon(torch.optim.SGD):
    """Muon without Nesterov's look ahead, and with the polar factor that its iteration comes near to."""

    def step(self, closure=None):
        (group,) = self.param_groups
        for p in group["params"]:
            buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
            buffer.mul_(group["momentum"]).add_(p.grad)
            p.data.sub_(group["lr"] * polar(buffer))


def test_around_muon_it_is_newton_muon():
    """W ← W − η polar(M) with M ← μM + G(K + γI)⁻¹, K the running mean of xxᵀ and γ = damping × tr(K) / columns."""
    layer, lr, momentum, decay = nn.Linear(5, 3, bias=False), 0.1, 0.9, 0.8
    weight, buffer, gram, rows, alone = layer.weight.detach().clone(), torch.zeros(3, 5), 0.0, 0.0, torch.zeros(3, 5)
    muon = ExactMuon(layer.parameters(), lr=lr, momentum=momentum)
    optimizer = Preconditioned(muon, layer, damping=DAMPING, decay=decay, every=1)
    for x in torch.randn(4, 8, 5) * torch.logspace(-1, 1, 5):
        optimizer.zero_grad()
        layer(x).square().sum().backward()
        optimizer.step()
        gram, rows = decay * gram + x.T @ x, decay * rows + len(x)
        gradient = 2 * weight @ x.T @ x
        buffer = momentum * buffer + by_hand(gradient, gram / rows)
        alone = momentum * alone + gradient
        assert relative_error(polar(alone), polar(buffer)) > 1e-2
        weight -= lr * polar(buffer)
        assert relative_error(layer.weight.detach(), weight) <= EXACT


def test_wide_layers_are_turned_by_blocks_with_one_damping():
    layer, x = nn.Linear(5, 3), torch.randn(9, 5) * torch.logspace(-1, 1, 5)
    optimizer = wrapped(layer, max_dim=3)
    layer(x).square().sum().backward()
    plain, rows = joined([p.grad for p in layer.parameters()]), with_one(x)
    optimizer.step()
    wanted = by_hand(plain, rows.T @ rows / 9, slice(0, 3), slice(3, 6))
    assert relative_error(joined(optimizer.inner.gradients), wanted) <= EXACT
    assert relative_error(by_hand(plain, rows.T @ rows / 9), wanted) > 1e-3


def network(seed: int = 0, **options) -> Preconditioned:
    torch.manual_seed(seed)
    return wrapped(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4)), **{"decay": 0.8, **options})


def trained(optimizer: Preconditioned, batches: Tensor) -> dict[str, Tensor]:
    for batch in batches:
        optimizer.zero_grad()
        optimizer.model(batch).square().mean().backward()
        optimizer.step()
    return copy.deepcopy(optimizer.model.state_dict())


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(value, other[name]) for name, value in one.items())


def test_what_no_step_is_to_see_is_not_in_the_average():
    batches, wanted = torch.randn(3, 8, 6), None
    for unseen in (False, True):
        optimizer = network()
        if unseen:
            optimizer.model(torch.full((8, 6), torch.inf)).sum().backward()  # as a batch that GradScaler skips
            optimizer.zero_grad()
            with torch.no_grad():
                optimizer.model(100 * batches[0])
        found = trained(optimizer, batches)
        wanted = wanted or found
    assert same(found, wanted)
    optimizer.model(batches[0]).sum().backward()
    optimizer.step()  # without zero_grad it counts
    assert optimizer.method.layers[0].rows > 8 / (1 - 0.8) * (1 - 0.8**3)


def test_rows_of_one_step_are_counted_once_however_its_calls_are_ordered():
    layer, x = nn.Linear(4, 3), torch.randn(9, 4)
    optimizer = wrapped(layer)
    loss = layer(x[:5]).sum()
    optimizer.zero_grad()
    loss.backward()
    layer(x[5:]).sum().backward()
    with torch.no_grad():
        layer(100 * x)  # an evaluation before the step
    optimizer.step()
    rows = with_one(x)
    wanted = by_hand(torch.ones(3, 9) @ rows, rows.T @ rows / 9)
    assert relative_error(joined(optimizer.inner.gradients), wanted) <= EXACT


def test_inverse_is_kept_between_measurements():
    kept, fresh = network(every=3), network()
    batches = torch.randn(5, 8, 6)
    assert same(trained(kept, batches[:3]), trained(fresh, batches[:3]))  # at 0, 1, 2, and then 4
    inverses = kept.method.measured["0.weight"]
    assert relative_error(trained(kept, batches[3:4])["0.weight"], trained(fresh, batches[3:4])["0.weight"]) > 1e-6
    assert kept.method.measured["0.weight"] is inverses


@pytest.mark.parametrize("every", [1, 4])
def test_resume_from_a_checkpoint_is_exact(every):
    batches = torch.randn(7, 8, 6)
    whole = trained(network(every=every), batches)
    first = network(every=every)
    weights = trained(first, batches[:4])
    state = through_a_file(first.state_dict())
    second = network(seed=1, every=every)
    second.model.load_state_dict(weights)
    second.load_state_dict(state)
    assert same(trained(second, batches[4:]), whole)
    # A plain optimizer takes the checkpoint and leaves the averages aside; without them the path is another.
    plain = torch.optim.SGD(second.model.parameters(), lr=0.1, momentum=0.9)
    plain.load_state_dict(state)
    forgetful = network(seed=1, every=every)
    forgetful.model.load_state_dict(weights)
    forgetful.load_state_dict(plain.state_dict())
    assert relative_error(trained(forgetful, batches[4:])["0.weight"], whole["0.weight"]) > 1e-6


def test_loading_a_checkpoint_without_averages_forgets_them():
    optimizer, fresh = network(), network()
    plain, start = copy.deepcopy((fresh.inner.state_dict(), fresh.model.state_dict()))
    batches = torch.randn(3, 8, 6)
    trained(optimizer, batches)
    kept = optimizer.state_dict()["method"]["layers"]["0.weight"]["memory"]
    saved = copy.deepcopy(kept)
    trained(optimizer, batches)
    assert torch.equal(kept[0], saved[0])  # a snapshot, not a view
    optimizer.model.load_state_dict(start)
    optimizer.load_state_dict(plain)
    assert same(trained(optimizer, batches), trained(fresh, batches))


def test_checkpoint_of_other_layers_is_refused():
    state, model = network().state_dict(), network().model
    other = Preconditioned(torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9), model)
    with pytest.raises(ValueError, match=r"state_dict\['method'\]\['layers'\] has an unknown '2.weight'"):
        other.load_state_dict(state)


def test_float16_is_summed_in_float32():
    layer = nn.Linear(6, 3).half()
    optimizer = wrapped(layer)
    layer(100 * torch.randn(9, 6).half()).sum().backward()  # squares add up beyond the largest float16
    assert optimizer.method.layers[0].pending[0].dtype == torch.float32
    optimizer.step()
    assert all(gradient.dtype == torch.float16 for gradient in optimizer.inner.gradients)
    assert all(bool(gradient.isfinite().all()) for gradient in optimizer.inner.gradients)


def test_autocast_leaves_the_sums_as_they_are():
    layer, x = nn.Linear(6, 3).float(), torch.randn(9, 6, dtype=torch.float32)
    optimizer = wrapped(layer)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        layer(x)
        assert relative_error((x.mT @ x).float(), x.mT.double() @ x.double()) > 1e-4
    rows = with_one(x.double())
    assert relative_error(optimizer.method.layers[0].pending[0][0], rows.mT @ rows) < 1e-6


def test_nan_travels_and_does_not_stay():
    layer, x = nn.Linear(3, 2), torch.randn(4, 3)
    optimizer = wrapped(layer, decay=0.5)
    optimizer.inner.param_groups[0]["lr"] = 0.0
    for input in (x, torch.full((4, 3), torch.nan)):
        optimizer.zero_grad()
        layer(input).sum().backward()
        before, total = copy.deepcopy(layer.state_dict()), optimizer.method.layers[0].memory
        optimizer.step()
    assert optimizer.inner.gradients[0].isnan().all()
    assert layer.weight.grad.isnan().all()
    assert optimizer.method.layers[0].memory is total
    layer.load_state_dict(before)
    optimizer.inner.state.clear()
    optimizer.zero_grad()
    layer(x).sum().backward()
    optimizer.step()
    assert optimizer.inner.gradients[0].isfinite().all()


def one_process(rank: int, joined: Tensor) -> dict[str, Tensor]:
    optimizer = network()
    replica = nn.parallel.DistributedDataParallel(optimizer.model)
    for batch in joined:
        optimizer.zero_grad()
        replica(batch.chunk(2)[rank]).square().mean().backward()
        optimizer.step()
    # Each process sends its rows to another layer: no sum may mix them up, nor wait for ever.
    experts = nn.ModuleList([nn.Linear(6, 2), nn.Linear(6, 2)])
    routed = wrapped(experts)
    for expert in experts:  # as a reduction of gradients would leave them
        expert.weight.grad, expert.bias.grad = torch.ones(2, 6), torch.ones(2)
    experts[rank](joined[0][: 3 + rank])
    routed.step()
    totals = [layer.memory[0][0] for layer in routed.method.layers]
    for number, total in enumerate(totals):
        x = with_one(joined[0][: 3 + number])
        assert relative_error(total, x.T @ x) <= EXACT
    return optimizer.model.state_dict()


@needs_distributed
def test_two_processes_are_one_on_the_joined_batch(tmp_path):
    batches = torch.randn(4, 8, 6)
    wanted = trained(network(), batches)
    one, two = on_two_processes(one_process, tmp_path, batches)
    assert same(one, two)
    assert max(relative_error(one[name], value) for name, value in wanted.items()) <= EXACT
    half = trained(network(), batches[:, :4])
    assert relative_error(half["0.weight"], wanted["0.weight"]) > 1e-3


def normed() -> nn.Module:
    return nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("build", "options", "message"),
    [
        (lambda: nn.Linear(2, 2), {"damping": 0.0}, "Preconditioned: damping is 0.0; it must be positive and finite"),
        (lambda: nn.Linear(2, 2), {"damping": torch.inf}, "damping is inf"),
        (lambda: nn.Linear(2, 2), {"decay": 1.0}, "Preconditioned: decay is 1.0; it must be at least 0 and below 1"),
        (lambda: nn.Linear(2, 2), {"every": 0}, "every is 0; it must be an integer of at least 1"),
        (lambda: nn.Linear(2, 2), {"max_dim": 0}, "max_dim is 0"),
        (normed, {}, r"Preconditioned: .*bias \(parametrized\)"),
    ],
)
def test_mistakes_are_named(build, options, message):
    with pytest.raises(ValueError, match=message):
        wrapped(build(), **options)


def test_covariance_without_a_factor_leaves_the_plain_step_and_is_told(monkeypatch):
    layer, plain, x = nn.Linear(4, 3), nn.Linear(4, 3), torch.randn(6, 4)
    plain.load_state_dict(layer.state_dict())
    monkeypatch.setattr(
        torch.linalg, "cholesky_ex", lambda matrix: (matrix, torch.ones(matrix.shape[:-2], dtype=torch.int32))
    )
    optimizer = Preconditioned(torch.optim.SGD(layer.parameters(), lr=0.1), layer)
    layer(x).square().sum().backward()
    with pytest.warns(UserWarning, match="weight: no Cholesky factor found"):
        optimizer.step()
    plain(x).square().sum().backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert torch.equal(layer.weight, plain.weight)
    assert optimizer.metrics()["Preconditioned/failed_factorisations"] == 1
