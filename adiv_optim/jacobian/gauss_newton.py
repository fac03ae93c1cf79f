"""The ideal step of a whole network: a Gauss–Newton optimizer from per-sample Jacobians."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .._checks import check_count, check_not_negative, without_none
from ..rows.models import Coverage, refuse_attached, refuse_lazy
from .modules import why_mixed
from .terms import Parameters, Term, Terms, solver

#: What `GaussNewton` says of damping and step lengths.
ENOUGH = 0.005  # A step that lowers the loss by less than this share is tried again with more damping.
LEAST_FALL = 1e-6  # One that lowers it by less than this share is not taken: it may be rounding.
MOST_DAMPING = 1e6  # A step is then along the gradient.
PRECISIONS = 64  # Times the precision of the type, the least root of the damping: smaller singular values are rounding.
BOLD = 0.25  # After a step length of at least this the damping is divided by 10,
TIMID, RISE = 0.0625, 3  # and multiplied by `RISE` after one of at most `TIMID`.
WORSE = 2.0  # Above this multiple of the loss before the last step, that step overfitted its points, changed since.
TRIAL = 0.1  # h, the finite-difference step of the acceleration; 0.1 in Transtrum and Sethna 2012.
HALVINGS = 30  # of a step length, at most.


class _Try(NamedTuple):
    """A step that was tried."""

    loss: Tensor
    alpha: float
    parameters: Parameters


class GaussNewton(Optimizer):
    r"""Minimise a sum of squared residuals by Gauss–Newton (Levenberg–Marquardt); it tunes its damping by itself.

    .. math:: \theta \leftarrow \theta - \alpha\, \delta - \tfrac{1}{2} \alpha^2 a, \qquad
              \delta = J^\top (J J^\top + \lambda I)^{-1} r, \quad
              a = J^\top (J J^\top + \lambda I)^{-1} r'', \quad
              \lambda = \text{damping} \cdot \mathrm{tr}(JJ^\top) / n,

    with r the n residuals, each over the root of its term's count, and :math:`J = \partial r / \partial\theta` by
    torch.func, sample by sample
    (Levenberg 1944, Marquardt 1963; for networks that solve equations Müller and Zeinhofer 2023, Jnini et al. 2024; in
    the form with :math:`JJ^\top` Chen and Heyl 2024, Goldshlager et al. 2024). The loss is half the sum over terms of
    the mean square of their residuals, :math:`|r|^2 / 2`; a factor inside a residual function weighs its term.

    a bends the step as the residuals bend: the geodesic acceleration of Transtrum and Sethna (2012), with
    :math:`r'' = 2\,((r(\theta - h \delta) - r(\theta)) / h + J \delta) / h` and h = 0.1. Both are solved by a QR
    of J augmented by :math:`\sqrt{\lambda} I`: a product :math:`JJ^\top` would square the condition of J, and the loss
    would stop falling where singular values are 10⁻⁷ of the largest.

    It pays where a loss is cheap and ill-conditioned: nonlinear differential equations, with small networks.

    Neither learning rate nor damping needs tuning. α is halved from 1 until the loss has fallen and stops falling. If
    it fell by less than 0.5 %, the step is solved again with 10 times the damping, until that no longer helps. For the
    next step the damping is divided by 10 after α ≥ ¼ and multiplied by 3 after α ≤ 1/16; the root of the one that is
    used is never below 64 × the precision of the type. If the loss on new points is more than twice the loss before the
    last step, that step overfitted its points: the damping is multiplied by 10 first. If no step lowers the loss by a
    millionth, weights and damping stay unchanged.

    A step needs about :math:`b\,(nP + \max(3cP, 2nP + 2m^2))` bytes for n residuals and P parameters of b bytes each,
    with m the smaller of the two, where c is the residuals of the largest term, or of `chunk_size` of its samples;
    activations that they keep for their backward pass come on top. A step that needs more than the machine has free is
    refused before J is computed.

    There is no learning rate, so that schedulers of one raise a KeyError; `zero_grad` and `backward` are not needed.

    Args:
        network: any module that torch.func can differentiate; all its trainable parameters are stepped, frozen ones are
            not.
        damping: that of the first step, in units of the mean diagonal of JJᵀ.
        chunk_size: samples that are differentiated at once; None is all.

    Raises:
        TypeError: `network` is no module, its parameters are not all float32, or all float64, on one device, or are
            sharded, or a GradScaler steps.
        ValueError: there is no trainable parameter, one has no shape yet, `damping` is negative, or `chunk_size` is
            below 1.

    Example:
        >>> import torch
        >>> from adiv_optim import GaussNewton
        >>> from adiv_optim.jacobian import laplacian
        >>> _ = torch.manual_seed(0)
        >>> network = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
        >>> def inside(model, x):  # u″ = −sin x, one point
        ...     return laplacian(model, x) + torch.sin(x)
        >>> def at_the_ends(model, x):
        ...     return model(x)
        >>> points, ends = 3.14159265 * torch.rand(32, 1).double(), torch.tensor([[0.0], [3.14159265]]).double()
        >>> optimizer = GaussNewton(network)
        >>> for _ in range(100):
        ...     loss = optimizer.step([(inside, points), (at_the_ends, ends)])
        >>> (network(points) - torch.sin(points)).abs().max().item() < 1e-4
        True
    """

    def __init__(self, network: nn.Module, damping: float = 1e-10, *, chunk_size: int | None = None) -> None:
        if not isinstance(network, nn.Module):
            raise TypeError(f"GaussNewton: network must be a torch.nn.Module, found {type(network).__name__}.")
        check_not_negative("GaussNewton", damping=damping)
        check_count("GaussNewton", **without_none(chunk_size=chunk_size))
        refuse_lazy("GaussNewton", network)
        trained = _trained(network)
        self.network, self.chunk_size, self._metrics = network, chunk_size, dict[str, float]()
        super().__init__(list(trained.values()), {"damping": damping, "last_loss": math.inf})

    @torch.no_grad()
    def step(self, terms: Sequence[Term]) -> Tensor:  # type: ignore[override]
        """Take a step on a loss given by its terms: half the sum over terms of the mean square of their residuals.

        Args:
            terms: (residual, tensor, …) each: a function of (model, *one sample) that returns a tensor of any shape,
                and the batched tensors, (samples, …), that it is mapped over; of points and values it is
                (lambda model, x, y: model(x) - y, X, Y). Points may be drawn anew for every step.

        Returns:
            The loss before the step.

        Raises:
            TypeError: a closure is given, terms of another form, or a residual of another dtype than the parameters.
            ValueError: a module mixes samples, drops inputs or has a correction attached, or the tensors of a term are
                empty or differ in length.
            MemoryError: the step needs more memory than is free.
            RuntimeError: autocast is on, the loss or its Jacobian is not finite, or parameters were frozen, freed or
                replaced since the optimizer was built.
        """
        (group,) = self.param_groups
        start: Any = group.get("damping")
        check_not_negative("GaussNewton.step", damping=start)
        self._check_mode()
        trained = self._trained()
        residuals = Terms(self.network, terms, "GaussNewton.step")
        before = {name: parameter.detach() for name, parameter in trained.items()}
        r = residuals.evaluate(before)
        loss = r.square().sum() / 2
        if not loss.isfinite():
            raise RuntimeError(f"GaussNewton.step: the loss is {loss.item()}; look at the residuals of these points.")
        jacobian = residuals.jacobian(before, self.chunk_size)
        start = max(start, (PRECISIONS * torch.finfo(jacobian.dtype).eps) ** 2)
        if loss > WORSE * group.get("last_loss", math.inf):
            start *= 10
        best, damping, tries = _search(residuals, before, jacobian, r, min(start, MOST_DAMPING))
        if best is not None:
            for name, parameter in trained.items():
                parameter.copy_(best.parameters[name])
            group["damping"], group["last_loss"] = damping * _change(best.alpha), loss.item()
        self._metrics = {
            "loss_before": loss.item(),
            "loss_after": (loss if best is None else best.loss).item(),
            "damping": damping,
            "alpha": 0.0 if best is None else best.alpha,
            "tries": float(tries),
        }
        return loss

    def _check_mode(self) -> None:
        device = self.param_groups[0]["params"][0].device.type
        if torch.is_autocast_enabled(device):
            raise RuntimeError("GaussNewton.step: autocast is on; small types cannot solve for the step. Turn it off.")
        remedy = "its backward is not its derivative. Call adiv_optim.detach(network) first"
        refuse_attached("GaussNewton.step", self.network, remedy)
        for path, module in self.network.named_modules():
            where = f"GaussNewton.step: {path or 'the network'}"
            if why := why_mixed(module):
                raise ValueError(f"{where}: {why}, so none has a Jacobian of its own; call .eval().")
            if module.training and isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
                raise ValueError(
                    f"{where}: {type(module).__name__} drops inputs, so that no two evaluations are of one loss; call "
                    ".eval()."
                )

    def metrics(self) -> dict[str, float]:
        """Return numbers of the last step for a logger: loss_before, loss_after, damping, alpha and tries.

        damping is the one that was used. alpha is 0 where no step lowered the loss by a millionth of it: the weights
        are as they were.
        """
        return dict(self._metrics)

    def coverage(self) -> Coverage:
        """List every trainable parameter: all are stepped together."""
        trained = _trained(self.network)
        how = "stepped with all others, by the Jacobian of the network"
        return Coverage(dict.fromkeys(trained, how), elements={name: p.numel() for name, p in trained.items()})

    def _trained(self) -> dict[str, nn.Parameter]:
        """Return the trainable parameters, which are those of the group."""
        group = {id(parameter) for parameter in self.param_groups[0]["params"]}
        named = dict(self.network.named_parameters())
        changed = [name for name, p in named.items() if p.requires_grad != (id(p) in group)]
        if changed:
            raise RuntimeError(
                f"GaussNewton.step: {', '.join(changed[:4])}: frozen, freed or replaced since the optimizer was built; "
                "build another."
            )
        return _trained(self.network)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse a second group: all parameters share one Jacobian and one damping."""
        if self.param_groups:
            raise ValueError("GaussNewton: all trainable parameters of the network are in its one group already.")
        super().add_param_group(param_group)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        raise TypeError("GaussNewton takes no GradScaler: it reads no gradients; call step(terms) itself, in float32.")

    def __getstate__(self) -> dict[str, Any]:
        about = {"network": self.network, "chunk_size": self.chunk_size, "_metrics": self._metrics}
        return {**super().__getstate__(), **about}

    def __repr__(self) -> str:
        damping = self.param_groups[0]["damping"]
        return f"GaussNewton({type(self.network).__name__}, damping={damping:g}, chunk_size={self.chunk_size})"


