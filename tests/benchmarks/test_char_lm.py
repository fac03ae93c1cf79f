"""The language-model benchmark: text, network, training, choice of settings, report."""

import json
import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from adiv_optim.layers import AffineLikeLinear
from benchmarks.__main__ import main
from benchmarks.char_lm import methods, text
from benchmarks.char_lm.methods import METHODS, matrices, rest
from benchmarks.char_lm.model import GPT, NORMS, PRESETS
from benchmarks.char_lm.report import COLORS, curve
from benchmarks.char_lm.search import choose, dampings
from benchmarks.char_lm.settings import CharRun
from benchmarks.char_lm.train import Trainer, all_windows, batches, build_model, rate_factor, train
from benchmarks.report import report
from benchmarks.runs import read, write

ADAMW = CharRun("adamw", "layernorm", 1e-2, steps=6, preset="tiny")
BATCH_IDEAL = replace(ADAMW, method="batch-ideal-adamw", damping=0.3)
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def sample():
    return text.split(text.python_reference()[:20_000])


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "texts" / "sample.txt"
    path.parent.mkdir()
    path.write_text(text.python_reference()[:5_000], encoding="utf-8")
    return path


def char_lm(out, file, *arguments):
    small = ["--preset", "tiny", "--steps", "4", "--norms", "none", "--device", "cpu"]
    return main(["char-lm", "--data", str(file), "--out", str(out), *small, *arguments])


def test_default_text_is_long_and_always_the_same():
    once, again = text.python_reference(), text.python_reference()
    assert once == again
    assert len(once) > 200_000
    paragraphs = once.split("\n\n")
    assert len(set(paragraphs)) == len(paragraphs)


def test_split_keeps_order_and_every_character():
    characters = "Hamlet, Prinz von Dänemark\n" * 11
    parts = text.split(characters)
    assert [len(part) for part in parts[:3]] == [239, 29, 29]
    assert "".join(parts.vocabulary[place] for place in torch.cat(parts[:3])) == characters


def test_windows_predict_every_character_once():
    windows = all_windows(torch.arange(25), PRESETS["tiny"])
    assert windows[:, 1:].flatten().tolist() == list(range(1, 25))
    assert windows[:, 0].tolist() == [0, 8, 16]


def test_batches_are_those_of_the_seed_whatever_the_method(sample):
    one, other = (list(batches(run, sample.train)) for run in (ADAMW, BATCH_IDEAL))
    assert len(one) == ADAMW.steps
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert not torch.equal(one[0], next(batches(replace(ADAMW, seed=1), sample.train)))
    assert one[0].shape == (4, 9)
    # Windows are pieces of the text: the next one's start is drawn anew.
    assert any(torch.equal(one[0][0], window) for window in sample.train.unfold(0, 9, 1))


def test_methods_start_from_the_same_losses_and_part_then(sample):
    one, other = train(ADAMW, sample), train(BATCH_IDEAL, sample)
    assert one.validation_loss[0] == other.validation_loss[0] == pytest.approx(math.log(len(sample.vocabulary)), 0.02)
    assert one.train_loss[:2] == other.train_loss[:2]
    assert one.train_loss[-1] != other.train_loss[-1]
    for history in (one, other):
        assert history.steps == list(range(7))
        assert history.seconds == sorted(history.seconds)
        assert history.validation_loss[-1] < history.validation_loss[0]
        assert history.test_loss is not None
        assert not history.diverged


def test_long_runs_are_measured_twenty_times(sample):
    assert train(replace(ADAMW, steps=60), sample).steps == list(range(0, 61, 3))


def test_loss_that_is_not_finite_ends_the_run_and_is_recorded(sample, tmp_path):
    history = train(replace(ADAMW, method="sgd", norm="none", lr=1e30, steps=100), sample)
    assert history.diverged
    assert history.steps[-1] < 100
    assert history.validation_loss[-1] is None
    assert history.test_loss is None
    write(tmp_path / "result.json", vars(history))
    assert "Infinity" not in (tmp_path / "result.json").read_text()
    assert "NaN" not in (tmp_path / "result.json").read_text()


