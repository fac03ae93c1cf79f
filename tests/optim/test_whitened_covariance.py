"""What Whitened gathers of its layers' inputs, and which layers it treats."""

import copy
import gc
import pickle
from functools import partial

import pytest
import torch
from torch import nn

from adiv_optim import InputScaled, Preconditioned, Whitened
from adiv_optim.optim import covariance
from tests.helpers.cases import relative_error
from tests.helpers.remembered import covariance_of, memory, rows_counted
from tests.helpers.steps import backward, inputs, network, sgd, stepped

pytestmark = pytest.mark.usefixtures("in_float64")


def test_copies_of_the_model_and_forgotten_optimizers_gather_nothing():
    model = network()
    optimizer = Whitened(sgd(model), model)
    stepped(model, optimizer, inputs(0))
    average = copy.deepcopy(model)
    average(inputs(0)).sum().backward()
    stepped(model, optimizer, inputs(1))
    assert rows_counted(optimizer) == {"0.weight": 0.9 * 8 + 8, "2.weight": 0.9 * 8 + 8}  # of the model's two passes
    assert len(pickle.dumps(model)) < len(pickle.dumps(network())) + 2000
    assert sum(len(m._forward_hooks) for m in model) == 2
    del optimizer
    gc.collect()
    assert not any(m._forward_hooks for m in model)


def test_a_measurement_has_old_and_new_averages_of_one_layer_at_a_time(monkeypatch):
    model, alive, eigh = nn.Sequential(*(nn.Linear(70, 70) for _ in range(4))), list[int](), torch.linalg.eigh

    def counting(matrix):
        tensors = [each for each in gc.get_objects() if type(each) is torch.Tensor]
        alive.append(len({each.data_ptr() for each in tensors if each.shape[-2:] == matrix.shape[-2:]}))
        return eigh(matrix)

    monkeypatch.setattr(torch.linalg, "eigh", counting)
    optimizer = Whitened(sgd(model), model, every=1)
    for seed in range(2):
        stepped(model, optimizer, torch.randn(8, 70, generator=torch.Generator().manual_seed(seed)))
    # Of each layer the average, its root, and the sums that are to count; of one the new average, twice on its way.
    assert max(alive) == 4 * 3 + 3


def test_attention_is_left_alone_and_said_so():
    model = nn.TransformerEncoderLayer(8, 2, 4, batch_first=True)
    with pytest.warns(
        UserWarning,
        match="treats less than half of the elements .* MultiheadAttention is not a layer whose rows are known",
    ):
        found = Whitened(sgd(model), model).coverage()
    assert found.skipped["self_attn.out_proj.weight"] == "MultiheadAttention uses it without calling the layer"
    assert found.skipped["self_attn.in_proj_weight"] == "MultiheadAttention is not a layer whose rows are known"
    assert found.never_seen["linear1.weight"] == "nothing measured yet, 9 columns"


@pytest.mark.parametrize(
    ("build", "shape"),
    [
        (lambda: nn.Linear(5, 3, bias=False), (2, 4, 5)),
        (lambda: nn.Conv2d(4, 6, 3, 2, 2, 2, groups=2), (2, 4, 9, 9)),
    ],
    ids=["no bias", "groups"],
)
def test_an_a_of_no_more_eigenvalues_than_the_rank_gives_the_whole_step(build, shape):
    def step(few=True, **options):
        torch.manual_seed(0)
        layer, x = build(), torch.randn(shape)
        # Two samples of the same everywhere make few patches.
        x = x[:2].mean(dim=tuple(range(2, x.dim())), keepdim=True).expand_as(x[:2]) if few else x
        optimizer = Whitened(torch.optim.AdamW(layer.parameters(), lr=0.1), layer, every=1, **options)
        start = layer.weight.detach().clone()
        backward(layer, x)
        optimizer.step()
        return layer.weight.detach() - start

    size = build().weight[0].numel() + (build().bias is not None)
    assert relative_error(step(rank=size), step()) <= 1e-9
    assert relative_error(step(rank=size - 1), step()) <= 1e-9
    assert relative_error(step(few=False, rank=1), step(few=False)) > 1e-3


def test_shared_frozen_and_other_weights():
    """One weight in two linear layers, one in an embedding and a linear layer, one frozen, one parametrized."""
    model = nn.ModuleDict({name: nn.Linear(4, 4, bias=False) for name in ("first", "second")})
    model["second"].weight = model["first"].weight
    model["embed"], model["head"] = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
    model["head"].weight = model["embed"].weight
    model["frozen"] = nn.Linear(4, 4)
    model["frozen"].weight.requires_grad_(False)
    model["normed"] = torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    with pytest.warns(UserWarning, match="treats less than half"):
        found = Whitened(sgd(model), model).coverage()
    assert found.never_seen == {"first.weight": "nothing measured yet, 4 columns"}
    assert found.skipped == {
        "embed.weight": "Embedding is not a layer whose rows are known",
        "frozen.bias": "a bias without its weight",
        "frozen.weight": "frozen",
        "normed.bias": "parametrized",
        "normed.parametrizations.weight.original0": "parametrized",
        "normed.parametrizations.weight.original1": "parametrized",
    }


