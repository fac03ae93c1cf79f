"""gauge.rz_scaling in lower precision, on empty matrices, and what it refuses."""

import math

import pytest
import torch
from torch import nn

from adiv_optim.gauge import canonical, rz_scaling, trace, uc_adjoint, uc_inverse
from tests.helpers.matrices import largest_ratio, sparse

pytestmark = pytest.mark.usefixtures("in_float64")


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 1e-6), (torch.float16, 4e-3), (torch.bfloat16, 3e-2), (torch.complex64, 1e-6)],
)
@pytest.mark.parametrize("holes", [False, True])
def test_lower_precision_rounds_the_float64_result(dtype, tolerance, holes):
    weight = (sparse(6, 5) if holes else torch.randn(6, 5)).to(dtype)
    scaling = rz_scaling(weight)
    wanted = rz_scaling(weight.to(torch.complex128 if dtype.is_complex else torch.float64))
    for part, exact in zip(scaling, wanted, strict=True):
        assert part.dtype == (dtype if exact is wanted.canonical else dtype.to_real())
        assert largest_ratio(part.to(exact.dtype), exact) <= tolerance
    assert uc_inverse(weight).dtype == dtype
    assert uc_adjoint(weight).dtype == dtype


def test_empty_dimensions():
    for shape in ((0, 3), (3, 0), (0, 0), (0, 2, 3), (2, 3, 0)):
        weight = torch.empty(shape)
        scaling = rz_scaling(weight)
        assert scaling.canonical.shape == shape
        assert torch.equal(scaling.row_scale, torch.ones(shape[:-1]))
        assert torch.equal(scaling.column_scale, torch.ones(*shape[:-2], shape[-1]))
        assert uc_inverse(weight).shape == weight.mT.shape
    assert rz_scaling(torch.empty(0, 3, 2, 2), groups=4, kernel_dims=2).column_scale.shape == (12,)


def test_result_has_no_graph_and_the_weight_is_untouched():
    for weight in (torch.randn(3, 4), sparse(3, 4)):
        before = weight.clone()
        weight.requires_grad_()
        outputs = [*rz_scaling(weight), uc_adjoint(weight), uc_inverse(weight)]
        assert not any(output.requires_grad for output in outputs)
        assert torch.equal(weight, before)
        assert not any(output.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr() for output in outputs)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("holes", [False, True])
def test_nan_and_inf_are_named(value, holes):
    weight = torch.eye(3) if holes else torch.ones(3, 3)
    weight[1, 2] = weight[2, 0] = value
    for function in (rz_scaling, uc_adjoint, uc_inverse):
        with pytest.raises(ValueError, match=r"2 of the 9 entries .*\(3, 3\).*at \[1, 2\].*last finite weights"):
            function(weight)
    weight[1, 2] = weight[2, 0] = 1e300
    rz_scaling(weight)


def test_scales_out_of_range_are_named():
    weight = torch.full((40, 40), 1e-30, dtype=torch.float32)
    weight[0] = 1e30
    with pytest.raises(ValueError, match=r"float32.*float64"):
        rz_scaling(weight)
    assert rz_scaling(weight.double()).row_scale.isfinite().all()
    # A chain of 300 orders of magnitude, of entries that are ordinary.
    chain = torch.eye(200) * 30 + torch.diag(torch.full((199,), 1 / 30), 1)
    with pytest.raises(ValueError, match=r"shape \(200, 200\) is exp\(±\d+\.\d\)"):
        rz_scaling(chain.float())


#: Weight, options, and what the error says.
WRONG = {
    "integers": (torch.ones(2, 2).long(), {}, r"floating point, such as weight\.float"),
    "dimensions": (torch.ones(3), {}, r"shape \(3,\).*at least 2 dimensions"),
    "kernel-dims": (torch.ones(3, 4, 5), {"kernel_dims": 2}, "kernel_dims=2.*at least 4 dimensions"),
    "negative-kernel-dims": (torch.ones(3, 4), {"kernel_dims": -1}, "kernel_dims=-1"),
    "no-groups": (torch.ones(3, 4), {"groups": 0}, "groups is 0"),
    "groups": (torch.ones(3, 4), {"groups": 2}, "groups is 2.*3 rows"),
    "no-numbers": (torch.ones(3, 2, device="meta"), {}, "meta tensor"),
}


@pytest.mark.parametrize(("weight", "options", "message"), WRONG.values(), ids=WRONG)
def test_wrong_weights_are_named(weight, options, message):
    error = NotImplementedError if weight.is_meta else ValueError if weight.is_floating_point() else TypeError
    for function in (rz_scaling, uc_adjoint, uc_inverse) if not options else (rz_scaling,):
        with pytest.raises(error, match=message):
            function(weight, **options)


def test_models_without_numbers_have_no_canonical_form():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).to("meta")
    graph = trace(model, torch.ones(1, 3, device="meta"))
    with pytest.raises(NotImplementedError, match="meta tensor"):
        canonical(model, graph)
