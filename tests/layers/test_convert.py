"""convert: layers replaced by type, in place, weights kept."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils import parametrizations

from adiv_optim import Proportional, attach
from adiv_optim.layers import AffineLikeLinear, DyT, L2Norm, MeanFieldNorm, convert, plan


def mlp():
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 2)))


def test_converted_model_has_the_very_parameters_and_modes_and_computes_what_a_built_one_does():
    kind, model, x = AffineLikeLinear, mlp(), torch.randn(5, 4)
    model[2].eval()
    model[0].weight.requires_grad_(False)
    parameters, keys = dict(model.named_parameters()), list(model.state_dict())
    assert convert(model, {nn.Linear: kind}) is model
    assert list(model.state_dict()) == keys
    for name, parameter in model.named_parameters():
        assert parameter is parameters[name], "so that an optimizer built before goes on working"
    built = nn.Sequential(kind(4, 3), nn.Tanh(), nn.Sequential(kind(3, 3, bias=False), kind(3, 2)))
    built.load_state_dict(model.state_dict())
    assert repr(model) == repr(built)
    assert torch.equal(model(x), built(x))
    assert (model[0].training, model[2][0].training, model[0].weight.requires_grad) == (True, False, False)


def test_layer_in_several_places_is_replaced_by_one_and_tied_weights_stay_tied():
    shared, tied = nn.Linear(3, 3), nn.Linear(3, 3)
    tied.weight = shared.weight
    model = convert(nn.Sequential(shared, nn.Tanh(), shared, tied), {nn.Linear: AffineLikeLinear})
    assert model[0] is model[2]
    assert isinstance(model[0], AffineLikeLinear)
    assert model[3] is not model[0]
    assert model[3].weight is model[0].weight


class Scaled(nn.Linear):
    """Has a tensor that is no buffer, and a number that is read from one."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.scale = torch.tensor(2.0)
        self.rate = self.scale.item() if kwargs.get("bias") else None

    def forward(self, input):
        return super().forward(input) * self.scale


@pytest.mark.parametrize("bias", [True, False])
def test_a_class_of_ones_own_is_built_with_the_values_of_its_tensors(bias):
    model, x = nn.Sequential(nn.Linear(4, 3, bias=bias)), torch.randn(2, 4)
    wanted, weight = 2 * model(x), model[0].weight
    convert(model, {nn.Linear: Scaled})
    assert torch.equal(model(x), wanted)
    assert model[0].weight is weight


def test_function_in_the_mapping_is_given_the_old_layer():
    model = mlp().eval()
    first = model[0]
    convert(model, {nn.Linear: lambda old: nn.Sequential(L2Norm(), old)})
    assert model[0][1] is first
    assert isinstance(model[2][1][0], L2Norm)
    assert not model[0].training
    x = torch.randn(5, 4)
    assert torch.equal(model[0](x), first(L2Norm()(x)))


class Subclass(nn.Linear):
    """A layer whose forward may differ."""


@pytest.mark.parametrize(
    ("build", "name"),
    [
        (lambda: Subclass(4, 3), r"tests\.layers\.test_convert\.Subclass"),
        (lambda: parametrizations.weight_norm(nn.Linear(4, 3)), "ParametrizedLinear"),
        (lambda: attach(nn.Linear(4, 3), Proportional()), r"adiv_optim\.rows\.layers\.CorrectedLinear"),
    ],
    ids=["subclass", "parametrized", "corrected"],
)
def test_subclasses_are_left_alone(build, name):
    model = nn.Sequential(first := build(), nn.Linear(3, 2))
    with pytest.warns(UserWarning, match=rf"convert left {name} as it is\. Layers are matched by exact type"):
        convert(model, {nn.Linear: AffineLikeLinear})
    assert model[0] is first
    assert type(model[1]) is AffineLikeLinear


def test_type_of_which_the_model_has_subclasses_alone_is_named():
    """As timm's LayerNorm, whose models a mapping of nn.Linear and nn.LayerNorm changed by half without a word."""
    LayerNorm = type("LayerNorm", (nn.LayerNorm,), {"__module__": "timm.layers"})
    model = nn.Sequential(nn.Linear(3, 2), LayerNorm(2), nn.MultiheadAttention(2, 1))
    with pytest.warns(UserWarning, match=r"convert left timm\.layers\.LayerNorm as it is") as caught:
        convert(model, {nn.Linear: AffineLikeLinear, nn.LayerNorm: DyT})
    assert len(caught) == 1
    with pytest.raises(ValueError, match=r"MultiheadAttention,.*timm\.layers\.LayerNorm\. .* name a subclass itself"):
        convert(model, {nn.LayerNorm: DyT})
    convert(model, {LayerNorm: lambda old: DyT(old.normalized_shape), nn.LayerNorm: DyT})
    convert(nn.Sequential(nn.Tanh(), nn.MultiheadAttention(2, 1)), {nn.Tanh: nn.ReLU, nn.Linear: AffineLikeLinear})


def changed(change):
    """A model whose last layer has been changed."""
    model = mlp()
    change(model[2][1])
    return model


