"""State dicts that are damaged, or of something else: refused by the first difference, and nothing has changed."""

import copy
import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW

from tests.helpers.covering import paired
from tests.helpers.revive import leaves
from tests.helpers.revive import same_leaves as same
from tests.helpers.seeds import manual_seed
from tests.wrappers import REMEMBERING, WRAPPERS

pytestmark = pytest.mark.usefixtures("in_float64")
State = dict[str, Any]
Change = Callable[[Any], Any]


def built(wrapper: str, steps: int = 3) -> Any:
    """A wrapper that has taken so many steps."""
    manual_seed(0)
    model = nn.Sequential(nn.Conv1d(2, 4, 3, groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(12, 5), nn.Linear(5, 3))
    optimizer = WRAPPERS[wrapper](AdamW(model.parameters(), lr=1e-2), model, torch.zeros(1, 2, 5))
    train(model, optimizer, steps)
    return optimizer


def train(model: nn.Module, optimizer: Any, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(torch.randn(7, 2, 5)), torch.randint(3, (7,))).backward()
        optimizer.step()


def path_of(optimizer: Any) -> list[Any]:
    """Weights and state now, and where two more steps lead."""
    manual_seed(1)
    now = copy.deepcopy(leaves(optimizer))
    train(optimizer.model, optimizer, 2)
    return now + leaves(optimizer)


@cache
def undisturbed(wrapper: str) -> tuple[Any, list[Any]]:
    optimizer = built(wrapper)
    return optimizer, path_of(copy.deepcopy(optimizer))


def saved(wrapper: str) -> State:
    """A state dict of `built(wrapper)` that may be changed."""
    return copy.deepcopy(undisturbed(wrapper)[0].state_dict())


def assert_refused(wrapper: str, state: Any, message: str) -> None:
    before, path = undisturbed(wrapper)
    optimizer = copy.deepcopy(before)
    with pytest.raises(ValueError, match=f"{re.escape(message)}.*; .*[.]$"):  # the remedy comes last
        optimizer.load_state_dict(state)
    assert same(path_of(optimizer), path)


#: name → what is done to a state dict, and what torch says of it.
TORCHS: dict[str, tuple[Change, type[Exception], str]] = {
    "no-groups": (lambda state: state.pop("param_groups"), KeyError, "param_groups"),
    "groups-truncated": (lambda state: state["param_groups"].pop(), ValueError, "number of parameter groups"),
    "parameters-truncated": (lambda state: state["param_groups"][0]["params"].pop(), ValueError, "match the size"),
}


@paired("wrapper damage", {name: name for name in WRAPPERS}, TORCHS)
def test_state_that_torch_refuses_changes_nothing(wrapper, damage):
    change, error, message = damage
    before, wanted = undisturbed(wrapper)
    optimizer, state = copy.deepcopy(before), built(wrapper, steps=2).state_dict()
    broken = copy.deepcopy(state)
    change(broken)
    with pytest.raises(error, match=message):
        optimizer.load_state_dict(broken)
    assert same(path_of(optimizer), wanted)
    optimizer.load_state_dict(state)  # what is not damaged is taken
    assert not same(path_of(optimizer), wanted)


def damages(value: Any) -> list[Any]:
    """What cannot be in the place of a value."""
    if isinstance(value, dict):
        return [dict(list(value.items())[1:]), {**value, f"{next(iter(value))}.unknown": 1}]
    if isinstance(value, list | tuple):
        return [None, 1, value[:-1]]
    if isinstance(value, Tensor):
        return [value.tolist(), torch.full_like(value, torch.nan), value[..., :-1], -value / 0]
    return [None, True, torch.nan, -1] if isinstance(value, float) else [None, True, -1]


def with_damage(part: Any) -> Iterator[tuple[str, Any]]:
    """Every damage of every part, and where it is."""
    for broken in damages(part):
        yield "", broken
    places = part.items() if isinstance(part, dict) else enumerate(part) if isinstance(part, list | tuple) else ()
    for key, value in places:
        for path, broken in with_damage(value):
            copied = part.copy() if isinstance(part, dict) else list(part)
            copied[key] = broken
            yield f"[{key!r}]{path}", copied


@pytest.mark.parametrize("wrapper", REMEMBERING)
def test_damaged_memory_of_the_wrapper_is_refused(wrapper):
    """Of each part, by its place or that of what it is part of; the remedy comes last, and nothing has changed."""
    before, wanted = undisturbed(wrapper)
    optimizer, state, count = copy.deepcopy(before), saved(wrapper), 0
    kept = leaves(optimizer)
    for key, entries in state["state"].items():
        own = {name: value for name, value in entries.items() if not name.startswith("adiv_optim.")}
        mine = {name: value for name, value in entries.items() if name not in own}
        for path, broken in with_damage(mine):
            if not broken:
                continue  # nothing is remembered of it
            with pytest.raises(ValueError, match=r"; .*[.]$") as told:
                optimizer.load_state_dict({**state, "state": {**state["state"], key: {**own, **broken}}})
            place = str(told.value).partition(" ")[2]
            assert place.startswith((f"state_dict['state'][{key}]{path} ", f"state_dict['state'][{key}] ")), path
            assert same(leaves(optimizer), kept), path
            count += 1
    assert count > 10
    assert same(path_of(optimizer), wanted)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_what_is_no_state_dict_is_refused(wrapper):
    assert_refused(wrapper, None, ", wanted a dict")


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_state_of_another_wrapper_is_refused(wrapper):
    for other in REMEMBERING:
        if other != wrapper:
            assert_refused(wrapper, saved(other), "state_dict['state'][")
