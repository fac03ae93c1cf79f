"""A method is one entry, of a user's own file: trained, reported, and gone again."""

import pytest

from benchmarks.__main__ import main
from benchmarks.methods import METHODS

FILE = """
from dataclasses import dataclass

import torch

from adiv_optim import Correction, InputScaled
from benchmarks.methods import Method


def scaled(optimizer, model, damping=1.0):
    return InputScaled(optimizer, model, floor=damping)


@dataclass(frozen=True)
class Halved(Correction):
    def scales(self, factors):
        return {name: 0.5 * torch.ones_like(factor) for name, factor in factors.items()}


METHODS = {
    "mine": Method("my method", "crimson", correction=Halved()),
    "prop": Method("RMSprop", "orchid", optimizer=torch.optim.RMSprop),
    "scaled-prop": Method("scaled RMSprop", "teal", optimizer=torch.optim.RMSprop, by_inputs=scaled),
    "lost": Method("lost", optimizer="lion"),
    "plain": Method("plain", by_inputs=lambda optimizer, model: optimizer),
}
"""
RUN = "compare --device cpu --methods none mine --activations tanh --epochs 1 --seeds 1 --optimizers sgd --lr 1"


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    return path


def rows(printed):
    return {cells[1].strip(): cells[2] for line in printed.splitlines() if len(cells := line.split("|")) > 3}


def test_entry_of_a_file_is_trained_and_reported(file, tmp_path, capsys):
    assert main([*RUN.split(), "--out", str(tmp_path), "--method-file", str(file)]) == 0
    printed = capsys.readouterr().out
    assert rows(printed)["my method"] != rows(printed)["none"]
    assert "±" not in rows(printed)["my method"]  # of one seed there is no error
    assert "python -m benchmarks report --out" in printed.splitlines()[-1]
    assert "mine" not in METHODS

    assert main(["report", "--out", str(tmp_path)]) == 2
    assert "runs of method 'mine'; name the file that has it by --method-file" in capsys.readouterr().err
    assert main(["report", "--out", str(tmp_path), "--method-file", str(file)]) == 0
    assert "| my method |" in capsys.readouterr().out


def test_optimizer_of_a_file_trains_images_and_the_language_model(file, tmp_path, capsys):
    end = ["--out", str(tmp_path), "--method-file", str(file), "--seeds", "1", "--device", "cpu", "--methods"]
    images = ["compare", "--activations", "tanh", "--epochs", "1", "--lr", "0.01"]
    text = ["char-lm", "--preset", "tiny", "--steps", "2", "--norms", "none", "--lr", "0.01"]
    assert main([*images, "--optimizers", "sgd", *end, "none", "prop"]) == 0
    printed = capsys.readouterr().out
    assert rows(printed)["RMSprop"] != rows(printed)["none"]
    # A plain function with a damping, which a partial had to give before.
    damped = [*images, "--optimizers", "sgd", "adam", "--damping", "2", "--name", "two", *end, "scaled-prop"]
    assert main(damped) == 0
    assert "adam" not in capsys.readouterr().out
    # Beside methods without a damping, and with another optimizer for those that have none of their own.
    assert main([*damped, "none", "mine"]) == 0
    printed = capsys.readouterr().out
    counts = {"scaled RMSprop, damping 2": 1, "none": 2, "my method": 2}
    assert {label: printed.count(f"\n| {label} |") for label in counts} == counts
    assert main([*text, *end, "prop"]) == 0
    for command, message in (
        ([*images, "--damping", "2", *end, "plain"], "method 'plain' has none"),
        ([*text, *end, "lost"], "'lost' needs an optimizer that there is, found 'lion'; adamw, sgd"),
    ):
        assert main(command) == 2
        assert message in capsys.readouterr().err
