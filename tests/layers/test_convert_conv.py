"""convert on convolutions: any class with torch's constructor takes the place of torch's, weights kept."""

import pytest
import torch
from torch import nn

from adiv_optim.layers import convert, plan


def scaled(kind):
    """A subclass of a torch convolution with its constructor and a keyword, which multiplies its output."""

    class Scaled(kind):
        def __init__(self, *args, factor=2.0, **options):
            super().__init__(*args, **options)
            self.factor = factor

        def forward(self, input):
            return self.factor * super().forward(input)

    return Scaled


CONVOLUTIONS = {
    "conv1d": nn.Conv1d(4, 6, 3),
    "conv2d-grouped": nn.Conv2d(4, 6, (3, 2), stride=2, padding=1, groups=2),
    "conv2d-circular": nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular"),
    "conv3d": nn.Conv3d(4, 6, 2, stride=(1, 2, 1)),
    "conv-transpose1d": nn.ConvTranspose1d(4, 6, 3, stride=3, output_padding=1),
    "conv-transpose2d": nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2, dilation=2),
    "conv-transpose3d": nn.ConvTranspose3d(4, 6, 2, bias=False),
}


@pytest.mark.parametrize("layer", CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_replacement_computes_with_the_same_weights_and_geometry(layer):
    kind = scaled(type(layer))
    model = convert(nn.Sequential(layer), {type(layer): kind})
    assert type(model[0]) is kind
    assert model[0].weight is layer.weight
    assert model[0].bias is layer.bias
    x = torch.randn(2, 4, *[8] * len(layer.kernel_size))
    assert torch.equal(model(x), 2 * layer(x))
    assert str(plan(nn.Sequential(layer), {type(layer): kind})[0]) == f"0: {type(layer).__name__} → Scaled"
