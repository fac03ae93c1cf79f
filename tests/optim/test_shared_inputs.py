"""Layers that read one tensor share what is made of it, and step bit for bit as if each had its own."""

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adiv_optim import Preconditioned, Whitened
from tests.helpers.cases import relative_error
from tests.helpers.processes import needs_distributed, on_processes
from tests.helpers.remembered import covariance_of, memory
from tests.helpers.revive import through_a_file
from tests.helpers.steps import inputs, same

pytestmark = pytest.mark.usefixtures("in_float64")

WRAPPERS: dict[str, Callable[..., Any]] = {
    "whitened": Whitened,
    "blocks": lambda *given, **options: Whitened(*given, max_dim=4, **options),
    "rank": lambda *given, **options: Whitened(*given, rank=2, **options),
    "preconditioned": Preconditioned,
}


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


def sharing(optimizer: Any) -> str:
    """Which of k and v share the average of q."""
    treated = optimizer.coverage().treated
    return "".join(name for name in "kv" if ", one average with q.weight" in treated[f"{name}.weight"])


def rows(seed: int, count: int = 6) -> Tensor:
    return inputs(seed, count, 6)


def backward(model: nn.Module, x: Tensor) -> None:
    model(x).square().sum().backward()


def step(model: nn.Module, optimizer: Any, *batches: Tensor) -> None:
    optimizer.zero_grad()
    for x in batches:
        backward(model, x)
    optimizer.step()


each_wrapper = pytest.mark.parametrize("kind", WRAPPERS.values(), ids=WRAPPERS)
Pairs = list[tuple[Any, Any]]


def pairs(given: Callable[..., Any] = one, apart: Callable[..., Any] = copies, **options: Any) -> Pairs:
    """Two models and their optimizers: layers of the first may read one tensor, those of the second read copies."""
    return [built(given, **options), built(apart, **options)]


def step_all(pairs: Pairs, *batches: Tensor) -> None:
    for model, optimizer in pairs:
        step(model, optimizer, *batches)


@each_wrapper
def test_they_step_as_if_each_had_its_own(kind):
    (model, optimizer), (apart, reference) = every = pairs(kind=kind)
    for number in range(5):
        step_all(every, rows(number), rows(10 + number, 3))
        assert same(model.parameters(), apart.parameters())
    assert (sharing(optimizer), sharing(reference)) == ("kv", "")
    assert optimizer.coverage().treated["v.weight"].endswith(", one average with q.weight")
    assert all("one average" not in how for how in reference.coverage().treated.values())


@pytest.mark.parametrize("given", [lambda x: (x, 2 * x, x[:]), lambda x: (x.clone(), x, x)], ids=["views", "others"])
def test_what_is_not_the_same_tensor_is_measured_by_itself(given):
    model, optimizer = built(given)
    step(model, optimizer, rows(0))
    assert sharing(optimizer) == ""


def test_a_tensor_that_has_been_written_to_is_another_one():
    def covariances(between: Callable[[Tensor], Any]) -> list[Any]:
        torch.manual_seed(0)
        model = nn.ModuleDict({"q": nn.Linear(6, 4), "k": nn.Linear(6, 4)})
        optimizer = Whitened(torch.optim.SGD(model.parameters(), lr=0.1), model, graft_norm=False)
        x = rows(0)
        model["q"](x).sum().backward()  # which has what it needs of x, so that x may change
        between(x)
        model["k"](x).sum().backward()
        optimizer.step()
        return [covariance_of(optimizer, each) for each in model.values()]

    a, b = covariances(lambda x: None)
    assert relative_error(b, a) <= 1e-12
    a, b = covariances(lambda x: x.mul_(2))
    assert relative_error(b[:6, :6], 4 * a[:6, :6]) <= 1e-12


def test_a_layer_without_a_bias_has_fewer_columns_and_its_own_sum():
    torch.manual_seed(0)
    model = nn.ModuleDict({"q": nn.Linear(6, 4), "k": nn.Linear(6, 4, bias=False)})
    optimizer = Whitened(torch.optim.SGD(model.parameters(), lr=0.1), model, graft_norm=False)
    x = rows(0)
    (model["q"](x) + model["k"](x)).sum().backward()
    optimizer.step()
    for each, read in zip(model.values(), (torch.cat([x, torch.ones(6, 1)], 1), x), strict=True):
        assert relative_error(covariance_of(optimizer, each), read.T @ read / 6) <= 1e-12


def called(seed: int, shared: bool) -> tuple[list[Tensor], bool]:
    """What three layers keep after three steps of calls in any order, on tensors that some of them may share.

    And whether some share what they keep.
    """
    draw = random.Random(seed)
    torch.manual_seed(0)
    model = nn.ModuleDict({name: nn.Linear(6, 4) for name in "qkv"})
    optimizer = Whitened(torch.optim.SGD(model.parameters(), lr=0.1), model, every=1)
    for number in range(3):
        optimizer.zero_grad()
        tensors = [rows(10 * number + k, draw.choice([0, 2, 3])) for k in range(3)]
        for _ in range(draw.randint(1, 4)):
            x, outputs = draw.choice(tensors), []
            for name in draw.sample("qkv", draw.randint(1, 3)):
                output = model[name](x if shared else x.clone()).sum()
                if draw.random() < 0.2:
                    output.backward()
                elif draw.random() < 0.9:
                    outputs.append(output)
                if draw.random() < 0.1:
                    optimizer.zero_grad()
            if outputs:
                torch.stack(outputs).sum().backward()
        for p in model.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        optimizer.step()
    return memory(optimizer), any("one average" in how for how in optimizer.coverage().treated.values())


