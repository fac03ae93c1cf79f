"""GradientOnly: corrected gradients behind any optimizer, and a plain model afterwards."""

import copy
import warnings
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW

from adiv_optim import BatchIdeal, Correction, Disproportional, GradientOnly, Proportional, Whitened, coverage
from tests.helpers.cases import each_correction, relative_error
from tests.optim.test_wrapper import assert_same_parameters, batches, each_optimizer, mlp, train

LEARNING_RATE = 0.1
EXACT = 1e-12  # float64
ROUNDING = 1e-15  # float64, relative to the largest entry


@each_correction
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_effective_update_diagonal_is_ideal(correction, bias):
    model = nn.Linear(5, 3, bias=bias).double()
    x, g = torch.randn(1, 5, dtype=torch.float64), torch.randn(1, 3, dtype=torch.float64)
    optimizer = GradientOnly(SGD(model.parameters(), lr=LEARNING_RATE), model, correction)
    before = model(x)
    before.backward(g)
    optimizer.step()
    torch.testing.assert_close(model(x) - before, -LEARNING_RATE * g, rtol=0, atol=EXACT)


@dataclass(frozen=True)
class One(Correction):
    """The correction that corrects nothing."""

    def scales(self, factors):
        return {name: torch.ones_like(factor) for name, factor in factors.items()}


@each_optimizer
def test_scale_one_trains_as_the_plain_optimizer_does(build):
    model = mlp()
    plain = copy.deepcopy(model)
    train(plain, build(plain.parameters()), batches(5))
    train(model, GradientOnly(build(model.parameters()), model, One()), batches(5))
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=10 * ROUNDING)


def convolutional():
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2)).double()


@each_optimizer
def test_scale_one_trains_convolutions_as_the_plain_optimizer_does(build):
    model = convolutional()
    plain = copy.deepcopy(model)
    xs = [torch.randn(6, 2, 2, 2, dtype=torch.float64) for _ in range(5)]
    train(plain, build(plain.parameters()), xs)
    train(model, GradientOnly(build(model.parameters()), model, One()), xs)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=10 * ROUNDING)


@each_correction
def test_a_correction_changes_training(correction):
    model = mlp()
    plain = copy.deepcopy(model)
    train(plain, SGD(plain.parameters(), lr=LEARNING_RATE), batches(3))
    train(model, GradientOnly(SGD(model.parameters(), lr=LEARNING_RATE), model, correction), batches(3))
    assert relative_error(model[0].weight, plain[0].weight) > 1e-3


@each_correction
def test_accumulation_over_micro_batches_is_one_batch(correction):
    model = mlp()
    whole = copy.deepcopy(model)
    x = torch.randn(8, 4, dtype=torch.float64)
    optimizer = GradientOnly(SGD(whole.parameters(), lr=LEARNING_RATE), whole, correction)
    whole(x).square().mean().backward()
    optimizer.step()
    optimizer = GradientOnly(SGD(model.parameters(), lr=LEARNING_RATE), model, correction)
    for part in x.split(2):
        (model(part).square().mean() / 4).backward()
    optimizer.step()
    for p, q in zip(model.parameters(), whole.parameters(), strict=True):
        assert relative_error(p, q) <= EXACT


@each_correction
@pytest.mark.parametrize("build", [mlp, convolutional], ids=["mlp", "convolutional"])
def test_loss_scaling_leaves_the_corrected_direction_bit_for_bit(correction, build):
    model = build()
    x = torch.randn(6, 4, dtype=torch.float64) if build is mlp else torch.randn(6, 2, 2, 2, dtype=torch.float64)
    GradientOnly(SGD(model.parameters(), lr=LEARNING_RATE), model, correction)
    found = []
    for scale in (1, 2**10):
        model.zero_grad()
        (model(x).square().mean() * scale).backward()
        found.append([p.grad / scale for p in model.parameters()])
    for plain, scaled in zip(*found, strict=True):
        assert torch.equal(plain, scaled)


