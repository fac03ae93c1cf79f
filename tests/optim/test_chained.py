"""ChainedOptimizer: a pair of optimizers steps, saves and is wrapped as one optimizer over all the parameters is."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim import LBFGS, SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR

from adiv_optim import ChainedOptimizer, Whitened
from tests.helpers.cases import relative_error
from tests.helpers.revive import through_a_file
from tests.helpers.steps import network, same, weights
from tests.wrappers import Wrapper, each_wrapper

pytestmark = pytest.mark.usefixtures("in_float64")

SIZES = (5, 8, 8, 3)


def split(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """The matrix inside, and the rest."""
    return [model[2].weight], [p for p in model.parameters() if p is not model[2].weight]


def pair(model: nn.Module) -> list[Optimizer]:
    inside, rest = split(model)
    return [SGD(inside, lr=0.1, momentum=0.9), AdamW(rest, lr=0.01, weight_decay=0.1)]


def backward(model: nn.Module, step: int = 0) -> Tensor:
    x = torch.randn(12, 5, generator=torch.Generator().manual_seed(step))
    loss = nn.functional.cross_entropy(model(x), torch.arange(12) % 3)
    loss.backward()
    return loss


def train(model: nn.Module, optimizer: Any, steps: range = range(6)) -> list[Tensor]:
    for step in steps:
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
    return weights(model)


@each_wrapper
def test_every_wrapper_takes_the_steps_of_one_optimizer(wrap: Wrapper):
    paths, shares = [], []
    for chained in (True, False):
        model = network(*SIZES)
        inside, rest = split(model)
        inner: Optimizer = SGD([{"params": inside}, {"params": rest, "lr": 0.05}], lr=0.1, momentum=0.9)
        if chained:
            inner = ChainedOptimizer([SGD(inside, lr=0.1, momentum=0.9), SGD(rest, lr=0.05, momentum=0.9)])
        optimizer = wrap(inner, model, torch.randn(2, 5))
        paths.append(train(model, optimizer))
        shares.append(optimizer.coverage().element_share)
    assert max(relative_error(*pair) for pair in zip(*paths, strict=True)) <= 1e-13
    assert shares[0] == shares[1] > 0.8


def whole(chained: Any, fresh: Any) -> None:
    fresh.load_state_dict(through_a_file(chained.state_dict()))


def by_parts(chained: Any, fresh: Any) -> None:
    """What each of the pair would save alone."""
    for optimizer, part in zip(fresh.optimizers, chained.optimizers, strict=True):
        optimizer.load_state_dict(through_a_file(part.state_dict()))


def by_names(chained: Any, fresh: Any) -> None:
    saved = copy.deepcopy(get_optimizer_state_dict(chained.model, chained))
    assert saved["state"].keys() == dict(chained.model.named_parameters()).keys()
    set_optimizer_state_dict(fresh.model, fresh, saved)


@pytest.mark.parametrize("load", [whole, by_parts, by_names])
def test_what_is_saved_is_loaded_and_copies_go_on_by_themselves(load: Callable[[Any, Any], None]):
    model = network(*SIZES)
    chained: Any = ChainedOptimizer(pair(model))
    train(model, chained)
    twins = [copy.deepcopy((model, chained)), pickle.loads(pickle.dumps((model, chained)))]
    fresh = copy.deepcopy(model)
    twins.append((fresh, ChainedOptimizer(pair(fresh))))
    chained.model, twins[-1][1].model = model, fresh
    load(chained, twins[-1][1])
    wanted = train(model, chained, steps=range(6, 9))
    for other, optimizer in twins:
        assert same(train(other, optimizer, steps=range(6, 9)), wanted)
        for part in optimizer.optimizers:
            assert part.state.keys() == {p for group in part.param_groups for p in group["params"]}


class Halved(SGD):
    """Moments in float16, which it keeps in loading, as optimizers with 8-bit states keep theirs."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for (_, saved), entries in zip(sorted(state_dict["state"].items()), self.state.values(), strict=True):
            entries["momentum_buffer"] = saved["momentum_buffer"]


def test_an_optimizer_loads_its_share_in_its_own_way():
    model = network(*SIZES)
    (inside, rest), fresh = split(model), copy.deepcopy(model)
    chained = ChainedOptimizer([AdamW(inside), Halved(rest, lr=0.1, momentum=0.9)])
    train(model, chained, steps=range(1))
    for entries in chained.optimizers[1].state.values():
        entries["momentum_buffer"] = entries["momentum_buffer"].half()
    inside, rest = split(fresh)
    twin = ChainedOptimizer([AdamW(inside), Halved(rest, lr=0.1, momentum=0.9)])
    twin.load_state_dict(through_a_file(chained.state_dict()))
    for part, other in zip(chained.optimizers, twin.optimizers, strict=True):
        for mine, loaded in zip(part.state.values(), other.state.values(), strict=True):
            assert same([*mine.values()], [*loaded.values()])
            assert [value.dtype for value in mine.values()] == [value.dtype for value in loaded.values()]


def test_closure_and_hooks_run_once_around_all_steps():
    model, calls = network(*SIZES), []
    chained = ChainedOptimizer(pair(model))
    chained.register_step_pre_hook(lambda *_: calls.append("before"))
    chained.register_step_post_hook(lambda *_: calls.append("after"))

    def closure() -> Tensor:
        calls.append(torch.is_grad_enabled())
        return backward(model)

    with torch.no_grad():
        assert chained.step(closure).item() > 0
    assert calls == ["before", True, "after"]


def test_schedulers_reach_every_group():
    model = network(*SIZES)
    chained = ChainedOptimizer(pair(model))
    schedule = CosineAnnealingLR(chained, T_max=2)
    train(model, chained, steps=range(1))
    schedule.step()
    assert [group["lr"] for group in chained.param_groups] == pytest.approx([0.05, 0.005])
    with pytest.raises(ValueError, match="cycle_momentum"):
        OneCycleLR(chained, 0.1, total_steps=3)
    OneCycleLR(chained, [0.1, 0.01], total_steps=3, cycle_momentum=False)


MISTAKES = {
    "none": (lambda model: [], ValueError, r"optimizers is empty; pass \[Muon"),
    "no list": (lambda model: SGD(model.parameters()), TypeError, r"optimizers is an optimizer; pass a list of them"),
    "no optimizer": (lambda model: [model], TypeError, r"optimizers\[0\] is of type Sequential"),
    "LBFGS": (lambda model: [LBFGS(model.parameters())], TypeError, r"optimizers\[0\] is of type LBFGS"),
    "twice": (lambda model: [*pair(model), SGD([model[2].weight])], ValueError, r"\[0\] and optimizers\[2\] both hold"),
    "a wrapper": (
        lambda model: [Whitened(SGD(model.parameters()), model)], TypeError, r"write Whitened\(ChainedOptimizer\(",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named(name):
    build, error, message = MISTAKES[name]
    with pytest.raises(error, match=message):
        ChainedOptimizer(build(network(*SIZES)))


def test_groups_of_nobody_are_refused():
    chained = ChainedOptimizer(pair(network(*SIZES)))
    with pytest.raises(ValueError, match="does not say which optimizer"):
        chained.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    with pytest.raises(ValueError, match=r"found 1 groups, wanted 2, \[1, 1\] of each"):
        chained.param_groups = chained.param_groups[:1]
