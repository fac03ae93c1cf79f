"""The linear layer: rows × features, the canonical shape every correction is stated in."""

import inspect
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from .._checks import describe
from .._device import wide_dtype, without_autocast
from ..corrections import Correction, Solve, check_correction
from .patches import cross_gram
from .shared import apply_function, cast_by_autocast, check_input, may_train, once_only, squared_norm


class _Linear(Function):
    """One layer, whose weight has two dimensions; or a stack of layers: every tensor has one leading dimension more."""

    @staticmethod
    def forward(input: Tensor, weight: Tensor, bias: Tensor | None, correction: Correction, label: str) -> Tensor:
        if weight.dim() == 2:
            output = F.linear(input, weight, bias)
            if input.dim() == 2:
                return output
        else:
            rows = _as_rows(input, is_stack=True)
            output = rows @ weight.mT if bias is None else torch.baddbmm(bias.unsqueeze(1), rows, weight.mT)
        # No view, which autograd would not let an activation change in place.
        return torch.ops.aten._unsafe_view(output, [*input.shape[:-1], weight.shape[-2]])

    @staticmethod
    def setup_context(ctx, inputs, output):
        input, weight, _, ctx.correction, ctx.label = inputs
        ctx.is_stack = weight.dim() == 3
        # As in torch, a weight that is not kept may be stepped on before the backward pass of another loss.
        ctx.save_for_backward(input, weight if ctx.needs_input_grad[0] else None)

    @staticmethod
    def backward(ctx, grad_output):
        grad_output, input, weight = once_only(grad_output, *ctx.saved_tensors)
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        gradients, grad_input, shape = {}, None, input.shape
        input, grad_output = _as_rows(input, ctx.is_stack), _as_rows(grad_output, ctx.is_stack)
        # The parameters come first: their temporaries are freed before grad_input is allocated. In float32 those of
        # rules by row are no larger than grad_input, so the peak of memory stays that of the plain backward.
        if needs_weight or needs_bias:
            rows = LinearRows(input, grad_output, needs_weight, needs_bias, ctx.label)
            with without_autocast(input.device.type):
                gradients = rows.corrected_by(ctx.correction)
        if needs_input:
            grad_input = _input_gradient(input, grad_output, weight)
            grad_input = grad_input if input.shape == shape else grad_input.view(shape)
        return grad_input, gradients.get("weight"), gradients.get("bias"), None, None

    @staticmethod
    def vmap(info, in_dims, input, weight, bias, correction, label):
        # generate_vmap_rule would do, but makes a class at every call and loops in Python through functorch:
        # on an ensemble of small networks that cost more than the networks.
        if in_dims[1] is None and in_dims[2] is None and weight.dim() == 2:  # one layer, more rows
            return _Linear.apply(input.movedim(in_dims[0], 0), weight, bias, correction, label), 0

        def as_stack(tensor, dim):
            if tensor is None:
                return None
            return tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)

        input, weight, bias = map(as_stack, (input, weight, bias), in_dims)
        if weight.dim() == 4:  # a stack of stacks is a longer stack
            longer = (None if tensor is None else tensor.flatten(0, 1) for tensor in (input, weight, bias))
            return _Linear.apply(*longer, correction, label).unflatten(0, (info.batch_size, -1)), 0
        return _Linear.apply(input, weight, bias, correction, label), 0


# torch asks for the signature at every call; to look it up each time costs a small layer more than its products.
_Linear.forward.__signature__ = inspect.signature(_Linear.forward)  # type: ignore[attr-defined]


def _as_rows(tensor: Tensor, is_stack: bool) -> Tensor:
    """Reshape (…, features) to (rows, features); in a stack (layers, …, features) to (layers, rows, features)."""
    row_dim = int(is_stack)
    if tensor.dim() == row_dim + 2:
        return tensor
    # Not by flatten, which has no rule for the batches of gradients of autograd.functional.
    shape = (*tensor.shape[:row_dim], math.prod(tensor.shape[row_dim:-1]), tensor.shape[-1])
    return tensor.reshape(shape) if tensor.dim() > row_dim + 1 else tensor.unsqueeze(row_dim)


def _input_gradient(rows: Tensor, grad_rows: Tensor, weight: Tensor) -> Tensor:
    """Return G W, rounded as torch rounds it: where X lies column by column, it multiplies the transposes."""
    # Compiled code rounds in its own way.
    column_major = rows.stride(0) == 1 and rows.stride(1) == len(rows) and not torch.compiler.is_compiling()
    return (weight.mT @ grad_rows.mT).mT if column_major else grad_rows @ weight


