"""A wrapper is the optimizer it wraps, for everything that reads, writes, saves or schedules it."""

import copy
import inspect

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, ReduceLROnPlateau, StepLR
from torch.optim.optimizer import (
    _global_optimizer_pre_hooks,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from adiv_optim import GradientOnly, Proportional, Whitened
from adiv_optim.optim import OptimizerWrapper

OPTIMIZERS = {
    "sgd": lambda parameters: SGD(parameters, lr=0.1),
    "sgd-momentum": lambda parameters: SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: AdamW(parameters, lr=0.01),
}
each_optimizer = pytest.mark.parametrize("build", OPTIMIZERS.values(), ids=OPTIMIZERS)


def wrap_bare(optimizer, model):
    return OptimizerWrapper(optimizer)


def wrap_gradient_only(optimizer, model):
    return GradientOnly(optimizer, model, Proportional())


WRAPPERS = {"wrapper": wrap_bare, "gradient-only": wrap_gradient_only}
each_wrapper = pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)


def mlp():
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def wrapped(wrap=wrap_gradient_only, build=OPTIMIZERS["sgd-momentum"]):
    model = mlp()
    return model, wrap(build(model.parameters()), model)


def batches(count, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(6, 4, dtype=torch.float64, generator=generator) for _ in range(count)]


def train(model, optimizer, xs):
    for x in xs:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def assert_same_parameters(one, other):
    for (name, p), (_, q) in zip(one.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(p, q), name


@each_wrapper
@each_optimizer
def test_is_an_optimizer_whose_parts_are_the_inner_ones(wrap, build):
    model = mlp()
    inner = build(model.parameters())
    optimizer = wrap(inner, model)
    assert isinstance(optimizer, Optimizer)
    assert optimizer.inner is inner
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state is inner.state
    assert optimizer.defaults is inner.defaults


@each_wrapper
def test_parts_can_be_set_and_are_set_on_the_inner_optimizer(wrap):
    _, optimizer = wrapped(wrap)
    for name in ("param_groups", "state", "defaults"):
        value = copy.copy(getattr(optimizer, name))
        setattr(optimizer, name, value)
        assert getattr(optimizer.inner, name) is value


@each_wrapper
def test_train_and_eval_are_there_if_the_inner_optimizer_has_them(wrap):
    class TwoWeights(SGD):
        def train(self):
            self.mode = "train"

        def eval(self):
            self.mode = "eval"

    model, optimizer = wrapped(wrap, lambda parameters: TwoWeights(parameters, lr=0.1))
    outer = OptimizerWrapper(optimizer)
    outer.eval()
    assert optimizer.inner.mode == "eval"
    optimizer.train()
    assert optimizer.inner.mode == "train"
    assert not hasattr(wrapped(wrap)[1], "train")
    with pytest.raises(AttributeError, match=r"has no eval\(\), since the optimizer it wraps, SGD, has none"):
        wrapped(wrap)[1].eval()
    whitened = Whitened(optimizer, model)
    with pytest.raises(AttributeError, match=r"Whitened has no eval\(\).*mix them with the model's own"):
        whitened.eval()


@each_wrapper
def test_has_no_blanket_getattr(wrap):
    _, optimizer = wrapped(wrap)
    assert "__getattr__" not in dir(type(optimizer))
    with pytest.raises(AttributeError):
        optimizer.no_such_thing  # noqa: B018


@each_wrapper
@each_optimizer
def test_nothing_of_ours_is_in_the_inner_state(wrap, build):
    plain = mlp()
    bare = build(plain.parameters())
    train(plain, bare, batches(2))
    model, optimizer = wrapped(wrap, build)
    train(model, optimizer, batches(2))
    assert optimizer.inner.state.keys() == set(model.parameters()) & optimizer.inner.state.keys()
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        assert bare.state[p].keys() == optimizer.inner.state[q].keys()
    assert [group.keys() for group in bare.param_groups] == [group.keys() for group in optimizer.param_groups]
    assert optimizer.inner.__dict__.keys() - {"_zero_grad_profile_name"} == bare.__dict__.keys() - {
        "_zero_grad_profile_name"
    }


@each_wrapper
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad(wrap, set_to_none):
    model, optimizer = wrapped(wrap)
    model(batches(1)[0]).sum().backward()
    optimizer.zero_grad(set_to_none=set_to_none)
    for parameter in model.parameters():
        assert parameter.grad is None if set_to_none else torch.equal(parameter.grad, torch.zeros_like(parameter))


@each_wrapper
def test_add_param_group_reaches_the_step(wrap):
    model = mlp()
    optimizer = wrap(SGD(model[0].parameters(), lr=0.1), model)
    before = model[2].weight.detach().clone()
    train(model, optimizer, batches(1))
    assert torch.equal(model[2].weight, before)
    optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.5})
    assert len(optimizer.inner.param_groups) == 2
    train(model, optimizer, batches(1))
    torch.testing.assert_close(model[2].weight, before - 0.5 * model[2].weight.grad, rtol=1e-14, atol=1e-15)


