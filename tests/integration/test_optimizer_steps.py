"""PyTorch's database of optimizers: every configuration steps in a wrapper as the formulas say."""

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.optimizer import register_optimizer_step_post_hook

from adiv_optim import GradientOnly, Proportional
from tests.helpers import torch_database
from tests.helpers.by_hand import ByHand
from tests.helpers.optimizers import (
    AROUND,
    BARE,
    OPTIMIZERS,
    Around,
    Configuration,
    assert_as_bare,
    assert_equal,
    at_any_rate,
    batches,
    built,
    configurations,
    deviation,
    each_gradient_only,
    each_wrapper,
    network,
    of_any_state,
    share,
    train,
)
from tests.optim.test_gradient_only import One

pytestmark = [pytest.mark.usefixtures("in_float64"), at_any_rate, of_any_state]
EXACT = 1e-9  # float64; inverses and roots square the condition of the rows


def test_database_is_whole_and_leaves_no_trace():
    state = torch.get_rng_state()
    assert sorted(torch_database.optimizers()) == torch_database.OPTIMIZERS
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.backends.flags_frozen()


def by_hand(wrapper: Around, configuration: Configuration) -> ByHand:
    model, optimizer = built(BARE, configuration)
    return ByHand(optimizer, model, wrapper.by_hand())


def steps(wrapper: Around, configuration: Configuration) -> None:
    model, optimizer = built(wrapper, configuration)
    train(model, optimizer, batches(3))
    reference = by_hand(wrapper, configuration)
    reference.train(batches(3))
    assert deviation(model, reference.network, configuration.network()) <= EXACT, configuration


@each_wrapper
def test_steps_are_the_bare_optimizers_by_hand(wrapper, everything):
    assert_as_bare(steps, wrapper, share(wrapper, everything, defaults=True))


@each_wrapper
def test_steps_of_different_wrappers_differ(wrapper):
    (sgd, *_) = configurations("SGD")
    reference = by_hand(wrapper, sgd)
    reference.train(batches(3))
    for other in AROUND.values():
        model, optimizer = built(other, sgd)
        train(model, optimizer, batches(3))
        assert (deviation(model, reference.network, sgd.network()) > 1e-2) == (other is not wrapper)


def add_param_group(wrapper: Around, configuration: Configuration) -> None:
    first, last = batches(2)
    models = []
    for kind in (wrapper, BARE):
        model = configuration.network()
        optimizer = kind.wrap(configuration.build(model[0].parameters()), model)
        step = ByHand(optimizer, model, wrapper.by_hand()).train if kind is BARE else partial(train, model, optimizer)
        step([first])
        assert torch.equal(model[2].weight, configuration.network()[2].weight)
        optimizer.add_param_group({"params": list(model[2].parameters()), "lr": optimizer.param_groups[0]["lr"] / 2})
        step([last])
        models.append(model)
    assert deviation(*models, configuration.network()) <= EXACT, configuration


def adagrad_steps_on_new_groups() -> bool:
    weight = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.Adagrad([torch.ones(1)])
    optimizer.add_param_group({"params": [weight]})
    weight.sum().backward()
    try:
        optimizer.step()
    except KeyError:  # "sum", which older ones make only for the groups they are born with
        return False
    return True


@each_wrapper
def test_add_param_group_is_the_bare_optimizers_by_hand(wrapper, everything):
    beyond_it = () if adagrad_steps_on_new_groups() else ("Adagrad",)
    chosen = [each for each in share(wrapper, everything) if each.optimizer not in beyond_it]
    assert_as_bare(add_param_group, wrapper, chosen)


@each_wrapper
def test_schedulers_change_the_steps_as_they_change_the_bare_optimizers(wrapper, everything):
    tried = [
        (builders, rate)
        for name in OPTIMIZERS
        # unset, a number, a tensor
        for rate in {type(entry.options.get("lr")): entry for entry in configurations(name)}.values()
        for builders in torch_database.optimizers()[name].scheduler_inputs
    ]
    place = list(AROUND.values()).index(wrapper)
    for builders, rate in tried if everything else tried[place :: len(AROUND)]:
        assert_as_bare(partial(schedule, builders), wrapper, [rate])


def schedule(builders: list[Any], wrapper: Around, configuration: Configuration) -> None:
    found, wanted = [], []
    model, optimizer = built(wrapper, configuration)
    reference = by_hand(wrapper, configuration)
    schedulers, twins = ([build(o) for build in builders] for o in (optimizer, reference.optimizer))
    for batch in batches(13):  # StepLR waits for ten steps, ReduceLROnPlateau for eleven
        train(model, optimizer, [batch])
        reference.train([batch])
        for scheduler in (*schedulers, *twins):
            scheduler.step(*([1.0] if isinstance(scheduler, ReduceLROnPlateau) else []))
        found.append(float(getattr(optimizer, "inner", optimizer).param_groups[0]["lr"]))
        wanted.append(float(reference.optimizer.param_groups[0]["lr"]))
    assert found == wanted
    assert len(set(found)) > 1
    assert deviation(model, reference.network, configuration.network()) <= EXACT


