"""The coordinates in which the inputs of layers are white, and the way there and back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .._linalg.roots import Factor, Spectrum, Whole, inverse_root, low_rank_inverse_root
from .._linalg.shards import local
from .chart import Known, Map
from .covariance import InputCovariance, WholeCovariance, blocks_of, sizes_of
from .covariance_chart import CovarianceChart
from .leading import LeadingCovariance


class Whitening(Map):
    r"""W~' = W~ R⁻¹ and G~' = G~ R for one weight, with its bias as a last column.

    Args:
        covariance: whose layer it is.
        inverse_roots: R of every block.
        graft_norm: give the mapped step the Frobenius norm that it had in the new coordinates.
    """

    def __init__(self, covariance: InputCovariance, inverse_roots: Sequence[Factor], graft_norm: bool) -> None:
        self.graft_norm, self.blocks, self.layout = graft_norm, covariance.blocks, covariance.layout
        self.dtype, self.parameters = covariance.dtype, covariance.parameters
        self.inverse_roots = inverse_roots
        #: The factor of the mapped step; where the weight is sharded, `partial` added up over processes.
        self.ratio: Tensor | None = None
        self.squares: Tensor | None = None

    def enter(self, weights: Sequence[Tensor], known: Known) -> None:
        """Write parameters and gradients in the new coordinates."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        mapped = right_multiply(self.inverse_roots, self.blocks, self._matrices(gradients))
        for parameter, gradient, new in zip(self.parameters, gradients, mapped, strict=True):
            parameter.grad = self.layout.gradient(new, gradient)
        if known.from_zero:
            return
        roots = [factor.inverse for factor in self.inverse_roots]
        there = right_multiply(roots, self.blocks, self._matrices(weights))
        for parameter, value in zip(self.parameters, there, strict=True):
            local(parameter).copy_(self.layout.part(value, parameter))
        # What the parameter holds is rounded to its own precision.
        exact = all(p.dtype == self.dtype for p in self.parameters)
        self.start = there if exact else [matrix.clone() for matrix in self._matrices(self.parameters)]

    def map_step(self, known: Known) -> None:
        """Let `negative` be minus the step mapped back, without decoupled decay."""
        moved = self._matrices(self.parameters)
        if not known.from_zero:
            # In memory that is no parameter's, since matrices may be laid out in another order. Where nothing has
            # changed the step is -0, as where the weights were -0.
            every = zip(moved, self.start, known.kept, strict=True)
            moved = [(start if factor == 1 else start.mul_(factor)).sub_(now).neg_() for now, start, factor in every]
            del self.start
        before = self._norms(moved)
        # Where that is the parameter's own memory, `leave` writes there next.
        self.negative = right_multiply(self.inverse_roots, self.blocks, moved, negate=True)
        #: Of weight and bias before, then after; 0 for a bias that there is not.
        self.norms = before + self._norms(self.negative)

    def _norms(self, parts: Sequence[Tensor]) -> list[Tensor]:
        norms = [torch.linalg.vector_norm(part) for part in parts if self.graft_norm]
        return [*norms, norms[0].new_zeros(())] if len(norms) == 1 else norms

    def partial(self, weights: Sequence[Tensor], known: Known) -> Tensor:
        """Return the squares of the step's norms, in the new coordinates and mapped back, over the rows held here."""
        self.squares = torch.stack(self.norms).double().square_().view(2, 2).sum(-1)
        return self.squares

    def leave(self, weights: Sequence[Tensor], known: Known) -> None:
        """Let the weights be what they were and the step that was taken, mapped back."""
        ratio = self.ratio if self.squares is None else _ratio(self.squares.sqrt()).to(self.dtype)
        for parameter, whole, factor, change in zip(self.parameters, weights, known.kept, self.negative, strict=True):
            # Where there was no step it is -0 from here on: w + (-0) is w for every w.
            step = change.neg_() if ratio is None else change.mul_(-ratio)
            torch.add(self.layout.part(step, parameter), local(whole), alpha=factor, out=local(parameter).detach())

    def _matrices(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return [self.layout.matrix(part, self.dtype) for part in parts]


def _give_ratios(maps: list[Whitening]) -> None:
    """Find what gives steps the norms again that they had before they were mapped, for all layers at once."""
    for kind in {(map_.negative[0].device, map_.dtype) for map_ in maps}:
        same = [map_ for map_ in maps if (map_.negative[0].device, map_.dtype) == kind]
        parts = torch.stack([norm for map_ in same for norm in map_.norms])
        ratios = _ratio(torch.linalg.vector_norm(parts.view(-1, 2, 2), dim=-1))
        for map_, ratio in zip(same, ratios.unbind(), strict=True):
            map_.ratio = ratio


def _ratio(norms: Tensor) -> Tensor:
    """The first of two norms over the second, shape (…, 2); 1 where there was no step."""
    before, after = norms.unbind(-1)
    return torch.where(after > 0, before / after, 1.0)


def right_multiply(
    factors: Sequence[Factor], blocks: Sequence[slice], parts: list[Tensor], negate: bool = False
) -> list[Tensor]:
    """[W, b] times a matrix, block by block; `negate` as for `Factor.right_multiply`."""
    weight, bias = parts if len(parts) == 2 else (parts[0], None)
    columns = [weight] if len(blocks) == 1 else [weight[..., block] for block in blocks]
    *products, (last, bias) = [
        factor.right_multiply(part, bias if number == len(factors) - 1 else None, negate)
        for number, (factor, part) in enumerate(zip(factors, columns, strict=True))
    ]
    whole = torch.cat([*(product for product, _ in products), last], -1) if products else last
    return [whole] if bias is None else [whole, bias]


def _saved_rank(state: Any, layer: InputCovariance) -> tuple[int | None, ...]:
    """The rank with which a layer was saved, as the only entry; none, if that cannot be told."""
    try:
        part = state["layers"][layer.name]
        if "bases" in part:
            return (int(part["bases"][0].shape[-1]),)
        return () if len(part["total"]) == len(layer.shapes) else (None,)
    except (TypeError, LookupError, AttributeError):
        return ()


@dataclass(eq=False, kw_only=True)
class WhiteChart(CovarianceChart[InputCovariance]):
    """Coordinates in which the inputs of the layers of a model are white; see `Whitened` for the arguments."""

    verb: ClassVar[str] = "whitened"

    graft_norm: bool
    root: str
    rank: int | None

    @property
    def partials(self) -> int:
        """Two norms of every layer."""
        return 2 if self.graft_norm else 0

    def settle(self, maps: Mapping[Map, tuple[Sequence[Tensor], Known]]) -> None:
        """Map all steps back, and find what gives them their norms again, for all layers at once."""
        whitenings = [map_ for map_ in maps if isinstance(map_, Whitening)]
        for map_ in whitenings:
            map_.map_step(maps[map_][1])
        if self.graft_norm:
            _give_ratios(whitenings)
        super().settle(maps)

    def sums(self, name: str, modules: list[nn.Module], with_bias: bool) -> InputCovariance:
        """Return the covariance to keep."""
        least = min(sizes_of(blocks_of(modules[0], with_bias, self.max_dim), with_bias))
        if self.rank is not None and self.rank < least:
            return LeadingCovariance(name, modules, with_bias, self.limits, self.rank, self.readers)
        return WholeCovariance(name, modules, with_bias, self.limits, self.readers)

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Refuse the state of other layers, or of another rank."""
        for layer in self.layers:
            own, saved = getattr(layer, "rank", None), _saved_rank(state, layer)
            if saved and saved != (own,):
                raise ValueError(
                    f"state_dict['chart']['layers'][{layer.name!r}] was saved with rank={saved[0]}, this has "
                    f"rank={own}; {self.remedy}."
                )
        super().check_state_dict(state)

    def measure(self, layer: InputCovariance) -> list[Factor]:
        """Return the inverse root of every block of (A + λI) / its mean eigenvalue, or A + λI without `graft_norm`."""
        average = layer.average()
        level = torch.where(average > 0, average, 1.0)  # a layer that has seen zeros alone keeps its own coordinates
        scale = average + self.damping * level if self.graft_norm else torch.ones_like(level)
        ridge, condition = self.damping * level / scale, layer.size / self.damping + 1
        if isinstance(layer, LeadingCovariance):
            return [
                low_rank_inverse_root(trace / scale, Spectrum(values / scale[..., None], vectors), ridge)
                for trace, (values, vectors) in layer.spectra()
            ]
        assert isinstance(layer, WholeCovariance)
        scaled = (block.div_(scale[..., None, None]) for block in layer.mean())
        return [Whole(inverse_root(block, ridge, self.root, condition)) for block in scaled]

    def map(self, layer: InputCovariance, measured: Sequence[Factor]) -> Map:
        """Return the layer's `Whitening`."""
        return Whitening(layer, measured, self.graft_norm)
