"""What every wrapper keeps of the optimizer that it wraps.

Around PyTorch's database of optimizers, whose configurations the wrappers share out, and on random networks.
"""

import copy
import itertools
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils import _pytree as pytree

from tests.fuzz.compare import drawn, path_deviation, wrapped
from tests.helpers import checkpoints, torch_database
from tests.helpers.checkpoints import forgotten
from tests.helpers.optimizers import (
    OPTIMIZERS,
    Case,
    configurations,
    identical,
    network,
    of_database,
    of_random_networks,
    train,
    training,
    weights,
)
from tests.helpers.processes import needs_distributed
from tests.helpers.revive import revived, through_a_file
from tests.wrappers import REMEMBERING, WRAPPERS

pytestmark = [
    pytest.mark.usefixtures("in_float64"),
    pytest.mark.filterwarnings("ignore:.* (treats|takes plain steps):UserWarning"),  # rightly, of some networks
]
EXACT = 1e-9  # float64; inverses and roots square the condition of the rows
CORRECTED = [name for name, wrapper in WRAPPERS.items() if wrapper.rule]
each_wrapper = pytest.mark.parametrize("name", WRAPPERS)


def cases(name: str, everything: bool) -> list[Case]:
    return [*of_database(name, everything), *of_random_networks(name)]


@each_wrapper
def test_steps_are_those_by_hand(name, everything):
    for case in of_database(name, everything, defaults=True):
        assert path_deviation(name, *case.make(), case.settings) <= EXACT, case.label


@each_wrapper
def test_it_is_the_optimizer_within(name, everything):
    for case in cases(name, everything):
        optimizer, steps = case.start(name)
        assert isinstance(optimizer, Optimizer)
        for part in ("param_groups", "state", "defaults"):
            assert getattr(optimizer, part) is getattr(optimizer.inner, part)
        # Nothing of ours is in it.
        bare, keys = case.bare(), []
        for each in (optimizer, bare):
            train(each, steps, range(2))
            groups = [group.keys() for group in each.param_groups]
            state = getattr(each, "inner", each).state
            keys.append([groups, [state.get(p, {}).keys() for p in each.model.parameters()]])
        assert keys[0] == keys[1], case.label
        assert optimizer.inner.__dict__.keys() <= bare.__dict__.keys(), case.label


def places(model: nn.Module) -> list[Any]:
    """Each parameter, and where its numbers are."""
    return [(id(p), p.data_ptr(), p.stride()) for p in model.parameters()]


@each_wrapper
def test_outside_the_step_weights_and_outputs_are_the_models(name):
    for case in of_random_networks(name):
        optimizer, steps = case.start(name)
        (plain, _), before = case.make(), places(optimizer.model)
        assert identical(weights(optimizer.model), weights(plain))
        for step in range(2):
            train(optimizer, steps, range(step, step + 1))
            plain.load_state_dict(optimizer.model.state_dict())
            assert identical([optimizer.model(steps.inputs[0])], [plain(steps.inputs[0])])
            assert places(optimizer.model) == before


@each_wrapper
def test_added_groups_train_as_those_that_were_there(name, everything):
    for case in of_database(name, everything):
        assert case.configuration is not None
        paths = []
        for late in (True, False):
            model, steps = case.make()
            first, rest = (list(model.layers[place].parameters()) for place in (0, 2))
            inner = case.configuration.build([{"params": each} for each in ([first] if late else [first, rest])])
            optimizer = wrapped(name, inner, model, steps.inputs[0], case.settings)
            if late:
                optimizer.add_param_group({"params": rest})
                for group in optimizer.param_groups:  # torch's own Adagrad makes its state when it is built
                    for p in group["params"] if case.configuration.optimizer == "Adagrad" else ():
                        inner.state[p] = copy.deepcopy(type(inner)([p], **case.configuration.options).state[p])
            paths.append(train(optimizer, steps, range(3)))
        assert identical(*paths), case.label


@each_wrapper
def test_schedulers_are_those_of_the_optimizer_within(name, everything):
    tried = [
        (builders, rate)
        for kind in OPTIMIZERS
        # unset, a number, a tensor
        for rate in {type(entry.options.get("lr")): entry for entry in configurations(kind)}.values()
        for builders in torch_database.optimizers()[kind].scheduler_inputs
    ]
    place = list(WRAPPERS).index(name)
    for builders, rate in tried if everything else tried[place :: len(WRAPPERS)]:
        steps, rates, paths = training(rate), [], []
        for around in (True, False):
            model = rate.network()
            optimizer = wrapped(name, rate.build(model.parameters()), model, steps.inputs[0], drawn(name, place))
            schedulers = [build(optimizer if around else optimizer.inner) for build in builders]
            rates.append([])
            for step in range(13):  # StepLR waits for ten steps, ReduceLROnPlateau for eleven
                path = train(optimizer, steps, range(step, step + 1))
                for scheduler in schedulers:
                    scheduler.step(*([1.0] if isinstance(scheduler, ReduceLROnPlateau) else []))
                rates[-1].append(float(optimizer.param_groups[0]["lr"]))
            paths.append(path)
        assert rates[0] == rates[1]
        assert len({*rates[0]}) > 1
        assert identical(*paths), rate