def zero_learning_rate(wrapper: Around, configuration: Configuration) -> None:
    model, optimizer = built(wrapper, configuration, lr=0.0)
    train(model, optimizer, batches(1))
    if configuration.optimizer == "Rprop":  # has a smallest step whatever the rate
        assert not torch.equal(model[0].weight, configuration.network()[0].weight)
    else:
        assert_equal(model, configuration.network())


@each_wrapper
def test_zero_learning_rate_changes_no_bit(wrapper, everything):
    assert_as_bare(zero_learning_rate, wrapper, share(wrapper, everything))


def hooks(wrapper: Around, configuration: Configuration) -> None:
    model, optimizer = built(wrapper, configuration)
    calls = []
    levels = {"outer": optimizer} if wrapper is BARE else {"outer": optimizer, "inner": optimizer.inner}
    for level, owner in levels.items():
        owner.register_step_pre_hook(lambda *_, level=level: calls.append(f"{level} pre"))
        owner.register_step_post_hook(lambda *_, level=level: calls.append(f"{level} post"))
    train(model, optimizer, batches(1))
    once = ["outer pre", "outer post"] if wrapper is BARE else ["outer pre", "inner pre", "inner post", "outer post"]
    assert calls == once, configuration


@each_wrapper
def test_step_hooks_fire_once(wrapper, everything):
    assert_as_bare(hooks, wrapper, share(wrapper, everything))


@each_wrapper
def test_global_step_hooks_fire_once_for_the_wrapper(wrapper):
    model, optimizer = built(wrapper, configurations("SGD")[0])
    calls = []
    handle = register_optimizer_step_post_hook(lambda owner, *_: calls.append(owner))
    try:
        train(model, optimizer, batches(1))
    finally:
        handle.remove()
    assert calls == [optimizer]


def skip_infinite(wrapper: Around, configuration: Configuration) -> None:
    bad, good = batches(2)
    bad[0][0, 0] = torch.inf
    model, optimizer = built(wrapper, configuration)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for x, y in (bad, good):
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
    unscaled, twin = built(wrapper, configuration)
    train(unscaled, twin, [good])
    assert scaler.get_scale() == 2.0**9
    assert_equal(model, unscaled)


@each_wrapper
def test_grad_scaler_skips_infinite_gradients_and_is_no_scale_otherwise(wrapper, everything):
    assert_as_bare(skip_infinite, wrapper, share(wrapper, everything))


def skipped(optimizer, model: nn.Module) -> GradientOnly:
    """A wrapper with a correction on a layer beside the model."""
    return GradientOnly(optimizer, nn.ModuleList([model, nn.Linear(1, 1)]), Proportional(), skip=["0"])


# Without a bias: its gradient is the product of G with the scales, which sums in another order than torch's sum of G.
NOTHING = {
    "scale one": (lambda optimizer, model: GradientOnly(optimizer, model, One()), False),
    "skipped": (skipped, True),
}


@pytest.mark.parametrize(("wrap", "bias"), NOTHING.values(), ids=NOTHING)
def test_correcting_nothing_is_the_bare_optimizer_bit_for_bit(wrap, bias):
    for configuration in (each for name in OPTIMIZERS for each in configurations(name)):
        name = configuration.optimizer
        models = []
        for wrapper in (Around(wrap, None), BARE):
            model = network(bias and name != "Muon")
            optimizer = wrapper.wrap(configuration.build(model.parameters()), model)
            with pytest.raises(RuntimeError) if name == "SparseAdam" else nullcontext():
                train(model, optimizer, batches(3))
            models.append(model)
        assert_equal(*models)


def steps_on_its_gradients(wrapper: Around, configuration: Configuration) -> None:
    model, optimizer = built(wrapper, configuration)
    twin, bare = built(BARE, configuration)
    for batch in batches(2):
        train(model, optimizer, [batch])
        for p, q in zip(twin.parameters(), model.parameters(), strict=True):
            p.grad = q.grad.clone()
        bare.step()
    assert_equal(model, twin)


@each_gradient_only
def test_steps_on_corrected_gradients_are_the_bare_optimizers_bit_for_bit(wrapper, everything):
    assert_as_bare(steps_on_its_gradients, wrapper, share(wrapper, everything))


@each_wrapper
def test_lbfgs_is_refused_in_every_configuration(wrapper):
    for configuration in configurations("LBFGS"):
        model = configuration.network()
        with pytest.raises(TypeError, match="cannot wrap LBFGS: it evaluates its closure many times"):
            wrapper.wrap(configuration.build(model.parameters()), model)
        assert type(model[0]) is nn.Linear
