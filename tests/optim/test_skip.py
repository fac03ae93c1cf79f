"""What is named in skip takes the plain step, and all else the step that it takes without it."""

from typing import Any

import pytest
import torch
from torch import nn

from adiv_optim import Whitened
from tests.helpers.loops import adamw, weights
from tests.helpers.processes import needs_distributed
from tests.helpers.revive import revived
from tests.helpers.steps import same, sgd, stepped
from tests.optim.test_processes import on_cpu, sharded
from tests.wrappers import REMEMBERING, WRAPPERS

X = torch.randn(12, 6, generator=torch.Generator().manual_seed(0))


class Head(nn.Linear):
    """A type of its own, whose rows the optimizers are told."""

    def input_rows(self, input):
        return input


each_that_remembers = pytest.mark.parametrize("name", REMEMBERING)


def network() -> nn.Module:
    torch.manual_seed(0)
    middle = nn.Sequential(nn.Linear(7, 5), nn.ReLU())
    return nn.Sequential(nn.Linear(6, 7), nn.ReLU(), middle, nn.Linear(5, 4), nn.ReLU(), Head(4, 3))


def trained(name: str | None, **given: Any) -> tuple[nn.Module, Any]:
    """A network after a step of the wrapper, or of the optimizer without."""
    model = network()
    optimizer: Any = adamw(model)
    if name:
        optimizer = WRAPPERS[name](optimizer, model, X, **given)
    stepped(model, optimizer, X)
    return model, optimizer


@each_that_remembers
def test_what_is_skipped_takes_the_plain_step_and_the_rest_its_own(name):
    skipped = ("2.0.weight", "2.0.bias", "5.weight", "5.bias")
    model, optimizer = trained(name, skip=["2", Head])
    bare, whole = weights(trained(None)[0]), weights(trained(name)[0])
    for name, found in weights(model).items():
        assert torch.equal(found, (bare if name in skipped else whole)[name])
    assert not any(torch.equal(bare[name], whole[name]) for name in ("2.0.weight", "5.weight"))
    assert f"skip={('2', Head)}" in repr(optimizer)
    report = optimizer.coverage()
    assert {name for name, why in report.skipped.items() if why == "named in skip"} == set(skipped)


@each_that_remembers
def test_copies_checkpoints_and_later_groups_know_what_is_skipped(name):
    model, optimizer = trained(name, skip=["0"])
    twins = revived(optimizer, trained(name, skip=["0"])[1])
    for each in (optimizer, *twins):
        each.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
        stepped(each.model, each, X, X, X)
        assert each.coverage().skipped["0.weight"] == "named in skip"
        assert same(each.model.parameters(), model.parameters())


@each_that_remembers
@pytest.mark.parametrize(
    ("skip", "error", "message"),
    [
        (["haed"], ValueError, r"skip names 'haed', which the model does not have; its modules are '', '0'"),
        ([nn.Conv3d], ValueError, "skip names .*Conv3d"),
        *((one, TypeError, r"skip is .*; pass a list of paths or types") for one in ("0", None, nn.Linear)),
    ],
    ids=["path", "type", "string", "none", "a type"],
)
def test_skipping_what_is_not_there_is_an_error(name, skip, error, message):
    with pytest.raises(error, match=message):
        trained(name, skip=skip)


def test_a_tied_weight_is_skipped_with_each_of_its_layers():
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.Linear(6, 3))
    model[2].weight = model[0].weight
    optimizer = Whitened(sgd(model), model, skip=["2"])
    stepped(model, optimizer, X)
    assert optimizer.coverage().skipped == dict.fromkeys(("0.weight", "2.bias"), "named in skip") | {
        "0.bias": "a bias without its weight"
    }


@needs_distributed
@on_cpu
@pytest.mark.usefixtures("one_process")
def test_a_layer_whose_rows_cannot_be_sharded_can_be_skipped():
    model = sharded(nn.Sequential(nn.Conv1d(4, 4, 3), nn.Conv1d(4, 4, 3, groups=2)))
    with pytest.raises(ValueError, match="or name this layer in skip"):
        Whitened(sgd(model), model)
    assert list(Whitened(sgd(model), model, skip=["1"]).coverage().never_seen) == ["0.weight", "0.bias"]