@pytest.mark.parametrize("optimizer_kind", [SGD, Adam, AdamW])
def test_grad_scaler_unscales_steps_and_skips_infinite_gradients(optimizer_kind):
    model = nn.Linear(4, 2)
    optimizer = GradientOnly(optimizer_kind(model.parameters(), lr=LEARNING_RATE), model, Proportional())
    twin = copy.deepcopy(model)
    twin_optimizer = GradientOnly.__new__(GradientOnly)
    twin_optimizer.__setstate__({"inner": optimizer_kind(twin.parameters(), lr=LEARNING_RATE), "model": twin})
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    x = torch.randn(6, 4)

    scaler.scale(model(x).square().mean()).backward()
    scaler.step(optimizer)
    scaler.update()
    train(twin, twin_optimizer, [x])
    assert_same_parameters(model, twin)

    optimizer.zero_grad()
    bad = x.clone()
    bad[0, 0] = float("inf")
    scaler.scale(model(bad).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert_same_parameters(model, twin)
    assert scaler.get_scale() == 2.0**9


@pytest.mark.parametrize("correction", [Proportional(), Disproportional()])
def test_detach_gives_back_a_plain_model_and_the_optimizer_goes_on(correction):
    model = mlp()
    plain = copy.deepcopy(model)
    optimizer = GradientOnly(SGD(model.parameters(), lr=LEARNING_RATE), model, correction)
    assert optimizer.detach() is model
    assert [type(module) for module in model.modules()] == [type(module) for module in plain.modules()]
    train(model, optimizer, batches(3))
    train(plain, SGD(plain.parameters(), lr=LEARNING_RATE), batches(3))
    assert_same_parameters(model, plain)


def test_the_end_of_a_with_block_detaches_also_after_an_error():
    model = mlp()
    kinds = [type(module) for module in model.modules()]
    optimizer = GradientOnly(SGD(model.parameters(), lr=LEARNING_RATE), model, Proportional())
    assert [type(module) for module in model.modules()] != kinds
    with pytest.raises(KeyError, match="planted"), optimizer as same:
        raise KeyError("planted" if same is optimizer else "another")
    assert [type(module) for module in model.modules()] == kinds


def test_a_second_optimizer_on_the_model_is_to_be_passed_plainly():
    model = mlp()
    GradientOnly(SGD(model[0].parameters(), lr=LEARNING_RATE), model, Proportional())
    with pytest.raises(ValueError, match=r"A second optimizer on the same model .*pass it plainly"):
        GradientOnly(SGD(model[2].parameters(), lr=LEARNING_RATE), model, Proportional())


def test_skip_and_strict_are_those_of_attach():
    model = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 2)).double()
    build = lambda: SGD(model.parameters(), lr=LEARNING_RATE)  # noqa: E731
    with pytest.raises(ValueError, match="strict: 2 trainable parameters"):
        GradientOnly(build(), model, Proportional(), strict=True)
    optimizer = GradientOnly(build(), model, Proportional(), skip=["0", nn.LayerNorm], strict=True)
    train(model, optimizer, batches(1))
    assert coverage(model).treated.keys() == {"2.weight", "2.bias"}


def test_coverage_metrics_and_repr_say_what_is_corrected():
    model = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 2)).double()
    optimizer = GradientOnly(SGD(model.parameters(), lr=LEARNING_RATE), model, Proportional(eps=0.5))
    assert repr(optimizer).startswith("GradientOnly(SGD (")
    assert repr(optimizer).endswith(", correction=Proportional(eps=0.5))")
    names = [f"GradientOnly/{name}" for name in ("treated_parameters", "treated_elements", "layers", "layers_seen")]
    assert optimizer.metrics() == dict(zip(names, (0, 0, 2, 0), strict=True))
    train(model, optimizer, batches(1))
    assert optimizer.coverage() == coverage(model)
    assert optimizer.metrics() == dict(zip(names, (4 / 6, 37 / 47, 2, 2), strict=True))
    optimizer.detach()
    assert repr(optimizer).endswith(", correction=None)")
    assert optimizer.metrics()["GradientOnly/layers"] == 0


def test_metrics_hold_those_of_the_wrapper_within():
    model = nn.Linear(4, 5).double()
    within = Whitened(SGD(model.parameters(), lr=LEARNING_RATE), model)
    found = GradientOnly(within, model, Proportional()).metrics()
    assert found.items() > within.metrics().items()


def optimizer_of_another_model(model):
    return SGD(mlp().parameters(), lr=LEARNING_RATE)


