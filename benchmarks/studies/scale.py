"""What the wrappers cost beside a training step of large models on many GPUs: formulas alone, nothing is measured.

Operations of matrix products are 2 m n k, as torch.utils.flop_counter counts them; those of factorisations are the
textbook's (Golub and Van Loan 2013: eigh 9n³, Cholesky n³/3 and its inverse 2n³/3, QR with Q 4nr²). Optimizers are
AdamW with decoupled weight decay; weights, gradients and moments are float32 and dealt out by fully_shard, activations
bfloat16.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from adiv_optim._linalg.strips import STRIP

from ..core.store import Store
from ..core.study import Digest
from ..core.table import markdown

FLOAT, HALF, DOUBLE = 4, 2, 8
#: Bytes that a layer adds to a measurement of covariances: its rows, and three numbers of which layer it follows.
TOLD = 4 * DOUBLE


class Layer(NamedTuple):
    """A linear layer without a bias."""

    outputs: int
    inputs: int
    follows: bool = False  # whether it reads what another one reads, and has the covariance of that


@dataclass(frozen=True)
class Model:
    """A decoder with gated MLPs: per block q, k, v, the attention's output, gate, up and down."""

    blocks: int
    width: int
    keys: int  # width of k, and of v
    hidden: int
    vocabulary: int
    context: int
    tied: bool  # whether the head is the embedding, which no wrapper of layers treats

    def treated(self) -> list[Layer]:
        """The layers that wrappers treat."""
        width, hidden = self.width, self.hidden
        block = [Layer(width, width)] * 2 + [Layer(self.keys, width, follows=True)] * 2
        block += [Layer(hidden, width), Layer(hidden, width, follows=True), Layer(width, hidden)]
        return block * self.blocks + [Layer(self.vocabulary, width)] * (not self.tied)

    def parameters(self) -> int:
        """Elements of all matrices."""
        return sum(o * i for o, i, _ in self.treated()) + self.vocabulary * self.width

    def step(self, tokens: int) -> float:
        """Operations of forward and backward: 6 for each token and weight of a layer, 12 for each pair in attention."""
        weights = sum(o * i for o, i, _ in self.treated()) + self.vocabulary * self.width * self.tied
        return tokens * (6 * weights + 12 * self.context * self.width * self.blocks)


#: The shapes of Llama 3.2 1B, Llama 3 8B and 70B.
MODELS = {
    "1B": Model(16, 2048, 512, 8192, 128256, 8192, tied=True),
    "8B": Model(32, 4096, 1024, 14336, 128256, 8192, tied=False),
    "70B": Model(80, 8192, 1024, 28672, 128256, 8192, tied=False),
}


