"""Optimizers that step where the inputs of every layer are white: their idea of a step, measured by activations."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .._linalg import host
from .._linalg.limits import check_count, check_positive, given
from .._linalg.roots import Factor, Whole, inverse_root, low_rank_inverse_root
from .._linalg.shards import DataParallelGroup, add_up_row_shards, cut_of
from ..attach.checks import Skip
from .by_inputs import ByInputs
from .covariance_method import CovarianceMethod, RightMultiplication
from .input_hooks import LayerInputs
from .second_moments import Covariance, SketchedCovariance
from .snapshot import Snapshot, Transform


@dataclass(eq=False, kw_only=True)
class WhiteningMethod(CovarianceMethod):
    """Lets an optimizer step where the inputs of a model's layers are white; see `Whitened` for the arguments."""

    verb: ClassVar[str] = "whitened"
    shaping: ClassVar[Sequence[str]] = ("max_dim", "rank")

    graft_norm: bool
    rank: int | None

    def __post_init__(self) -> None:
        super().__post_init__()
        #: Whether anybody reads `metrics`; and by layer the cosine and the output step that they show.
        self.asked, self.seen = False, dict[str, Tensor]()

    def moments(self, module: nn.Module, with_bias: bool) -> Covariance:
        whole = super().moments(module, with_bias)
        if self.rank is None or self.rank >= min(whole.sizes):
            return whole
        return SketchedCovariance(module, with_bias, self.max_dim, self.max_rows, self.rank)

    def measure(self, layer: LayerInputs) -> list[Factor]:
        """Return the inverse root of every block of (A + λI) / its mean eigenvalue, or A + λI without `graft_norm`."""
        moments: Any = layer.moments
        scale, ridge = self._units(layer)
        ridge, condition = ridge / scale, moments.size / self.damping + 1
        if isinstance(moments, SketchedCovariance):
            return [
                low_rank_inverse_root(
                    trace / scale, spectrum._replace(values=spectrum.values / scale[..., None]), ridge
                )
                for trace, spectrum in moments.spectra(layer.memory, layer.rows)
            ]
        scaled = (block.div_(scale[..., None, None]) for block in moments.mean(layer.memory, layer.rows))
        return [Whole(inverse_root(block, ridge, condition)) for block in scaled]

    def _units(self, layer: LayerInputs) -> tuple[Tensor, Tensor]:
        """What A + λI is divided by, and λ; of each group."""
        moments: Any = layer.moments
        average = moments.average(layer.memory, layer.rows)
        level = torch.where(average > 0, average, 1.0)  # a layer that has seen zeros alone keeps its own variables
        return average + self.damping * level if self.graft_norm else torch.ones_like(level), self.damping * level

    def transform(self, layers: Sequence[LayerInputs], factors: Sequence[Factor]) -> Transform:
        return RightMultiplication(layers, factors, graft_norm=self.graft_norm, watched=self.asked and self.due())

    def rescale(self, snapshots: Sequence[Snapshot]) -> None:
        """Give every layer's step the norm that it had before it was mapped back, for all layers at once."""
        pairs: list[Any] = [(snapshot, snapshot.transform) for snapshot in snapshots]
        if self.graft_norm:
            self._graft(pairs)
        for snapshot, t in pairs:
            if t.watched:
                self._note(t, t.products.new_ones(()) if snapshot.ratio is None else host.double(snapshot.ratio))

    def _note(self, t: RightMultiplication, ratio: Tensor) -> None:
        """What `metrics` is to show of a step, but of layers that an earlier A than the present one maps."""
        for layer, (own, both, mapped), factor in zip(
            t.layers, t.products, ratio.flatten().expand(t.count), strict=True
        ):
            if not self.failures[layer.name]:
                scale, ridge = map(host.double, self._units(layer))
                # Δ~ (A + λI) Δ~ᵀ is Δ~' Δ~'ᵀ but for the scale.
                moved = factor * (scale * own - ridge * mapped).clamp_min(0).sum().sqrt()
                lengths = (own.sum() * mapped.sum()).sqrt()
                self.seen[layer.name] = torch.stack([torch.where(lengths > 0, both.sum() / lengths, 1.0), moved])

    def _graft(self, pairs: list[Any]) -> None:
        sharded = {id(t.parameters[0]): t.norms[0].double().square_() for _, t in pairs if cut_of(t.parameters[0])}
        add_up_row_shards(self.layers, sharded, 2)
        for _, t in pairs:
            if (squares := sharded.get(id(t.parameters[0]))) is not None:
                t.norms = squares.sqrt().to(t.norms)[None]
        for kind in {(t.norms.device, t.norms.dtype) for _, t in pairs}:
            same = [(snapshot, t) for snapshot, t in pairs if (t.norms.device, t.norms.dtype) == kind]
            before, after = torch.cat([t.norms for _, t in same]).unbind(-1)
            ratios = torch.where(after > 0, before / after, 1.0)  # 1 where there was no step
            for (snapshot, t), ratio in zip(same, ratios.split([t.count for _, t in same]), strict=True):
                snapshot.ratio = ratio[:, None, None] if t.copies else ratio

    def metrics(self) -> dict[str, float]:
        """Return what was measured last, and, once this has been called, what steps that measure do to each layer.

        That is the cosine between the step as the optimizer took it and as it is mapped back, and the RMS of what it
        adds to the outputs, over the rows that A is made of; of a sharded weight the rows held here alone count.
        A layer whose A could not be factorised once shows neither from then on.
        """
        self.asked, found = True, super().metrics()
        shown = self.measured.keys() & self.seen.keys() - self.failures.keys()
        names = [layer.name for layer in self.layers if layer.name in shown]
        every = [self.seen[name].tolist() for name in names]
        for name, (cosine, moved) in zip(names, every, strict=True):
            found |= {f"{name}/step_cosine": cosine, f"{name}/output_step": moved}
        if every:
            cosines, steps = zip(*every, strict=True)
            found |= {"smallest_step_cosine": min(cosines), "largest_output_step": max(steps)}
        return found