class TrainedParameters:
    """Rows that know which of weight and bias is trained: a frozen one has no factor and no gradient."""

    needs_weight: bool
    needs_bias: bool

    def corrected_by(self: Any, correction: Correction) -> dict[str, Tensor]:
        """Return the gradients by a correction; a ValueError if it leaves out a parameter that is trained."""
        gradients = correction.gradients(self)
        trained = {name for name in ("weight", "bias") if getattr(self, f"needs_{name}")}
        if not isinstance(gradients, Mapping) or gradients.keys() != trained:
            name = f"{self.label}: {type(correction).__name__}.gradients"
            raise ValueError(f"{name} returned {describe(gradients)}; it must have those of {sorted(trained)}.")
        return gradients

    def with_ones(self, weight: Tensor) -> dict[str, Tensor]:
        """Return a number of each row for the weight, and 1 for the bias."""
        factors = {"weight": weight} if self.needs_weight else {}
        return {**factors, "bias": torch.ones_like(weight)} if self.needs_bias else factors

    def has_few_rows(self, count: int, features: int) -> bool:
        """Whether there are no more rows than columns of X~ = [X, 1]: K is then no larger than X~ᵀX~."""
        return count <= features * self.needs_weight + self.needs_bias

    def split(self, solution: Tensor) -> dict[str, Tensor]:
        """Return the gradients of weight and bias that (…, in_features + 1, out_features) joins."""
        gradients = {"weight": (solution[..., :-1, :] if self.needs_bias else solution).mT} if self.needs_weight else {}
        return {**gradients, "bias": solution[..., -1, :]} if self.needs_bias else gradients


