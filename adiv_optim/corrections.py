"""Rules that scale what each row of a layer's input adds to the gradients of the layer's parameters.

They are pure arithmetic on rows (samples, tokens or convolution patches): `adiv_optim.functional` and
`adiv_optim.jacobian` apply them.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from ._checks import check_not_negative, check_positive, describe

#: The least ridge of `BatchIdeal`, in units of machine precision × tr(K). Rows that repeat make K singular: rounding
#: stands in place of its zero eigenvalues. Cholesky adds at most (n + 1)/2 units (Higham 2002, Theorem 10.3; √n/2 if
#: roundings are independent), and the sum of K some twenty, for any number of rows. In those directions the solution is
#: off by rounding / ridge.
_LEAST_RIDGE = 100

#: Solves (gram + λI) X = right, given how many rows the Gram matrix was made of.
Solve = Callable[[Tensor, Tensor, float], Tensor]


class Rows(Protocol):
    """One call of a layer, as a correction sees it: rows to be weighed and summed, or solved for."""

    @property
    def label(self) -> str:
        """Where the rows are from, for error messages."""

    @property
    def count(self) -> int:
        """How many rows there are."""

    def factors(self) -> dict[str, Tensor]:
        """Return the divergence factor of every trained parameter; see `Correction.scales`."""

    def contract(self, scales: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return Σ_k s_k J_kᵀ g_k for every trained parameter."""

    def ideal(self, solve: Solve) -> dict[str, Tensor]:
        """Return Jᵀ(JJᵀ + λI)⁻¹g for every trained parameter, on whichever side is smaller."""


