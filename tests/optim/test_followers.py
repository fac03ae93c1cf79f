"""Layers that read one tensor keep one covariance, and step as if each had its own."""

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from adiv_optim import Preconditioned, Whitened
from adiv_optim._linalg.roots import NoRootError
from tests.helpers.cases import relative_error
from tests.helpers.inputs import mean_of
from tests.helpers.projections import WRAPPERS, backward, built, copies, inputs, layer, one, same, sharing, step
from tests.helpers.revive import through_a_file

pytestmark = pytest.mark.usefixtures("in_float64")

each_wrapper = pytest.mark.parametrize("kind", WRAPPERS.values(), ids=WRAPPERS)


@each_wrapper
def test_followers_step_as_if_they_had_their_own(kind):
    (model, optimizer), (apart, reference) = built(kind=kind), built(copies, kind)
    for number in range(5):
        for each in ((model, optimizer), (apart, reference)):
            step(*each, inputs(number), inputs(10 + number, 3))
        assert same(model, apart)
    assert sharing(optimizer) == "kv"
    assert sharing(reference) == ""
    found = optimizer.coverage().treated
    assert found["v.weight"].endswith(", one covariance with q.weight")
    assert all("one covariance" not in how for how in reference.coverage().treated.values())


@pytest.mark.parametrize("given", [lambda x: (x, 2 * x, x[:]), lambda x: (x.clone(), x, x)], ids=["views", "others"])
def test_what_is_not_the_same_tensor_is_measured_by_itself(given):
    model, optimizer = built(given)
    step(model, optimizer, inputs(0))
    assert sharing(optimizer) == ""


def test_a_tensor_that_has_been_written_to_is_another_one():
    def step_of(between: Callable[[Tensor], Any]) -> Any:
        torch.manual_seed(0)
        model = nn.ModuleDict({"q": nn.Linear(6, 4), "k": nn.Linear(6, 4)})
        optimizer = Whitened(torch.optim.SGD(model.parameters(), lr=0.1), model)
        x = inputs(0)
        model["q"](x).sum().backward()  # which has what it needs of x, so that x may change
        between(x)
        model["k"](x).sum().backward()
        optimizer.step()
        return optimizer

    assert sharing(step_of(lambda x: None)) == "k"
    written = step_of(lambda x: x.mul_(2))
    assert sharing(written) == ""
    (a,), (b,) = (mean_of(layer(written, name)) for name in "qk")
    assert relative_error(b[:6, :6], 4 * a[:6, :6]) <= 1e-12


def test_a_layer_without_a_bias_does_not_follow_one_with_a_bias():
    torch.manual_seed(0)
    model = nn.ModuleDict({"q": nn.Linear(6, 4), "k": nn.Linear(6, 4, bias=False)})
    optimizer = Whitened(torch.optim.SGD(model.parameters(), lr=0.1), model)
    x = inputs(0)
    (model["q"](x) + model["k"](x)).sum().backward()
    optimizer.step()
    assert [each.sizes for each in optimizer.method.layers] == [[7], [6]]


class Switching:
    """The same tensor for all until the call of a number; from then on a copy for k."""

    def __init__(self, number: int, given: Callable[..., Any] = one) -> None:
        self.left, self.given = number, given

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self.left -= 1
        x, y, z = self.given(x)
        return x, y if self.left >= 0 else 3 * y, z


def test_a_layer_that_reads_something_else_goes_its_own_way():
    (model, optimizer), (apart, reference) = built(Switching(2), every=1), built(copies, every=1)
    for number in range(2):
        step(model, optimizer, inputs(number))
        step(apart, reference, inputs(number))
    assert sharing(optimizer) == "kv"
    step(model, optimizer, inputs(2))
    apart.given = lambda x: (x, 3 * x, x.clone())
    step(apart, reference, inputs(2))
    assert same(model, apart)
    assert sharing(optimizer) == "v"


