"""What `divergence` reports is what the theory says: float64, held against loops, explicit Jacobians and real steps."""

import copy
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize

from adiv_optim import BatchIdeal, Correction, Disproportional, Proportional, attach
from adiv_optim.diagnostics import divergence
from adiv_optim.jacobian import layer_jacobians
from adiv_optim.layers import AffineLikeLinear, PatchNormConv2d
from tests.fuzz.by_hand import outputs
from tests.helpers.cases import LAYERS, quiet_same
from tests.helpers.covering import paired
from tests.helpers.modules import Model
from tests.jacobian.test_ideal_update import low_rank

EXACT = 1e-12  # relative, float64
SOLVED = 1e-9  # a Cholesky factor squares the condition of the rows
IDEAL = BatchIdeal(1e-3)  # little damping: near to what the rule is named for


pytestmark = pytest.mark.usefixtures("in_float64")


def weighted(z, g):
    """A loss whose gradient at the outputs is g."""
    return (z * g).sum()


def measure(layer, x, correction=None, **options):
    g = torch.randn_like(layer(x))
    return divergence(layer, weighted, x, g, correction, **options).layers[""], g


def agrees(found, wanted, tolerance=EXACT):
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


@dataclass(frozen=True)
class HalfIdeal(Correction):
    """A user's own rule, by gradients: neither scales alone nor a solve alone."""

    def scales(self, factors):
        return Proportional().scales(factors)

    def gradients(self, rows):
        one, other = Proportional().gradients(rows), BatchIdeal(0.1).gradients(rows)
        return {name: (one[name] + other[name]) / 2 for name in one}


@pytest.mark.parametrize("count", [4, 20], ids=["sample-side", "feature-side"])
@pytest.mark.parametrize("per_sample", [False, True])
def test_own_gain_of_batch_ideal_is_its_leverage(count, per_sample):
    damping = 0.3
    layer, x = nn.Linear(5, 3), torch.randn(count, 5)
    found, g = measure(layer, x, BatchIdeal(damping, per_sample))
    kernel = x @ x.T + 1
    ridge = damping * kernel.trace() / count
    mixing = kernel @ torch.linalg.inv(kernel + ridge * torch.eye(count)) * (count if per_sample else 1)
    agrees(found.gain, mixing.diagonal(), SOLVED)
    agrees(found.squared_norm, x.square().sum(1))
    assert found.summary()["gain_variance"] == pytest.approx(mixing.diagonal().var(unbiased=False).item(), rel=SOLVED)
    with pytest.raises(AssertionError):
        agrees(found.gain, (kernel @ torch.linalg.inv(kernel + 2 * ridge * torch.eye(count))).diagonal(), 100 * SOLVED)
    moved, own = -mixing @ g, -mixing.diagonal()[:, None] * g
    rest = (moved - own).norm(dim=1)
    agrees(found.interference, rest / (own.norm(dim=1) + rest), SOLVED)
    agrees(found.cosine, -F.cosine_similarity(moved, g), SOLVED)


def effective_updates(layer, x, g, change):
    """(g_k, Δz_k) of every row, group by group, after the parameters of a copy have moved by `change`."""
    moved = copy.deepcopy(layer)
    with torch.no_grad():
        for name, parameter in moved.named_parameters():
            parameter += change[name]
        difference = moved(x) - layer(x)
    return list(zip(torch.cat(outputs(layer, g)), torch.cat(outputs(layer, difference)), strict=True))


@paired(
    "case correction",
    {name: LAYERS[name] for name in LAYERS if "unbatched-same" not in name},
    {"plain": None, "proportional": Proportional(), "ideal": BatchIdeal(0.1)},
)
@quiet_same
def test_every_layer_kind_agrees_with_a_loop_over_its_rows(case, correction):
    layer, x = case.layer(), case.input()
    found, g = measure(layer, x, correction)
    taken = copy.deepcopy(layer) if correction is None else attach(copy.deepcopy(layer), correction)
    taken(x).backward(g)
    change = {name: -p.grad for name, p in taken.named_parameters()}
    wanted = effective_updates(layer, x, g, change)
    assert found.total_rows == len(found.index) == len(wanted)
    cosine = torch.stack([-F.cosine_similarity(update, gradient, 0) for gradient, update in wanted])
    projection = torch.stack([-update @ gradient / gradient.square().sum() for gradient, update in wanted])
    agrees(found.cosine, cosine, SOLVED)
    agrees(found.projection, projection, SOLVED)
    agrees(sum(found.responsibility.values()), torch.ones(len(wanted)), SOLVED)


