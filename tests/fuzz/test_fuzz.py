"""Random networks, trained in every wrapper and by hand.

A hundred networks have fixed seeds. `pytest tests/fuzz --fuzz 1000` takes a thousand more of fresh seeds, and says which
of them failed; `--fuzz-seed SEED` repeats one.
"""

import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.fuzz import by_hand, channels
from tests.fuzz.by_hand import METHODS, AmbiguousError
from tests.fuzz.compare import SETTINGS, deviation
from tests.wrappers import WRAPPERS

pytestmark = pytest.mark.usefixtures("in_float64")
EXACT = 1e-6  # float64; three steps through networks that may be badly conditioned
COUNT = 100
#: Of networks: those of the others leave it open what is right, as equal eigenvalues at a rank's end do.
LEAST_DECIDED = 0.5


def test_every_wrapper_has_a_reference_by_hand():
    assert METHODS.keys() == SETTINGS.keys() == WRAPPERS.keys()


@pytest.mark.parametrize("name", METHODS)
def test_steps_on_random_networks_are_those_by_hand(name, pytestconfig):
    if (seed := pytestconfig.getoption("--fuzz-seed")) is not None:
        assert deviation(name, seed) <= EXACT
        return
    fresh = random.SystemRandom().randrange(10**6, 10**9)
    seeds = [*range(COUNT), *range(fresh, fresh + pytestconfig.getoption("--fuzz"))]
    failed, decided = {}, 0
    for seed in seeds:
        try:
            found = deviation(name, seed)
        except AmbiguousError:
            continue
        except Exception as error:  # the seed is what matters
            failed[seed] = repr(error)
        else:
            decided += 1
            if not found <= EXACT:
                failed[seed] = f"off by {found:.1e}"
    assert not failed, f"repeat by: pytest tests/fuzz -k {name} --fuzz-seed {next(iter(failed))}; {failed}"
    assert decided >= LEAST_DECIDED * len(seeds)


#: What a reference might get wrong, setting by setting.
SLIPS: dict[str, Callable[[Any], Any]] = {
    "damping": lambda damping: 1.001 * damping,
    "per_sample": lambda per_sample: not per_sample,
    "decay": lambda decay: 0.9 * decay + 0.01,
    "every": lambda every: every + 1,
    "max_dim": lambda max_dim: 2 if max_dim is None else max_dim + 1,
    "graft_norm": lambda graft_norm: not graft_norm,
    "rank": lambda rank: (rank or 0) + 1,
    "gauge": {"network": "layer", "layer": "network"}.get,
    "fan_in": lambda fan_in: not fan_in,
    "project": lambda project: not project,
}
#: The way to a root that the wrapper takes is none of the reference's business.
NO_SLIPS = {"root"}


def is_found(name: str, **planted: Callable[[Any], Any]) -> bool:
    for seed in range(COUNT):
        try:
            if not deviation(name, seed, **planted) <= EXACT:
                return True
        except AmbiguousError:
            continue
    return False


@pytest.mark.parametrize("name", METHODS)
def test_error_planted_in_the_reference_is_found(name, monkeypatch):
    settings = SETTINGS[name](random.Random(0)).keys() - NO_SLIPS
    assert [setting for setting in settings if not is_found(name, **{setting: SLIPS[setting]})] == []
    monkeypatch.setattr(by_hand, "squared", lambda x: 1.001 * float(x.square().sum()))
    monkeypatch.setattr(by_hand, "ridge_of", lambda damping, level: 1.001 * damping * level)
    monkeypatch.setattr(channels, "usual", lambda fan_in: -1.0)
    assert is_found(name)
