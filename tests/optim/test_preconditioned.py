"""BatchIdeal's running average: micro-batches and processes give what the joined batch gives."""

import copy
import io

import pytest
import torch
from torch import Tensor, nn

from adiv_optim import BatchIdeal, GradientOnly, attach, functional, jacobian, precondition
from tests.cases import LAYERS, apply, gradients, quiet_same, relative_error
from tests.processes import needs_distributed, on_two_processes

EXACT = 1e-9  # float64; the Cholesky factor squares the condition of the rows
DAMPING = 0.1


pytestmark = pytest.mark.usefixtures("in_float64")


def grads(layer: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}


BATCHED = {name: case for name, case in LAYERS.items() if "unbatched" not in name}


@quiet_same
@pytest.mark.parametrize("case", BATCHED.values(), ids=BATCHED)
def test_micro_batches_give_the_ideal_step_of_the_joined_batch(case):
    layer, joined = case.layer(), torch.cat([case.input() for _ in range(3)])
    output = apply(layer, joined, BatchIdeal(DAMPING))
    g = torch.randn_like(output)
    wanted = gradients(output, layer, g)
    attach(layer, BatchIdeal(DAMPING, decay=0.0))
    for part, grad_output in zip(joined.chunk(3), g.chunk(3), strict=True):
        layer(part).backward(grad_output)
    plain = grads(layer)
    precondition(layer)
    for name, gradient in grads(layer).items():
        assert relative_error(gradient, wanted[name]) <= EXACT
        assert relative_error(plain[name], wanted[name]) > 1e-3  # backward itself leaves the plain gradient


def test_average_is_the_mean_with_decaying_weights():
    layer, decay = attach(nn.Linear(4, 3), BatchIdeal(DAMPING, per_sample=False, decay=0.7)), 0.7
    batches = [torch.randn(5, 4) for _ in range(4)]
    grams = []
    for batch in batches:
        layer.zero_grad()
        layer(batch).square().sum().backward()
        plain = torch.cat([layer.weight.grad, layer.bias.grad[:, None]], 1)
        precondition(layer)
        x = torch.cat([batch, torch.ones(5, 1)], 1)
        grams.append(x.T @ x)
        weights = [decay**age for age in reversed(range(len(grams)))]
        average = sum(w * gram for w, gram in zip(weights, grams, strict=True)) / sum(weights)
        ridge = DAMPING * average.trace() / 5 * torch.eye(5)
        wanted = plain @ torch.linalg.inv(average + ridge)
        assert relative_error(torch.cat([layer.weight.grad, layer.bias.grad[:, None]], 1), wanted) <= EXACT
    alone = plain @ torch.linalg.inv(grams[-1] + DAMPING * grams[-1].trace() / 5 * torch.eye(5))
    assert relative_error(alone, wanted) > 1e-3


def test_per_sample_counts_the_rows_of_all_micro_batches():
    once, counted = (
        attach(copy.deepcopy(layer), BatchIdeal(DAMPING, decay=0.5, per_sample=flag))
        for layer in [nn.Linear(4, 3)]
        for flag in (False, True)
    )
    for part in torch.randn(2, 5, 4):
        for layer in (once, counted):
            layer(part).square().sum().backward()
    precondition(once)
    precondition(counted)
    assert relative_error(counted.weight.grad, 10 * once.weight.grad) <= EXACT


def trained(optimizer, batches) -> dict[str, Tensor]:
    for batch in batches:
        optimizer.zero_grad()
        optimizer.model(batch).square().mean().backward()
        optimizer.step()
    return copy.deepcopy(optimizer.model.state_dict())


def model_and_optimizer(seed: int = 0, **options):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))
    rule = BatchIdeal(DAMPING, **{"decay": 0.8, **options})
    return GradientOnly(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model, rule)


def test_gradient_only_steps_on_it():
    optimizer = model_and_optimizer()
    by_hand = copy.deepcopy(optimizer)
    batches = torch.randn(3, 8, 6)
    found = trained(optimizer, batches)
    for batch in batches:
        by_hand.inner.zero_grad()
        by_hand.model(batch).square().mean().backward()
        precondition(by_hand.model)
        precondition(by_hand.model)  # without a backward in between, the second does nothing
        by_hand.inner.step()
    assert all(torch.equal(value, by_hand.model.state_dict()[name]) for name, value in found.items())


def test_zero_grad_drops_a_batch_from_the_average():
    optimizer, other = model_and_optimizer(), model_and_optimizer()
    batches = torch.randn(3, 8, 6)
    optimizer.model(torch.full((8, 6), torch.inf)).sum().backward()  # as a batch that GradScaler skips
    assert all(
        torch.equal(value, trained_other)
        for value, trained_other in zip(
            trained(optimizer, batches).values(), trained(other, batches).values(), strict=True
        )
    )


