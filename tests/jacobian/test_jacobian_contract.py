"""What the torch.func path leaves behind, leaves alone, and refuses."""

import inspect
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from adiv_optim import BatchIdeal, Disproportional, Proportional, attach, jacobian
from adiv_optim.diagnostics import divergence
from tests.functional.test_memory import Largest
from tests.helpers.cases import relative_error
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


class Offset(nn.Module):
    """a(x) + p + q: autograd finds one gradient for both summands, and with a sum as the loss a view of one number."""

    def __init__(self):
        super().__init__()
        self.layer, self.p, self.q = nn.Linear(4, 2), nn.Parameter(torch.zeros(3, 2)), nn.Parameter(torch.zeros(3, 2))

    def forward(self, x):
        return self.layer(x) + self.p + self.q


def test_signatures_show_the_arguments_of_the_function_behind_them_and_their_own_result():
    gradients, backward = (inspect.signature(f) for f in (jacobian.corrected_gradients, jacobian.backward))
    assert list(gradients.parameters) == list(backward.parameters)
    assert next(iter(gradients.parameters)) == "model"
    assert (gradients.return_annotation, backward.return_annotation) == (dict[str, torch.Tensor], torch.Tensor)


def test_gradients_can_be_changed_in_place_one_by_one():
    model = Offset()
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


class Around(nn.Module):
    """A model that runs in bfloat16 by autocast of its own, and one whose first part is recomputed."""

    def __init__(self, inside, how):
        super().__init__()
        self.inside, self.how = inside, how

    def forward(self, x):
        if self.how == "checkpoint":
            return self.inside[-1](checkpoint(self.inside[:-1], x, use_reentrant=False))
        with torch.autocast("cpu", torch.bfloat16):
            return self.inside(x).to(x.dtype)


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
    around = Around(model, how) if how in ("checkpoint", "autocast") else model
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast outside"):
        found = jacobian.corrected_gradients(around, squares, x.to(dtype), 0.5, BatchIdeal(0.1))
    assert len(found) == len(wanted)
    for name, gradient in found.items():
        assert gradient.dtype == dtype
        assert relative_error(gradient, wanted[name.removeprefix("inside.")]) <= tolerance, name
    assert all(parameter.requires_grad for parameter in model.parameters())


class KeywordCaller(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x):
        return self.layer(input=x)


class Pair(nn.Linear):
    def forward(self, x):
        return super().forward(x), x


X = torch.ones(3, 4)


def with_batch_norm():
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))


def nested():
    return nn.Sequential(nn.Sequential(nn.Linear(4, 2)))


#: Model, options, error, and what it says.
ERRORS = {
    "class": (mlp, {"correction": Proportional}, TypeError, r"write Proportional\(\)"),
    "attached": (lambda: attach(mlp(), Proportional()), {}, ValueError, r"layer '0' already has a correction.*detach"),
    "unknown-layer": (mlp, {"layers": ["head"]}, ValueError, "layers names 'head', which the model does not have"),
    "batch-norm": (with_batch_norm, {"layers": ["1"]}, ValueError, "layer '1': BatchNorm1d mixes the samples"),
    "layer-in-a-layer": (nested, {"layers": ["0.0", "0"]}, ValueError, r"names '0\.0', which is inside '0'.*name one"),
    "chunk-size": (mlp, {"chunk_size": 0}, ValueError, "chunk_size is 0.*at least 1"),
    "keyword-call": (KeywordCaller, {}, ValueError, r"layer 'layer' \(Linear\) was called with keyword"),
    "nothing-trained": (lambda: mlp().requires_grad_(False), {}, ValueError, "no trainable parameter"),
    "two-tensors": (lambda: Pair(4, 2), {}, ValueError, "layer '' .*returned tuple; only a layer that returns one"),
}


@pytest.mark.parametrize(("build", "options", "error", "message"), ERRORS.values(), ids=ERRORS)
def test_error_says_what_was_found(build, options, error, message):
    model = build()
    for function in (jacobian.corrected_gradients, jacobian.backward):
        with pytest.raises(error, match=message):
            function(model, lambda z, t: z[0].sum(), X, 0.5, **{"correction": Proportional(), **options})
    assert all(p.grad is None for p in model.parameters())


#: What layer_jacobians refuses: the layer, options, and what it says.
NO_JACOBIANS = {
    "nothing-trained": (nn.Tanh(), {}, "Tanh has no trainable parameter"),
    "attached": (attach(nn.Linear(4, 2), Proportional()), {}, r"already has a correction.*detach\(model\)"),
    "chunk-size": (nn.Linear(4, 2), {"chunk_size": -1}, "chunk_size"),
    "batch-norm": (nn.BatchNorm1d(4), {}, "BatchNorm1d mixes the samples of a batch"),
}


@pytest.mark.parametrize(("layer", "options", "message"), NO_JACOBIANS.values(), ids=NO_JACOBIANS)
def test_layer_jacobians_say_what_has_none(layer, options, message):
    with pytest.raises(ValueError, match=message):
        jacobian.layer_jacobians(layer, X, **options)


