"""GaussNewton against conjugate gradients, least squares, and its rule as a plain loop."""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call, jacrev
from torch.nn.utils.parametrizations import weight_norm

from adiv_optim import GaussNewton
from adiv_optim.jacobian import ideal_update, laplacian
from adiv_optim.jacobian.terms import Terms, solver
from tests.helpers.modules import Model

pytestmark = pytest.mark.usefixtures("in_float64")


def network(width=6, outputs=1):
    return nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, outputs))


def inside(model, x):
    return laplacian(model, x) + model(x) ** 3 - x.prod()


def on_the_sides(model, x, wanted):
    return 3 * (model(x) - wanted)


def equation(points=8, sides=4):
    x, s = torch.rand(points, 2), torch.rand(sides, 2)
    return [(inside, x), (on_the_sides, s, s.sum(-1, keepdim=True))]


class Stacked(nn.Module):
    """The residuals of all terms as one output, sample by sample."""

    def __init__(self, model, terms):
        super().__init__()
        self.model, self.terms = model, terms

    def forward(self, _):
        parts = []
        for function, *tensors in self.terms:
            values = torch.stack([function(self.model, *sample) for sample in zip(*tensors, strict=True)])
            parts.append(values.flatten() / values.numel() ** 0.5)
        return torch.cat(parts)


def trained(model):
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def by_loop(model, terms):
    """Residuals, and their Jacobian by a backward pass each."""
    r, parameters = Stacked(model, terms)(None), trained(model)
    rows = [torch.autograd.grad(value, parameters, retain_graph=True, allow_unused=True) for value in r]
    zeros = [torch.zeros_like(parameter) for parameter in parameters]
    flat = [torch.cat([(z if g is None else g).flatten() for g, z in zip(row, zeros, strict=True)]) for row in rows]
    return r.detach(), torch.stack(flat)


def weights(model):
    return torch.cat([parameter.detach().flatten() for parameter in trained(model)])


def step_of(model, optimizer, terms):
    """A step: by how much the weights moved, the step length and the damping."""
    before = weights(model)
    optimizer.step(terms)
    metrics = optimizer.metrics()
    assert metrics["alpha"] > 0
    return before - weights(model), metrics["alpha"], metrics["damping"]


def along(model, terms, solve):
    """The step δ and the acceleration a of the docstring, by any solver of v → Jᵀ(JJᵀ + λI)⁻¹ v."""
    r, jacobian = by_loop(model, terms)
    step, moved = solve(r), copy.deepcopy(model)
    nn.utils.vector_to_parameters(weights(model) - step / 10, trained(moved))
    return step, solve(2 * ((Stacked(moved, terms)(None).detach() - r) / 0.1 + jacobian @ step) / 0.1)


def bent(model, terms, alpha, solve):
    step, acceleration = along(model, terms, solve)
    return alpha * step + alpha**2 / 2 * acceleration


def by_rows(r, jacobian, damping):
    """v → Jᵀ(JJᵀ + λI)⁻¹ v by the plainest means."""
    matrix = jacobian @ jacobian.T
    matrix += damping * matrix.trace() / len(r) * torch.eye(len(r))
    return lambda v: jacobian.T @ torch.linalg.solve(matrix, v)


@pytest.mark.parametrize(("width", "points"), [(6, 6), (3, 30)], ids=["fewer residuals than parameters", "more"])
def test_step_is_the_ideal_update_of_the_stacked_residual(width, points):
    model, terms = network(width), equation(points)
    assert (points + 4 > weights(model).numel()) is (width == 3)
    twin = copy.deepcopy(model)
    stacked = Stacked(twin, terms)
    step, alpha, damping = step_of(model, GaussNewton(model, damping=1e-6), terms)

    def ideal(v, damping=damping):
        step = ideal_update(stacked, torch.zeros(1), v, damping)
        return -torch.cat([step[f"model.{name}"].flatten() for name, _ in model.named_parameters()])

    wanted = bent(twin, terms, alpha, ideal)
    assert (step - wanted).norm() <= 1e-8 * wanted.norm()
    other = bent(twin, terms, alpha, lambda v: ideal(v, 2 * damping))
    assert (step - other).norm() > 1e-7 * other.norm()  # the damping is seen
    straight = alpha * ideal(by_loop(twin, terms)[0])
    assert (step - straight).norm() > 1e-3 * straight.norm()  # and the acceleration


