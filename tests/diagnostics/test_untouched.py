"""The step measured is the step taken, and measuring it changes nothing, bit for bit."""

import copy
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves

from adiv_optim import GradientOnly, Preconditioned, Proportional, attach, coverage
from adiv_optim.diagnostics import divergence
from tests.helpers.remembered import rows_counted
from tests.helpers.revive import same_leaves

EXACT = 1e-9  # float64; Δθ is a difference of parameters of order one at a rate of 1e-2

pytestmark = pytest.mark.usefixtures("in_float64")


def network():
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Dropout(0.3), nn.Linear(8, 8), nn.LayerNorm(8),
        nn.Linear(8, 3),
    )  # fmt: skip


def batch(rows=10):
    return torch.randn(rows, 6), torch.randint(3, (rows,))


OPTIMIZERS = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=1e-2),
    "momentum-decay": lambda model: torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, weight_decay=0.1),
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=1e-2),
    "gradient-only-adam": lambda model: GradientOnly(OPTIMIZERS["adam"](model), model, Proportional()),
    "preconditioned": lambda model: Preconditioned(OPTIMIZERS["sgd"](model), model, damping=0.1, every=1),
}


def trained(name):
    """A model and its optimizer in the middle of a training run, gradients of the last step left in place."""
    torch.manual_seed(3)
    model = network()
    optimizer = OPTIMIZERS[name](model)
    for _ in range(4):
        x, y = batch()
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_effective_update_is_that_of_the_step_really_taken(name):
    model, optimizer = trained(name)
    x, y = batch()
    random_state = torch.get_rng_state()
    found = divergence(model, F.cross_entropy, x, y, optimizer=optimizer)

    # The same step, taken: inputs and output gradients of the last layer, and what becomes of its output.
    kept = {}
    handle = model[6].register_forward_hook(lambda _, args, z: kept.update(x=args[0].detach(), z=z))
    torch.set_rng_state(random_state)
    loss = F.cross_entropy(model(x), y)
    handle.remove()
    (g,) = torch.autograd.grad(loss, kept["z"], retain_graph=True)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        moved = (model[6](kept["x"]) - kept["z"]) / 1e-2
    layer = found.layers["6"]
    assert found.loss == pytest.approx(loss.item(), rel=1e-14)
    torch.testing.assert_close(layer.cosine, -F.cosine_similarity(moved, g), rtol=EXACT, atol=EXACT)
    projection = -(moved * g).sum(1) / g.square().sum(1)
    torch.testing.assert_close(layer.projection, projection, rtol=EXACT, atol=EXACT)


def everything(model, optimizer):
    """A copy of all that must not change, and the identity of what must stay the same object."""
    state = {
        "model": copy.deepcopy(model.state_dict()),
        "gradients": {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()},
        "versions": {name: p._version for name, p in [*model.named_parameters(), *model.named_buffers()]},
        "optimizer": copy.deepcopy(optimizer.state_dict()) if optimizer else None,
        "training": {name: module.training for name, module in model.named_modules()},
        "hooks": {name: len(m._forward_hooks) + len(m._forward_pre_hooks) for name, m in model.named_modules()},
        "random": (torch.get_rng_state(), random.getstate()),
        "classes": [type(module) for module in model.modules()],
        "coverage": str(coverage(model)),
        "grad mode": torch.is_grad_enabled(),
    }
    return state, [id(p) for p in model.parameters()] + [id(p.grad) for p in model.parameters()]


def same(left, right):
    return same_leaves(tree_leaves(left), tree_leaves(right))


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_nothing_changes(name, training):
    model, optimizer = trained(name)
    model.train(training)
    x, y = batch()
    before, kept = everything(model, optimizer)
    divergence(model, F.cross_entropy, x, y, optimizer=optimizer)
    with torch.no_grad():
        divergence(model, F.cross_entropy, x, y)
    after, still = everything(model, optimizer)
    assert {key for key in before if not same(before[key], after[key])} == set()
    assert kept == still
    # The test can fail: a plain step changes all of these.
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    taken, _ = everything(model, optimizer)
    changed = {key for key in before if not same(before[key], taken[key])}
    assert {"model", "gradients", "versions", "optimizer"} - ({"optimizer"} if name == "sgd" else set()) <= changed
    assert not training or "random" in changed


def test_attached_correction_is_not_noted_as_run():
    model = attach(nn.Sequential(nn.Linear(6, 3)), Proportional())
    x, y = batch()
    divergence(model, F.cross_entropy, x, y)
    assert coverage(model).never_seen.keys() == {"0.weight", "0.bias"}


def test_micro_batches_under_way_are_no_part_of_the_step():
    model, (x, y) = nn.Sequential(nn.Linear(6, 3)), batch()
    optimizer = Preconditioned(torch.optim.SGD(model.parameters(), lr=0.1), model, every=1)
    undisturbed, twin = copy.deepcopy((model, optimizer))
    before = divergence(model, F.cross_entropy, x, y, optimizer=optimizer).layers["0"]
    rows = 100 * torch.randn(4, 6)
    for each in (model, undisturbed):
        each(rows).sum().backward()
    after = divergence(model, F.cross_entropy, x, y, optimizer=optimizer).layers["0"]
    torch.testing.assert_close(after.projection, before.projection, rtol=0, atol=0)
    optimizer.step()
    twin.step()
    assert rows_counted(optimizer) == {"0.weight": 4}
    assert same(list(model.parameters()), list(undisturbed.parameters()))


def test_data_that_the_model_works_on_in_place_stays():
    model, (x, y) = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 3)), batch()
    before = x.clone()
    found = divergence(model, F.cross_entropy, x, y).layers["1"]
    assert torch.equal(x, before)
    torch.testing.assert_close(found.squared_norm, x.relu().square().sum(1), rtol=EXACT, atol=EXACT)
    model(x)
    assert not torch.equal(x, before)


def test_optimizer_of_ones_own_is_copied_with_what_it_needs():
    class Scaled(torch.optim.SGD):
        """Has an attribute that torch's own copying leaves behind."""

        @torch.no_grad()
        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                p -= self.factor * self.param_groups[0]["lr"] * p.grad

    model, x, y = nn.Linear(6, 3), *batch()
    optimizer = Scaled(model.parameters(), lr=0.1)
    optimizer.factor = 2.0
    torch.optim.lr_scheduler.StepLR(optimizer, 10)  # which puts a `step` of its own on the instance
    found, plain = (divergence(model, F.cross_entropy, x, y, optimizer=each).layers[""] for each in (optimizer, None))
    torch.testing.assert_close(found.projection, 2 * plain.projection, rtol=EXACT, atol=EXACT)


def test_rate_of_a_layer_is_the_greatest_of_its_groups():
    model, x, y = nn.Linear(6, 3), *batch()
    groups = [{"params": [model.weight], "lr": 0.2}, {"params": [model.bias], "lr": 0.0}]
    found = divergence(model, F.cross_entropy, x, y, optimizer=torch.optim.SGD(groups)).layers[""]
    model.bias.requires_grad_(False)
    wanted = divergence(model, F.cross_entropy, x, y).layers[""]
    torch.testing.assert_close(found.projection, wanted.projection, rtol=EXACT, atol=EXACT)