def _search(
    residuals: Terms, before: Parameters, jacobian: Tensor, r: Tensor, start: float
) -> tuple[_Try | None, float, int]:
    """Return the step to take, its damping, and how many were solved: the damping rises until the loss falls enough."""
    loss, level = r.square().sum() / 2, jacobian.square().sum().item() / len(r)
    if not math.isfinite(level):
        raise RuntimeError(
            "GaussNewton.step: the loss is finite and its Jacobian is not; look for a residual without a "
            "derivative, such as a root at 0."
        )
    best: _Try | None = None
    used, damping, tries = start, start, 0
    while level > 0 and loss > 0 and damping <= MOST_DAMPING:
        tries += 1
        lowest = _lowest(residuals, before, jacobian, r, damping * level)
        if lowest is not None:
            if best is not None and not lowest.loss < best.loss:
                break  # the loss falls less than with less damping
            best, used = lowest, damping
            if best.loss <= (1 - ENOUGH) * loss:
                break
        damping *= 10
    is_fall = best is not None and best.loss <= (1 - LEAST_FALL) * loss
    return best if is_fall else None, used, tries


def _lowest(residuals: Terms, before: Parameters, jacobian: Tensor, r: Tensor, ridge: float) -> _Try | None:
    """Return the lowest loss, below the present, at the whole step, its half, its quarter …, before they rise."""
    solve, present = solver(jacobian, ridge), r.square().sum() / 2
    step = solve(r)
    bend = (residuals.evaluate(_moved(before, TRIAL * step)) - r) / TRIAL + jacobian @ step
    acceleration = solve(2 / TRIAL * bend)
    if not acceleration.isfinite().all():  # the trial move leads out of the domain; the step may not
        acceleration = torch.zeros_like(step)
    lowest: _Try | None = None
    for halving in range(HALVINGS):
        alpha = 0.5**halving
        moved = _moved(before, alpha * step + alpha**2 / 2 * acceleration)
        loss = residuals.evaluate(moved).square().sum() / 2
        if loss < (present if lowest is None else lowest.loss):
            lowest = _Try(loss, alpha, moved)
        elif lowest is not None:
            break
    return lowest


