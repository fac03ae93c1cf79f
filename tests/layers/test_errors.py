"""What layers refuse, and the word by which one knows why."""

import math
from functools import partial

import pytest
import torch

from adiv_optim.layers import AffineLikeLinear, DyISRU, DyT, L2Norm, NormLikeLinear, PatchNormConv2d

X = torch.zeros
affine, norm = partial(AffineLikeLinear, 5, 3), partial(NormLikeLinear, 5, 3)
patch, norm_patch = partial(PatchNormConv2d, 4, 6, 3), partial(PatchNormConv2d, 4, 6, 3, form="norm-like")
BETA = "it must lie strictly between -1 and 1"

#: What is called and the message.
ERRORS = {
    "affine-beta-0": (lambda: affine(beta=0), "beta is 0.*NormLikeLinear"),
    "affine-alpha-inf": (lambda: affine(alpha=math.inf), "alpha is inf; it must be a finite number"),
    "norm-alpha-text": (lambda: norm(alpha="1"), "alpha is '1'; it must be a finite number"),
    "norm-alpha-0": (lambda: norm(alpha=0, beta=0.5), "alpha is 0"),
    "norm-beta-1": (lambda: norm(beta=1.0), f"beta is 1.0; {BETA}"),
    "norm-eps": (lambda: norm(eps=-1.0), r"eps is -1\.0; it must be finite and at least 0"),
    "patch-beta-0": (lambda: patch(beta=0.0), "PatchNormConv2d: beta is 0.*norm-like"),
    "patch-norm-eps": (lambda: norm_patch(eps=-1e-6), "PatchNormConv2d: eps is -1e-06; it must be finite"),
    "patch-form": (lambda: patch(form="batch"), "form is 'batch'; the forms are 'affine-like' and 'norm-like'"),
    "l2-eps": (lambda: L2Norm(eps=-1.0), r"L2Norm: eps is -1\.0; it must be finite and at least 0"),
    "no-channels": (lambda: DyT(0), "DyT: normalized_shape is 0; give the number of channels, a positive integer"),
    "no-whole-number": (lambda: DyT(4.0), r"DyT: normalized_shape is 4\.0"),
    "negative-among-several": (lambda: DyT((3, -1)), r"normalized_shape is \(3, -1\)"),
    "empty": (lambda: DyISRU(()), r"normalized_shape is \(\)"),
    "alpha-0": (lambda: DyT(4, alpha=0.0), r"DyT: alpha is 0\.0; it must be positive and finite"),
    "c-0": (lambda: DyISRU(4, c=0.0), r"DyISRU: c is 0\.0; it must be positive and finite"),
    # The input's shape:
    "size": (lambda: DyT(4)(X(2, 3)), r"DyT: the input has shape \(2, 3\), but its size at dimension -1 should be 4"),
    "would-broadcast": (lambda: DyT(4, dim=1)(X(2, 1, 5, 5)), "dimension 1 should be 4"),
    "no-such-dimension": (lambda: DyT(4, dim=1)(X(4)), "dimension 1 should be 4"),
    "several": (lambda: DyT((3, 4))(X(2, 4, 3)), "dimension -1 should be 3, 4"),
    "number": (lambda: DyT(4)(X(())), r"shape \(\)"),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_error_says_what_was_found_and_wanted(name):
    call, message = ERRORS[name]
    with pytest.raises(ValueError, match=message):
        call()
