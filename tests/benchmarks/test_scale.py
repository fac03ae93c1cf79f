"""The formulas of costs on paper, against what torch counts on a small network."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from adiv_optim import (
    BatchIdeal,
    GradientOnly,
    InputScaled,
    Preconditioned,
    Proportional,
    UnitConsistent,
    Whitened,
    functional,
)
from adiv_optim.gauge import NetworkGauge
from benchmarks.studies import scale
from benchmarks.studies.scale import Cost, Layer, Model, Setting, cost

MODEL = Model(blocks=2, width=24, keys=8, hidden=40, vocabulary=32, context=16, tied=False)
SAMPLES = 4
TOKENS = SAMPLES * MODEL.context
#: Blocks of uneven sizes: 24 columns are two of 12, and 40 are 13, 13 and 14.
AT = {"max_dim": 14, "rank": 5, "micro": TOKENS}


class Block(nn.Module):
    def __init__(self, model: Model):
        super().__init__()
        shapes = {"q": (24, 24), "k": (8, 24), "v": (8, 24), "o": (24, 24), "gate": (40, 24), "up": (40, 24)}
        for name, (outputs, inputs) in {**shapes, "down": (24, 40)}.items():
            setattr(self, name, nn.Linear(inputs, outputs, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        k, v = (part(x).repeat(1, 1, 3) for part in (self.k, self.v))
        x = x + self.o((self.q(x) @ k.mT).softmax(-1) @ v)
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


def decoder(model: Model = MODEL) -> nn.Module:
    return nn.Sequential(
        nn.Embedding(model.vocabulary, model.width),
        *(Block(model) for _ in range(model.blocks)),
        nn.Linear(model.width, model.vocabulary, bias=False),
    )


def loss(model: nn.Module, samples: int = SAMPLES) -> Tensor:
    tokens = torch.arange(samples * MODEL.context).view(samples, -1) % MODEL.vocabulary
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    # A rate so small that the network gauge of one step is near that of the next: one pass over the weights finds it.
    # All weights at once, as on a GPU.
    return torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.1, foreach=True)


def products(optimizer, model: nn.Module, samples: int = SAMPLES) -> float:
    """Operations of the matrix products of a training step."""
    with FlopCounterMode(display=False) as counter:
        loss(model, samples).backward()
        optimizer.step()
        optimizer.zero_grad()
    return counter.get_total_flops()


def test_model_has_the_layers_and_the_operations_that_are_counted():
    model = decoder()
    found = sorted(tuple(p.shape) for name, p in model.named_parameters() if name != "0.weight")
    assert found == sorted((layer.outputs, layer.inputs) for layer in MODEL.treated())
    assert MODEL.parameters() == sum(p.numel() for p in model.parameters())
    assert products(adamw(model), model) == MODEL.step(TOKENS)


@pytest.mark.parametrize(
    ("formula", "kind", "options"),
    [
        (scale.preconditioned, Preconditioned, {}),
        (scale.whitened, Whitened, {}),
        (scale.whitened_rank, Whitened, {"rank": 5}),
        (scale.input_scaled, InputScaled, {"floor": 0.01}),
    ],
    ids=["preconditioned", "whitened", "whitened-rank", "input-scaled"],
)
def test_products_and_memory_of_what_is_measured(formula, kind, options):
    model = decoder()
    sizes = {} if kind is InputScaled else {"max_dim": AT["max_dim"]}
    optimizer = kind(adamw(model), model, every=4, **sizes, **options)
    found = [products(optimizer, model) for _ in range(7)]  # measured at 0, 1, 2 and 6
    measuring, between = (MODEL.step(TOKENS) + cost(formula, MODEL, Setting(TOKENS, every=every, **AT)).products
                          for every in (1, math.inf))  # fmt: skip
    assert found[2:] == [measuring, between, between, between, measuring]
    kept = {part.data_ptr(): part for part in map(Tensor.untyped_storage, _tensors(optimizer.method))}
    size = sum(part.nbytes() for part in kept.values())
    assert cost(formula, MODEL, Setting(TOKENS, every=4, **AT)).kept == size


def _tensors(found) -> list[Tensor]:
    """All that methods, layers and transforms hold, but for the model's own."""
    if isinstance(found, Tensor):
        return [] if isinstance(found, nn.Parameter) else [found]
    if isinstance(found, nn.Module) or not (isinstance(found, (dict, list, tuple)) or hasattr(found, "__dict__")):
        return []
    parts = found.values() if isinstance(found, dict) else found if isinstance(found, (list, tuple)) else None
    return [tensor for part in (vars(found).values() if parts is None else parts) for tensor in _tensors(part)]


