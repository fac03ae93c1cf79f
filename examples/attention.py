r"""Attention whose query and key projections take the step that the attention logits ask for: an experiment to copy.

    pip install '.[bench]'
    python -m examples.attention

A gradient step moves the logits Y = s QKᵀ to first order by −s²(AgB + CgA) with g = ∂L/∂Y, A = X~X~ᵀ, B = KKᵀ and
C = QQᵀ (Bird 2025, Eq. 63, its second term's indices put right), where g asks for −g. No scale of rows corrects that.
With J the derivative of the logits by both projections, the ideal step is the least squares problem

    θ = Jᵀ(JJᵀ + λI)⁻¹ g,   λ = damping · tr(JJᵀ) / logits,

one for each head. In a few minutes the program prints how the step points, what it costs and what it trains: it points
where it should, costs more than ten times the plain module, and trains no better. QK-norm (after Henry et al. 2020)
is the structural counterpart: queries and keys are divided by their root mean square.
"""

import argparse
import copy
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from rich.progress import track
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.func import functional_call, jvp

from adiv_optim import Proportional, attach, detach

from .arguments import positive


@dataclass(frozen=True)
class Ideal:
    """How the step is solved for.

    Args:
        damping: the ridge, as a share of the mean eigenvalue of JJᵀ; with ∞ the step has the plain direction.
        joint: solve for all sequences of a batch at once; False adds up the steps of each by itself.
        tolerance: the relative residual at which conjugate gradients stop; a step that stops early is still downhill.
        max_iterations: of conjugate gradients, at most.
    """

    damping: float = 0.1
    joint: bool = True
    tolerance: float = 1e-2
    max_iterations: int = 30


class LogitMap(NamedTuple):
    """J, by which θ, a change of the query and key projections, moves the logits to first order.

    Jθ = s(X~ δWqᵀ Kᵀ + Q δWk X~ᵀ) and Jᵀu = s((uK)ᵀX~, (uᵀQ)ᵀX~), where X~ = [X, 1] has a column for the bias.
    Problems and heads share no parameters. Logits have the shape (problems, heads, sequences, tokens, tokens), θ has
    (2, problems, heads, head_dim, features + 1): queries first, then keys.
    """

    rows: Tensor  # X~, (problems, sequences, tokens, features + 1)
    queries: Tensor  # Q, (problems, heads, sequences, tokens, head_dim)
    keys: Tensor  # K, likewise
    scale: float  # s

    @classmethod
    def of(cls, input: Tensor, queries: Tensor, keys: Tensor, joint: bool) -> "LogitMap":
        """From X, (sequences, tokens, features), and Q and K, (sequences, heads, tokens, head_dim)."""
        rows = torch.cat([input, torch.ones_like(input[..., :1])], -1).unsqueeze(0 if joint else 1)
        return cls(rows, problems(queries, joint), problems(keys, joint), queries.shape[-1] ** -0.5)

    def forward(self, theta: Tensor) -> Tensor:
        """Jθ."""
        by_queries, by_keys = (torch.einsum("psic,phdc->phsid", self.rows, side) for side in theta)
        return self.scale * (by_queries @ self.keys.mT + self.queries @ by_keys.mT)

    def adjoint(self, logits: Tensor) -> Tensor:
        """Jᵀu, the plain gradient if u is that of the logits."""
        sides = (logits @ self.keys, logits.mT @ self.queries)
        return self.scale * torch.stack([torch.einsum("phsid,psic->phdc", side, self.rows) for side in sides])

    def mean_eigenvalue(self) -> Tensor:
        """tr(JJᵀ) / logits, (problems, heads): the mean of s²(|x~_i|²|k_j|² + |q_i|²|x~_j|²) over i and j."""
        rows, queries, keys = (t.square().sum(-1).mean(-1) for t in (self.rows.unsqueeze(1), self.queries, self.keys))
        return self.scale**2 * (rows * (queries + keys)).mean(-1)


def problems(tensor: Tensor, joint: bool) -> Tensor:
    """(sequences, heads, …) → (problems, heads, sequences, …): one problem, or one for each sequence."""
    return tensor.transpose(0, 1).unsqueeze(0) if joint else tensor.unsqueeze(2)


def ideal_step(logit_map: LogitMap, right: Tensor, rule: Ideal) -> Tensor:
    """θ = Jᵀ(JJᵀ + λI)⁻¹g by conjugate gradients, problems and heads side by side; NaN and inf travel."""
    ridge = rule.damping * logit_map.mean_eigenvalue()[..., None, None]

    def squared(theta: Tensor) -> Tensor:
        return theta.square().sum((0, 3, 4))[..., None, None]

    residual, gradient = right, logit_map.adjoint(right)
    theta, direction, gamma = torch.zeros_like(gradient), gradient, squared(gradient)
    goal = rule.tolerance**2 * gamma
    for _ in range(rule.max_iterations):
        going = ~(gamma <= goal)
        if not going.any():
            break
        moved = logit_map.forward(direction)
        length = moved.square().sum((2, 3, 4))[..., None, None] + ridge * squared(direction)
        step = torch.where(going, gamma / length, 0.0)
        theta, residual = theta + step * direction, residual - step[..., None] * moved
        gradient = logit_map.adjoint(residual) - ridge * theta
        before, gamma = gamma, squared(gradient)
        direction = gradient + torch.where(going, gamma / before, 0.0) * direction
    return theta


