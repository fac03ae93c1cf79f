"""Optimizers that are compared and that torch does not have, or has otherwise; each is named by where it comes from.

Stored runs keep the names that they have. "muon" is `Muon` below in networks for pictures, equations and regression,
`torch.optim.Muon` in the language model, and the one of the package pytorch_optimizer in networks for images; "soap" is
pytorch_optimizer's everywhere.
"""

from collections.abc import Callable, Iterable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adam, AdamW, Optimizer

from adiv_optim import ChainedOptimizer, GaussNewton
from adiv_optim.optim.wrapper import OptimizerWrapper
from examples.gpt import GPT, warm_up_steps

from .core.tables import grouped


def peer(name: str, package: str = "pytorch_optimizer", module: str = "") -> Callable[..., Optimizer]:
    """An optimizer of another package; a ValueError says how to install it where it is missing."""
    if find_spec(package) is None:
        raise ValueError(f"optimizer {name!r} needs the package {package}; pip install '.[peers]' brings it.")
    return getattr(import_module(module or package), name)


class Muon(Optimizer):
    """Muon (Jordan et al. 2024) in the precision of its weights; torch's and pytorch_optimizer's work in bfloat16.

    M ← μM + G and W ← W − 0.2 √max(m, n) η O, with O the polar factor of G + μM by five Newton-Schulz iterations: with
    Nesterov momentum and steps of AdamW's size (Liu et al. 2025). Matrices of one shape are iterated together.

    Args:
        params: matrices.
        lr: η.
        momentum: μ.
    """

    def __init__(self, params: Iterable[Tensor], lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Evaluate the closure if there is one, then take a step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
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
    wide = matrices.mT if matrices.shape[-2] > matrices.shape[-1] else matrices
    x = wide / (torch.linalg.matrix_norm(wide, keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + torch.baddbmm(a, a, a, beta=-4.7750, alpha=2.0315) @ x
    return x.mT if matrices.shape[-2] > matrices.shape[-1] else x


#: Of MAC's mean, for each forward pass.
DECAY = 0.95


class MAC(OptimizerWrapper):
    r"""Multiply gradients by :math:`I - \bar a \bar a^\top / (\rho + |\bar a|^2)`, with ā the mean of x~ = (x, 1).

    That is ρ times the inverse of A ≈ āāᵀ + ρI by Sherman and Morrison (Seung, Lee and Ko 2025, arXiv 2506.08464);
    nothing is mapped back. ā is a running mean. ρ is in units of |ā|²/d, the mean eigenvalue of āāᵀ, where the paper
    has an adaptive one.

    Args:
        optimizer: takes the step.
        model: linear layers and convolutions of one group; other parameters keep their gradients.
        damping: ρ in these units.
    """

    def __init__(self, optimizer: Optimizer, model: nn.Module, damping: float) -> None:
        super().__init__(optimizer)
        self.damping, self.means = damping, dict[Any, Tensor]()
        for module in model.modules():
            if isinstance(module, (nn.Linear, nn.Conv2d)):
                module.register_forward_pre_hook(partial(_average, self.means))

    @torch.no_grad()
    def _inner_step(self, *args: Any, **kwargs: Any) -> None:
        for module, mean in self.means.items():
            parameters: list[Any] = [parameter for parameter in (module.weight, module.bias) if parameter is not None]
            if any(parameter.grad is None for parameter in parameters):
                continue
            widths = [parameter[0].numel() for parameter in parameters]
            mean = mean[: sum(widths)]
            joined = torch.cat([p.grad.flatten(1) if p.dim() > 1 else p.grad[:, None] for p in parameters], 1)
            ridge = 1 + self.damping / len(mean)
            joined -= (joined @ mean / (mean.square().sum() * ridge)).outer(mean)
            for parameter, part in zip(parameters, joined.split(widths, 1), strict=True):
                parameter.grad = part.reshape(parameter.shape).contiguous()  # as fused optimizers read it
        super()._inner_step(*args, **kwargs)


def _average(means: dict[Any, Tensor], module: Any, inputs: Iterable[Tensor]) -> None:
    if not (module.training and torch.is_grad_enabled()):
        return
    (x,) = inputs
    x = x.detach()
    if isinstance(module, nn.Conv2d):
        x = F.unfold(x, module.kernel_size, module.dilation, module.padding, module.stride).mT  # type: ignore[arg-type]
    mean = F.pad(x.flatten(0, -2).mean(0), (0, 1), value=1.0)
    means[module] = means[module].lerp(mean, 1 - DECAY) if module in means else mean


def k_fac(optimizer: Optimizer, model: nn.Module, inputs: str = "dense") -> Any:
    """K-FAC of the package singd in place of SGD, at its rate and momentum.

    Everything but the structure of the input factor is as the package has it.
    """
    options = optimizer.defaults
    types = {} if inputs == "dense" else {"preconditioner_dtype": (torch.float32,) * 2}  # its blocks know no float64
    return peer("SINGD", "singd", "singd.optim.optimizer")(
        model, lr=options["lr"], momentum=options["momentum"], weight_decay=options["weight_decay"],
        kfac_like=True, alpha1=0.0, normalize_lr_cov=True, structures=(inputs, "dense"), **types,
    )  # fmt: skip


def _muon_of_model(model: nn.Module, lr: float) -> Optimizer:
    """Muon for the matrices inside the network, Adam at the same learning rate for the rest."""
    matrices = [p for p in model.parameters() if p.dim() == 2][1:-1]
    inside = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in inside]
    return ChainedOptimizer([Muon(matrices, lr), Adam(rest, lr=lr)])


class LevenbergMarquardt(Optimizer):
    """The trainer of the package torch-levenberg-marquardt, by Cholesky factors, the fastest of its ways to solve.

    Args:
        model: whose outputs are learned.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), {})
        trainer = peer("LevenbergMarquardtModule", "torch_levenberg_marquardt", "torch_levenberg_marquardt.training")
        self.trainer: Any = trainer(model, solve_method="cholesky")

    def step(self, terms: Any) -> Tensor:  # type: ignore[override]
        """Take a step on the one term (model(x) - y, x, y)."""
        ((_, x, y),) = terms
        return self.trainer.training_step(x, y)[1]


#: Of networks for pictures, equations and regression: (model, learning rate) → optimizer.
OF_MODELS: dict[str, Callable[[nn.Module, Any], Optimizer]] = {
    "adam": lambda model, lr: Adam(model.parameters(), lr=lr),
    "muon": _muon_of_model,
    "soap": lambda model, lr: peer("SOAP")(model.parameters(), lr=lr, weight_decay=0.0),
    "sgd": lambda model, lr: SGD(model.parameters(), lr=lr),
    "momentum": lambda model, lr: SGD(model.parameters(), lr=lr, momentum=0.9),
    "lbfgs": lambda model, lr: LBFGS(model.parameters(), lr=lr, history_size=50, line_search_fn="strong_wolfe"),
    "gauss-newton": lambda model, lr: GaussNewton(model),
    "levenberg-marquardt": lambda model, lr: LevenbergMarquardt(model),
}
#: Those whose step takes the loss by its terms, and no closure.
BY_TERMS = ("gauss-newton", "levenberg-marquardt")
#: Those that search for the length of a step.
SEARCHING = ("lbfgs", *BY_TERMS)
LABELS = {
    "adam": "Adam", "muon": "Muon", "soap": "SOAP", "sgd": "SGD", "momentum": "SGD with momentum", "lbfgs": "LBFGS",
    "gauss-newton": "GaussNewton", "levenberg-marquardt": "torch-levenberg-marquardt",
}  # fmt: skip


def _muon_of_parameters(parameters: Iterable[Tensor], *, weight_decay: float = 0.0, fused: bool, **options: Any) -> Any:
    """Muon for the matrices and kernels inside a network, Adam for its last layer and its vectors."""
    everything = list(parameters)
    inside = [parameter for parameter in everything if parameter.dim() > 1][:-1]
    rest = [parameter for parameter in everything if all(parameter is not other for other in inside)]
    options["weight_decay"] = weight_decay
    # Steps of Adam's size: so one rate means much the same for both.
    groups = [
        {"params": inside, "use_muon": True, "use_adjusted_lr": True, **options},
        {"params": rest, "use_muon": False, "betas": (0.9, 0.999), "eps": 1e-8, **options},
    ]
    return peer("Muon")([group for group in groups if group["params"]])


def _soap_of_parameters(parameters: Iterable[Tensor], *, weight_decay: float = 0.0, fused: bool, **options: Any) -> Any:
    # Of 3,072 inputs a step would take a quarter of a second: so long a side of a weight is left as it is.
    return peer("SOAP")(list(parameters), weight_decay=weight_decay, max_precondition_dim=1024, **options)


#: Of networks for images: (parameters, lr, weight_decay, fused) → optimizer; AdamW without decay is Adam.
OF_PARAMETERS: dict[str, Callable[..., Optimizer]] = {
    "adam": partial(AdamW, weight_decay=0.0),
    "sgd": SGD,
    "momentum": partial(SGD, momentum=0.9),
    "muon": _muon_of_parameters,
    "soap": _soap_of_parameters,
}
#: Those that step every number by itself, so that tensors of several models may be stacked.
ELEMENTWISE = ("adam", "sgd", "momentum")


#: Peak rate of the AdamW that trains what Muon leaves: embeddings, head, normalisers and biases. The same for all.
REST_LR = 3e-3


def _layers(model: GPT) -> list[nn.Linear]:
    """The linear layers inside the blocks."""
    return [module for module in model.blocks.modules() if isinstance(module, nn.Linear)]


def matrices(model: GPT) -> list[Tensor]:
    """Their weights: what Muon is for."""
    return [layer.weight for layer in _layers(model)]


def _for_matrices(model: GPT, run: Any, kind: Callable[..., Optimizer], **options: Any) -> list[Optimizer]:
    """An optimizer of the matrices, and AdamW for the rest."""
    first = kind(matrices(model), lr=run.lr, weight_decay=run.weight_decay, **options)
    return [first, _rest(model, matrices(model), run)]


def _rest(model: GPT, treated: Iterable[Tensor], run: Any) -> AdamW:
    """AdamW for what another optimizer leaves."""
    inside = {id(parameter) for parameter in treated}
    return _adamw(model, [p for p in model.parameters() if id(p) not in inside], run, REST_LR)


def _adamw(model: GPT, parameters: Iterable[Tensor], run: Any, lr: float) -> AdamW:
    """AdamW, and the embeddings at a rate of their own where the run has one."""
    embeddings = {id(embedding.weight) for embedding in (model.token_embedding, model.position_embedding)}
    own = lr if run.embedding_lr is None else run.embedding_lr
    groups = grouped(parameters, lambda parameter: own if id(parameter) in embeddings else lr)
    return AdamW([{"params": each, "lr": rate} for rate, each in groups.items()], weight_decay=run.weight_decay)


def _normuon(parameters: list[Tensor], **options: Any) -> Optimizer:
    group = {"params": parameters, "use_muon": True, "update_scale": "match_rms", **options}
    return peer("NorMuon")([group])


def _kfac(model: GPT, run: Any) -> list[Optimizer]:
    """K-FAC of the linear layers inside the blocks, of tokens that the loss is a mean over, and AdamW for the rest."""
    inside = [parameter for layer in _layers(model) for parameter in layer.parameters()]
    options = {"kfac_like": True, "alpha1": 0.0, "loss_average": "batch+sequence", "normalize_lr_cov": True}
    kind = peer("SINGD", "singd", "singd.optim.optimizer")
    return [kind(model, inside, lr=run.lr, weight_decay=run.weight_decay, **options), _rest(model, inside, run)]


def _of_all(model: GPT, run: Any, kind: Callable[..., Optimizer], **options: Any) -> list[Optimizer]:
    return [kind(model.parameters(), lr=run.lr, weight_decay=run.weight_decay, **options)]


def _schedule_free(model: GPT, run: Any) -> list[Optimizer]:
    kind = peer("AdamWScheduleFree", "schedulefree")
    return _of_all(model, run, kind, warmup_steps=warm_up_steps(run.steps))


#: (model, run) → optimizers of disjoint sets of parameters; the first is what a method wraps.
OF_LANGUAGE: dict[str, Callable[[GPT, Any], list[Optimizer]]] = {
    "adamw": lambda model, run: [_adamw(model, model.parameters(), run, run.lr)],
    "sgd": lambda model, run: _of_all(model, run, SGD, momentum=0.9),
    # Updates of AdamW's size: so the rates of one grid mean much the same for both.
    "muon": lambda model, run: _for_matrices(model, run, torch.optim.Muon, adjust_lr_fn="match_rms_adamw"),
    "schedulefree": _schedule_free,
    "soap": lambda model, run: _of_all(model, run, peer("SOAP")),
    "kron": lambda model, run: _of_all(model, run, peer("Kron")),
    "mars": lambda model, run: _for_matrices(model, run, peer("MARS")),
    "normuon": lambda model, run: _for_matrices(model, run, _normuon),
    "kfac": _kfac,
}
#: What must be installed for them.
PACKAGES = {"schedulefree": "schedulefree", **dict.fromkeys(("soap", "kron", "mars", "normuon"), "pytorch_optimizer")}
PACKAGES["kfac"] = "singd"
