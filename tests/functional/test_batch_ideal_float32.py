"""BatchIdeal in float32 where rows repeat or outnumber features, held against solves in float64 with the same λ."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adiv_optim import BatchIdeal, attach, detach, functional
from adiv_optim.functional import linears
from tests.helpers.cases import relative_error
from tests.helpers.covering import paired

EPS = torch.finfo(torch.float32).eps
#: Where rows repeat, nothing but the ridge holds most directions, and rounding is a few hundredths of its least value.
NEAR = 0.1


def plain_and_ideal(x: Tensor, g: Tensor, damping: float) -> tuple[Tensor, Tensor]:
    """X~ᵀG and (X~ᵀX~ + λI)⁻¹X~ᵀG in float64, both (outputs, features + 1)."""
    x = torch.cat([x, torch.ones(len(x), 1)], 1).double()
    gram, plain = x.mT @ x, x.mT @ g.double()
    ridge = max(damping / len(x), 100 * EPS) * gram.trace()
    return plain.mT, torch.linalg.solve(gram + ridge * torch.eye(len(gram)), plain).mT


INPUTS = {
    "equal-rows": lambda: torch.randn(1, 20).expand(2000, 20),
    "equal-narrow-rows": lambda: torch.randn(1, 3).expand(65_536, 3),
    "one-hot": lambda: F.one_hot(torch.randint(0, 10, (20_000,)), 10).float(),
    "layer-norm": lambda: F.layer_norm(torch.randn(65_536, 64), (64,)),
    "one-feature": lambda: torch.randn(25_600, 1),
    "one-feature-far-from-zero": lambda: 1000 + torch.randn(25_600, 1),
    "equal-few-rows": lambda: torch.randn(1, 60).expand(50, 60),
}


@pytest.mark.parametrize("damping", [0.0, 1.0])
@paired("build outputs", INPUTS, {"substitution": 4, "inverse": 128})
def test_float32_is_near_float64_and_downhill(build, damping, outputs):
    x = build()
    g, layer = torch.randn(len(x), outputs), nn.Linear(x.shape[1], outputs)
    functional.linear(x, layer.weight, layer.bias, BatchIdeal(damping, per_sample=False)).backward(g)
    found = torch.cat([layer.weight.grad, layer.bias.grad[:, None]], 1).double()
    plain, wanted = plain_and_ideal(x, g, damping)
    assert relative_error(found, wanted) <= NEAR
    assert (found * plain).sum() > 0


def test_sums_of_many_rows_lose_no_more_than_those_of_few():
    x = torch.rand(1, 3).expand(65_536, 3).contiguous()
    exact = x.double().mT @ x.double()
    lost = torch.linalg.matrix_norm(linears.cross_gram([x], [x]).double() - exact, 2) / exact.trace()
    assert lost <= 25 * EPS


def test_half_precision_keeps_what_the_number_of_rows_brings_back():
    """Gradients of a mean over B rows are so small that float16 would lose them before the factor B."""
    x, g = torch.randn(4096, 8).half(), (torch.randn(4096, 3) / 4096).half()
    found, wanted = (
        torch.autograd.grad(functional.linear(x.to(kind), w, None, BatchIdeal()), w, g.to(kind))[0]
        for kind in (torch.float16, torch.float64)
        for w in [torch.zeros(3, 8, dtype=kind, requires_grad=True)]
    )
    assert relative_error(found, wanted) <= 2e-3


def without_bias(kind: str, rows: int, dtype: torch.dtype) -> tuple[nn.Module, Tensor]:
    """A layer and as many rows of it."""
    if kind == "linear":
        return nn.Linear(8, 3, bias=False, dtype=dtype), torch.randn(rows, 8, dtype=dtype)
    return nn.Conv1d(2, 3, 4, bias=False, dtype=dtype), torch.randn(rows // 4, 2, 7, dtype=dtype)


each_side = pytest.mark.parametrize("rows", [4, 40], ids=["side of the rows", "side of the features"])
each_kind = pytest.mark.parametrize("kind", ["linear", "convolution"])


@each_side
@pytest.mark.parametrize(("dtype", "least"), [(torch.float32, -15), (torch.float64, -130)])
@each_kind
def test_without_a_bias_outputs_move_alike_at_every_size_of_the_inputs(kind, dtype, least, rows):
    """The formula has no scale: λ is a share of the squares, and a step of inputs a x is that of x divided by a."""
    ends = []
    for size in (1.0, 10.0**least):
        torch.manual_seed(0)
        layer, x = without_bias(kind, rows, dtype)
        attach(layer, BatchIdeal(0.3, per_sample=False))
        output = layer(x := size * x)
        output.backward(torch.randn(output.shape, dtype=dtype))
        step = layer.weight.grad
        detach(layer)
        layer.weight.data = step
        ends.append(layer(x).detach())
    assert relative_error(ends[1], ends[0]) <= 100 * torch.finfo(dtype).eps


@each_side
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@each_kind
@pytest.mark.parametrize("per_sample", [True, False])
def test_rows_whose_squares_underflow_move_nothing_under_a_scaled_loss(kind, dtype, rows, per_sample):
    """As of hidden units that are all at rest, where GradScaler has multiplied the loss."""
    for size in (0.0, torch.finfo(dtype).tiny):
        layer, x = without_bias(kind, rows, dtype)
        attach(layer, BatchIdeal(0.3, per_sample=per_sample))
        (2**16 * layer(x.fill_(size)).sum()).backward()
        assert layer.weight.grad.abs().max() <= 1e-20


def test_a_ridge_that_underflows_is_the_least_number_and_no_more():
    """Squares of 10⁻³⁶ times the least share are below float32's least number, which then is λ."""
    torch.manual_seed(0)
    x, g = 2e-18 * torch.randn(3, 8), torch.randn(3, 16)
    weight = torch.zeros(16, 8, requires_grad=True)
    functional.linear(x, weight, None, BatchIdeal(0.0, per_sample=False)).backward(g)
    wide = x.double()
    wanted = wide @ torch.linalg.pinv(wide) @ g.double()
    least = torch.linalg.svdvals(wide)[-1].square().item()
    assert relative_error(wide @ weight.grad.double().T, wanted) <= torch.finfo(torch.float32).tiny / least + 1e-4
