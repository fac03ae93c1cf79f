"""The torch.func path: explicit per-sample Jacobians, on plain models and on layers without a closed form."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune

from adiv_optim import BatchIdeal, Disproportional, Proportional, attach, jacobian
from tests.helpers.cases import relative_error
from tests.helpers.modules import Model

EXACT = 1e-12  # float64, relative
SOLVED = {False: EXACT, True: 1e-9}  # a Cholesky factor squares the condition of the rows
LEARNING_RATE = 0.1


def bilinear(model, x, y):
    """z_i = xᵀA_i y + (Wx)_i + b_i, written out: no closed form of it is known to the library."""
    return torch.einsum("bl,olr,br->bo", x, model.bilinear, y) + x @ model.weight.mT + model.bias


def tied(sparse=False):
    """An embedding whose table is the head's weight."""
    model = nn.Sequential(nn.Embedding(7, 4, sparse=sparse), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 7, bias=False))
    model[3].weight = model[0].weight
    return model


def shared():
    """One layer used three times."""
    return nn.Sequential(cell := nn.Linear(4, 4), nn.Tanh(), cell, nn.Tanh(), cell)


def mlp():
    return nn.Sequential(
        nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Linear(6, 5, bias=False), nn.Tanh(), nn.Linear(5, 2)
    )


def cnn():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True),
        nn.Conv2d(4, 4, 3, stride=2, groups=2), nn.Flatten(), nn.LayerNorm(16), nn.Linear(16, 3),
    )  # fmt: skip


MODELS = {
    "mlp": (mlp, lambda: torch.randn(5, 4, dtype=torch.float64)),
    "cnn": (cnn, lambda: torch.randn(5, 2, 6, 6, dtype=torch.float64)),
    "tokens": (mlp, lambda: torch.randn(2, 3, 4, dtype=torch.float64)),
    "shared": (shared, lambda: torch.randn(5, 4, dtype=torch.float64)),
    "used-plainly-afterwards": (  # without a layer, after the layer that owns the weight has run
        lambda: Model(lambda model, x: model.layer(x).tanh() @ model.layer.weight, layer=nn.Linear(4, 4)),
        lambda: torch.randn(5, 4, dtype=torch.float64),
    ),
    "tied": (tied, lambda: torch.randint(7, (5,))),
    "tied-sparse": (lambda: tied(sparse=True), lambda: torch.randint(7, (5,))),
}
each_model = pytest.mark.parametrize(("build", "make_input"), MODELS.values(), ids=MODELS)


def squares(output, target):
    return (output - target).square().mean()


def fast_gradients(model, inputs, correction):
    model = copy.deepcopy(model)
    if correction is not None:
        attach(model, correction)
    squares(model(inputs), 0.5).backward()
    return {name: p.grad for name, p in model.named_parameters()}, model


RULES = {"none": None, "proportional": Proportional(), "disproportional": Disproportional(), "ideal": BatchIdeal(0.3)}


@each_model
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_oracle_is_the_fast_path_on_whole_models_in_chunks_too(build, make_input, rule):
    model, x = build().double(), make_input()
    for chunk_size in (None, 3):
        wanted, ran = fast_gradients(model, x, rule)
        found = jacobian.corrected_gradients(model, squares, x, 0.5, rule, chunk_size=chunk_size)
        assert found.keys() == wanted.keys()
        # A bias in front of BatchNorm has gradient zero, up to rounding; the greatest gradient is the measure.
        largest = max(g.abs().max() for g in wanted.values())
        for name in wanted:
            assert (found[name] - wanted[name]).abs().max() <= SOLVED[rule == RULES["ideal"]] * largest, name
        for name, buffer in ran.named_buffers():
            assert torch.equal(model.get_buffer(name), buffer), "running statistics are updated exactly once"
    if rule is not None:
        plain, _ = fast_gradients(model, x, None)
        assert max(relative_error(found[name], plain[name]) for name in plain) > 1e-2, "the case shows nothing"


