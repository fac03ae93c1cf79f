"""What the wrapped optimizer is given from a checkpoint: torch takes almost anything, to fail in a later step."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ..checkpoint import ANYTHING, DICT, Fits, Maybe, broadcasts, check, is_number

_REMEDY = "load what this optimizer saved of the same parameters, or begin without a state"
_KEY = Fits("an index or a name", lambda value: isinstance(value, (int, str)))
_SCALAR = Fits("a number", lambda value: is_number(value) or (isinstance(value, Tensor) and value.numel() == 1))


def load(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Load a state dict into an optimizer, or leave it as it was.

    Raises:
        ValueError: the state dict is of another optimizer or of other parameters, as far as can be told.
    """
    if type(optimizer).load_state_dict is not Optimizer.load_state_dict:
        optimizer.load_state_dict(state_dict)  # what it loads, and refuses, is its own affair
        return
    options = [[key for key in group if key in optimizer.defaults] for group in optimizer.param_groups]
    before = dict(vars(optimizer))  # loading makes new groups and a new state, and leaves the old ones alone
    # As a hook it sees what is loaded, after the hooks of others.
    checked = optimizer.register_load_state_dict_pre_hook(_check)
    try:
        try:
            optimizer.load_state_dict(state_dict)
        finally:
            _check_options(optimizer, options)  # also where loading failed: it is the likely reason
    except Exception:
        vars(optimizer).clear()
        vars(optimizer).update(before)
        raise
    finally:
        checked.remove()


def _check(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Refuse groups of other sizes or with other kinds of options, and a state of what is not there."""
    path, groups = f"{type(optimizer).__name__}: state_dict", optimizer.param_groups
    check(state_dict, {"state": DICT, "param_groups": [DICT for _ in groups], ...: ANYTHING}, path, _REMEDY)
    state, saved_groups = state_dict["state"], state_dict["param_groups"]
    owners: dict[Any, Tensor] = {}
    for number, (saved, group) in enumerate(zip(saved_groups, groups, strict=True)):
        options = {key: _like(group[key]) for key in optimizer.defaults if key in group and key in saved}
        # Schedulers and users put entries of their own there.
        wanted: dict[Any, Any] = {"params": [_KEY for _ in group["params"]], **options, ...: ANYTHING}
        check(saved, wanted, f"{path}['param_groups'][{number}]", _REMEDY)
        owners.update(zip(saved["params"], group["params"], strict=True))
    kinds = {type(key) for key in owners}
    for key in state:
        if type(key) in kinds:  # others are what an optimizer remembers beside its parameters
            check(key, Fits("one of those in 'params'", owners.__contains__), f"{path}['state']: the key", _REMEDY)
            check(state[key], DICT, f"{path}['state'][{key!r}]", _REMEDY)
    if type(optimizer).__module__.startswith("torch.optim."):
        for saved in saved_groups:
            _check_alike({key: state[key] for key in saved["params"] if state.get(key)}, owners, f"{path}['state']")


def _check_alike(entries: dict[Any, Mapping[str, Any]], owners: dict[Any, Tensor], path: str) -> None:
    """Refuse an entry that lacks what others of its group have, or holds a tensor that does not go with its parameter.

    What the optimizers of torch.optim remember is numbers, and tensors that broadcast to the parameter.
    """
    # Whether it is a tensor, by name; Adafactor remembers other things of a matrix than of a vector.
    remembered: dict[bool, dict[str, bool]] = {True: {}, False: {}}
    for key, entry in entries.items():
        names = remembered[owners[key].dim() > 1]
        names.update({name: names.get(name, False) or isinstance(value, Tensor) for name, value in entry.items()})
    for key, entry in entries.items():
        names = remembered[owners[key].dim() > 1]
        wanted = {name: _tensor_for(owners[key]) if tensor else Maybe(_SCALAR) for name, tensor in names.items()}
        check(entry, wanted, f"{path}[{key!r}]", _REMEDY)


def _check_options(optimizer: Optimizer, options: list[list[str]]) -> None:
    """Refuse a group that loading has left without one of its options; those that are new in torch it fills in."""
    for number, (group, wanted) in enumerate(zip(optimizer.param_groups, options, strict=True)):
        path = f"{type(optimizer).__name__}: state_dict['param_groups'][{number}]"
        check(group, {**dict.fromkeys(wanted, ANYTHING), ...: ANYTHING}, path, _REMEDY)


def _like(option: Any) -> Any:
    if isinstance(option, (tuple, list)):
        return [_like(part) for part in option]
    return Maybe(_SCALAR) if _SCALAR.test(option) else ANYTHING


def _tensor_for(parameter: Tensor) -> Maybe:
    shape = tuple(parameter.shape)
    what = f"a tensor that broadcasts to its parameter's shape {shape}"
    return Maybe(Fits(what, lambda value: isinstance(value, Tensor) and broadcasts(value, shape)))
