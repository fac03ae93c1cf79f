"""Settings outside of their limits are named with their value, and so are settings that are no numbers."""

import math

import numpy
import pytest

from adiv_optim._checks import check_count, check_finite, check_not_negative, check_positive

KINDS = {
    check_positive: ([1e-300, 2, numpy.float32(0.5)], [0.0, -1, math.inf, math.nan, "0.1", True, None]),
    check_not_negative: ([0, 0.0, numpy.float64(3)], [-1e-300, math.inf, math.nan, "0.1", False, None]),
    check_finite: ([-2, 0.0, numpy.float32(0.5)], [math.inf, math.nan, "0.1", True, None]),
    check_count: ([1, 10**9, numpy.int64(7)], [0, -3, 2.0, math.nan, "4", True, None]),
}


@pytest.mark.parametrize("check", KINDS)
def test_only_what_is_within_passes(check):
    good, bad = KINDS[check]
    for value in good:
        check("Class", first=1, setting=value)
    for value in bad:
        with pytest.raises(ValueError, match=f"^Class: setting is {value!r}; it must be "):
            check("Class", first=1, setting=value)