SCHEDULERS = {
    "step": (lambda o: StepLR(o, 1, gamma=0.5), ()),
    "one-cycle": (lambda o: OneCycleLR(o, max_lr=1.0, total_steps=10, cycle_momentum=False), ()),
    "cosine": (lambda o: CosineAnnealingLR(o, 10), ()),
    "plateau": (lambda o: ReduceLROnPlateau(o, factor=0.5, patience=0), (1.0,)),
}


@each_wrapper
@pytest.mark.parametrize(("build", "metrics"), SCHEDULERS.values(), ids=SCHEDULERS)
def test_schedulers_change_the_learning_rate_that_is_applied(wrap, build, metrics):
    model = mlp()
    optimizer = wrap(SGD(model.parameters(), lr=0.1), model)
    bare = SGD(mlp().parameters(), lr=0.1)
    scheduler, twin = build(optimizer), build(bare)
    rates = []
    for x in batches(4):
        before = [p.detach().clone() for p in model.parameters()]
        train(model, optimizer, [x])
        rates.append(bare.param_groups[0]["lr"])
        bare.step()
        for old, parameter in zip(before, model.parameters(), strict=True):
            torch.testing.assert_close(parameter.detach(), old - rates[-1] * parameter.grad, rtol=1e-14, atol=1e-15)
        scheduler.step(*metrics)
        twin.step(*metrics)
    assert len(set(rates)) > 1


@each_wrapper
def test_step_hooks_fire_once_around_the_step(wrap):
    model, optimizer = wrapped(wrap)
    calls = []
    optimizer.register_step_pre_hook(lambda *args: calls.append("outer pre"))
    optimizer.register_step_post_hook(lambda *args: calls.append("outer post"))
    optimizer.inner.register_step_pre_hook(lambda *args: calls.append("inner pre"))
    optimizer.inner.register_step_post_hook(lambda *args: calls.append("inner post"))
    train(model, optimizer, batches(1))
    assert calls == ["outer pre", "inner pre", "inner post", "outer post"]


@each_wrapper
def test_step_hooks_are_given_the_wrapper_and_removed_by_their_handle(wrap):
    model, optimizer = wrapped(wrap)
    seen = []
    handle = optimizer.register_step_post_hook(lambda opt, args, kwargs: seen.append(opt))
    train(model, optimizer, batches(1))
    handle.remove()
    train(model, optimizer, batches(1))
    assert len(seen) == 1
    assert seen[0] is optimizer