def test_input_changed_in_place_after_the_layer_read_it_is_read_as_it_was():
    class Residual(nn.Module):
        def __init__(self, in_place):
            super().__init__()
            self.first, self.second, self.in_place = nn.Linear(4, 4), nn.Linear(4, 4), in_place

        def forward(self, x):
            x = self.first(x)
            y = self.second(x)
            return x.add_(y) if self.in_place else x + y

    model, x = Residual(True), torch.randn(3, 4)
    twin = Residual(False)
    twin.load_state_dict(model.state_dict())
    found, wanted = (jacobian.corrected_gradients(each, squares, x, 0.0, Proportional()) for each in (model, twin))
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


class Token(nn.Module):
    """Returns a view of its parameter, as a class token does."""

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.randn(6))

    def forward(self, x):
        return self.token.expand(len(x), 6)


class WithToken(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = Token(), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(x + self.first(x))


def test_a_layer_that_returns_a_view_of_its_parameter_has_a_gradient():
    model, x, y = WithToken().double(), torch.randn(8, 6).double(), torch.randint(3, (8,))
    found = jacobian.corrected_gradients(model, F.cross_entropy, x, y, None)
    F.cross_entropy(model(x), y).backward()
    assert found.keys() == dict(model.named_parameters()).keys()
    for name, p in model.named_parameters():
        assert torch.allclose(found[name], p.grad, rtol=1e-12), name


def test_plain_gradients_come_in_any_dtype_and_on_any_device():
    with torch.device("meta"):
        model = mlp()
        found = jacobian.corrected_gradients(model, squares, torch.ones(3, 4), 0.5, None)
    assert {name: (g.shape, g.device.type) for name, g in found.items()} == {
        name: (p.shape, "meta") for name, p in model.named_parameters()
    }
    model = mlp()
    wanted = jacobian.corrected_gradients(model, squares, X, 0.5, None)
    torch.set_default_dtype(torch.float64)
    try:
        found = jacobian.corrected_gradients(model, squares, X, 0.5, None)
    finally:
        torch.set_default_dtype(torch.float32)
    for name in wanted:
        assert torch.equal(found[name], wanted[name])


LOSSES = {
    "no-number": (lambda out, target: (out - target) ** 2, ValueError, r"shape \(3, 2\); it must return one number"),
    "no-tensor": (lambda out, target: 3.0, ValueError, "loss_fn returned float; it must return one number"),
    "detached": (lambda out, target: out.detach().sum(), ValueError, "does not depend on any trainable parameter"),
}


@pytest.mark.parametrize(("loss_fn", "error", "message"), LOSSES.values(), ids=LOSSES)
def test_a_loss_that_cannot_be_differentiated_is_named(loss_fn, error, message):
    for function in (partial(jacobian.corrected_gradients, correction=None), divergence):
        with pytest.raises(error, match=message):
            function(mlp(), loss_fn, X.float(), 0.5)


def test_inference_mode_is_named():
    with torch.inference_mode(), pytest.raises(RuntimeError, match=r"torch\.inference_mode; call this outside of it"):
        divergence(mlp(), squares, X.float(), 0.5)


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(6))

    def forward(self, x):
        return F.dropout(x * self.gain, 0.5, self.training)


def test_a_layer_that_draws_random_numbers_is_named():
    """Its rows would be computed with other numbers than the pass had."""
    model, x, y = nn.Sequential(Noisy(), nn.Linear(6, 3)), torch.randn(8, 6), torch.randint(3, (8,))
    with pytest.raises(
        ValueError, match=r"layer '0' \(Noisy\) drew random numbers, .*: call model\.eval\(\) before, or"
    ):
        jacobian.corrected_gradients(model, F.cross_entropy, x, y, None)
    assert divergence(model, F.cross_entropy, x, y).left_out["0"].startswith("it drew random numbers")
    jacobian.corrected_gradients(model.eval(), F.cross_entropy, x, y, None)


class Alone(nn.Module):
    def __init__(self):
        super().__init__()
        self.offset = nn.Parameter(torch.ones(6))

    def forward(self):
        return self.offset


class Called(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = Alone(), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(x + self.first())


def test_a_layer_that_is_called_without_arguments_is_named():
    model, x, y = Called(), torch.randn(8, 6), torch.randint(3, (8,))
    with pytest.raises(ValueError, match=r"layer 'first' \(Alone\) was called without arguments"):
        jacobian.corrected_gradients(model, F.cross_entropy, x, y, None)
    assert divergence(model, F.cross_entropy, x, y).left_out["first"] == "it was called without arguments"


class Itself(nn.Module):
    """Calls itself once."""

    def __init__(self):
        super().__init__()
        self.gain, self.inside = nn.Parameter(torch.full((6,), 0.5)), False

    def forward(self, x):
        if self.inside:
            return x * self.gain
        self.inside = True
        found = self(x) + x * self.gain
        self.inside = False
        return found


def test_a_layer_that_calls_itself_is_left_in_the_order_in_which_it_was_entered():
    model, x, y = nn.Sequential(Itself(), nn.Linear(6, 3)), torch.randn(8, 6), torch.randint(3, (8,))
    divergence(model, F.cross_entropy, x, y)
    assert not model[0]._forward_hooks
