"""coverage: which parameters were corrected, which were skipped and why, and which never ran."""

import warnings

import pytest
import torch
from torch import nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from adiv_optim import Coverage, GradientOnly, Proportional, attach, coverage, detach
from tests.attach.test_attach import Doubled, Net

EXACT = 1e-6  # float32, the exported program may use other kernels


def test_before_any_forward_nothing_is_corrected():
    report = coverage(attach(Net(), Proportional()))
    assert report.treated == {}
    assert report.parameter_share == report.element_share == 0
    assert "head.weight" in report.never_seen


def test_after_a_step_every_parameter_is_listed_exactly_once():
    model = attach(Net(), Proportional(), skip=["head"])
    model(torch.randn(5, 3, 2, 2)).sum().backward()
    report = coverage(model)
    assert report == Coverage(
        treated=dict.fromkeys(
            ("conv.weight", "conv.bias", "body.0.weight", "body.0.bias", "body.3.weight", "body.3.bias"),
            "corrected by Proportional",
        ),
        skipped={
            "norm.weight": "BatchNorm2d is not a layer whose rows are known",
            "norm.bias": "BatchNorm2d is not a layer whose rows are known",
            "body.1.weight": "LayerNorm is not a layer whose rows are known",
            "body.1.bias": "LayerNorm is not a layer whose rows are known",
            "head.weight": "no correction attached",
            "head.bias": "no correction attached",
        },
        elements={name: parameter.numel() for name, parameter in model.named_parameters()},
    )
    listed = [*report.treated, *report.skipped, *report.never_seen]
    assert sorted(listed) == sorted(name for name, _ in model.named_parameters())


def test_layer_that_did_not_run_is_never_seen_and_frozen_ones_are_not_listed():
    model = attach(nn.ModuleDict({"used": nn.Linear(3, 3), "unused": nn.Linear(3, 3)}), Proportional())
    model["used"].bias.requires_grad_(False)
    model["used"](torch.ones(1, 3)).sum().backward()
    report = coverage(model)
    assert report == Coverage(
        treated={"used.weight": "corrected by Proportional"},
        never_seen=dict.fromkeys(("unused.weight", "unused.bias"), "its layer has not run"),
        elements={"used.weight": 9, "unused.weight": 9, "unused.bias": 3},
    )
    assert (report.parameter_share, report.element_share) == (1 / 3, 9 / 21)
    assert str(report).splitlines()[:3] == [
        "1 of 3 parameters are treated, 42.9% of 21 elements",
        "used.weight: corrected by Proportional",
        "unused.weight: never seen (its layer has not run)",
    ]


def test_forward_without_gradients_does_not_count():
    model = attach(nn.Linear(3, 2), Proportional())
    with torch.no_grad():
        model(torch.ones(1, 3))
    assert coverage(model).never_seen.keys() == {"weight", "bias"}
    model(torch.ones(1, 3)).sum().backward()
    assert coverage(model).treated.keys() == {"weight", "bias"}


def test_a_plain_model_is_skipped_throughout():
    report = coverage(nn.Sequential(nn.Linear(3, 2), nn.PReLU()))
    assert report.skipped == {
        "0.weight": "no correction attached", "0.bias": "no correction attached",
        "1.weight": "PReLU is not a layer whose rows are known",
    }  # fmt: skip


def test_subclass_is_reported_by_name():
    report = coverage(attach(nn.Sequential(nn.Linear(3, 3), Doubled(3, 2)), Proportional()))
    assert report.skipped["1.weight"] == "Doubled is a subclass of Linear, whose weight may multiply something else"


def test_tied_weights_are_listed_once_as_corrected():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens):
            return self.head(self.embedding(tokens))

    model = attach(Tied(), Proportional())
    model(torch.tensor([1, 2])).sum().backward()
    report = coverage(model)
    part = (
        "corrected by Proportional in part: plain as embedding.weight (Embedding is not a layer whose rows are known)"
    )
    assert report.treated == {"embedding.weight": part}
    assert report.skipped == {}
    assert report.never_seen == {}


def test_two_layers_sharing_a_weight_are_corrected_if_one_of_them_ran():
    model = nn.ModuleList([nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)])
    model[1].weight = model[0].weight
    attach(model, Proportional())
    model[1](torch.ones(1, 3)).sum().backward()
    assert len(coverage(model).treated) == 1
    assert coverage(model).never_seen == {}


ATTENTION = {"packed": {}, "separate": {"kdim": 6, "vdim": 5}, "no-bias": {"bias": False}}