def test_rate_rises_then_falls_to_zero():
    factors = [rate_factor(number, 100) for number in range(1, 101)]
    assert factors[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert factors[5:] == sorted(factors[5:], reverse=True)
    assert 0 < factors[-1] < 1e-3
    assert rate_factor(1, 1) == 1.0


def test_training_sets_the_rate(sample):
    trainer = Trainer(replace(ADAMW, method="sgd", steps=100), sample)
    trainer.step(1, next(batches(ADAMW, sample.train)))
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.2 * ADAMW.lr)


@pytest.mark.parametrize("norm", NORMS)
def test_every_norm_trains(norm, sample):
    history = train(replace(ADAMW, norm=norm), sample)
    assert history.validation_loss[-1] < history.validation_loss[0]


class WrittenOut(torch.nn.Module):
    """γ tanh(αx) + β, Zhu et al. 2025."""

    def __init__(self, width, alpha=0.5):
        super().__init__()
        self.alpha = torch.nn.Parameter(torch.full((1,), alpha))
        self.gamma, self.beta = torch.nn.Parameter(torch.ones(width)), torch.nn.Parameter(torch.zeros(width))

    def forward(self, x):
        return self.gamma * torch.tanh(self.alpha * x) + self.beta


def test_dyt_trains_as_its_formula_does_to_the_last_bit(sample, monkeypatch):
    def losses():
        history = train(replace(ADAMW, norm="dyt"), sample)
        return history.train_loss, history.validation_loss, history.test_loss

    found = losses()
    monkeypatch.setitem(NORMS, "dyt", WrittenOut)
    assert losses() == found
    monkeypatch.setitem(NORMS, "dyt", partial(WrittenOut, alpha=0.5001))
    assert losses() != found


@pytest.mark.parametrize("norm", NORMS)
def test_no_position_sees_what_comes_after_it(norm):
    model = GPT(PRESETS["tiny"], 11, norm)
    tokens = torch.randint(11, (3, 8))
    changed = tokens.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 11
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :5], after[:, :5])
    assert (before[:, 5:] - after[:, 5:]).abs().amax((0, 2)).min() > 0


def test_initialisation_is_gpt2s():
    model = GPT(PRESETS["small"], 65, "layernorm")
    deviations = {name: parameter.std().item() for name, parameter in model.named_parameters() if parameter.dim() == 2}
    for name, deviation in deviations.items():
        expected = 0.02 / math.sqrt(6) if name.endswith("projection.weight") else 0.02
        assert deviation == pytest.approx(expected, rel=0.05), name


def test_norm_does_not_change_what_is_drawn(sample):
    weights = [matrices(build_model(replace(ADAMW, norm=norm), len(sample.vocabulary))) for norm in NORMS]
    assert all(torch.equal(a, b) for other in weights[1:] for a, b in zip(weights[0], other, strict=True))


def test_affine_like_layers_stand_inside_the_blocks_in_place_of_normalisers(sample):
    model = build_model(replace(ADAMW, norm="affine-like"), len(sample.vocabulary))
    kinds = {name: type(module) for name, module in model.named_modules()}
    assert {kinds["blocks.0.attention.qkv"], kinds["blocks.0.mlp.projection"]} == {AffineLikeLinear}
    assert kinds["head"] is torch.nn.Linear
    assert {kinds["norm"], kinds["blocks.0.mlp_norm"]} == {torch.nn.Identity}


def test_million_has_a_million_parameters():
    model = GPT(PRESETS["million"], 65, "layernorm")
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(1e6, rel=0.02)


