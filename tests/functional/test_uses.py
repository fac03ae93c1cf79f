"""What a loss's graph tells of parameters that are used beside their corrected layer."""

from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from adiv_optim import BatchIdeal, Proportional, attach, coverage

PART = "corrected by Proportional in part: the loss depends on it outside of its layer too"
WHOLE = "corrected by Proportional"


def net():
    layers = {"conv": nn.Conv1d(2, 3, 3, padding=1), "norm": nn.LayerNorm(4), "head": nn.Linear(4, 4)}
    return nn.Sequential(OrderedDict(layers))


def whole(model, x):
    return model(x).square().sum()


def beside(model, x):
    return model(x).sum() + (x @ model.head.weight).sum()


def penalty(model, x):
    return model(x).sum() + model.conv.weight.square().sum()


def in_front(model, x):
    """On the way to a corrected layer's input, which is no way to its weight."""
    return model(x @ model.head.weight).sum()


def through_a_bias(model, x):
    return F.linear(model(x), torch.eye(4), model.head.bias).sum()


USES = {
    whole: set(), beside: {"head.weight"}, penalty: {"conv.weight"}, in_front: {"head.weight"},
    through_a_bias: {"head.bias"},
}  # fmt: skip


@pytest.mark.parametrize("loss_of", USES, ids=lambda use: use.__name__)
@pytest.mark.parametrize("when", ["before-backward", "after-backward", "checkpointed", "autocast"])
def test_the_loss_tells_what_is_used_beside_its_layer(loss_of, when):
    model, x = attach(net(), Proportional()), torch.randn(5, 2, 4)
    with torch.autocast("cpu", torch.bfloat16, enabled=when == "autocast"):
        loss = checkpoint(loss_of, model, x, use_reentrant=False) if when == "checkpointed" else loss_of(model, x)
    if when == "after-backward":
        loss.backward()
    report = coverage(model, loss)
    corrected = {"conv.weight", "conv.bias", "head.weight", "head.bias"}
    assert report.treated == {name: PART if name in USES[loss_of] else WHOLE for name in corrected}
    assert report.skipped.keys() == {"norm.weight", "norm.bias"}
    assert coverage(model).treated == dict.fromkeys(report.treated, WHOLE)  # which the modules cannot tell


def test_a_parametrization_is_a_way_through_the_layer():
    model, x = attach(parametrizations.weight_norm(nn.Linear(4, 3)), BatchIdeal()), torch.randn(5, 4)
    assert set(coverage(model, model(x).sum()).treated.values()) == {"corrected by BatchIdeal"}
    report = coverage(model, model(x).sum() + model.weight.sum())
    assert sum("in part" in how for how in report.treated.values()) == 2


def test_no_graph_and_compiled_graphs_are_refused():
    model, x = attach(nn.Linear(4, 3), Proportional()), torch.randn(5, 4)
    with pytest.raises(TypeError, match=r"which has no graph; pass the tensor that backward\(\) is called on"):
        coverage(model, model(x).sum().detach())
    torch._dynamo.reset()
    with pytest.raises(ValueError, match=r"has a CompiledFunctionBackward, of torch\.compile"):
        coverage(model, torch.compile(model, backend="aot_eager")(x).sum())
    assert set(coverage(model, torch.func.vmap(model)(x).sum()).treated.values()) == {WHOLE}
    model = attach(nn.Conv1d(4, 4, 3), Proportional())
    with pytest.raises(ValueError, match="has a Vmapped_Conv"):
        coverage(model, torch.func.vmap(model)(torch.randn(3, 4, 5)).sum())