def test_evaluation_leaves_the_average_alone():
    optimizer, other = model_and_optimizer(), model_and_optimizer()
    with torch.no_grad():
        optimizer.model(torch.randn(8, 6))
    optimizer.model(torch.randn(8, 6))  # no backward, no trace
    batches = torch.randn(2, 8, 6)
    one, two = trained(optimizer, batches), trained(other, batches)
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_factor_is_kept_for_a_while():
    kept, fresh, plain = model_and_optimizer(every=3), model_and_optimizer(), model_and_optimizer(every=2)
    batches = torch.randn(3, 8, 6)
    first = trained(kept, batches[:1]), trained(fresh, batches[:1])
    assert all(torch.equal(first[0][name], first[1][name]) for name in first[0])
    second = trained(kept, batches[1:]), trained(fresh, batches[1:])
    assert relative_error(second[0]["0.weight"], second[1]["0.weight"]) > 1e-4
    assert relative_error(trained(plain, batches)["0.weight"], second[0]["0.weight"]) > 1e-6


@pytest.mark.parametrize("every", [1, 3])
def test_resume_from_a_checkpoint_is_exact(every):
    batches = torch.randn(6, 8, 6)
    whole = trained(model_and_optimizer(every=every), batches)
    first = model_and_optimizer(every=every)
    weights = trained(first, batches[:3])
    buffer = io.BytesIO()
    torch.save(first.state_dict(), buffer)
    buffer.seek(0)
    state = torch.load(buffer, weights_only=True)
    second = model_and_optimizer(seed=1, every=every)
    second.model.load_state_dict(weights)
    second.load_state_dict(state)
    resumed = trained(second, batches[3:])
    assert all(torch.equal(value, whole[name]) for name, value in resumed.items())
    # A plain optimizer takes the checkpoint and leaves the averages aside; without them the path is another.
    plain = torch.optim.SGD(second.model.parameters(), lr=0.1, momentum=0.9)
    plain.load_state_dict(state)
    forgetful = model_and_optimizer(seed=1, every=every)
    forgetful.model.load_state_dict(weights)
    forgetful.load_state_dict(plain.state_dict())
    assert relative_error(trained(forgetful, batches[3:])["0.weight"], whole["0.weight"]) > 1e-6


def test_checkpoint_of_other_layers_is_refused():
    state = model_and_optimizer().state_dict()
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    other = GradientOnly(inner, model, BatchIdeal(decay=0.8), skip=["2"])
    with pytest.raises(ValueError, match=r"state_dict\['running'\] has an unknown '2'"):
        other.load_state_dict(state)


def test_float16_is_averaged_in_float32():
    layer = attach(nn.Linear(6, 3).half(), BatchIdeal(DAMPING, decay=0.5))
    layer(torch.randn(9, 6).half()).sum().backward()
    assert layer._correction.pending.dtype == torch.float32
    precondition(layer)
    assert layer.weight.grad.dtype == torch.float16
    assert layer.weight.grad.isfinite().all()


def test_nan_travels_and_does_not_stay():
    layer = attach(nn.Linear(3, 2), BatchIdeal(DAMPING, decay=0.5))
    layer(torch.full((4, 3), torch.nan)).sum().backward()
    for p in layer.parameters():
        p.grad = torch.ones_like(p)  # as if the NaN had gone unnoticed
    precondition(layer)
    assert layer.weight.grad.isnan().all()
    layer.zero_grad()
    layer(torch.randn(4, 3)).sum().backward()
    precondition(layer)
    assert layer.weight.grad.isfinite().all()


def test_rows_whose_gradients_are_gone_are_gone_too():
    layer, other = (attach(copy.deepcopy(layer), BatchIdeal(DAMPING, decay=0.0)) for layer in [nn.Linear(4, 3)] * 2)
    x, dropped = torch.randn(5, 4), 100 * torch.randn(5, 4)
    layer(dropped).square().sum().backward()
    layer.zero_grad()  # the model's own, which knows nothing of averages
    torch.autograd.grad(layer(dropped.requires_grad_()).sum(), dropped)  # no gradient reaches p.grad
    for each in (layer, other):
        each(x).square().sum().backward()
        precondition(each)
    assert torch.equal(layer.weight.grad, other.weight.grad)


def test_what_is_trained_may_not_change_between_backward_and_step():
    layer = attach(nn.Linear(4, 3), BatchIdeal(DAMPING, decay=0.5))
    layer(torch.randn(5, 4)).sum().backward()
    layer.bias.requires_grad_(False)
    with pytest.raises(ValueError, match=r"the model itself .*: gradients of \['weight'\] to correct"):
        precondition(layer)
    with pytest.raises(RuntimeError, match="call zero_grad"):
        layer(torch.randn(5, 4)).sum().backward()


