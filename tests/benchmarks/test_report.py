"""Tables and figures say what the result files say."""

import math
from pathlib import Path

import pytest
import torch

from benchmarks.batch_size import fit
from benchmarks.report import insert, report
from benchmarks.runs import write
from benchmarks.tables import mean_and_error

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def result(method="none", activation="tanh", backend="ensemble", accuracies=((10.0, 20.0), (40.0, 44.0)), **settings):
    return {
        "kind": "train",
        "settings": {
            "data": "digits",
            "method": method,
            "activation": activation,
            "hidden": [8],
            "batch_size": 4,
            "optimizer": "adam",
            "lr": 0.001,
            "schedule": "constant",
            "epochs": 2,
            "seeds": [0, 1],
            "backend": backend,
            "device": "cpu",
            **settings,
        },
        "environment": {"processor": "a processor", "threads": 1, "torch": "2", "gpu": None},
        "features": 64,
        "classes": 10,
        "steps_per_epoch": 100,
        "train_loss": [[1.0, 1.0]] * 2,
        "test_accuracy": [list(epoch) for epoch in accuracies],
        "seconds": [0.4, 0.2],
    }


def test_sweep_names_the_best_rate_and_its_neighbours(tmp_path):
    for number, (lr, accuracy) in enumerate(((0.1, 30.0), (0.3, 50.0), (1.0, 49.0), (3.0, 10.0))):
        runs = result(lr=lr, optimizer="sgd", accuracies=((accuracy, accuracy),), validation=True)
        write(tmp_path / "sweep" / f"{number}.json", runs)
    section = report(tmp_path)["sweep"]
    assert "| sgd | none | 0.3 | 50.00 ± 0.00 | 0.3, 1 |" in section
    assert "a tenth of the training set, held out" in section
    assert (tmp_path / "sweep.png").read_bytes().startswith(PNG_SIGNATURE)
    write(tmp_path / "sweep" / "4.json", result(lr=0.03, optimizer="sgd", accuracies=((60.0, 60.0),)))
    assert "| sgd | none | 0.03, at the sweep's edge | 60.00 ± 0.00 | 0.03 |" in report(tmp_path)["sweep"]


def test_rescaling_shows_mean_and_range_by_sigma(tmp_path):
    for sigma, ends in ((0.0, (40.0, 40.0)), (2.0, (20.0, 30.0))):
        runs = result(activation="leaky-relu", rescaled=sigma, accuracies=(ends,))
        write(tmp_path / "gauges" / f"{sigma}.json", runs)
    section = report(tmp_path)["gauges"]
    assert "| none, adam | 0.001 | 40.00 (40.00 to 40.00) | 25.00 (20.00 to 30.00) |" in section
    assert (tmp_path / "gauges.png").read_bytes().startswith(PNG_SIGNATURE)


def test_standard_error_is_that_of_the_mean():
    mean, error = mean_and_error([1.0, 2.0, 3.0, 6.0])
    assert mean == 3.0
    assert error == pytest.approx(math.sqrt(14 / 3 / 4), rel=1e-15)
    assert math.isnan(mean_and_error([1.0])[1])


def test_table_shows_last_epoch_and_cost(tmp_path):
    write(tmp_path / "small" / "a.json", result())
    write(tmp_path / "small" / "b.json", result("proportional", accuracies=((1.0, 1.0), (50.0, 50.0))))
    write(tmp_path / "small" / "c.json", result(backend="jacobian", seeds=[0], accuracies=((0.0,),)))
    section = report(tmp_path)["small"]
    assert "| none | 42.00 ± 2.00 | 2.00 | 4.00 |" in section
    assert "| gradient-only proportional | 50.00 ± 0.00 | 2.00 |  |" in section
    assert "digits, [64, 8, 10], batch 4, adam 0.001, cpu" in section
    assert (tmp_path / "small.png").read_bytes().startswith(PNG_SIGNATURE)


def test_other_protocols_are_other_tables(tmp_path):
    write(tmp_path / "small" / "a.json", result())
    write(tmp_path / "small" / "b.json", result(lr=0.01))
    assert set(report(tmp_path)) == {"small-1", "small-2"}


