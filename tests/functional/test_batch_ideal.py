"""BatchIdeal: the step that is ideal for all rows at once, held against least squares and explicit Jacobians."""

import copy
import math

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from adiv_optim import BatchIdeal, Disproportional, GradientOnly, Proportional, functional, jacobian
from adiv_optim.functional.linears import LinearRows
from tests.helpers.cases import LAYERS, LINEAR, apply, each_functional_layer, gradients, relative_error
from tests.helpers.references import rows
from tests.helpers.seeds import manual_seed

EXACT = 1e-9  # float64; a Cholesky factor squares the condition of the rows
LR = 0.1


def ideal(damping: float) -> BatchIdeal:
    """The rule without the factor B, as the equations state it."""
    return BatchIdeal(damping, per_sample=False)


def groups_of_rows(layer, input: Tensor, grad_output: Tensor) -> list[tuple[Tensor, Tensor]]:
    """(X~, G) of every group of channels; a linear layer has one."""
    found: dict[range, tuple[list[Tensor], list[Tensor]]] = {}
    for row, grad_row, channels in rows(layer, input, grad_output):
        with_one = torch.cat([row.flatten(), torch.ones(1)]) if layer.bias is not None else row.flatten()
        xs, gs = found.setdefault(channels, ([], []))
        xs.append(with_one)
        gs.append(grad_row)
    return [(torch.stack(xs), torch.stack(gs)) for xs, gs in found.values()]


def least_squares(x: Tensor, g: Tensor, damping: float) -> Tensor:
    """argmin |x w − g|² + λ|w|², λ = damping · tr(x xᵀ) / rows, of least norm; shape (features, outputs)."""
    ridge = math.sqrt(damping * x.square().sum().item() / len(x))
    stacked = torch.cat([x, ridge * torch.eye(x.shape[1])])
    target = torch.cat([g, torch.zeros(x.shape[1], g.shape[1])])
    return torch.linalg.lstsq(stacked, target, driver="gelsd").solution


def flat(layer, found: dict[str, Tensor]) -> Tensor:
    """Gradients of weight and bias side by side: (out_channels, features + 1)."""
    columns = [found["weight"].flatten(1)]
    return torch.cat([*columns, found["bias"][:, None]] if layer.bias is not None else columns, 1)


pytestmark = pytest.mark.usefixtures("in_float64")


@each_functional_layer
def test_gradient_is_the_damped_least_squares_solution(case):
    damping = 0.3
    layer, input = case.layer(), case.input()
    output = apply(layer, input, ideal(damping))
    g = torch.randn_like(output)
    wanted = torch.cat([least_squares(x, gs, damping) for x, gs in groups_of_rows(layer, input, g)], 1).mT
    assert relative_error(flat(layer, gradients(output, layer, g)), wanted) <= EXACT
    # The test can fail: the damping matters, and so does the interference.
    other = torch.cat([least_squares(x, gs, 2 * damping) for x, gs in groups_of_rows(layer, input, g)], 1).mT
    assert relative_error(other, wanted) > 100 * EXACT


@pytest.mark.parametrize(
    "name", ["linear-tokens", "linear-rows-no-bias", "linear-unbatched", "conv1d", "conv2d-groups"]
)
@pytest.mark.parametrize("correction", [ideal(1e-2), BatchIdeal(1e-2, per_sample=True)], ids=["sum", "per-sample"])
def test_gradient_is_that_of_explicit_jacobians(name, correction):
    case = LAYERS[name]
    layer, input = case.layer(), case.input()
    output = apply(layer, input, correction)
    g = torch.randn_like(output)
    found = gradients(output, layer, g)
    wanted = jacobian.corrected_gradients(layer, lambda z, g: (z * g).sum(), input, g, correction)
    for name, gradient in wanted.items():
        assert relative_error(found[name], gradient) <= EXACT


