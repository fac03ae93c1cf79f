"""Layers that read one tensor keep one covariance, and step as if each had its own."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adiv_optim import Preconditioned, Whitened
from adiv_optim._linalg.roots import NoRootError
from tests.helpers.cases import relative_error
from tests.helpers.processes import needs_distributed, on_processes

try:
    from torch.distributed.fsdp import fully_shard
except ImportError:  # a torch without distributed
    fully_shard = None

pytestmark = pytest.mark.usefixtures("in_float64")

WRAPPERS: dict[str, Callable[..., Any]] = {
    "whitened": Whitened,
    "blocks": lambda *given, **options: Whitened(*given, max_dim=4, **options),
    "rank": lambda *given, **options: Whitened(*given, rank=2, **options),
    "preconditioned": Preconditioned,
}
on_cpu = pytest.mark.skipif(
    fully_shard is None or not hasattr(torch.cpu.Stream, "record_event"), reason="fully_shard needs a GPU in this torch"
)
each_wrapper = pytest.mark.parametrize("kind", WRAPPERS.values(), ids=WRAPPERS)


class Projections(nn.Module):
    """Three layers that read what `given` makes of the input for each of them, and one that reads theirs."""

    def __init__(self, given: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = nn.Linear(6, 4), nn.Linear(6, 5), nn.Linear(6, 4), nn.Linear(4, 3)
        self.given = given

    def forward(self, x: Tensor) -> Tensor:
        x, y, z = self.given(x)
        return self.out(self.q(x).tanh() * self.k(y).sum(-1, keepdim=True) + self.v(z))


def one(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x, x, x


def copies(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x, x.clone(), x.clone()


def built(given: Callable[..., Any] = one, kind: Callable[..., Any] = Whitened, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = Projections(given)
    return model, kind(torch.optim.AdamW(model.parameters(), lr=0.1), model, **{"every": 2, **options})


def inputs(seed: int, rows: int = 6) -> Tensor:
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(seed))


def backward(model: nn.Module, x: Tensor) -> None:
    model(x).square().sum().backward()


def step(model: nn.Module, optimizer: Any, *batches: Tensor) -> None:
    optimizer.zero_grad()
    for x in batches:
        backward(model, x)
    optimizer.step()


def layer(optimizer: Any, name: str) -> Any:
    return next(each for each in optimizer.chart.layers if each.name == f"{name}.weight")


def same(model: nn.Module, other: nn.Module) -> bool:
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return all(torch.equal(p, q) for p, q in pairs)


def sharing(optimizer: Any) -> str:
    """Which of k and v have the memory of q, and what was made of it."""
    first, found = layer(optimizer, "q"), ""
    for name in "kv":
        follower = next((each for each in optimizer.chart.layers if each.name == f"{name}.weight"), None)
        if follower is not None and follower.total is not None:
            kept = [a is b for a, b in zip(follower.memory(), first.memory(), strict=True)]
            made = optimizer.chart.measured[follower.name] is optimizer.chart.measured[first.name]
            assert {made, *kept} in ({True}, {False})
            found += name if made else ""
    return found


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
    (a,), (b,) = (layer(written, name).mean() for name in "qk")
    assert relative_error(b[:6, :6], 4 * a[:6, :6]) <= 1e-12


def test_a_layer_without_a_bias_does_not_follow_one_with_a_bias():
    torch.manual_seed(0)
    model = nn.ModuleDict({"q": nn.Linear(6, 4), "k": nn.Linear(6, 4, bias=False)})
    optimizer = Whitened(torch.optim.SGD(model.parameters(), lr=0.1), model)
    x = inputs(0)
    (model["q"](x) + model["k"](x)).sum().backward()
    optimizer.step()
    assert [each.sizes for each in optimizer.chart.layers] == [[7], [6]]


class Switching:
    """The same tensor for all until the call of a number; from then on a copy for k."""

    def __init__(self, number: int) -> None:
        self.left = number

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self.left -= 1
        return x, x if self.left >= 0 else 3 * x, x


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
    model, optimizer = built(every=1)
    step(model, optimizer, inputs(0))
    old = optimizer.chart.measured["k.weight"]
    optimizer.zero_grad()
    backward(model, inputs(1))
    model.q = nn.Linear(6, 4)
    optimizer.add_param_group({"params": list(model.q.parameters())})
    optimizer.step()
    assert optimizer.chart.measured["k.weight"] is old
    assert "one covariance" not in optimizer.coverage().treated["k.weight"]
    step(model, optimizer, inputs(2))
    assert optimizer.chart.measured["k.weight"] is not old
    assert sharing(optimizer) == ""


def test_within_a_step_it_keeps_what_was_measured_before():
    model, optimizer = built(Switching(3), every=1)
    step(model, optimizer, inputs(0))
    step(model, optimizer, inputs(1))
    old, new = optimizer.chart.measured["k.weight"], layer(optimizer, "q").total
    step(model, optimizer, inputs(2), inputs(3))  # the second of these is not the same for k
    assert layer(optimizer, "q").total is not new
    assert layer(optimizer, "k").rows < layer(optimizer, "q").rows
    assert optimizer.chart.measured["k.weight"] is not old  # by the rows of the second call
    step(model, optimizer, inputs(4))
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
    model, optimizer = built(every=1)
    step(model, optimizer, inputs(0))
    old = optimizer.chart.measured["k.weight"]
    optimizer.zero_grad()
    backward(model, inputs(1))
    model.q(inputs(2)).sum().backward()
    optimizer.step()
    assert optimizer.chart.measured["k.weight"] is old
    assert optimizer.chart.measured["q.weight"] is not old
    step(model, optimizer, inputs(3))
    assert sharing(optimizer) == ""
    assert optimizer.chart.measured["k.weight"] is not old


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
    old, calls = optimizer.chart.measured["v.weight"], []

    def fails(layer: Any) -> Any:
        calls.append(layer.name)
        raise NoRootError("planted")

    optimizer.chart.measure = fails
    with pytest.warns(UserWarning, match="planted"):
        step(model, optimizer, inputs(1))
    assert calls == ["q.weight", "out.weight"]
    assert optimizer.chart.failures == dict.fromkeys((f"{name}.weight" for name in ("q", "k", "v", "out")), 1)
    assert optimizer.chart.measured["v.weight"] is old


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def by_names(optimizer: Any, other: Any) -> None:
    """As torch.distributed.checkpoint does: every tensor by itself."""
    other.load_state_dict(through_a_file(optimizer.inner.state_dict()))
    other.averages.load_state_dict(copy.deepcopy(through_a_file([optimizer.averages.state_dict()])[0]))
    for each in other.chart.layers:
        each.total = [block.clone() for block in each.total]


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
    assert layer(copied, "v").total[0] is not layer(optimizer, "v").total[0]


#: By rank, what k reads of the rows of this process; at the last the process sees none.
ACROSS: dict[str, list[Callable[..., Any]]] = {
    "all": [one, one, one],
    "one apart": [one, copies, one],
    "the first apart": [copies, one, one],
}


def on_each(rank: int, count: int) -> dict[str, Any]:
    found = {}
    for name, kind in WRAPPERS.items():
        for case, given in ACROSS.items():
            for empty in ("", "unseen", "no rows"):
                model, optimizer = built(given[rank], kind, every=1)
                for number in range(3):
                    optimizer.zero_grad()
                    x = inputs(number, 12)
                    last = empty and rank == count - 1
                    part = x[:0] if last else x[rank :: count - bool(empty)]
                    if not last or empty == "no rows":
                        backward(model, part)
                    for p in model.parameters():
                        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                        torch.distributed.all_reduce(p.grad)
                    optimizer.step()
                found[name, case, empty] = model.state_dict(), sharing(optimizer)
    return found


@needs_distributed
@pytest.mark.parametrize("count", [2, 3])
def test_processes_follow_together_or_not_at_all(count, tmp_path):
    every = on_processes(count, on_each, tmp_path, count)
    for name, kind in WRAPPERS.items():
        model, reference = built(copies, kind, every=1)
        for number in range(3):
            step(model, reference, inputs(number, 12))
        for found in every:
            for case in ACROSS:
                for empty in ("", "unseen", "no rows"):
                    weights, shared = found[name, case, empty]
                    for key, value in model.state_dict().items():
                        assert relative_error(weights[key], value) <= 1e-12, (name, case, empty, key)
                    # A process that sees no rows has nothing to say against it.
                    apart = case == "the first apart" or (case == "one apart" and not (empty and count == 2))
                    assert shared == ("" if apart else "kv")


def uncalled(rank: int, count: int) -> Any:
    """The covariance of k, which the last process does not call."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"q": nn.Linear(6, 4), "k": nn.Linear(6, 4)})
    optimizer = Whitened(torch.optim.SGD(model.parameters(), lr=0.1), model)
    x = inputs(rank)
    (model["q"](x).sum() + (0 if rank == count - 1 else model["k"](x).sum())).backward()
    for p in model["k"].parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    (covariance,) = layer(optimizer, "k").mean()
    return layer(optimizer, "k").rows, covariance[:6, :6]


@needs_distributed
def test_a_layer_that_one_process_does_not_call_follows_on_none(tmp_path):
    for rows, covariance in on_processes(2, uncalled, tmp_path, 2):
        assert rows == 6
        assert relative_error(covariance, inputs(0).T @ inputs(0) / 6) <= 1e-12


def on_shards(rank: int, count: int) -> Any:
    torch.manual_seed(0)
    model = fully_shard(Projections(one))
    optimizer = Whitened(torch.optim.AdamW(model.parameters(), lr=0.1), model, every=1)
    for number in range(3):
        optimizer.zero_grad()
        (model(inputs(number, 12)[rank::count]).square().sum() * count).backward()  # gradients are averaged
        optimizer.step()
    return {name: value.full_tensor() for name, value in model.state_dict().items()}, sharing(optimizer)


@needs_distributed
@on_cpu
def test_sharded_layers_follow(tmp_path):
    model, reference = built(copies, every=1)
    for number in range(3):
        step(model, reference, inputs(number, 12))
    for weights, shared in on_processes(2, on_shards, tmp_path, 2):
        assert shared == "kv"
        assert max(relative_error(weights[name], value) for name, value in model.state_dict().items()) <= 1e-12
