"""The isometry recorder measures the layers' outputs, float64, and a training does not notice it."""

import copy
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from adiv_optim.diagnostics import divergence, isometry, record
from tests.diagnostics.test_untouched import batch, everything, network, same
from tests.helpers.modules import Model

EXACT = 1e-12

pytestmark = pytest.mark.usefixtures("in_float64")


def by_singular_values(x):
    """Isometry of x xᵀ, without forming it."""
    squares = torch.linalg.svdvals(x).square()
    squares = F.pad(squares, (0, x.shape[-2] - squares.shape[-1]))
    return squares.log().mean(-1).exp() / squares.mean(-1)


def recorded(model, x, **options):
    with record(model, **options) as recorder:
        model(x)
    return {layer["path"]: layer for layer in recorder.history[0]["layers"]}


def test_numbers_are_those_of_each_layers_output():
    model = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Sequential(nn.LayerNorm(20), nn.Linear(20, 9)))
    x = torch.randn(5, 6)
    found = recorded(model, x)
    assert list(found) == ["0", "1", "2.0", "2.1"]
    assert [found[path]["kind"] for path in found] == ["Linear", "Tanh", "LayerNorm", "Linear"]
    for layer, path in zip((model[0], model[1], *model[2]), found, strict=True):
        x = layer(x)
        assert found[path]["samples"] == 5
        assert found[path]["isometry"] == pytest.approx(by_singular_values(x).item(), rel=EXACT)
        assert found[path]["gap"] == pytest.approx(-math.log(found[path]["isometry"]), rel=EXACT)


def test_layer_that_works_in_place_is_told_from_the_one_before():
    linear, x = nn.Linear(6, 20), torch.randn(5, 6)
    plain, in_place = (recorded(nn.Sequential(linear, nn.ReLU(inplace=flag)), x) for flag in (False, True))
    assert plain == in_place
    assert plain["0"]["isometry"] != plain["1"]["isometry"]


def test_samples_of_a_sequence_are_its_tokens():
    layer, x = nn.Linear(6, 20), torch.randn(3, 5, 6)
    found = recorded(layer, x)[""]
    each = [by_singular_values(layer(sequence)) for sequence in x]
    assert found["samples"] == 5
    assert found["isometry"] == pytest.approx(torch.stack(each).mean().item(), rel=EXACT)
    assert found["gap"] == pytest.approx(-torch.stack(each).log().mean().item(), rel=EXACT)
    together = recorded(layer, x, rows=lambda z: z.flatten(0, 1))[""]
    assert together["samples"] == 15
    assert together["isometry"] == pytest.approx(by_singular_values(layer(x).flatten(0, 1)).item(), rel=EXACT)
    assert abs(together["isometry"] - found["isometry"]) > 0.01


def test_samples_of_images_are_images():
    layer, x = nn.Conv2d(3, 4, 3), torch.randn(5, 3, 6, 7)
    found = recorded(layer, x)[""]
    assert found["samples"] == 5
    assert found["isometry"] == pytest.approx(by_singular_values(layer(x).flatten(1)).item(), rel=EXACT)


def test_more_samples_are_thinned_evenly():
    layer, x = nn.Identity(), torch.randn(10, 30)
    found = recorded(layer, x, max_samples=4)[""]
    assert found["samples"] == 4
    assert found["isometry"] == pytest.approx(isometry(x[[0, 2, 5, 7]] @ x[[0, 2, 5, 7]].T).item(), rel=EXACT)


def test_half_precision_is_measured_in_float64_and_dependent_samples_have_isometry_zero():
    x = torch.randn(5, 30, dtype=torch.bfloat16)
    found = recorded(nn.Identity(), x)[""]
    assert found["isometry"] == pytest.approx(by_singular_values(x.double()).item(), rel=EXACT)
    found = recorded(nn.Linear(6, 3), torch.randn(5, 6))[""]
    assert found["isometry"] == 0
    assert found["gap"] == math.inf


def test_every_nth_pass_is_measured_and_says_its_mode():
    model = network()
    with record(model, every=3) as recorder:
        for number in range(8):
            model.train(number < 5)(torch.randn(10, 6))
    assert [(entry["step"], entry["training"]) for entry in recorder.history] == [(0, True), (3, True), (6, False)]
    model(torch.randn(10, 6))
    assert len(recorder.history) == 3


def test_shared_activation_is_listed_once_per_call():
    model = nn.Sequential(nn.Linear(6, 20), act := nn.Tanh(), nn.Linear(20, 20), act)
    with record(model) as recorder:
        model(torch.randn(5, 6))
    layers = recorder.history[0]["layers"]
    assert [layer["path"] for layer in layers] == ["0", "1", "2", "1"]
    assert layers[1]["isometry"] != layers[3]["isometry"]


def test_calls_that_belong_to_no_forward_pass_are_not_measured():
    model = Model(lambda model, x: checkpoint(model.layer, x, use_reentrant=False), layer=nn.Linear(6, 20))
    with record(model) as recorder:
        model(torch.randn(5, 6)).sum().backward()  # which calls the layer again
        model.layer(torch.randn(5, 6))
        with pytest.raises(RuntimeError, match="shapes"):
            model(torch.randn(5, 7))
        model.layer(torch.randn(5, 6))
    assert [len(entry["layers"]) for entry in recorder.history] == [1, 0]


