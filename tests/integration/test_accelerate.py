"""Wrappers handed to Accelerator.prepare."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from adiv_optim.diagnostics import DivergenceRecorder, divergence
from tests.helpers.cases import relative_error
from tests.helpers.loops import (
    DIFFERENT,
    EXACT,
    built,
    deviation,
    each_method,
    elsewhere,
    halving,
    images,
    network,
    plain_loop,
    scheduled,
    sgd,
    split,
    train,
    weights,
)
from tests.integration.test_loops import LIMIT, clip_by_hand, in_float32, moved, smooth_loop

accelerate = pytest.importorskip("accelerate")

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("in_float64", "fresh_state")]


@pytest.fixture
def fresh_state():
    """Accelerators of one process share what the first was told, its precision included."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


def loop(accelerator, model, optimizer, data, limit=None):
    for x, y in data:
        with accelerator.accumulate(model):
            accelerator.backward(F.cross_entropy(model(x), y))
            if limit and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), limit)
            optimizer.step()
            optimizer.zero_grad()


def loader(data):
    return DataLoader([sample for batch in data for sample in zip(*batch, strict=True)], len(data[0][0]))


@each_method
def test_accelerate(method):
    model, optimizer = built(method)
    accelerator = accelerate.Accelerator(cpu=True)
    prepared = accelerator.prepare(model, optimizer, loader(images()), scheduled(optimizer))
    replica, wrapped, data, scheduler = prepared
    for x, y in data:
        accelerator.backward(F.cross_entropy(replica(x), y))
        wrapped.step()
        scheduler.step()
        wrapped.zero_grad()
    wanted = plain_loop(method, images(), inner=halving)
    assert deviation(weights(model), wanted) <= EXACT
    bare = network()
    train(bare, halving(bare), images())
    assert deviation(weights(bare), wanted) > DIFFERENT


@each_method
def test_accelerate_accumulation_and_clipping(method):
    model, optimizer = built(method, inner=sgd)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    micro_batches = [part for batch in images() for part in split(batch, 2)]
    loop(accelerator, *accelerator.prepare(model, optimizer, loader(micro_batches)), LIMIT)
    wanted = plain_loop(method, images(), inner=sgd, parts=2, change=clip_by_hand)
    assert deviation(weights(model), wanted) <= 1e-4  # torch divides by the norm plus 1e-6
    assert deviation(plain_loop(method, images(), inner=sgd, parts=2), wanted) > DIFFERENT


@each_method
def test_accelerate_bfloat16(method):
    model, optimizer = built(method, in_float32, sgd)
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    loop(accelerator, *accelerator.prepare(model, optimizer), [(x.float(), y) for x, y in images()])
    assert relative_error(moved(weights(model), network()), smooth_loop(method)) <= 5e-2


@each_method
def test_accelerate_float16_skips_a_step(method):
    """With the GradScaler that Accelerate itself makes on a GPU alone."""
    model, optimizer = built(method, in_float32, sgd)
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    model, optimizer = accelerator.prepare(model, optimizer)
    bad = (torch.full((8, 2, 5, 5), torch.inf), images()[0][1])
    skipped = []
    for x, y in [*images()[:2], bad, *images()[2:]]:
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(model(x.float()), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        skipped.append(optimizer.step_was_skipped)
    assert skipped == [False, False, True, False, False]
    assert relative_error(moved(weights(model), network()), smooth_loop(method)) <= 1e-2


@each_method
def test_accelerate_save_state_and_load_state(method, tmp_path):
    uninterrupted, optimizer = built(method)
    accelerator = accelerate.Accelerator(cpu=True)
    prepared = accelerator.prepare(uninterrupted, optimizer)
    loop(accelerator, *prepared, images()[:2])
    accelerator.save_state(tmp_path)
    loop(accelerator, *prepared, images()[2:])

    resumed, optimizer = built(method, elsewhere)
    accelerator = accelerate.Accelerator(cpu=True)
    prepared = accelerator.prepare(resumed, optimizer)
    accelerator.load_state(tmp_path)
    loop(accelerator, *prepared, images()[2:])
    assert deviation(weights(resumed), weights(uninterrupted)) == 0


def test_divergence_is_that_of_the_optimizer_within():
    """Accelerate's own, in the first of two micro-batches, would take no step."""
    model = network()
    inner = sgd(model)
    ((x, y), *_) = images()
    wanted = divergence(model, F.cross_entropy, x, y, optimizer=inner)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    replica, wrapped = accelerator.prepare(model, inner)
    with accelerator.accumulate(replica):
        found = divergence(model, F.cross_entropy, x, y, optimizer=wrapped)
        recorded = DivergenceRecorder(model, F.cross_entropy, wrapped).step(x, y)
    assert wanted.descent > 0
    assert found.descent == recorded.descent == wanted.descent
    assert found.optimizer == wanted.optimizer == "SGD"