def test_matrices_are_the_weights_inside_the_blocks():
    model = GPT(PRESETS["tiny"], 11, "dyt")
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    inside = [names[id(parameter)] for parameter in matrices(model)]
    assert inside == [
        f"blocks.0.{name}.weight"
        for name in ("attention.qkv", "attention.projection", "mlp.expansion", "mlp.projection")
    ]
    outside = {names[id(parameter)] for parameter in rest(model)}
    assert outside == set(names.values()) - set(inside)
    assert {"head.weight", "token_embedding.weight", "blocks.0.mlp.expansion.bias"} <= outside


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.lacks is None])
def test_optimizers_hold_every_parameter_once(name):
    model = GPT(PRESETS["tiny"], 11, "layernorm")
    optimizers = METHODS[name].build(model, 1e-3, 0.0, 1.0 if METHODS[name].damped else None, 100)
    held = [id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    assert sorted(held) == sorted(id(parameter) for parameter in model.parameters())


@pytest.mark.parametrize("name", [name for name in METHODS if name not in ("adamw", "sgd")])
def test_other_methods_train(name, sample):
    if METHODS[name].lacks:
        pytest.skip(f"needs {METHODS[name].lacks}")
    damping = 1.0 if METHODS[name].damped else None
    history = train(replace(ADAMW, method=name, damping=damping), sample)
    assert history.validation_loss[-1] < history.validation_loss[0]


def test_schedule_free_is_measured_at_its_average(sample):
    pytest.importorskip("schedulefree")
    run = replace(ADAMW, method="schedulefree")
    trainer = Trainer(run, sample)
    for number, windows in enumerate(batches(run, sample.train), start=1):
        trainer.step(number, windows)
    where_it_trains = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    measured = trainer.evaluate(all_windows(sample.validation, run.size))
    now = list(trainer.model.parameters())
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(where_it_trains, now, strict=True))
    trainer.optimizers[0].eval()
    trainer.method = METHODS["sgd"]
    trainer.optimizers = []
    assert trainer.evaluate(all_windows(sample.validation, run.size)) == pytest.approx(measured, rel=1e-6)
    assert not all(torch.allclose(a, b, atol=1e-6) for a, b in zip(where_it_trains, now, strict=True))


def test_missing_package_or_torch_is_named(monkeypatch):
    monkeypatch.setattr(methods, "find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match=r"method 'soap' needs the package pytorch_optimizer; pip install '\.\[peers\]'"
    ):
        replace(ADAMW, method="soap")
    monkeypatch.delattr(torch.optim, "Muon", raising=False)
    with pytest.raises(ValueError, match=r"method 'muon' needs torch\.optim\.Muon, of torch 2\.9 or newer; this is"):
        replace(ADAMW, method="muon")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "lion"}, "unknown method 'lion'; known are adamw, muon"),
        ({"norm": "batchnorm"}, "unknown norm 'batchnorm'; known are layernorm, rmsnorm, dyt, affine-like, none"),
        ({"preset": "huge"}, "unknown preset 'huge'; known are tiny, small, million, gpu"),
        ({"lr": 0.0}, r"lr is 0\.0; it must be positive"),
        ({"damping": 1.0}, "but method 'adamw' has none"),
        ({"method": "batch-ideal-adamw"}, "method 'batch-ideal-adamw' needs a damping"),
    ],
)
def test_bad_settings_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(ADAMW, **change)


@pytest.mark.parametrize("change", [{"seed": 1}, {"lr": 0.1}, {"norm": "none"}, {"steps": 7}, {"data": "x.txt"}])
def test_other_settings_are_another_file(change):
    assert replace(ADAMW, **change).filename != ADAMW.filename


def test_methods_without_a_damping_run_once():
    assert dampings("adamw", [0.1, 1.0]) == [None]
    assert dampings("batch-ideal-adamw", [0.1, 1.0]) == [0.1, 1.0]


