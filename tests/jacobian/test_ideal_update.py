"""jacobian.ideal_update: the ideal step of any module, against closed forms and real steps."""

import copy

import pytest
import torch
from torch import Tensor, nn

from adiv_optim import BatchIdeal, Proportional, attach, jacobian
from adiv_optim.jacobian.modules import jvp
from adiv_optim.layers import AffineLikeLinear
from tests.helpers.cases import LAYERS, apply, gradients, relative_error
from tests.helpers.modules import Model
from tests.jacobian.test_gauss_newton_contract import tied_by_data

CLOSED_FORM = 1e-10  # float64

pytestmark = pytest.mark.usefixtures("in_float64")


@pytest.mark.parametrize("name", ["linear-rows-no-bias", "linear-tokens", "conv1d-unbatched", "conv2d-circular"])
def test_closed_forms_agree(name):
    damping = 0.1
    layer, input = LAYERS[name].layer(), LAYERS[name].input()
    output = apply(layer, input, BatchIdeal(damping, per_sample=False))
    g = torch.randn_like(output)
    wanted = gradients(output, layer, g)
    found = jacobian.ideal_update(layer, input, g, damping)
    other = jacobian.ideal_update(layer, input, g, 2 * damping)
    for name, gradient in wanted.items():
        assert relative_error(-found[name], gradient) <= CLOSED_FORM
        # The test can fail: the ridge matters.
        assert relative_error(-other[name], gradient) > 1e5 * CLOSED_FORM


def low_rank(features: int = 20) -> nn.Module:
    """A layer without a closed form: it is not linear in its parameters."""
    left, right = nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(2, features))
    return Model(lambda model, x: x @ model.right.T @ model.left.T, left=left, right=right)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4))


@pytest.mark.parametrize(
    ("build", "shape"),
    [
        (network, (5, 6)),
        (low_rank, (4, 20)),
        (lambda: AffineLikeLinear(6, 3), (5, 6)),
        (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 3)), (5, 6)),
    ],
    ids=["network", "low-rank", "affine-like", "weight-norm"],
)
def test_step_moves_the_output_by_the_ideal_to_first_order(build, shape):
    module, input = build(), torch.randn(shape)
    parameters = {n: p.detach() for n, p in module.named_parameters()}

    def along(direction: dict[str, Tensor]) -> Tensor:
        return jvp(lambda p: torch.func.functional_call(module, p, (input,)), parameters, direction)

    g = along({n: torch.randn_like(p) for n, p in parameters.items()})  # the parameters can move the output by it
    found = jacobian.ideal_update(module, input, g)
    assert relative_error(along(found), -g) <= 1e-8
    plain = torch.autograd.grad(module(input), list(module.parameters()), -g)
    assert relative_error(along(dict(zip(found, plain, strict=True))), -g) > 1e-1


def test_module_and_random_numbers_are_left_as_they_were():
    module = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 2))
    before, state = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    input, g = torch.randn(4, 5, generator=torch.Generator().manual_seed(0)), torch.ones(4, 2)
    first, second = (jacobian.ideal_update(module, input, g, 1e-2) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(p.grad is None for p in module.parameters())
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_module_that_works_in_place_leaves_its_input_as_it_is():
    linear, x, g = nn.Linear(3, 2), torch.randn(4, 3), torch.randn(4, 2)
    module, before = nn.Sequential(nn.ReLU(inplace=True), linear), x.clone()
    found = jacobian.ideal_update(module, x, g, 0.1)["1.weight"]
    jacobians = jacobian.layer_jacobians(module, x)["1.weight"]
    assert torch.equal(x, before)
    assert torch.equal(found, jacobian.ideal_update(linear, x.relu(), g, 0.1)["weight"])
    assert torch.equal(jacobians, jacobian.layer_jacobians(linear, x.relu())["weight"])


def test_unreachable_update_is_the_least_squares_one_of_least_norm():
    module, input, g = nn.Linear(3, 2), torch.randn(9, 2)[:, [0, 1, 1]], torch.randn(9, 2)  # two features are the same
    found = jacobian.ideal_update(module, input, g)
    x = torch.cat([input, torch.ones(9, 1)], 1)
    solution = torch.linalg.lstsq(x, g).solution
    assert relative_error(-found["weight"], solution[:-1].T) <= CLOSED_FORM
    assert relative_error(-found["bias"], solution[-1]) <= CLOSED_FORM
    assert relative_error(x @ solution, g) > 1e-2


def test_an_lstm_in_float32_has_a_step():
    model = Model(lambda model, x: model.cells(x)[0][:, -1], cells=nn.LSTM(3, 4, batch_first=True))
    x, g = torch.randn(2, 5, 3), torch.randn(2, 4)
    wanted = jacobian.ideal_update(model, x, g)
    found = jacobian.ideal_update(model.float(), x.float(), g.float())
    assert max(relative_error(found[name].double(), step) for name, step in wanted.items()) < 1e-2


def test_small_gradients_do_not_vanish():
    module, input, g = nn.Linear(3, 2).float(), torch.randn(2, 3).float(), torch.randn(2, 2).float()
    small, large = (jacobian.ideal_update(module, input, factor * g) for factor in (2.0**-100, 1.0))
    assert relative_error(small["weight"] * 2.0**100, large["weight"]) <= 1e-6


def test_empty_batch_asks_for_no_step():
    for damping in (0.0, 0.1):
        found = jacobian.ideal_update(nn.Linear(3, 2), torch.zeros(0, 3), torch.zeros(0, 2), damping)
        assert {name: tuple(part.shape) for name, part in found.items()} == {"weight": (2, 3), "bias": (2,)}
        assert not any(part.any() for part in found.values())


def test_a_layer_with_two_names_keeps_its_parameters():
    layer = nn.Linear(2, 2)
    module, parameters = nn.Sequential(layer, nn.Tanh(), layer), list(layer.parameters())
    step = jacobian.ideal_update(module, torch.randn(3, 2), torch.randn(3, 2), 0.1)
    assert step.keys() == dict(module.named_parameters()).keys()
    assert [id(parameter) for parameter in layer.parameters()] == [id(parameter) for parameter in parameters]


def test_parameters_that_share_memory_are_refused():
    with pytest.raises(ValueError, match=r"ideal_update: '0.weight': it shares its memory with 1.weight"):
        jacobian.ideal_update(tied_by_data(), torch.randn(2, 2), torch.randn(2, 2))


#: Module, shape of g, options, error, and what it says.
ERRORS = {
    "nothing-trained": (nn.Tanh(), (2, 3), {}, ValueError, "Tanh has no trainable parameter"),
    "shape": (nn.Linear(3, 2), (2, 3), {}, ValueError, r"has shape \(2, 3\), but Linear returned \(2, 2\)"),
    "damping": (nn.Linear(3, 2), (2, 2), {"damping": -1.0}, ValueError, "damping is -1.0"),
    "attached": (attach(nn.Linear(3, 2), Proportional()), (2, 2), {}, ValueError, "already has a correction"),
    "two-tensors": (nn.LSTM(3, 2), (2, 2), {}, TypeError, "LSTM returned tuple"),
}


@pytest.mark.parametrize(("module", "g", "options", "error", "message"), ERRORS.values(), ids=ERRORS)
def test_mistakes_are_named(module, g, options, error, message):
    with pytest.raises(error, match=message):
        jacobian.ideal_update(module.double(), torch.randn(2, 3), torch.randn(g), **options)