FEW_ROWS = {
    "linear": (lambda: nn.Linear(7, 3), (6, 7)),
    "linear-no-bias": (lambda: nn.Linear(7, 3, bias=False), (7, 7)),
    "tokens": (lambda: nn.Linear(7, 3), (2, 3, 7)),
    "conv2d-stride-groups-padding": (
        lambda: nn.Conv2d(8, 4, 3, stride=2, padding=1, groups=2),
        (2, 8, 5, 5),
    ),
    "conv1d": (lambda: nn.Conv1d(5, 2, 3), (2, 5, 6)),
}


@pytest.mark.parametrize(("build", "shape"), FEW_ROWS.values(), ids=FEW_ROWS)
def test_step_moves_every_row_by_its_own_gradient(build, shape):
    def deviation(correction) -> float:
        manual_seed(1)
        layer, input = build(), torch.randn(shape)
        optimizer = torch.optim.SGD(layer.parameters(), lr=LR)
        if correction:
            optimizer = GradientOnly(optimizer, layer, correction)
        before = layer(input)
        g = torch.randn_like(before)
        before.backward(g)
        optimizer.step()
        return relative_error(layer(input) - before, -LR * g)

    assert deviation(ideal(0.0)) <= EXACT
    # The others leave the interference in.
    assert all(deviation(other) > 0.1 for other in (None, Proportional(), Disproportional()))


def test_many_rows_move_by_the_projection_of_their_gradients():
    layer, input, g = nn.Linear(4, 3), torch.randn(20, 4), torch.randn(20, 3)
    found = gradients(functional.linear(input, layer.weight, layer.bias, ideal(0.0)), layer, g)
    x = torch.cat([input, torch.ones(20, 1)], 1)
    assert relative_error(x @ flat(layer, found).mT, x @ torch.linalg.pinv(x) @ g) <= EXACT


@pytest.mark.parametrize("count", [3, 8, 40], ids=["few", "square", "many"])
@pytest.mark.parametrize("trained", [(True, True), (True, False), (False, True)], ids=["both", "weight", "bias"])
@pytest.mark.parametrize("stack", [(), (2,)], ids=["one", "stack"])
def test_the_two_sides_agree(count, trained, stack):
    rows = LinearRows(torch.randn(*stack, count, 7), torch.randn(*stack, count, 3), *trained)
    sample, feature = rows.sample_side(ideal(0.1).solve), rows.feature_side([rows], count, ideal(0.1).solve)
    other = rows.feature_side([rows], count, ideal(0.2).solve)
    assert sample.keys() == feature.keys()
    for name, gradient in sample.items():
        assert relative_error(gradient, feature[name]) <= EXACT
        assert relative_error(gradient, other[name]) > 1e-3


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "weight-decay": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
}


@pytest.mark.parametrize("build", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_optimizers_and_schedules_step_on_least_squares_gradients(build):
    def final_weights(correction, by_hand: bool) -> Tensor:
        manual_seed(1)
        layer = nn.Linear(4, 3)
        optimizer = build(layer.parameters())
        if correction:
            optimizer = GradientOnly(optimizer, layer, correction)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)
        for input in torch.randn(6, 9, 4):
            optimizer.zero_grad()
            output = layer(input)
            output.square().sum().backward()
            if by_hand:
                x = torch.cat([input, torch.ones(9, 1)], 1)
                solution = least_squares(x, 2 * output.detach(), 0.2).mT
                layer.weight.grad, layer.bias.grad = solution[:, :-1].contiguous(), solution[:, -1].contiguous()
            optimizer.step()
            schedule.step()
        return flat(layer, {name: p.detach() for name, p in layer.named_parameters()})

    wanted = final_weights(None, by_hand=True)
    assert relative_error(final_weights(ideal(0.2), by_hand=False), wanted) <= EXACT
    assert relative_error(final_weights(None, by_hand=False), wanted) > 1e-3


