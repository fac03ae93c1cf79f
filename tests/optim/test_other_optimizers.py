"""Inner optimizers that are not as torch's own are: groups that cannot be set, no state, state of eight bits."""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import SGD, AdamW, Optimizer

from adiv_optim import InputScaled, Preconditioned, Whitened
from tests.helpers.processes import needs_distributed
from tests.wrappers import WRAPPERS, each_wrapper

pytestmark = pytest.mark.usefixtures("in_float64")


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def trained(model: nn.Module, optimizer: Any, steps: range) -> list[Tensor]:
    for step in steps:
        optimizer.zero_grad()
        model(torch.randn(6, 4, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def same(ones: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(ones, others, strict=True))


class Joined(Optimizer):
    """Several optimizers as one, whose groups are theirs."""

    def __init__(self, *several: Optimizer) -> None:
        self.several, self.defaults = several, {}
        Optimizer.__setstate__(self, {})

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for each in self.several for group in each.param_groups]

    @property
    def state(self) -> dict[Any, Any]:
        return {key: value for each in self.several for key, value in each.state.items()}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for each in self.several:
            each.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for each in self.several:
            each.zero_grad(set_to_none)


@each_wrapper
def test_groups_may_be_a_property(wrap):
    model = network()
    weights, biases = ([p for p in model.parameters() if (p.dim() > 1) == own] for own in (True, False))
    joined = Joined(SGD(weights, lr=0.1, momentum=0.5), AdamW(biases, lr=0.01))
    found = trained(model, wrap(joined, model, torch.ones(1, 4)), range(4))
    twin = network()
    weights, biases = ([p for p in twin.parameters() if (p.dim() > 1) == own] for own in (True, False))
    bare = trained(twin, Joined(SGD(weights, lr=0.1, momentum=0.5), AdamW(biases, lr=0.01)), range(4))
    assert all(p.isfinite().all() for p in found)
    assert not same(found, bare)


class Failing(SGD):
    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        raise ArithmeticError("planted")


@pytest.mark.parametrize("name", ["input-scaled", "unit-consistent", "whitened"])
def test_an_error_within_gives_weights_back_where_groups_are_a_property(name):
    model = network()
    with torch.no_grad():
        model[0].weight.mul_(10)
    optimizer = WRAPPERS[name](Joined(Failing(model.parameters(), lr=0.1)), model, torch.ones(1, 4))
    model(10 * torch.ones(6, 4)).square().mean().backward()
    gradients, weight = [p.grad for p in model.parameters()], model[0].weight.detach().clone()
    with pytest.raises(ArithmeticError, match="planted"):
        optimizer.step()
    assert torch.equal(model[0].weight, weight)
    assert all(p.grad is gradient for p, gradient in zip(model.parameters(), gradients, strict=True))


@needs_distributed
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("wrapper", [Preconditioned, Whitened, InputScaled])
def test_checkpoints_of_an_optimizer_without_state_neither_step_nor_forget(wrapper, momentum):
    """torch.distributed.checkpoint lets an optimizer that has no state take a step at rate 0 with gradients of 0."""

    def built() -> tuple[nn.Module, Any]:
        model = network()
        return model, wrapper(SGD(model.parameters(), lr=0.1, momentum=momentum), model, every=3)

    def saved(model: nn.Module, optimizer: Any) -> Any:
        optimizer.zero_grad()
        return copy.deepcopy(get_state_dict(model, optimizer))

    plain = trained(*built(), range(8))
    model, optimizer = built()
    trained(model, optimizer, range(4))
    weights, state = saved(model, optimizer)
    kept = [p.detach().clone() for p in model.parameters()]
    resumed, twin = built()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        saved(resumed, twin)
        set_state_dict(resumed, twin, model_state_dict=weights, optim_state_dict=state)
    assert same(kept, [p.detach() for p in resumed.parameters()])
    assert same(trained(resumed, twin, range(4, 8)), plain)
    assert same(trained(model, optimizer, range(4, 8)), plain)


def test_a_step_at_rate_0_with_gradients_is_a_step():
    model = network()
    optimizer = Whitened(SGD(model.parameters(), lr=0.0), model)
    trained(model, optimizer, range(2))
    assert optimizer.method.steps == 2


def test_the_optimizer_inside_steps_with_its_own_state_alone_and_takes_what_is_saved():
    """A name of ours in the state of a weight that it has not stepped on would be a state for it, and lack moments."""
    model = network()
    model[2].requires_grad_(False)
    optimizer = Whitened(AdamW(model.parameters()), model)
    trained(model, optimizer, range(1))
    assert "adiv_optim.inputs.rows" in optimizer.state[model[0].weight]
    assert optimizer.state is optimizer.inner.state
    model[2].requires_grad_(True)
    trained(model, optimizer, range(1, 3))
    assert optimizer.inner.state[model[0].weight].keys() == {"step", "exp_avg", "exp_avg_sq"}
    model.append(nn.Linear(3, 2))  # that has no gradient yet
    optimizer.inner.param_groups[0]["params"] += model[3].parameters()
    optimizer._find_layers()
    assert model[3].weight not in optimizer.state
    bare = AdamW(model.parameters())
    bare.load_state_dict(optimizer.state_dict())
    trained(model, bare, range(3, 4))


class Turns(nn.Module):
    """Two heads that take turns."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads = nn.ModuleList(nn.Linear(4, 3) for _ in range(2))

    def forward(self, x: Tensor, head: int) -> Tensor:
        return self.heads[head](x)


def taken(model: Turns, optimizer: Any, x: Tensor, head: int) -> None:
    optimizer.zero_grad()
    model(x, head).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("wrapper", [Preconditioned, Whitened, InputScaled])
def test_rows_that_zero_grad_has_dropped_do_not_wait_for_their_layers_turn(wrapper):
    found = []
    for size in (0.0, 1000.0):
        model = Turns()
        optimizer = wrapper(SGD(model.parameters(), lr=0.1), model, every=1)
        if size:
            model(size * torch.ones(8, 4), 1).sum().backward()  # a step that is skipped
        taken(model, optimizer, torch.eye(4), 0)
        taken(model, optimizer, torch.eye(4), 1)
        found.append([p.detach() for p in model.parameters()])
    assert same(*found)


def test_a_layer_that_is_first_called_after_a_resume_is_not_said_to_be_used_without_a_call():
    model = Turns()
    optimizer = Whitened(SGD(model.parameters(), lr=0.01), model, every=10)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(5):
            taken(model, optimizer, torch.eye(4), 0)
        twin = Turns()
        resumed = Whitened(SGD(twin.parameters(), lr=0.01), twin, every=10)
        resumed.load_state_dict(optimizer.state_dict())
        for _ in range(3):
            taken(twin, resumed, torch.eye(4), 1)
    assert resumed.coverage().never_seen["heads.1.weight"] == "nothing measured yet, 5 columns"