def test_lowest_validation_loss_is_chosen_for_every_method_norm_and_length():
    def found(loss, diverged=False):
        return {"validation_loss": [0.0, loss], "diverged": diverged, "test_loss": None if loss is None else -loss}

    rates = [replace(ADAMW, lr=lr) for lr in (0.1, 0.2, 0.3, 0.4)]
    longer = [replace(run, steps=9) for run in rates]
    results = [found(loss) for loss in (3.0, 1.0, 2.0)] + [found(None, diverged=True)]
    assert choose(rates + longer, results + results[::-1]) == [rates[1], longer[2]]
    assert choose(rates[:1], [found(None, diverged=True)]) == rates[:1]


def test_same_command_again_skips_what_is_there(tmp_path, file):
    assert char_lm(tmp_path, file, "--methods", "adamw", "batch-ideal-adamw", "--seeds", "1") == 0
    kept, lost = sorted(tmp_path.glob("*.json"))
    before = kept.stat().st_mtime_ns
    lost.unlink()
    assert char_lm(tmp_path, file, "--methods", "adamw", "batch-ideal-adamw", "--seeds", "1") == 0
    assert kept.stat().st_mtime_ns == before
    assert lost.exists()


def test_results_name_the_text_and_not_where_it_lies(tmp_path, file, monkeypatch):
    monkeypatch.setattr("sys.argv", ["benchmarks", "char-lm", "--data", str(file)])
    assert char_lm(tmp_path / "out", file, "--methods", "sgd", "--seeds", "1") == 0
    (path,) = (tmp_path / "out").glob("*.json")
    assert str(file.parent) not in path.read_text()
    result = json.loads(path.read_text())
    assert result["settings"]["data"] == "sample.txt"
    assert result["environment"]["command"] == "python -m benchmarks char-lm --data sample.txt"
    assert result["characters"] == 5_000


def test_choose_searches_with_one_seed_and_reports_what_the_files_say(tmp_path, file):
    out = tmp_path / "results" / "lm"
    arguments = ["--methods", "adamw", "batch-ideal-adamw", "--lr", "1e-5", "1e-2", "--damping", "0.3", "--choose"]
    assert char_lm(out, file, *arguments, "--seeds", "2") == 0
    searched, final = read(out / "search"), read(out)
    assert {(r["settings"]["seed"], r["settings"]["lr"]) for r in searched} == {(0, 1e-5), (0, 1e-2)}
    assert len(final) == 4
    for method in ("adamw", "batch-ideal-adamw"):
        mine = [r for r in final if r["settings"]["method"] == method]
        assert {r["settings"]["seed"] for r in mine} == {0, 1}
        best = min(
            (r for r in searched if r["settings"]["method"] == method), key=lambda result: result["validation_loss"][-1]
        )
        assert {r["settings"]["lr"] for r in mine} == {best["settings"]["lr"]}
        assert best in mine
    assert char_lm(out, file, *arguments, "--time") == 0
    ratios = read(out)[-1]["time_ratio"]
    assert set(ratios) == {"adamw", "batch-ideal-adamw"}
    section = report(tmp_path / "results")["lm"]
    one, other = (r["test_loss"] for r in final if r["settings"]["method"] == "adamw")
    mean, error = (one + other) / 2, abs(one - other) / 2
    lr = next(r["settings"]["lr"] for r in final if r["settings"]["method"] == "adamw")
    assert f"| AdamW | no normaliser | {lr:g}* |  | 4 | {mean:.4f} ± {error:.4f} |" in section
    assert "| 0.3 | 4 |" in section
    assert "the best of 2 combinations" in section
    assert f"| {ratios['batch-ideal-adamw']['median']:.2f} |" in section
    for quantity in ("steps", "time"):
        assert (tmp_path / "results" / f"lm-{quantity}.png").read_bytes().startswith(PNG_SIGNATURE)


