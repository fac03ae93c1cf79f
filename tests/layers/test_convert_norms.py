"""convert and plan on normalisers and activations: what is kept, what is dropped, and the report of both."""

import copy
from functools import partial

import pytest
import torch
import torchvision
from torch import nn

from adiv_optim.layers import AffineLikeLinear, ChannelScale, Derf, DyISRU, DyT, IsotropicTanh, L2Norm, convert, plan

RUNNING = ("running_mean", "running_var", "num_batches_tracked")


def resnet18():
    model = torchvision.models.resnet18(num_classes=4)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.1)
    return model


def layerwise_l2_norm(old):
    return nn.Sequential(L2Norm(dim=(1, 2, 3)), convert(old, {nn.BatchNorm2d: ChannelScale}))


RESNETS = {
    "class": DyT,
    "partial": partial(DyISRU, sqrt_d=False),
    "function": layerwise_l2_norm,
}


@pytest.mark.parametrize("factory", RESNETS.values(), ids=RESNETS)
def test_one_call_replaces_resnets_batch_norms_and_keeps_gamma_and_beta(factory):
    model = resnet18()
    affine = [p for m in model.modules() if isinstance(m, nn.BatchNorm2d) for p in (m.weight, m.bias)]
    assert convert(model, {nn.BatchNorm2d: factory}) is model
    assert not any(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    held = {id(parameter) for parameter in model.parameters()}
    assert len(affine) == 40
    assert all(id(parameter) in held for parameter in affine)
    assert not any(name.endswith(RUNNING) for name in model.state_dict())
    model(torch.randn(2, 3, 32, 32)).square().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_plan_lists_every_batch_norm_with_what_it_drops_and_leaves_the_model_alone():
    model = resnet18()
    modules, state = dict(model.named_modules()), copy.deepcopy(model.state_dict())
    planned = plan(model, {nn.BatchNorm2d: DyT})
    assert [entry.path for entry in planned] == [n for n, m in modules.items() if isinstance(m, nn.BatchNorm2d)]
    assert all(entry.old is modules[entry.path] for entry in planned)
    assert all(type(entry.new) is DyT and entry.dropped == RUNNING for entry in planned)
    assert str(planned[0]) == "bn1: BatchNorm2d → DyT, drops running_mean, running_var, num_batches_tracked, adds alpha"
    assert all(entry.added == ("alpha",) for entry in planned)
    assert dict(model.named_modules()) == modules
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    convert(model, {nn.BatchNorm2d: DyT})
    converted = dict(model.named_modules())
    for entry in planned:
        assert repr(converted[entry.path]) == repr(entry.new)


DROPPED = {
    "class": (nn.BatchNorm1d(3), ChannelScale, RUNNING),
    "no-statistics": (nn.BatchNorm1d(3, track_running_stats=False), ChannelScale, ()),
    "kept-inside": (nn.BatchNorm1d(3), lambda old: nn.Sequential(old, nn.Tanh()), ()),
    "no-parameters": (nn.BatchNorm1d(3), lambda old: L2Norm(), ("weight", "bias", *RUNNING)),
    "no-affine": (nn.LayerNorm(3), partial(DyT, elementwise_affine=False), ("weight", "bias")),
    "no-bias": (nn.LayerNorm(3), partial(DyISRU, bias=False), ("bias",)),
    "other-shape": (nn.LayerNorm(3), partial(ChannelScale, normalized_shape=1), ("weight", "bias")),
    "copy": (nn.LayerNorm(3), copy.deepcopy, ("weight", "bias")),
}


@pytest.mark.parametrize(("layer", "factory", "dropped"), DROPPED.values(), ids=DROPPED)
def test_what_is_not_taken_over_is_listed(layer, factory, dropped):
    (entry,) = plan(nn.Sequential(layer), {type(layer): factory})
    assert entry.dropped == dropped
    assert ("drops" in str(entry)) == bool(dropped)


def test_layer_that_is_the_model_is_called_so():
    (entry,) = plan(nn.LayerNorm(3), {nn.LayerNorm: DyT})
    assert str(entry) == "the model: LayerNorm → DyT, adds alpha"
    (entry,) = plan(nn.LayerNorm(3), {nn.LayerNorm: ChannelScale})
    assert str(entry) == "the model: LayerNorm → ChannelScale"


NORMS = {
    "batch-norm-1d": (nn.BatchNorm1d(6), 1, (4, 6)),
    "batch-norm-2d": (nn.BatchNorm2d(6), 1, (4, 6, 5, 5)),
    "sync-batch-norm": (nn.SyncBatchNorm(6), 1, (4, 6, 5, 5)),
    "batch-norm-plain": (nn.BatchNorm2d(6, affine=False), 1, (4, 6, 5, 5)),
    "layer-norm": (nn.LayerNorm(6), -1, (4, 5, 6)),
    "layer-norm-of-images": (nn.LayerNorm((6, 5)), -1, (4, 6, 5)),
    "layer-norm-without-bias": (nn.LayerNorm(6, bias=False), -1, (4, 5, 6)),
    "layer-norm-plain": (nn.LayerNorm(6, elementwise_affine=False), -1, (4, 5, 6)),
    "rms-norm": (nn.RMSNorm(6), -1, (4, 6)),
    "rms-norm-plain": (nn.RMSNorm(6, elementwise_affine=False), -1, (4, 6)),
}


@pytest.mark.parametrize(("norm", "dim", "shape"), NORMS.values(), ids=NORMS)
def test_each_norm_becomes_each_stand_in_with_the_same_parameters(norm, dim, shape):
    wanted = dict(norm.named_parameters())
    for kind in (DyT, Derf, ChannelScale):
        new = convert(norm, {type(norm): kind})
        assert type(new) is kind
        assert new.dim == dim
        assert new.normalized_shape == tuple(getattr(norm, "normalized_shape", [6]))
        kept = {name: parameter for name, parameter in new.named_parameters() if name in ("weight", "bias")}
        assert kept.keys() == wanted.keys()
        assert all(kept[name] is parameter for name, parameter in wanted.items())
        assert new(torch.randn(shape)).shape == shape


def test_own_parameters_have_their_values_where_the_layer_is():
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6, elementwise_affine=False), nn.BatchNorm1d(6)).to(
        torch.bfloat16
    )
    convert(model, {nn.LayerNorm: partial(DyISRU, c=4.0), nn.BatchNorm1d: DyT})
    assert model[1].c.item() == pytest.approx(4.0, rel=1e-2)
    assert model[2].alpha.item() == 0.5
    for parameter in model.parameters():
        assert parameter.dtype == torch.bfloat16
        assert parameter.device.type == "cpu"
    assert convert(nn.LayerNorm(3, device="meta"), {nn.LayerNorm: DyT}).alpha.is_meta