def _moved(before: Parameters, step: Tensor) -> Parameters:
    parts = step.split([parameter.numel() for parameter in before.values()])
    return {
        name: parameter - part.view_as(parameter) for (name, parameter), part in zip(before.items(), parts, strict=True)
    }


def _change(alpha: float) -> float:
    """Return the factor of the damping after a step of some length."""
    if alpha >= BOLD:
        return 0.1
    return RISE if alpha <= TIMID else 1.0


def _trained(network: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trainable parameters, if they can be stepped on together."""
    trained = {name: parameter for name, parameter in network.named_parameters() if parameter.requires_grad}
    if not trained:
        raise ValueError("GaussNewton: the network has no trainable parameter.")
    kinds = {(parameter.dtype, parameter.device) for parameter in trained.values()}
    first = next(iter(trained.values()))
    if len(kinds) > 1 or first.dtype not in (torch.float32, torch.float64):
        words = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
        raise TypeError(
            f"GaussNewton: the parameters are {words}; all must be float64, or float32, on one device. Call "
            "network.double()."
        )
    if sharded := [name for name, parameter in trained.items() if type(parameter.data) is not Tensor]:
        kind = type(trained[sharded[0]].data).__name__
        raise TypeError(f"GaussNewton: {sharded[0]} is a {kind}; a Jacobian of sharded parameters is not supported.")
    return trained
