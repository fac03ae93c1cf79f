"""
A GPT without normalisers
=========================

A normaliser keeps the inputs of a layer at size 1, and with them the effect of an optimizer's step on its outputs.
Muon and Adam take steps of a size of their own, whatever the gradient: without normalisers the same step moves outputs
the further, the larger the inputs have grown. ``InputScaled`` divides the step of every layer by the size of its
inputs. The forward pass computes no statistic.
"""

import matplotlib.pyplot as plt
import torch
from torch import nn

from adiv_optim import ChainedOptimizer, InputScaled
from examples.gpt import DEFAULT, GPT, Preset, all_windows, load, next_character_loss, rate_factor

# %%
# A transformer of three layers on the characters of Python's reference manual. Without normalisers it differs in
# nothing but that: ``nn.Identity`` stands where LayerNorm was. Embeddings are drawn with a deviation of 1, so that the
# first layer reads what a normaliser would give it; ``hold=True`` shrinks the weights of a layer as its inputs grow.
# Both are the recipe of :doc:`InputScaled </coordinates/input-scaled>`.

SIZE = Preset(layers=3, width=64, heads=4, context=32, batch_size=16)
STEPS = 100
text = load(DEFAULT)
held_out = all_windows(text.validation, SIZE)[::20]


def trained(norm, rate, *, scaled=False):
    """Train a model; return the steps at which the loss on held-out text was measured, and the losses."""
    torch.manual_seed(0)
    model = GPT(SIZE, len(text.vocabulary), norm, embedding_deviation=1.0)
    matrices = [module.weight for module in model.blocks.modules() if isinstance(module, nn.Linear)]
    inside = {id(matrix) for matrix in matrices}
    rest = [parameter for parameter in model.parameters() if id(parameter) not in inside]
    muon = torch.optim.Muon(matrices, lr=rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    optimizer = ChainedOptimizer([muon, torch.optim.AdamW(rest, lr=3e-3)])
    if scaled:
        optimizer = InputScaled(optimizer, model, hold=True, skip=["head"])
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: rate_factor(min(done + 1, STEPS), STEPS))
    steps, losses, generator = [], [], torch.Generator().manual_seed(0)
    for step in range(1, STEPS + 1):
        starts = torch.randint(len(text.train) - SIZE.context, (SIZE.batch_size, 1), generator=generator)
        optimizer.zero_grad()
        next_character_loss(model, text.train[starts + torch.arange(SIZE.context + 1)]).backward()
        optimizer.step()
        schedule.step()
        if step % 10 == 0:
            with torch.no_grad():
                steps.append(step)
                losses.append(next_character_loss(model, held_out).item())
    return steps, losses


# %%
# Muon at two rates, the second three times the first.

WAYS = {
    "LayerNorm, Muon": ("tab:green", {"norm": "layernorm"}),
    "no normaliser, Muon": ("tab:blue", {"norm": "none"}),
    "no normaliser, InputScaled(Muon)": ("tab:red", {"norm": "none", "scaled": True}),
}
RATES = (0.02, 0.06)
figure, axes = plt.subplots(1, 2, figsize=(9.6, 3.8), sharey=True, layout="constrained")
end = {}
for axis, rate in zip(axes, RATES, strict=True):
    for name, (colour, how) in WAYS.items():
        steps, losses = trained(rate=rate, **how)
        axis.plot(steps, losses, "--" if "scaled" in how else "-", color=colour, label=name)
        end[name, rate] = losses[-1]
    axis.set(title=f"learning rate {rate:g}", xlabel="step", ylim=(2.2, 3.6))
    axis.grid(alpha=0.3)
axes[0].set_ylabel("loss on held-out text, nats")
_ = figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)

# %%
# **At the smaller learning rate the network needs no normaliser, and no InputScaled. At the larger one Muon's steps are
# too long for it, and with InputScaled they are not.** One seed and a hundred steps show what happens, not what is
# better: :doc:`the measurements </results/language-model>` have a network twice as wide for four times as long, with a
# learning rate chosen for each row and more seeds.

for (name, rate), loss in end.items():
    print(f"{name:<33} learning rate {rate:g}: {loss:.2f}")
layernorm, plain, scaled = ([end[name, rate] for rate in RATES] for name in WAYS)
assert plain[0] < layernorm[0]
assert scaled[1] < plain[1] - 0.2
