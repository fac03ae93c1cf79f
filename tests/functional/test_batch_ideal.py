"""BatchIdeal: the step that is ideal for all rows at once. test_reference holds its gradients against least squares."""

import pytest
import torch
from torch import Tensor, nn

from adiv_optim import BatchIdeal, Disproportional, GradientOnly, Proportional, functional
from adiv_optim.functional.linears import LinearRows
from tests.helpers.cases import LINEAR, apply, gradients, relative_error
from tests.helpers.seeds import manual_seed

EXACT = 1e-9  # float64; a Cholesky factor squares the condition of the rows
LR = 0.1

pytestmark = pytest.mark.usefixtures("in_float64")


def ideal(damping: float) -> BatchIdeal:
    """The rule without the factor B, as the equations state it."""
    return BatchIdeal(damping, per_sample=False)


def flat(layer, x: Tensor, g: Tensor, rule) -> Tensor:
    """Gradients of weight and bias side by side: (outputs, features + 1)."""
    found = gradients(apply(layer, x, rule), layer, g)
    return torch.cat([found["weight"].flatten(1), found["bias"][:, None]], 1)


FEW_ROWS = {
    "linear": (lambda: nn.Linear(7, 3), (6, 7)),
    "linear-no-bias": (lambda: nn.Linear(7, 3, bias=False), (7, 7)),
    "conv2d": (lambda: nn.Conv2d(8, 4, 3, stride=2, padding=1, groups=2), (2, 8, 5, 5)),
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


@pytest.mark.parametrize("count", [3, 8, 40], ids=["few", "square", "many"])
def test_the_two_sides_agree_in_stacks_too(count):
    for trained in ((True, True), (True, False), (False, True)):
        rows = LinearRows(torch.randn(2, count, 7), torch.randn(2, count, 3), *trained)
        sample, feature = rows.sample_side(ideal(0.1).solve), rows.feature_side(ideal(0.1).solve)
        other = rows.feature_side(ideal(0.2).solve)
        assert sample.keys() == feature.keys()
        for name, gradient in sample.items():
            assert relative_error(gradient, feature[name]) <= EXACT
            assert relative_error(gradient, other[name]) > 1e-3


@pytest.mark.parametrize("name", ["one-row", "unbatched"])
def test_one_row_is_proportional_and_has_a_scale(name):
    layer, input = LINEAR[name].layer(), LINEAR[name].input()
    g = torch.randn_like(layer(input))
    assert relative_error(flat(layer, input, g, ideal(0.0)), flat(layer, input, g, Proportional())) <= EXACT
    found, plain = (gradients(apply(layer, input, rule), layer, g) for rule in (ideal(0.5), None))
    scales = ideal(0.5).scales({"weight": input.square().sum(-1, keepdim=True), "bias": torch.ones(1)})
    for parameter in plain:
        assert relative_error(found[parameter], scales[parameter].squeeze() * plain[parameter]) <= EXACT


@pytest.mark.parametrize("shape", [(0, 6), (4, 6), (20, 6)], ids=["empty", "few", "many"])
def test_rows_of_zeros_without_damping_move_the_bias_alone(shape):
    layer = nn.Linear(6, 3)
    functional.linear(torch.zeros(shape), layer.weight, layer.bias, ideal(0.0)).sum().backward()
    assert layer.weight.grad.abs().max() == 0
    assert (layer.bias.grad - float(shape[0] > 0)).abs().max() <= EXACT
    layer.weight.grad = None
    functional.linear(torch.zeros(shape), layer.weight, None, ideal(0.0)).sum().backward()
    assert torch.equal(layer.weight.grad, torch.zeros(3, 6))


def test_bad_damping_is_an_error():
    with pytest.raises(ValueError, match=r"BatchIdeal: damping is -0.001; it must be finite and at least 0"):
        BatchIdeal(-1e-3)


def test_matrix_without_a_factor_gives_nan_and_not_what_was_factored_of_it():
    indefinite = torch.tensor([[1.0, 2.0], [2.0, 1.0]])
    assert ideal(0.0).factor(indefinite, 2).isnan().all()
