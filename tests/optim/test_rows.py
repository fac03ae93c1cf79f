"""Which layers the wrappers of inputs treat, and what they say of the others."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adiv_optim import InputScaled, Proportional, Whitened, attach
from adiv_optim.layers import NormLikeLinear
from tests.helpers.cases import relative_error
from tests.helpers.remembered import covariance_of, memory, rows_counted
from tests.helpers.steps import backward, each_by_inputs, same, sgd

pytestmark = pytest.mark.usefixtures("in_float64")


class Halved(nn.Linear):
    """Its weight multiplies half of its input, as quantisation-aware layers multiply a rounded one."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input / 2)


class Declared(Halved):
    def input_rows(self, input: Tensor) -> Tensor:
        return input / 2


def test_subclasses_are_left_alone_unless_they_declare_their_rows():
    for layer in (Halved(4, 3), NormLikeLinear(4, 3)):
        model = nn.Sequential(nn.Linear(9, 4), layer)
        optimizer = Whitened(sgd(model), model)
        kind = f"{type(layer).__module__}.{type(layer).__name__}"
        assert optimizer.coverage().skipped["1.weight"] == (
            f"{kind} is a subclass of Linear, whose weight may multiply something else; a method input_rows(input) on "
            "that class makes them known"
        )
    declared = Declared(4, 3)
    optimizer, x = Whitened(sgd(declared), declared, graft_norm=False), torch.randn(7, 4)
    backward(declared, x)
    optimizer.step()
    rows = torch.cat([x / 2, torch.ones(7, 1)], 1)
    assert relative_error(covariance_of(optimizer, declared), rows.T @ rows / 7) <= 1e-12


class Columns(nn.Module):
    """A layer by itself, without a bias, that says what it multiplies."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4))

    def forward(self, input: Tensor, scale: float = 1.0) -> Tensor:
        return scale * input @ self.weight.T

    def input_rows(self, input: Tensor) -> Tensor:
        return input


def test_a_layer_with_rows_needs_no_bias():
    layer, x = Columns(), torch.randn(7, 4)
    optimizer = Whitened(sgd(layer), layer, graft_norm=False)
    layer(scale=2.0, input=x).square().sum().backward()  # in another order than that of its forward
    optimizer.step()
    assert relative_error(covariance_of(optimizer, layer), x.T @ x / 7) <= 1e-12


def test_a_bias_of_another_shape_takes_the_plain_step():
    layer, x = Columns(), torch.randn(7, 4)
    layer.bias = nn.Parameter(torch.zeros(1, 3))
    optimizer = Whitened(sgd(layer), layer, graft_norm=False)
    backward(layer, x)
    optimizer.step()
    assert optimizer.coverage().treated == {"weight": "whitened, 4 columns"}
    assert "bias" in optimizer.coverage().skipped


def test_what_is_no_tensor_has_no_rows():
    layer = type("OfBatch", (Columns,), {"forward": lambda self, batch: batch["x"] @ self.weight.T})()
    optimizer = Whitened(sgd(layer), layer)
    with pytest.raises(TypeError, match="weight reads a dict, no tensor; name its layer in skip"):
        layer({"x": torch.randn(7, 4)})
    assert rows_counted(optimizer) == {}


def test_a_layer_of_another_package_is_named_in_full_with_the_remedy():
    """Many of them call theirs Linear."""
    kind = type("Linear", (Columns,), {"__module__": "torch_geometric.nn.dense.linear", "input_rows": None})
    model = nn.Sequential(nn.Linear(9, 4), kind(), nn.LayerNorm(3))
    found = Whitened(sgd(model), model).coverage().skipped
    assert found["1.weight"] == (
        "torch_geometric.nn.dense.linear.Linear is not a layer whose rows are known; a method input_rows(input) on "
        "that class makes them known"
    )
    assert found["2.weight"] == "LayerNorm is not a layer whose rows are known"
    with pytest.raises(ValueError, match=r"found modules of type .*torch_geometric\.nn\.dense\.linear\.Linear"):
        attach(model[1:], Proportional())
    kind.input_rows = lambda self, input: input
    assert "1.weight" in Whitened(sgd(model), model).coverage().never_seen


def test_rows_of_another_width_are_refused():
    layer = Columns()
    layer.input_rows = lambda input: input[:, :-1]
    optimizer = Whitened(sgd(layer), layer)
    with pytest.raises(ValueError, match="weight: its input has 3 features or channels; its weight takes 4"):
        backward(layer, torch.randn(7, 4))
    del optimizer


def test_a_weight_that_multiplies_no_rows_is_left_alone():
    class Gain(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

    model = nn.Sequential(nn.Linear(4, 4), Gain())
    why = "is not a layer whose rows are known"
    assert Whitened(sgd(model), model).coverage().skipped["1.weight"].endswith(why)  # and no remedy that is none
    Gain.input_rows = lambda self, input: input
    why = "a weight of fewer than two dimensions, which multiplies no rows"
    assert Whitened(sgd(model), model).coverage().skipped["1.weight"] == why


class Labelled(Tensor):
    """Has methods of its own in the place of torch's, as PINA's LabelTensor and MONAI's MetaTensor have."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(arg, Labelled) and not hasattr(arg, "labels") for arg in args):
            raise AttributeError("labels")
        return super().__torch_function__(function, types, args, kwargs or {})

    def reshape(self, *shape: int) -> Any:
        raise AttributeError("labels")


