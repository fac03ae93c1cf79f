"""Optimizers that are compared and that torch does not have, or has otherwise; each is named by where it comes from.

Stored runs keep the names that they have. "muon" is `Muon` below in networks for pictures, equations and regression,
`torch.optim.Muon` in the language model, and the one of the package pytorch_optimizer in networks for images; "soap" is
pytorch_optimizer's everywhere.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.optimize import line_search
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim import LBFGS, SGD, Adam, AdamW, Optimizer

from adiv_optim import ChainedOptimizer, GaussNewton
from adiv_optim.jacobian.terms import Terms
from examples.gpt import GPT, warm_up_steps

from .core.tables import grouped


def peer(name: str, package: str = "pytorch_optimizer", module: str = "") -> Callable[..., Any]:
    """What another package has; a ValueError says how to install it where it is missing."""
    if find_spec(package) is None:
        raise ValueError(f"{name!r} needs the package {package}; pip install '.[peers]' brings it.")
    return getattr(import_module(module or package), name)


class Muon(Optimizer):
    """Muon (Jordan et al. 2024) in the precision of its weights; torch's and pytorch_optimizer's work in bfloat16.

    M ← μM + G and W ← W − 0.2 √max(m, n) η O, with O the polar factor of G + μM by five Newton-Schulz iterations: with
    Nesterov momentum μ and steps of AdamW's size (Liu et al. 2025). Matrices of one shape are iterated together.
    """

    def __init__(self, params: Iterable[Tensor], lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            weights = [p for p in group["params"] if p.grad is not None]
            for same in grouped(weights, lambda p: p.shape).values():
                gradients = [p.grad for p in same]
                momenta = [self.state[p].setdefault("momentum", torch.zeros_like(p)) for p in same]
                torch._foreach_mul_(momenta, group["momentum"])
                torch._foreach_add_(momenta, gradients)
                updates = polar(torch.stack(torch._foreach_add(gradients, momenta, alpha=group["momentum"])))
                rate = 0.2 * max(same[0].shape) ** 0.5 * group["lr"]
                torch._foreach_add_(same, list(updates.unbind()), alpha=-rate)
        return loss


def polar(matrices: Tensor) -> Tensor:
    """About the polar factors of a stack of matrices: singular values between 0.7 and 1.2, by Jordan's polynomial."""
    is_high = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_high else matrices
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + torch.baddbmm(a, a, a, beta=-4.7750, alpha=2.0315) @ x
    return x.mT if is_high else x


#: As Urbán et al. draw points anew; a step of BFGS is on one draw.
STEPS_PER_DRAW = 500