def test_loading_a_checkpoint_without_averages_forgets_them():
    optimizer, fresh = model_and_optimizer(), model_and_optimizer()
    plain = fresh.inner.state_dict()
    weights = copy.deepcopy(optimizer.model.state_dict())
    batches = torch.randn(3, 8, 6)
    trained(optimizer, batches)
    saved = optimizer.state_dict()["running"]["0"]["total"].clone()
    kept = optimizer.state_dict()
    trained(optimizer, batches)
    assert torch.equal(kept["running"]["0"]["total"], saved)  # a snapshot, not a view
    optimizer.model.load_state_dict(weights)
    optimizer.load_state_dict(plain)
    one, two = trained(optimizer, batches), trained(fresh, batches)
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_compiled_model_remembers_too():
    plain = attach(nn.Linear(4, 3), BatchIdeal(DAMPING, decay=0.5))
    compiled, x = copy.deepcopy(plain), torch.randn(5, 4)
    plain(x).square().sum().backward()
    torch.compile(compiled, backend="aot_eager")(x).square().sum().backward()
    for layer in (plain, compiled):
        precondition(layer)
    assert relative_error(compiled.weight.grad, plain.weight.grad) <= EXACT


def one_process(rank: int, joined: Tensor) -> dict[str, Tensor]:
    optimizer = model_and_optimizer()
    replica = nn.parallel.DistributedDataParallel(optimizer.model)
    for batch in joined:
        optimizer.zero_grad()
        replica(batch.chunk(2)[rank]).square().mean().backward()
        optimizer.step()
    # Each process sends its rows to another layer: no sum may mix them up, nor wait for ever.
    experts = attach(nn.ModuleList([nn.Linear(6, 2), nn.Linear(6, 2)]), BatchIdeal(DAMPING, decay=0.0))
    experts[rank](joined[0][:3]).sum().backward()
    expected = experts[rank]._correction.pending.clone()
    precondition(experts)
    assert torch.equal(experts[rank]._correction.total, expected)
    return optimizer.model.state_dict()


@needs_distributed
def test_two_processes_are_one_on_the_joined_batch(tmp_path):
    joined = torch.randn(4, 8, 6)
    wanted = trained(model_and_optimizer(), joined)
    one, two = on_two_processes(one_process, tmp_path, joined)
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert max(relative_error(one[name], value) for name, value in wanted.items()) <= EXACT
    half = trained(model_and_optimizer(), joined[:, :4])
    assert relative_error(half["0.weight"], wanted["0.weight"]) > 1e-3


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    return model


@pytest.mark.parametrize(
    ("action", "error", "message"),
    [
        (lambda: BatchIdeal(decay=1.0), ValueError, r"decay is 1.0; it must be None, or in \[0, 1\)"),
        (lambda: BatchIdeal(decay=-0.1), ValueError, "decay is -0.1"),
        (lambda: BatchIdeal(every=2), ValueError, "every is 2; .* goes with a decay"),
        (lambda: BatchIdeal(decay=0.5, every=0), ValueError, "every is 0"),
        (lambda: attach(tied(), BatchIdeal(decay=0.5)), ValueError, "shares a parameter .0.weight is 2.weight."),
        (
            lambda: attach(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)), BatchIdeal(decay=0.5)),
            ValueError,
            "is parametrized, so p.grad is not the gradient of its weight",
        ),
        (
            lambda: functional.linear(
                torch.ones(1, 2), torch.ones(1, 2, requires_grad=True), None, BatchIdeal(decay=0.5)
            ).backward(),
            ValueError,
            "here is no layer to keep them",
        ),
        (
            lambda: jacobian.backward(
                nn.Linear(2, 2), lambda z, _: z.sum(), torch.ones(1, 2), None, BatchIdeal(decay=0.5)
            ),
            ValueError,
            "here is no layer to keep them",
        ),
    ],
)
def test_mistakes_are_named(action, error, message):
    with pytest.raises(error, match=message):
        action()


def test_transform_that_would_carry_the_memory_away_raises():
    layer = attach(nn.Linear(2, 1), BatchIdeal(decay=0.5))
    parameters = {name: p.detach() for name, p in layer.named_parameters()}
    loss = lambda p: torch.func.functional_call(layer, p, (torch.ones(3, 2),)).sum()  # noqa: E731
    with pytest.raises(RuntimeError, match=r"remembers its inputs .* which a transform of torch.func"):
        torch.func.grad(loss)(parameters)