def labelled(x: Tensor) -> Any:
    made = x.as_subclass(Labelled)
    made.labels = ["x"]
    return made


def test_a_correction_gives_a_subclass_of_tensor_back():
    model, plain = nn.Sequential(nn.Linear(4, 3)), nn.Sequential(nn.Linear(4, 3))
    plain.load_state_dict(model.state_dict())
    attach(model, Proportional())
    attach(plain, Proportional())
    x = torch.randn(7, 4)
    output = model(labelled(x))
    assert type(output) is Labelled
    Tensor.as_subclass(output, Tensor).square().sum().backward()
    plain(x).square().sum().backward()
    assert torch.equal(model[0].weight.grad, plain[0].weight.grad)


@each_by_inputs
def test_a_subclass_of_tensor_is_read_as_the_tensor_that_it_is(wrapper, tmp_path):
    found = []
    for given in (labelled, lambda x: x):
        torch.manual_seed(0)
        layer = nn.Linear(4, 3)
        optimizer = wrapper(sgd(layer), layer)
        Tensor.as_subclass(layer(given(torch.randn(7, 4))), Tensor).square().sum().backward()
        optimizer.step()
        assert rows_counted(optimizer) == {"weight": 7}
        torch.save(optimizer.state_dict(), tmp_path / "state.pt")
        optimizer.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        found.append([*layer.parameters(), *memory(optimizer)])
    assert all(type(tensor) in (Tensor, nn.Parameter) for tensor in found[0])
    assert same(*found)


def test_an_instance_with_a_forward_of_its_own_is_left_alone():
    model = nn.Sequential(nn.Linear(9, 4), nn.Linear(4, 3))
    model[1].forward = lambda input: input[..., :3]
    optimizer = Whitened(sgd(model), model)
    assert optimizer.coverage().skipped["1.weight"] == "this Linear has a forward of its own set on it"


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@each_by_inputs
def test_a_layer_without_features_trains_its_bias(wrapper):
    model = nn.ModuleList([nn.Linear(0, 3, bias=False), nn.Linear(0, 3), nn.Linear(4, 3)])
    nn.init.ones_(model[1].bias)
    optimizer = wrapper(sgd(model), model)
    sum(layer(torch.ones(5, layer.in_features)) for layer in model).square().sum().backward()
    optimizer.step()
    found = optimizer.coverage()
    assert found.skipped["0.weight"] == "without entries"
    assert "2.weight" in found.treated
    assert ("1.bias" in found.treated) == (wrapper is not InputScaled)
    assert (model[1].bias != 1).all()
    assert all(parameter.isfinite().all() for parameter in model.parameters())
