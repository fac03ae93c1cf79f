"""Optimizers that are given the gradient times the inverse covariance of every layer's inputs."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.linalg import LinAlgError
from torch.optim import Optimizer

from .. import _device
from .._checks import check_count, check_positive, without_none
from ..rows.models import Skip
from .by_inputs import count_rows, treatment
from .covariance import Covariance
from .mapped import Mapped
from .measurements import ChangeOfVariables
from .roots import RightFactor, Whole
from .watch import Watch
from .wrapper import OURS


def inverses(covariance: Covariance, damping: float) -> Sequence[RightFactor]:
    """Return (A + λI)⁻¹, block by block."""
    ridge = covariance.ridge(damping)
    return [Whole(damped_inverse(block, ridge)) for block in covariance.mean()]


def damped_inverse(matrix: Tensor, ridge: Tensor) -> Tensor:
    """Return (A + λI)⁻¹ of A, (…, d, d), and λ > 0, (…); or a LinAlgError."""
    # In units of λ, in float64: it may be far below the resolution of float32 beside A.
    ridge = _device.to_float64(ridge)[..., None, None]
    work = _device.to_float64(matrix) / ridge
    work.diagonal(dim1=-2, dim2=-1).add_(1)
    factor, failed = torch.linalg.cholesky_ex(work)
    inverse = (torch.cholesky_inverse(factor) / ridge).to(matrix)
    if not all(_device.read((failed == 0).all(), inverse.isfinite().all())):
        raise LinAlgError(f"no Cholesky factor found of a matrix of shape {tuple(matrix.shape)}")
    return inverse


class Preconditioned(Mapped):
    r"""Give any optimizer gradients that are preconditioned by the covariance of every layer's inputs.

    With A the running mean of :math:`\tilde x \tilde x^\top` over the rows x~ = (x, 1) that a layer reads and
    λ = damping × A's mean eigenvalue, the optimizer is given

    .. math:: \tilde G' = \tilde G (A + \lambda I)^{-1}, \qquad \tilde G = [G_W, g_b]

    and p.grad is the plain gradient again after the step. It is `BatchIdeal` with a memory: micro-batches and processes
    give exactly the step of the joined batch. Around plain SGD it is FOOF (Benzing 2022); around Muon it is Newton-Muon
    (arXiv 2604.01472), around AdamW DoPr (arXiv 2606.06418).

    Which layers are treated, when A is measured, and how micro-batches, processes, compilation and checkpoints behave,
    is as for `Whitened`. Gradient clipping before the step sees the plain gradient. An optimizer that keeps weights in
    its state may be wrapped. Where its step fails, gradients are restored, and weights are where it left them.
    With every=1, decay=0 and max_dim=None Preconditioned(SGD), as Whitened(SGD, graft_norm=False), takes the step of
    `GradientOnly` with `BatchIdeal(damping × rows / columns)`, columns counting the bias. Of several
    blocks, by `max_dim`, each moves the outputs as if it were alone: SGD may want a rate as many times smaller.

    Args:
        optimizer: any torch.optim.Optimizer but LBFGS.
        model: the model.
        damping, decay, every, max_dim, process_group, skip: as for `Whitened`.

    Raises:
        TypeError, ValueError: as `Whitened`.

    Example:
        >>> import torch
        >>> from adiv_optim import Preconditioned
        >>> model, x = torch.nn.Linear(2, 1, bias=False), torch.tensor([[1.0, 0.0], [0.0, 10.0]])
        >>> opt = Preconditioned(torch.optim.SGD(model.parameters(), lr=0.5), model, damping=1e-6)
        >>> before = model(x)
        >>> before.sum().backward()  # both outputs' gradients are 1 …
        >>> opt.step()
        >>> (model(x) - before).flatten().detach().round(decimals=2)  # … and both move by -lr × 1 × 2 rows
        tensor([-1., -1.])
    """

    count_rows = count_rows

    def __init__(
        self,
        optimizer: Optimizer,
        model: nn.Module,
        *,
        damping: float = 1.0,
        decay: float = 0.9,
        every: int = 10,
        max_dim: int | None = 1024,
        process_group: Any = None,
        skip: Skip = (),
    ) -> None:
        check_positive("Preconditioned", damping=damping)
        check_count("Preconditioned", **without_none(max_dim=max_dim))
        change = ChangeOfVariables(
            partial(Covariance, max_dim=max_dim),
            partial(inverses, damping=damping),
            partial(treatment, verb="preconditioned"),
            moves_weights=False,
        )
        watch = Watch(
            "Preconditioned", model, change, every=every, decay=decay, process_group=process_group, skip=skip,
            damping=damping, max_dim=max_dim,
        )  # fmt: skip
        watch.prefix = f"{OURS}preconditioned."  # the optimizer's averages are of other gradients than Whitened's
        super().__init__(optimizer, watch)
