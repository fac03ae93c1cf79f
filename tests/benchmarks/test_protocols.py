"""The benchmark trains what the papers say: their networks, written here from their words, give the same losses."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.__main__ import main
from benchmarks.data import Dataset
from benchmarks.ensemble import Ensemble, Loops, epoch_orders
from benchmarks.grids import OF_PAPER
from benchmarks.methods import METHODS
from benchmarks.problems.images import ImageRun, build_model, depart
from benchmarks.studies import isometry_training

PATCHES = ["l2-patch", "l2-patch-half"]
SEED = 3


def planned(*command, tmp_path):
    """The runs of a command, none of which is made."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("benchmarks.grids.run_all", lambda runs, *_, **__: found.extend(runs))
        assert main([*command, "--out", str(tmp_path)]) == 0
    return found


def images(features):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.rand(40, features, generator=generator, dtype=torch.float64)
    labels = torch.arange(40) % 3
    return Dataset(inputs[:32], labels[:32], inputs[32:], labels[32:])


def normalised(method, x):
    """A parameterless normaliser, over everything that a sample is; BatchNorm over samples (and pixels)."""
    axes = tuple(range(1, x.dim()))
    centred = x - x.mean(axes, keepdim=True)
    over = (0, *axes[1:])
    eps = 1e-5
    return {
        "batchnorm": lambda: (
            (x - x.mean(over, keepdim=True)) / (x.var(over, unbiased=False, keepdim=True) + eps).sqrt()
        ),
        "layernorm": lambda: centred / (centred.square().mean(axes, keepdim=True) + eps).sqrt(),
        "rmsnorm": lambda: x / (x.square().mean(axes, keepdim=True) + torch.finfo(x.dtype).eps).sqrt(),
        "l2norm": lambda: x / x.square().sum(axes, keepdim=True).sqrt(),
        "l2norm-half": lambda: x / x.square().sum(axes, keepdim=True).sqrt(),
    }.get(method, lambda: x)()


def affine(method, layer, x):
    """An affine layer behind its normaliser, or in its structural form."""
    x = normalised(method, x)
    norm = x.square().sum(-1, keepdim=True)
    if method == "affine-like":
        return (x @ layer.weight.T + layer.bias) / (norm + 1).sqrt()
    return (x / norm.sqrt() if method in PATCHES else x) @ layer.weight.T + layer.bias


def convolution(method, layer, x):
    """A convolution of 3×3, stride 2 and padding 1, as an affine layer of patches (Eqs. 55 and 56)."""
    x = normalised(method, x)
    patches = F.unfold(x, 3, padding=1, stride=2)
    norm = patches.square().sum(1, keepdim=True)
    z = layer.weight.flatten(1) @ (patches / norm.sqrt() if method in PATCHES else patches) + layer.bias[:, None]
    side = (x.shape[-1] + 1) // 2
    return (z / (norm + 1).sqrt() if method == "affine-like" else z).unflatten(2, (side, side))


class Words(nn.Module):
    """A network as the papers describe it; layers are drawn in order, as PyTorch draws them."""

    def __init__(self, run, features, classes):
        super().__init__()
        activations = {"tanh": torch.tanh, "leaky-relu": F.leaky_relu, "identity": lambda x: x}
        self.run, self.act = run, activations[run.activation]
        sizes = [features, *run.hidden]
        if run.network in ("cnn", "cnn-pool"):
            self.channels, self.side = 3, int((features / 3) ** 0.5)
            sizes[0], side = 3, self.side
            self.inner = nn.ModuleList(nn.Conv2d(a, b, 3) for a, b in pairwise(sizes))
            for _ in run.hidden:
                side = (side + 1) // 2
            sizes[-1] *= 1 if run.network == "cnn-pool" else side**2
        else:
            self.inner = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.last = nn.Linear(sizes[-1], classes)

    def forward(self, x):
        method, conv = self.run.method, self.run.network in ("cnn", "cnn-pool")
        x = x.unflatten(1, (3, self.side, self.side)) if conv else x
        for number, layer in enumerate(self.inner):
            if conv:
                x = self.act(convolution(method, layer, x))
            elif self.run.network == "residual":
                x = x + affine(method, layer, self.act(x)) if number else affine(method, layer, x)
            else:
                x = self.act(affine(method, layer, x))
        if self.run.network == "residual":
            x = self.act(x)
        return affine(method, self.last, (x.mean((2, 3)) if self.run.network == "cnn-pool" else x).flatten(1))