class SelfScaledBFGS(Optimizer):
    """BFGS with Oren and Luenberger's scaling, dense, as Urbán et al. (2025, 2405.04230) take it to networks.

    H ← (I − ρsyᵀ) H (I − ρysᵀ) / τ + ρssᵀ with ρ = 1/yᵀs and τ = min(1, yᵀs / sᵀH⁻¹s), by scipy's strong Wolfe search,
    and by halving where that finds nothing. H is kept when the points are drawn anew, as theirs is. All is in float64.
    """

    def __init__(self, model: nn.Module) -> None:
        self.parameters = list(model.parameters())
        super().__init__(self.parameters, {})
        self.inverse = np.eye(sum(p.numel() for p in self.parameters))
        self.is_first, self.known = True, dict[bytes, tuple[float, Any]]()
        #: How many have begun, by which the closure knows when to draw points: at every so many.
        self.steps = 0

    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        x = parameters_to_vector(self.parameters).detach().numpy().copy()
        if self.steps % STEPS_PER_DRAW == 0:
            self.known = {}
        self.steps += 1

        def evaluate(at: Any) -> tuple[float, Any]:
            if (key := at.tobytes()) not in self.known:
                vector_to_parameters(torch.from_numpy(at), self.parameters)
                loss = closure()
                gradients: list[Any] = [p.grad for p in self.parameters]
                self.known = {key: (loss.item(), parameters_to_vector(gradients).numpy())}
            return self.known[key]

        loss, gradient = evaluate(x)
        direction = -(self.inverse @ gradient)
        with warnings.catch_warnings(action="ignore", category=RuntimeWarning):  # of a search without a result
            length, *_ = line_search(
                lambda at: evaluate(at)[0], lambda at: evaluate(at)[1], x, direction, gradient, loss
            )
        if length is None:
            lengths, slope = (0.5**k for k in range(40)), gradient @ direction
            length = next((a for a in lengths if evaluate(x + a * direction)[0] <= loss + 1e-4 * a * slope), 0.0)
        s = length * direction
        y = evaluate(x + s)[1] - gradient
        vector_to_parameters(torch.from_numpy(x + s), self.parameters)
        curvature = y @ s
        if length == 0:  # not even a short step lowers the loss: the next one is along the gradient
            self.inverse, self.is_first = np.eye(len(x)), True
        if not curvature > 0:
            return loss
        along = -length * gradient @ s  # sᵀH⁻¹s
        if self.is_first:
            self.inverse *= curvature / (y @ y)
            along = s @ s * (y @ y) / curvature
        tau = min(1.0, curvature / along)
        u = self.inverse @ y
        self.inverse /= tau
        across = np.outer(s, u / (tau * curvature))
        self.inverse -= across
        self.inverse -= across.T
        self.inverse += np.outer(s, (1 + y @ u / (tau * curvature)) / curvature * s)
        self.is_first = False
        return loss


# By torch's tolerances it would stop at errors that are large here.
lbfgs = partial(LBFGS, history_size=50, line_search_fn="strong_wolfe", tolerance_grad=0, tolerance_change=0)


class AdamThenLBFGS(Optimizer):
    """A thousand steps of Adam, then LBFGS (history 50, strong Wolfe): what is commonly done for equations."""

    def __init__(self, model: nn.Module, lr: float, adam_steps: int = 1000) -> None:
        super().__init__(model.parameters(), {"lr": lr})
        self.left, self.adam, self.lbfgs = adam_steps, Adam(model.parameters(), lr=lr), lbfgs(model.parameters())

    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        self.left -= 1
        return (self.adam if self.left >= 0 else self.lbfgs).step(closure)


class SPRING(Optimizer):
    """Goldshlager et al. (2024, 2401.10190) in the form of 2505.12149 for equations, with its correction of bias.

    φ ← μφ + Jᵀ(JJᵀ + λI)⁻¹(r − μJφ) and θ ← θ − η φ / √(1 − μ²ᵏ) at step k, with the damping λ and the momentum μ; θ
    is all parameters.
    """

    def __init__(self, model: nn.Module, lr: float, damping: float, momentum: float = 0.9) -> None:
        self.model, self.steps = model, 0
        super().__init__(model.parameters(), {"lr": lr, "damping": damping, "momentum": momentum})
        self.phi = torch.zeros_like(parameters_to_vector(model.parameters())).detach()

    @torch.no_grad()
    def step(self, terms: Any) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        r, jacobian = linearized(self.model, terms)
        shifted = jacobian @ jacobian.mT
        shifted.diagonal().add_(group["damping"])
        self.phi *= group["momentum"]
        right, (factor, failed) = (r - jacobian @ self.phi)[:, None], torch.linalg.cholesky_ex(shifted)
        # A run that breaks down may have no factor; then the weights are not finite either, and the run ends.
        self.phi += torch.nan if failed else jacobian.mT @ torch.cholesky_solve(right, factor)[:, 0]
        self.steps += 1
        length = group["lr"] / (1 - group["momentum"] ** (2 * self.steps)) ** 0.5
        vector_to_parameters(parameters_to_vector(group["params"]) - length * self.phi, group["params"])