@pytest.mark.parametrize("options", ATTENTION.values(), ids=ATTENTION)
def test_attentions_projections_are_reported_not_missed(options):
    model = nn.ModuleDict(
        {"attention": nn.MultiheadAttention(8, 2, batch_first=True, **options), "head": nn.Linear(8, 2)}
    )
    attach(model, Proportional())
    q = torch.randn(2, 3, 8)
    k, v = torch.randn(2, 3, options.get("kdim", 8)), torch.randn(2, 3, options.get("vdim", 8))
    model["head"](model["attention"](q, k, v)[0]).sum().backward()
    report = coverage(model)
    assert set(report.treated) == {"head.weight", "head.bias"}
    assert report.never_seen == {}
    assert {name for name, _ in model["attention"].named_parameters(prefix="attention")} == set(report.skipped)
    reasons = "; ".join(f"{name}: {reason}" for name, reason in report.skipped.items())
    assert "attention.out_proj.weight: MultiheadAttention uses it without calling the layer" in reasons
    assert "MultiheadAttention is not a layer whose rows are known" in reasons


@pytest.mark.skipif(not hasattr(nn, "LinearCrossEntropyLoss"), reason="this torch has no LinearCrossEntropyLoss")
def test_a_layer_that_its_loss_uses_without_calling_it_is_reported_not_missed():
    model = nn.ModuleDict({"body": nn.Linear(4, 3), "loss": nn.LinearCrossEntropyLoss(3, 5)})
    with pytest.raises(ValueError, match=r"strict: 1 .* loss\.linear\.weight \(LinearCrossEntropyLoss uses it "):
        attach(model, Proportional(), strict=True)
    attach(model, Proportional())
    model["loss"](model["body"](torch.randn(2, 4)), torch.tensor([0, 1])).backward()
    report = coverage(model)
    assert report.treated.keys() == {"body.weight", "body.bias"}
    assert report.skipped.keys() == {"loss.linear.weight"}
    assert report.never_seen == {}


def test_attention_gradients_are_the_plain_ones():
    attention, x = nn.MultiheadAttention(8, 2), torch.randn(3, 2, 8)
    attention(x, x, x)[0].square().sum().backward()
    plain = [p.grad.clone() for p in attention.parameters()]
    attention.zero_grad()
    model = attach(nn.ModuleList([attention, nn.Linear(8, 8)]), Proportional())
    model[0](x, x, x)[0].square().sum().backward()
    for wanted, parameter in zip(plain, attention.parameters(), strict=True):
        assert torch.equal(parameter.grad, wanted)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_transformer_layer_computes_the_same_and_corrects_its_feed_forward(training):
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).train(training)
    x = torch.randn(2, 3, 8)
    wanted = layer(x)
    attach(layer, Proportional())
    output = layer(x)
    assert torch.equal(output, wanted)
    output.square().sum().backward()
    report = coverage(layer)
    assert report.treated.keys() == {"linear1.weight", "linear1.bias", "linear2.weight", "linear2.bias"}
    assert all(name.startswith(("self_attn.", "norm")) for name in report.skipped)
    assert report.never_seen == {}


def test_transformer_layers_fast_path_for_inference_still_gives_torchs_output():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    x = torch.randn(2, 3, 8)
    with torch.no_grad():
        wanted = layer(x)
        attach(layer, Proportional())
        torch.testing.assert_close(layer(x), wanted, rtol=EXACT, atol=EXACT)


def test_strict_names_attention():
    with pytest.raises(ValueError, match=r"self_attn\.in_proj_weight.*self_attn\.out_proj\.weight"):
        attach(nn.TransformerEncoderLayer(8, 2, 16), Proportional(), strict=True)


def test_parametrized_layer_is_listed_under_the_parametrizations_names():
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 2)))
    attach(model, Proportional())(torch.ones(1, 3)).sum().backward()
    report = coverage(model)
    assert set(report.treated) == {name for name, _ in model.named_parameters()}
    assert report.skipped == {}


def test_attached_model_under_functional_call():
    model, x = Net(), torch.randn(5, 3, 2, 2)
    attach(model, Proportional())
    model(x).square().sum().backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters()}
    other = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    functional_call(model, other, (x,)).square().sum().backward()
    for name, parameter in other.items():
        assert torch.equal(parameter.grad, wanted[name])


def test_attached_models_under_vmap():
    models = [attach(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), Proportional()) for _ in range(3)]
    x = torch.randn(5, 3)
    stacked, _ = stack_module_state(models)
    vmap(lambda parameters: functional_call(models[0], parameters, (x,)))(stacked).square().sum().backward()
    for k, model in enumerate(models):
        model(x).square().sum().backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(stacked[name].grad[k], parameter.grad)