@pytest.mark.parametrize(("width", "points"), [(6, 6), (3, 30)], ids=["fewer residuals than parameters", "more"])
def test_step_at_the_default_damping_is_that_of_least_squares(width, points):
    model, terms = network(width), equation(points)
    assert (points + 4 > weights(model).numel()) is (width == 3)
    twin, (_, jacobian) = copy.deepcopy(model), by_loop(model, terms)
    step, alpha, damping = step_of(model, GaussNewton(model), terms)
    ridge = damping * jacobian.square().sum() / len(jacobian)
    whole = torch.cat([jacobian, ridge.sqrt() * torch.eye(jacobian.shape[1])])

    def least_squares(v):
        right = torch.cat([v, torch.zeros(jacobian.shape[1])])
        return torch.linalg.lstsq(whole, right[:, None], driver="gelsd").solution[:, 0]

    wanted = bent(twin, terms, alpha, least_squares)
    assert (step - wanted).norm() <= 1e-4 * wanted.norm()


@pytest.mark.parametrize("shape", [(20, 30), (30, 20)], ids=["wide", "tall"])
def test_solution_is_as_exact_as_the_jacobian(shape):
    # Singular values down to 10⁻¹² of the largest: in JJᵀ, those below 10⁻⁸ are rounding.
    left, _ = torch.linalg.qr(torch.randn(shape[0], 20))
    right, _ = torch.linalg.qr(torch.randn(shape[1], 20))
    values = torch.logspace(0, -12, 20)
    jacobian, ridge = left * values @ right.T, 1e-22
    r = left @ values  # each direction needs a step of 1
    step, wanted = solver(jacobian, ridge)(r), right @ (values**2 / (values**2 + ridge))
    assert (step - wanted).norm() < 1e-3
    by_product = jacobian.T @ torch.linalg.solve(jacobian @ jacobian.T + 1e-16 * torch.eye(shape[0]), r)
    assert (by_product - wanted).norm() > 1


def by_rule(model, terms, damping):
    """The rule of the docstring, by the plainest means: loss before, damping used, step length, tries, next damping."""
    twin, (r, jacobian) = copy.deepcopy(model), by_loop(model, terms)
    present, start, tried = r.square().sum().item() / 2, weights(model), []
    while not tried or (tried[-1][0] > 0.995 * present and damping < 1e6):
        damping *= 10 if tried else 1
        step, acceleration = along(twin, terms, by_rows(r, jacobian, damping))
        losses = [present]  # at 1, ½, ¼ …
        while len(losses) < 3 or losses[-2] >= present or losses[-1] < losses[-2]:
            alpha = 2.0 ** (1 - len(losses))
            nn.utils.vector_to_parameters(start - alpha * step - alpha**2 / 2 * acceleration, model.parameters())
            losses.append(Stacked(model, terms)(None).square().sum().item() / 2)
        tried.append((losses[-2], damping, 2 * alpha, start - 2 * alpha * step - 2 * alpha**2 * acceleration))
        if len(tried) > 1 and tried[-1][0] >= tried[-2][0]:
            tried, count = tried[:-1], len(tried)
            break
        count = len(tried)
    _, damping, alpha, reached = tried[-1]
    nn.utils.vector_to_parameters(reached, model.parameters())
    return present, damping, alpha, count, damping * (0.1 if alpha >= 0.25 else 3 if alpha <= 0.0625 else 1)


def test_rule_is_that_of_a_plain_loop():
    seen = set()
    for seed in range(5):
        torch.manual_seed(seed)
        model = network()
        nn.init.normal_(model[0].weight, std=3.0)
        twin, terms, damping = copy.deepcopy(model), equation(12, 8), 10.0 ** -(1 + 2 * seed)
        optimizer = GaussNewton(model, damping=damping)
        for _ in range(6):
            optimizer.step(terms)
            loss, used, alpha, tries, damping = by_rule(twin, terms, damping)
            metrics = optimizer.metrics()
            assert metrics["loss_before"] == pytest.approx(loss, rel=1e-6)
            assert metrics["damping"] == pytest.approx(used)
            assert (metrics["alpha"], metrics["tries"]) == (alpha, tries)
            assert optimizer.param_groups[0]["damping"] == pytest.approx(damping)
            assert torch.allclose(weights(model), weights(twin), rtol=1e-5, atol=1e-6)
            nn.utils.vector_to_parameters(weights(model), twin.parameters())  # rounding stays apart
            seen |= {("halved", alpha < 1), ("timid", alpha <= 0.0625), ("rose", tries > 1), ("bold", alpha >= 0.25)}
    assert seen == {(name, way) for name in ("halved", "timid", "rose", "bold") for way in (True, False)}


def test_damping_rises_until_a_step_is_taken():
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1))
    points = torch.randn(60, 2, generator=torch.Generator().manual_seed(5))
    optimizer = GaussNewton(model, damping=0)
    optimizer.step([(lambda model, x, y: model(x) - y, points, torch.sin(2 * points[:, :1]))])
    metrics = optimizer.metrics()
    assert metrics["alpha"] > 0  # the first tries lower the loss by less than a millionth, each less than the last
    assert metrics["loss_after"] < 0.999 * metrics["loss_before"]


