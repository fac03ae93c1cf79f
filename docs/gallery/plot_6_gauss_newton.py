r"""
The step of a whole network
===========================

A network solves a differential equation where its residual is 0. Such a loss is cheap to evaluate and stiff to lower:
gradients crawl. ``GaussNewton`` solves for the step that moves all residuals as the loss asks, without a learning rate.
"""

import time

import matplotlib.pyplot as plt
import torch
from torch import nn
from torch.func import vmap

from adiv_optim import GaussNewton
from adiv_optim.jacobian import derivatives

# %%
# The sine-Gordon equation :math:`u_{tt} = u_{xx} - \sin u` on a string that begins flat, with a push in the middle.
# Each residual is written for *one* point (x, t), in units of 8 and 6. Its solution is known: it swings, and stays.

LENGTH, TIME = 8, 6


def breather(points):
    x, t = LENGTH * points[..., 0], TIME * points[..., 1]
    return 4 * torch.atan(4 / 3 * torch.sin(0.6 * t) / torch.cosh(0.8 * x))


def inside(model, point):
    (u,), _, ((u_xx, u_tt),) = derivatives(model, point)
    return u_tt / TIME**2 - u_xx / LENGTH**2 + torch.sin(u)


def at_the_start(model, point):
    (u,), ((_, u_t),), _ = derivatives(model, point)
    return torch.stack([u, u_t / TIME - 3.2 / torch.cosh(0.8 * LENGTH * point[0])])


def at_the_ends(model, point):
    return model(point)[0] - breather(point)


def terms():
    """Residuals, and points drawn for them."""
    points, start, ends = (torch.rand(count, 2).double() for count in (300, 60, 40))
    start[:, 1] = 0
    for each in (points, start):
        each[:, 0] = 2 * each[:, 0] - 1
    ends[:, 0] = torch.tensor([-1.0, 1.0]).repeat(20)
    return [(inside, points), (at_the_start, start), (at_the_ends, ends)]


# %%
# The same small network twice. A step of ``GaussNewton`` takes as long as about seven of Adam's.

x, t = torch.linspace(-1, 1, 100).double(), torch.linspace(0, 1, 100).double()
grid = torch.stack(torch.meshgrid(x, t, indexing="xy"), -1)
truth = breather(grid)


def network():
    torch.manual_seed(0)
    sizes = [(2, 16), (16, 16), (16, 16), (16, 1)]
    model = nn.Sequential(*(layer for size in sizes for layer in (nn.Linear(*size), nn.Tanh())))[:-1].double()
    for layer in model[::2]:
        nn.init.xavier_normal_(layer.weight)
        nn.init.zeros_(layer.bias)
    return model


def adam(model):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def step():
        optimizer.zero_grad()
        parts = [vmap(residual, in_dims=(None, 0))(model, points) for residual, points in terms()]
        (sum(part.square().mean() for part in parts) / 2).backward()
        optimizer.step()

    return step


def gauss_newton(model):
    optimizer = GaussNewton(model)
    return lambda: optimizer.step(terms())


fields, paths = {}, {}
for name, build, steps in (("Adam", adam, 700), ("GaussNewton", gauss_newton, 100)):
    model, seconds, errors = network(), [], []
    step, spent = build(model), 0.0
    for number in range(steps + 1):
        if number % (steps // 20) == 0:
            with torch.no_grad():
                fields[name] = (model(grid)[..., 0] - truth).abs()
            seconds.append(spent)
            errors.append((fields[name].norm() / truth.norm()).item())
        begin = time.process_time()
        step()
        spent += time.process_time() - begin
    paths[name] = seconds, errors

fig, axes = plt.subplots(1, 4, figsize=(12, 3), layout="constrained", width_ratios=[1, 1, 1, 1.5])
look = {"origin": "lower", "extent": (-LENGTH, LENGTH, 0, TIME), "aspect": "auto"}
axes[0].imshow(truth, **look)
axes[0].set(title="the string", xlabel="x", ylabel="time")
for place, (name, field) in zip(axes[1:], fields.items(), strict=False):
    shown = place.imshow(field.log10(), vmin=-6, vmax=0, cmap="magma", **look)
    place.set(title=name, xlabel="x")
    axes[3].semilogy(*paths[name], label=name)
fig.colorbar(shown, ax=axes[2], label="log₁₀ |error|")
axes[3].set(xlabel="seconds", title="relative error")
axes[3].grid(alpha=0.3)
axes[3].legend(frameon=False)
plt.show()

# %%
# **Solved for, not searched for.** It is for losses like this one: in regression, pictures and classifiers other
# methods are better.

for name, (_, errors) in paths.items():
    print(f"{name}: {errors[-1]:.1g}")
assert paths["GaussNewton"][1][-1] < 0.1 * paths["Adam"][1][-1]