class _IdealLogits(Function):
    """s QKᵀ, which hands the parameters of Q and K the ideal step, and Q and K the plain gradients."""

    @staticmethod
    def forward(ctx: Any, queries: Tensor, keys: Tensor, input: Tensor, rule: Ideal, *parameters: Tensor) -> Tensor:
        ctx.rule = rule
        ctx.save_for_backward(queries, keys, input)
        return queries @ keys.mT * queries.shape[-1] ** -0.5

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logits: Tensor) -> tuple[Tensor | None, ...]:
        queries, keys, input = ctx.saved_tensors
        logit_map = LogitMap.of(input, queries, keys, ctx.rule.joint)
        theta = ideal_step(logit_map, problems(grad_logits, ctx.rule.joint), ctx.rule).sum(1).flatten(1, 2)
        scaled = grad_logits * logit_map.scale
        return scaled @ keys, scaled.mT @ queries, None, None, *theta[..., :-1], *theta[..., -1]


class Logits(nn.Module):
    """Attention logits, (sequences, tokens, width) → (sequences, heads, tokens, tokens)."""

    def __init__(self, width: int, heads: int, ideal: Ideal | None = None, qk_norm: bool = False) -> None:
        super().__init__()
        self.heads, self.ideal, self.qk_norm = heads, ideal, qk_norm
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)

    def split(self, projected: Tensor) -> Tensor:
        """(…, tokens, heads · head_dim) → (…, heads, tokens, head_dim)."""
        return projected.unflatten(-1, (self.heads, -1)).transpose(-3, -2)

    def forward(self, input: Tensor) -> Tensor:
        """Return s QKᵀ."""
        if self.ideal is not None:
            # The projections see parameters that stand still: through them flows the input's gradient alone.
            sides = (self.query, self.key)
            q, k = (self.split(F.linear(input, p.weight.detach(), p.bias.detach())) for p in sides)
            parameters = (*(p.weight for p in sides), *(p.bias for p in sides))
            return _IdealLogits.apply(q, k, input.detach(), self.ideal, *parameters)
        q, k = self.split(self.query(input)), self.split(self.key(input))
        if self.qk_norm:
            q, k = F.rms_norm(q, q.shape[-1:]), F.rms_norm(k, k.shape[-1:])
        return q @ k.mT * q.shape[-1] ** -0.5


class SelfAttention(nn.Module):
    """Multi-head self-attention with `Logits`, initialised as nn.MultiheadAttention."""

    def __init__(self, width: int, heads: int, **options: Any) -> None:
        super().__init__()
        self.logits = Logits(width, heads, **options)
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)
        limit = (6 / (4 * width)) ** 0.5
        for projection in (self.logits.query, self.logits.key, self.value):
            nn.init.uniform_(projection.weight, -limit, limit)
        for projection in (self.logits.query, self.logits.key, self.value, self.out):
            nn.init.zeros_(projection.bias)

    def forward(self, input: Tensor) -> Tensor:
        """(sequences, tokens, width) → the same shape."""
        values = self.logits.split(self.value(input))
        return self.out((self.logits(input).softmax(-1) @ values).transpose(-3, -2).flatten(-2))


METHODS: dict[str, dict[str, Any]] = {
    "plain": {},
    "QK-norm": {"qk_norm": True},
    "ideal": {"ideal": Ideal()},
    "ideal, each sequence": {"ideal": Ideal(joint=False)},
}
#: Learning rate, and the factor on it for query and key, which a search on a tenth of the training set chose.
RATES = {
    "Adam": {"plain": (3e-3, 3.0), "QK-norm": (1e-2, 0.1), "ideal": (3e-3, 10.0), "ideal, each sequence": (3e-3, 10.0)},
    "SGD": {"plain": (0.3, 10.0), "QK-norm": (0.3, 100.0), "ideal": (0.1, 1e4), "ideal, each sequence": (0.3, 1e3)},
}


def cosines(logits: Logits, input: Tensor, grad_logits: Tensor) -> Tensor:
    """Of each head's first-order change of the logits by a unit step, with the ideal one, −g."""
    plain = copy.deepcopy(logits)
    detach(plain)
    plain.ideal = None
    logits.zero_grad()
    logits(input).backward(grad_logits)
    at = {name: p.detach() for name, p in plain.named_parameters()}
    step = {name: -p.grad for name, p in logits.named_parameters() if p.grad is not None}
    change = jvp(lambda parameters: functional_call(plain, parameters, (input,)), (at,), (step,))[1]
    moved, wanted = (tensor.transpose(0, 1).flatten(1) for tensor in (change, -grad_logits))
    return F.cosine_similarity(moved, wanted, dim=1)


