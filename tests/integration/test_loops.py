"""What people put into a training loop: micro-batches, clipping, reduced precision, averages of the weights."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.helpers.cases import relative_error
from tests.helpers.loops import (
    DIFFERENT,
    EXACT,
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

pytestmark = pytest.mark.usefixtures("in_float64")


@each_method
def test_plain_loop(method):
    """The references of these tests: the wrapper in a loop, and not the path of the optimizer that is wrapped."""
    model, optimizer = built(method)
    train(model, optimizer, images())
    wanted = plain_loop(method, images())
    assert deviation(weights(model), wanted) <= EXACT
    bare = network()
    train(bare, adamw(bare), images())
    assert deviation(weights(bare), wanted) > DIFFERENT


@each_method
def test_gradient_accumulation(method):
    model, optimizer = built(method)
    for batch in images():
        optimizer.zero_grad()
        for x, y in split(batch, 4):
            (F.cross_entropy(model(x), y) / 4).backward()
        optimizer.step()
    assert deviation(weights(model), plain_loop(method, images(), parts=4)) <= EXACT
    last = plain_loop(method, [(x[-2:], y[-2:]) for x, y in images()])
    assert deviation(weights(model), last) > DIFFERENT


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


@each_method
@pytest.mark.parametrize("fused", [False, True], ids=["foreach", "fused"])
def test_float16_autocast_with_grad_scaler(method, fused):
    def inner(model):
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=fused)

    model, optimizer = built(method, in_float32, inner)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    bad = (torch.full((8, 2, 5, 5), torch.inf), images()[0][1])
    for x, y in [*images()[:2], bad, *images()[2:]]:  # the scaler is to skip the third
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(model(x.float()), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
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
def test_ema_by_deepcopy(method):
    model, optimizer = built(method)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    by_hand = None
    for x, y in images():
        train(model, optimizer, [(x, y)])
        average.update_parameters(model)
        F.cross_entropy(average(x), y).backward()  # the average may be used as a model; nobody steps on it
        now = weights(model)
        by_hand = now if by_hand is None else {n: 0.9 * by_hand[n] + 0.1 * value for n, value in now.items()}
    assert deviation(weights(average.module), by_hand) <= 1e-12
    assert deviation(now, by_hand) > DIFFERENT
    assert deviation(now, plain_loop(method, images())) <= EXACT


@each_method
def test_ema_updated_after_a_copy_in_mid_training(method):
    """As a target network or a best-so-far copy is taken: between a backward and its step."""
    model, optimizer = built(method)
    for x, y in images():
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        twin = copy.deepcopy(model)
        F.cross_entropy(twin(2 * x), y).backward()
        optimizer.step()
    assert deviation(weights(model), plain_loop(method, images())) <= EXACT
    assert deviation(weights(twin), weights(model)) > 1e-6


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
    full = network()
    train(full, adamw(full), images())
    assert not torch.equal(full[0].weight, model[0].weight)
