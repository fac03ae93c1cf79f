"""
A picture learned from its coordinates
======================================

A coordinate network learns a function of (x, y), here the colours of a picture. BatchNorm helps it to train, and is out
of place: the value at a point then depends on which other points are asked for with it. ``Whitened`` leaves the network
alone, and lets the optimizer step where the inputs of every layer are white.
"""

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import nn

from adiv_optim import Whitened
from examples.fit_image import network, picture, psnr

# %%
# Ten linear layers of width 28 with ReLU, those of ``examples.fit_image`` without its features, and 48 × 48 pixels.
# Each optimizer learns all pixels in every step. Learning rates and damping are those that a search has found.

STEPS = 200
wanted = picture(None, 48)
axis = (torch.arange(48) + 0.5) / 48 * 2 - 1
points, colours = torch.cartesian_prod(axis, axis), wanted.reshape(-1, 3)


def trained(lr, *, batch_norm=False, white=False):
    """Learn the picture; return the PSNR after every step, and the network."""
    torch.manual_seed(0)
    model = network(2, batch_norm=batch_norm)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    if white:
        optimizer = Whitened(optimizer, model, damping=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, STEPS, pct_start=0.1, cycle_momentum=False)
    decibels = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = F.mse_loss(model(points), colours)
        loss.backward()
        optimizer.step()
        schedule.step()
        decibels.append(10 * torch.log10(4 / loss.detach()).item())
    return decibels, model


ways = {
    "Adam": trained(0.03),
    "Adam, BatchNorm": trained(0.03, batch_norm=True),
    "Whitened Adam": trained(0.05, white=True),
}

# %%
# Whitening gives Adam what BatchNorm gives it, and the network stays a function of a point.

fig, axes = plt.subplots(1, 4, figsize=(11, 3), layout="constrained", width_ratios=[1.7, 1, 1, 1])
for (name, (decibels, model)), place in zip(ways.items(), axes[1:], strict=True):
    axes[0].plot(decibels, label=name)
    with torch.no_grad():
        found = model(points).view_as(wanted)
    place.imshow(((found + 1) / 2).clamp(0, 1))
    place.set_title(f"{name}: {psnr(found, wanted):.1f} dB", fontsize=10)
    place.set_axis_off()
axes[0].set(xlabel="steps", ylabel="PSNR, dB")
axes[0].legend()
plt.show()

# %%
# One point alone, and the same point among others: with BatchNorm the two answers differ.

one = points[1000:1001].repeat(2, 1)
for name, (_, model) in ways.items():
    with torch.no_grad():
        apart = (model(one)[0] - model(points)[1000]).abs().max().item()
    print(f"{name}: {apart:.2g}")
    assert (apart > 1e-3) == any(isinstance(module, nn.BatchNorm1d) for module in model.modules())
assert ways["Whitened Adam"][0][-1] > ways["Adam"][0][-1] + 3
