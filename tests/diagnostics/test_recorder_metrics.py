"""What both recorders hand to a logger: the last measurement, flat."""

import torch
from torch import nn

from adiv_optim.diagnostics import DivergenceRecorder, record


def test_divergence_recorder_gives_the_last_measurement():
    model = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1))
    recorder = DivergenceRecorder(model, nn.functional.mse_loss, every=1)
    assert recorder.metrics() == {}
    for scale in (1.0, 2.0):
        found = recorder.step(scale * torch.randn(8, 3), torch.randn(8, 1)).summary()
    metrics = recorder.metrics()
    assert all(type(value) is float for value in metrics.values())
    for path in ("0", "2"):
        wanted = {key: value for key, value in found["layers"][path].items() if isinstance(value, (int, float))}
        assert wanted
        assert {key: metrics[f"divergence/{path}/{key}"] for key in wanted} == wanted


def test_isometry_recorder_gives_the_last_measurement():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
    with record(model, every=1) as recorder:
        assert recorder.metrics() == {}
        for scale in (1.0, 2.0):
            model(scale * torch.randn(3, 3))
    metrics = recorder.metrics()
    last = {call["path"]: call for call in recorder.history[-1]["layers"]}
    assert {path: metrics[f"isometry/{path}/gap"] for path in last} == {p: call["gap"] for p, call in last.items()}
    assert last