class NielsensDamping(Optimizer):
    """Levenberg–Marquardt as textbooks have it (Madsen, Nielsen & Tingleff 2004): GaussNewton's step by another rule.

    θ ← θ − δ with (JᵀJ + μI) δ = Jᵀr where that lowers |r|²; θ is all parameters. With ρ the fall over δᵀ(μδ + Jᵀr),
    the predicted one, then μ ← μ max(⅓, 1 − (2ρ − 1)³); where nothing falls μ ← μν, ν ← 2ν, and again. μ begins at a
    thousandth of the largest diagonal entry of JᵀJ, ν at 2.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {})
        self.model, self.mu = model, math.nan

    @torch.no_grad()
    def step(self, terms: Any) -> None:  # type: ignore[override]
        """Take a step on a loss given by its terms; in vain after twenty tries."""
        weights, nu = trained(self.model), 2.0
        start = parameters_to_vector(weights.values())
        r, jacobian = linearized(self.model, terms)
        slope, is_wide = jacobian.mT @ r, len(r) < len(start)
        gram = jacobian @ jacobian.mT if is_wide else jacobian.mT @ jacobian
        if math.isnan(self.mu):
            self.mu = 1e-3 * jacobian.square().sum(0).max().item()
        for _ in range(20):
            factor, failed = torch.linalg.cholesky_ex(gram + self.mu * torch.eye(len(gram), dtype=gram.dtype))
            solution = torch.cholesky_solve((r if is_wide else slope)[:, None], factor)[:, 0]
            delta = jacobian.mT @ solution if is_wide else solution
            vector_to_parameters(start - delta, weights.values())
            fall = r.square().sum() - Terms(self.model, terms, "step").evaluate(weights).square().sum()
            if fall > 0 and not failed:
                gain = (fall / (delta @ (self.mu * delta + slope))).item()
                self.mu *= max(1 / 3, 1 - (2 * gain - 1) ** 3)
                return
            self.mu, nu = self.mu * nu, 2 * nu
        self.mu /= 2.0**210  # as before these tries, for other points
        vector_to_parameters(start, weights.values())


class LeastSquares(Optimizer):
    """Newton's whole step by a factorization of J where it halves the residual, else GaussNewton's step.

    One step solves a linear equation. For random features, of which the last layer trains, this is what Dong and Li
    (2021, 2012.02895) do; their Newton steps alone do not leave the start of some nonlinear equations.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(trained(model).values(), {})
        self.model, self.damped, self.converged = model, GaussNewton(model), False

    @torch.no_grad()
    def step(self, terms: Any) -> None:  # type: ignore[override]
        """Take a step on a loss given by its terms, whose points stay."""
        weights = trained(self.model)
        start = parameters_to_vector(weights.values())
        r, jacobian = linearized(self.model, terms)
        vector_to_parameters(start - torch.linalg.lstsq(jacobian, r[:, None]).solution[:, 0], weights.values())
        if not Terms(self.model, terms, "step").evaluate(weights).norm() < r.norm() / 2:
            vector_to_parameters(start, weights.values())
            self.damped.step(terms)
            self.converged = self.damped.metrics()["alpha"] == 0


def trained(model: nn.Module) -> dict[str, Tensor]:
    """The parameters that are trained."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def linearized(model: nn.Module, terms: Any) -> tuple[Tensor, Tensor]:
    """Residuals of a loss and their Jacobian."""
    every, parameters = Terms(model, terms, "step"), {n: p.detach() for n, p in trained(model).items()}
    return every.evaluate(parameters), every.jacobian(parameters, None)


def _without(parameters: Iterable[Tensor], some: Iterable[Tensor]) -> list[Tensor]:
    """All parameters but some."""
    left_out = set(map(id, some))
    return [parameter for parameter in parameters if id(parameter) not in left_out]


def _muon_of_model(model: nn.Module, lr: float) -> Optimizer:
    """Muon for the matrices inside the network, Adam at the same learning rate for the rest."""
    matrices = [p for p in model.parameters() if p.dim() == 2][1:-1]
    return ChainedOptimizer([Muon(matrices, lr), Adam(_without(model.parameters(), matrices), lr=lr)])


class LevenbergMarquardt(Optimizer):
    """The trainer of the package torch-levenberg-marquardt, by Cholesky factors, the fastest of its ways to solve."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {})
        trainer = peer("LevenbergMarquardtModule", "torch_levenberg_marquardt", "torch_levenberg_marquardt.training")
        self.trainer: Any = trainer(model, solve_method="cholesky")

    def step(self, terms: Any) -> Tensor:  # type: ignore[override]
        """Take a step on the one term (model(x) - y, x, y)."""
        ((_, x, y),) = terms
        return self.trainer.training_step(x, y)[1]