def small():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 5), nn.LayerNorm(5), nn.Linear(5, 2))


def test_compiled_attached_model_has_the_same_gradients_and_coverage():
    model, x = attach(small(), Proportional(), skip=["4"]), torch.randn(5, 3, 4, 4)
    model(x).square().sum().backward()
    wanted, report = [p.grad.clone() for p in model.parameters()], coverage(model)
    fresh = attach(small(), Proportional(), skip=["4"])
    fresh.load_state_dict(model.state_dict())
    torch._dynamo.reset()
    compiled = torch.compile(fresh, fullgraph=True, backend="aot_eager")
    assert coverage(fresh).treated == {}
    compiled(x).square().sum().backward()
    assert coverage(fresh) == report
    for gradient, parameter in zip(wanted, fresh.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-5)


def test_exported_attached_model_computes_what_the_plain_one_does():
    model, x = small().eval(), torch.randn(5, 3, 4, 4)
    wanted = model(x)
    program = torch.export.export(attach(model, Proportional()), (x,))
    torch.testing.assert_close(program.module()(x), wanted, rtol=EXACT, atol=EXACT)


def operators(model, x):
    program = torch.export.export(model, (x,))
    graphs = [module.graph for module in program.graph_module.modules() if isinstance(module, torch.fx.GraphModule)]
    return {str(node.target) for graph in graphs for node in graph.nodes if node.op == "call_function"}


def test_exported_attached_model_calls_the_operators_of_the_plain_one():
    # torch 2.6 wraps the inside of an autograd.Function in an operator of its own; what counts is what computes.
    model, x = small().eval(), torch.randn(5, 3, 4, 4)
    plain, attached = operators(model, x), operators(attach(model, Proportional()), x)
    assert {name for name in attached if name.startswith("aten.")} == {name for name in plain if "aten." in name}
    assert not any("adiv_optim" in name for name in attached)


def test_layer_with_a_forward_of_its_own_is_left_alone_and_named():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].forward = lambda x: 2 * x
    attach(model, Proportional())
    assert type(model[1]) is nn.Linear
    assert coverage(model).skipped["1.weight"] == "this Linear has a forward of its own set on it"


def test_little_is_corrected_is_said_once_with_reason_and_remedy():
    model = nn.Sequential(nn.Embedding(100, 4), Doubled(4, 4), nn.Linear(4, 2))
    wanted = (
        r"reaches 2\.3% of 430 .*Embedding is not a layer .* \(93\.0% of the elements\); Doubled.*name them in skip"
    )
    with pytest.warns(UserWarning, match=wanted) as said:
        attach(model, Proportional())
    assert [warning.filename for warning in said] == [__file__]
    with pytest.warns(UserWarning, match="reaches 2.3% of 430") as said:
        GradientOnly(torch.optim.SGD(model.parameters(), lr=0.1), detach(model), Proportional())
    assert [warning.filename for warning in said] == [__file__]
    model[0].requires_grad_(False)
    with warnings.catch_warnings():  # nothing is said of what is frozen, or skipped by name
        warnings.simplefilter("error")
        attach(detach(model), Proportional(), skip=["1"])


def test_parameters_left_for_one_reason_are_counted_together():
    found = Coverage({"c": "corrected"}, {"a": "tied", "b": "tied"}, elements={"a": 30, "b": 50, "c": 20})
    assert found.reasons() == "tied (80.0% of the elements)"


def test_complex_layers_keep_the_plain_gradient():
    model = nn.Sequential(nn.Linear(3, 2, dtype=torch.complex64), nn.Linear(2, 40))
    assert coverage(attach(model, Proportional())).skipped == {"0.weight": "complex", "0.bias": "complex"}
    model[1](model[0](torch.ones(1, 3, dtype=torch.complex64)).abs()).sum().backward()
    assert model[0].weight.grad is not None


def test_graph_of_a_reentrant_checkpoint_is_refused():
    model, x = attach(nn.Linear(3, 3), Proportional()), torch.randn(4, 3, requires_grad=True)
    loss = checkpoint(lambda x: model(x) + x @ model.weight, x, use_reentrant=True).sum()
    with pytest.raises(ValueError, match=r"CheckpointFunction.*, of torch\.compile, vmap or a reentrant checkpoint"):
        coverage(model, loss)
    loss = checkpoint(lambda x: model(x) + x @ model.weight, x, use_reentrant=False).sum()
    assert coverage(model, loss).never_seen.keys() | coverage(model, loss).treated.keys() == {"weight", "bias"}