@each_wrapper
def test_global_step_hooks_fire_once_around_the_outermost_step(wrap):
    model, within = wrapped(wrap)
    optimizer = OptimizerWrapper(within)
    before, seen = model[0].weight.detach().clone(), []
    handles = [
        register_optimizer_step_pre_hook(lambda *args: seen.append((args[0], torch.equal(model[0].weight, before)))),
        register_optimizer_step_post_hook(lambda *args: seen.append((args[0], torch.equal(model[0].weight, before)))),
    ]
    inner_step, added = within.inner.step, []
    within.inner.step = lambda: added.append(register_optimizer_step_pre_hook(lambda *args: None)) or inner_step()
    try:
        train(model, optimizer, batches(1))
        assert seen == [(optimizer, True), (optimizer, False)]
        optimizer.zero_grad()
        within.inner.step = None  # not callable: the hooks come back after an error too
        with pytest.raises(TypeError):
            optimizer.step()
        assert seen[2:] == [(optimizer, False)]
        seen.clear()
        train(model, SGD(model.parameters(), lr=0.1), batches(1))
        assert len(seen) == 2
        assert [handle.id in _global_optimizer_pre_hooks for handle in added] == [True]
    finally:
        for handle in handles + added:
            handle.remove()


@each_wrapper
def test_state_dict_hooks_fire_once_and_may_replace(wrap):
    _, optimizer = wrapped(wrap)
    calls = []
    optimizer.register_state_dict_pre_hook(lambda opt: calls.append("save pre"))
    optimizer.register_state_dict_post_hook(lambda opt, state: {**state, "extra": calls.append("save post")})
    optimizer.register_load_state_dict_pre_hook(
        lambda opt, state: calls.append("load pre") or {k: v for k, v in state.items() if k != "extra"}
    )
    optimizer.register_load_state_dict_post_hook(lambda opt: calls.append("load post"))
    state = optimizer.state_dict()
    assert "extra" in state
    optimizer.load_state_dict(state)
    assert calls == ["save pre", "save post", "load pre", "load post"]


@each_wrapper
def test_closure_is_called_once_with_gradients_and_its_loss_returned(wrap):
    model, optimizer = wrapped(wrap)
    twin, twin_optimizer = copy.deepcopy((model, optimizer))
    (x,) = batches(1)
    calls = []

    def closure():
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    with torch.no_grad():
        loss = optimizer.step(closure)
    assert calls == [True]
    assert torch.equal(loss, twin(x).square().mean())
    train(twin, twin_optimizer, [x])
    assert_same_parameters(model, twin)


@each_wrapper
def test_step_without_closure_returns_none(wrap):
    _, optimizer = wrapped(wrap)
    assert optimizer.step() is None


@each_wrapper
def test_a_step_in_inference_mode_is_the_step_and_so_are_those_after_it(wrap):
    model, optimizer = wrapped(wrap)
    twin, plain = copy.deepcopy((model, optimizer))
    for number, x in enumerate(batches(4)):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        with torch.inference_mode(number % 2 == 0):
            optimizer.step()
        train(twin, plain, [x])
    assert not any(value.is_inference() for state in optimizer.state.values() for value in state.values())
    assert_same_parameters(model, twin)


@each_wrapper
def test_lbfgs_is_refused_with_a_reason(wrap):
    model = mlp()
    with pytest.raises(TypeError, match="cannot wrap LBFGS: it evaluates its closure many times"):
        wrap(LBFGS(model.parameters()), model)
    assert type(model[0]) is nn.Linear


NOT_OPTIMIZERS = {"class": SGD, "model": nn.Linear(1, 1), "parameters": [torch.zeros(1)], "none": None}


@each_wrapper
@pytest.mark.parametrize("found", NOT_OPTIMIZERS.values(), ids=NOT_OPTIMIZERS)
def test_what_is_no_optimizer_is_refused(wrap, found):
    model = mlp()
    with pytest.raises(TypeError, match=r"wraps a torch\.optim\.Optimizer, found .*build the optimizer first") as told:
        wrap(found, model)
    assert ("wrong order" in str(told.value).replace("\n", " ")) == isinstance(found, nn.Module)
    assert type(model[0]) is nn.Linear


def test_every_public_method_of_optimizer_is_there():
    for name, _ in inspect.getmembers(Optimizer, inspect.isfunction):
        if not name.startswith("_"):
            assert callable(getattr(OptimizerWrapper, name)), name
