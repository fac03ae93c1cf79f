"""The examples run, and go on where they were interrupted."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from adiv_optim import Proportional, jacobian
from examples import burgers, char_lm, equation, fit_image, log_metrics, poisson, recurrent, which_step
from examples.char_lm import load
from examples.gpt import GPT, NORMS, PRESETS, all_windows, split


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog; " * 40)
    return str(path)


def options(data, folder, *arguments):
    given = ["--data", data, "--preset", "tiny", "--steps", "8", "--save-every", "3", "--device", "cpu"]
    return char_lm.parser().parse_args([*given, *arguments, "--checkpoint", str(folder / "run.pt")])


def ignore(step, loss):
    pass


def interrupt(step, loss):
    if step == 5:
        raise KeyboardInterrupt


@pytest.mark.parametrize("optimizer", char_lm.OPTIMIZERS)
def test_interrupted_run_ends_with_the_same_weights(optimizer, data, tmp_path):
    text = load(data)
    arguments = ("--optimizer", optimizer, "--norm", "dyt")
    whole = char_lm.train(options(data, tmp_path / "whole", *arguments), text, ignore)
    with pytest.raises(KeyboardInterrupt):
        char_lm.train(options(data, tmp_path / "interrupted", *arguments), text, interrupt)
    resumed = char_lm.train(options(data, tmp_path / "interrupted", *arguments), text, ignore)
    for p, q in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(p, q)
    other = char_lm.train(options(data, tmp_path / "other", *arguments, "--seed", "1"), text, ignore)
    assert not torch.equal(other.head.weight, whole.head.weight)


def test_checkpoint_of_another_run_is_refused(data, tmp_path):
    text = load(data)
    char_lm.train(options(data, tmp_path), text, ignore)
    with pytest.raises(SystemExit, match=r"run\.pt is of a run with optimizer 'adamw', this one has 'proportional'"):
        char_lm.train(options(data, tmp_path, "--optimizer", "proportional"), text, ignore)


@pytest.mark.parametrize("norm", ["layernorm", "none"])
def test_command_prints_losses_and_a_sample(norm, data, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    char_lm.main(["--data", data, "--preset", "tiny", "--steps", "60", "--lr", "0.03", "--norm", norm])
    *_, validation, test, sample = capsys.readouterr().out.splitlines()
    assert float(validation.split()[2]) < 2.7  # log 28, of even guesses, is 3.3
    assert float(test.split()[2]) < 2.7
    assert len(sample) == 300
    assert set(sample) <= set(load(data).vocabulary)
    assert (tmp_path / "runs" / f"char-lm-adamw-{norm}.pt").exists()


MISTAKES = {
    "no text": (char_lm, "--data nowhere", "--data nowhere: there is no such file"),
    "no window": (char_lm, "--data FOLDER/text.txt --preset gpu", "a tenth of it is 180 characters, no window of "),
    "never saved": (char_lm, "--save-every 0", "argument --save-every: 0 is not positive"),
    "no rate": (char_lm, "--lr -1", "argument --lr: -1.0 is not positive"),
    "bytes": (char_lm, "--data FOLDER/deep.tiff", "it is no text in UTF-8 ("),
    "no step of Poisson": (poisson, "--steps -1", "argument --steps: -1 is not positive"),
    "format": (fit_image, "--out FOLDER/x.xyz", "x.xyz is no picture by its name; end it in one of ."),
    "folder": (fit_image, "--out FOLDER/text.txt/x.png", "text.txt/x.png: its folder cannot be made ("),
    "no file": (fit_image, "--image FOLDER/nowhere.png", "nowhere.png: it cannot be read as a picture ("),
    "32 bits": (fit_image, "--image FOLDER/deep.tiff", "its colours have 32 bits and no known range"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_told_before_training(name, data, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Image.fromarray(np.array([[0, 100_000]] * 2, dtype=np.int32)).save(tmp_path / "deep.tiff")
    program, arguments, message = MISTAKES[name]
    with pytest.raises(SystemExit) as error:
        program.main([part.replace("FOLDER", str(tmp_path)) for part in arguments.split()])
    assert message in f"{error.value} {capsys.readouterr().err}"
    assert not (tmp_path / "runs").exists()


def test_viscosity_is_found_and_drawn(tmp_path, capsys):
    burgers.main(["--seconds", "2", "--out", str(tmp_path / "burgers.png")])
    printed = {line.split(":")[0]: line for line in capsys.readouterr().out.splitlines() if "viscosity" in line}
    found = {name: float(line.split("viscosity ")[1].split(",")[0]) for name, line in printed.items() if ":" in line}
    assert found["GaussNewton"] < 0.2 < found["SOAP"]  # both begin at 0.5
    assert (tmp_path / "burgers.png").read_bytes().startswith(b"\x89PNG")
    points = torch.rand(5, 2, dtype=torch.float64, requires_grad=True)  # the true wave solves the equation
    u = burgers.wave(points)
    (first,) = torch.autograd.grad(u.sum(), points, create_graph=True)
    second = torch.autograd.grad(first[:, 0].sum(), points)[0][:, 0]
    assert (first[:, 1] + u * first[:, 0] - burgers.VISCOSITY * second).abs().max() < 1e-10


def test_wave_solves_its_equation_and_conditions():
    for residual, points in equation.terms(torch.Generator().manual_seed(0)):
        for point in points[:5]:
            assert residual(lambda point: equation.wave(point)[None], point).abs() < 1e-10
            assert residual(lambda point: equation.wave(point)[None] + point.prod() ** 2 + 1, point).abs() > 1e-2


def test_both_ways_lower_the_error_of_the_equation():
    reached = {}
    for name, build in equation.FITS.items():
        model = equation.network()
        step = build(model, torch.Generator().manual_seed(0))
        for number in range(20):
            step(number / 20)
        reached[name] = equation.relative_error(model, equation.wave)
    before = equation.relative_error(equation.network(), equation.wave)
    assert reached["GaussNewton"] < 0.5 * reached["SOAP"] < 0.5 * before


def test_equation_is_drawn_with_its_errors_or_without_a_solution(tmp_path, capsys, monkeypatch):
    equation.main(["--seconds", "1", "--out", str(tmp_path / "equation.png")])
    *lines, last = capsys.readouterr().out.splitlines()
    assert last == f"picture: {tmp_path / 'equation.png'}"
    assert [line.split(": relative error ")[0] for line in lines[-2:]] == list(equation.FITS)
    monkeypatch.setattr(equation, "SOLUTION", None)
    equation.draw({"GaussNewton": equation.network()}, tmp_path / "unknown.png")
    for picture in ("equation.png", "unknown.png"):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")


def test_examples_import_neither_benchmarks_nor_tests():
    for path in Path(char_lm.__file__).parent.glob("*.py"):
        assert not re.search(r"^(from|import) (benchmarks|tests)", path.read_text(), re.MULTILINE)


def test_metrics_of_every_layer_are_drawn(tmp_path, capsys):
    log_metrics.main(["--size", "8", "--steps", "12", "--every", "4", "--out", str(tmp_path / "metrics.png")])
    assert capsys.readouterr().out == f"picture: {tmp_path / 'metrics.png'}\n"
    assert (tmp_path / "metrics.png").stat().st_size > 1000
    _, numbers = log_metrics.train(torch.rand(8, 8, 3), 5, 4)[-1]
    assert sum(name.endswith(".weight/input_rms") for name in numbers) == 10


def test_every_step_of_the_picture_is_drawn_and_whitened_sgd_is_ideal(tmp_path, capsys):
    which_step.main(["--out", str(tmp_path / "steps.png")])
    assert capsys.readouterr().out == f"picture: {tmp_path / 'steps.png'}\n"
    assert (tmp_path / "steps.png").stat().st_size > 1000
    cosines = {name: which_step.cosine(*which_step.moved(build)) for name, build in which_step.STEPS.items()}
    assert cosines["Whitened, SGD"] > 0.99
    assert all(cosines[f"Whitened, {name}"] > cosines[name] for name in ("SGD", "Adam"))


def test_picture_is_learned_in_steps_of_equal_time_and_drawn(tmp_path, capsys):
    fit_image.main(["--size", "8", "--steps", "10", "--out", str(tmp_path / "fit.png")])
    *lines, last = capsys.readouterr().out.splitlines()
    assert last == f"picture: {tmp_path / 'fit.png'}"
    assert (tmp_path / "fit.png").stat().st_size > 1000
    printed = dict(line.split(": ") for line in lines[-len(fit_image.FITS) :])
    assert printed.keys() == fit_image.FITS.keys()
    assert ", 10 steps, " in printed["Adam"]
    assert f", {round(fit_image.FITS['SOAP'].steps / 50)} steps, " in printed["SOAP"]
    assert all(float(line.split(" dB")[0]) > 0 for line in printed.values())


def test_split_keeps_order_and_every_character():
    characters = "Hamlet, Prinz von Dänemark\n" * 11
    parts = split(characters)
    assert [len(part) for part in parts[:3]] == [239, 29, 29]
    assert "".join(parts.vocabulary[place] for place in torch.cat(parts[:3])) == characters


def test_windows_predict_every_character_once():
    windows = all_windows(torch.arange(25), PRESETS["tiny"])
    assert windows[:, 1:].flatten().tolist() == list(range(1, 25))
    assert windows[:, 0].tolist() == [0, 8, 16]


def test_derf_is_its_formula_and_starts_at_erf_of_half_the_input():
    layer, x = NORMS["derf"](3), torch.randn(2, 4, 3)
    assert torch.equal(layer(x), torch.erf(0.5 * x))
    for parameter in layer.parameters():
        parameter.data.uniform_(-1, 1)
    wanted = layer.weight * torch.erf(layer.alpha * x + layer.shift) + layer.bias
    torch.testing.assert_close(layer(x), wanted)


@pytest.mark.parametrize("norm", NORMS)
def test_no_position_sees_what_comes_after_it(norm):
    model = GPT(PRESETS["tiny"], 11, norm)
    for name, parameter in model.named_parameters():
        if name.endswith("_gain"):  # SkipInit begins with its branches closed
            nn.init.ones_(parameter)
    tokens = torch.randint(11, (3, 8))
    changed = tokens.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 11
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :5], after[:, :5])
    assert (before[:, 5:] - after[:, 5:]).abs().amax((0, 2)).min() > 0


def test_million_has_a_million_parameters():
    model = GPT(PRESETS["million"], 65, "layernorm")
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(1e6, rel=0.02)


def test_recurrent_cell_gets_the_gradients_of_its_jacobians():
    model, x, y = recurrent.Reader(5).double(), torch.rand(1, 1, 8).double(), torch.tensor([3])
    state, cell = torch.zeros(1, 5).double(), model.cell
    output = cell(x[:, 0], state)
    g = torch.autograd.grad(nn.functional.cross_entropy(model.head(output), y), output)[0][0]
    rows = [torch.autograd.grad(o, list(cell.parameters()), retain_graph=True) for o in cell(x[:, 0], state)[0]]
    jacobians = [torch.stack(each) for each in zip(*rows, strict=True)]
    factor = sum(j.square().sum() for j in jacobians) / 5
    jacobian.backward(model, nn.functional.cross_entropy, x, y, Proportional())
    for parameter, j in zip(cell.parameters(), jacobians, strict=True):
        assert torch.allclose(parameter.grad, torch.tensordot(g, j, 1) / factor, rtol=1e-10, atol=0)
    assert abs(factor - 1) > 0.01  # the plain gradient would be noticed


def test_recurrent_program_prints_accuracies(monkeypatch, capsys):
    monkeypatch.setattr(recurrent, "RATES", (0.3,))
    recurrent.main(["--epochs", "1"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["plain", "Proportional"]
    assert all(float(line.split()[3]) > 20 for line in lines)  # 10 is chance
