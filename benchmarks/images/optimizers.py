"""The optimizers that train networks for images."""

from collections.abc import Callable, Iterable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer


def _peer(name: str) -> Callable[..., Optimizer]:
    if find_spec("pytorch_optimizer") is None:
        raise ValueError(f"optimizer {name!r} needs the package pytorch_optimizer; pip install '.[peers]' brings it.")
    return getattr(import_module("pytorch_optimizer"), name)


def _muon(parameters: Iterable[Tensor], *, weight_decay: float = 0.0, fused: bool, **options: Any) -> Any:
    """Muon for the matrices and kernels inside a network, Adam for its last layer and its vectors."""
    everything = list(parameters)
    inside = [parameter for parameter in everything if parameter.dim() > 1][:-1]
    rest = [parameter for parameter in everything if all(parameter is not other for other in inside)]
    options["weight_decay"] = weight_decay
    # Steps of Adam's size: so one rate means much the same for both.
    groups = [
        {"params": inside, "use_muon": True, "use_adjusted_lr": True, **options},
        {"params": rest, "use_muon": False, "betas": (0.9, 0.999), "eps": 1e-8, **options},
    ]
    return _peer("Muon")([group for group in groups if group["params"]])


def _soap(parameters: Iterable[Tensor], *, weight_decay: float = 0.0, fused: bool, **options: Any) -> Any:
    return _peer("SOAP")(list(parameters), weight_decay=weight_decay, **options)


#: AdamW without decay is Adam.
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "adam": partial(AdamW, weight_decay=0.0),
    "sgd": SGD,
    "momentum": partial(SGD, momentum=0.9),
    "muon": _muon,
    "soap": _soap,
}
#: Those that step every number by itself, so that tensors of several models may be stacked.
ELEMENTWISE = ("adam", "sgd", "momentum")
