r"""
What one step does to activations
=================================

A gradient step is to move a layer's outputs down the loss: row k by :math:`-\eta g_k`. It moves the weights instead,
and every row that the layer has read moves with them. The picture shows where six rows want to go and where a step
takes them.
"""

import matplotlib.pyplot as plt
import torch
from torch import nn

from adiv_optim import BatchIdeal, Proportional, attach

# %%
# Six rows of eight numbers, short ones and long ones. The first two point almost the same way and want opposite
# things.

torch.manual_seed(1)
rows = torch.randn(6, 8, dtype=torch.float64)
rows[1] = rows[0] + 0.3 * torch.randn(8, dtype=torch.float64)
rows *= torch.tensor([1.0, 1.0, 0.5, 0.8, 1.3, 1.7], dtype=torch.float64).unsqueeze(1) / rows.norm(dim=1, keepdim=True)
wanted = torch.randn(6, 2, dtype=torch.float64)
wanted /= wanted.norm(dim=1, keepdim=True)
wanted[1] = -wanted[0]


def moved(correction=None):
    """How a step at rate 1 moves the outputs, in place of `wanted`."""
    torch.manual_seed(0)
    layer = nn.Linear(8, 2).double()
    if correction is not None:
        attach(layer, correction)
    before = layer(rows)
    before.backward(-wanted)  # the gradient of a loss that falls where outputs go where they want to
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter -= parameter.grad
        return layer(rows) - before


# %%
# Every row has its own place in the picture. The grey arrow is what it asked for, the coloured one what a step of
# plain gradient descent at rate 1 did: by the gradient as it is, and as two corrections make it.

STEPS = {
    "plain gradient": (None, "tab:blue"),
    "Proportional": (Proportional(), "tab:cyan"),
    "BatchIdeal": (BatchIdeal(damping=1e-6, per_sample=False), "black"),
}
PLACES = torch.cartesian_prod(torch.arange(3) * 3.0, torch.arange(2) * 3.0)
figure, axes = plt.subplots(1, 3, figsize=(9.6, 3.6), sharex=True, sharey=True, layout="constrained")
error = {}
for axis, (name, (correction, colour)) in zip(axes, STEPS.items(), strict=True):
    step = moved(correction)
    error[name] = ((step - wanted).norm() / wanted.norm()).item()
    arrow = {"angles": "xy", "scale_units": "xy", "scale": 1}
    axis.quiver(*PLACES.T, *wanted.T, color="0.75", width=0.014, **arrow, label="asked for")
    axis.quiver(*PLACES.T, *step.T, color=colour, width=0.009, **arrow, label="done")
    axis.plot(*PLACES.T, "k.", markersize=5)
    axis.set_title(f"{name}: off by {error[name]:.0%}", fontsize=10)
    axis.set_aspect("equal")
axes[0].set(xlim=(-2.2, 7.2), ylim=(-1.8, 5.8), xticks=[], yticks=[])
_ = figure.legend(*axes[1].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)

# %%
# **The plain step goes too far**: a row pulls its own output by :math:`|x|^2 + 1` times what it asked for, and those
# of the others along. ``Proportional`` divides every row by its own :math:`|x|^2 + 1`. Each row's own pull is then
# right, and what remains wrong is the pull of the others. ``BatchIdeal`` takes that away as well: with fewer rows than
# columns every output goes where it asked to.

assert error["plain gradient"] > 2 * error["Proportional"] > error["BatchIdeal"]
assert error["BatchIdeal"] < 1e-3
