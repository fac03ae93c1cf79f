"""How much code a training step runs through stays below its limit."""

import importlib.util

from tests.step_size import LIMIT, Size, functions_by_step, functions_called, size_of

PROGRAM = '''"""Three functions, of which two are called."""


def outer(numbers):
    """The sum of the doubles."""

    def double(number):
        return 2 * number

    return sum([double(number) for number in numbers])


def idle():
    return 0
'''


def test_functions_and_lines_of_a_program(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    spec = importlib.util.spec_from_file_location("program", path)
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    called = functions_called(lambda: program.outer([1, 2]), tmp_path)
    assert {code.co_name for code in called} == {"outer", "double"}
    assert size_of(called) == Size(files=1, lines=14, functions=2, lines_of_functions=7)  # double's lines are outer's


def test_no_training_step_is_above_the_limit():
    plain, *others, measuring = functions_by_step()
    size = size_of(plain.union(*others, measuring))
    assert all(each <= most for each, most in zip(size, LIMIT, strict=True)), f"{size}; at most {LIMIT}"
    # The profile sees the measurement, in one step of the round.
    assert 0 < len(plain) <= len(others[-1]) < len(measuring)