@dataclass(frozen=True)
class LinearRows(TrainedParameters):
    """The rows X of a linear layer and the gradients G of its outputs, which a correction contracts into gradients."""

    rows: Tensor
    grad_rows: Tensor
    needs_weight: bool
    needs_bias: bool
    label: str = "linear"

    @property
    def count(self) -> int:
        """How many rows there are."""
        return self.rows.shape[-2]

    def factors(self) -> dict[str, Tensor]:
        """Return |x_k|² for the weight, 1 for the bias."""
        return self.with_ones(squared_norm(self.rows, -1))

    def contract(self, scales: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return grad_W = (s ⊙ G)ᵀX = Gᵀ(s ⊙ X), whichever of X and G is narrower being scaled; grad_b = Gᵀs."""
        rows, grad_rows = self.rows, self.grad_rows
        gradients = {}
        if self.needs_weight:
            scale = scales["weight"].unsqueeze(-1)
            if rows.dtype == torch.float16:
                gradients["weight"] = _contract_float16(rows, grad_rows, scale)
            elif rows.shape[-1] < grad_rows.shape[-1]:
                gradients["weight"] = grad_rows.mT @ _rescale(rows, scale)
            else:
                gradients["weight"] = _rescale(grad_rows, scale).mT @ rows
        if self.needs_bias:
            scale = scales["bias"].unsqueeze(-1)
            gradients["bias"] = (grad_rows.mT.to(scale.dtype) @ scale).squeeze(-1).to(grad_rows.dtype)
        return gradients

    def ideal(self, solve: Solve) -> dict[str, Tensor]:
        """Return X~ᵀ(K + λI)⁻¹G if there are no more rows than columns of X~, else (X~ᵀX~ + λI)⁻¹X~ᵀG."""
        dtype = wide_dtype(self.rows)
        wide = replace(self, rows=self.rows.to(dtype), grad_rows=self.grad_rows.to(dtype))
        few = self.has_few_rows(self.count, self.rows.shape[-1])
        solved = wide.sample_side(solve) if few else wide.feature_side(solve)
        return {name: gradient.to(self.rows.dtype) for name, gradient in solved.items()}

    def sample_side(self, solve: Solve) -> dict[str, Tensor]:
        """Return X~ᵀ(K + λI)⁻¹G."""
        columns = self.columns()
        kernel = reduce(torch.add, (block @ block.mT for block in columns))
        return self.split(cross_gram(columns, [solve(kernel, self.grad_rows, self.count)]))

    def feature_side(self, solve: Solve) -> dict[str, Tensor]:
        """Return (X~ᵀX~ + λI)⁻¹X~ᵀG."""
        columns = self.columns()
        return self.split(solve(cross_gram(columns, columns), cross_gram(columns, [self.grad_rows]), self.count))

    def columns(self) -> list[Tensor]:
        """Return X~ = [X, 1] as blocks of columns, without the block of a frozen parameter."""
        ones = self.rows.new_ones(*self.rows.shape[:-1], 1)
        return [self.rows] * self.needs_weight + [ones] * self.needs_bias


def summed(terms: Iterable[dict[Any, Tensor]]) -> dict[Any, Tensor]:
    """Add up one or more dicts of tensors, key by key."""
    return reduce(lambda totals, term: {key: totals[key] + part for key, part in term.items()}, terms)


def _rescale(tensor: Tensor, scale: Tensor) -> Tensor:
    """Return tensor × scale, multiplied in the wider of the two dtypes and rounded once to the tensor's own."""
    return (tensor * scale).to(tensor.dtype)


def _contract_float16(rows: Tensor, grad_rows: Tensor, scale: Tensor) -> Tensor:
    """Return Gᵀ(s ⊙ X), as far as float16 can hold it; in float32 it would cost the tensor cores."""
    # s g may pass 65504, where float16 ends, though s g xᵀ does not; so s multiplies x: x / (|x|² + 1) stays below 1.
    # Where an entry of x is in the thousands, s times the others nearly vanishes: a power of 2 divides them, and
    # multiplies the product.
    if not rows.numel():
        return grad_rows.mT @ rows
    largest = torch.linalg.vector_norm(rows, math.inf, dim=-1, keepdim=True, dtype=scale.dtype)
    top = (scale * largest).amax(-2, keepdim=True)
    power = torch.where((top > 0) & top.isfinite(), top, 1).log2().floor().exp2()
    return (grad_rows.mT @ _rescale(rows, scale / power)).mul_(power)


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None, correction: Correction | None = None) -> Tensor:
    r"""torch.nn.functional.linear whose parameter gradients follow a correction.

    Forward :math:`z = W x + b` and input gradient :math:`g W` are torch's, bit for bit. The parameters receive
    :math:`\sum_k s_{W,k}\, g_k x_k^\top` and :math:`\sum_k s_{b,k}\, g_k` (Bird 2025, Eqs. 20 and 21) with the
    correction's scales s of the rows k; `BatchIdeal` solves for all rows instead. A frozen parameter, which does not
    move the output, has no factor. Norms and scales are float32 at least. Compiling *around* vmap runs it eagerly.

    Args:
        input: shape (..., in_features); every leading dimension counts rows.
        weight: shape (out_features, in_features).
        bias: shape (out_features,) or None.
        correction: the rule; None is torch's own function and nothing else.

    Returns:
        Shape (..., out_features).

    Raises:
        TypeError: the correction is no `Correction`, or the input is integer, complex, sparse or nested.
        ValueError: shapes do not fit; in the backward pass, those of the rule's scales.
        RuntimeError: it is differentiated twice.
        NotImplementedError: in forward mode.

    Example:
        >>> import torch
        >>> from adiv_optim import Proportional, functional
        >>> weight = torch.zeros(1, 2, requires_grad=True)
        >>> functional.linear(torch.tensor([[1.0, 1.0]]), weight, None, Proportional()).sum().backward()
        >>> weight.grad  # x / |x|²; the plain gradient is x
        tensor([[0.5000, 0.5000]])
    """
    if correction is None:
        return F.linear(input, weight, bias)
    return corrected_linear("linear", input, weight, bias, check_correction(correction))


def corrected_linear(label: str, input: Tensor, weight: Tensor, bias: Tensor | None, correction: Correction) -> Tensor:
    """Compute `linear` with a correction that has been checked; `label` opens its error messages."""
    check_input(label, input)
    fits = weight.dim() == 2 and input.shape[-1:] == weight.shape[1:]
    if not fits or (bias is not None and bias.shape != weight.shape[:1]):
        shapes = [None if part is None else tuple(part.shape) for part in (input, weight, bias)]
        raise ValueError(
            f"{label}: input, weight and bias have shapes {', '.join(map(str, shapes))}; they must be "
            "(…, in_features), (out_features, in_features) and (out_features,) or None."
        )
    if not may_train(weight, bias):
        return F.linear(input, weight, bias)
    return apply_function(_Linear, *cast_by_autocast(input, weight, bias), correction, label=label)
