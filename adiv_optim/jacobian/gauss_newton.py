"""The ideal step of a whole network: a Gauss–Newton optimizer from per-sample Jacobians."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .._checks import check_count, check_not_negative, without_none
from ..rows.models import Coverage, refuse_attached, refuse_lazy
from .modules import DETACH_FIRST, Parameters, refuse_overlaps, why_mixed
from .terms import Term, Terms, solver

# The numbers of the rule in the docstring of `GaussNewton`.
ENOUGH_FALL = 0.005  # A step that lowers the loss by less than this share is tried again with more damping.
LEAST_FALL = 1e-6  # One that lowers it by less than this share is not taken: it may be rounding.
MAX_DAMPING = 1e6  # A step is then along the gradient.
MIN_ROOT_EPS = 64  # The least root of the damping in ε of the dtype: smaller singular values are rounding.
LONG_STEP = 0.25  # After a step length of at least this the damping is divided by 10,
SHORT_STEP, RISE = 0.0625, 3  # and multiplied by `RISE` after one of at most `SHORT_STEP`.
OVERFITTED = 2.0  # A loss above this multiple of the last: the last step overfitted its own points.
TRIAL_LENGTH = 0.1  # h, the finite-difference step of the acceleration; 0.1 in Transtrum and Sethna 2012.
MAX_HALVINGS = 30  # of a step length


class _Candidate(NamedTuple):
    """Parameters to step to, and the loss there; at the start the step length is 0."""

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
    torch.func, sample by sample (Levenberg 1944, Marquardt 1963; for networks that solve equations Müller and Zeinhofer
    2023, Jnini et al. 2024; in the form with :math:`JJ^\top` Chen and Heyl 2024, Goldshlager et al. 2024). The loss is
    half the sum over terms of the mean square of their residuals, :math:`|r|^2 / 2`; a factor inside a residual
    function weighs its term.

    a bends the step as the residuals bend: it is the geodesic acceleration of Transtrum and Sethna (2012), with
    :math:`r'' = 2\,((r(\theta - h \delta) - r(\theta)) / h + J \delta) / h` and h = 0.1. δ and a are solved by a QR
    of J augmented by :math:`\sqrt{\lambda} I`: a product :math:`JJ^\top` would square the condition of J, and the loss
    would stop falling where singular values are 10⁻⁷ of the largest.

    It pays where a loss is cheap and ill-conditioned: nonlinear differential equations, with small networks.

    There is no learning rate, so that schedulers of one raise a KeyError, and the damping needs no tuning. α is halved
    from 1 until the loss has fallen and stops falling. If it fell by less than 0.5 %, the step is solved again with 10
    times the damping, until that no longer helps. For the next step the damping is divided by 10 after α ≥ ¼ and
    multiplied by 3 after α ≤ 1/16; what a step uses is at least (64 ε)², with ε of the dtype. If the loss on new points
    is more than twice the loss before the last step, that step overfitted its points: the damping is multiplied by 10
    first. If no step lowers the loss by a millionth, weights and damping stay unchanged. `zero_grad` and `backward` are
    not needed.

    A step needs about :math:`b\,(nP + \max(3cP, 2nP + 2m^2))` bytes for n residuals and P parameters of b bytes each,
    with m the smaller of the two, where c is the residuals of the largest term, or of `chunk_size` of its samples. The
    activations that their backward pass needs come on top. A step that needs more than the machine has free is refused
    before J is computed.

    Args:
        network: any module that torch.func can differentiate; all its trainable parameters are stepped, frozen ones are
            not.
        damping: the damping of the first step, in units of the mean diagonal of JJᵀ.
        chunk_size: how many samples are differentiated at once; None is all.

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
        if any(isinstance(module, nn.parallel.DistributedDataParallel) for module in network.modules()):
            raise TypeError(
                "GaussNewton: network is in DistributedDataParallel, which has nothing to average here; pass "
                "network.module, and the same terms in every process."
            )
        check_not_negative("GaussNewton", damping=damping)
        check_count("GaussNewton", **without_none(chunk_size=chunk_size))
        refuse_lazy("GaussNewton", network)
        trained = _checked_parameters(network)
        self.network, self.chunk_size, self._metrics = network, chunk_size, dict[str, float]()
        super().__init__(list(trained.values()), {"damping": damping, "last_loss": math.inf})

    @torch.no_grad()
    def step(self, terms: Sequence[Term]) -> Tensor:  # type: ignore[override]
        """Take a step on a loss given by its terms: half the sum over terms of the mean square of their residuals.

        Args:
            terms: each is (residual, tensor, …): a function of (model, *one sample) that returns a tensor of any shape,
                and the batched tensors, (samples, …), that it is mapped over; a regression is
                (lambda model, x, y: model(x) - y, X, Y). Points may be drawn anew for every step.

        Returns:
            The loss before the step.

        Raises:
            TypeError: a closure is given, terms of another form, or a residual of another dtype than the parameters.
            ValueError: a module mixes samples, drops inputs, updates buffers or has a correction attached, parameters
                share memory, the tensors of a term are empty or differ in length, or at the first step a residual uses
                another tensor that requires gradients.
            MemoryError: the step needs more memory than is free.
            RuntimeError: autocast is on, the loss or its Jacobian is not finite, the first Jacobian is 0 and the loss
                is not, or parameters were frozen, unfrozen or replaced since the optimizer was built.
        """
        (group,) = self.param_groups
        check_not_negative("GaussNewton.step", damping=group["damping"])
        self._check_network()
        parameters = _checked_parameters(self.network)
        before = {name: parameter.detach() for name, parameter in parameters.items()}
        evaluated = Terms(self.network, terms, "GaussNewton.step")
        residuals = evaluated.evaluate(before, refuse_outside=not self._metrics)  # at the first step
        loss = residuals.square().sum() / 2
        if not loss.isfinite():
            raise RuntimeError(f"GaussNewton.step: the loss is {loss.item()}; look at the residuals of these points.")
        jacobian = evaluated.jacobian(before, self.chunk_size)
        if not self._metrics and loss > 0 and not jacobian.any():
            raise RuntimeError(
                "GaussNewton.step: at these points no residual depends on a trainable parameter; look for no_grad, "
                "detach or another network in a residual, or units that are all dead."
            )
        damping = max(group["damping"], (MIN_ROOT_EPS * torch.finfo(jacobian.dtype).eps) ** 2)
        if loss > OVERFITTED * group["last_loss"]:
            damping *= 10
        start = _Candidate(loss, 0.0, before)
        best, damping, tries = _search_damping(evaluated, start, residuals, jacobian, min(damping, MAX_DAMPING))
        if best.alpha:
            for name, parameter in parameters.items():
                parameter.copy_(best.parameters[name])
            change = 0.1 if best.alpha >= LONG_STEP else RISE if best.alpha <= SHORT_STEP else 1
            group["damping"], group["last_loss"] = damping * change, loss.item()
        self._metrics = {
            "loss_before": loss.item(),
            "loss_after": best.loss.item(),
            "damping": damping,
            "alpha": best.alpha,
            "tries": float(tries),
        }
        return loss

    def _check_network(self) -> None:
        """Refuse a network whose parameters have changed, or that is in a mode without Jacobians of samples."""
        group = {id(parameter) for parameter in self.param_groups[0]["params"]}
        named = self.network.named_parameters()
        if changed := [name for name, p in named if p.requires_grad != (id(p) in group)]:
            raise RuntimeError(
                f"GaussNewton.step: {', '.join(changed[:4])}: frozen, unfrozen or replaced since the optimizer was "
                "built; build another."
            )
        if torch.is_autocast_enabled(self.param_groups[0]["params"][0].device.type):
            raise RuntimeError(
                "GaussNewton.step: autocast is on; its precision cannot solve for the step. Turn it off."
            )
        refuse_attached("GaussNewton.step", self.network, DETACH_FIRST)
        for path, module in self.network.named_modules():
            where = f"GaussNewton.step: {path or 'the network'}"
            if why := why_mixed(module):
                remedy = "call .eval()" if module.training else "build it with track_running_stats=True"
                raise ValueError(f"{where}: {why}, so none has a Jacobian of its own; {remedy}.")
            share = module.p if isinstance(module, nn.modules.dropout._DropoutNd) else getattr(module, "dropout", 0)
            if module.training and isinstance(share, (int, float)) and share > 0:  # attention has a number
                raise ValueError(f"{where}: {type(module).__name__} drops inputs anew each time; call .eval().")
            kinds = {type(each).__name__ for each in (module, *module._forward_pre_hooks.values())}
            has_statistics = getattr(module, "track_running_stats", False) or kinds & {"_SpectralNorm", "SpectralNorm"}
            if module.training and has_statistics:
                name = type(module).__name__
                raise ValueError(f"{where}: {name} updates its buffers as it runs, and a step does not; call .eval().")

    def metrics(self) -> dict[str, float]:
        """Return numbers of the last step for a logger: loss_before, loss_after, damping, alpha and tries.

        damping is the one that was used. alpha is 0 if no step lowered the loss by a millionth, and the weights stayed.
        """
        return dict(self._metrics)

    def coverage(self) -> Coverage:
        """List every trainable parameter: all are stepped together."""
        sizes = {name: parameter.numel() for name, parameter in _checked_parameters(self.network).items()}
        return Coverage(dict.fromkeys(sizes, "stepped with all others, by the Jacobian of the network"), elements=sizes)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the damping and the last loss.

        Raises:
            ValueError: it is another optimizer's.
        """
        if any("last_loss" not in group for group in state_dict["param_groups"]):
            raise ValueError(
                "GaussNewton.load_state_dict: this is another optimizer's; load what state_dict() returned."
            )
        super().load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse a second group: all parameters share one Jacobian and one damping."""
        if self.param_groups:
            raise ValueError("GaussNewton: all trainable parameters of the network are in its one group already.")
        super().add_param_group(param_group)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        raise TypeError("GaussNewton takes no GradScaler: it reads no gradients; call step(terms) itself, in float32.")

    def __getstate__(self) -> dict[str, Any]:
        # torch's own has no attributes of subclasses.
        state = super().__getstate__()
        return state | {"network": self.network, "chunk_size": self.chunk_size, "_metrics": self._metrics}

    def __repr__(self) -> str:
        damping = self.param_groups[0]["damping"]
        return f"GaussNewton({type(self.network).__name__}, damping={damping:g}, chunk_size={self.chunk_size})"


def _search_damping(
    terms: Terms, start: _Candidate, residuals: Tensor, jacobian: Tensor, damping: float
) -> tuple[_Candidate, float, int]:
    """Raise the damping until the loss falls enough; return the step to take, its damping, and how many were solved."""
    mean_diagonal = jacobian.square().sum().item() / len(residuals)
    if not math.isfinite(mean_diagonal):
        raise RuntimeError(
            "GaussNewton.step: the loss is finite and its Jacobian is not; look for a residual without a "
            "derivative, such as a root at 0, or one that overflows."
        )
    best, used, tries = start, damping, 0
    while mean_diagonal > 0 and start.loss > 0 and damping <= MAX_DAMPING:
        tries += 1
        lowest = _search_length(terms, start, residuals, jacobian, damping * mean_diagonal)
        if lowest.loss < best.loss:
            best, used = lowest, damping
            if best.loss <= (1 - ENOUGH_FALL) * start.loss:
                break
        elif best.loss <= (1 - LEAST_FALL) * start.loss and lowest.alpha:
            break  # the loss falls less than with less damping
        damping *= 10
    return best if best.loss <= (1 - LEAST_FALL) * start.loss else start, used, tries


def _search_length(terms: Terms, start: _Candidate, residuals: Tensor, jacobian: Tensor, ridge: float) -> _Candidate:
    """Halve the step until the loss has fallen and rises again; return where it is lowest, or the start."""
    solve = solver(jacobian, ridge)
    step = solve(residuals)
    trial = _minus(start.parameters, TRIAL_LENGTH * step)
    bend = (terms.evaluate(trial) - residuals) / TRIAL_LENGTH + jacobian @ step
    acceleration = solve(2 / TRIAL_LENGTH * bend)
    if not acceleration.isfinite().all():  # the trial move leads out of the domain; the step may not
        acceleration = torch.zeros_like(step)
    lowest = start
    for halvings in range(MAX_HALVINGS):
        alpha = 0.5**halvings
        parameters = _minus(start.parameters, alpha * step + alpha**2 / 2 * acceleration)
        loss = terms.evaluate(parameters).square().sum() / 2
        if loss < lowest.loss:
            lowest = _Candidate(loss, alpha, parameters)
        elif lowest.alpha:
            break
    return lowest


def _minus(parameters: Parameters, step: Tensor) -> Parameters:
    parts = step.split([parameter.numel() for parameter in parameters.values()])
    return {name: p - part.view_as(p) for (name, p), part in zip(parameters.items(), parts, strict=True)}


def _checked_parameters(network: nn.Module) -> dict[str, nn.Parameter]:
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
        raise TypeError(
            f"GaussNewton: {sharded[0]} is a {kind}; sharded ones and other subclasses of Tensor are not supported."
        )
    refuse_overlaps("GaussNewton", trained)
    return trained