@pytest.mark.parametrize("shape", [(5, 7), (20, 7)], ids=["sample-side", "feature-side"])
def test_infinite_damping_is_the_plain_direction(shape):
    layer, input = nn.Linear(7, 3), torch.randn(shape)
    g = torch.randn(len(input), 3)
    corrected, plain = (
        flat(layer, gradients(functional.linear(input, layer.weight, layer.bias, rule), layer, g)).flatten()
        for rule in (ideal(1e8), None)
    )
    assert corrected @ plain / (corrected.norm() * plain.norm()) > 1 - 1e-6


@pytest.mark.parametrize("name", ["one-row", "unbatched"])
def test_one_row_is_proportional(name):
    layer, input = LINEAR[name].layer(), LINEAR[name].input()
    alone, proportional = (
        gradients(apply(layer, input, rule), layer, torch.ones_like(layer(input)))
        for rule in (ideal(0.0), Proportional())
    )
    for parameter, gradient in proportional.items():
        assert relative_error(alone[parameter], gradient) <= EXACT


def heterogeneous(seed: int) -> tuple[nn.Linear, Tensor, Tensor]:
    manual_seed(seed)
    norms = torch.randn(3, 1).mul(2).exp()
    return nn.Linear(4, 2), norms * torch.randn(3, 4), torch.randn(3, 2)


def test_step_is_always_downhill_where_proportional_is_not():
    def downhill(rule, seed: int) -> bool:
        layer, input, g = heterogeneous(seed)
        corrected, plain = (
            flat(layer, gradients(functional.linear(input, layer.weight, layer.bias, r), layer, g))
            for r in (rule, None)
        )
        return bool((corrected * plain).sum() > 0)

    assert all(downhill(ideal(1e-3), seed) for seed in range(300))
    assert not all(downhill(Proportional(), seed) for seed in range(300))


def test_per_sample_counts_rows():
    layer, input = nn.Linear(5, 3), torch.randn(4, 6, 5)
    g = torch.randn(4, 6, 3)
    once, counted = (
        gradients(functional.linear(input, layer.weight, layer.bias, BatchIdeal(per_sample=flag)), layer, g)
        for flag in (False, True)
    )
    assert relative_error(counted["weight"], 24 * once["weight"]) <= EXACT
    assert relative_error(counted["bias"], 24 * once["bias"]) <= EXACT


def test_micro_batches_do_not_add_up_and_say_so():
    layer, input, g = nn.Linear(5, 3), torch.randn(8, 5), torch.randn(8, 3)

    def gradient(part: slice) -> Tensor:
        output = functional.linear(input[part], layer.weight, layer.bias, BatchIdeal())
        return gradients(output, layer, g[part])["weight"]

    assert relative_error(gradient(slice(0, 4)) + gradient(slice(4, 8)), gradient(slice(0, 8))) > 1e-2
    assert not BatchIdeal().additive
    assert Proportional().additive


@pytest.mark.parametrize("build", [lambda: nn.Linear(6, 4), lambda: nn.Conv2d(2, 3, 3)], ids=["linear", "conv2d"])
def test_vmapped_ensemble_is_its_members(build):
    layers = [build() for _ in range(3)]
    shape = (5, 6) if isinstance(layers[0], nn.Linear) else (2, 2, 5, 6)
    inputs = torch.randn(3, *shape)
    stacked = {
        name: torch.stack([layer.get_parameter(name).detach() for layer in layers]).requires_grad_()
        for name, _ in layers[0].named_parameters()
    }
    skeleton = copy.deepcopy(layers[0])
    skeleton.forward = lambda x: apply(skeleton, x, ideal(1e-2))
    vmap(lambda p, x: functional_call(skeleton, p, (x,)).square().sum())(stacked, inputs).sum().backward()
    for number, layer in enumerate(layers):
        apply(layer, inputs[number], ideal(1e-2)).square().sum().backward()
        for name, parameter in layer.named_parameters():
            assert relative_error(stacked[name].grad[number], parameter.grad) <= EXACT


