"""Layers whose weights another module uses without calling them: a warning names them once, and coverage says why."""

import linecache
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from adiv_optim import GradientOnly, InputScaled, Proportional, UnitConsistent, Whitened
from tests.helpers.modules import Model
from tests.wrappers import each_wrapper


@each_wrapper
def test_layers_that_are_used_without_a_call_are_named_once(wrap):
    """As attention of torchvision's Swin and timm's BEiT: a module uses the weight of a layer below it."""

    def uncalled(model, x):
        return model.called(F.linear(x, model.inside.weight, model.inside.bias))

    model, x = Model(uncalled, inside=nn.Linear(4, 3), called=nn.Linear(3, 2)), torch.randn(5, 4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        opt = wrap(torch.optim.SGD(model.parameters(), lr=0.01), model, x)
        for _ in range(4):
            opt.zero_grad()
            model(x).square().sum().backward()
            opt.step()
    told = [str(warning.message) for warning in caught if "never called" in str(warning.message)]
    report = opt.coverage()
    if isinstance(opt, UnitConsistent):  # it needs no inputs, and treats them
        assert not told
        assert "inside.weight" in report.treated
        return
    (message,) = told
    assert "takes plain steps" in message
    assert ("inside.weight" in message, "called.weight" in message) == (True, False)
    assert report.skipped["inside.weight"].startswith("it has a gradient, but its layer was never called")
    plain = {"inside.weight", "inside.bias"} | ({"called.bias"} if isinstance(opt, InputScaled) else set())
    assert report.skipped.keys() == plain


@each_wrapper
def test_gradients_of_zero_name_no_layer(wrap):
    """As some loops give them to experts that no token was sent to."""
    used, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), torch.randn(5, 4)
    model = Model(lambda model, x: model.used(x), used=used, idle=nn.Linear(3, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt = wrap(torch.optim.SGD(model.parameters(), lr=0.01), model, x)
        for _ in range(4):
            opt.zero_grad()
            model(x).square().sum().backward()
            for p in model.idle.parameters():
                p.grad = torch.zeros_like(p)
            opt.step()


def test_layers_that_are_called_are_not_named():
    model = nn.ModuleDict({"used": nn.Linear(3, 3), "unused": nn.Linear(3, 3)})
    opt = GradientOnly(torch.optim.SGD(model.parameters(), lr=0.1), model, Proportional())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model["used"](torch.ones(1, 3)).sum().backward()
        opt.step()
    replica = model["unused"]._replicate_for_data_parallel()  # which runs in its place
    assert (model["unused"]._ran, replica._ran) == (True, True)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_of_before_the_correction_say_nothing(set_to_none):
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(5, 3)
    model(x).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opt = GradientOnly(torch.optim.SGD(model.parameters(), lr=0.1), model, Proportional(), strict=True)
        assert opt.coverage().never_seen.keys() == dict(model.named_parameters()).keys()
        for _ in range(3):
            opt.zero_grad(set_to_none)
            model(x).sum().backward()
            opt.step()
        head = nn.Linear(2, 2)
        head(x[:, :2]).sum().backward()
        model.append(head)
        opt.add_param_group({"params": list(head.parameters())})
    model(x).sum().backward()
    assert opt.coverage().parameter_share == 1


@pytest.mark.parametrize("wrap", [Whitened, lambda inner, model: GradientOnly(inner, model, Proportional())])
def test_warnings_of_a_step_point_at_its_call_past_frames_of_this_package_and_of_torch(wrap):
    model = nn.Linear(3, 2)
    opt = wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 1)  # puts a function of its own around step
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model.weight.grad = torch.ones(2, 3)  # of a layer that is not called
            opt.step()
            scheduler.step()
    (told,) = (each for each in caught if str(each.message).startswith(("Whitened", "GradientOnly")))
    assert told.filename == __file__
    assert linecache.getline(__file__, told.lineno).strip() == "opt.step()"