@pytest.mark.parametrize("samples", [4, 1], ids=["more-rows-than-columns", "fewer"])
def test_products_of_batch_ideal(samples):
    model = decoder()
    optimizer = GradientOnly(adamw(model), model, BatchIdeal())
    tokens = samples * MODEL.context
    found = products(optimizer, model, samples) - MODEL.step(tokens)
    assert found == cost(scale.batch_ideal, MODEL, Setting(tokens, **AT)).products


class Traffic(TorchDispatchMode):
    """Bytes of the arguments and results of all operations that are neither views nor products; of zeros, results."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if function.is_view or "mm" in name or "empty" in name or name in ("_unsafe_view", "detach"):
            return result
        read = [] if name in ("zero_", "fill_") else args[1:] if name == "copy_" else args
        self.bytes += sum(t.nbytes for t in (*read, result) if isinstance(t, Tensor) and t.numel() >= 2**14)
        return result


def traffic(step) -> int:
    with Traffic() as counted:
        step()
    return counted.bytes


#: Large beside its rows and columns, which the formulas leave out.
WIDE, ROWS = Layer(256, 256), 512


def test_passes_over_rows():
    def run(rule):
        x = torch.randn(ROWS, WIDE.inputs, dtype=torch.bfloat16)
        weight = torch.randn(*WIDE[:2], dtype=torch.bfloat16, requires_grad=True)
        output = functional.linear(x, weight, None, rule)
        return traffic(lambda: output.backward(torch.ones_like(output)))

    assert run(Proportional()) - run(None) == scale.per_row(WIDE, Setting(ROWS)).passes


@pytest.mark.parametrize(
    ("formula", "kind", "options"),
    [
        (scale.input_scaled, InputScaled, {"floor": 0.01, "every": 4}),
        (scale.unit_consistent, UnitConsistent, {"gauge": NetworkGauge(4), "example_input": torch.ones(1, 256)}),
    ],
    ids=["input-scaled", "unit-consistent"],
)
def test_passes_over_weights(formula, kind, options, monkeypatch):

    def steps(kind, layers):
        model = nn.Sequential(
            *(module for _ in range(layers) for module in (nn.Linear(*WIDE[:2], bias=False), nn.ReLU()))
        )
        optimizer = adamw(model)
        optimizer = kind(optimizer, model, **options) if kind else optimizer
        found = []
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.randn(ROWS, WIDE.inputs)).square().mean().backward()
            found.append(traffic(optimizer.step))
        return found[4:]

    measuring, between = (formula(WIDE, Setting(ROWS, every=every)).passes for every in (1, math.inf))
    if kind is InputScaled:  # the inputs are read in the forward pass
        measuring -= scale.HALF * ROWS * WIDE.inputs
    # Of a layer between others, whose inputs and outputs both have free scales.
    found = zip(steps(kind, 4), steps(None, 4), steps(kind, 3), steps(None, 3), strict=True)
    assert [(four - plain) - (three - without) for four, plain, three, without in found] == [measuring, between]


def test_cost_adds_up_and_is_shared():
    assert cost(lambda layer, at: Cost(products=1.0, kept=2.0), MODEL, Setting(TOKENS)) == Cost(15.0, 0.0, 30.0)
    one, many = (cost(scale.whitened, MODEL, Setting(TOKENS, gpus)) for gpus in (1, 8))
    assert one.sent == 0
    assert many.kept == one.kept
    assert many.products == one.products / 8
    one, many = (cost(scale.whitened_rank, MODEL, Setting(TOKENS, gpus)) for gpus in (1, 8))
    assert one.products > many.products > one.products / 8  # every GPU follows all eigenvectors


def test_tables_are_made_for_every_model():
    text = scale.section("8B", {}, "", None)
    assert text.count("\n| `") == len(scale.WRAPPERS)
    assert "8.03 billion parameters" in text
