"""Optimizers that are measured by inputs, of models that change, and of passes that train nothing."""

import copy
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad

from adiv_optim import Preconditioned, Whitened
from tests.helpers.remembered import rows_counted
from tests.helpers.steps import each_by_inputs, inputs, network, same, sgd, stepped, weights
from tests.wrappers import REMEMBERING, WRAPPERS

pytestmark = pytest.mark.usefixtures("in_float64")


def over_parameters(model, x):
    grad(lambda parameters: functional_call(model, parameters, (x,)).square().sum())(dict(model.named_parameters()))


@each_by_inputs
def test_a_transform_over_parameters_counts_as_any_pass_with_gradients(wrapper):
    model = network()
    optimizer = wrapper(sgd(model), model)
    over_parameters(model, inputs(0))
    copy.deepcopy(optimizer)
    optimizer.zero_grad()
    over_parameters(model, inputs(1, rows=9))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert rows_counted(optimizer) == {"0.weight": 17, "2.weight": 17}


@each_by_inputs
def test_a_pass_in_inference_mode_is_not_counted_even_with_gradients_enabled(wrapper):
    model = network()
    optimizer = wrapper(sgd(model), model)
    with torch.inference_mode(), torch.enable_grad():
        model(inputs(0, rows=9))
    model(inputs(1)).square().sum().backward()
    optimizer.step()
    assert rows_counted(optimizer) == {"0.weight": 8, "2.weight": 8}


def test_a_bias_that_takes_the_place_of_another_is_treated():
    model = network()
    optimizer = Whitened(sgd(model), model, every=1)
    stepped(model, optimizer, inputs(0))
    model[0].bias = nn.Parameter(torch.zeros(model[0].out_features))
    optimizer.add_param_group({"params": [model[0].bias]})
    stepped(model, optimizer, inputs(1, rows=9))
    assert rows_counted(optimizer)["0.weight"] == 9
    assert optimizer.coverage().treated["0.bias"] == "whitened, with its weight"


@pytest.mark.parametrize("wrapper", [Whitened, Preconditioned])
def test_a_weight_whose_bias_is_taken_away_is_treated_without_it(wrapper):
    model = network()
    optimizer = wrapper(sgd(model), model, every=1)
    stepped(model, optimizer, inputs(0))
    model[0].bias = None
    stepped(model, optimizer, inputs(1), inputs(2))
    assert rows_counted(optimizer)["0.weight"] > 0
    assert len(optimizer.watch.stacks()) == 2


@each_by_inputs
def test_idle_steps_are_no_cause_for_a_warning(wrapper):
    model = network()
    optimizer = wrapper(sgd(model), model, every=1)
    optimizer.step()
    optimizer.step()
    stepped(model, optimizer, *[inputs(0)] * 3)
    assert rows_counted(optimizer).keys() == {"0.weight", "2.weight"}


@each_by_inputs
def test_weights_tied_later_count_the_rows_of_all_their_layers(wrapper):
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.Linear(4, 2))
    optimizer = wrapper(sgd(model), model, every=1, decay=0.0)
    stepped(model, optimizer, inputs(0))
    model[1].weight = model[0].weight
    stepped(model, optimizer, inputs(1))  # which notices it
    stepped(model, optimizer, inputs(2))
    assert rows_counted(optimizer)["0.weight"] == 16


@each_by_inputs
def test_a_skipped_module_may_go(wrapper):
    model = network()
    model.append(nn.Linear(3, 3))
    optimizer = wrapper(sgd(model, lr=0.01), model, skip=["3"])
    del model[3]
    model.add_module("head", nn.Linear(3, 2))
    optimizer.add_param_group({"params": model.head.parameters()})
    stepped(model, optimizer, inputs(0, size=3.0))
    assert "head.weight" in optimizer.coverage().treated


@pytest.mark.parametrize("name", REMEMBERING)
def test_another_default_device_is_no_matter(name):
    """The device that holds no data stands for a GPU: whatever lands there meets the CPU's tensors in an error."""
    found = []
    for device in ("cpu", "meta"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv1d(4, 4, 1, groups=2), nn.Flatten(), nn.Linear(4, 3))
        x = inputs(0)[..., None]
        with torch.device(device):
            found.append(stepped(model, WRAPPERS[name](sgd(model), model, x), x, x, x))
    assert same(*found)


@each_by_inputs
def test_a_replica_of_data_parallel_is_refused(wrapper):
    model = nn.Linear(4, 3)
    optimizer = wrapper(sgd(model), model)
    replica = model._replicate_for_data_parallel()
    for name, parameter in model.named_parameters():
        setattr(replica, name, parameter * 1)
    with torch.no_grad():
        replica(torch.ones(2, 4))  # an evaluation, of which nothing is remembered
    with pytest.raises(RuntimeError, match=r"'weight' is called by nn.DataParallel .* Use DistributedDataParallel"):
        replica(torch.ones(2, 4))
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    assert rows_counted(optimizer) == {"weight": 3}


@each_by_inputs
def test_gradients_of_before_the_wrapper_say_nothing(wrapper):
    model = network()
    model(inputs(0)).sum().backward()
    assert {"0.weight", "2.weight"} <= wrapper(sgd(model), model).coverage().never_seen.keys()


@each_by_inputs
@pytest.mark.parametrize("bad", [float("inf"), 1e200])
def test_rows_that_are_dropped_are_told(wrapper, bad):
    model = network()
    optimizer = wrapper(sgd(model, lr=0.0), model)
    for number in range(2):
        optimizer.zero_grad()
        model(torch.full((8, 4), bad)).sum().backward()
        # A second step without anything measured is worth a word.
        with pytest.warns(UserWarning, match="what its layers read held NaN or inf") if number else nullcontext():
            optimizer.step()
    found = optimizer.coverage().never_seen["0.weight"]
    assert found.endswith("rows dropped 2 times: their squares held NaN or inf")


@pytest.mark.parametrize(
    ("wrapper", "size", "message"),
    [
        (Preconditioned, 1e-22, "no Cholesky factor found"),
        (partial(Whitened, rank=1, damping=1e300), 3.0, "no finite root found of the 1 leading eigenvectors of 2"),
    ],
    ids=["beyond float32", "leading"],
)
def test_a_matrix_without_a_factor_is_a_failure_and_no_error(wrapper, size, message):
    model = nn.Linear(2, 1, bias=False).float()
    before = model.weight.detach().clone()
    optimizer = wrapper(sgd(model), model)
    model(inputs(0, features=2, size=size).float()).sum().backward()
    with pytest.warns(UserWarning, match=message):
        optimizer.step()
    assert torch.allclose(model.weight, before - 0.1 * model.weight.grad)  # the plain step


@pytest.mark.parametrize("options", [{"weight_decay": 0.0}, {"lr": 0.0}], ids=str)
def test_a_layer_that_changes_its_group_steps_as_its_new_one_does(options):
    """Layers of one shape are multiplied together, which must not outlive that they are of one group."""
    model = network(4, 4, 4)
    optimizer = Whitened(torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5), model)
    for step in range(6):
        if step == 3:  # which measures nothing
            (group,) = optimizer.param_groups
            group["params"] = list(model[0].parameters())
            optimizer.inner.add_param_group({"params": model[2].parameters(), **options})
        before = weights(model)
        optimizer.zero_grad()
        (0 * model(inputs(0, size=2.0)).sum()).backward()
        optimizer.step()
        kept = 1.0 if step >= 3 else 0.95
        for now, old, factor in zip(weights(model), before, [0.95, 0.95, kept, kept], strict=True):
            torch.testing.assert_close(now, old * factor, rtol=1e-12, atol=0)
