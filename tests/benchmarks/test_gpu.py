"""The command for a day with a GPU: its commands exist, resume, and stop when the time is up.

`make commands` runs all of them on a CPU.
"""

import pytest

from benchmarks import gpu
from benchmarks.__main__ import main
from benchmarks.catalogue import STUDIES
from benchmarks.core.study import parsed


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_commands_are_those_of_studies_and_tests_that_are_there(device, tmp_path):
    options = gpu.GpuOptions(device=device, out=tmp_path, text="a text", images="imagefolder:some images")
    (pytest_, *arguments), *others = gpu.commands(options)
    assert pytest_ == "pytest"
    assert all((gpu.ROOT / path).exists() for path in gpu.TESTS)
    assert set(arguments) >= {str(gpu.ROOT / path) for path in gpu.TESTS}
    names = []
    for _, name, *arguments in others:
        study = STUDIES[name]
        own = parsed(name, study.help, study.options, arguments)
        assert (own.device, own.out, own.name) == (device, tmp_path, f"gpu-{name}")
        assert not study.data or own.data == {"images": options.images, "text": options.text}[study.data]
        names.append(name)
    assert names == [*["speed"] * (2 if device == "cuda" else 1), "char-lm", "table1"]


@pytest.mark.parametrize(
    ("minutes", "code", "done", "left"),
    [
        ("1", 2, "2 of 3 commands are done", ["left: json.tool /nowhere (failed: exit code "]),
        ("0", 0, "0 of 3 commands are done", ["left: this\n", "left: json.tool /nowhere\n", "left: calendar 2026\n"]),
    ],
)
def test_a_command_that_fails_costs_the_others_nothing_and_none_begins_late(
    minutes, code, done, left, capsys, monkeypatch, tmp_path
):
    monkeypatch.setattr(gpu, "commands", lambda options: [["this"], ["json.tool", "/nowhere"], ["calendar", "2026"]])
    assert main(["gpu", "--device", "cpu", "--minutes", minutes, "--out", str(tmp_path)]) == code
    printed = capsys.readouterr().out
    assert done in printed
    assert printed.count("left: ") == len(left)
    assert all(line in printed for line in left)