@pytest.mark.parametrize("half", [False, True], ids=["float64", "autocast"])
def test_compiled_without_graph_breaks_is_the_same(half):
    """Under autocast too, in which torch.compile traces the backward pass of what was called within."""

    def loss(weight, x):
        return functional.linear(x, weight, None, ideal(1e-2)).square().sum()

    dtype = torch.float32 if half else torch.float64
    weight, x = torch.randn(3, 5, dtype=dtype), torch.randn(4, 5, dtype=dtype)
    plain, compiled = weight.clone().requires_grad_(), weight.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        losses = loss(plain, x), torch.compile(loss, fullgraph=True, backend="aot_eager")(compiled, x)
    for each in losses:
        each.backward()
    assert relative_error(compiled.grad, plain.grad) <= (2e-2 if half else EXACT)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 2e-3), (torch.float32, 1e-4)])
@pytest.mark.parametrize("count", [4, 30], ids=["sample-side", "feature-side"])
def test_lower_precision_is_factored_in_float32(dtype, tolerance, count):
    input, weight, g = torch.randn(count, 8).to(dtype), torch.randn(3, 8).to(dtype), torch.randn(count, 3).to(dtype)
    found, wanted = (
        torch.autograd.grad(functional.linear(input.to(kind), w, None, ideal(0.1)), w, g.to(kind))[0]
        for kind in (dtype, torch.float64)
        for w in [weight.to(kind).requires_grad_()]
    )
    assert found.dtype == dtype
    assert relative_error(found, wanted) <= tolerance


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("count", [4, 30], ids=["sample-side", "feature-side"])
def test_nan_and_inf_travel_and_do_not_raise(poison, count):
    input, weight = torch.randn(count, 8), torch.randn(3, 8).requires_grad_()
    input[1, 2] = poison
    functional.linear(input, weight, None, BatchIdeal()).sum().backward()
    assert not weight.grad.isfinite().any()


@pytest.mark.parametrize("shape", [(0, 6), (4, 6), (20, 6)], ids=["empty", "few", "many"])
def test_rows_of_zeros_move_the_bias_alone(shape):
    layer = nn.Linear(6, 3)
    functional.linear(torch.zeros(shape), layer.weight, layer.bias, ideal(0.0)).sum().backward()
    assert layer.weight.grad.abs().max() == 0
    wanted = torch.full((3,), float(shape[0] > 0))
    assert (layer.bias.grad - wanted).abs().max() <= EXACT


@pytest.mark.parametrize("damping", [-1e-3, math.nan, math.inf])
def test_bad_damping_is_an_error(damping):
    with pytest.raises(ValueError, match=r"BatchIdeal: damping is .*; it must be finite and at least 0"):
        BatchIdeal(damping)


@pytest.mark.parametrize("count", [4, 20], ids=["few", "many"])
def test_rows_of_zeros_without_a_bias_move_nothing(count):
    weight = torch.randn(3, 6).requires_grad_()
    functional.linear(torch.zeros(count, 6), weight, None, ideal(0.0)).sum().backward()
    assert torch.equal(weight.grad, torch.zeros(3, 6))


def test_scale_is_that_of_a_row_that_is_alone():
    layer, input, rule = LINEAR["one-row"].layer(), LINEAR["one-row"].input(), ideal(0.5)
    g = torch.randn(1, 3)
    found = gradients(apply(layer, input, rule), layer, g)
    scales = rule.scales({"weight": input.square().sum(1), "bias": torch.ones(1)})
    for name, plain in gradients(layer(input), layer, g).items():
        assert relative_error(found[name], scales[name] * plain) <= EXACT


def test_matrix_without_a_factor_gives_nan_and_not_what_was_factored_of_it():
    indefinite = torch.tensor([[1.0, 2.0], [2.0, 1.0]])
    assert ideal(0.0).factor(indefinite, 2).isnan().all()
