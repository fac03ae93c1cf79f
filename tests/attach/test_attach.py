"""attach, detach and coverage: the class swap, what it keeps, and what it refuses."""

import copy
import pickle

import pytest
import torch
from torch import nn

from adiv_optim import Disproportional, Proportional, attach, coverage, detach
from adiv_optim.rows.layers import CORRECTED


class Net(nn.Module):
    """One layer of every kind a correction goes on, norms between them, and an embedding's worth of others."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.body = nn.Sequential(nn.Linear(16, 8), nn.LayerNorm(8), nn.ReLU(inplace=True), nn.Linear(8, 8))
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.body(self.norm(self.conv(x)).flatten(1)))


def net_and_input():
    return Net(), torch.randn(5, 3, 2, 2)


def state_of(model):
    return [(name, type(module), sorted(module.__dict__)) for name, module in model.named_modules()]


def gradients_of(model, x):
    model.zero_grad()
    model(x).square().sum().backward()
    return [p.grad.clone() for p in model.parameters()]


def test_attach_swaps_classes_alone_and_detach_gives_back_a_plain_model_each_time():
    model, x = net_and_input()
    calls = []
    model.head.register_forward_pre_hook(lambda *args: calls.append("pre"))
    model.head.register_forward_hook(lambda *args: calls.append("forward"))
    model.head.register_full_backward_hook(lambda *args: calls.append("backward"))
    parameters = dict(model.named_parameters())
    plain, before = gradients_of(model, x), state_of(model)
    state = copy.deepcopy(model.state_dict())
    assert detach(model) is model, "which does nothing to a plain model"
    for _ in range(2):
        assert attach(model, Proportional()) is model
        assert type(model.conv) is CORRECTED[nn.Conv2d]
        assert isinstance(model.conv, nn.Conv2d)
        assert type(model.norm) is nn.BatchNorm2d
        assert {name: type(p) for name, p in model.named_parameters()} == dict.fromkeys(parameters, nn.Parameter)
        assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
        assert list(model.state_dict()) == list(state)
        model.load_state_dict(Net().state_dict())  # of a plain model, and back
        Net().load_state_dict(model.state_dict())
        model.load_state_dict(state)
        calls.clear()
        assert not all(map(torch.equal, gradients_of(model, x), plain))
        assert calls == ["pre", "forward", "backward"]
        assert "head.weight" in coverage(model).treated
        assert detach(model) is model
        assert state_of(model) == before
        assert all(map(torch.equal, gradients_of(model, x), plain))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_stay_attached_and_are_independent(duplicate):
    model, x = net_and_input()
    attach(model, Proportional())
    twin = duplicate(model)
    wanted = gradients_of(model, x)
    assert coverage(twin).treated == {}
    assert all(map(torch.equal, gradients_of(twin, x), wanted))
    detach(twin)
    assert type(twin.head) is nn.Linear
    assert type(model.head) is CORRECTED[nn.Linear]


SKIPS = {
    "subtree": (["body"], {"body.0", "body.3"}),
    "iterator-of-paths": (iter(["body.0", "conv"]), {"body.0", "conv"}),
    "type": ([nn.Linear], {"body.0", "body.3", "head"}),
    "container-type-and-path": ([nn.Sequential, "head"], {"body.0", "body.3", "head"}),
    "base-type": ([nn.modules.conv._ConvNd], {"conv"}),
}


@pytest.mark.parametrize(("skip", "left"), SKIPS.values(), ids=SKIPS)
def test_skip_leaves_paths_subtrees_and_types_alone(skip, left):
    model, _ = net_and_input()
    attach(model, Proportional(), skip=skip)
    layers = {"conv", "body.0", "body.3", "head"}
    assert {path for path in layers if type(model.get_submodule(path)) in CORRECTED} == left


def test_the_same_correction_on_the_same_layers_is_attached_already():
    """As of a trainer that builds the optimizer anew for every fit."""
    model, x = net_and_input()
    attach(model, Proportional())
    wanted, state = gradients_of(model, x), state_of(model)
    assert attach(model, Proportional()) is model
    assert state_of(model) == state
    assert all(map(torch.equal, gradients_of(model, x), wanted))
    for other, skip in ((Disproportional(), ()), (Proportional(eps=1e-3), ()), (Proportional(), ["head"])):
        with pytest.raises(ValueError, match="already has a correction"):
            attach(model, other, skip=skip)


def test_strict_refuses_a_model_that_was_attached_without_it():
    model = attach(nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3)), Proportional())
    with pytest.raises(ValueError, match=r"strict: 2 trainable .*1\.weight"):
        attach(model, Proportional(), strict=True)
    assert isinstance(model[0]._correction, Proportional)


def test_strict_accepts_a_model_whose_rest_is_skipped_or_frozen():
    model, _ = net_and_input()
    model.norm.requires_grad_(False)
    attach(model, Proportional(), skip=[nn.LayerNorm], strict=True)
    assert type(model.head) is CORRECTED[nn.Linear]


def test_a_forward_set_since_attach_is_no_surprise_to_detach():
    """As Accelerate's hooks set one, which would call the corrected forward of a plain layer."""
    model = attach(nn.Sequential(nn.Linear(2, 2)), Proportional())
    corrected = model[0].forward
    model[0].forward = lambda *inputs: corrected(*inputs)
    with pytest.raises(ValueError, match="detach: layer '0' has got a forward of its own since attach; take that off"):
        detach(model)
    assert model(torch.ones(1, 2)).isfinite().all()
    del model[0].forward
    assert type(detach(model)[0]) is nn.Linear