class OfModel(NamedTuple):
    """An optimizer of networks for pictures, equations and regression."""

    label: str  # what tables and figures call it
    color: str
    make: Callable[..., Optimizer]  # (model, learning rate), and the damping if it has one, → optimizer
    searches: bool = False  # for the length of a step, so that no schedule changes it
    takes_terms: bool = False  # a step takes a loss by its terms, where others take a closure
    damped: bool = False  # it has a damping of its own


def _by_itself(label: str, color: str, kind: Callable[..., Optimizer], takes_terms: bool = True) -> OfModel:
    """An optimizer that has no learning rate."""
    return OfModel(label, color, lambda model, lr: kind(model), searches=True, takes_terms=takes_terms)


OF_MODELS = {
    "adam": OfModel("Adam", "tab:blue", lambda model, lr: Adam(model.parameters(), lr=lr)),
    "muon": OfModel("Muon", "tab:orange", _muon_of_model),
    "soap": OfModel("SOAP", "tab:green", lambda model, lr: peer("SOAP")(model.parameters(), lr=lr, weight_decay=0.0)),
    "sgd": OfModel("SGD", "tab:red", lambda model, lr: SGD(model.parameters(), lr=lr)),
    "momentum": OfModel("SGD with momentum", "black", lambda model, lr: SGD(model.parameters(), lr=lr, momentum=0.9)),
    "lbfgs": OfModel("LBFGS", "tab:purple", lambda model, lr: lbfgs(model.parameters(), lr=lr), searches=True),
    "adam-lbfgs": OfModel("Adam, then LBFGS", "tab:cyan", AdamThenLBFGS, searches=True),
    "self-scaled-bfgs": _by_itself("self-scaled BFGS", "tab:purple", SelfScaledBFGS, takes_terms=False),
    "gauss-newton": _by_itself("GaussNewton", "black", GaussNewton),
    "nielsen": _by_itself("Levenberg–Marquardt", "tab:pink", NielsensDamping),
    "spring": OfModel("SPRING", "tab:red", SPRING, takes_terms=True, damped=True),
    "levenberg-marquardt": _by_itself("torch-levenberg-marquardt", "black", LevenbergMarquardt),
    "random-features": _by_itself("random features, least squares", "tab:olive", LeastSquares),
}


def _muon_of_parameters(parameters: Iterable[Tensor], *, weight_decay: float = 0.0, **options: Any) -> Any:
    """Muon for the matrices and kernels inside a network, Adam for its last layer and its vectors."""
    everything = list(parameters)
    inside = [parameter for parameter in everything if parameter.dim() > 1][:-1]
    options["weight_decay"] = weight_decay
    # Steps of Adam's size: so one rate means much the same for both.
    groups = [
        {"params": inside, "use_muon": True, "use_adjusted_lr": True, **options},
        {"params": _without(everything, inside), "use_muon": False, "betas": (0.9, 0.999), "eps": 1e-8, **options},
    ]
    return peer("Muon")([group for group in groups if group["params"]])


