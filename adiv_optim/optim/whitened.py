"""The wrapper whose inner optimizer steps in coordinates where each layer's input covariance is the identity."""

from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from .._checks import check_count, check_positive, without_none
from ..rows.models import Skip
from .by_inputs import count_rows, treatment
from .covariance import Covariance
from .low_rank import covariance_of
from .mapped import Mapped
from .measurements import ChangeOfVariables
from .watch import Watch


class Whitened(Mapped):
    r"""Let any optimizer step in variables in which the inputs of every layer are white.

    With A the running mean of :math:`\tilde x \tilde x^\top` over the rows x~ = (x, 1) that a layer reads,
    W~ = [W, b] and λ = damping × A's mean eigenvalue, the optimizer sees

    .. math:: \tilde W' = \tilde W (A + \lambda I)^{1/2}, \qquad \tilde G' = \tilde G (A + \lambda I)^{-1/2}

    and its step ΔW~' is added to the weights as :math:`\Delta\tilde W' (A + \lambda I)^{-1/2}`. Measured there, the
    length of a step is its effect on the activations; `graft_norm`, the default, then rescales each layer's step to the
    norm that the optimizer gave it. Without it plain SGD takes the step of `Preconditioned`, which is that of FOOF
    (Benzing 2022) and of K-FAC's input factor.

    It treats nn.Linear, nn.Conv1d/2d/3d and the Conv1D of transformers whose weights the optimizer holds: rows are
    samples, tokens or patches; groups of a convolution each have an A. A layer of any other class with a `weight` of
    shape (out_features, in_features) says which rows that multiplies by a method `input_rows(input)`: it returns them,
    (…, in_features). All else takes the plain step, as `coverage` says. A layer's weight and bias go together: where
    one that trains has no gradient, or alone has a learning rate of 0, both take the plain step.

    A is gathered in forward passes with gradients enabled, without keeping activations, and only before the steps that
    measure: one in `every`, at irregular places, and more often at first (steps 1, 2, 3, 5, 9). Micro-batches add up,
    and so do the processes of torch.distributed. A row counts once its call's gradient has reached the weight, if
    step() comes before zero_grad(); a zero_grad(set_to_none=False) of the model's own is not noticed. In graphs of
    torch.compile, transforms of torch.func and forward-mode AD rows count as they are read: evaluate under
    torch.no_grad() there. Build the optimizer from the sharded model, and before a compiled model's first call. Where
    no root is found the layer keeps the last one, which a warning, `coverage` and `metrics` say.

    Args:
        optimizer: any torch.optim.Optimizer but LBFGS that reads only p and p.grad.
        model: the model.
        damping: λ in units of A's mean eigenvalue; "Which call" of the documentation has that of each task. Large
            values give the optimizer as it is, with `graft_norm`. It counts as 10 ε d at least, with d columns and ε of
            the weight's dtype, or float32's: less would let rounding of A into the step.
        decay: how much the average of earlier measurements counts at each new one; 0 is the present batch alone.
        every: measure at one step in this many.
        graft_norm: use A + λI divided by its mean eigenvalue, and give each layer's mapped step the Frobenius norm that
            the optimizer gave it, so that learning rates stay near the optimizer's. The decoupled weight decay of
            torch's optimizers, but for Adafactor's, is no part of that step.
        rank: tell only this many leading eigenvectors of A apart, and let the others share the mean of their
            eigenvalues; None is the whole of A.
        max_dim: wider layers keep diagonal blocks of at most this size of A; None is no limit.
        process_group: the processes over which A is added up: those that train the same layers on other rows, one
            stage's of a pipeline. A DeviceMesh of one dimension (mesh["data"]), or a ProcessGroup, which torch can
            neither copy nor pickle; None is the default group.
        skip: paths of modules and module types to leave alone, as for `attach`.

    Raises:
        TypeError: not an optimizer, or LBFGS.
        ValueError: nothing to whiten, a setting out of its range, parameters without a shape, or not sharded by rows.

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

    count_rows = count_rows

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
        process_group: Any = None,
        skip: Skip = (),
    ) -> None:
        check_positive("Whitened", damping=damping)
        check_count("Whitened", **without_none(rank=rank, max_dim=max_dim))
        change = ChangeOfVariables(
            partial(covariance_of, max_dim=max_dim, rank=rank),
            partial(Covariance.inverse_roots, damping=damping, graft_norm=graft_norm),
            partial(treatment, verb="whitened"),
            keeps_norm=graft_norm,
        )
        watch = Watch(
            "Whitened", model, change, every=every, decay=decay, process_group=process_group, skip=skip,
            damping=damping, graft_norm=graft_norm, rank=rank, max_dim=max_dim,
        )  # fmt: skip
        super().__init__(optimizer, watch)