def made(method="adamw", seed=0, losses=(4.0, 3.0, 2.0), test_loss: float | None = 2.5, **settings):
    steps = [0, 5, 10]
    return {
        "kind": "char-lm",
        "settings": {
            "method": method, "norm": "none", "lr": 0.01, "weight_decay": 0.0, "steps": 10, "seed": seed,
            "preset": "tiny", "data": "x.txt", "device": "cpu", **settings,
        },
        "environment": {"processor": "a processor", "threads": 1, "torch": "2", "gpu": None},
        "size": {"layers": 1, "width": 16, "heads": 2, "context": 8, "batch_size": 4},
        "steps": steps,
        "validation_loss": list(losses),
        "train_loss": [None, 3.0, 2.0],
        "seconds": [0.0, 1.0, 2.0],
        "test_loss": test_loss,
        "diverged": test_loss is None,
    }  # fmt: skip


def test_table_has_the_numbers_of_the_files(tmp_path):
    results = [
        made(seed=0),
        made(seed=1, losses=(4.0, 3.0, 2.2), test_loss=2.7),
        made("muon", losses=(4.0, 3.0, 1.0), test_loss=1.5),
        made("batch-ideal-adamw", losses=(4.0, 3.0, None), test_loss=None, damping=0.3),
        made("sgd", norm="layernorm"),
    ]
    for number, result in enumerate(results):
        write(tmp_path / "lm" / f"{number}.json", result)
    ratios = {"adamw": 1.0, "muon": 1.5, "batch-ideal-adamw": 1.25}
    times = {name: {"median": value, "rounds": 3} for name, value in ratios.items()}
    environment = results[0]["environment"]
    time = {"kind": "char-lm-time", "preset": "tiny", "device": "cpu", "adamw_ms": 7.0, "time_ratio": times}
    write(tmp_path / "lm" / "time.json", {**time, "environment": environment})
    section = report(tmp_path)["lm"]
    assert "(7 ms): medians of 3 interleaved rounds" in section
    assert "| AdamW | no normaliser | 0.01 |  | 10 | 2.6000 ± 0.1000 | 2.1000 ± 0.1000 | 1.00 |" in section
    assert "| Muon | no normaliser | 0.01 |  | 10 | 1.5000 | 1.0000 | 1.50 |" in section
    assert "| 0.01 | 0.3 | 10 | diverged, 1 of 1 | diverged, 1 of 1 | 1.25 |" in section
    assert "| SGD, momentum 0.9 | LayerNorm | 0.01 |  | 10 | 2.5000 | 2.0000 |  |" in section
    assert "Characters of x.txt, GPT of 1 layers, width 16, 2 heads, context 8, batch 4" in section


def test_other_texts_are_other_tables(tmp_path):
    write(tmp_path / "lm" / "a.json", made())
    write(tmp_path / "lm" / "b.json", made(data="y.txt"))
    section = report(tmp_path)["lm"]
    assert "Characters of x.txt" in section
    assert "Characters of y.txt" in section
    assert (tmp_path / "lm-2-steps.png").exists()


def test_curve_is_the_mean_over_seeds_where_all_have_a_loss():
    seeds = [made(losses=(4.0, 3.0, 2.0)), made(losses=(4.0, 2.0, None))]
    assert curve(seeds) == ([0, 5], [4.0, 2.5])


def test_every_method_has_a_colour_of_its_own():
    assert len(set(COLORS.values())) == len(METHODS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "/nowhere/text"], "--data /nowhere/text: there is no such file"),
        (["--methods", "lion"], "unknown method 'lion'"),
        (["--seeds", "0"], "seeds is 0"),
    ],
)
def test_mistakes_are_one_line(arguments, message, tmp_path, capsys):
    assert main(["char-lm", "--out", str(tmp_path), "--preset", "tiny", "--device", "cpu", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_text_shorter_than_a_window_is_refused():
    with pytest.raises(ValueError, match="a part of the text has 3 characters, fewer than one window's 9"):
        train(ADAMW, text.split("abcdefghij" * 3))