# torch's own notice: vmap has no batching rule for the operator inside nn.Bilinear and loops instead.
@pytest.mark.filterwarnings("ignore:There is a performance drop because we have not yet implemented:UserWarning")
def test_layer_jacobians_of_bilinear_are_outer_products():
    layer = nn.Bilinear(2, 3, 4).double()
    x, y = torch.randn(5, 2, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
    found = jacobian.layer_jacobians(layer, x, y)
    identity = torch.eye(4, dtype=torch.float64)
    wanted = torch.einsum("mo,bi,bj->bmoij", identity, x, y)
    torch.testing.assert_close(found["weight"], wanted, rtol=EXACT, atol=1e-15)
    torch.testing.assert_close(found["bias"], identity.expand(5, 4, 4), rtol=0, atol=0)


#: Distances from centres, as of a radial basis.
DISTANCES = Model(lambda model, x: torch.cdist(x, model.centres), centres=nn.Parameter(torch.randn(5, 3).double()))


@pytest.mark.parametrize("layer", [DISTANCES, nn.PReLU(3).double(), nn.PReLU().double()], ids=["cdist", "one", "all"])
def test_where_torch_is_wrong_under_vmap_jacobians_are_those_of_a_loop(layer):
    x, (name, parameter) = torch.randn(3, 3).double(), next(layer.named_parameters())
    found = jacobian.layer_jacobians(layer, x)[name]
    for sample, rows in zip(layer(x), found, strict=True):
        for z, wanted in zip(sample, rows, strict=True):
            (gradient,) = torch.autograd.grad(z, parameter, retain_graph=True)
            assert relative_error(wanted, gradient) <= EXACT or torch.equal(wanted, gradient)


def test_layer_jacobians_do_not_depend_on_the_chunk_size_and_leave_frozen_parameters_out():
    layer, x = nn.Conv2d(2, 3, 2), torch.randn(5, 2, 3, 3)
    whole = jacobian.layer_jacobians(layer, x)
    for chunk_size in (1, 2, 5, 100):
        parts = jacobian.layer_jacobians(layer, x, chunk_size=chunk_size)
        for name in whole:
            torch.testing.assert_close(parts[name], whole[name])
    layer.weight.requires_grad_(False)
    assert jacobian.layer_jacobians(layer, x).keys() == {"bias"}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_effective_update_of_a_layer_without_a_closed_form_is_ideal(rule):
    shapes, g = {"bilinear": (5, 3, 4), "weight": (5, 3), "bias": (5,)}, torch.randn(1, 5, dtype=torch.float64)
    layer = Model(bilinear, **{name: nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}).double()
    x, y = torch.randn(1, 3, dtype=torch.float64), torch.randn(1, 4, dtype=torch.float64)
    optimizer = torch.optim.SGD(layer.parameters(), lr=LEARNING_RATE)
    before = layer(x, y).detach()
    loss = jacobian.backward(layer, lambda z, g: (z * g).sum(), (x, y), g, rule)
    optimizer.step()
    divergence = x.square().sum() * (y.square().sum() + 1) + 1
    wanted = {None: divergence, RULES["ideal"]: 1 / 1.3}.get(rule, 1.0)  # with a damping of 0.3
    torch.testing.assert_close(layer(x, y) - before, -LEARNING_RATE * wanted * g, rtol=0, atol=100 * EXACT)
    assert torch.equal(loss, (before * g).sum())


def test_a_norm_can_be_corrected_if_it_is_named_and_other_layers_are_plain_then():
    model, x = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 2)).double(), torch.randn(1, 4, dtype=torch.float64)
    found = jacobian.corrected_gradients(model, squares, x, 0.5, Proportional(), layers=["0"])
    plain, _ = fast_gradients(model, x, None)
    # J of the gain is diag(x̂), whose trace of J Jᵀ over 4 features is |x̂|²/4 = 1; the bias adds 1.
    normal = F.layer_norm(x, (4,))
    scale = 1 / (normal.square().mean() + 1)
    assert relative_error(found["0.weight"], scale * plain["0.weight"]) <= EXACT
    assert relative_error(found["0.bias"], scale * plain["0.bias"]) <= EXACT
    assert all(relative_error(found[name], plain[name]) <= EXACT for name in ("1.weight", "1.bias"))


def test_a_parameter_of_no_dimensions_has_a_gradient():
    model = Model(lambda model, x: model.gain * x, gain=nn.Parameter(torch.tensor(2.0, dtype=torch.float64)))
    x = torch.randn(5, 4, dtype=torch.float64)
    found = jacobian.corrected_gradients(model, squares, x, 0.5, None)["gain"]
    assert relative_error(found, fast_gradients(model, x, None)[0]["gain"]) <= EXACT
    f = x.square().mean(-1, keepdim=True)  # tr(JJᵀ) / m
    wanted = ((2 * x - 0.5) * 2 / x.numel() * x / f).sum()
    assert relative_error(jacobian.corrected_gradients(model, squares, x, 0.5, Proportional())["gain"], wanted) <= EXACT


def test_hooks_before_a_layer_run_once():
    model, x = mlp().double(), torch.randn(5, 4, dtype=torch.float64)
    prune.random_unstructured(model[0], "weight", 0.3)
    model[4].register_forward_pre_hook(lambda layer, args: (args[0] / 2,))
    squares(model(x), 0.5).backward()
    found = jacobian.corrected_gradients(model, squares, x, 0.5, None)
    assert all(relative_error(found[name], p.grad) <= EXACT for name, p in model.named_parameters())


def test_a_layer_at_two_places_goes_by_either_path():
    model, x = shared(), torch.randn(5, 4)
    first, second = (jacobian.corrected_gradients(model, squares, x, 0.5, Proportional(), layers=[p]) for p in "02")
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_an_empty_batch_has_gradients_of_zeros():
    model, x = mlp().double(), torch.ones(0, 4, dtype=torch.float64)
    found = jacobian.corrected_gradients(model, lambda output, target: output.sum(), x, None, Proportional())
    assert found.keys() == dict(model.named_parameters()).keys()
    assert not any(gradient.any() for gradient in found.values())