def test_damping_rises_where_the_loss_of_new_points_is_more_than_twice_the_last():
    model = network()
    optimizer = GaussNewton(model, damping=1e-3)
    x, y = torch.rand(12, 2), torch.randn(12, 1)
    optimizer.step([(lambda model, x, y: model(x) - y, x, y)])
    last = optimizer.metrics()["loss_before"]
    for times in (1.95, 3.0, 0.5, 3.0, 3.0, 1.95):
        x, y, damping = torch.rand(12, 2), torch.randn(12, 1), optimizer.param_groups[0]["damping"]  # noise alone
        factor = (times * last / (0.5 * (model(x) - y).square().mean())).sqrt().item()
        terms = [(lambda model, x, y, by=factor: by * (model(x) - y), x, y)]
        _, used, *_, after = by_rule(copy.deepcopy(model), terms, damping * (10 if times > 2 else 1))
        last = optimizer.step(terms).item()
        assert optimizer.metrics()["damping"] == pytest.approx(used)
        assert optimizer.param_groups[0]["damping"] == pytest.approx(after)


@pytest.mark.parametrize("second", [laplacian, lambda model, x: jacrev(jacrev(model))(x).diagonal(dim1=1, dim2=2)])
def test_jacobian_through_a_layer_norm_is_that_of_differences(second):
    model, points = nn.Sequential(nn.Linear(2, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 1)), torch.rand(4, 2)
    terms = Terms(model, [(lambda model, x: second(model, x).sum(), points)], "test")
    start, h = {name: p.detach() for name, p in model.named_parameters()}, 1e-5
    terms.evaluate(start)
    jacobian = terms.jacobian(start, None).T
    for name, p in start.items():
        rows, jacobian = jacobian[: p.numel()], jacobian[p.numel() :]
        for row, move in zip(rows, h * torch.eye(p.numel()), strict=True):
            ends = [terms.evaluate({**start, name: p + sign * move.view_as(p)}) for sign in (1, -1)]
            assert torch.allclose(row, (ends[0] - ends[1]) / (2 * h), rtol=1e-5, atol=1e-6), name


def test_buffers_that_a_network_changes_stay_as_they_were():
    """As a running mean, and a number of calls that is counted in place."""

    def centred(model, x):
        model.mean, model.calls = 0.9 * model.mean + 0.1 * x.detach(), model.calls.add_(1)
        return model.layer(x - model.mean)

    model = Model(centred, layer=nn.Linear(2, 1), mean=nn.Buffer(torch.ones(2)), calls=nn.Buffer(torch.zeros(())))
    GaussNewton(model).step([(lambda model, x: model(x) - 1, torch.rand(5, 2))])
    assert torch.equal(model.mean, torch.ones(2))
    assert model.calls == 0
    copy.deepcopy(model)(torch.rand(2))


def test_samples_may_be_complex():
    model, x, y = nn.Linear(2, 2), torch.rand(3, 2), torch.randn(3, dtype=torch.complex128)
    other = copy.deepcopy(model)
    GaussNewton(model).step([(lambda model, x, y: model(x) - torch.view_as_real(y), x, y)])
    GaussNewton(other).step([(lambda model, x, y: model(x) - y, x, torch.view_as_real(y))])
    assert torch.equal(weights(model), weights(other))


def test_a_step_that_cannot_lower_the_loss_leaves_the_weights_bit_for_bit():
    model = network()
    before, optimizer = copy.deepcopy(model.state_dict()), GaussNewton(model)
    state = copy.deepcopy(optimizer.state_dict())

    def at_its_least(model, x):  # J is not 0, but Jᵀr is: the loss is least here
        (moved,) = (p.sum() - before[name].sum() for name, p in model.named_parameters() if name == "0.bias")
        return torch.stack([torch.ones_like(moved), moved])

    solved = copy.deepcopy(model)
    without_model = [(lambda model, x: x.sum() + 0 * model(x), torch.rand(4, 2))]
    with pytest.raises(RuntimeError, match="at these points no residual depends on a trainable parameter"):
        optimizer.step(without_model)  # the first of all
    for residual in (at_its_least, without_model[0][0], lambda model, x: model(x) - solved(x)):
        optimizer.step([(residual, torch.rand(4, 2))])
        assert optimizer.metrics()["alpha"] == 0
        assert optimizer.metrics()["damping"] <= 1e6
        assert optimizer.metrics()["loss_after"] == optimizer.metrics()["loss_before"]
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert optimizer.state_dict() == state
    assert optimizer.metrics()["tries"] == 0  # a loss of 0 is solved already