class Whitened(ByInputs):
    r"""Let any optimizer step in variables in which the inputs of every layer are white.

    With A the running mean of :math:`\tilde x \tilde x^\top` over the rows x~ = (x, 1) that a layer reads,
    W~ = [W, b] and λ = damping × A's mean eigenvalue, the optimizer sees

    .. math:: \tilde W' = \tilde W (A + \lambda I)^{1/2}, \qquad \tilde G' = \tilde G (A + \lambda I)^{-1/2}

    and its step ΔW~' is added to the weights as :math:`\Delta\tilde W' (A + \lambda I)^{-1/2}`. Measured there, the
    length of a step is what it does to the activations. Plain SGD becomes :math:`\tilde G (A + \lambda I)^{-1}`, the
    step of `BatchIdeal`; every other optimizer takes its own idea of a good step. (FOOF,
    Benzing 2022, and K-FAC's input factor are the case of SGD.)

    Goes on nn.Linear, nn.Conv1d/2d/3d and the Conv1D of transformers whose weights the optimizer holds: rows are
    samples, tokens or patches; groups of a convolution each have an A. A layer of any other class with a `weight` of
    shape (out_features, in_features) says what that multiplies by a method `input_rows(input)`, which returns rows
    (…, in_features). All else takes the plain step, as `coverage` says. A layer's weight and bias go together: where
    one has no gradient, or alone has a learning rate of 0, both take the plain step.

    A is gathered in forward passes with gradients enabled, without keeping activations, and only before the steps that
    measure: one in `every`, at places that no period keeps to, and powers of two at first. Micro-batches add up, and so
    do the processes of torch.distributed. Rows count once a backward pass has gone by their call to the weight, if
    step() comes before zero_grad(); a zero_grad(set_to_none=False) of the model's own is not noticed. In graphs of
    torch.compile, transforms of torch.func and forward-mode AD no backward is seen: rows count as they are read, unless
    zero_grad() follows and no gradient after it, so evaluate under torch.no_grad() there. Build the optimizer from the
    sharded model, and before a compiled model's first call, which would not see the hooks.

    Where no root is found, in float64 either, the layer keeps the last one, or takes the plain step. That is counted in
    `coverage` and `metrics`, and warned of once.

    Conversion: with every=1, decay=0 and graft_norm=False, Whitened(SGD) at `damping` takes the step of `GradientOnly`
    with `BatchIdeal(damping × rows / columns)`, columns counting the bias.

    Args:
        optimizer: any torch.optim.Optimizer but LBFGS that reads only p and p.grad.
        model: the model.
        damping: λ in units of A's mean eigenvalue; "Which call" of the documentation has that of each task. Large
            values give the optimizer as it is.
        decay: how much the average of earlier measurements counts at each new one; 0 is the present batch alone.
        every: one step in so many measures.
        graft_norm: use A + λI divided by its mean eigenvalue, and give each layer's mapped step the Frobenius norm that
            the optimizer gave it, so that learning rates stay near the optimizer's. A decoupled weight decay is no part
            of that step.
        rank: tell only this many leading eigenvectors of A apart, and let the others share the mean of their
            eigenvalues; None is the whole of A.
        max_dim: wider layers keep diagonal blocks of at most this size of A; None is no limit.
        max_rows: at most so many rows of a forward pass count, spread over it; None is all. Of a convolution whole
            samples are left out.
        process_group: the processes over which A is added up: those that train the same layers on other rows, one
            stage's of a pipeline. A ProcessGroup, or a DeviceMesh of one dimension (mesh["data"]); None is the default
            group.
        skip: paths of modules and module types to leave alone, as for `attach`.

    Raises:
        TypeError: not an optimizer, or LBFGS.
        ValueError: nothing to whiten, another wrapper that maps weights inside, a setting out of its range, parameters
            without a shape yet, or sharded otherwise than by rows.

    Example:
        >>> import torch
        >>> from adiv_optim import Whitened
        >>> model, x = torch.nn.Linear(2, 1, bias=False), torch.tensor([[1.0, 0.0], [0.0, 10.0]])
        >>> opt = Whitened(torch.optim.SGD(model.parameters(), lr=0.5), model, damping=1e-6, graft_norm=False)
        >>> before = model(x)
        >>> before.sum().backward()  # both outputs' gradients are 1 …
        >>> opt.step()
        >>> (model(x) - before).flatten().detach().round(decimals=2)  # … and both move by -lr × 1 × 2 rows
        tensor([-1., -1.])
    """

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        *,
        damping: float = 1.0,
        decay: float = 0.9,
        every: int = 10,
        graft_norm: bool = True,
        rank: int | None = None,
        max_dim: int | None = 1024,
        max_rows: int | None = None,
        process_group: Any = None,
        skip: Skip = (),
    ) -> None:
        check_positive("Whitened", damping=damping)
        check_count("Whitened", **given(rank=rank, max_dim=max_dim, max_rows=max_rows))
        method = WhiteningMethod(
            damping=damping, decay=decay, every=every, graft_norm=graft_norm, rank=rank, max_dim=max_dim,
            max_rows=max_rows, process_group=DataParallelGroup("Whitened", process_group), skip=skip,
        )  # fmt: skip
        super().__init__(optimizer, model, method)