def alignment(sequences: int, uneven: bool, draws: int) -> dict[str, float]:
    """The mean cosine of every method at the start of training; `uneven` scales tokens by log-normal numbers."""
    exact = [Ideal(1e-3, joint, tolerance=1e-4, max_iterations=500) for joint in (True, False)]
    methods = {**METHODS, "ideal": {"ideal": exact[0]}, "ideal, each sequence": {"ideal": exact[1]}}
    found: dict[str, list[float]] = {name: [] for name in (*methods, "Proportional")}
    for seed in range(draws):
        torch.manual_seed(seed)
        start = SelfAttention(64, 4).logits.state_dict()
        input, g = torch.randn(sequences, 16, 64), torch.randn(sequences, 4, 16, 16)
        input = input * torch.randn(sequences, 16, 1).exp() if uneven else input
        for name in found:
            logits = Logits(64, 4, **methods.get(name, {}))
            logits.load_state_dict(start)
            if name == "Proportional":
                attach(logits, Proportional())
            found[name].append(cosines(logits, input, g).mean().item())
    return {name: statistics.fmean(each) for name, each in found.items()}


def price(rounds: int) -> dict[str, float]:
    """Seconds of forward and backward of the whole module: medians of rounds in turn."""
    input, spent = torch.randn(16, 16, 64, requires_grad=True), {name: list[float]() for name in METHODS}
    layers = {name: SelfAttention(64, 4, **options) for name, options in METHODS.items()}
    for _ in range(rounds):
        for name, layer in layers.items():
            began = time.perf_counter()
            layer(input).square().mean().backward()
            spent[name].append(time.perf_counter() - began)
    return {name: statistics.median(each) for name, each in spent.items()}


class RowClassifier(nn.Module):
    """Digits as eight tokens, their rows: embed, attend once with a residual, pool by the mean, classify."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(8, 32), nn.Linear(32, 10)
        self.position = nn.Parameter(0.5 * torch.randn(8, 32))
        self.attention = SelfAttention(32, 4, **options)

    def forward(self, pixels: Tensor) -> Tensor:
        """(samples, 64) → (samples, 10)."""
        x = self.embed(pixels.unflatten(1, (8, 8))) + self.position
        return self.head((x + self.attention(x)).mean(1))


def train(method: str, optimizer: str, seed: int, epochs: int) -> float:
    """The test accuracy in % after training on four fifths of scikit-learn's digits."""
    images, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    pixels, labels, held = images.float()[order] / 16, labels[order], len(labels) // 5
    torch.manual_seed(seed)
    model = RowClassifier(**METHODS[method])
    own = [*model.attention.logits.parameters()]
    others = [p for p in model.parameters() if all(p is not q for q in own)]
    rate, factor = RATES[optimizer][method]
    stepper = getattr(torch.optim, optimizer)([{"params": others}, {"params": own, "lr": rate * factor}], lr=rate)
    for _ in range(epochs):
        for batch in (torch.randperm(len(labels) - held) + held).split(32):
            stepper.zero_grad()
            F.cross_entropy(model(pixels[batch]), labels[batch]).backward()
            stepper.step()
    with torch.no_grad():
        return 100 * (model(pixels[:held]).argmax(1) == labels[:held]).double().mean().item()


def main(arguments: Sequence[str] | None = None) -> None:
    """Print three tables."""
    parser = argparse.ArgumentParser(prog="python -m examples.attention", description=__doc__.partition("\n")[0])
    for name, number in (("draws", 20), ("rounds", 30), ("epochs", 10), ("seeds", 3)):
        parser.add_argument(f"--{name}", type=positive, default=number, help=f"{number} where it is not given")
    options = parser.parse_args(arguments)
    if options.seeds < 2:
        parser.error("--seeds: a standard error wants 2 or more")
    cases = {f"{n}{', uneven' * uneven}": (n, uneven) for n in (1, 16) for uneven in (False, True)}
    found = {title: alignment(*case, options.draws) for title, case in track([*cases.items()], "cosines")}
    print("cosine of the logits' change with −g, by sequences in a batch:")
    for name in found["1"]:
        print(f"  {name:<21}" + "  ".join(f"{title}: {each[name]:.2f}" for title, each in found.items()))
    seconds = price(options.rounds)
    print("forward and backward of 16 sequences, in times of the plain module:")
    for name, each in seconds.items():
        print(f"  {name:<21}{each / seconds['plain']:.1f}")
    runs = [(optimizer, method, seed) for optimizer in RATES for method in METHODS for seed in range(options.seeds)]
    accuracy = {run: train(*run[1::-1], run[2], options.epochs) for run in track(runs, "training")}
    print(f"test accuracy on digits in %, mean ± standard error of {options.seeds} seeds:")
    for method in METHODS:
        every = {o: [accuracy[o, method, seed] for seed in range(options.seeds)] for o in RATES}
        errors = {o: statistics.stdev(each) / math.sqrt(len(each)) for o, each in every.items()}
        print(f"  {method:<21}" + "  ".join(f"{o}: {statistics.fmean(every[o]):.1f} ± {errors[o]:.1f}" for o in RATES))


if __name__ == "__main__":
    main()
