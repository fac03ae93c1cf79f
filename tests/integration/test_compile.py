"""torch.compile of the model, one graph where inputs are measured, and of the whole step: steps stay as they are."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad
from torch.utils.checkpoint import checkpoint

from adiv_optim import Whitened
from tests.helpers.cases import relative_error
from tests.helpers.loops import (
    DIFFERENT,
    EXACT,
    METHODS,
    deviation,
    each_method,
    plain_loop,
    sgd,
    train,
    weights,
)
from tests.helpers.modules import Model
from tests.helpers.remembered import covariance_of, remembered, rows_counted
from tests.helpers.steps import network
from tests.integration.test_loops import rows
from tests.wrappers import WRAPPERS

# The compiler's front end and autograd's tracing, which is where hooks, Functions and optimizers are met.
BACKEND = "aot_eager"

pytestmark = [
    pytest.mark.usefixtures("in_float64", "fresh_compiler"),
    # The compiler's own, where a graph ends with a tensor that is no leaf.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch._inductor", "ignore::UserWarning:torch._dynamo"),
]

#: What is counted differs between these; the others that measure inputs count as one of them.
ONE_GRAPH = ("input-scaled", "whitened", "whitened-rank")


def mlp() -> nn.Module:
    return network(6, 8, 3)


@pytest.mark.parametrize("name", [name for name in METHODS if name not in ONE_GRAPH])
def test_compiled_model(name):
    method, model = METHODS[name], mlp()
    optimizer = method.wrap(sgd(model), model, rows(1)[0][0])
    train(torch.compile(model, backend=BACKEND), optimizer, rows())
    wanted = plain_loop(method, rows(), build=mlp, inner=sgd)
    assert deviation(weights(model), wanted) <= EXACT
    bare = mlp()
    train(bare, sgd(bare), rows())
    assert deviation(weights(bare), wanted) > DIFFERENT


@pytest.mark.parametrize("name", ["proportional", "unit-consistent"])
def test_wrapper_of_a_compiled_model(name):
    """What torch.compile returned is a model too."""
    method, model = METHODS[name], mlp()
    compiled = torch.compile(model, backend=BACKEND)
    train(compiled, method.wrap(sgd(model), compiled, rows(1)[0][0]), rows())
    assert deviation(weights(model), plain_loop(method, rows(), build=mlp, inner=sgd)) <= EXACT


@each_method
def test_compiled_step(method):
    model = mlp()
    optimizer = method.wrap(sgd(model), model, rows(1)[0][0])

    @torch.compile(backend=BACKEND)
    def step(x, y):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    for x, y in rows():
        step(x, y)
    assert deviation(weights(model), plain_loop(method, rows(), build=mlp, inner=sgd)) <= EXACT
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 12  # without the wrapper there are 3


def attention(model: Any, x: Tensor) -> Tensor:
    """q, k and v read one tensor, `out` one of the same width, and memory is free to be used again."""
    x_ = model.norm(x)
    return x + model.out(F.scaled_dot_product_attention(model.q(x_), model.k(x_), model.v(x_)))


class Network(nn.Module):
    """A block in a loop, in which a break of the graph would keep the whole frame out of the compiler."""

    def __init__(self, again: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = {name: nn.Linear(6, 6, bias=name != "v") for name in ("q", "k", "v", "out")}
        self.blocks, self.head = nn.ModuleList([Model(attention, norm=nn.LayerNorm(6), **layers)]), nn.Linear(6, 3)
        self.again = again

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        return self.head(x).mean(1)


def batches(sizes: tuple[int, ...] = (8,) * 7) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, 4, 6, generator=generator), torch.randint(3, (size,), generator=generator)) for size in sizes
    ]


def whole(backend: str = BACKEND, **settings: Any) -> Callable[[nn.Module], Any]:
    return lambda model: torch.compile(model, backend=backend, fullgraph=True, **settings)


def trained(
    name: str,
    compiled: Callable[[nn.Module], Any] = lambda model: model,
    sizes: tuple[int, ...] = (8,) * 7,
    again: bool = False,
    autocast: bool = False,
) -> tuple[Any, Any]:
    """A model after steps of two micro-batches each, with a pass without gradients between them."""
    model = Network(again)
    optimizer = WRAPPERS[name](torch.optim.SGD(model.parameters(), lr=0.1), model, None)
    function = compiled(model)
    for x, y in batches(sizes):
        optimizer.zero_grad()
        for part, target in zip(x.chunk(2), y.chunk(2), strict=True):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = F.cross_entropy(function(part), target)
            loss.backward()
        with torch.no_grad():
            function(x)
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("name", ONE_GRAPH)
def test_the_model_is_one_graph_and_steps_are_those_of_eager_mode(name):
    """One graph for steps that measure, one for others, each with and without gradients and for two batch sizes."""
    (model, optimizer), (plain, reference) = trained(name, whole(dynamic=False)), trained(name)
    assert deviation(weights(model), weights(plain)) <= EXACT
    assert [entries.get("rows") for entries in remembered(optimizer).values()] == [
        entries.get("rows") for entries in remembered(reference).values()
    ]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 5
    assert not torch._dynamo.utils.counters["graph_break"]


#: Three steps, which all measure: compiling what counts rows is what takes its time.
MEASURED = (8, 8, 8)


@pytest.mark.parametrize(
    "settings",
    [{"sizes": (8, 6, 4)}, {"sizes": MEASURED, "autocast": True}, {"sizes": MEASURED, "again": True}],
    ids=["sizes", "autocast", "checkpoint"],
)
def test_uses(settings):
    """Compiled checkpoints count their rows once: the reference has none."""
    model, _ = trained("whitened", whole(), **settings)
    plain, _ = trained("whitened", **{**settings, "again": False})
    assert deviation(weights(model), weights(plain)) <= (1e-2 if "autocast" in settings else EXACT)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_backends_that_run_the_graph_as_it_is_and_that_generate_code(backend):
    model, _ = trained("whitened", whole(backend, dynamic=False), MEASURED)
    plain, _ = trained("whitened", sizes=MEASURED)
    assert deviation(weights(model), weights(plain)) <= EXACT


def test_a_tensor_that_is_written_to_between_two_layers_is_another_one():
    def writes(model: Any, x: Tensor) -> Tensor:
        x = x.sin()
        found = model.q(x)
        x.mul_(2)
        return found + model.k(x) + model.v(x)

    def covariances(compiled: Callable[[nn.Module], Any]) -> list[Tensor]:
        torch.manual_seed(0)
        model = Model(writes, q=nn.Linear(4, 4), k=nn.Linear(4, 4), v=nn.Linear(4, 4))
        optimizer = Whitened(torch.optim.SGD(model.parameters(), lr=0.1), model, graft_norm=False)
        model.q.requires_grad_(False)  # nothing needs x as it was
        compiled(model)(torch.arange(12.0).view(3, 4)).sum().backward()
        optimizer.step()
        return [covariance_of(optimizer, layer) for layer in (model.k, model.v)]

    for found, wanted in zip(covariances(whole()), covariances(lambda model: model), strict=True):
        assert relative_error(found, wanted) <= EXACT


def small() -> tuple[nn.Module, Any, Tensor]:
    model = network(4, 4, 2)
    return model, Whitened(torch.optim.SGD(model.parameters(), lr=0.1), model), torch.randn(3, 4)


def rows_of_a_step(model: nn.Module, optimizer: Any) -> list[float]:
    """How many rows of each layer count in a step that is taken now."""
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    return [*rows_counted(optimizer).values()]


def test_copies_count_for_themselves():
    model, optimizer, x = small()
    whole()(model)(x)
    twin, copied = copy.deepcopy((model, optimizer))
    whole()(twin)(x)
    whole()(copy.deepcopy(model))(x)  # a copy without the optimizer counts nothing
    assert rows_of_a_step(model, optimizer) == [3, 3]
    assert rows_of_a_step(twin, copied) == [6, 6]


def test_inference_mode_counts_nothing_though_gradients_are_enabled():
    model, optimizer, x = small()
    compiled = whole()(model)
    with torch.inference_mode(), torch.enable_grad():
        compiled(x)
    compiled(x)
    assert rows_of_a_step(model, optimizer) == [3, 3]


@pytest.mark.skipif(torch.__version__.startswith("2.9."), reason="torch 2.9 looks for no hooks after compilation")
def test_a_layer_that_comes_between_measurements_counts_from_the_next_one_on():
    model = network(4, 4, 2)
    model[0].requires_grad_(False)
    optimizer, compiled = Whitened(torch.optim.SGD(model[2].parameters(), lr=0.1), model, every=2), whole()(model)
    for step in range(8):
        if step == 6:  # which does not measure
            model[0].requires_grad_(True)
            optimizer.add_param_group({"params": list(model[0].parameters())})
        optimizer.zero_grad()
        compiled(torch.randn(3, 4)).square().sum().backward()
        optimizer.step()
    assert rows_counted(optimizer)["0.weight"] == 3


@pytest.mark.filterwarnings("ignore:Whitened takes plain steps. no layer has seen a row")
def test_a_layer_that_is_called_between_measurements_alone_is_known_to_be_called():
    """Else a layer with gradients that measurements see no row of is told to be called by nobody."""
    model = network(4, 4, 2)
    optimizer, x = Whitened(torch.optim.SGD(model.parameters(), lr=0.1), model, every=4), torch.randn(3, 4)
    found = []
    for measures in (True, True, True, False, False, False, True):  # as steps of every=4 do
        if not measures:
            whole()(model)(x)
        found.append(rows_of_a_step(model, optimizer))
    assert found == [[0, 0]] * 7
    assert set(optimizer.coverage().never_seen) == {"0.weight", "0.bias", "2.weight", "2.bias"}


@pytest.mark.filterwarnings("ignore")  # of the break
@pytest.mark.parametrize("training", [True, False])
def test_a_transform_breaks_the_graph_and_its_rows_count(training):
    model, optimizer, x = small()
    model.train(training)

    @torch.compile(backend="aot_eager")
    def gradients(parameters: Any) -> Any:
        return grad(lambda given: functional_call(model, given, (x,)).sum())(parameters)

    gradients(dict(model.named_parameters()))
    assert rows_of_a_step(model, optimizer) == [len(x)] * 2


def exported(strict: bool) -> Callable[[nn.Module, Tensor], Any]:
    return lambda model, x: torch.export.export(model, (x,), strict=strict).module()(x)


@pytest.mark.filterwarnings("ignore")  # of their own affairs
@pytest.mark.parametrize("record", [exported(True), exported(False), torch.jit.trace], ids=["strict", "export", "jit"])
def test_an_export_or_trace_counts_nothing(record):
    """TensorBoard's add_graph traces, too; the number of rows became a tensor, and the checkpoint was refused."""
    model, optimizer, x = small()
    record(model, x)
    assert rows_of_a_step(model, optimizer) == [0, 0]
