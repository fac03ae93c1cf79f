"""The isometry benchmark: results are whole, theory holds in them, and figures and tables come from the files alone."""

import math

import pytest
import torch

from adiv_optim.diagnostics import isometry_gap, isometry_strength
from benchmarks.__main__ import main
from benchmarks.core.store import Store
from benchmarks.studies import isometry_depth as depth
from benchmarks.studies import isometry_training as training


@pytest.fixture(scope="module")
def random_networks():
    return depth.compare(seeds=3, width=200, depth=5)


def test_all_variants_start_at_the_gap_of_the_correlation(random_networks):
    n, rho = depth.SAMPLES, depth.CORRELATION
    wanted = -(math.log(1 + (n - 1) * rho) + (n - 1) * math.log(1 - rho)) / n
    for found in random_networks["activations"].values():
        assert found["mean_field"][0] == pytest.approx(wanted, rel=1e-9)
        assert found["bound"][0] == pytest.approx(wanted, rel=1e-9)
        for quartiles in found["measured"].values():
            assert quartiles[0] == pytest.approx([wanted] * 3, rel=1e-9)
            assert len(quartiles) == 6


def test_normalised_networks_follow_the_limit_and_the_bound_holds_for_it(random_networks):
    for name, found in random_networks["activations"].items():
        if name != "exp":  # whose heavy tail wants a wider network
            assert found["measured"]["layernorm"][1][1] == pytest.approx(found["mean_field"][1], rel=0.2)
        assert all(gap <= bound for gap, bound in zip(found["mean_field"], found["bound"], strict=True))


def test_bound_is_below_that_of_theorem_4_and_an_overstated_strength_breaks_it():
    start = torch.full((5, 5), 0.3, dtype=torch.float64).fill_diagonal_(1.0)
    for activation in (torch.tanh, torch.relu, torch.sin):
        strength = isometry_strength(activation)
        bound, gaps = depth.bound(start, strength, 80), isometry_gap(depth._limits(activation, start, 80))
        theorem_4 = 4 * 5 * strength ** -torch.arange(81.0, dtype=torch.float64) * torch.exp(5 * gaps[0])
        assert (bound <= theorem_4 * (1 + 1e-12)).all()
        assert (gaps <= bound + 1e-12).all()
        assert bound[-1] < gaps[0] / 2
        assert (gaps > depth.bound(start, 2.0, 80) + 1e-12).any()


def test_exp_without_normalising_leaves_the_range_of_numbers():
    found = depth.compare(seeds=2, width=64, depth=6)["activations"]["exp"]["measured"]
    assert found["centred"][6] is None
    assert found["layernorm"][6] is not None


def test_limit_is_the_arc_cosine_kernel_of_relu():
    correlation = torch.tensor([[1.0, 0.6], [0.6, 1.0]], dtype=torch.float64)
    angle = math.acos(0.6)
    second = (math.sin(angle) + (math.pi - angle) * math.cos(angle)) / math.tau
    rho = (second - 1 / math.tau) / (0.5 - 1 / math.tau)
    assert depth._limits(torch.relu, correlation, 1)[1, 0, 1].item() == pytest.approx(rho, rel=1e-6)


def test_training_measures_every_layer_but_the_outputs_at_both_ends(few):
    two_layers = training.train("tanh", "few", 4, [40] * 2, 1)
    assert len(two_layers["isometry"]["start"]) == 7
    trained = [training.train(name, "few", 4, [40] * 10) for name in ("tanh", "ReLU", "GELU")]
    for result in trained:
        for stage in result["isometry"].values():
            assert [layer["path"] for layer in stage][:4] == ["norm-0", "fc-0", "act-0", "norm-1"]
            assert len(stage) == 31
            assert all(0 < layer["isometry"] < 1 for layer in stage)
        assert (len(result["train_loss"]), result["samples"]) == (4, 16)
    # Behind the first linear layer: the same weights for all.
    assert len({result["isometry"]["start"][1]["isometry"] for result in trained}) == 1


def test_widths_are_compared_on_the_same_samples(few, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(training, "WIDTHS", [[40] * 2, [80, 40]])
    assert main(["isometry-widths", "--data", "few", "--out", str(tmp_path)]) == 0
    one, other = Store(tmp_path / "isometry-widths.jsonl").read()
    assert one["samples"] == other["samples"] == 16
    first, last = (-math.log(r["isometry"]["start"][at]["isometry"]) for r, at in ((one, 0), (other, -1)))
    printed = capsys.readouterr().out
    assert f"| 80, 40 | {first:.3f} |" in printed
    assert f"| {last:.3f} |" in printed
