"""PyTorch's database of modules: a correction touches the gradients of corrected parameters, and no other number."""

import copy
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from adiv_optim import BatchIdeal, Correction, Disproportional, Proportional, attach, coverage
from tests.helpers import torch_database
from tests.helpers.covering import paired
from tests.helpers.seeds import manual_seed

pytestmark = [  # torch's own, of modules that its database builds
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning"),
]
#: What has layers to correct inside.
AFFINE = ["Linear", *(f"{kind}{dims}d" for kind in ("Conv", "LazyConv") for dims in (1, 2, 3))]
AFFINE += ["TransformerEncoderLayer", "TransformerEncoder"]
CORRECTIONS = {"proportional": Proportional(), "disproportional": Disproportional(), "batch-ideal": BatchIdeal()}


def samples(name: str, dtype: torch.dtype) -> Iterator[tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]:
    """Every module that the database builds, with what it is called with."""
    info = torch_database.modules()[name]
    for entry in info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=True, training=True):
        arguments = entry.constructor_input
        module = info.module_cls(*arguments.args, **arguments.kwargs).to(dtype)
        call = entry.forward_input
        if info.is_lazy:
            module(*call.args, **call.kwargs)
        yield module, call.args, call.kwargs


def numbers(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Outputs and gradients of inputs; gradients of parameters."""
    manual_seed(0)
    args, kwargs = tree_map(
        lambda leaf: leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf,
        (args, kwargs),
    )
    outputs = [leaf for leaf in tree_leaves(module(*args, **kwargs)) if isinstance(leaf, Tensor)]
    differentiable = [output for output in outputs if output.requires_grad]
    if differentiable:
        torch.autograd.backward(differentiable, [torch.randn_like(output) for output in differentiable])
    inputs = [leaf.grad for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.grad is not None]
    return outputs + inputs, {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def attached(module: nn.Module, correction: Correction) -> nn.Module:
    """A copy with the correction on what it has to correct."""
    copied = copy.deepcopy(module)
    # Beside it something to correct, or attach would refuse where there is nothing.
    attach(nn.ModuleList([copied, nn.Linear(1, 1)]), correction)
    return copied


def assert_identical(found: Any, wanted: Any) -> None:
    """Bit for bit; NaN, which some losses of the database are, is NaN."""
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


def assert_only_corrected_gradients_differ(name: str, correction: Correction, most: int | None = None) -> set[str]:
    """In everything the database does with a module; the parameters that the correction was for."""
    corrected: set[str] = set()
    for module, args, kwargs in islice(samples(name, torch.float32), most):
        outputs, plain = numbers(copy.deepcopy(module), args, kwargs)
        changed = attached(module, correction)
        found, gradients = numbers(changed, args, kwargs)
        assert_identical(found, outputs)
        covered = coverage(changed)
        assert not covered.never_seen
        assert_identical(*({k: v for k, v in g.items() if k not in covered.treated} for g in (gradients, plain)))
        assert all(not torch.equal(gradients[k], plain[k]) for k in covered.treated if plain[k].any())
        corrected.update(covered.treated)
    return corrected


@paired("name correction", {name: name for name in (*AFFINE, "MultiheadAttention")}, CORRECTIONS)
def test_outputs_and_input_gradients_are_untouched(correction, name):
    corrected = assert_only_corrected_gradients_differ(name, correction)
    assert any(parameter.endswith("weight") for parameter in corrected) == (name in AFFINE)


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's own, of what its database does
def test_everything_else_is_untouched():
    for name in torch_database.modules().keys() - {*AFFINE}:
        corrected = assert_only_corrected_gradients_differ(name, Proportional(), most=8)
        assert bool(corrected) == name.startswith("Transformer"), name


@paired(
    "name correction",
    {name: name for name in ("TransformerEncoderLayer", "TransformerEncoder", "Linear", "Conv2d")},
    CORRECTIONS,
)
def test_evaluation_is_untouched_on_torchs_fast_path_too(correction, name):
    for module, args, kwargs in samples(name, torch.float64):
        changed = attached(module, correction).eval()
        with torch.no_grad():
            assert_identical(changed(*args, **kwargs), module.eval()(*args, **kwargs))