@each_wrapper
def test_zero_learning_rate_changes_no_bit(name, everything):
    for case in cases(name, everything):
        optimizer, steps = case.start(name)
        before = weights(optimizer.model)
        for group in optimizer.param_groups:
            group["lr"] = 0 * group["lr"]
        # Rprop has a smallest step whatever the rate.
        still = case.configuration is None or case.configuration.optimizer != "Rprop"
        assert identical(train(optimizer, steps, range(2)), before) == still, case.label


@each_wrapper
def test_step_hooks_fire_once(name, everything):
    for case in of_database(name, everything):
        optimizer, steps = case.start(name)
        calls: list[str] = []
        for level, owner in (("outer", optimizer), ("inner", optimizer.inner)):
            owner.register_step_pre_hook(lambda *_, calls=calls, level=level: calls.append(f"{level} pre"))
            owner.register_step_post_hook(lambda *_, calls=calls, level=level: calls.append(f"{level} post"))
        train(optimizer, steps, range(1))
        assert calls == ["outer pre", "inner pre", "inner post", "outer post"], case.label


@each_wrapper
def test_closure_is_called_once_with_gradients_and_its_loss_returned(name):
    case, calls = of_random_networks(name)[0], []
    (optimizer, steps), (twin, _) = case.start(name), case.start(name)
    (x, y), *_ = steps.batches(0)

    def closure() -> Any:
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = steps.loss(optimizer.model(x), y, 0)
        loss.backward()
        return loss

    with torch.no_grad():
        found = optimizer.step(closure)
    assert calls == [True]
    wanted = steps.loss(twin.model(x), y, 0)
    wanted.backward()
    assert twin.step() is None
    assert torch.equal(found, wanted)
    assert identical(weights(optimizer.model), weights(twin.model))


@each_wrapper
def test_grad_scaler_skips_infinite_gradients_and_is_no_scale_otherwise(name, everything):
    for case in of_database(name, everything):
        (optimizer, steps), (unscaled, _) = case.start(name), case.start(name)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for x in (torch.full_like(steps.inputs[0], torch.inf), steps.inputs[0]):
            optimizer.zero_grad()
            scaler.scale(steps.loss(optimizer.model(x), steps.targets[0], 0)).backward()
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 2.0**9
        assert identical(train(unscaled, steps, range(1)), weights(optimizer.model)), case.label


@each_wrapper
def test_checkpoint_copy_and_pickle_go_on_bit_for_bit(name, everything):
    for case in cases(name, everything):
        optimizer, steps = case.start(name)
        half, end = len(steps.inputs) // 2, len(steps.inputs)
        train(optimizer, steps, range(half))
        for group in optimizer.param_groups:  # a rate that is set before saving is that after loading
            group["lr"] = group["lr"] / 2
        again = revived(optimizer, case.start(name, moved=1.0)[0])
        wanted = train(optimizer, steps, range(half, end))
        for other in again:
            assert type(other) is type(optimizer)
            assert other.param_groups is other.inner.param_groups
            assert identical(train(other, steps, range(half, end)), wanted), case.label


@each_wrapper
def test_checkpoints_go_to_the_bare_optimizer_and_back(name):
    case = of_random_networks(name)[0]
    (optimizer, steps), (fresh, _) = case.start(name), case.start(name)
    train(optimizer, steps, range(1))
    bare = case.bare()
    bare.load_state_dict(through_a_file(optimizer.state_dict()))
    again, forgetful = copy.deepcopy((optimizer, fresh))
    again.load_state_dict(bare.state_dict())
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        forgetful.load_state_dict(forgotten(optimizer.state_dict()))
    wanted = "nothing of what it remembers of . of .*get_optimizer_state_dict"
    assert all(re.search(wanted, str(each.message)) for each in told)
    assert bool(told) == bool(forgotten(optimizer.state_dict())["state"] and name in REMEMBERING)
    for one, other in ((optimizer, again), (optimizer.inner, forgetful.inner)):
        # A bare optimizer drops what is remembered of parameters that have not trained yet.
        parts = [{**each.state_dict(), "adiv_optim.waiting": {}} for each in (one, other)]
        saved, found = map(pytree.tree_leaves, parts)
        for a, b in zip(saved, found, strict=True):
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@needs_distributed
@each_wrapper
@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")  # torch's own, where there is no process group
def test_distributed_checkpoint_by_parameter_names_goes_on_bit_for_bit(name, everything, tmp_path):
    """Nested or flat. One without state takes a step at rate 0 with gradients of 0 there, which is none of ours."""
    for number, case in enumerate(of_database(name, everything)):
        (optimizer, steps), (plain, _), (loaded, _) = case.start(name), case.start(name), case.start(name, moved=1.0)
        train(optimizer, steps, range(2))
        optimizer.zero_grad()
        flat = case.configuration is not None and case.configuration.description == "default"
        checkpoints.save(optimizer.model, optimizer, tmp_path / f"{number}", flat)
        checkpoints.load(loaded.model, loaded, tmp_path / f"{number}", flat)
        wanted = train(plain, steps, range(3))
        for each in (optimizer, loaded):
            assert identical(train(each, steps, range(2, 3)), wanted), case.label