#: What a replacement would lose.
LOST = {
    "hook": (lambda layer: layer.register_forward_hook(lambda *_: None), "hooks"),
    "hook-of-state": (lambda layer: layer.register_state_dict_post_hook(lambda *_: None), "hooks"),
    "own-forward": (lambda layer: setattr(layer, "forward", abs), "a forward of its own, which"),
    "buffers": (lambda layer: layer.register_buffer("mask", torch.ones(2)), "buffers, which its replacement would"),
}
AFFINE = {nn.Linear: AffineLikeLinear}
#: Model, mapping, error, and what it says.
ERRORS = {
    "nothing-found": (mlp, {nn.Conv2d: nn.Conv3d}, ValueError, "no Conv2d in the model.*Linear, Sequential, Tanh"),
    **{
        name: (partial(changed, change), AFFINE, ValueError, rf"layer '2\.1' \(Linear\) has {lost}")
        for name, (change, lost) in LOST.items()
    },
    "uncalled-alone": (
        lambda: nn.MultiheadAttention(2, 1), {NonDynamicallyQuantizableLinear: AffineLikeLinear}, ValueError,
        r"in the model but layer 'out_proj' \(MultiheadAttention uses it without calling the layer\); its modules",
    ),
    "no-arguments": (
        lambda: nn.Sequential(nn.Tanh()), {nn.Tanh: MeanFieldNorm}, TypeError, "MeanFieldNorm cannot take no argum"
    ),
    "attached": (lambda: attach(mlp(), Proportional()), AFFINE, ValueError, r"corrections, by detach\(model\), and"),
    "lazy": (
        lambda: nn.Sequential(nn.Linear(3, 4), nn.LazyLinear(2)), AFFINE,
        ValueError, r"layer '1' \(LazyLinear\) has no shape yet; run one batch",
    ),
    "unknown-arguments": (
        lambda: nn.Sequential(nn.ReLU()), {nn.ReLU: nn.ReLU6}, TypeError,
        "constructor arguments of ReLU; pass a function",
    ),
    "other-arguments": (mlp, {nn.Linear: L2Norm}, TypeError, r"layer '0' \(Linear\): L2Norm cannot take in_features"),
    "empty": (mlp, {}, ValueError, r"the mapping is empty; name a layer type and its replacement"),
    "list": (mlp, [nn.Linear], TypeError, r"the mapping is \[.*; it maps layer types to replacements"),
    "name": (mlp, {"0": DyT}, TypeError, r"the mapping holds '0': .*; it maps a layer type to a class or a function"),
    "module": (mlp, {nn.Linear: DyT(3)}, TypeError, r"the mapping holds .*: DyT\(.*; it maps a layer type to a class"),
    "compiled": (
        lambda: nn.Sequential(torch.compile(nn.Linear(2, 2))), AFFINE, ValueError, r"\(Linear\) has torch.compile aro"
    ),
    "nothing": (mlp, {nn.Linear: lambda old: None}, TypeError, r"layer '0' .*: the function returned None; it has to"),
    "inside": (
        mlp, {nn.Sequential: lambda old: old[0], **AFFINE}, ValueError,
        r"the model itself \(Sequential\) has a layer to replace in it, which .* lose; call .* once for each",
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")  # torch's own
@pytest.mark.parametrize(("build", "mapping", "error", "message"), ERRORS.values(), ids=ERRORS)
def test_error_names_the_layer_and_leaves_the_model_alone(build, mapping, error, message):
    model = build()
    modules = dict(model.named_modules())
    with pytest.raises(error, match=message):
        convert(model, mapping)
    assert dict(model.named_modules()) == modules


@pytest.mark.skipif(not hasattr(nn, "LinearCrossEntropyLoss"), reason="newer versions of torch have it")
def test_layers_that_are_never_called_stay_with_a_warning():
    loss = nn.LinearCrossEntropyLoss(4, 3)
    model = nn.Sequential(nn.Linear(4, 4), loss)
    with pytest.warns(UserWarning, match=r"left layer '1\.linear' \(LinearCrossEntropyLoss uses it without calling"):
        convert(model, {nn.Linear: AffineLikeLinear})
    assert (type(model[0]), type(loss.linear)) == (AffineLikeLinear, nn.Linear)


def scaled(kind):
    """A subclass of a torch convolution, which doubles its output."""
    return type("Scaled", (kind,), {"forward": lambda self, input: 2 * kind.forward(self, input)})


CONVOLUTIONS = {
    "conv1d": nn.Conv1d(4, 6, 3),
    "conv2d": nn.Conv2d(4, 6, (3, 2), stride=2, padding=1, groups=2, padding_mode="circular"),
    "conv3d": nn.Conv3d(4, 6, 2, stride=(1, 2, 1)),
    "conv-transpose1d": nn.ConvTranspose1d(4, 6, 3, stride=3, output_padding=1),
    "conv-transpose2d": nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2, dilation=2),
    "conv-transpose3d": nn.ConvTranspose3d(4, 6, 2, bias=False),
}


@pytest.mark.parametrize("layer", CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_replacement_of_a_convolution_computes_with_the_same_weights_and_geometry(layer):
    kind = scaled(type(layer))
    model = convert(nn.Sequential(layer), {type(layer): kind})
    assert type(model[0]) is kind
    assert model[0].weight is layer.weight
    assert model[0].bias is layer.bias
    x = torch.randn(2, 4, *[8] * len(layer.kernel_size))
    assert torch.equal(model(x), 2 * layer(x))
    assert str(plan(nn.Sequential(layer), {type(layer): kind})[0]) == f"0: {type(layer).__name__} → Scaled"
