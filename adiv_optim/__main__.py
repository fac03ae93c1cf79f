"""`python -m adiv_optim`: versions, and checks of this machine, to paste into a bug report."""

import platform
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

import torch

from . import __version__

#: Packages that the benchmarks use or compare with, and trainers of others; extras bench, peers and integration.
OPTIONAL = (
    "torchvision", "matplotlib", "numpy", "pandas", "rich", "scikit-learn", "scipy", "seaborn", "tyro", "opacus",
    "isaac", "schedulefree", "pytorch_optimizer", "singd", "torch-levenberg-marquardt", "accelerate", "lightning",
    "tensorboard", "timm", "transformers", "wandb", "deepxde", "keras", "neuraloperator", "pina-mathlab", "skorch",
    "stable-baselines3", "torch_geometric", "zuko",
)  # fmt: skip


def facts() -> Iterator[tuple[str, str]]:
    """Yield the name and the value of each fact; the slowest comes last."""
    yield "adiv_optim", __version__
    yield "Python", f"{platform.python_version()} ({platform.python_implementation()})"
    yield "platform", platform.platform()
    yield "torch", torch.__version__
    yield "GPU", _gpus()
    yield "threads", f"{torch.get_num_threads()}"
    for name in OPTIONAL:
        yield name, installed_version(name)
    yield "torch.compile", _compiles()


def _gpus() -> str:
    if not torch.cuda.is_available():
        return f"none (torch built for CUDA {torch.version.cuda}, HIP {torch.version.hip})"
    names = Counter(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
    return ", ".join(f"{count} × {name}" for name, count in names.items())


def installed_version(distribution: str) -> str:
    """Return the version of an installed package, or "not installed"."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"


def _compiles() -> str:
    try:
        torch.compile(lambda x: x.sin() + 1)(torch.ones(2, device="cuda" if torch.cuda.is_available() else "cpu"))
    except Exception as error:  # the report names any failure
        return f"fails: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return "works"


if __name__ == "__main__":
    for name, value in facts():
        print(f"{name:<28}{value}", flush=True)
