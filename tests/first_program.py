"""Takes a step with torch and this package alone; says whether layers came unasked, and where the package is."""

import sys

import torch

import adiv_optim

print("adiv_optim.layers" in sys.modules)
model = torch.nn.Sequential(adiv_optim.layers.AffineLikeLinear(2, 2), torch.nn.Linear(2, 1))
opt = adiv_optim.Whitened(torch.optim.Adam(model.parameters(), lr=0.01), model)
model(torch.ones(1, 2)).sum().backward()
opt.step()
print(adiv_optim.__file__, adiv_optim.layers.__file__, sep="\n")
