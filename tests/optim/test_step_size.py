"""How much code a training step runs through stays below its limit."""

from tests.step_size import LIMIT, functions_by_step, size_of


def test_no_training_step_is_above_the_limit():
    plain, *others, measuring = functions_by_step()
    size = size_of(plain.union(*others, measuring))
    assert all(each <= most for each, most in zip(size, LIMIT, strict=True)), f"{size}; at most {LIMIT}"
    # The profile sees the measurement, in one step of the round.
    assert 0 < len(plain) <= len(others[-1]) < len(measuring)