def test_a_layer_of_another_past_does_not_follow():
    (model, optimizer), (apart, reference) = built(lambda x: (x, 3 * x, x), every=1), built(copies, every=1)
    apart.given = lambda x: (x, 3 * x, x.clone())
    for number in range(2):
        step(model, optimizer, inputs(number))
        step(apart, reference, inputs(number))
    model.given, apart.given = one, copies
    for number in range(2, 4):
        step(model, optimizer, inputs(number))
        step(apart, reference, inputs(number))
    assert same(model, apart)
    assert sharing(optimizer) == "v"


def test_a_layer_whose_leader_is_replaced_goes_its_own_way():
    (model, optimizer), (apart, reference) = built(every=1), built(copies, every=1)
    new = nn.Linear(6, 4)
    for each, own in ((model, optimizer), (apart, reference)):
        step(each, own, inputs(0))
        own.zero_grad()
        backward(each, inputs(1))
        each.q = copy.deepcopy(new)
        own.add_param_group({"params": list(each.q.parameters())})
        own.step()
        step(each, own, inputs(2))
    assert same(model, apart)
    assert sharing(optimizer) == ""


def test_within_a_step_it_parts_with_what_it_has_read():
    model, optimizer = built(Switching(3), every=1)
    apart, reference = built(Switching(3, copies), every=1)
    for each, own in ((model, optimizer), (apart, reference)):
        step(each, own, inputs(0))
        step(each, own, inputs(1))
        step(each, own, inputs(2), inputs(3))  # the second of these is not the same for k
    assert same(model, apart)
    assert sharing(optimizer) == "v"


@pytest.mark.parametrize("rows", [3, 0])
def test_a_layer_that_has_read_other_rows_before_does_not_follow(rows):
    def stepped(given: Callable[..., Any]) -> tuple[Any, Any]:
        model, optimizer = built(given, every=1)
        optimizer.zero_grad()
        model.q(inputs(1)).sum().backward()
        model.k(inputs(2)[:rows]).sum().backward()
        backward(model, inputs(4))
        optimizer.step()
        return model, optimizer

    (model, optimizer), (apart, _) = stepped(one), stepped(copies)
    assert same(model, apart)
    assert sharing(optimizer) == ""


def test_a_layer_that_is_called_again_alone_is_followed_no_more():
    (model, optimizer), (apart, reference) = built(every=1), built(copies, every=1)
    for each, own in ((model, optimizer), (apart, reference)):
        own.zero_grad()
        backward(each, inputs(0))
        each.q(inputs(1)).sum().backward()
        own.step()
    assert same(model, apart)
    assert sharing(optimizer) == ""