@dataclass(frozen=True)
class Setting:
    """How a step is taken; `every`, `max_dim` and `rank` are the wrappers'."""

    tokens: int  # of a step, all GPUs together
    gpus: int = 1
    every: float = 10
    max_dim: int = 1024
    rank: int = 16
    micro: int = 8192  # tokens that a GPU's forward and backward take at once

    def squares(self, layer: Layer) -> tuple[int, int, int]:
        """Sums over the blocks of A of the entries that are kept, in strips from the diagonal on, of n² and of n³."""
        sizes = [b - a for a, b in _parts(layer.inputs, -(-layer.inputs // self.max_dim))]
        upper = sum((b - a) * (n - a) for n in sizes for a, b in _parts(n, max(1, n // STRIP)))
        return upper, sum(n**2 for n in sizes), sum(n**3 for n in sizes)

    def all_reduce(self, size: float) -> float:
        """Bytes that a GPU sends for the sum of so many, around a ring."""
        return 2 * size * (self.gpus - 1) / self.gpus

    def broadcast(self, size: float) -> float:
        """Bytes that a GPU sends on for what one GPU has, around a ring."""
        return size * (self.gpus - 1) / self.gpus


def _parts(length: int, count: int) -> Iterable[tuple[int, int]]:
    return pairwise(length * k // count for k in range(count + 1))


class Cost(NamedTuple):
    """What a GPU has to do more, in a step on average."""

    products: float = 0.0  # operations of matrix products
    factors: float = 0.0  # operations of factorisations
    kept: float = 0.0  # bytes from step to step
    sent: float = 0.0  # bytes to other GPUs
    passes: float = 0.0  # bytes of memory read and written where there are no products, uncompiled


def per_row(layer: Layer, at: Setting) -> Cost:
    """`Proportional`, `Disproportional`: a norm of every row, and a rescaled copy of the narrower of X and G."""
    rescaled = HALF + FLOAT + FLOAT + HALF  # the product is float32, then rounded
    return Cost(passes=at.tokens / at.gpus * (HALF * layer.inputs + rescaled * min(layer[:2])))


def batch_ideal(layer: Layer, at: Setting) -> Cost:
    """`BatchIdeal`: a solve for each backward pass, on the smaller of rows and columns."""
    rows = min(at.micro, at.tokens // at.gpus)
    size, other = min(rows, layer.inputs), max(rows, layer.inputs)
    inverse = layer.outputs >= size  # else each output is substituted for
    product = 2 * size**2 * layer.outputs
    times = at.tokens / at.gpus / rows
    factors = size**3 if inverse else size**3 / 3 + product
    return Cost(times * (2 * size**2 * other + product * inverse), times * factors)


def input_scaled(layer: Layer, at: Setting) -> Cost:
    """`InputScaled`, where no scale is 1: passes over weights, and over inputs where they are measured."""
    # The weight copied; the gradient divided, the weight set to zero; the step divided, and added to the weight.
    passes = (2 + 2 + 1 + 2 + 3) * FLOAT * layer.outputs * layer.inputs / at.gpus
    measured = HALF * at.tokens * layer.inputs / at.gpus
    kept = 0 if layer.follows and at.gpus == 1 else FLOAT
    return Cost(kept=kept, sent=at.all_reduce(FLOAT + DOUBLE) / at.every, passes=passes + measured / at.every)


def unit_consistent(layer: Layer, at: Setting) -> Cost:
    """`UnitConsistent`, where every channel is free: passes over weights; not sharded, every GPU has all of them."""
    # The weight copied; D E written, and the gradient times it; zero; then the weight decayed, the step turned, D E
    # written, their product, and the difference. Measured: |W|, its logarithm, two subtractions and two sums.
    passes = (2 + 1 + 3 + 1) + (2 + 2 + 1 + 3 + 3)
    measured = 2 + 2 + 2 + 2 + 1 + 1
    size = FLOAT * layer.outputs * layer.inputs
    return Cost(kept=DOUBLE * sum(layer[:2]), passes=size * (passes + measured / at.every))


def preconditioned(layer: Layer, at: Setting) -> Cost:
    """`Preconditioned`: one product with the weight's gradient; A is summed, inverted by one GPU, and sent on."""
    upper, squares, cubes = at.squares(layer)
    products, told = 2 * layer.outputs * squares / at.gpus, at.all_reduce(TOLD) / at.every
    if layer.follows:
        return Cost(products, sent=told)
    products += 2 * at.tokens * upper / at.every / at.gpus
    sent = told + at.all_reduce(FLOAT * upper) / at.every + at.broadcast(FLOAT * squares) / at.every
    return Cost(products, cubes / at.every / at.gpus, FLOAT * (upper + squares), sent)


def whitened(layer: Layer, at: Setting) -> Cost:
    """`Whitened`: two products; A is summed, and its root made of its eigenvectors by one GPU, and sent on."""
    upper, squares, cubes = at.squares(layer)
    products, told = 4 * layer.outputs * squares / at.gpus, at.all_reduce(TOLD) / at.every + at.all_reduce(2 * DOUBLE)
    if layer.follows:
        return Cost(products, sent=told)
    products += (2 * at.tokens * upper + 2 * cubes) / at.every / at.gpus
    sent = told + at.all_reduce(FLOAT * upper) / at.every + at.broadcast(FLOAT * squares) / at.every
    return Cost(products, 9 * cubes / at.every / at.gpus, FLOAT * (upper + squares), sent)


def whitened_rank(layer: Layer, at: Setting) -> Cost:
    """`Whitened(rank=…)`: two products with U and back; XᵀXU is summed, and every GPU finds the next U of it.

    One sends its own to the others, which may round differently.
    """
    rank, columns, blocks = at.rank, layer.inputs, -(-layer.inputs // at.max_dim)
    products = 8 * layer.outputs * columns * rank / at.gpus
    told = at.all_reduce(TOLD) / at.every + at.all_reduce(2 * DOUBLE)
    if layer.follows:
        return Cost(products, sent=told)
    products += 4 * at.tokens * columns * rank / at.every / at.gpus
    followed = 4 * columns * rank**2 + 2 * blocks * rank**3
    factors = 4 * columns * rank**2 + (9 + 4 / 3) * blocks * rank**3
    kept = FLOAT * (3 * rank * columns + (1 + rank) * blocks)
    # XᵀXU and the trace; then U, UΛ and the trace, which all are to have from the first.
    summed = FLOAT * (rank * columns + blocks), FLOAT * (2 * rank * columns + blocks)
    sent = told + at.all_reduce(sum(summed)) / at.every
    return Cost(products + followed / at.every, factors / at.every, kept, sent)


Wrapper = Callable[[Layer, Setting], Cost]
WRAPPERS: Mapping[str, Wrapper] = {
    "`Proportional`, `Disproportional`": per_row,
    "`BatchIdeal`": batch_ideal,
    "`InputScaled`": input_scaled,
    "`UnitConsistent`": unit_consistent,
    "`Preconditioned`": preconditioned,
    "`Whitened`": whitened,
    "`Whitened(rank=16)`": whitened_rank,
}


def cost(wrapper: Wrapper, model: Model, at: Setting) -> Cost:
    """The sum over the layers that are treated."""
    return Cost(*map(sum, zip(*(wrapper(layer, at) for layer in model.treated()), strict=True)))


def added(found: Cost, model: Model, at: Setting) -> float:
    """A GPU's operations as a share of those that it has in a plain step."""
    return (found.products + found.factors) * at.gpus / model.step(at.tokens)


TOKENS = {"0.5M": 2**19, "4M": 2**22}
GPUS = (8, 128, 1024)
SETTINGS = [Setting(tokens, gpus) for tokens in TOKENS.values() for gpus in GPUS]


def section(name: str, stores: Mapping[str, Store], own: str, folder: Path) -> str:
    """The table of one model."""
    model = MODELS[name]
    rows = []
    for label, wrapper in WRAPPERS.items():
        costs = [cost(wrapper, model, at) for at in SETTINGS]
        few, many, most = costs[0], costs[len(GPUS) - 1], costs[-1]
        passes = f"{_gigabytes(few.passes)}, {_gigabytes(many.passes)}" if most.passes else ""
        shares = [_share(added(found, model, at)) for at, found in zip(SETTINGS, costs, strict=True)]
        rows.append([label, *shares, _gigabytes(most.kept), _gigabytes(most.sent), passes])
    header = [f"operations: {tokens}, {gpus:,} GPUs" for tokens in TOKENS for gpus in GPUS]
    table = markdown([name, *header, "kept, GB", "sent, GB", "passes, GB"], rows)
    petaflops = " and ".join(f"{model.step(tokens) / 1e15:,.0f}" for tokens in TOKENS.values())
    parameters = model.parameters()
    plain = [16 * parameters / gpus for gpus in GPUS]
    return (
        f"{table}\n\n{parameters / 1e9:.3g} billion parameters. A step itself takes {petaflops} · 10¹⁵ operations, "
        f"shared by all GPUs. Weights, gradients and AdamW's moments keep "
        f"{', '.join(map(_gigabytes, plain))} GB on each of {', '.join(f'{n:,}' for n in GPUS)} GPUs, and a GPU sends "
        f"{_gigabytes(3 * HALF * parameters)} GB at least in a step of `fully_shard`. Passes are at 0.5M tokens, on "
        f"{GPUS[0]} and on {GPUS[-1]:,} GPUs."
    )


def verdict(stores: Mapping[str, Store], own: str, folder: Path) -> str:
    """What the tables come to, in two sentences."""

    def ends(wrapper: Wrapper) -> str:
        found = [added(cost(wrapper, model, at), model, at) for model in MODELS.values() for at in SETTINGS]
        return f"{_share(min(found))} to {_share(max(found))}"

    name, largest = list(MODELS.items())[-1]
    whole, ranked = (_gigabytes(cost(wrapper, largest, SETTINGS[0]).kept) for wrapper in (whitened, whitened_rank))
    return (
        "**Operations are no obstacle to whitening a large model, and memory is. "
        f"`Whitened` adds {ends(whitened)} of the operations of a training step, and keeps {whole} GB on every GPU at "
        f"{name} parameters; with rank 16 it adds {ends(whitened_rank)} and keeps {ranked} GB. `InputScaled` keeps and "
        "sends next to nothing.**"
    )


def _share(share: float) -> str:
    if share == 0:
        return ""
    return f"{share:.2%}" if share < 0.1 else f"{share:.1%}" if share < 1 else f"{share:,.1f}×"


def _gigabytes(size: float) -> str:
    return "" if size == 0 else "< 0.01" if size < 1e7 else f"{size / 1e9:.{max(0, 2 - int(math.log10(size / 1e9)))}f}"


#: Beside the costs that were measured.
DIGESTS = {f"scale-{name}": Digest(("speed",), partial(section, name)) for name in MODELS}
DIGESTS["scale-verdict"] = Digest(("speed",), verdict)