WANTED = "wanted are floating-point numbers (..., n, features)"


def test_outputs_without_samples_are_named():
    def odd(model, x):
        model.index(torch.arange(4).view(2, 2))
        return model.flat(model.recurrent(x)[0])

    model = Model(odd, recurrent=nn.LSTM(6, 8), flat=nn.Flatten(0), index=nn.Identity())
    with record(model) as recorder:
        model(torch.randn(3, 5, 6))
    assert recorder.history[0]["layers"] == []
    assert recorder.left_out == {
        "recurrent": f"its samples are a tuple of 2; {WANTED}",
        "flat": f"its samples are a torch.float64 tensor of shape (120,); {WANTED}",
        "index": f"its samples are a torch.int64 tensor of shape (2, 2); {WANTED}",
    }


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_padded_sequences_that_torch_nests_are_named_and_passed_on():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1).eval()
    x, padding = torch.randn(2, 5, 8), torch.arange(5) >= torch.tensor([[3], [5]])
    with torch.no_grad():
        wanted = model(x, src_key_padding_mask=padding)
        with record(model) as recorder:
            found = model(x, src_key_padding_mask=padding)
    torch.testing.assert_close(found, wanted, rtol=0, atol=EXACT)
    assert recorder.left_out["layers.0.norm2"] == f"its samples are a nested tensor; {WANTED}"
    # With gradients there is nothing nested.
    with record(model) as recorder:
        model(x, src_key_padding_mask=padding)
    assert "layers.0.norm2" in [layer["path"] for layer in recorder.history[0]["layers"]]


def test_layers_can_be_chosen_containers_too():
    model = nn.Sequential(network(), nn.Tanh())
    assert list(recorded(model, torch.randn(5, 6), layers=["0.4", "0", "1"])) == ["0.4", "0", "1"]


def test_parametrized_layer_is_a_layer_and_its_parametrization_is_none():
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 20)), nn.Tanh())
    assert list(recorded(model, torch.randn(5, 6))) == ["0", "1"]


def test_copies_and_pickles_of_a_watched_model_record_for_themselves():
    model, x = network(), torch.randn(5, 6)
    recorder = record(model)
    model(x)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        twin(x)
        assert len(recorder.history) == 1
    divergence(model, F.cross_entropy, x, torch.randint(3, (5,)))
    assert len(recorder.history) == 1
    model(x)
    assert len(recorder.history) == 2


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_compiled_model_is_measured_alike():
    model, x = nn.Sequential(nn.Linear(6, 20), nn.Tanh()), torch.randn(5, 6)
    wanted = recorded(model, x)
    with record(model) as recorder:
        torch.compile(model, backend="eager")(x)
    torch._dynamo.reset()
    for layer in recorder.history[0]["layers"]:
        assert layer["isometry"] == pytest.approx(wanted[layer["path"]]["isometry"], rel=EXACT)
    assert len(recorder.history[0]["layers"]) == 2


def test_rows_that_are_no_samples_leave_the_layer_out():
    """As a pooler's (B, d) beside the (B, T, d) of the layers below it, flattened alike."""
    for rows, told in ((torch.flatten, "torch.float64 tensor of shape (15,)"), (lambda z: [z], "list of 1")):
        with record(layer := nn.Linear(6, 5), rows=rows) as recorder:
            layer(torch.randn(3, 6))
        assert recorder.history[0]["layers"] == []
        assert recorder.left_out[""] == f"its samples are a {told}; {WANTED}"


def test_training_is_the_same_bit_for_bit():
    runs = []
    for watched in (False, True):
        torch.manual_seed(3)
        model = network()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        keys = [set(vars(module)) for module in model.modules()]
        recorder = record(model, every=2) if watched else None
        for _ in range(3):
            x, y = batch()
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        if recorder:
            recorder.remove()
        assert [set(vars(module)) for module in model.modules()] == keys
        runs.append(everything(model, optimizer)[0])
    assert same(*runs)


def test_loggers_get_the_last_measurement_flat():
    model = network()
    with record(model) as recorder:
        assert recorder.metrics() == {}
        for scale in (1.0, 2.0):
            model(scale * batch()[0])
    calls = recorder.history[-1]["layers"]
    assert recorder.metrics() == {
        f"isometry/{call['path']}/{key}": call[key] for call in calls for key in ("samples", "isometry", "gap")
    }
    assert all(type(value) is float for value in recorder.metrics().values())


def test_mistakes_are_refused_at_once_and_leave_no_hooks():
    model = network()
    for options, error, message in (
        ({"every": 0}, ValueError, "every is 0; it must be an integer of at least 1"),
        ({"max_samples": 0}, ValueError, "max_samples is 0"),
        ({"layers": ["7"]}, ValueError, r"layers names '7', .*; its modules are '', '0', '1'"),
        ({"layers": "0"}, TypeError, r"pass a list of paths: layers=\['0'\]"),
    ):
        with pytest.raises(error, match=message):
            record(model, **options)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