class Heads(nn.Module):
    """Two layers that read the input, the second of them last."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.q(x) + self.k(x)


def test_checkpoints_that_recompute_a_part_of_the_layers_change_nothing():
    """Without re-entrance the recomputation ends within the last layer: the first is called again, that one is not."""
    found = []
    for again in (False, True):
        torch.manual_seed(0)
        model = Heads()
        optimizer = Preconditioned(torch.optim.SGD(model.parameters(), lr=0.1), model)
        losses = []
        for number in range(3):
            optimizer.zero_grad()
            x = 100 * inputs(number)[:, :4]
            loss = (checkpoint(model, x, use_reentrant=False) if again else model(x)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        found.append(losses)
    assert found[1] == pytest.approx(found[0], rel=1e-12)  # rows that count twice have the same mean


def called(seed: int, follow: bool) -> list[Any]:
    """What three layers keep after three steps of calls in any order, on tensors that some of them share."""
    draw = random.Random(seed)
    torch.manual_seed(0)
    model = nn.ModuleDict({name: nn.Linear(6, 4) for name in "qkv"})
    optimizer = Whitened(torch.optim.SGD(model.parameters(), lr=0.1), model, every=1)
    for number in range(3):
        optimizer.zero_grad()
        tensors = [inputs(10 * number + k, draw.choice([0, 2, 3])) for k in range(3)]
        for _ in range(draw.randint(1, 4)):
            x = draw.choice(tensors)
            for name in draw.sample("qkv", draw.randint(1, 3)):
                output = model[name](x if follow else x.clone())
                if draw.random() < 0.8:
                    output.sum().backward()
                if draw.random() < 0.1:
                    optimizer.zero_grad()
        for p in model.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        optimizer.step()
    return [(each.rows, each.memory) for each in optimizer.method.layers]


@pytest.mark.filterwarnings("ignore:Whitened takes plain steps")
def test_calls_in_any_order_leave_what_they_leave_without_following():
    followed = 0
    for seed in range(150):
        pairs = list(zip(called(seed, True), called(seed, False), strict=True))
        for (rows, total), (wanted_rows, wanted) in pairs:
            assert rows == wanted_rows, seed
            assert (total is None) == (wanted is None), seed
            assert total is None or all(torch.equal(a, b) for a, b in zip(total, wanted, strict=True)), seed
        memory = [total[0].data_ptr() for (_, total), _ in pairs if total is not None]
        followed += len(set(memory)) < len(memory)
    assert followed > 10


def test_rows_whose_gradients_were_cleared_do_not_count():
    (model, optimizer), (apart, reference) = built(), built(copies)
    for each, own in ((model, optimizer), (apart, reference)):
        each(inputs(0))
        step(each, own, inputs(1))
        step(each, own, inputs(2))
    assert same(model, apart)
    assert layer(optimizer, "v").rows == pytest.approx(6 * 1.9)
    assert sharing(optimizer) == "kv"


def test_calls_whose_gradients_were_cleared_do_not_count():
    (model, optimizer), (apart, reference) = built(), built(copies)
    for each, own in ((model, optimizer), (apart, reference)):
        each(inputs(0))
        own.zero_grad()
        each.q(inputs(1)).sum().backward()
        backward(each, inputs(2))
        own.step()
    assert same(model, apart)
    assert layer(optimizer, "k").rows == layer(reference, "k").rows == 6


def test_a_failure_is_that_of_all_who_follow():
    model, optimizer = built(every=1)
    step(model, optimizer, inputs(0))
    old, calls = optimizer.method.measured["v.weight"], []

    def fails(layer: Any) -> Any:
        calls.append(layer.name)
        raise NoRootError("planted")

    optimizer.method.measure = fails
    with pytest.warns(UserWarning, match="planted"):
        step(model, optimizer, inputs(1))
    assert calls == ["q.weight", "out.weight"]
    assert optimizer.method.failures == dict.fromkeys((f"{name}.weight" for name in ("q", "k", "v", "out")), 1)
    assert optimizer.method.measured["v.weight"] is old


def by_names(optimizer: Any, other: Any) -> None:
    """As torch.distributed.checkpoint does: every tensor by itself."""
    other.load_state_dict(through_a_file(optimizer.inner.state_dict()))
    other.averages.load_state_dict(copy.deepcopy(through_a_file([optimizer.averages.state_dict()])[0]))
    for each in other.method.layers:
        each.memory = [block.clone() for block in each.memory]


@each_wrapper
@pytest.mark.parametrize("names", [False, True], ids=["state_dict", "averages"])
def test_a_resumed_run_shares_again(kind, names):
    model, optimizer = built(kind=kind, every=1)
    for number in range(3):
        step(model, optimizer, inputs(number))
    other, resumed = built(kind=kind, every=1)
    other.load_state_dict(model.state_dict())
    if names:
        by_names(optimizer, resumed)
    else:
        resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    for number in range(3, 5):
        step(model, optimizer, inputs(number))
        step(other, resumed, inputs(number))
    assert same(model, other)
    assert sharing(resumed) == "kv"


def test_a_copy_within_a_step_goes_on():
    model, optimizer = built()
    backward(model, inputs(0))
    twin, copied = copy.deepcopy((model, optimizer))
    for p, other in zip(model.parameters(), twin.parameters(), strict=True):
        other.grad = p.grad.clone()
    for each, own in ((model, optimizer), (twin, copied)):
        backward(each, inputs(1))
        own.step()
        step(each, own, inputs(2))
    assert same(model, twin)
    assert sharing(copied) == "kv"
    assert layer(copied, "v").memory[0] is not layer(optimizer, "v").memory[0]