def test_tuned_table_names_the_chosen_rates(tmp_path):
    for number, (optimizer, lr) in enumerate((("adam", 0.003), ("sgd", 1.0))):
        write(tmp_path / "tuned" / f"{number}.json", {**result(optimizer=optimizer, lr=lr), "kind": "tuned"})
    section = report(tmp_path)["tuned"]
    assert "| method | tanh, adam, % | tanh, sgd, % |" in section
    assert "| none | 42.00 ± 2.00 (0.003) | 42.00 ± 2.00 (1) |" in section


def test_batch_size_table_has_the_slope_of_the_line(tmp_path):
    for size in (8, 16, 32):
        for method, slope in (("none", -0.5), ("affine-like", 0.0)):
            exact = [[0.0, 0.0], [50 + slope * size, 50 + slope * size]]
            write(tmp_path / "sizes" / f"{method}{size}.json", result(method, batch_size=size, accuracies=exact))
    section = report(tmp_path)["sizes"]
    assert (
        "| tanh | none | 46.00 ± 0.00 | 42.00 ± 0.00 | 34.00 ± 0.00 | 40.67 | -50.00 ± 0.00 | 38.35 ± 0.50 |" in section
    )
    assert "| tanh | affine-like | 50.00 ± 0.00 | 50.00 ± 0.00 | 50.00 ± 0.00 | 50.00 | +0.00 ± 0.00 |" in section
    assert (tmp_path / "sizes.png").read_bytes().startswith(PNG_SIGNATURE)


def test_error_of_a_slope_is_the_regressions():
    x, y = [1.0, 2.0, 4.0, 7.0], [1.0, 0.5, 3.0, 2.0]
    line = fit(x, y)
    design = torch.tensor([[1.0, value] for value in x], dtype=torch.float64)
    target = torch.tensor(y, dtype=torch.float64)
    found = torch.linalg.lstsq(design, target.unsqueeze(1)).solution.flatten()
    noise = (target - design @ found).square().sum() / 2
    error = (noise * torch.linalg.inv(design.T @ design)[1, 1]).sqrt()
    assert line == pytest.approx((*found.tolist(), error.item()), rel=1e-12)
    with pytest.raises(ValueError, match="a line through 2 points"):
        fit(x[:2], y[:2])


def test_trials_table_is_best_first_and_counts_trials(tmp_path):
    for number, (method, value) in enumerate((("none", 40.0), ("batch-ideal", 50.0))):
        extra = {"damping": 0.3} if method == "batch-ideal" else {}
        final = result(method, weight_decay=1e-5, accuracies=((value, value),), **extra)
        write(tmp_path / "tried" / f"{number}.json", {**final, "kind": "trials"})
        for trial in range(3):
            write(tmp_path / "tried" / "trials" / f"{number}-{trial}.json", final)
    section = report(tmp_path)["tried"]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    assert lines[2] == "| gradient-only batch-ideal | adam | 0.001 | 0.3 | 1e-05 | 2 | 50.00 ± 0.00 | 0 |"
    assert lines[3] == "| none | adam | 0.001 |  | 1e-05 | 2 | 40.00 ± 0.00 | 0 |"
    assert "the best of 3 combinations" in section


def test_no_results_say_what_to_run(tmp_path):
    with pytest.raises(FileNotFoundError, match="python -m benchmarks train"):
        report(tmp_path)


def test_insert_fills_the_marked_places_and_nothing_else(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- results:x -->stale<!-- end -->\nafter\n")
    filled = insert(readme, {"x": "fresh", "y": "unused"})
    assert filled == "before\n<!-- results:x -->\n\nfresh\n\n<!-- end -->\nafter\n"
    readme.write_text(filled)
    assert insert(readme, {"x": "fresh"}) == filled
    with pytest.raises(ValueError, match="wants results 'x'; there are z"):
        insert(readme, {"z": ""})


def test_readme_quotes_the_committed_results(tmp_path):
    for path in RESULTS.rglob("*.json"):
        copy = tmp_path / path.relative_to(RESULTS)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    readme = ROOT / "README.md"
    assert "<!-- results:" in readme.read_text()
    assert insert(readme, report(tmp_path)) == readme.read_text()
