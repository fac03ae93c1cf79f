"""The arguments that attention logits are made of, checked."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .._linalg.limits import broadcasts
from ..functional.shared import check_real

#: The parameters that logits have, in the order in which functions take them.
PARAMETERS = ("q_weight", "k_weight", "q_bias", "k_bias")


@dataclass(frozen=True)
class Projections:
    """X, the parameters that make queries and keys of it, and how these meet; `logits` says more."""

    input: Tensor
    q_weight: Tensor
    k_weight: Tensor
    q_bias: Tensor | None
    k_bias: Tensor | None
    num_heads: int
    scale: float | None
    mask: Tensor | None

    def __post_init__(self) -> None:
        check_real("attention", self.input)
        if self.input.dim() not in (2, 3):
            raise ValueError(
                f"attention: input of shape {tuple(self.input.shape)} has {self.input.dim()} dimensions; it must have "
                "3, (sequences, tokens, features), or 2 for one sequence."
            )
        features = self.input.shape[-1]
        for name, weight in (("q_weight", self.q_weight), ("k_weight", self.k_weight)):
            if weight.dim() != 2 or weight.shape[1] != features:
                raise ValueError(
                    f"attention: {name} of shape {tuple(weight.shape)} does not take the {features} features of "
                    f"the input; it must have shape (num_heads · head_dim, {features})."
                )
        if self.q_weight.shape != self.k_weight.shape:
            raise ValueError(
                f"attention: q_weight has shape {tuple(self.q_weight.shape)}, k_weight {tuple(self.k_weight.shape)}; "
                "queries and keys must have one shape."
            )
        rows = self.q_weight.shape[0]
        if self.num_heads < 1 or rows % self.num_heads or not rows:
            raise ValueError(
                f"attention: num_heads is {self.num_heads}, which does not divide the {rows} rows of q_weight; choose "
                "one that does."
            )
        for name, bias in (("q_bias", self.q_bias), ("k_bias", self.k_bias)):
            if bias is not None and bias.shape != (rows,):
                raise ValueError(
                    f"attention: {name} has shape {tuple(bias.shape)}; it must be {(rows,)}, a number for each row of "
                    "the weight."
                )
        if self.mask is not None and self.mask.dtype != torch.bool:
            raise TypeError(
                f"attention: mask is {self.mask.dtype}; it must be torch.bool, True where a token may attend (an "
                "additive mask m is m == 0)."
            )
        if self.mask is not None and not broadcasts(self.mask.shape, self.shape):
            raise ValueError(
                f"attention: mask of shape {tuple(self.mask.shape)} does not broadcast to the logits' {self.shape}."
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the logits."""
        return (*self.input.shape[:-2], self.num_heads, self.input.shape[-2], self.input.shape[-2])

    @property
    def factor(self) -> float:
        """The scale s, 1/√head_dim where none is given."""
        return (self.q_weight.shape[0] // self.num_heads) ** -0.5 if self.scale is None else self.scale

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The weights, and the biases there are."""
        found = {name: getattr(self, name) for name in PARAMETERS}
        return {name: parameter for name, parameter in found.items() if parameter is not None}

    def projected(self) -> tuple[Tensor, Tensor]:
        """Queries and keys, each of shape (…, heads, tokens, head_dim)."""
        queries = split_heads(F.linear(self.input, self.q_weight, self.q_bias), self.num_heads)
        return queries, split_heads(F.linear(self.input, self.k_weight, self.k_bias), self.num_heads)


def split_heads(projected: Tensor, num_heads: int) -> Tensor:
    """Bring (…, tokens, heads · head_dim) to (…, heads, tokens, head_dim)."""
    return projected.unflatten(-1, (num_heads, -1)).transpose(-3, -2)


def scaled_products(queries: Tensor, keys: Tensor, scale: float, mask: Tensor | None = None) -> Tensor:
    """Return s QKᵀ, with -inf where a token may not attend."""
    found = (queries @ keys.mT) * scale
    return found if mask is None else found.masked_fill(~mask, -torch.inf)