@pytest.mark.filterwarnings("ignore:Whitened takes plain steps")
def test_calls_in_any_order_leave_what_they_leave_of_copies():
    count = 0
    for seed in range(150):
        (found, shared), (wanted, apart) = called(seed, True), called(seed, False)
        assert same(found, wanted), seed
        assert not apart
        count += shared
    assert count > 10


def test_layers_of_two_models_may_read_one_tensor_and_count_other_rows_of_it():
    def memories(given: Callable[..., Any]) -> list[Tensor]:
        every, x = [built(given, max_rows=count) for count in (None, 2)], rows(0)
        for _ in range(3):
            torch.stack([model(x).square().sum() for model, _ in every]).sum().backward()
            for _, optimizer in every:
                optimizer.step()
                optimizer.zero_grad()
        return [tensor for _, optimizer in every for tensor in memory(optimizer)]

    assert same(memories(one), memories(lambda x: (x.clone(), x.clone(), x.clone())))


def test_numbers_that_a_compiled_graph_writes_into_a_tensor_are_read():
    """It does so to tensors that it has no more use for, whose version stays."""
    layers, x = nn.ModuleDict({"q": nn.Linear(6, 4), "k": nn.Linear(6, 4)}), rows(0)
    optimizer = Whitened(torch.optim.SGD(layers.parameters(), lr=0.1), layers, graft_norm=False)
    for module in layers.values():
        (hook,) = module._forward_hooks.values()
        torch.ops.adiv_optim.count_rows(hook.token, x)  # as compiled code calls it
        x.numpy()[:] *= 2
    for p in layers.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    q, k = (covariance_of(optimizer, each) for each in layers.values())
    assert relative_error(k[:6, :6], 4 * q[:6, :6]) <= 1e-12


def test_a_failure_is_that_of_all_who_share(monkeypatch):
    model, optimizer = built(every=1)
    step(model, optimizer, rows(0))
    calls = []

    def fails(matrix: Tensor) -> Any:
        calls.append(matrix.shape[-1])
        raise torch.linalg.LinAlgError("planted")

    monkeypatch.setattr(torch.linalg, "eigh", fails)
    with pytest.warns(UserWarning, match=r"^q\.weight: no eigenvalues found .* keeps what was measured before"):
        step(model, optimizer, rows(1))
    assert calls == [7, 5]  # of q, k and v once, and of out
    treated = optimizer.coverage().treated
    assert all(treated[f"{name}.weight"].endswith(", 1 factorisations failed") for name in ("q", "k", "v", "out"))
    assert sharing(optimizer) == "kv"


def test_a_resumed_run_takes_the_same_steps_and_shares_again():
    (model, optimizer), (other, resumed) = every = [built(every=1), built(every=1)]
    for number in range(3):
        step(model, optimizer, rows(number))
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(through_a_file(optimizer.state_dict()))
    for number in range(3, 5):
        step_all(every, rows(number))
    assert same(model.parameters(), other.parameters())
    assert (sharing(optimizer), sharing(resumed)) == ("kv", "kv")


def test_a_copy_within_a_step_goes_on():
    model, optimizer = built()
    backward(model, rows(0))
    twin, copied = copy.deepcopy((model, optimizer))
    for p, other in zip(model.parameters(), twin.parameters(), strict=True):
        other.grad = p.grad.clone()
    for each, own in ((model, optimizer), (twin, copied)):
        backward(each, rows(1))
        own.step()
        step(each, own, rows(2))
    assert same(model.parameters(), twin.parameters())
    assert sharing(copied) == "kv"
    kept = memory(optimizer)
    step(twin, copied, rows(3))
    step(twin, copied, rows(4))
    assert same(memory(optimizer), kept)
    assert not same(memory(copied), kept)


#: By rank, what k and v read of the rows of this process.
ACROSS: dict[str, list[Callable[..., Any]]] = {"all": [one, one], "one apart": [one, copies]}


def on_each(rank: int, count: int) -> dict[str, Any]:
    found = {}
    for name, kind in WRAPPERS.items():
        for case, given in ACROSS.items():
            for last in ("sees its rows", "is not called", "sees no rows"):
                model, optimizer = built(given[rank], kind, every=1)
                for number in range(3):
                    optimizer.zero_grad()
                    x = rows(number, 12)
                    alone = last != "sees its rows"
                    part = x[rank::count] if not alone else x if rank == 0 else x[:0]
                    if last != "is not called" or rank == 0:
                        backward(model, part)
                    for p in model.parameters():
                        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                        torch.distributed.all_reduce(p.grad)
                    optimizer.step()
                found[name, case, last] = model.state_dict(), sharing(optimizer)
    return found


@needs_distributed
def test_processes_are_one_on_the_joined_batch_whatever_each_of_them_shares(tmp_path):
    found = on_processes(2, on_each, tmp_path, 2)
    for name, kind in WRAPPERS.items():
        model, reference = built(copies, kind, every=1)
        for number in range(3):
            step(model, reference, rows(number, 12))
        for weights in found:
            for case in (key for key in weights if key[0] == name):
                own, shares = weights[case]
                # They share where they do on every process that has seen rows.
                assert shares == ("" if case[1:] == ("one apart", "sees its rows") else "kv"), case
                for key, value in model.state_dict().items():
                    assert relative_error(own[key], value) <= 1e-12, (case, key)
