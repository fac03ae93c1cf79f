"""torch.compile over vmap keeps the correction, or says that it cannot."""

import pytest
import torch
from torch.func import vmap

from adiv_optim import functional
from tests.helpers.cases import each_correction, relative_error

TOLERANCE = 1e-12


def linear_loss(weight, input, correction):
    return functional.linear(input, weight, None, correction).square().sum()


def conv_loss(weight, input, correction):
    return functional.conv1d(input, weight, None, padding=1, correction=correction).square().sum()


KINDS = {"linear": (linear_loss, (3, 2, 5), (3, 4, 5)), "conv1d": (conv_loss, (3, 2, 2, 3), (3, 4, 2, 6))}
each_kind = pytest.mark.parametrize(("loss", "weight_shape", "input_shape"), KINDS.values(), ids=KINDS)


@each_kind
@each_correction
def test_compiled_ensemble_has_the_corrected_gradients(loss, weight_shape, input_shape, correction):
    torch._dynamo.reset()
    input = torch.randn(input_shape, dtype=torch.float64)
    start = torch.randn(weight_shape, dtype=torch.float64)

    def gradient(transform, rule):
        weight = start.clone().requires_grad_()
        transform(vmap(lambda w, x: loss(w, x, rule)))(weight, input).sum().backward()
        return weight.grad

    eager = gradient(lambda f: f, correction)
    compiled = gradient(lambda f: torch.compile(f, backend="aot_eager"), correction)
    assert relative_error(compiled, eager) <= TOLERANCE
    # The test can fail: the plain gradient, which a lost correction would give, is another one.
    assert relative_error(gradient(lambda f: f, None), eager) > 0.1


@each_kind
@each_correction
def test_whole_graph_of_an_ensemble_is_refused(loss, weight_shape, input_shape, correction):
    torch._dynamo.reset()
    weight = torch.randn(weight_shape, requires_grad=True)
    input = torch.randn(input_shape)
    compiled = torch.compile(vmap(lambda w, x: loss(w, x, correction)), fullgraph=True, backend="aot_eager")
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(weight, input)