def test_partial_decides_against_the_old_layer():
    new = convert(nn.RMSNorm(6), {nn.RMSNorm: partial(DyT, bias=True, alpha=2.0)})
    assert torch.equal(new.bias, torch.zeros(6))
    assert new.alpha.item() == 2.0
    new = convert(nn.LayerNorm(6), {nn.LayerNorm: partial(DyT, elementwise_affine=False)})
    assert [name for name, _ in new.named_parameters()] == ["alpha"]
    new = convert(nn.BatchNorm2d(6), {nn.BatchNorm2d: partial(DyT, dim=-1)})
    assert new.dim == -1


def test_tanh_becomes_isotropic():
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Sequential(nn.Linear(8, 8), nn.Tanh()))
    convert(model, {nn.Tanh: IsotropicTanh})
    assert isinstance(model[1], IsotropicTanh)
    x = torch.randn(5, 4)
    before, after = model[2][0](model[:2](x)), model(x)
    lengths = torch.linalg.vector_norm(before, dim=1, keepdim=True)
    torch.testing.assert_close(after, torch.tanh(lengths) * before / lengths)
    assert convert(nn.Sequential(nn.Tanh()), {nn.Tanh: partial(IsotropicTanh, dim=1)})[0].dim == 1


#: What is replaced in a transformer, and how many there are.
MAPPINGS = {"norms": ({nn.LayerNorm: DyT}, 5), "linear": ({nn.Linear: AffineLikeLinear}, 4)}
each_mapping = pytest.mark.parametrize(("mapping", "count"), MAPPINGS.values(), ids=MAPPINGS)


@each_mapping
def test_transformer_computes_the_same_with_and_without_gradients(mapping, count):
    # In evaluation torch's fast path would read weights of its own layers, and skip what stands there.
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(8)).eval()
    assert len(plan(model, mapping)) == count
    convert(model, mapping)
    x = torch.randn(2, 3, 8)
    trained_on = model(x)
    with torch.no_grad():
        assert (trained_on - model(x)).abs().max() <= 1e-6


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@each_mapping
def test_transformer_reads_padded_sequences_with_and_without_gradients(mapping, count):
    # In evaluation torch would hand the layers nested tensors, which only its own fast path can read.
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).eval()
    convert(model, mapping)
    x, padding = torch.randn(2, 5, 8), torch.arange(5) >= torch.tensor([[3], [5]])
    trained_on = model(x, src_key_padding_mask=padding)
    with torch.no_grad():
        deployed = model(x, src_key_padding_mask=padding)
    assert (trained_on - deployed)[~padding].abs().max() <= 1e-6


def test_encoder_without_replaced_layers_keeps_its_nested_tensors():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
    convert(nn.Sequential(encoder, nn.Tanh()), {nn.Tanh: IsotropicTanh})
    assert encoder.use_nested_tensor
