"""The leading eigenvectors of the running covariance of a layer's inputs, followed without the covariance."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .._linalg.roots import Spectrum, followed
from ..functional.linears import gram_of
from .checkpoint import numbers
from .covariance import InputCovariance, Limits
from .followers import Following, Readers


class LeadingCovariance(InputCovariance):
    r"""The leading eigenvectors U of A and their eigenvalues Λ, by one step of subspace iteration a measurement.

    .. math:: S = \tilde X^\top (\tilde X U) + \mathrm{decay} \cdot U \Lambda, \qquad
              U' \Lambda' U'^\top \approx S (U^\top S)^{-1} S^\top

    and A's trace is kept beside them: 4 n d rank multiplications for n rows, and d rank numbers, where A itself takes
    n d² and d². What earlier rows had outside of U counts in the trace alone.

    Args:
        name: as for `InputSums`, and the next two.
        modules: layers.
        with_bias: whether the bias is treated with the weight.
        limits: of what is kept.
        rank: how many eigenvectors of each block, fewer than it has columns.
        readers: shared by layers that may follow each other.
    """

    def __init__(
        self, name: str, modules: list[nn.Module], with_bias: bool, limits: Limits, rank: int, readers: Readers
    ) -> None:
        self.rank = rank
        super().__init__(name, modules, with_bias, limits, readers)

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        #: U of every block, (groups, d, rank); at first orthonormal columns by chance, the same on all processes.
        self.bases: list[Tensor] = []
        for size in self.sizes:
            drawn = torch.randn(
                size, self.rank, generator=torch.Generator().manual_seed(0), dtype=torch.float64, device="cpu"
            )
            basis = torch.linalg.qr(drawn).Q.to(self.weight.device, self.dtype)
            self.bases.append(basis.repeat(self.groups, 1, 1))  # a checkpoint is loaded into it in place

    @property
    def shapes_here(self) -> list[tuple[int, ...]]:
        """S, then the trace, of each block."""
        return [shape for basis in self.bases for shape in (tuple(basis.shape), (self.groups,))]

    def sums_here(self, rows: Tensor, one: int) -> list[Tensor]:
        """X~ᵀ(X~U) and |X~|² of each block."""
        found: list[Tensor] = []
        for number, (block, basis) in enumerate(zip(self.blocks, self.bases, strict=True)):
            x, u = self.of_groups(rows[..., block]), self.of_groups(basis.to(rows))
            inside, square = x @ u[..., : x.shape[-1], :], torch.linalg.vector_norm(x, dim=(-2, -1)).square()
            if biased := self.with_bias and number == len(self.blocks) - 1:
                inside += one * u[..., -1:, :]
                square += one * x.shape[-2]
            parts = [gram_of([inside], [x]).mT, *[one * inside.sum(-2, keepdim=True)] * biased]
            found += [torch.cat(parts, -2).view(basis.shape), square.view(self.groups)]
        return found

    def traces(self, kept: list[Tensor]) -> list[Tensor]:
        """The traces, which are among the sums."""
        return kept[1 : 2 * len(self.blocks) : 2]

    def absorb(self, decay: float) -> None:
        """Add the sums since the last measurement to S, and find the next eigenvectors.

        Raises:
            NoRootError: they could not be found; S and the trace have been updated.
        """
        super().absorb(decay)
        assert self.total is not None
        found = [
            followed(self.of_groups(sketch), self.of_groups(basis.to(sketch)), self.of_groups(trace) / basis.shape[-2])
            for sketch, basis, trace in zip(self.total[::2], self.bases, self.traces(self.total), strict=False)
        ]
        for number, (values, vectors) in enumerate(found):
            self.bases[number] = vectors.view(self.shapes_here[2 * number])
            self.total[2 * number] = self.bases[number] * values.view(self.groups, 1, self.rank)

    def memory(self) -> list[Tensor]:
        """All tensors that are kept from step to step."""
        return [*super().memory(), *self.bases]

    def take(self, first: Following) -> None:
        """Remember what the layer that was followed does."""
        super().take(first)
        assert isinstance(first, LeadingCovariance)
        self.bases = list(first.bases)

    def spectra(self) -> list[tuple[Tensor, Spectrum]]:
        """The trace of every block of A, for each group, and its leading eigenvalues and eigenvectors."""
        total = self.total or []
        return [
            (
                self.of_groups(trace) / self.rows,
                # Not by the norm of UΛ: squares of large inputs' squares would leave float32's range.
                Spectrum(self.of_groups((basis * sketch).sum(-2)) / self.rows, self.of_groups(basis)),
            )
            for sketch, basis, trace in zip(total[::2], self.bases, self.traces(total), strict=False)
        ]

    def state_dict(self) -> dict[str, Any]:
        """Return the memory."""
        return {**super().state_dict(), "bases": list(self.bases)}

    def wanted(self) -> dict[str, Any]:
        """What `state_dict` holds."""
        return {**super().wanted(), "bases": [numbers(tuple(basis.shape)) for basis in self.bases]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the memory from a checkpoint."""
        super().load_state_dict(state)
        self.bases = [basis.to(self.weight.device, self.dtype) for basis in state["bases"]]
