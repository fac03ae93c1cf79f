"""State dicts that are damaged, or of something else: refused by the first difference, and nothing has changed."""

import ast
import copy
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW
from torch.utils import _pytree as pytree

from tests.helpers.covering import paired
from tests.helpers.seeds import manual_seed
from tests.wrappers import REMEMBERING, WRAPPERS

pytestmark = pytest.mark.usefixtures("in_float64")
State = dict[str, Any]
Change = Callable[[Any], Any]


def built(wrapper: str, hidden: int = 5, steps: int = 3) -> Any:
    """A wrapper that has stepped on a network with so many hidden units."""
    manual_seed(0)
    model = nn.Sequential(nn.Conv1d(2, 4, 3, groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(12, hidden), nn.ReLU())
    model.append(nn.Linear(hidden, 3))
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
    now = copy.deepcopy([optimizer.model.state_dict(), optimizer.state_dict()])
    train(optimizer.model, optimizer, 2)
    return pytree.tree_leaves([now, optimizer.model.state_dict(), optimizer.state_dict()])


def same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(one, other, strict=True)
    )


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


def damaged(state: State, path: str, change: Change) -> State:
    """The state dict with another value at a path, which is written as in the messages."""
    if not path:
        return change(state)
    *outer, last = (ast.literal_eval(key) for key in re.findall(r"\[(.+?)\]", path))
    part: Any = state
    for key in outer:
        if isinstance(part[key], tuple):
            part[key] = list(part[key])
        part = part[key]
    part[last] = change(part[last])
    return state


def to(value: Any) -> Change:
    return lambda _: value


def without(key: str) -> Change:
    return lambda entries: {name: value for name, value in entries.items() if name != key}


def plus(key: Any) -> Change:
    return lambda entries: {**entries, key: {}}


def shorter(sequence: Any) -> Any:
    return sequence[:-1]


def poisoned(tensor: Tensor) -> Tensor:
    return torch.full_like(tensor, torch.nan)


F64 = "is a torch.float64 tensor of shape"
#: name → where the damage is, what it is, and what torch says of it.
TORCHS: dict[str, tuple[str, Change, type[Exception], str]] = {
    "no-groups": ("", without("param_groups"), KeyError, "param_groups"),
    "groups-truncated": ("['param_groups']", shorter, ValueError, "different number of parameter groups"),
    "parameters-truncated": (
        "['param_groups'][0]['params']",
        shorter,
        ValueError,
        "doesn't match the size",
    ),
}


@paired("wrapper damage", {name: name for name in WRAPPERS}, TORCHS)
def test_state_that_torch_refuses_changes_nothing(wrapper, damage):
    path, change, error, message = damage
    before, wanted = undisturbed(wrapper)
    optimizer, state = copy.deepcopy(before), built(wrapper, steps=2).state_dict()
    with pytest.raises(error, match=message):
        optimizer.load_state_dict(damaged(copy.deepcopy(state), path, change))
    assert same(path_of(optimizer), wanted)
    optimizer.load_state_dict(state)  # what is not damaged is taken
    assert not same(path_of(optimizer), wanted)


METHOD, WHITE = "['method']", "['method']['layers']['3.weight']"
FACTOR = "['method']['factors']['3.weight']"
#: name → where the damage is, what it is, and what the message says of that place, in what each wrapper remembers.
MEMORY: dict[str, dict[str, tuple[str, Change, str]]] = {
    "unit-consistent": {
        "no-dict": (METHOD, to(None), " is None (NoneType), wanted a dict"),
        "steps-missing": (METHOD, without("steps"), " lacks 'steps': it is a dict of 'log_scales', 'factors', wanted"),
        "steps-negative": (f"{METHOD}['steps']", to(-1), " is -1 (int), wanted an integer of at least 0"),
        "scales-nan": (f"{METHOD}['log_scales']", poisoned, f" {F64} (9,) with NaN or inf, wanted"),
        "scales-truncated": (f"{METHOD}['log_scales']", shorter, f" {F64} (8,), wanted a floating-point tensor"),
        "scales-no-tensor": (f"{METHOD}['log_scales']", Tensor.tolist, " is a list of 9, wanted a floating-point"),
        "factors-no-dict": (f"{METHOD}['factors']", to([]), " is a list of 0, wanted a dict"),
        "factors-missing": (f"{METHOD}['factors']", without("3.bias"), " is of other parameters: ['3.bias']"),
        "factors-unknown": (f"{METHOD}['factors']", plus("9.bias"), " is of other parameters: ['9.bias']"),
        "factors-truncated": (FACTOR, shorter, " is a list of 1, wanted two tensors of numbers above 0 that"),
        "factor-truncated": (FACTOR, lambda ends: [ends[0][1:], ends[1]], " is a list of 2, wanted two tensors of"),
        "factor-negative": (FACTOR, lambda ends: [ends[0], -ends[1]], " is a list of 2, wanted two tensors of numbers"),
        "factor-inf": (f"{FACTOR}[1]", lambda end: end / 0, f" {F64} (1, 12) with NaN or inf, wanted"),
        "factor-no-tensor": (FACTOR, to([1, 2]), " is a list of 2, wanted two tensors of numbers"),
        "factors-no-list": (FACTOR, to(1), " is 1 (int), wanted two tensors of numbers"),
    },
    "whitened": {
        "no-dict": (METHOD, to(None), " is None (NoneType), wanted a dict"),
        "steps-no-count": (f"{METHOD}['steps']", to(True), " is True (bool), wanted an integer of at least 0"),
        "layer-missing": (f"{METHOD}['layers']", without("3.weight"), " lacks '3.weight': it is a dict of '0.weight'"),
        "layer-unknown": (f"{METHOD}['layers']", plus("9.weight"), " has an unknown '9.weight': it is a dict of"),
        "layer-no-dict": (WHITE, to([]), " is a list of 0, wanted a dict"),
        "covariance-missing": (WHITE, without("memory"), " lacks 'memory': it is a dict of 'rows', wanted"),
        "covariance-nan": (f"{WHITE}['memory'][0]", poisoned, f" {F64} (1, 13, 13) with NaN or inf, wanted"),
        "covariance-truncated": (f"{WHITE}['memory']", shorter, " is a list of 0, wanted a list of 1"),
        "block-truncated": (f"{WHITE}['memory'][0]", lambda block: block[:, 1:], f" {F64} (1, 12, 13), wanted"),
        "rows-nan": (f"{WHITE}['rows']", to(torch.nan), " is nan (float), wanted a finite number"),
        "rows-negative": (f"{WHITE}['rows']", to(-1.0), " is -1.0 (float), wanted a finite number of at least 0"),
    },
    "whitened-rank": {
        "memory-truncated": (f"{WHITE}['memory']", shorter, " is a list of 2, wanted a list of 3"),
        "basis-nan": (f"{WHITE}['memory'][0]", poisoned, f" {F64} (1, 13, 2) with NaN or inf, wanted"),
        "basis-truncated": (f"{WHITE}['memory'][0]", lambda u: u[:, 1:], f" {F64} (1, 12, 2), wanted"),
    },
}  # fmt: skip


