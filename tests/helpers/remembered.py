"""What wrappers that measure inputs remember, as state dicts have it and as steps show it."""

import copy
import warnings
from typing import Any

import torch
from torch import Tensor, nn


def remembered(optimizer: Any) -> dict[str, dict[str, Any]]:
    """By the names of parameters, what the state dict has of them beside the inner optimizer's state."""
    saved, prefix = optimizer.state_dict(), optimizer.watch.prefix
    names = {id(p): name for name, p in optimizer.model.named_parameters()}
    entries, found = {**saved["state"], **saved.get("adiv_optim.waiting", {})}, {}
    for group, saved_group in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        for p, key in zip(group["params"], saved_group["params"], strict=True):
            own = {name: value for name, value in entries.get(key, {}).items() if name.startswith(prefix)}
            if own and id(p) in names:  # else the model has lost it
                found[names[id(p)]] = {name.removeprefix(prefix): value for name, value in own.items()}
    return found


def rows_counted(optimizer: Any) -> dict[str, float]:
    """By the names of weights, how many rows their averages are of, earlier ones with the factor decay^age."""
    return {name: entries["rows"] for name, entries in remembered(optimizer).items() if "rows" in entries}


def memory(optimizer: Any) -> list[Tensor]:
    """All that is remembered but the number of steps and the settings, which are whole numbers."""
    entries = [value for found in remembered(optimizer).values() for value in found.values()]
    return [torch.as_tensor(value) for value in entries if not isinstance(value, int)]


def covariance_of(optimizer: Any, layer: nn.Module, damping: float = 1.0) -> Tensor:
    """The A of a layer, (d, d), or (groups, d, d) of a convolution of several groups, as steps of SGD show it.

    A gradient of 1 in one column and of 0 elsewhere moves every output's weights by -lr times one row of (A + λI)⁻¹,
    λ being damping × A's mean eigenvalue. So it is for Preconditioned, and for Whitened without `graft_norm`.
    """
    optimizer, layer = copy.deepcopy((optimizer, layer))  # copies have no gradients
    optimizer.zero_grad()
    assert type(optimizer.inner) is torch.optim.SGD
    assert all(group["momentum"] == group["weight_decay"] == 0 for group in optimizer.param_groups)
    weight, bias = layer.weight, layer.bias if hasattr(layer, "bias") else None
    parameters: list[Any] = [weight] if bias is None else [weight, bias]
    rows = []
    for column in range(weight[0].numel() + len(parameters) - 1):
        for p in parameters:
            p.grad = torch.zeros_like(p)
        gradients = [p.grad.view(len(p), -1) for p in parameters]
        (gradients[-1] if column == weight[0].numel() else gradients[0][:, column]).fill_(1)
        before = _columns(parameters)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # no layer is called any more
            optimizer.step()
        rows.append((before - _columns(parameters)) / optimizer.param_groups[0]["lr"])
    groups = getattr(layer, "groups", 1)
    damped = torch.linalg.inv(torch.stack(rows, 1)[:: len(weight) // groups])
    level = damped.diagonal(dim1=-2, dim2=-1).mean(-1) / (1 + damping)
    found = damped - damping * level[:, None, None] * torch.eye(damped.shape[-1])
    return found if groups > 1 else found[0]


def _columns(parameters: list[Tensor]) -> Tensor:
    return torch.cat([p.detach().view(len(p), -1) for p in parameters], 1)
