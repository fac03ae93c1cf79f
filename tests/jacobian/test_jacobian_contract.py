"""What the torch.func path leaves behind, leaves alone, and refuses."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from adiv_optim import BatchIdeal, Disproportional, Proportional, attach, jacobian
from adiv_optim.diagnostics import divergence
from tests.functional.test_memory import Largest
from tests.helpers.cases import relative_error
from tests.helpers.modules import Model
from tests.jacobian.test_jacobian import mlp, squares

EXACT = 1e-12  # float64, relative


def test_backward_accumulates_as_autograd_does_and_returns_the_detached_loss():
    model, x = mlp().double(), torch.randn(5, 4, dtype=torch.float64)
    once = jacobian.corrected_gradients(model, squares, x, 0.5, Proportional())
    for _ in range(2):
        loss = jacobian.backward(model, squares, x, 0.5, Proportional())
    assert torch.equal(loss, squares(model(x), 0.5).detach())
    assert not loss.requires_grad
    for name, parameter in model.named_parameters():
        assert relative_error(parameter.grad, 2 * once[name]) <= EXACT
        assert not parameter.grad.requires_grad


def test_gradients_can_be_changed_in_place_one_by_one():
    """Autograd finds one gradient for p and q, and with a sum as the loss a view of one number."""
    p, q = (nn.Parameter(torch.zeros(3, 2)) for _ in range(2))
    model = Model(lambda model, x: model.layer(x) + model.p + model.q, layer=nn.Linear(4, 2), p=p, q=q)
    jacobian.backward(model, lambda z, _: z.sum(), torch.randn(3, 4), None, Proportional())
    model.p.grad.mul_(0.5)
    assert torch.equal(model.p.grad, torch.full((3, 2), 0.5))
    assert torch.equal(model.q.grad, torch.ones(3, 2))


def test_chunks_bound_the_memory():
    model, x = nn.Linear(16, 12), torch.randn(32, 16)
    largest = {}
    for chunk_size in (1, 4, None):
        with Largest() as recorder:
            jacobian.corrected_gradients(model, squares, x, 0.5, Proportional(), chunk_size=chunk_size)
        largest[chunk_size] = recorder.numel
    assert largest[None] >= 32 * 12 * model.weight.numel()
    assert largest[4] <= largest[None] / 8
    assert largest[1] <= largest[4]


def test_corrected_gradients_touch_neither_grad_nor_hooks_nor_flags_and_not_when_the_forward_raises():
    model, x = mlp().double(), torch.randn(5, 4, dtype=torch.float64)
    model[2].requires_grad_(False)
    flags = [p.requires_grad for p in model.parameters()]
    jacobian.corrected_gradients(model, squares, x, 0.5, Proportional())
    with pytest.raises(RuntimeError, match="shape"):
        jacobian.corrected_gradients(model, squares, x[:, :3], 0.5, Proportional())
    assert [p.requires_grad for p in model.parameters()] == flags
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_what_is_frozen_or_not_used_is_absent_and_left_out_of_the_divergence():
    model, x = mlp().double(), torch.randn(5, 4, dtype=torch.float64)
    model.unused = nn.Linear(3, 2)
    model.forward = lambda x: nn.Sequential(*list(model)[:5])(x)
    model[0].bias.requires_grad_(False)
    model[2].requires_grad_(False)
    found = jacobian.corrected_gradients(model, squares, x, 0.5, Disproportional())
    assert found.keys() == {"0.weight", "4.weight", "4.bias"}
    attach(model, Disproportional())
    squares(model(x), 0.5).backward()
    for name, gradient in found.items():
        assert relative_error(gradient, model.get_parameter(name).grad) <= EXACT


def test_works_where_gradients_are_off_and_on_inputs_that_require_them():
    model, x = mlp().double(), torch.randn(5, 4, dtype=torch.float64)
    wanted = jacobian.corrected_gradients(model, squares, x, 0.5, Proportional())
    with torch.no_grad():
        found = jacobian.corrected_gradients(model, squares, x, 0.5, Proportional())
    with_gradient = jacobian.corrected_gradients(model, squares, x.clone().requires_grad_(), 0.5, Proportional())
    for name in wanted:
        assert torch.equal(found[name], wanted[name])
        assert torch.equal(with_gradient[name], wanted[name])


def recomputed(model, x):
    """A model whose first part is recomputed."""
    return model.inside[-1](checkpoint(model.inside[:-1], x, use_reentrant=False))


def by_autocast(model, x):
    """A model that runs in bfloat16 by autocast of its own."""
    with torch.autocast("cpu", torch.bfloat16):
        return model.inside(x).to(x.dtype)


@pytest.mark.parametrize(
    ("how", "dtype", "tolerance"),
    [
        ("checkpoint", torch.float64, EXACT),
        ("autocast", torch.float32, 0.05),
        ("autocast outside", torch.float32, 0.05),
        ("half", torch.bfloat16, 0.05),
    ],
)
def test_half_precision_and_checkpoints_give_the_gradients_of_the_plain_model(how, dtype, tolerance):
    """The solve of `BatchIdeal` is float32 at least: in bfloat16 it is off by most of its size, or there is none."""
    model, x = mlp().double(), torch.randn(8, 4, dtype=torch.float64)
    wanted = jacobian.corrected_gradients(model, squares, x, 0.5, BatchIdeal(0.1))
    model = model.to(dtype)
    computes = {"checkpoint": recomputed, "autocast": by_autocast}
    around = Model(computes[how], inside=model) if how in computes else model
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast outside"):
        found = jacobian.corrected_gradients(around, squares, x.to(dtype), 0.5, BatchIdeal(0.1))
    assert len(found) == len(wanted)
    for name, gradient in found.items():
        assert gradient.dtype == dtype
        assert relative_error(gradient, wanted[name.removeprefix("inside.")]) <= tolerance, name
    assert all(parameter.requires_grad for parameter in model.parameters())


X, SHIFT = torch.ones(3, 4), nn.Parameter(torch.ones(4))


def two_tensors():
    return Model(lambda model, x: (x * model.gain, x), gain=nn.Parameter(torch.ones(4)))


#: Model, options, error, and what it says.
ERRORS = {
    "class": (mlp, {"correction": Proportional}, TypeError, r"write Proportional\(\)"),
    "attached": (lambda: attach(mlp(), Proportional()), {}, ValueError, r"layer '0' already has a correction.*detach"),
    "batch-norm-in-a-layer": (
        lambda: nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))), {"layers": ["0"]},
        ValueError, "layer '0': BatchNorm1d mixes the samples",
    ),
    "nothing-to-train": (mlp, {"layers": ["1"]}, ValueError, "layer '1' has no trainable parameter; leave it out"),
    "complex": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2, dtype=torch.cfloat)), {"layers": ["1"]},
        ValueError, "layer '1' is complex, and has no real Jacobian",
    ),
    "reentrant-checkpoint": (
        lambda: Model(lambda m, x: m.last(checkpoint(m.first, x.clone().requires_grad_(), use_reentrant=True)),
                      first=nn.Linear(4, 4), last=nn.Linear(4, 2)), {},
        ValueError, r"a reentrant checkpoint hides the calls of its layers; write .*use_reentrant=False",
    ),
    "layer-in-a-layer": (
        lambda: nn.Sequential(mlp()), {"layers": ["0.0", "0"]},
        ValueError, r"names '0\.0', which is inside '0'.*name one",
    ),
    "chunk-size": (mlp, {"chunk_size": 0}, ValueError, "chunk_size is 0.*at least 1"),
    "keyword-call": (
        lambda: Model(lambda model, x: model.layer(input=x), layer=nn.Linear(4, 2)), {},
        ValueError, r"layer 'layer' \(Linear\) has no Jacobian: it was not called with tensors alone, by position",
    ),
    "call-without-arguments": (
        lambda: Model(lambda model, x: x + model.layer(), layer=Model(lambda layer: layer.shift, shift=SHIFT)), {},
        ValueError, r"layer 'layer' \(Model\) .*: it was not called with tensors alone",
    ),
    "nothing-trained": (lambda: mlp().requires_grad_(False), {}, ValueError, "not depend on any trainable parameter"),
    "two-tensors": (
        two_tensors, {}, ValueError, r"the model itself \(Model\) .*: it returned tuple; only a layer that returns one",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("build", "options", "error", "message"), ERRORS.values(), ids=ERRORS)
def test_error_says_what_was_found(build, options, error, message):
    model = build()
    for function in (jacobian.corrected_gradients, jacobian.backward):
        with pytest.raises(error, match=message):
            function(model, lambda z, t: z[0].sum(), X, 0.5, **{"correction": Proportional(), **options})
    assert all(p.grad is None for p in model.parameters())


#: What layer_jacobians refuses: the layer, options, error, and what it says.
NO_JACOBIANS = {
    "nothing-trained": (nn.Tanh(), {}, ValueError, "Tanh has no trainable parameter"),
    "attached": (attach(nn.Linear(4, 2), Proportional()), {}, ValueError, r"already has a correction.*detach\(model\)"),
    "chunk-size": (nn.Linear(4, 2), {"chunk_size": -1}, ValueError, "chunk_size"),
    "complex": (nn.Linear(4, 2, dtype=torch.cfloat), {}, ValueError, "Linear is complex, and has no real Jacobian"),
    "batch-norm": (nn.BatchNorm1d(4), {}, ValueError, "BatchNorm1d mixes the samples of a batch"),
    "two-tensors": (two_tensors(), {}, TypeError, "Model returned tuple; it must return one tensor"),
}


@pytest.mark.parametrize(("layer", "options", "error", "message"), NO_JACOBIANS.values(), ids=NO_JACOBIANS)
def test_layer_jacobians_say_what_has_none(layer, options, error, message):
    with pytest.raises(error, match=message):
        jacobian.layer_jacobians(layer, X, **options)


@pytest.mark.parametrize("kind", [nn.RNNCell, nn.GRUCell])
def test_a_recurrent_cell_begins_with_zeros(kind):
    cell, x = kind(4, 2), torch.randn(3, 4)
    given = Model(lambda model, x: model.cell(x, x.new_zeros(3, 2)), cell=cell)
    found, wanted = (jacobian.corrected_gradients(each, squares, x, 0.0, Proportional()) for each in (cell, given))
    assert all(torch.equal(found[name], wanted[f"cell.{name}"]) for name in found)
    assert any((gradient != p).any() for gradient, p in zip(found.values(), cell.parameters(), strict=True))


def test_a_layer_that_is_used_without_a_call_is_named():
    model = Model(
        lambda model, x: F.linear(model.first(x), model.second.weight), first=nn.Linear(4, 3), second=nn.Linear(3, 2)
    )
    with pytest.raises(ValueError, match=r"second.weight has a gradient, and no call of layer 'second' was seen"):
        jacobian.corrected_gradients(model, squares, X, 0.0, Proportional(), layers=["second"])
    with pytest.warns(UserWarning, match="no call of layer 'second' was seen: it stays plain"):
        jacobian.corrected_gradients(model, squares, X, 0.0, Proportional())


def test_a_compiled_model_is_run_as_it_is_written():
    model, x = mlp(), torch.randn(3, 4)
    wanted = jacobian.corrected_gradients(model, squares, x, 0.0, Proportional())
    compiled = torch.compile(model, backend="eager")
    squares(compiled(x), 0.0).backward()
    found = jacobian.corrected_gradients(compiled, squares, x, 0.0, Proportional())
    assert all(torch.equal(found[f"_orig_mod.{name}"], gradient) for name, gradient in wanted.items())
    assert any(not torch.allclose(p.grad, wanted[name]) for name, p in model.named_parameters())


def test_input_changed_in_place_after_the_layer_read_it_is_read_as_it_was():
    def residual(model, x):
        x = model.first(x)
        return model.add(x, model.second(x))

    parts, x = {"first": nn.Linear(4, 4), "second": nn.Linear(4, 4)}, torch.randn(3, 4)
    found, wanted = (
        jacobian.corrected_gradients(Model(residual, add=add, **parts), squares, x, 0.0, Proportional())
        for add in (torch.Tensor.add_, torch.add)
    )
    for name in wanted:
        assert torch.equal(found[name], wanted[name]), name


NORMS = {"instance": nn.InstanceNorm1d(4, affine=True), "batch-in-evaluation": nn.BatchNorm1d(4).eval()}


@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
def test_normaliser_that_does_not_mix_samples_has_jacobians(norm):
    x, t = torch.randn(5, 4, 3), torch.randn(5, 4, 3)
    found = jacobian.corrected_gradients(norm, squares, x, t, None, layers=[""])
    squares(norm(x), t).backward()
    for name, parameter in norm.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad)


def test_a_layer_that_returns_a_view_of_its_parameter_has_a_gradient():
    """As a class token."""
    token = Model(lambda model, x: model.token.expand(len(x), 6), token=nn.Parameter(torch.randn(6)))
    model = Model(lambda model, x: model.head(x + model.first(x)), first=token, head=nn.Linear(6, 3)).double()
    x, y = torch.randn(8, 6).double(), torch.randint(3, (8,))
    found = jacobian.corrected_gradients(model, F.cross_entropy, x, y, None)
    F.cross_entropy(model(x), y).backward()
    assert found.keys() == dict(model.named_parameters()).keys()
    for name, p in model.named_parameters():
        assert torch.allclose(found[name], p.grad, rtol=1e-12), name


LOSSES = {
    "no-number": (lambda out, target: (out - target) ** 2, r"shape \(3, 2\); it must return one number"),
    "no-tensor": (lambda out, target: 3.0, r"loss_fn returned 3\.0 \(float\); it must return one number"),
    "detached": (lambda out, target: out.detach().sum(), "does not depend on any trainable parameter"),
}


@pytest.mark.parametrize(("loss_fn", "message"), LOSSES.values(), ids=LOSSES)
def test_a_loss_that_cannot_be_differentiated_is_named(loss_fn, message):
    with pytest.raises(ValueError, match=message):
        divergence(mlp(), loss_fn, X, 0.5)


def test_inference_mode_is_named():
    with torch.inference_mode(), pytest.raises(RuntimeError, match=r"torch\.inference_mode; call this outside of it"):
        divergence(mlp(), squares, X.float(), 0.5)


def test_a_layer_that_draws_random_numbers_is_named():
    """Its rows would be computed with other numbers than the pass had."""
    noisy = Model(lambda model, x: F.dropout(x * model.gain, 0.5, model.training), gain=nn.Parameter(torch.ones(6)))
    model, x, y = nn.Sequential(noisy, nn.Linear(6, 3)), torch.randn(8, 6), torch.randint(3, (8,))
    message = r"layer '0' \(Model\) .*: it drew random numbers or .* without model\.eval\(\); name other"
    with pytest.raises(ValueError, match=message):
        jacobian.corrected_gradients(model, F.cross_entropy, x, y, None)
    assert divergence(model, F.cross_entropy, x, y).left_out["0"].startswith("it drew random numbers")
    jacobian.corrected_gradients(model.eval(), F.cross_entropy, x, y, None)


def test_a_layer_that_changes_its_buffers_is_named():
    """Each of its rows would be computed with other buffers than the pass had, as of the power iteration here."""
    model = nn.Sequential(parametrizations.spectral_norm(nn.Linear(6, 5)), nn.Tanh(), nn.Linear(5, 3))
    x, y = torch.randn(8, 6), torch.randint(3, (8,))
    with pytest.raises(ValueError, match=r"layer '0' .*: it drew random numbers or changed its buffers"):
        jacobian.corrected_gradients(model, F.cross_entropy, x, y, None)
    found = jacobian.corrected_gradients(model.eval(), F.cross_entropy, x, y, None)
    F.cross_entropy(model(x), y).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad)