def mask(layer, g, number):
    """G with one row left, counted as the result counts."""
    g = g.detach().requires_grad_()
    row = torch.cat(outputs(layer, g))[number]
    return torch.autograd.grad(row, g, row.detach())[0]


@pytest.mark.parametrize("name", ["linear-tokens", "conv2d-every-option"])
@pytest.mark.parametrize("rule", [None, Disproportional(), HalfIdeal()], ids=str)
def test_own_movement_is_that_of_the_row_alone_under_a_rule_of_ones_own_too(name, rule):
    layer, x = LAYERS[name].layer(), LAYERS[name].input()
    found, g = measure(layer, x, rule)
    count = len(found.gain)
    # In the middle there is another sample, or another group, on either side.
    for number in (0, 3, count // 2 - 1, count // 2, count - 1):
        alone = mask(layer, g, number)
        taken = copy.deepcopy(layer) if rule is None else attach(copy.deepcopy(layer), rule)
        taken(x).backward(alone)
        updates = effective_updates(layer, x, alone, {n: -p.grad for n, p in taken.named_parameters()})
        (gradient, update) = next(entry for entry in updates if entry[0].abs().max() > 0)
        agrees(found.gain[number], -update @ gradient / gradient.square().sum(), SOLVED)


GENERAL = {
    "low-rank-tokens": (lambda: low_rank(5), [(2, 3, 5)]),  # tokens of a sample are rows of their own
    "bilinear": (lambda: nn.Bilinear(3, 4, 2), [(5, 3), (5, 4)]),
    "conv-transpose-groups": (lambda: nn.ConvTranspose1d(4, 6, 3, stride=2, groups=2), [(2, 4, 5)]),
    "affine-like": (lambda: AffineLikeLinear(5, 3, alpha=0.7), [(2, 3, 5)]),
    "weight-norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(5, 3)), [(4, 5)]),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop because we have not yet implemented:UserWarning")
@pytest.mark.parametrize(("build", "shapes"), GENERAL.values(), ids=GENERAL)
def test_layer_without_closed_form_agrees_with_explicit_jacobians(build, shapes):
    layer, inputs = build(), tuple(torch.randn(shape) for shape in shapes)
    g = torch.randn_like(layer(*inputs))
    found = divergence(layer, weighted, inputs, g).layers[""]
    jacobians = {
        name: as_rows(layer, jacobian.flatten(g.dim()), g.dim())
        for name, jacobian in layer_jacobians(layer, *inputs).items()
    }
    full = torch.cat(list(jacobians.values()), -1)  # (rows, features, parameters)
    grads = as_rows(layer, g.unsqueeze(-1), g.dim()).squeeze(-1)
    step = -torch.einsum("kmp,km->p", full, grads)
    moved = full @ step
    own = -torch.einsum("kmp,knp,kn->km", full, full, grads)
    size = grads.square().sum(1)
    agrees(found.gain, -(own * grads).sum(1) / size, SOLVED)
    agrees(found.cosine, -F.cosine_similarity(moved, grads), SOLVED)
    agrees(found.projection, -(moved * grads).sum(1) / size, SOLVED)
    rest = (moved - own).norm(dim=1)
    agrees(found.interference, rest / (own.norm(dim=1) + rest), SOLVED)
    for name, jacobian in jacobians.items():
        part = torch.einsum("kmp,km->kp", jacobian, grads).square().sum(1) / size
        agrees(found.responsibility[name], part / found.gain, SOLVED)
    agrees(sum(found.responsibility.values()), torch.ones(len(grads)))


def test_layer_that_is_not_linear_in_its_parameters_is_measured_where_the_step_begins():
    layer, x, g = low_rank(5), torch.randn(4, 5), torch.randn(4, 3)
    wanted = divergence(layer, weighted, x, g).layers[""]
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    found = divergence(layer, weighted, x, g, optimizer=optimizer).layers[""]
    for name in ("cosine", "projection", "gain"):
        agrees(getattr(found, name), getattr(wanted, name), SOLVED)


def as_rows(layer, tensor, dims):
    """(samples, *output, last) → (rows, features, last), in the order of the result."""
    if isinstance(layer, nn.ConvTranspose1d):
        return tensor.movedim(1, 2).unflatten(2, (layer.groups, -1)).movedim(2, 0).flatten(0, 2)
    return tensor.flatten(0, dims - 2)


def test_autocast_reaches_the_model_and_nothing_that_is_measured():
    model = nn.Sequential(nn.Linear(5, 4), AffineLikeLinear(4, 3)).float()
    x, g = torch.randn(8, 5), torch.randn(8, 3)
    wanted = divergence(copy.deepcopy(model).double(), weighted, x, g, layers=["0"], correction=IDEAL)
    with torch.autocast("cpu", torch.bfloat16):
        found = divergence(model.float(), weighted, x.float(), g, layers=["0"], correction=IDEAL)
        general = divergence(model, weighted, x.float(), g).layers["1"]
    agrees(found.layers["0"].gain, wanted.layers["0"].gain, 1e-3)  # by float32
    agrees(found.layers["0"].cosine, wanted.layers["0"].cosine, 0.05)  # of a gradient that is in bfloat16
    agrees(general.gain, divergence(model.double(), weighted, x, g).layers["1"].gain, 0.05)


def test_responsibility_is_the_weights_part_of_the_divergence_and_what_is_frozen_has_none():
    x = torch.randn(6, 5)
    norm = x.square().sum(1)
    for correction, wanted in ((None, norm / (norm + 1)), (Disproportional(), torch.full((6,), 0.5))):
        found, _ = measure(nn.Linear(5, 3), x, correction)
        agrees(found.responsibility["weight"], wanted)
        agrees(found.responsibility["bias"], 1 - wanted)
    for frozen, gain in {"bias": norm, "weight": torch.ones(6)}.items():
        layer = nn.Linear(5, 3)
        layer.get_parameter(frozen).requires_grad_(False)
        for correction in (None, Proportional(), BatchIdeal(0.1)):
            found, _ = measure(layer, x, correction)
            assert set(found.responsibility) == {"weight", "bias"} - {frozen}
            if correction is None:
                agrees(found.gain, gain)


def test_subset_of_rows_is_the_same_rows():
    for name in ("linear-narrow-to-wide", "conv2d-groups"):
        layer, x = LAYERS[name].layer(), LAYERS[name].input()
        g = torch.randn_like(layer(x))
        for correction in (None, Proportional(), BatchIdeal(0.1)):
            every = divergence(layer, weighted, x, g, correction).layers[""]
            some = divergence(layer, weighted, x, g, correction, max_rows=4).layers[""]
            assert len(some.index) == 4 < len(every.index) == every.total_rows == some.total_rows
            assert some.index[-1] >= 0.6 * every.total_rows  # evenly spaced, not the first
            for number in ("cosine", "projection", "gain", "interference", "squared_norm"):
                agrees(getattr(some, number), getattr(every, number)[some.index], SOLVED)


def test_layer_called_twice_moves_by_both_calls():
    layer, x = nn.Linear(4, 4), torch.randn(3, 4)
    found = divergence(nn.Sequential(layer, nn.Tanh(), layer), weighted, x, torch.randn(3, 4)).layers["0"]
    assert found.total_rows == 6
    agrees(found.gain[:3], x.square().sum(1) + 1)
    agrees(found.gain[3:], torch.tanh(layer(x)).square().sum(1).detach() + 1)


def test_a_layer_called_on_rows_of_several_widths_has_the_rows_of_all():
    act = Model(lambda act, x: x * torch.sigmoid(act.beta * x), beta=nn.Parameter(torch.ones(())))
    model, x = nn.Sequential(nn.Linear(3, 8), act, nn.Linear(8, 4), act, nn.Linear(4, 1)), torch.randn(6, 3)
    found = divergence(model, weighted, x, torch.randn(6, 1)).layers["1"]
    assert found.total_rows == len(found.cosine) == 12
    assert found.index.tolist() == [*range(12)]


# torch's own notice: nn.Bilinear has no batching rule.
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_a_hook_before_a_layer_runs_once():
    layer, x = nn.Bilinear(3, 3, 2), torch.randn(5, 3)
    plain, g = layer_jacobians(layer, x / 2, x), torch.randn(5, 2)
    layer.register_forward_pre_hook(lambda layer, args: (args[0] / 2, args[1]))
    found = divergence(layer, weighted, (x, x), g).layers[""]
    pulled = sum(torch.einsum("bo...,bo->b...", j, g).flatten(1).square().sum(1) for j in plain.values())
    agrees(found.gain, pulled / g.square().sum(1))


def test_a_loss_that_reads_the_model_itself_is_refused():
    model, x = nn.Linear(3, 2), torch.randn(5, 3)
    with pytest.raises(ValueError, match="the loss reads the model's own parameters: by loss_fn, as a penalty"):
        divergence(model, lambda z, g: weighted(z, g) + model.weight.square().sum(), x, torch.randn(5, 2))


def test_padded_tokens_of_a_layer_without_closed_form_move_by_others_alone():
    x, y = torch.randn(9, 4), torch.tensor([0, 2, 1, 0, *[-100] * 5])
    plain = nn.Linear(4, 3)
    parametrized = parametrize.register_parametrization(copy.deepcopy(plain), "weight", nn.Identity())
    found, wanted = (divergence(layer, F.cross_entropy, x, y).layers[""] for layer in (parametrized, plain))
    agrees(found.interference, wanted.interference)
    assert found.interference[-1] == 1


def test_a_parameter_that_a_layer_carries_beside_its_own_is_no_row_of_it():
    layer = nn.Linear(4, 3)
    layer.scale = nn.Parameter(torch.ones(3))
    model = Model(lambda model, x: model.layer(x) * model.layer.scale, layer=layer)
    found = divergence(model, weighted, x := torch.randn(5, 4), torch.randn(5, 3)).layers["layer"]
    agrees(found.gain, x.square().sum(1) + 1)


def test_descent_is_the_inner_product_with_the_plain_gradient_under_one_dropout_mask():
    model, x, y = nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5), nn.Linear(5, 2)), torch.randn(6, 4), torch.randn(6, 2)
    state = torch.get_rng_state()
    found = divergence(model, F.mse_loss, x, y, Proportional())
    torch.set_rng_state(state)
    plain = torch.autograd.grad(F.mse_loss(model(x), y), list(model.parameters()))
    torch.set_rng_state(state)
    F.mse_loss(attach(model, Proportional())(x), y).backward()
    parts = [(p.grad * gradient).sum().item() for p, gradient in zip(model.parameters(), plain, strict=True)]
    assert found.descent == pytest.approx(sum(parts), rel=EXACT)
    assert found.layers["0"].descent == pytest.approx(sum(parts[:2]), rel=EXACT)
    assert found.layers["2"].descent == pytest.approx(sum(parts[2:]), rel=EXACT)