def own_optimizer(model):
    return SGD(model.parameters(), lr=LEARNING_RATE)


ERRORS = {
    "other-parameters": (optimizer_of_another_model, Proportional(), ValueError, "none of the 4 .*0.weight.*deepcopy"),
    "correction-class": (own_optimizer, Proportional, TypeError, r"write Proportional\(\)"),
    "correction-none": (own_optimizer, None, TypeError, "found NoneType"),
}  # fmt: skip


@pytest.mark.parametrize(("build", "correction", "error", "message"), ERRORS.values(), ids=ERRORS)
def test_error_leaves_the_model_unattached(build, correction, error, message):
    model = mlp()
    with pytest.raises(error, match=message):
        GradientOnly(build(model), model, correction)
    assert type(model[0]) is nn.Linear
    assert "_correction" not in model[0].__dict__


def test_model_that_is_no_module_is_an_error():
    model = mlp()
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, found generator"):
        GradientOnly(own_optimizer(model), model.parameters(), Proportional())


def test_attaching_twice_is_an_error_that_names_the_layer():
    model = mlp()
    GradientOnly(own_optimizer(model), model, Proportional())
    with pytest.raises(ValueError, match="layer '0' already has a correction"):
        GradientOnly(own_optimizer(model), model, Proportional())


def test_optimizer_of_a_part_of_the_model_is_accepted():
    model = mlp()
    optimizer = GradientOnly(SGD(model[2].parameters(), lr=LEARNING_RATE), model, Proportional())
    before = model[0].weight.detach().clone()
    train(model, optimizer, batches(1))
    assert torch.equal(model[0].weight, before)


FAR = {
    "habit-of-adam": (SGD, {"lr": 1e-3}, BatchIdeal(), r"is 0.001, .* hardly at all; take a rate of 0.1 to 1"),
    "rate-of-the-sum": (SGD, {"lr": 30.0}, BatchIdeal(), r"is 30, .* take a rate of 0.1 to 1"),
    "by-momentum": (SGD, {"lr": 1.0, "momentum": 0.95}, BatchIdeal(), r"is 20, .* take a rate of 0.1 to 1"),
    "mean-loss": (SGD, {"lr": 1e-3}, BatchIdeal(per_sample=False), r"per_sample=True\) and a rate of 0.1 to 1"),
}
NEAR = {
    "usual": (SGD, {"lr": 0.1, "momentum": 0.9}, BatchIdeal()),
    "small-with-momentum": (SGD, {"lr": 1e-3, "momentum": 0.9}, BatchIdeal()),
    "high": (SGD, {"lr": 3.0}, BatchIdeal(0.3)),
    "mean-loss": (SGD, {"lr": 300.0}, BatchIdeal(per_sample=False)),
    "waiting-for-a-schedule": (SGD, {"lr": 0.0}, BatchIdeal()),
    "momentum-of-one": (SGD, {"lr": 1e-3, "momentum": 1.0}, BatchIdeal()),
    "adam": (Adam, {"lr": 1e-3}, BatchIdeal()),
    "proportional": (SGD, {"lr": 1e-3}, Proportional()),
}


@pytest.mark.parametrize(("kind", "options", "rule", "message"), FAR.values(), ids=FAR)
def test_rate_far_from_any_that_trains_is_warned_of_once(kind, options, rule, message):
    model = mlp()
    with pytest.warns(UserWarning, match=message) as found:
        optimizer = GradientOnly(kind(model.parameters(), **options), model, rule)
    train(model, optimizer, batches(2))  # any other warning is an error
    assert len(found) == 1
    assert found[0].filename == __file__


@pytest.mark.parametrize(("kind", "options", "rule"), NEAR.values(), ids=NEAR)
def test_rates_that_train_are_not_warned_of(kind, options, rule):
    model = mlp()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        GradientOnly(kind(model.parameters(), **options), model, rule)


def test_a_with_block_of_a_detached_wrapper_is_refused():
    model = nn.Linear(3, 2)
    opt = GradientOnly(torch.optim.SGD(model.parameters(), lr=0.1), model, Proportional())
    with opt:
        pass
    with pytest.raises(RuntimeError, match="this GradientOnly is detached, and its steps are plain"), opt:
        pass
