"""What differs between accelerators, of tensors that say that they are there: FakeTensors, which hold nothing."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from adiv_optim._device import refuse_capture
from adiv_optim.jacobian.modules import same_randomness


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_a_capture_is_refused_on_any_accelerator_that_has_graphs(kind, monkeypatch):
    with FakeTensorMode():
        there, here = torch.empty(2, device=kind), torch.empty(2)
    for capturing, tensor in ((False, there), (True, here)):
        monkeypatch.setattr(getattr(torch, kind), "is_current_stream_capturing", lambda it=capturing: it, raising=False)
        refuse_capture("layer", "remembers its inputs", tensor)
    with pytest.raises(RuntimeError, match="layer remembers its inputs, which the replay of a CUDA graph would not"):
        refuse_capture("layer", "remembers its inputs", there)


@pytest.mark.parametrize(("kind", "takes"), [("cuda", 1), ("xpu", 1), ("mps", 0)])
def test_the_generator_of_any_accelerator_is_given_back(kind, takes, monkeypatch):
    states = {"now": torch.tensor([1])}

    def get(*device: torch.device) -> torch.Tensor:
        assert [each.type for each in device] == [kind] * takes  # torch.mps has one device, and takes none
        return states["now"].clone()

    def put(state: torch.Tensor, *device: torch.device) -> None:
        assert [each.type for each in device] == [kind] * takes
        states["now"] = state

    monkeypatch.setattr(getattr(torch, kind), "get_rng_state", get)
    monkeypatch.setattr(getattr(torch, kind), "set_rng_state", put)
    model = nn.Module()
    with FakeTensorMode():
        model.weight = nn.Parameter(torch.empty(2, device=kind))
    before = torch.get_rng_state()
    with same_randomness(model):
        torch.randn(3)
        states["now"] = torch.tensor([2])
    assert states["now"].item() == 1
    assert torch.equal(torch.get_rng_state(), before)
