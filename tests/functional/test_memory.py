"""No tensor of the fast path outgrows what the plain step holds: no per-sample gradient, no unfolded patches."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.helpers.cases import LayerCase, apply, conv, each_correction, linear

BIG = {
    "linear": linear(32, 24, shape=(16, 32)),
    "linear-tokens": linear(16, 24, shape=(8, 8, 16)),
    "conv2d": conv(nn.Conv2d, 16, 16, 3, padding=1, shape=(8, 16, 6, 6)),
    "conv2d-depthwise": conv(nn.Conv2d, 8, 8, 3, groups=8, padding=1, shape=(8, 8, 12, 12)),
    "conv2d-channels-last": LayerCase(lambda: nn.Conv2d(8, 8, 3), (8, 8, 12, 12), torch.channels_last),
}


class Largest(TorchDispatchMode):
    """Record the storage, in elements, of the largest tensor that any operator returns."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                # A strided view has more elements than memory; what counts is the storage behind it.
                held = tensor.untyped_storage().nbytes() // tensor.element_size()
                self.numel = max(self.numel, min(held, tensor.numel()))
        return result


@pytest.mark.parametrize("case", BIG.values(), ids=BIG)
@each_correction
def test_forward_makes_no_tensor_that_the_plain_one_does_not_and_backward_none_larger_than_what_is_there(
    case, correction
):
    layer, x = case.layer(), case.input().requires_grad_()
    with Largest() as plain:
        layer(x)
    with Largest() as forward:
        output = apply(layer, x, correction)
    assert forward.numel <= max(plain.numel, x.numel())
    # With one channel to a group the map of norms is as large as the input, and zero padding is added to it.
    padded = x if isinstance(layer, nn.Linear) else F.pad(x, layer._reversed_padding_repeated_twice)
    bound = max(padded.numel(), output.numel(), layer.weight.numel())
    unfolded = output.numel() // len(layer.weight) * layer.weight[0].numel() * getattr(layer, "groups", 1)
    assert bound < max(len(x) * layer.weight.numel(), unfolded), "the case shows nothing"
    with Largest() as backward:
        output.backward(torch.randn_like(output))
    assert backward.numel <= bound
