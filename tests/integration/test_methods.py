"""The references of these tests: the wrapper in a loop, and not the path of the optimizer that is wrapped."""

import pytest

from tests.helpers.loops import (
    DIFFERENT,
    EXACT,
    adamw,
    built,
    deviation,
    each_method,
    images,
    network,
    plain_loop,
    train,
    weights,
)

pytestmark = pytest.mark.usefixtures("in_float64")


@each_method
def test_loop(method):
    model, optimizer = built(method)
    train(model, optimizer, images())
    wanted = plain_loop(method, images())
    assert deviation(weights(model), wanted) <= EXACT
    bare = network()
    train(bare, adamw(bare), images())
    assert deviation(weights(bare), wanted) > DIFFERENT
