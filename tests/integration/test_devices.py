"""Models of which a part is on the CPU and the rest on a device that is pretended: see `helpers.pretended`."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import backend_registration

from adiv_optim import UnitConsistent, _device, gauge
from tests.helpers.seeds import manual_seed
from tests.wrappers import WRAPPERS, Wrapper

pytestmark = pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch has no backends in Python",
)
STEPS = 6


class Split(nn.Module):
    """A network on two devices."""

    def __init__(self, first: str, second: str, dtype: torch.dtype) -> None:
        super().__init__()
        manual_seed(0)
        features = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten())
        head = nn.Sequential(nn.Linear(36, 8), nn.ReLU(), nn.Linear(8, 3))
        self.features, self.head = features.to(dtype).to(first), head.to(dtype).to(second)
        self.devices = first, second

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.devices
        return self.head(self.features(x.to(first)).to(second))


def _layer_gauge(inner, model, example, graph):
    return UnitConsistent(inner, model, gauge=gauge.LayerGauge(), graph=graph)


ALL = {**WRAPPERS, "layer-gauge": Wrapper(_layer_gauge)}


def _path(name: str, first: str, second: str, dtype: torch.dtype) -> list[list[float]]:
    """The weights after a few steps, some of which measure."""
    x, y = torch.randn(6, 2, 5, 5, generator=torch.Generator().manual_seed(1)).to(dtype), torch.arange(6) % 3
    model = Split(first, second, dtype)
    traced = (
        {"graph": gauge.trace(Split("cpu", "cpu", dtype), x[:1])} if name in ("unit-consistent", "layer-gauge") else {}
    )
    inner = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=0.1)
    optimizer = ALL[name](inner, model, x[:1], **traced)
    for step in range(STEPS):
        optimizer.zero_grad()
        F.cross_entropy(model(x + step), y.to(second)).backward()
        optimizer.step()
    return [p.detach().flatten().tolist() for p in model.parameters()]


def _there(name: str, dtype: torch.dtype) -> list[list[float]]:
    from tests.helpers.pretended import NAME, Pretending  # in a process of its own

    with pytest.MonkeyPatch.context() as patch, Pretending():
        if dtype == torch.float64:
            return _path(name, NAME, "cpu", dtype)
        patch.setattr(Pretending, "narrow", True)
        patch.setattr(_device, "widest_dtype", lambda device: torch.float32 if device.type == NAME else torch.float64)
        return _path(name, NAME, NAME, dtype)


def _mixed() -> None:
    from tests.helpers.pretended import Pretending

    with Pretending():
        torch.ones(2, device="pretended").add_(torch.ones(2))


@pytest.fixture(scope="module")
def process():
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        yield process


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-5)], ids=["two", "narrow"])
def test_a_model_on_two_devices_or_one_that_lacks_float64_steps_as_on_the_cpu(name, dtype, tolerance, process):
    found = process.submit(_there, name, dtype).result()
    for one, other in zip(found, _path(name, "cpu", "cpu", dtype), strict=True):
        torch.testing.assert_close(torch.tensor(one), torch.tensor(other), rtol=tolerance, atol=tolerance)


def test_what_is_on_different_devices_does_not_mix(process):
    with pytest.raises(RuntimeError, match=r"add_.* of tensors on \['cpu', 'pretended:0'\]"):
        process.submit(_mixed).result()
