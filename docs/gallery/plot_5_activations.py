r"""
How fast an activation drives samples apart
===========================================

In a deep random network without normalisers, samples come to look alike or to stretch out of proportion. An activation
followed by a normaliser does the opposite: every layer leaves the samples closer to orthogonal and equally long. How
fast is a number of the activation.
"""

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

from adiv_optim.diagnostics import hermite_coefficients, isometry_gap, isometry_strength

# %%
# The isometry gap of samples with Gram matrix G is :math:`-\log(\det(G)^{1/n} / (\mathrm{tr}(G)/n))`: 0 if they are
# orthogonal and equally long. The strength :math:`\beta` of an activation is 1 for a linear function and at most 2.

ACTIVATIONS = {
    "identity": (lambda x: x, "0.6"),
    "sigmoid": (torch.sigmoid, "tab:blue"),
    "tanh": (torch.tanh, "tab:green"),
    "SiLU": (F.silu, "tab:purple"),
    "ReLU": (torch.relu, "tab:red"),
}
strength = {name: isometry_strength(function) for name, (function, _) in ACTIVATIONS.items()}
for name, value in strength.items():
    print(f"{name:<9} {value:.4f}")

# %%
# Ten samples, any two of them with a correlation of 0.5, go through thirty layers of width 512: a random matrix, the
# activation, and a normaliser that centres and divides.

WIDTH, DEPTH, SAMPLES = 512, 30, 10
start = torch.full((SAMPLES, SAMPLES), 0.5, dtype=torch.float64).fill_diagonal_(1.0)


def gaps(function):
    """The isometry gap after every layer."""
    torch.manual_seed(0)
    directions, _ = torch.linalg.qr(torch.randn(WIDTH, SAMPLES, dtype=torch.float64))
    x = torch.linalg.cholesky(start) @ directions.T * WIDTH**0.5
    found = [isometry_gap(x @ x.T).item()]
    for _ in range(DEPTH):
        x = function(x @ torch.randn(WIDTH, WIDTH, dtype=torch.float64) / WIDTH**0.5)
        x = F.layer_norm(x, (WIDTH,), eps=0.0)
        found.append(isometry_gap(x @ x.T).item())
    return found


def limit(function):
    """The same in a network of infinite width, where a correlation ρ becomes Σ c_k² ρᵏ / Σ c_k² (k ≥ 1)."""
    shares = hermite_coefficients(function, 100).square()[1:]
    shares, powers, correlation = shares / shares.sum(), torch.arange(1, 101), start
    found = [isometry_gap(start).item()]
    for _ in range(DEPTH):
        correlation = ((correlation.unsqueeze(-1) ** powers) @ shares).fill_diagonal_(1.0)
        found.append(isometry_gap(correlation).item())
    return found


figure, axis = plt.subplots(figsize=(9.6, 4.2), layout="constrained")
measured = {}
for name, (function, colour) in ACTIVATIONS.items():
    measured[name] = gaps(function)
    axis.plot(measured[name], color=colour, label=f"{name}, β = {strength[name]:.3f}")
    axis.plot(limit(function), ":", color=colour)
axis.plot([], [], ":", color="0.3", label="infinite width")
axis.set(xlabel="depth", ylabel="isometry gap", yscale="log", ylim=(1e-2, 2))
axis.grid(alpha=0.3)
_ = axis.legend(frameon=False, ncols=2)

# %%
# **The larger its β, the sooner an activation drives samples apart.** A linear network never does. The dotted lines
# are networks of infinite width; in one of width 512 the samples are only as orthogonal as ten random directions are,
# and the gap stays near 0.02.

assert measured["identity"][-1] > measured["tanh"][10] > measured["SiLU"][10] > measured["ReLU"][10]