class Doubled(nn.Linear):
    def forward(self, input):
        return 2 * super().forward(input)


def lazy():
    return nn.Sequential(nn.Linear(3, 2), nn.LazyLinear(2))


ERRORS = {
    "class": (Net, {"correction": Proportional}, TypeError, r"write Proportional\(\)"),
    "twice": (
        lambda: attach(Net(), Proportional(), skip=["head"]), {},
        ValueError, r"layer 'conv' already has.*3 layers have.*detach\(model\)",
    ),
    "skip-path": (Net, {"skip": ["haed"]}, ValueError, r"skip names 'haed'.*'head'"),
    "skip-type": (Net, {"skip": [nn.Conv3d]}, ValueError, "skip names .*Conv3d"),
    "skip-module": (Net, {"skip": [nn.Tanh()]}, TypeError, r"skip is \[Tanh\(\)\]; pass a list of paths or types"),
    "skip-string": (Net, {"skip": "head"}, TypeError, r"skip is 'head'; pass a list"),
    "nothing": (lambda: nn.Sequential(nn.Tanh()), {}, ValueError, "nothing to correct: .*Sequential, Tanh"),
    "complex-only": (lambda: nn.Linear(3, 2, dtype=torch.complex64), {}, ValueError, "that are neither complex nor"),
    "subclass-only": (lambda: Doubled(3, 2), {}, ValueError, "nothing to correct: .*Doubled"),
    "strict": (Net, {"strict": True}, ValueError, r"strict: 4 trainable.*norm\.weight \(BatchNorm2d is not a layer"),
    "lazy": (lazy, {}, ValueError, r"attach: 'weight' of layer '1' \(LazyLinear\) has no shape yet; run one batch"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")  # torch's own
@pytest.mark.parametrize(("build", "options", "error", "message"), ERRORS.values(), ids=ERRORS)
def test_error_says_what_was_found_and_leaves_the_model_unchanged(build, options, error, message):
    model = build()
    before = state_of(model)
    with pytest.raises(error, match=message):
        attach(model, **{"correction": Proportional(), **options})
    assert state_of(model) == before


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")  # torch's own
def test_lazy_layer_can_be_skipped_and_attached_once_it_has_run():
    attach(lazy(), Proportional(), skip=["1"])
    model = lazy()
    model(torch.randn(4, 3))
    attach(model, Proportional())
    assert type(model[1]) is CORRECTED[nn.Linear]


INPUT_ERRORS = {
    "features": (lambda m: m.body(torch.ones(2, 5)), ValueError, r"layer 'body\.0' \(Linear\): .*shapes \(2, 5\)"),
    "integers": (lambda m: m.body(torch.ones(2, 16).long()), TypeError, r"layer 'body\.0' \(Linear\): .*torch.int64"),
    "channels": (lambda m: m(torch.ones(1, 7, 4, 4)), ValueError, r"layer 'conv' \(Conv2d\): .*shapes \(1, 7, 4, 4\)"),
    "itself": (
        lambda m: attach(nn.Linear(3, 2), Proportional())(torch.ones(2, 5)), ValueError,
        r"the model itself \(Linear\): .*shapes \(2, 5\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("call", "error", "message"), INPUT_ERRORS.values(), ids=INPUT_ERRORS)
def test_error_of_a_layer_names_its_path_with_autocast_too(call, error, message):
    for half in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=half), pytest.raises(error, match=message):
            call(attach(Net(), Proportional()))