def test_a_small_fall_is_taken_where_more_damping_has_no_larger_one():
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 1.0)
    residual = [(lambda model, x: torch.cat([model(x), 20 + 0 * x]), torch.ones(1, 1))]
    optimizer = GaussNewton(model)
    optimizer.step(residual)
    assert model.weight.item() == pytest.approx(0, abs=1e-8)  # the least loss there is, 0.25 % below
    assert optimizer.metrics()["tries"] == 2
    assert optimizer.metrics()["damping"] == 1e-10
    nn.init.constant_(model.weight, 0.01)
    optimizer.step(residual)
    assert model.weight.item() == 0.01  # 2.5·10⁻⁷ of the loss
    assert optimizer.metrics()["alpha"] == 0


def test_an_error_within_a_try_leaves_the_weights_bit_for_bit():
    model, calls = network(), []
    before = weights(model)

    def breaks(model, x):
        calls.append(1)
        if len(calls) == 3:  # the residuals, J, and the first try
            raise ArithmeticError("broken")
        return model(x) - 1

    with pytest.raises(ArithmeticError, match="broken"):
        GaussNewton(model).step([(breaks, torch.rand(4, 2))])
    assert torch.equal(weights(model), before)


def test_losses_that_are_not_finite_are_no_fall():
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 1.0)

    def far(model, x):  # the whole step leads beyond the end of the domain
        return torch.log(model.weight[0, 0]) + 5

    optimizer = GaussNewton(model)
    optimizer.step([(far, torch.ones(1, 1))])
    assert optimizer.metrics()["alpha"] == 0.125  # the whole step and its half rise; the next two fall
    nn.init.constant_(model.weight, 1.0)
    optimizer.step([(lambda model, x: far(model, x) + 10, torch.ones(1, 1))])  # the trial move is beyond the end
    assert optimizer.metrics()["alpha"] == 0.0625  # on a straight line 1 − 15/16 is the first above 0
    with pytest.raises(RuntimeError, match="the loss is nan"):
        optimizer.step([(lambda model, x: torch.log(-model.weight[0, 0]), torch.ones(1, 1))])


def test_a_jacobian_that_is_not_finite_is_refused():
    with pytest.raises(RuntimeError, match=r"the loss is finite and its Jacobian is not; .* such as a root at 0"):
        GaussNewton(network()).step([(lambda model, x: (0 * model(x)).sqrt() + 1, torch.rand(3, 2))])


RESIDUALS = {
    "number": lambda model, x: model(x).prod(),
    "matrix": lambda model, x: torch.outer(model(x), x),
    "one layer": lambda model, x: model[0](x),
    "other parameters": lambda model, x: model(x) - functional_call(model, {"0.bias": torch.ones(6)}, (x,)),
}


@pytest.mark.parametrize("name", RESIDUALS)
def test_jacobians_are_those_of_a_loop(name):
    model, terms = network(outputs=2), [(RESIDUALS[name], torch.rand(7, 2)), (RESIDUALS["matrix"], torch.rand(2, 2))]
    stacked = Terms(model, terms, "here")
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    r, jacobian = by_loop(model, terms)
    assert torch.allclose(stacked.evaluate(parameters), r, atol=1e-14)
    assert torch.allclose(stacked.jacobian(parameters, 3), jacobian, atol=1e-14)


def test_parameters_of_all_kinds_are_stepped_as_by_a_loop():
    """One that belongs to no layer, tied and normalised weights, a buffer and a frozen layer."""

    def compute(model, x):
        x = torch.tanh(model.first(model.scale * x))
        return model.frozen(torch.tanh(model.third(torch.tanh(model.second(x)))))

    parts = {"first": weight_norm(nn.Linear(2, 4)), "second": nn.Linear(4, 4), "third": nn.Linear(4, 4)}
    parts |= {"frozen": nn.Linear(4, 1).requires_grad_(False), "viscosity": nn.Parameter(torch.tensor(0.5))}
    model, x = Model(compute, **parts, scale=nn.Buffer(torch.tensor(2.0))), torch.rand(9, 2)
    model.third.weight = model.second.weight
    terms = [(lambda model, x: model.viscosity * laplacian(model, x) + model(x) - x.sum(), x)]
    frozen = copy.deepcopy(model.frozen.state_dict())
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    twin, optimizer = copy.deepcopy(model), GaussNewton(model, damping=1e-3)
    step, alpha, damping = step_of(model, optimizer, terms)
    assert torch.allclose(step, bent(twin, terms, alpha, by_rows(*by_loop(twin, terms), damping)), rtol=1e-6, atol=1e-9)
    assert model.third.weight is model.second.weight
    assert all(torch.equal(value, frozen[name]) for name, value in model.frozen.state_dict().items())
    assert list(optimizer.coverage().treated) == names
    assert optimizer.coverage().element_share == 1
