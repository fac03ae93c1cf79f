"""The derivative of attention logits by the parameters of their projections, known by what it does to vectors."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

#: The parameters that logits have, in the order in which functions take them.
PARAMETERS = ("q_weight", "k_weight", "q_bias", "k_bias")


@dataclass(frozen=True)
class LogitMap:
    r"""J, by which a change of the query and key projections moves the logits to first order.

    With :math:`\tilde X = [X, 1]`, :math:`Q = \tilde X \tilde W_q^\top`, :math:`K = \tilde X \tilde W_k^\top` and
    :math:`Y = s\, Q K^\top` (Bird 2025, Eq. 57, with biases and a scale),

    .. math:: J\theta = s\,(\tilde X\, \delta\tilde W_q^\top K^\top + Q\, \delta\tilde W_k \tilde X^\top), \qquad
              J^\top u = s\,\bigl((uK)^\top \tilde X,\; (u^\top Q)^\top \tilde X\bigr).

    Heads share no parameters and are separate problems. Sequences that share the parameters are one problem;
    sequences with parameters of their own are several. What is not trained has no column in :math:`\tilde X`.

    Args:
        rows: X, shape (problems, sequences, tokens, features).
        queries: Q, shape (problems, heads, sequences, tokens, head_dim).
        keys: K, likewise.
        scale: s.
        mask: True where a logit counts, and None if all do; shape that of the logits.
        trained: names out of `PARAMETERS`.
    """

    rows: Tensor
    queries: Tensor
    keys: Tensor
    scale: float
    mask: Tensor | None
    trained: frozenset[str]

    def columns(self, side: str) -> Tensor:
        """X~ of the query ("q") or key ("k") side, shape (problems, sequences · tokens, columns)."""
        return self._columns[side]

    @cached_property
    def _columns(self) -> dict[str, Tensor]:
        rows = self.rows.flatten(1, 2)
        ones = rows.new_ones(*rows.shape[:-1], 1)
        return {
            side: torch.cat([rows] * (f"{side}_weight" in self.trained) + [ones] * (f"{side}_bias" in self.trained), -1)
            for side in self.sides
        }

    @property
    def sides(self) -> list[str]:
        """Those of "q" and "k" that have a trained parameter."""
        return [side for side in "qk" if {f"{side}_weight", f"{side}_bias"} & self.trained]

    def forward(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Jθ, shape (problems, heads, sequences, tokens, tokens).

        Args:
            parts: θ by side, shape (problems, heads, head_dim, columns).
        """
        moved = [
            self._project("q", parts["q"]) @ self.keys.mT
            if side == "q"
            else self.queries @ self._project("k", parts["k"]).mT
            for side in self.sides
        ]
        return self.masked(self.scale * (moved[0] + moved[1] if len(moved) == 2 else moved[0]))

    def adjoint(self, logits: Tensor) -> dict[str, Tensor]:
        """Jᵀu: the plain gradient of every trained parameter, if u is that of the logits."""
        logits = self.scale * self.masked(logits)
        return {
            side: self._contract(side, logits @ self.keys if side == "q" else logits.mT @ self.queries)
            for side in self.sides
        }

    def masked(self, logits: Tensor) -> Tensor:
        """Zero what does not count, NaN included."""
        return logits if self.mask is None else logits.masked_fill(~self.mask, 0.0)

    def _project(self, side: str, part: Tensor) -> Tensor:
        # All heads in one product: broadcasting X over them would copy it.
        projected = self.columns(side) @ part.flatten(1, 2).mT
        return projected.unflatten(-1, part.shape[1:3]).unflatten(1, self.rows.shape[1:3]).permute(0, 3, 1, 2, 4)

    def _contract(self, side: str, grad: Tensor) -> Tensor:
        flat = grad.permute(0, 1, 4, 2, 3).flatten(3)
        return (flat.flatten(1, 2) @ self.columns(side)).unflatten(1, flat.shape[1:3])

    def mean_eigenvalue(self) -> Tensor:
        r"""tr(JJᵀ) over the number of logits that count, shape (problems, heads).

        The diagonal of JJᵀ is :math:`s^2 (|\tilde x_i|^2 |k_j|^2 + |q_i|^2 |\tilde x_j|^2)` at logit (i, j).
        """
        total = torch.zeros((), dtype=self.rows.dtype, device=self.rows.device)
        for side in self.sides:
            norms = self.columns(side).square().sum(-1).unflatten(1, self.rows.shape[1:3]).unsqueeze(1)
            if side == "q":
                total = total + norms.unsqueeze(-1) * self.keys.square().sum(-1).unsqueeze(-2)
            else:
                total = total + self.queries.square().sum(-1).unsqueeze(-1) * norms.unsqueeze(-2)
        trace = self.scale**2 * self.masked(total).flatten(2).sum(-1)
        count = total[0, 0].numel() if self.mask is None else self.mask.expand_as(total).flatten(2).sum(-1).clamp(min=1)
        return trace / count

    def gradients(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Turn θ into parameter gradients in torch's layout, summed over problems: (heads · head_dim, features)."""
        found = {}
        for side, part in parts.items():
            summed = part.sum(0).flatten(0, 1)
            if f"{side}_weight" in self.trained:
                found[f"{side}_weight"] = summed[:, : self.rows.shape[-1]]
            if f"{side}_bias" in self.trained:
                found[f"{side}_bias"] = summed[:, -1]
        return {name: found[name] for name in PARAMETERS if name in found}

    def parts(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Undo `gradients`, for one problem."""
        heads, head_dim = self.queries.shape[1], self.queries.shape[-1]
        parts = {}
        for side in self.sides:
            blocks = [gradients[f"{side}_weight"]] if f"{side}_weight" in self.trained else []
            blocks += [gradients[f"{side}_bias"].unsqueeze(-1)] if f"{side}_bias" in self.trained else []
            parts[side] = torch.cat(blocks, -1).to(self.rows.dtype).unflatten(0, (heads, head_dim)).unsqueeze(0)
        return parts


def arrange(logits: Tensor, joint: bool) -> Tensor:
    """(sequences, heads, …) → (problems, heads, sequences, …): one problem of all sequences, or one of each."""
    return logits.transpose(0, 1).unsqueeze(0) if joint else logits.unsqueeze(2)


def disarrange(logits: Tensor, joint: bool) -> Tensor:
    """Undo `arrange`."""
    return logits.squeeze(0).transpose(0, 1) if joint else logits.squeeze(2)
