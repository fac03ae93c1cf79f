"""
The same network in five gauges
===============================

Multiply what enters a ReLU unit by ten and divide what leaves it by ten: the network computes the same function. Its
gradient does not know that, and training takes another path. ``UnitConsistent`` lets any optimizer step in coordinates
in which both are one network.
"""

from copy import deepcopy

import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from adiv_optim import UnitConsistent, gauge

# %%
# Two spirals, and a network that tells them apart. Five copies of it compute the same function: their hidden units are
# rescaled by :math:`e^s`, with s normal of deviation 1.

torch.manual_seed(0)
angle = 3 * torch.linspace(0.2, 1, 200, dtype=torch.float64).sqrt() * torch.pi
arm = torch.stack([angle * angle.cos(), angle * angle.sin()], dim=1) / 10
points = torch.cat([arm, -arm]) + 0.02 * torch.randn(400, 2, dtype=torch.float64)
labels = torch.arange(2).repeat_interleave(200)

network = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2)).double()
graph = gauge.trace(network, points)
generator = torch.Generator().manual_seed(0)
scales = [gauge.random_gauge(graph, 1.0, generator=generator) for _ in range(5)]
copies = [gauge.apply_gauge(deepcopy(network), graph, each) for each in scales]
assert all(torch.allclose(copy(points), network(points)) for copy in copies)

# %%
# Each is trained by Adam and by the same Adam in canonical coordinates.


def losses(model, wrap):
    """Train a copy; return the loss before every step."""
    model = deepcopy(model)
    optimizer = wrap(torch.optim.Adam(model.parameters(), lr=0.01), model)
    found = []
    for _ in range(200):
        optimizer.zero_grad()
        loss = cross_entropy(model(points), labels)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


WAYS = {
    "Adam": lambda inner, model: inner,
    "UnitConsistent(Adam)": lambda inner, model: UnitConsistent(inner, model, graph=graph),
}
paths = {name: torch.tensor([losses(copy, wrap) for copy in copies]) for name, wrap in WAYS.items()}

figure, axes = plt.subplots(1, 2, figsize=(9.6, 3.6), sharey=True, layout="constrained")
for axis, (name, found) in zip(axes, paths.items(), strict=True):
    for number, path in enumerate(found):
        # On the right each line is narrower than the one before: they lie on top of each other.
        width = 1.6 if name == "Adam" else 8 - 1.6 * number
        axis.plot(path, linewidth=width, color=plt.get_cmap("viridis")(number / 5), label=f"gauge {number + 1}")
    axis.set(title=name, xlabel="step", yscale="log")
    axis.grid(alpha=0.3)
axes[0].set_ylabel("loss")
_ = axes[0].legend(frameon=False)

# %%
# **Five gauges, five paths on the left; on the right one path five times**, to rounding. It need not be the best of
# the five: a network that PyTorch has just drawn mostly trains better as it is. The point is that the scales of hidden
# units, which merging, pruning or converting a network leaves in any state, no longer have a say.

spread = {name: (found.max(0).values / found.min(0).values)[-1].item() for name, found in paths.items()}
print({name: f"largest over smallest loss at the end: {ratio:.6f}" for name, ratio in spread.items()})
assert spread["Adam"] > 2
assert spread["UnitConsistent(Adam)"] < 1 + 1e-6
