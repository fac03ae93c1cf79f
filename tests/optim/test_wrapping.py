"""What wrappers of inputs go around, what they call the layers there, and what they refuse."""

import copy

import pytest
import torch
from torch import nn

from adiv_optim import BatchIdeal, GradientOnly, InputScaled, Preconditioned, UnitConsistent, Whitened, gauge

WRAPPERS = {"whitened": Whitened, "preconditioned": Preconditioned}
each_wrapper = pytest.mark.parametrize("wrapper", WRAPPERS.values(), ids=WRAPPERS)


@pytest.mark.parametrize("within", [*WRAPPERS.values(), InputScaled])
@each_wrapper
def test_inputs_are_divided_by_once(wrapper, within):
    model = nn.Linear(4, 3)
    inner = within(torch.optim.SGD(model.parameters(), lr=0.1), model)
    with pytest.raises(ValueError, match=rf"^{wrapper.__name__} around {within.__name__}: .*; choose one\.$"):
        wrapper(inner, model)


def test_names_are_those_of_the_model_itself():
    model, x = nn.Linear(4, 3), torch.randn(9, 4)
    compiled = torch.compile(copy.deepcopy(model), backend="eager")
    saved = Whitened(torch.optim.SGD(compiled.parameters(), lr=0.1), compiled)
    compiled(x).sum().backward()
    saved.step()
    assert saved.coverage().treated.keys() == {"weight", "bias"}
    optimizer = Whitened(torch.optim.SGD(model.parameters(), lr=0.1), model)
    optimizer.load_state_dict(saved.state_dict())
    assert optimizer.coverage().treated.keys() == {"weight", "bias"}


def test_subclass_with_the_name_of_its_base_is_named_by_its_module():
    namesake = type("Linear", (nn.Linear,), {"__module__": "timm.layers.linear"})
    model = nn.Sequential(namesake(4, 3), nn.Linear(3, 4))
    optimizer = Whitened(torch.optim.SGD(model.parameters(), lr=0.1), model)
    wanted = "timm.layers.linear.Linear is a subclass of Linear, whose weight may multiply something else"
    assert optimizer.coverage().skipped["0.weight"] == wanted
    with pytest.raises(ValueError, match=r"found modules of type .*timm\.layers\.linear\.Linear"):
        GradientOnly(torch.optim.SGD(model[:1].parameters(), lr=0.1), model[:1], BatchIdeal())


def test_arguments_in_the_wrong_order_are_told():
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"found SGD\. These are the arguments in the wrong order"):
        UnitConsistent(model, optimizer, example_input=torch.ones(1, 4))
    with pytest.raises(TypeError, match=r"trace: model must be a torch\.nn\.Module, found SGD"):
        gauge.trace(optimizer, torch.ones(1, 4))
