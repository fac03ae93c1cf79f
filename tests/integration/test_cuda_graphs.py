"""Training steps captured in a CUDA graph: replayed, they are the steps that the eager loop takes."""

import pytest
import torch
import torch.nn.functional as F

from tests.helpers.cases import needs_cuda
from tests.helpers.loops import DIFFERENT, EXACT, METHODS, Batch, deviation, images, network, sgd, train, weights

pytestmark = [needs_cuda, pytest.mark.usefixtures("in_float64")]

#: Steps before the capture: the allocator and the optimizer's state must be warm.
WARM = 3


def on_cuda(count: int = 6) -> list[Batch]:
    return [(x.cuda(), y.cuda()) for x, y in images(count)]


def built(name: str):
    model = network().cuda()
    return model, METHODS[name].wrap(sgd(model), model, on_cuda(1)[0][0])


def run_captured(model, optimizer, data: list[Batch], whole: bool) -> None:
    """Warm up, capture forward and backward (and, if `whole`, the optimizer's step), and replay."""
    x, y = (tensor.clone() for tensor in data[0])

    def gradients():
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for batch in data[:WARM]:
            x.copy_(batch[0]), y.copy_(batch[1])
            gradients()
            optimizer.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        gradients()
        if whole:
            optimizer.step()
    for batch in data[WARM:]:
        x.copy_(batch[0]), y.copy_(batch[1])
        graph.replay()
        if not whole:
            optimizer.step()


def check(name: str, whole: bool) -> None:
    model, optimizer = built(name)
    run_captured(model, optimizer, on_cuda(), whole)
    eager, eager_optimizer = built(name)
    train(eager, eager_optimizer, on_cuda())
    assert deviation(weights(model), weights(eager)) <= EXACT
    bare = network().cuda()
    train(bare, sgd(bare), on_cuda())
    assert deviation(weights(bare), weights(eager)) > DIFFERENT


@pytest.mark.parametrize("name", ["proportional", "disproportional", "batch-ideal"])
def test_captured_step(name):
    check(name, whole=True)


@pytest.mark.parametrize("name", ["proportional", "disproportional", "batch-ideal", "unit-consistent"])
def test_captured_backward_and_eager_step(name):
    check(name, whole=False)


@pytest.mark.parametrize(
    ("name", "does"),
    [
        *((name, "remembers its inputs") for name in ("input-scaled", "preconditioned", "whitened")),
        ("unit-consistent", "counts its steps"),
    ],
)
def test_capture_of_what_remembers_is_refused(name, does):
    model, optimizer = built(name)
    with pytest.raises(RuntimeError, match=f"{does}, which the replay of a CUDA graph would not"):
        run_captured(model, optimizer, on_cuda(), whole=True)