class Correction(ABC):
    r"""A rule that rescales the contribution of each row to each parameter's gradient.

    In a gradient step on the parameters :math:`p` of a layer row k's own gradient moves its output by
    :math:`-\eta\, g_k \sum_p f_{p,k}`; the ideal is :math:`-\eta g_k`. Here
    :math:`f_{p,k} = \mathrm{tr}(J_{p,k} J_{p,k}^\top) / m` is the *divergence factor* of parameter p
    (:math:`J_{p,k} = \partial z_k / \partial p`, m output features). For z = Wx + b these are :math:`|x_k|^2` for the
    weight and 1 for the bias (Bird 2025, Eq. 11); a row of a convolution is a patch. The corrected gradient of p is
    :math:`\sum_k s_{p,k}\, J_{p,k}^\top g_k`; a subclass defines s. One that solves for all rows together, as
    `BatchIdeal` does, overrides `gradients` and sets `additive` to False.

    `scales` never sees the output gradient, so loss scaling, gradient accumulation and data parallelism stay exact.
    Subclasses should be immutable, so that two layers may share one; a frozen dataclass is.
    """

    #: Whether the gradients of micro-batches add up to that of the whole batch.
    additive: ClassVar[bool] = True

    @abstractmethod
    def scales(self, factors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the scale s of every row, for every parameter that is trained.

        Args:
            factors: for each trained parameter its divergence factor, one number per row; all of one shape
                (rows may extend over several dimensions), float32 or float64. A frozen parameter does not
                move the output and is not listed.

        Returns:
            A mapping with the same keys and shapes. Two parameters that share a scale should share the
            tensor: in a convolution one rescaling then serves both.
        """

    def gradients(self, rows: Rows) -> dict[str, Tensor]:
        """Return the corrected gradient of every trained parameter from one call of a layer.

        Raises:
            ValueError: `scales` did not answer for the parameters it was given, each with a scale for every row.
        """
        factors = rows.factors()
        scales = self.scales(factors)
        _check_scales(f"{rows.label}: {type(self).__name__}.scales", scales, factors)
        return rows.contract(scales)


def _check_scales(name: str, scales: object, factors: Mapping[str, Tensor]) -> None:
    if not isinstance(scales, Mapping) or scales.keys() != factors.keys():
        raise ValueError(f"{name} returned {describe(scales)}; it was given, and must answer for, {sorted(factors)}.")
    for parameter, scale in scales.items():
        shape = factors[parameter].shape
        if not isinstance(scale, Tensor) or scale.shape != shape or not scale.is_floating_point():
            raise ValueError(
                f"{name} returned {describe(scale)} for {parameter!r}; it must be a floating-point tensor of shape "
                f"{tuple(shape)}, that of the factor: one scale for each row."
            )


@dataclass(frozen=True)
class _Clamped(Correction):
    eps: float = 1e-12

    def __post_init__(self) -> None:
        check_positive(type(self).__name__, eps=self.eps)

    def _reciprocal(self, total: Tensor) -> Tensor:
        # A row with x = 0 moves no weight whatever its scale; 0 keeps 1/eps, which may overflow, out. The
        # comparison is written so that a NaN factor stays NaN.
        return total.clamp(min=self.eps).reciprocal().masked_fill(total == 0, 0.0)


@dataclass(frozen=True)
class Proportional(_Clamped):
    r"""Give every row one scale, :math:`s_k = 1 / (|x_k|^2 + 1)`, for weight and bias alike.

    Bird 2025, Eq. 20: "gradient-only proportional". The proportion of weight and bias in the step stays as it was; the
    row's effect on its own output becomes exactly :math:`-\eta g_k`. Without a trained bias it is :math:`1 / |x_k|^2`.

    Args:
        eps: the total divergence factor is clamped from below at this value, which up to 1 only a layer without a
            trained bias can reach; rows of exact zeros add nothing there.

    Raises:
        ValueError: `eps` is not positive.

    Example:
        >>> import torch
        >>> Proportional().scales({"weight": torch.tensor([3.0, 0.0]), "bias": torch.ones(2)})["bias"]
        tensor([0.2500, 1.0000])
    """

    def scales(self, factors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return 1 / Σ_p f_p for every parameter; see `Correction.scales`."""
        return dict.fromkeys(factors, self._reciprocal(reduce(torch.add, factors.values())))


@dataclass(frozen=True)
class Disproportional(_Clamped):
    r"""Let weight and bias each make half of the ideal move :math:`-\eta g_k`: scales 1/(2|x_k|²) and 1/2.

    Bird 2025, Eq. 21: "gradient-only disproportional". Each of the layer's n trained parameters moves the
    row's output by :math:`-\eta g_k / n`, so :math:`s_{p,k} = 1 / (n f_{p,k})`, or without a trained bias
    :math:`1 / |x_k|^2`.

    Args:
        eps: each divergence factor is clamped from below at this value; a row with |x|² < eps gets
            less than its share. Rows of exact zeros add nothing to the weight.

    Raises:
        ValueError: `eps` is not positive.

    Example:
        >>> import torch
        >>> scales = Disproportional().scales({"weight": torch.tensor([4.0, 0.0]), "bias": torch.ones(2)})
        >>> scales["weight"], scales["bias"]
        (tensor([0.1250, 0.0000]), tensor([0.5000, 0.5000]))
    """

    def scales(self, factors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return 1 / (n f_p) for every parameter; see `Correction.scales`."""
        return {name: self._reciprocal(factor) / len(factors) for name, factor in factors.items()}


@dataclass(frozen=True)
class BatchIdeal(Correction):
    r"""Take the parameter step that is ideal for all rows of the batch at once.

    .. math:: \tilde G = \tilde X^\top (K + \lambda I)^{-1} G
              = (\tilde X^\top \tilde X + \lambda I)^{-1} \tilde X^\top G,
              \qquad \lambda = \max(\text{damping} / B, 100 \epsilon) \cdot \mathrm{tr}(K),

    with :math:`\tilde X = [X, 1]` (without a trained bias X), B × (features + 1), G the output gradients,
    B × outputs, :math:`K = \tilde X \tilde X^\top`, B rows and machine precision ε. A convolution has patches for rows,
    and a system for each group. Where the other corrections make each row's effect on its own output ideal, this
    removes its effect on the others as well: as λ → 0 every output moves by exactly :math:`-\eta g_k` if the rows of X̃
    are independent, and as near to it as least squares allows if not. It is always a descent direction. As damping → ∞
    it is the plain direction; a single row gets `Proportional` / (1 + damping). The system is solved by Cholesky on its
    smaller side, of min(B, features + 1) unknowns, once in each layer's backward pass, in float32 at least; the least λ
    is above the rounding of K. The operator is FOOF's (Benzing 2022) with the bias included.

    By default all that is multiplied by B (`per_sample`). A mean loss puts 1/B into every :math:`g_k`, which this
    cancels: with plain SGD an output then moves by about lr times its own loss gradient, at any batch size, and lr from
    0.1 to 1 works. Inputs that hold NaN or inf give gradients that do, never an error. Under `torch.vmap` over samples
    a linear layer solves for all of them, a convolution for each alone.

    Args:
        damping: the ridge, as a share of the mean squared row norm; at least 0. 0.3 to 1 works; less brings the step
            nearer to the ideal, and trains worse.
        per_sample: multiply by B. Set it to False where the loss is a sum over rows.

    Raises:
        ValueError: damping is negative or not finite.

    Example:
        >>> import torch
        >>> from adiv_optim import BatchIdeal, functional
        >>> x = torch.tensor([[1.0, 0.0], [1.0, 1.0]])  # two rows that are not orthogonal
        >>> weight = torch.zeros(1, 2, requires_grad=True)
        >>> rule = BatchIdeal(damping=0.0, per_sample=False)
        >>> functional.linear(x, weight, None, rule).backward(torch.tensor([[1.0], [3.0]]))
        >>> (x @ weight.grad.T).flatten().round(decimals=3)  # a step of -1 removes g itself from each output
        tensor([1., 3.])
    """

    damping: float = 1.0
    per_sample: bool = True

    additive: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_not_negative("BatchIdeal", damping=self.damping)

    def scales(self, factors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the scale of a row that is alone in its batch, 1 / ((1 + damping) Σ_p f_p)."""
        alone = Proportional().scales(factors)
        return {name: scale / (1 + self.damping) for name, scale in alone.items()}

    def gradients(self, rows: Rows) -> dict[str, Tensor]:
        """Return the ideal gradient of every trained parameter from one call of a layer."""
        if not self.per_sample:
            return rows.ideal(self.solve)
        # The solution is multiplied, not the gradient: in half precision that may have vanished already.
        return rows.ideal(lambda gram, right, count: self.solve(gram, right, count) * rows.count)

    def solve(self, gram: Tensor, right: Tensor, count: float) -> Tensor:
        """Solve (gram + λI) X = right, with λ = max(damping / count, 100ε) · tr(gram)."""
        factor = self.factor(gram, count)
        if right.shape[-1] < gram.shape[-1]:
            return torch.cholesky_solve(right, factor)
        # For many right-hand sides one matrix product with the inverse is several times faster than substitution.
        return torch.cholesky_inverse(factor) @ right

    def factor(self, gram: Tensor, count: float) -> Tensor:
        """Return the Cholesky factor of gram + λI; NaN where there is none. `gram` is overwritten."""
        precision = torch.finfo(gram.dtype)
        share = max(self.damping / max(count, 1), _LEAST_RIDGE * precision.eps)
        # Without a graph: a second derivative is to raise the layer's own error, not one about a write in place.
        with torch.no_grad():
            diagonal = gram.diagonal(dim1=-2, dim2=-1)
            trace = diagonal.sum(-1, keepdim=True)
            # Rows of zeros, or of squares that underflow, have a ridge of 1: any keeps them from dividing zero by zero.
            diagonal += (trace * share).clamp(min=precision.tiny).masked_fill_(trace < precision.tiny, 1.0)
            factor, failed = torch.linalg.cholesky_ex(gram)
            # A partial factor looks like numbers; the rest of a training loop knows how to meet NaN.
            return factor.masked_fill_(failed.bool()[..., None, None], math.nan)


def check_correction(correction: object) -> Correction:
    """Return `correction`, or raise a TypeError with the value found and the value wanted."""
    if isinstance(correction, Correction):
        return correction
    kind = type(correction).__name__
    if isinstance(correction, type):
        kind = f"the class {correction.__name__}: write {correction.__name__}()"
    raise TypeError(
        f"a correction must be an instance of adiv_optim.Correction, found {kind}; pass Proportional(), "
        "Disproportional(), BatchIdeal(), or an instance of your own subclass; attach takes the model first."
    )
