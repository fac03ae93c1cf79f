"""What people put into a training loop: micro-batches, checkpoints, clipping, reduced precision, averages."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from tests.helpers.cases import relative_error
from tests.helpers.loops import (
    DIFFERENT,
    EXACT,
    Batch,
    Method,
    Weights,
    adamw,
    built,
    deviation,
    each_method,
    images,
    network,
    plain_loop,
    sgd,
    split,
    train,
    weights,
)
from tests.helpers.modules import Model

pytestmark = pytest.mark.usefixtures("in_float64")


def accumulated(model: nn.Module, optimizer: Any, batch: Batch, parts: int) -> None:
    optimizer.zero_grad()
    for x, y in split(batch, parts):
        (F.cross_entropy(model(x), y) / parts).backward()
    optimizer.step()


@each_method
def test_gradient_accumulation(method):
    model, optimizer = built(method)
    for batch in images():
        accumulated(model, optimizer, batch, 4)
    assert deviation(weights(model), plain_loop(method, images(), parts=4)) <= EXACT
    last = plain_loop(method, [(x[-2:], y[-2:]) for x, y in images()])
    assert deviation(weights(model), last) > DIFFERENT


def blocks(use_reentrant: bool | None = None) -> nn.Module:
    """A block of its own, and one layer that two other blocks share, each a segment of the checkpointed pass."""

    def forward(model: Any, x: Tensor) -> Tensor:
        def shared(x: Tensor) -> Tensor:
            return F.relu(model.shared(x)) + x

        x = model.stem(x)
        for block in (model.own, shared, shared):
            x = block(x) if use_reentrant is None else checkpoint(block, x, use_reentrant=use_reentrant)
        return model.head(x)

    torch.manual_seed(0)
    own = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8))
    return Model(forward, stem=nn.Linear(6, 8), own=own, shared=nn.Linear(8, 8), head=nn.Linear(8, 3))


def rows(count: int = 4) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 6, generator=generator), torch.randint(3, (8,), generator=generator)) for _ in range(count)]


@each_method
@pytest.mark.parametrize("use_reentrant", [True, False], ids=["reentrant", "non-reentrant"])
def test_activation_checkpointing(method, use_reentrant):
    model = blocks(use_reentrant)
    optimizer = method.wrap(adamw(model), model, rows(1)[0][0])
    for batch in rows():
        accumulated(model, optimizer, batch, 2)
    assert deviation(weights(model), plain_loop(method, rows(), build=blocks, parts=2)) <= EXACT
    assert deviation(weights(model), weights(blocks())) > DIFFERENT


LIMIT = 0.05


def clip_by_hand(model: nn.Module) -> None:
    norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
    for p in model.parameters():
        p.grad.mul_(min(1.0, LIMIT / norm))


@each_method
def test_gradient_clipping(method):
    model, optimizer = built(method, inner=sgd)
    for x, y in images():
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
        optimizer.step()
    wanted = plain_loop(method, images(), inner=sgd, change=clip_by_hand)
    assert deviation(weights(model), wanted) <= 1e-4  # torch divides by the norm plus 1e-6
    assert deviation(plain_loop(method, images(), inner=sgd), wanted) > DIFFERENT


def moved(found: Weights, start: nn.Module) -> torch.Tensor:
    return torch.cat([(found[name].double() - p.detach()).flatten() for name, p in start.named_parameters()])


def nearly_smooth() -> nn.Module:
    """Rounding may push a unit across the kink of its ReLU, which then shall not matter much."""
    model = network()
    model[1], model[4] = nn.LeakyReLU(0.9), nn.LeakyReLU(0.9)
    return model


def in_float32() -> nn.Module:
    return nearly_smooth().float()


def smooth_loop(method: Method) -> torch.Tensor:
    """What the weights move by in float64."""
    return moved(plain_loop(method, images(), build=nearly_smooth, inner=sgd), network())


def skipping(model: nn.Module, optimizer: Any, step: Callable[[Tensor], None]) -> None:
    """A loop in float16 in which the third batch is infinite, and `step` is to skip it."""
    bad = (torch.full((8, 2, 5, 5), torch.inf), images()[0][1])
    for x, y in [*images()[:2], bad, *images()[2:]]:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(model(x.float()), y)
        step(loss)


@each_method
@pytest.mark.parametrize("fused", [False, True], ids=["foreach", "fused"])
def test_float16_autocast_with_grad_scaler(method, fused):
    def inner(model):
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=fused)

    model, optimizer = built(method, in_float32, inner)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

    def step(loss: Tensor) -> None:
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()

    skipping(model, optimizer, step)
    assert scaler.get_scale() == 2.0**9
    assert relative_error(moved(weights(model), network()), smooth_loop(method)) <= 1e-2


@each_method
def test_bfloat16_autocast(method):
    model, optimizer = built(method, in_float32, sgd)
    for x, y in images():
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(x.float()), y)
        loss.backward()
        optimizer.step()
    wanted = smooth_loop(method)
    assert relative_error(moved(weights(model), network()), wanted) <= 5e-2
    bare = nearly_smooth()
    train(bare, sgd(bare), images())
    assert relative_error(moved(weights(bare), network()), wanted) > 0.1


@each_method
def test_plain_loop_with_averages(method):
    """And with a copy that is taken between a backward and its step, as of a target network."""
    model, optimizer = built(method)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    by_hand = None
    for x, y in images():
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        twin = copy.deepcopy(model)
        F.cross_entropy(twin(2 * x), y).backward()
        optimizer.step()
        average.update_parameters(model)
        F.cross_entropy(average(x), y).backward()  # the average may be used as a model; nobody steps on it
        now = weights(model)
        by_hand = now if by_hand is None else {n: 0.9 * by_hand[n] + 0.1 * value for n, value in now.items()}
    assert deviation(weights(average.module), by_hand) <= 1e-12
    assert deviation(now, by_hand) > DIFFERENT
    assert deviation(now, plain_loop(method, images())) <= EXACT
    assert deviation(weights(twin), now) > 1e-6
    bare = network()
    train(bare, adamw(bare), images())
    assert deviation(weights(bare), now) > DIFFERENT


@each_method
def test_anomaly_detection_and_frozen_backbone(method):
    """Fine-tuning: what is frozen stays, and what trains is corrected for its own divergence alone."""

    def frozen():
        model = network()
        model[0].requires_grad_(False)
        return model

    def inner(model):
        return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-3)

    model, optimizer = built(method, frozen, inner)
    with torch.autograd.set_detect_anomaly(True, check_nan=True):
        train(model, optimizer, images())
    assert deviation(weights(model), plain_loop(method, images(), build=frozen, inner=inner)) <= EXACT
    assert torch.equal(model[0].weight, network()[0].weight)
