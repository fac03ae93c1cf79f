"""The derivative of attention logits by the parameters of their projections, as products with vectors."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ._projections import PARAMETERS


@dataclass(frozen=True)
class LogitMap:
    r"""J, by which a change of the query and key projections moves the logits to first order.

    With :math:`\tilde X = [X, 1]`, :math:`Q = \tilde X \tilde W_q^\top`, :math:`K = \tilde X \tilde W_k^\top` and
    :math:`Y = s\, Q K^\top` (Bird 2025, Eq. 57, with biases and a scale),

    .. math:: J\theta = s\,(\tilde X\, \delta\tilde W_q^\top K^\top + Q\, \delta\tilde W_k \tilde X^\top), \qquad
              J^\top u = s\,\bigl((uK)^\top \tilde X,\; (u^\top Q)^\top \tilde X\bigr).

    The key side is the query side of the transposed logits, with Q in the place of K. Heads share no parameters and are
    separate problems, and so are sequences that are not joint. Vectors of logits have shape (problems, heads,
    sequences, tokens, tokens); θ is a dict by side, "q" and "k", of shape (problems, heads, head_dim, columns).
    """

    input: Tensor  # X, (sequences, tokens, features); like all below also without the first dimension
    queries: Tensor  # Q, (sequences, heads, tokens, head_dim)
    keys: Tensor  # K, likewise
    scale: float  # s
    mask: Tensor | None  # True where a logit counts, broadcastable to them; None if all do
    trained: frozenset[str]  # names out of `PARAMETERS`; any other has no column in X~
    joint: bool  # whether all sequences are one problem

    @cached_property
    def dtype(self) -> torch.dtype:
        """The precision that is computed in: float32 at least."""
        return torch.promote_types(torch.promote_types(self.input.dtype, self.queries.dtype), torch.float32)

    def arrange(self, tensor: Tensor) -> Tensor:
        """(sequences, heads, …) or (heads, …) → (problems, heads, sequences, …)."""
        tensor = tensor if tensor.dim() == 4 else tensor.unsqueeze(0)
        return tensor.transpose(0, 1).unsqueeze(0) if self.joint else tensor.unsqueeze(2)

    def vector(self, logits: Tensor) -> Tensor:
        """Logits as the methods below take them, zero where they do not count."""
        return self.masked(self.arrange(logits.to(self.dtype)))

    @cached_property
    def kept(self) -> Tensor | None:
        """The mask, shaped as the logits are."""
        shape = (*self.queries.shape[:-1], self.queries.shape[-2])
        return None if self.mask is None else self.arrange(self.mask.expand(shape))

    @cached_property
    def others(self) -> dict[str, Tensor]:
        """The other factor of each side: K of "q", Q of "k"."""
        return {"q": self.arrange(self.keys.to(self.dtype)), "k": self.arrange(self.queries.to(self.dtype))}

    @cached_property
    def columns(self) -> dict[str, Tensor]:
        """X~ of each side that has a trained parameter; (problems, sequences · tokens, columns)."""
        rows = self.input.to(self.dtype)
        rows = rows.flatten(0, -2) if self.joint else rows
        rows = rows if rows.dim() == 3 else rows.unsqueeze(0)
        ones = rows.new_ones(*rows.shape[:-1], 1)
        parts = {s: [rows] * (f"{s}_weight" in self.trained) + [ones] * (f"{s}_bias" in self.trained) for s in "qk"}
        return {side: torch.cat(found, -1) for side, found in parts.items() if found}

    def forward(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Jθ."""
        moved = []
        for side, columns in self.columns.items():
            # All heads in one product: broadcasting X over them would copy it.
            projected = (columns @ parts[side].flatten(1, 2).mT).unflatten(-1, parts[side].shape[1:3])
            projected = self.by_sequence(projected).permute(0, 3, 1, 2, 4)
            moved.append(turned(side, projected @ self.others[side].mT))
        return self.masked(self.scale * sum(moved[1:], moved[0]))

    def adjoint(self, logits: Tensor) -> dict[str, Tensor]:
        """Jᵀu: the plain gradient of every trained parameter, if u is that of the logits."""
        logits, found = self.scale * self.masked(logits), {}
        for side, columns in self.columns.items():
            flat = (turned(side, logits) @ self.others[side]).permute(0, 1, 4, 2, 3).flatten(3)
            found[side] = (flat.flatten(1, 2) @ columns).unflatten(1, flat.shape[1:3])
        return found

    def by_sequence(self, tensor: Tensor) -> Tensor:
        """(problems, sequences · tokens, …) → (problems, sequences, tokens, …)."""
        return tensor.unflatten(1, self.others["q"].shape[2:4])

    def masked(self, logits: Tensor) -> Tensor:
        """Zero the logits that do not count, NaN included."""
        return logits if self.kept is None else logits.masked_fill(~self.kept, 0.0)

    def mean_eigenvalue(self) -> Tensor:
        r"""tr(JJᵀ) over the number of logits that count, shape (problems, heads).

        The diagonal of JJᵀ is :math:`s^2 (|\tilde x_i|^2 |k_j|^2 + |q_i|^2 |\tilde x_j|^2)` at logit (i, j).
        """
        terms = []
        for side, columns in self.columns.items():
            norms = self.by_sequence(columns.square().sum(-1)).unsqueeze(1)
            terms.append(turned(side, norms.unsqueeze(-1) * self.others[side].square().sum(-1).unsqueeze(-2)))
        total = sum(terms[1:], terms[0])
        counted = self.masked(torch.ones_like(total)).flatten(2).sum(-1).clamp(min=1)
        return self.scale**2 * self.masked(total).flatten(2).sum(-1) / counted

    def gradients(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Turn θ into parameter gradients in torch's layout, summed over problems: (heads · head_dim, features)."""
        found: dict[str, Tensor] = {}
        for side, part in parts.items():
            summed = part.sum(0).flatten(0, 1)
            found |= {f"{side}_weight": summed[:, : self.input.shape[-1]], f"{side}_bias": summed[:, -1]}
        return {name: found[name] for name in PARAMETERS if name in self.trained}


def turned(side: str, logits: Tensor) -> Tensor:
    """The logits as this side sees them, its own tokens first."""
    return logits if side == "q" else logits.mT