def test_calls_that_fail_count_no_row_and_others_what_the_layer_was_given():
    model, x = nn.Linear(4, 3, bias=False), torch.randn(7, 4)
    optimizer = Whitened(sgd(model), model, graft_norm=False)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.randn(7, 5))
    model.register_forward_pre_hook(lambda layer, args: (2 * args[0],))
    backward(model, x)
    optimizer.step()
    assert relative_error(covariance_of(optimizer, model), 4 * x.T @ x / 7) <= 1e-12


@pytest.mark.parametrize("rank", [None, 3])
def test_a_model_that_is_converted_goes_on_with_what_was_measured(rank):
    model = nn.Sequential(nn.Conv1d(4, 6, 3, groups=2), nn.Flatten(), nn.Linear(12, 3))
    steps = [torch.randn(9, 4, 4) for _ in range(5)]
    converted = copy.deepcopy(model).float()
    for part, dtype in ((converted, torch.float32), (model, torch.float64)):
        optimizer = Whitened(sgd(part), part, rank=rank)
        stepped(part, optimizer, *(x.to(dtype) for x in steps[:3]))
        stepped(part.double(), optimizer, *steps[3:])  # between two measurements, and one more
    for p, q in zip(converted.parameters(), model.parameters(), strict=True):
        assert relative_error(p, q) <= 1e-4


@pytest.mark.parametrize("kind", ["sparse", "nested"])
def test_rows_of_sparse_and_nested_inputs_are_counted(kind):
    x = torch.randn(9, 4)
    made = {"sparse": x.to_sparse, "nested": lambda: torch.nested.nested_tensor(list(x.split(3)), layout=torch.jagged)}
    model = nn.Linear(4, 2, bias=False)
    optimizer = Whitened(sgd(model), model, graft_norm=False)
    output = model(made[kind]())
    (output.values() if output.is_nested else output).sum().backward()
    optimizer.step()
    assert relative_error(covariance_of(optimizer, model), x.T @ x / 9) <= 1e-12


@pytest.mark.parametrize("wrapper", [Whitened, partial(Whitened, rank=4), Preconditioned, InputScaled])
def test_metrics_have_counts_and_the_size_of_inputs(wrapper):
    layer = nn.Linear(5, 3, bias=False)
    optimizer = wrapper(sgd(layer), layer)
    name, shares = type(optimizer).__name__, ["treated_parameters", "treated_elements"]
    assert [*optimizer.metrics()] == [f"{name}/{e}" for e in (*shares, "layers_measured", "failed_factorisations")]
    x = torch.tensor([[3.0, 0, 0, 0, 0], [0, 2, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 0, 1, 1]])
    layer(x).sum().backward()
    optimizer.step()
    found = optimizer.metrics()
    assert (found[f"{name}/layers_measured"], found[f"{name}/failed_factorisations"]) == (1, 0)
    assert found[f"{name}/weight/input_rms"] == pytest.approx((16 / 4 / 5) ** 0.5)


@pytest.mark.parametrize("by_hand", [False, True])
def test_sums_by_lines_are_those_of_unfolded_patches(by_hand, monkeypatch):
    sums = []
    for pays in (True, False):
        monkeypatch.setattr(covariance, "is_cheaper_by_lines", lambda patches, pays=pays: pays)
        torch.manual_seed(0)
        layer, x, derivatives = nn.Conv2d(2, 3, 3), torch.randn(4, 2, 8, 8), torch.randn(4, 2, 8, 8)
        optimizer = Whitened(torch.optim.SGD(layer.parameters(), lr=0.1), layer)
        if by_hand:
            optimizer.count_rows(layer, derivatives)
        layer(x).square().sum().backward()
        optimizer.step()
        sums.append(memory(optimizer))
    assert all(relative_error(*pair) <= 1e-12 for pair in zip(*sums, strict=True))


@pytest.mark.parametrize(
    "wrapper", [Whitened, partial(Whitened, rank=4), Preconditioned], ids=["all", "rank", "inverse"]
)
def test_a_step_at_a_tiny_damping_is_not_made_of_rounding(wrapper):
    """A has 8 eigenvalues above 0, of 257: float32's others are rounding, which 1e-8 would let through."""
    x, steps = torch.rand(8, 256, generator=torch.Generator().manual_seed(0)), []
    for dtype in (torch.float32, torch.float64):
        torch.manual_seed(0)
        layer = nn.Linear(256, 4).to(dtype)
        before, optimizer = layer.weight.detach().clone(), wrapper(sgd(layer), layer, damping=1e-8)
        layer(x.to(dtype)).square().sum().backward()
        optimizer.step()
        steps.append((layer.weight.detach() - before).double())
    assert relative_error(*steps) < 0.1  # 1.3 without the least damping
