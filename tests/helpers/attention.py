"""Calls of attention logits, with their Jacobians and least squares written out."""

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.func import jacrev

from adiv_optim.attention import (
    AttentionIdeal,
    logits,
)

EXACT = 1e-8  # float64; conjugate gradients and Gram matrices square the condition

CONVERGED = {"tolerance": None, "max_iterations": 5000}

NAMES = ("q_weight", "k_weight", "q_bias", "k_bias")


@dataclass(frozen=True)
class Case:
    """One call: sequences (0: none, a single one without its dimension), tokens, features, heads, head_dim."""

    sequences: int = 0
    tokens: int = 4
    features: int = 6
    heads: int = 2
    head_dim: int = 3
    bias: bool = True
    causal: bool = False

    def make(self, seed: int = 0) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """X, the parameters and g."""
        generator = torch.Generator().manual_seed(seed)

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        leading = (self.sequences,) if self.sequences else ()
        rows = self.heads * self.head_dim
        parameters = {name: randn(rows, self.features) / self.features**0.5 for name in NAMES[:2]}
        if self.bias:
            parameters |= {name: randn(rows) for name in NAMES[2:]}
        input = randn(*leading, self.tokens, self.features)
        return input, parameters, self.masked(randn(*leading, self.heads, self.tokens, self.tokens))

    @property
    def mask(self) -> Tensor | None:
        return torch.ones(self.tokens, self.tokens).tril().bool() if self.causal else None

    def masked(self, found: Tensor) -> Tensor:
        return found if self.mask is None else found.masked_fill(~self.mask, 0)

    def plain(self, input: Tensor, parameters: dict[str, Tensor]) -> Tensor:
        """The logits as a formula of their own, zero where masked."""
        q = input @ parameters["q_weight"].mT + parameters.get("q_bias", 0)
        k = input @ parameters["k_weight"].mT + parameters.get("k_bias", 0)
        q, k = (t.unflatten(-1, (self.heads, self.head_dim)) for t in (q, k))
        return self.masked(torch.einsum("...ihf,...jhf->...hij", q, k) / math.sqrt(self.head_dim))

    def jacobian(self, input: Tensor, parameters: dict[str, Tensor], head: int) -> Tensor:
        """Explicit derivative of one head's logits by every number of its parameters."""
        rows = slice(head * self.head_dim, (head + 1) * self.head_dim)

        def of_head(own: dict[str, Tensor]) -> Tensor:
            joined = {name: torch.cat([p[: rows.start], own[name], p[rows.stop :]]) for name, p in parameters.items()}
            return self.plain(input, joined).select(-3, head).flatten()

        found = jacrev(of_head)({name: p[rows] for name, p in parameters.items()})
        return torch.cat([found[name].flatten(1) for name in parameters], 1)

    def by_lstsq(self, input: Tensor, parameters: dict[str, Tensor], g: Tensor, damping: float) -> dict[str, Tensor]:
        """argmin |Jθ − g|² + λ|θ|² of least norm from the explicit Jacobian, head by head."""
        found: dict[str, list[Tensor]] = {name: [] for name in parameters}
        for head in range(self.heads):
            j = self.jacobian(input, parameters, head)
            right = g.select(-3, head).flatten()
            count = int(self.masked(torch.ones_like(g)).select(-3, head).sum())
            ridge = damping * j.square().sum() / count
            stacked = torch.cat([j, ridge.sqrt() * torch.eye(j.shape[1])])
            wanted = torch.cat([right, torch.zeros(j.shape[1])])
            solution = torch.linalg.lstsq(stacked, wanted[:, None], driver="gelsd").solution[:, 0]
            sizes = [self.head_dim * p[0].numel() for p in parameters.values()]
            for (name, p), part in zip(parameters.items(), solution.split(sizes), strict=True):
                found[name].append(part.view(self.head_dim, *p.shape[1:]))
        return {name: torch.cat(parts) for name, parts in found.items()}

    def step(self, input: Tensor, parameters: dict[str, Tensor], g: Tensor, rule: AttentionIdeal) -> dict[str, Tensor]:
        """What a backward leaves in the parameters."""
        leaves = {name: p.clone().requires_grad_() for name, p in parameters.items()}
        found = logits(input, **leaves, num_heads=self.heads, correction=rule, mask=self.mask)
        return dict(zip(leaves, torch.autograd.grad(found, list(leaves.values()), g), strict=True))


REACHABLE = {
    "sixteen-tokens": Case(tokens=16, features=64, heads=4, head_dim=16),
    "no-bias": Case(tokens=16, features=64, heads=4, head_dim=16, bias=False),
    "one-sequence-of-a-batch": Case(sequences=1, tokens=3, features=5, heads=2, head_dim=4),
}

UNREACHABLE = {
    "head-dim-8": Case(tokens=16, features=20, heads=2, head_dim=8),
    "head-dim-below-tokens": Case(tokens=5, features=8, heads=2, head_dim=2),
    "three-sequences": Case(sequences=3),
    "three-sequences-no-bias": Case(sequences=3, bias=False),
    "causal": Case(tokens=5, head_dim=2, causal=True),
    "causal-batch": Case(sequences=2, tokens=5, head_dim=2, causal=True),
    "more-tokens-than-features": Case(tokens=7, features=3, head_dim=8),
}

each_case = pytest.mark.parametrize("case", (REACHABLE | UNREACHABLE).values(), ids=REACHABLE | UNREACHABLE)


def flat(parameters: dict[str, Tensor]) -> Tensor:
    return torch.cat([parameters[name].flatten() for name in sorted(parameters)])
