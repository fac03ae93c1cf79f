"""convert and plan on normalisers and activations: what is kept, what is dropped, and the report of both."""

import copy
from functools import partial

import pytest
import torch
import torchvision
from torch import nn

from adiv_optim.layers import AffineLikeLinear, ChannelScale, DyISRU, DyT, IsotropicTanh, L2Norm, convert, plan

RUNNING = ("running_mean", "running_var", "num_batches_tracked")


def test_plan_lists_every_batch_norm_of_a_resnet_and_what_it_drops_and_convert_does_that_alone():
    model = torchvision.models.resnet18(num_classes=4)
    modules, state = dict(model.named_modules()), copy.deepcopy(model.state_dict())
    parameters = dict(model.named_parameters())
    planned = plan(model, {nn.BatchNorm2d: DyT})
    assert [entry.path for entry in planned] == [n for n, m in modules.items() if isinstance(m, nn.BatchNorm2d)]
    assert all(entry.old is modules[entry.path] for entry in planned)
    assert all(type(entry.new) is DyT and entry.dropped == RUNNING for entry in planned)
    assert str(planned[0]) == "bn1: BatchNorm2d → DyT, drops running_mean, running_var, num_batches_tracked, adds alpha"
    assert all(entry.added == ("alpha",) for entry in planned)
    assert dict(model.named_modules()) == modules
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert convert(model, {nn.BatchNorm2d: DyT}) is model
    converted = dict(model.named_modules())
    for entry in planned:
        assert repr(converted[entry.path]) == repr(entry.new)
    assert all(parameters.get(name, p) is p for name, p in model.named_parameters())
    assert dict(model.named_parameters()).keys() == parameters.keys() | {f"{entry.path}.alpha" for entry in planned}
    assert not any(name.endswith(RUNNING) for name in model.state_dict())
    model(torch.randn(2, 3, 32, 32)).square().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


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


NORMS = {
    "batch-norm-1d": (nn.BatchNorm1d(6), 1, (4, 6)),
    "sync-batch-norm": (nn.SyncBatchNorm(6), 1, (4, 6, 5, 5)),
    "layer-norm": (nn.LayerNorm(6), -1, (4, 5, 6)),
    "layer-norm-of-images": (nn.LayerNorm((6, 5)), -1, (4, 6, 5)),
    "layer-norm-without-bias": (nn.LayerNorm(6, bias=False), -1, (4, 5, 6)),
    "layer-norm-plain": (nn.LayerNorm(6, elementwise_affine=False), -1, (4, 5, 6)),
    "rms-norm": (nn.RMSNorm(6), -1, (4, 6)),
}


@pytest.mark.parametrize(("norm", "dim", "shape"), NORMS.values(), ids=NORMS)
def test_each_norm_becomes_each_stand_in_with_the_same_parameters(norm, dim, shape):
    wanted = dict(norm.named_parameters())
    for kind in (DyT, ChannelScale):
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
    new = convert(nn.BatchNorm2d(6), {nn.BatchNorm2d: partial(DyT, dim=-1)})
    assert new.dim == -1


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("mapping", [{nn.LayerNorm: DyT}, {nn.Linear: AffineLikeLinear}], ids=["norms", "linear"])
@pytest.mark.parametrize("lengths", [[5, 5], [3, 5]], ids=["whole", "padded"])
def test_transformer_computes_the_same_with_and_without_gradients(mapping, lengths):
    """In evaluation torch's fast path would read weights of its own layers, and hand on nested tensors."""
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).eval()
    assert len(plan(model, mapping)) == 4
    convert(model, mapping)
    x, padding = torch.randn(2, 5, 8), torch.arange(5) >= torch.tensor(lengths)[:, None]
    given = {"src_key_padding_mask": padding} if padding.any() else {}
    trained_on = model(x, **given)
    with torch.no_grad():
        deployed = model(x, **given)
    assert (trained_on - deployed)[~padding].abs().max() <= 1e-6


def test_encoder_without_replaced_layers_keeps_its_nested_tensors():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
    convert(nn.Sequential(encoder, nn.Tanh()), {nn.Tanh: IsotropicTanh})
    assert encoder.use_nested_tensor
