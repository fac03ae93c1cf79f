"""Takes a step with torch and this package alone; says where the package is."""

import torch

import adiv_optim

model = torch.nn.Sequential(adiv_optim.layers.AffineLikeLinear(2, 2), torch.nn.Linear(2, 1))
opt = adiv_optim.Whitened(torch.optim.Adam(model.parameters(), lr=0.01), model)
model(torch.ones(1, 2)).sum().backward()
opt.step()
print(adiv_optim.__file__, adiv_optim.layers.__file__, sep="\n")