def by_words(run, data):
    """Losses of the papers' training, with Adam at 0.001, or at half of that."""
    torch.manual_seed(run.seeds[0])
    model = Words(run, data.features, data.classes).double()
    rate = 0.0005 if run.method in ("l2norm-half", "l2-patch-half") else 0.001
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=rate), []
    for index in next(epoch_orders(run, len(data.train_labels)))[0]:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data.train_inputs[index]), data.train_labels[index])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def difference(run, features):
    """How far the benchmark's losses are from those of the words, relative."""
    data, run = images(features), replace(run, seeds=(SEED,), epochs=1)
    trainer = Ensemble([run], data) if run.backend == "ensemble" else Loops(run, data)
    found = [trainer.step(index).item() for index in next(epoch_orders(run, len(data.train_labels))).unbind(1)]
    wanted = by_words(run, data)
    return max(abs(a - b) / b for a, b in zip(found, wanted, strict=True))


def short(run):
    """The run with a network that is quick to train: widths are not what is tested."""
    return replace(run, hidden=tuple(5 for _ in run.hidden[:3]), batch_size=8)


STUDIES = ["table1", "fig2", "fig3", "fig5", "residual", "cnn-pool", "cnn"]


@pytest.mark.parametrize("study", STUDIES)
def test_benchmark_trains_the_papers_networks(study, tmp_path):
    methods = [*OF_PAPER, *PATCHES * study.startswith("cnn")]
    runs = planned(study, "--methods", *methods, tmp_path=tmp_path)
    some = {(run.method, run.activation, len(run.hidden)): short(run) for run in runs}
    assert {method for method, *_ in some} == set(methods)
    for run in some.values():
        assert difference(run, 192 if study.startswith("cnn") else 12) <= 1e-9, run


def test_planted_deviations_from_the_papers_are_noticed(tmp_path, monkeypatch):
    runs = {run.method: short(run) for run in planned("table1", tmp_path=tmp_path)}
    monkeypatch.setitem(METHODS, "l2norm-half", replace(METHODS["l2norm-half"], lr_factor=0.9))
    assert difference(runs["l2norm-half"], 12) > 1e-6
    later = replace(
        METHODS["layernorm"],
        normalizer=lambda s: nn.Identity() if s == (12,) else nn.LayerNorm(s, elementwise_affine=False),
    )
    monkeypatch.setitem(METHODS, "layernorm", later)
    assert difference(runs["layernorm"], 12) > 1e-6


def test_isometry_trains_norm_linear_activation(tmp_path):
    torch.manual_seed(0)
    model = isometry_training.network("tanh", 300, 10, [200] * 10).double()
    x = torch.randn(4, 300, dtype=torch.float64)
    wanted = x
    layers = [layer for layer in model if isinstance(layer, nn.Linear)]
    assert [layer.out_features for layer in layers] == [200] * 10 + [10]
    for number, layer in enumerate(layers):
        centred = wanted - wanted.mean(1, keepdim=True)
        wanted = centred / (centred.square().mean(1, keepdim=True) + 1e-5).sqrt() @ layer.weight.T
        wanted = wanted if number == 10 else wanted.tanh()
        assert layer.weight.std().item() == pytest.approx(layer.in_features**-0.5, rel=0.05)
        assert not layer.bias.any()
    torch.testing.assert_close(model(x), wanted, rtol=0, atol=1e-10)
    assert (isometry_training.BATCH_SIZE, isometry_training.LR) == (512, 0.01)
    paper = isometry_training.TrainingOptions()
    assert (paper.layers[0], paper.width, paper.steps) == (10, 1000, 9 * (50_000 // 512))


def test_a_departure_changes_what_it_says_and_nothing_else():
    data, run = images(3072), ImageRun("", "none", "tanh")
    centred, he = depart(data, "centred"), depart(data, "he")
    assert he == data
    assert torch.equal(centred.test_inputs, 2 * data.test_inputs - 1)
    plain, same, drawn = (build_model(replace(run, departure=name), data, SEED)[0] for name in (None, "centred", "he"))
    assert torch.equal(same.weight, plain.weight)
    assert drawn.weight.std().item() == pytest.approx((2 / 3072) ** 0.5, rel=0.02)
    assert not drawn.bias.any()
    assert plain.bias.any()
