"""Training that is killed goes on from its checkpoint as if it had not been."""

import multiprocessing
import random
import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.checkpoints import forgotten
from tests.helpers.covering import paired
from tests.helpers.processes import needs_distributed
from tests.helpers.resumable import Death, train
from tests.wrappers import REMEMBERING

if not hasattr(signal, "SIGKILL") or "forkserver" not in multiprocessing.get_all_start_methods():
    pytest.skip("needs SIGKILL and a server that forks", allow_module_level=True)

SERVER = multiprocessing.get_context("forkserver")  # which helpers.processes lets import everything first

Final = dict[str, Any]


def run(*lives: tuple[Any, ...]) -> list[int]:
    """Call `train` with each of these arguments, in processes beside each other, and return how they ended."""
    processes = [SERVER.Process(target=train, args=arguments) for arguments in lives]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    return [process.exitcode for process in processes]


def run_pair(folder: Path, wrapper: str, deaths: list[Death], place: str) -> list[int]:
    """Train on two processes that meet at a place of their own: a store keeps what earlier processes left."""
    return run(*((folder, wrapper, death, rank, place) for rank, death in enumerate(deaths)))


def final(folder: Path) -> Final:
    return torch.load(folder / "final.pt", weights_only=True)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> Callable[..., Final]:
    """What a run that nobody kills leaves behind, by wrapper."""

    @cache
    def of(wrapper: str, processes: int = 1) -> Final:
        folder = tmp_path_factory.mktemp(wrapper)
        if processes == 1:
            assert run((folder, wrapper, Death())) == [0]
        else:
            assert run_pair(folder, wrapper, [Death(), Death()], "only") == [0, 0]
        return {**final(folder), "checkpoint": torch.load(folder / "checkpoint.pt", weights_only=True)}

    return of


def equal(one: Final, other: Final) -> bool:
    return all(torch.equal(value, other["weights"][name]) for name, value in one["weights"].items())


@paired("wrapper part", {name: name for name in REMEMBERING}, {part: part for part in ("step", "training", "writing")})
def test_run_killed_at_a_random_moment_and_again_resumes_bit_for_bit(wrapper, part, uninterrupted, tmp_path):
    whole = uninterrupted(wrapper)
    # The second life dies too: enough is left to do.
    moment = random.Random(f"{wrapper} {part}").randrange(1, whole["calls"][part] // 2)
    for death in (Death(part, moment), Death("training", int(0.3 * whole["calls"]["training"]))):
        assert run((tmp_path, wrapper, death)) == [-signal.SIGKILL]
        assert not (tmp_path / "final.pt").exists()
    assert run((tmp_path, wrapper, Death())) == [0]
    assert equal(final(tmp_path), whole)


@pytest.mark.parametrize("wrapper", REMEMBERING)
def test_checkpoint_without_the_wrappers_memory_resumes_to_other_weights(wrapper, uninterrupted, tmp_path):
    whole = uninterrupted(wrapper)
    state = whole["checkpoint"]
    torch.save({**state, "optimizer": forgotten(state["optimizer"])}, tmp_path / "checkpoint.pt")
    assert run((tmp_path, wrapper, Death())) == [0]
    assert final(tmp_path)["begin"] == 9
    assert not equal(final(tmp_path), whole)


#: Rank, and where on the way through which part: who reads the checkpoint dies, or who writes it.
VICTIMS = [("unit-consistent", 1, "step", 0.7), ("whitened", 0, "writing", 0.5)]


@needs_distributed
@pytest.mark.parametrize(("wrapper", "victim", "part", "share"), VICTIMS)
def test_death_of_one_of_two_processes_leaves_a_whole_checkpoint(wrapper, victim, part, share, uninterrupted, tmp_path):
    whole = uninterrupted(wrapper, processes=2)
    deaths = [Death(), Death()]
    deaths[victim] = Death(part, int(share * whole["calls"][part]))
    codes = run_pair(tmp_path, wrapper, deaths, "first")
    assert codes[victim] == -signal.SIGKILL
    assert codes[1 - victim] == 1  # gloo tells the survivor, which ends with an error
    assert not (tmp_path / "final.pt").exists()
    assert run_pair(tmp_path, wrapper, [Death(), Death()], "second") == [0, 0]
    assert final(tmp_path)["begin"] > 0
    assert equal(final(tmp_path), whole)