#: Of networks for images: (parameters, lr, weight_decay) → optimizer; AdamW without decay is Adam.
OF_PARAMETERS: dict[str, Callable[..., Optimizer]] = {
    "adam": partial(AdamW, weight_decay=0.0, fused=True),
    "sgd": partial(SGD, fused=True),
    "momentum": partial(SGD, momentum=0.9, fused=True),
    "muon": _muon_of_parameters,
    # Of 3,072 inputs a step would take a quarter of a second: so long a side of a weight is left as it is.
    "soap": lambda parameters, **given: peer("SOAP")(
        list(parameters), **{"weight_decay": 0.0, "max_precondition_dim": 1024, **given}
    ),
}
#: Those that step every number by itself, so that tensors of several models may be stacked.
ELEMENTWISE = ("adam", "sgd", "momentum")


#: Peak rate of the AdamW that trains what Muon leaves: embeddings, head, normalisers and biases. The same for all.
REST_LR = 3e-3


def matrices(model: GPT) -> list[Tensor]:
    """The weights of the linear layers inside the blocks: what Muon is for."""
    return [module.weight for module in model.blocks.modules() if isinstance(module, nn.Linear)]


def made_by(
    model: GPT, run: Any, kind: Callable[..., Optimizer], treated: Sequence[Tensor] | None = None, **options: Any
) -> list[Optimizer]:
    """An optimizer of all parameters, or of some and AdamW for the rest."""
    options |= {"lr": run.lr, "weight_decay": run.weight_decay}
    if treated is None:
        return [kind(model.parameters(), **options)]
    return [kind(treated, **options), _adamw(model, run, REST_LR, treated)]


def _adamw(model: GPT, run: Any, lr: float, treated: Iterable[Tensor] = ()) -> AdamW:
    """AdamW for what another optimizer leaves, and the embeddings at a rate of their own where the run has one."""
    embeddings = {id(embedding.weight) for embedding in (model.token_embedding, model.position_embedding)}
    own = lr if run.embedding_lr is None else run.embedding_lr
    left = _without(model.parameters(), treated)
    groups = grouped(left, lambda parameter: own if id(parameter) in embeddings else lr)
    return AdamW([{"params": each, "lr": rate} for rate, each in groups.items()], weight_decay=run.weight_decay)


def _normuon(parameters: list[Tensor], **options: Any) -> Optimizer:
    group = {"params": parameters, "use_muon": True, "update_scale": "match_rms", **options}
    return peer("NorMuon")([group])


def _kfac(model: GPT, run: Any) -> list[Optimizer]:
    """K-FAC of the linear layers inside the blocks, of tokens that the loss is a mean over, and AdamW for the rest."""
    inside = [p for module in model.blocks.modules() if isinstance(module, nn.Linear) for p in module.parameters()]
    kind = partial(peer("SINGD", "singd", "singd.optim.optimizer"), model)
    options = {"kfac_like": True, "alpha1": 0.0, "loss_average": "batch+sequence", "normalize_lr_cov": True}
    return made_by(model, run, kind, inside, **options)


#: (model, run) → optimizers of disjoint sets of parameters; the first is what a method wraps.
OF_LANGUAGE: dict[str, Callable[[GPT, Any], list[Optimizer]]] = {
    "adamw": lambda model, run: [_adamw(model, run, run.lr)],
    "sgd": partial(made_by, kind=SGD, momentum=0.9),
    # Updates of AdamW's size: so the rates of one grid mean much the same for both.
    "muon": lambda model, run: made_by(model, run, torch.optim.Muon, matrices(model), adjust_lr_fn="match_rms_adamw"),
    "schedulefree": lambda model, run: made_by(
        model, run, peer("AdamWScheduleFree", "schedulefree"), warmup_steps=warm_up_steps(run.steps)
    ),
    "soap": lambda model, run: made_by(model, run, peer("SOAP")),
    "kron": lambda model, run: made_by(model, run, peer("Kron")),
    "mars": lambda model, run: made_by(model, run, peer("MARS"), matrices(model)),
    "normuon": lambda model, run: made_by(model, run, _normuon, matrices(model)),
    "kfac": _kfac,
}
