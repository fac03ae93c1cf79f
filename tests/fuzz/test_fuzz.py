"""Random networks, trained in every wrapper and by hand.

Twenty-four networks have fixed seeds. `pytest tests/fuzz --fuzz 1000` takes a thousand more of fresh seeds, and says
which of them failed; `--fuzz-seed SEED` repeats one.
"""

import random
from collections.abc import Callable
from typing import Any

import pytest

from adiv_optim._linalg import strips
from tests.fuzz import by_hand, by_inputs, channels, corrected
from tests.fuzz.by_hand import AmbiguousError
from tests.fuzz.compare import SETTINGS, deviation
from tests.wrappers import WRAPPERS

pytestmark = pytest.mark.usefixtures("in_float64")
EXACT = 1e-6  # float64; three steps through networks that may be badly conditioned
COUNT = 24
#: Of networks: those of the others leave it open what is right, as equal eigenvalues at a rank's end do.
LEAST_DECIDED = 0.5


@pytest.fixture(autouse=True)
def _short_strips(monkeypatch):
    """Cut covariances into strips that are shorter than most of them."""
    monkeypatch.setattr(strips, "STRIP", 4)


@pytest.mark.parametrize("name", WRAPPERS)
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
    "floor": lambda floor: 1.001 * floor,
    "hold": lambda hold: not hold,
    "max_dim": lambda max_dim: 2 if max_dim is None else max_dim + 1,
    "max_rows": lambda max_rows: 2 if max_rows is None else max_rows + 1,
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


def test_error_planted_in_any_reference_is_found(monkeypatch):
    """Every setting that the reference gets wrong by itself, and for every wrapper one error in the formula."""
    settings = {name: draw(random.Random(0)).keys() - NO_SLIPS for name, draw in SETTINGS.items()}
    planted = [(name, setting) for name in WRAPPERS for setting in settings[name]]
    assert [error for error in planted if not is_found(error[0], **{error[1]: SLIPS[error[1]]})] == []
    with monkeypatch.context() as patch:
        patch.setattr(by_hand, "ZERO", 1.0)
        assert [name for name in ("preconditioned", "whitened", "whitened-rank") if not is_found(name)] == []
    monkeypatch.setattr(corrected, "squared", lambda x: 1.001 * float(x.square().sum()))
    monkeypatch.setattr(by_inputs, "ridge_of", lambda damping, level: 1.001 * damping * level)
    monkeypatch.setattr(by_inputs, "rms_of", lambda mean_square: 1.001 * mean_square**0.5)
    monkeypatch.setattr(channels, "usual", lambda fan_in: -1.0)
    assert [name for name in WRAPPERS if not is_found(name)] == []
