"""What `functional` refuses, and the word by which one knows why."""

import pytest
import torch

from adiv_optim import Correction, Proportional, functional
from tests.helpers.cases import FUNCTIONAL_CONV

X, W = torch.ones(2, 5), torch.ones(3, 5)
IMAGE, KERNEL = torch.ones(2, 3, 5, 5), torch.ones(4, 3, 3, 3)


def linear(*given):
    return lambda: functional.linear(*given)


def conv(dims, *given, **options):
    return lambda: FUNCTIONAL_CONV[dims](*given, **{"correction": Proportional(), **options})


#: The call, the error, and how its message begins and goes on.
ERRORS = {
    "features": (linear(torch.ones(2, 4), W, None, Proportional()), ValueError, r"linear: .*\(2, 4\), \(3, 5\), None"),
    "no-dimensions": (linear(torch.tensor(1.0), W, None, Proportional()), ValueError, r"linear: .*shapes \(\), "),
    "integers": (linear(X.long(), W, None, Proportional()), TypeError, "linear: .*torch.int64"),
    "sparse": (linear(X.to_sparse(), W, None, Proportional()), TypeError, "linear: .*needs dense"),
    "complex": (linear(X.cfloat(), W, None, Proportional()), TypeError, "linear: .*complex64"),
    "weight-vector": (linear(X, W[0], None, Proportional()), ValueError, r"linear: .*, \(5,\), None; they must be"),
    "bias": (linear(X, W, torch.ones(5), Proportional()), ValueError, r"linear: .*, \(5,\); they must be"),
    "class": (linear(X, W, None, Proportional), TypeError, r"write Proportional\(\)"),
    "class-conv": (conv(2, IMAGE, KERNEL, correction=Proportional), TypeError, r"write Proportional\(\)"),
    "integers-conv": (conv(2, IMAGE.long(), KERNEL), TypeError, "conv2d: .*torch.int64"),
    "channels": (conv(2, torch.ones(2, 4, 5, 5), KERNEL), ValueError, r"conv2d: .*\(2, 4, 5, 5\) and .*groups=1"),
    "groups": (conv(2, IMAGE, KERNEL, groups=2), ValueError, "conv2d: .*groups=2; they must be"),
    "few-dimensions": (conv(2, torch.ones(3, 5), KERNEL), ValueError, r"conv2d: .*shapes \(3, 5\) and"),
    "weight-of-1d": (conv(2, IMAGE, KERNEL[..., 0]), ValueError, r"conv2d: .* and \(4, 3, 3\), "),
    "padding-name": (conv(2, IMAGE, KERNEL, padding="full"), ValueError, "padding is 'full'.*it must be numbers"),
    "same-stride": (conv(2, IMAGE, KERNEL, padding="same", stride=2), ValueError, "padding is 'same' at stride"),
}  # fmt: skip


class Misnamed(Correction):
    """Its gradients are of another name, which trained nothing."""

    def scales(self, factors):
        return factors

    def gradients(self, rows):
        return {"w": rows.contract(rows.factors())["weight"]}


def test_a_rule_that_leaves_a_parameter_out_is_named():
    weight, kernel = (tensor.clone().requires_grad_() for tensor in (W, KERNEL))
    for output in (functional.linear(X, weight, None, Misnamed()), conv(2, IMAGE, kernel, correction=Misnamed())()):
        with pytest.raises(ValueError, match=r"Misnamed.gradients returned .*; it must have those of \['weight'\]"):
            output.sum().backward()


@pytest.mark.parametrize(("call", "error", "message"), ERRORS.values(), ids=ERRORS)
def test_error_says_where_and_why(call, error, message):
    with pytest.raises(error, match=message):
        call()