@each_wrapper
def test_detached_it_is_the_optimizer_within(name):
    for case in of_random_networks(name):
        (optimizer, steps), bare = case.start(name), case.bare()
        train(optimizer, steps, range(1))
        bare.model.load_state_dict(optimizer.model.state_dict())
        bare.load_state_dict(copy.deepcopy(optimizer.inner.state_dict()))
        assert optimizer.detach() is optimizer.model
        assert [*map(type, optimizer.model.modules())] == [*map(type, bare.model.modules())]
        assert not any(module._forward_hooks for module in optimizer.model.modules())
        again = copy.deepcopy(optimizer)
        wanted = train(bare, steps, range(1, 3))
        for each in (optimizer, again):
            assert identical(train(each, steps, range(1, 3)), wanted), case.label


def interrupted(optimizer: Any, steps: Any, register: Callable[..., Any]) -> list[Tensor]:
    """The weights where a hook of the inner optimizer raises, after which gradients are the model's own."""
    within, gradients = list[Tensor](), list[Any]()

    def fail(*_: Any) -> None:
        within.extend(weights(optimizer.model))
        raise RuntimeError("planted")

    optimizer.register_step_pre_hook(lambda it, *_: gradients.extend(p.grad for p in it.model.parameters()))
    register(fail)
    with pytest.raises(RuntimeError, match="planted"):
        train(optimizer, steps, range(1, 2))
    assert all(p.grad is own for p, own in zip(optimizer.model.parameters(), gradients, strict=True))
    return within


@each_wrapper
def test_exception_within_the_step_restores_weights_and_gradients(name):
    for case in of_random_networks(name):
        optimizer, steps = case.start(name)
        before = train(optimizer, steps, range(1))
        assert len(interrupted(optimizer, steps, optimizer.inner.register_step_pre_hook)) == len(before)
        assert identical(weights(optimizer.model), before), case.label


MAPPING = [name for name in REMEMBERING if name != "preconditioned"]


@each_wrapper
def test_exception_half_way_restores_gradients_and_the_weights_that_are_mapped(name):
    """Others are where the inner optimizer left them: a copy of all weights in every step would be dear."""
    for case in of_random_networks(name):
        optimizer, steps = case.start(name)
        before = train(optimizer, steps, range(1))
        names = optimizer.coverage().treated if name in MAPPING else ()
        mapped = {id(optimizer.model.get_parameter(each)) for each in names}
        stepped = interrupted(optimizer, steps, optimizer.inner.register_step_post_hook)
        parameters = list(optimizer.model.parameters())
        wanted = [old if id(p) in mapped else new for p, old, new in zip(parameters, before, stepped, strict=True)]
        assert identical(weights(optimizer.model), wanted), case.label
        assert not identical(stepped, before), case.label


@each_wrapper
def test_rows_that_are_not_finite_show_in_the_gradients(name):
    for case, value in itertools.product(of_random_networks(name), (torch.nan, torch.inf)):
        (optimizer, steps), (plain, _) = case.start(name), case.make()
        x = steps.inputs[0]
        if not x.is_floating_point():
            continue
        x[0] = value
        for model in (optimizer.model, plain):
            steps.loss(model(x), steps.targets[0], 0).backward()
        for found, wanted in zip(optimizer.model.parameters(), plain.parameters(), strict=True):
            assert wanted.grad is None or wanted.grad.isfinite().all() or not found.grad.isfinite().all(), case.label


def error_of(name: str, build: Any, model: nn.Module) -> str:
    with pytest.raises(TypeError) as told:
        WRAPPERS[name](build(model), model, torch.ones(1, 4))
    assert type(model.layers[0]) is nn.Linear
    return str(told.value).replace("\n", " ")


@pytest.mark.parametrize("name", CORRECTED)
def test_scaled_loss_gives_scaled_gradients_bit_for_bit(name):
    for case in of_random_networks(name):
        found = []
        for scale in (1, 1024):
            optimizer, steps = case.start(name)
            (x, y), *_ = steps.batches(0)
            (scale * steps.loss(optimizer.model(x), y, 0)).backward()
            found.append([p.grad / scale for p in optimizer.model.parameters() if p.grad is not None])
        assert identical(*found), case.label


@each_wrapper
def test_lbfgs_is_refused(name):
    assert "cannot wrap LBFGS: it evaluates its closure" in error_of(name, lambda m: LBFGS(m.parameters()), network())


@each_wrapper
def test_what_is_no_optimizer_is_refused(name):
    for found in (SGD, nn.Linear(1, 1), [torch.zeros(1)], None):
        message = error_of(name, lambda _, found=found: found, network())
        assert "wraps a torch.optim.Optimizer, found" in message
        assert ("wrong order" in message) == isinstance(found, nn.Module)
