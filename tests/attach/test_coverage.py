"""coverage: which parameters were corrected, which were skipped and why, and which never ran."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from adiv_optim import Coverage, GradientOnly, Proportional, attach, coverage, detach
from tests.attach.test_attach import Doubled, Net
from tests.helpers.modules import Model

EXACT = 1e-6  # float32, the exported program may use other kernels
UNKNOWN = "is not a layer whose rows are known"


def test_of_an_optimizer_is_refused():
    with pytest.raises(TypeError, match=r"coverage takes a model, found SGD; of a wrapper call its coverage\(\)"):
        coverage(torch.optim.SGD([torch.zeros(1)]))  # type: ignore[arg-type]


def test_after_a_step_every_parameter_is_listed_exactly_once():
    model = attach(Net(), Proportional(), skip=["head"])
    before = coverage(model)
    assert before.treated == {}
    assert before.parameter_share == before.element_share == 0
    waiting = sum(before.elements[name] for name in before.never_seen) / sum(before.elements.values())
    assert str(before).startswith(
        f"6 of 12 parameters will be treated after a step that runs their layers, {waiting:.1%} of "
    )
    model(torch.randn(5, 3, 2, 2)).sum().backward()
    report = coverage(model)
    assert before.never_seen.keys() == report.treated.keys()
    why = {"norm": f"BatchNorm2d {UNKNOWN}", "body.1": f"LayerNorm {UNKNOWN}", "head": "no correction attached"}
    layers = {name: name.rpartition(".")[0] for name, _ in model.named_parameters()}
    assert report == Coverage(
        treated={name: "corrected by Proportional" for name, layer in layers.items() if layer not in why},
        skipped={name: why[layer] for name, layer in layers.items() if layer in why},
        elements={name: parameter.numel() for name, parameter in model.named_parameters()},
    )


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


def tied():
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7, bias=False))
    model[1].weight = model[0].weight
    return model


def attention():
    parts = {"attention": nn.MultiheadAttention(8, 2, batch_first=True), "head": nn.Linear(8, 2)}
    return Model(lambda model, x: model.head(model.attention(x, x, x)[0]), **parts)


def one_of_two_with_a_weight():
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Identity(), nn.Linear(3, 3, bias=False))
    model[2].weight = model[0].weight
    del model[0]
    return model


def with_a_forward_of_its_own():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].forward = lambda x: 2 * x
    return model


WITHOUT_CALL = "MultiheadAttention uses it without calling the layer"
#: Model, input, what of its parameters is treated, and why others are not.
REPORTS = {
    "subclass": (
        lambda: nn.Sequential(nn.Linear(3, 3, bias=False), Doubled(3, 2, bias=False)), torch.ones(1, 3), {"0.weight"},
        {"1.weight": f"{Doubled.__module__}.Doubled is a subclass of Linear, whose weight may multiply something else"},
    ),
    "tied": (tied, torch.tensor([1, 2]), {"0.weight"}, {}),
    "shared": (one_of_two_with_a_weight, torch.ones(1, 3), {"1.weight"}, {}),
    "forward": (
        with_a_forward_of_its_own, torch.ones(1, 3), {"0.weight", "0.bias"},
        dict.fromkeys(("1.weight", "1.bias"), "this Linear has a forward of its own set on it"),
    ),
    "parametrized": (
        lambda: parametrizations.weight_norm(nn.Linear(3, 2)), torch.ones(1, 3),
        {"bias", "parametrizations.weight.original0", "parametrizations.weight.original1"}, {},
    ),
    "attention": (attention, torch.ones(2, 3, 8), {"head.weight", "head.bias"}, {
        **dict.fromkeys(("attention.in_proj_weight", "attention.in_proj_bias"), f"MultiheadAttention {UNKNOWN}"),
        **dict.fromkeys(("attention.out_proj.weight", "attention.out_proj.bias"), WITHOUT_CALL),
    }),
}  # fmt: skip


@pytest.mark.parametrize(("build", "x", "treated", "skipped"), REPORTS.values(), ids=REPORTS)
def test_report_says_what_was_treated_and_why_the_rest_was_not(build, x, treated, skipped):
    model = build()
    attach(model, Proportional())(x).sum().backward()
    report = coverage(model)
    assert report.never_seen == {}
    assert report.skipped == skipped
    how = "corrected by Proportional"
    if build is tied:
        how += f" in part: plain as 0.weight (Embedding {UNKNOWN})"
    assert report.treated == dict.fromkeys(treated, how)
    if skipped:
        with pytest.raises(ValueError, match=rf"strict: {len(skipped)} trainable.*{next(iter(skipped))} "):
            attach(detach(model), Proportional(), strict=True)


def operators(program):
    graphs = [module.graph for module in program.graph_module.modules() if isinstance(module, torch.fx.GraphModule)]
    names = {str(node.target) for graph in graphs for node in graph.nodes if node.op == "call_function"}
    assert not any("adiv_optim" in name for name in names)
    return {name for name in names if "aten." in name}


def test_exported_attached_model_is_the_plain_one():
    """torch wraps the inside of an autograd.Function in an operator of its own; what counts is what computes."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 5), nn.LayerNorm(5), nn.Linear(5, 2)).eval()
    x = torch.randn(5, 3, 4, 4)
    plain, wanted = torch.export.export(model, (x,)), model(x)
    program = torch.export.export(attach(model, Proportional()), (x,))
    torch.testing.assert_close(program.module()(x), wanted, rtol=EXACT, atol=EXACT)
    assert operators(program) == operators(plain)


def test_little_is_corrected_is_said_once_with_reason_and_remedy():
    model = nn.Sequential(nn.Embedding(100, 4), Doubled(4, 4), nn.Linear(4, 2))
    wanted = (
        r"reaches 2\.3% of 430 .*Embedding is not a layer .* \(93\.0% of the elements\); .*Doubled.*name them in skip"
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
