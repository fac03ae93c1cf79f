"""PyTorch's database of optimizers: what a wrapper saves, copies and loads goes on bit for bit."""

import copy
import pickle
from typing import Any

import pytest
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from tests.helpers.optimizers import (
    Around,
    Configuration,
    assert_as_bare,
    assert_equal,
    at_any_rate,
    batches,
    built,
    each_wrapper,
    of_any_state,
    share,
    train,
)
from tests.helpers.processes import needs_distributed
from tests.helpers.revive import through_a_file

pytestmark = [pytest.mark.usefixtures("in_float64"), at_any_rate, of_any_state]


def resume(wrapper: Around, configuration: Configuration) -> None:
    first, last = batches(2)
    model, optimizer = built(wrapper, configuration)
    train(model, optimizer, [first])
    resumed, loaded = built(wrapper, configuration)
    resumed.load_state_dict(model.state_dict())
    loaded.load_state_dict(through_a_file(optimizer.state_dict()))
    pairs = [(resumed, loaded), copy.deepcopy((model, optimizer)), pickle.loads(pickle.dumps((model, optimizer)))]
    train(model, optimizer, [last])
    for twin, twin_optimizer in pairs:
        train(twin, twin_optimizer, [last])
        assert_equal(twin, model)


@each_wrapper
def test_checkpoint_copy_and_pickle_go_on_bit_for_bit(wrapper, everything):
    assert_as_bare(resume, wrapper, share(wrapper, everything, defaults=True))


def set_learning_rate(wrapper: Around, configuration: Configuration) -> None:
    first, last = batches(2)
    model, optimizer = built(wrapper, configuration)
    train(model, optimizer, [first])
    optimizer.param_groups[0]["lr"] = wanted = optimizer.param_groups[0]["lr"] / 2
    resumed, loaded = built(wrapper, configuration)
    resumed.load_state_dict(model.state_dict())
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert getattr(loaded, "inner", loaded).param_groups[0]["lr"] == wanted
    for pair in ((model, optimizer), (resumed, loaded)):
        train(*pair, [last])
    assert_equal(resumed, model)


@each_wrapper
def test_learning_rate_set_before_saving_is_stepped_with_after_loading(wrapper, everything):
    assert_as_bare(set_learning_rate, wrapper, share(wrapper, everything))


def memory(optimizer: Any) -> dict[str, Any]:
    """What a wrapper saves beside the inner optimizer's state."""
    return {key: value for key, value in optimizer.state_dict().items() if key not in ("state", "param_groups")}


def distributed_state(wrapper: Around, configuration: Configuration) -> None:
    first, last = batches(2)
    model, optimizer = built(wrapper, configuration)
    train(model, optimizer, [first])
    options = StateDictOptions(flatten_optimizer_state_dict=configuration.description == "default")
    resumed, loaded = built(wrapper, configuration)
    saved = through_a_file(get_optimizer_state_dict(model, optimizer, options=options))
    set_optimizer_state_dict(resumed, loaded, saved, options=options)
    if kept := memory(optimizer):
        loaded.load_state_dict({**loaded.inner.state_dict(), **through_a_file(kept)})
    resumed.load_state_dict(through_a_file(model.state_dict()))
    for pair in ((model, optimizer), (resumed, loaded)):
        train(*pair, [last])
    assert_equal(resumed, model)


@needs_distributed
@each_wrapper
def test_distributed_checkpoint_state_goes_on_bit_for_bit(wrapper, everything):
    assert_as_bare(distributed_state, wrapper, share(wrapper, everything))