@pytest.mark.parametrize("foreach", [False, True])
def test_an_optimizer_that_works_in_the_gradient_leaves_the_descent(foreach):
    """As SGD does with Nesterov's momentum, of all parameters at once."""
    model, x, y = nn.Linear(4, 3), torch.randn(6, 4), torch.randn(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, foreach=foreach)
    F.mse_loss(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
    found = divergence(model, F.mse_loss, x, y, optimizer=optimizer)
    before = [p.detach().clone() for p in model.parameters()]
    F.mse_loss(model(x), y).backward()
    plain = [p.grad.clone() for p in model.parameters()]
    optimizer.step()
    moved = zip(before, model.parameters(), plain, strict=True)
    assert found.descent == pytest.approx(sum(((b - p) * g).sum().item() for b, p, g in moved) / 0.1, rel=SOLVED)


def test_a_layer_whose_output_a_hook_changes_is_left_out():
    """Its rows would be those of the layer, and their gradients those of what the hook returns."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    model[0].register_forward_hook(lambda layer, args, output: 2 * output)
    model[1].register_forward_hook(lambda layer, args, output: None)
    found = divergence(model, F.mse_loss, torch.randn(5, 4), torch.randn(5, 3))
    assert found.left_out == {
        "0": "a forward hook changes its output; remove the hook, or make it a module behind the layer"
    }
    assert set(found.layers) == {"1"}


def test_a_fused_optimizer_steps_along_the_gradient_that_a_correction_leaves():
    """It takes a gradient to lie in memory as its parameter does, and that of BatchIdeal is a transposed one."""
    model, x, y = nn.Linear(20, 3), torch.randn(8, 20), torch.randn(8, 3)
    attach(model, IDEAL)
    made = (torch.optim.SGD(model.parameters(), lr=0.1, fused=fused) for fused in (True, False))
    fused, plain = (divergence(model, F.mse_loss, x, y, optimizer=optimizer).layers[""] for optimizer in made)
    agrees(fused.cosine, plain.cosine, SOLVED)
    assert plain.cosine.min() > 0.99


def test_a_step_by_several_rates_has_the_descent_of_its_whole():
    model, x, y = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)), torch.randn(6, 4), torch.randn(6, 2)
    slow = {"params": model[0].parameters(), "lr": 0.1}
    uphill = {"params": model[2].parameters(), "lr": 1e-3, "maximize": True}
    found = divergence(model, F.mse_loss, x, y, optimizer=torch.optim.SGD([slow, uphill]))
    F.mse_loss(model(x), y).backward()
    first, second = (sum(p.grad.square().sum().item() for p in layer.parameters()) for layer in (model[0], model[2]))
    assert found.descent == pytest.approx((0.1 * first - 1e-3 * second) / 0.1, rel=EXACT)
    assert found.descent > 0
    assert first - second < 0  # each by its own rate it would be uphill


#: Without a closed form.
CONVOLUTIONS = {"patch-norm": PatchNormConv2d, "transposed": nn.ConvTranspose2d}
each_convolution = pytest.mark.parametrize("build", CONVOLUTIONS.values(), ids=CONVOLUTIONS)


@each_convolution
@pytest.mark.parametrize("padding", [0, (1, 0), 1], ids=["other-size", "all-but-the-last", "same-size"])
def test_squared_norm_is_the_samples_whatever_dimensions_input_and_output_share(build, padding):
    layer, x = build(4, 4, 3, padding=padding), torch.randn(2, 4, 5, 6)
    found, _ = measure(layer, x)
    per_sample = layer(x)[0, 0].numel()
    assert found.total_rows == 2 * per_sample
    wanted = x.square().sum((1, 2, 3)).repeat_interleave(per_sample)
    torch.testing.assert_close(found.squared_norm, wanted, rtol=EXACT, atol=EXACT)


@each_convolution
def test_a_sample_without_a_batch_dimension_is_a_batch_of_one(build):
    layer, x = build(4, 3, 3, padding=1), torch.randn(4, 5, 6)
    g = torch.randn_like(layer(x))
    one = divergence(layer, weighted, x, g).layers[""]
    batch = divergence(layer, weighted, x.unsqueeze(0), g.unsqueeze(0)).layers[""]
    for name in ("cosine", "projection", "gain", "interference", "squared_norm"):
        torch.testing.assert_close(getattr(one, name), getattr(batch, name), rtol=EXACT, atol=EXACT)