# The same covariances, which the same code looks at.
MEMORY["preconditioned"] = {name: MEMORY["whitened"][name] for name in ("no-dict", "layer-missing", "covariance-nan")}


@pytest.mark.parametrize(("wrapper", "name"), [(wrapper, name) for wrapper in MEMORY for name in MEMORY[wrapper]])
def test_damaged_memory_of_the_wrapper_is_refused(wrapper, name):
    path, change, message = MEMORY[wrapper][name]
    assert_refused(wrapper, damaged(saved(wrapper), path, change), f"state_dict{path}{message}")


def test_memory_of_another_setting_is_refused_by_both():
    state = damaged(saved("whitened-rank"), f"{METHOD}['settings']['rank']", to(1))
    assert_refused("whitened-rank", state, "state_dict['method'] was saved with rank=1, this has rank=2")
    state = damaged(saved("whitened"), f"{METHOD}['settings']['max_dim']", to(4))
    assert_refused("whitened", state, "state_dict['method'] was saved with max_dim=4, this has max_dim=1024")
    state = damaged(saved("whitened"), f"{METHOD}['settings']", to(4))
    assert_refused("whitened", state, "state_dict['method']['settings'] is 4 (int), wanted a dict")


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("state", [None], ids=repr)
def test_what_is_no_state_dict_is_refused(wrapper, state):
    assert_refused(wrapper, state, ", wanted a dict")


#: Where a sixth hidden unit shows first; what InputScaled remembers has a number for each layer, whatever its shape.
OTHER_SHAPES = {
    "unit-consistent": f"['method']['log_scales'] {F64} (10,), wanted a floating-point tensor of shape (9,)",
    "whitened": f"['layers']['5.weight']['memory'][0] {F64} (1, 7, 7), wanted a floating-point tensor of shape (1, 6",
}
OTHER_SHAPES["preconditioned"] = OTHER_SHAPES["whitened"]
OTHER_SHAPES["whitened-rank"] = OTHER_SHAPES["whitened"].replace("7, 7", "7, 2").replace("1, 6", "1, 6, 2")


@pytest.mark.parametrize("wrapper", OTHER_SHAPES)
def test_memory_of_a_model_with_other_shapes_is_refused(wrapper):
    assert_refused(wrapper, built(wrapper, hidden=6).state_dict(), OTHER_SHAPES[wrapper])


def kind(wrapper: str) -> str:
    """What it remembers: those that remember covariances read each other's checkpoints."""
    return "covariances" if wrapper in ("preconditioned", "whitened") else wrapper


@pytest.mark.parametrize(
    ("wrapper", "other"), [(one, other) for one in WRAPPERS for other in REMEMBERING if kind(one) != kind(other)]
)
def test_state_of_another_wrapper_is_refused(wrapper, other):
    assert_refused(wrapper, saved(other), "['method']")


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_state_of_the_same_wrapper_is_taken_and_changes_the_path(wrapper):
    before, path = undisturbed(wrapper)
    optimizer = copy.deepcopy(before)
    optimizer.load_state_dict(saved(wrapper))
    assert same(path_of(optimizer), path)
    optimizer = copy.deepcopy(before)
    optimizer.load_state_dict(built(wrapper, steps=2).state_dict())
    assert not same(path_of(optimizer), path)
