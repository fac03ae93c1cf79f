"""Streams: an error counts before its step, bounds and the running RMS by their definitions."""

import math

import numpy as np
import pytest
import torch

from benchmarks.core.runs import NOBODY
from benchmarks.problems.streams import (
    DECAY,
    SIGNALS,
    Loop,
    Stream,
    by_running_rms,
    relative_error,
    share,
    signal_of,
    train,
)
from benchmarks.studies.streams import run_of

pytestmark = pytest.mark.usefixtures("in_float64")


def test_an_error_counts_before_the_step():
    run = run_of("sgd", lr=0.05, steps=2)
    signal, learning = signal_of(run), Loop(run)
    window, target = signal.windows[0], signal.targets[0]
    before = (learning.model(window).squeeze() - target).detach()
    assert torch.allclose(learning.step(window, target), before, rtol=1e-12)
    assert learning.step(window, target).abs() < 0.999 * before.abs()


@pytest.mark.parametrize(("target", "is_bounded"), [(0.3, True), (30.0, True), (0.3, False)])
def test_overshooting_bound_is_that_of_the_paper(target, is_bounded):
    rate = 0.5 if is_bounded else 1e-6
    model = torch.nn.Linear(3, 1)
    x = torch.tensor([1.0, -2.0, 0.5])
    z = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    error = (model(x).squeeze() - target).detach()
    norm = sum(part.abs().sum().item() for part in z)
    bound = rate * 2.0 * max(abs(error.item()), 1.0) * norm
    wanted = rate / bound if bound > 1 else rate
    got = rate * share(rate, [error * g for g in z], error)
    assert got.item() == pytest.approx(wanted, rel=1e-12)
    assert (got.item() < rate) == is_bounded


def test_running_rms_is_that_of_a_plain_loop():
    signal = SIGNALS["coloured"](np.random.default_rng(0), 30)
    divided = by_running_rms(signal)
    square = np.mean(signal.windows[0] ** 2)
    for row in range(30):
        square = DECAY * square + (1 - DECAY) * np.mean(signal.windows[row] ** 2)
        rms = math.sqrt(square) + 1e-6
        for part, whole in zip(divided, signal, strict=True):
            assert part[row] == pytest.approx(whole[row] / rms, rel=1e-12)
    assert divided.windows[5] != pytest.approx(signal.windows[5])


@pytest.mark.parametrize("name", SIGNALS)
def test_a_signal_is_of_its_seed_and_its_window_moves_by_a_row(name):
    first, again, other = (SIGNALS[name](np.random.default_rng(seed), 100) for seed in (1, 1, 2))
    assert first.windows.shape == (100, 16)
    assert first.targets.shape == first.scales.shape == (100,)
    assert np.array_equal(first.targets, again.targets)
    assert not np.array_equal(first.targets, other.targets)
    assert np.array_equal(first.windows[1:, :-1], first.windows[:-1, 1:])


def test_mackey_glass_and_membrane_predict_values_that_windows_show_later():
    for name, ahead in (("mackey-glass", 1), ("membrane", 5)):
        signal = SIGNALS[name](np.random.default_rng(0), 50)
        assert np.array_equal(signal.targets[:-ahead], signal.windows[ahead:, -1])


def test_error_is_relative_to_scaled_targets_of_the_second_half():
    signal = Stream(None, torch.tensor([9.0, 9.0, 4.0, 3.0]), torch.tensor([1.0, 1.0, 2.0, 1.0]))
    assert relative_error(torch.tensor([7.0, 7.0, 2.0, 1.0]), signal) == pytest.approx((1 + 1) / (4 + 9))
    assert relative_error(torch.tensor([7.0, 7.0, 2.0, math.inf]), signal) is None


def test_a_network_that_diverges_has_no_error():
    assert train(run_of("sgd", lr=1e9, steps=60), NOBODY)["error"] is None
    assert 0 < train(run_of("sgd", lr=0.01, steps=60), NOBODY)["error"] < 10
