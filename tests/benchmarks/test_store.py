"""Results are whole lines: added at once, read back as they were, dropped if torn."""

import json
import threading

import pytest

from benchmarks.core.runs import measure
from benchmarks.core.store import Store

PLACE = {"torch": "2", "commit": "abc", "date": "2026-01-01"}


def result(**settings):
    return {"settings": settings, "environment": PLACE, "test_accuracy": [[1.0, 0.1 + 0.2]]}


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "folder" / "results.jsonl", "digits")


def test_results_come_back_as_they_were_and_what_they_share_stands_once(store):
    results = {
        "a": result(lr=0.1, seeds=[0, 1], data="digits"),
        "b": result(lr=0.2, seeds=[0, 1], damping=1.0, data="digits"),
        "c": {**result(seeds=[0], data="digits"), "environment": {**PLACE, "torch": "3"}},
    }
    for key, each in results.items():
        store.add(key, each)
    assert store.read() == [{"key": key, **each} for key, each in results.items()]
    assert Store(store.path).study == "digits"
    text = store.path.read_text()
    assert (text.count('"data"'), text.count('"commit"')) == (1, 2)
    chose = {**result(lr=0.1), "part": "search", "score": 3.0}
    store.add("d", chose)
    assert [each["key"] for each in store.read()] == list(results)
    assert store.read("search") == [{"key": "d", **chose}]


def test_line_of_a_changed_rule_takes_the_place_of_the_old_one(store):
    assert not store.has("a", "rule 1")
    store.add("a", {**result(lr=0.1), "computes": "rule 1"})
    assert store.has("a", "rule 1")
    assert not store.has("a", "rule 2")
    store.add("a", {**result(lr=0.1), "computes": "rule 2", "test_accuracy": [[2.0]]})
    assert [each["test_accuracy"] for each in store.read()] == [[[2.0]]]
    assert store.has("a", "rule 2")


@pytest.mark.parametrize("torn", [1, 20, 10_000])
def test_torn_last_line_is_dropped_and_cut_off(store, torn):
    store.add("a", result(lr=0.1))
    whole = store.path.read_bytes()
    store.add("b", result(lr=0.2))
    last = store.path.read_bytes()[len(whole) :]
    store.path.write_bytes(whole + last[: min(torn, len(last) - 1)])
    assert [each["key"] for each in store.read()] == ["a"]
    store.add("c", result(lr=0.3))
    assert [each["key"] for each in store.read()] == ["a", "c"]
    assert all(json.loads(line) for line in store.path.read_text().splitlines())


def test_damaged_line_is_named_before_anything_is_added(store):
    store.add("a", result(lr=0.1))
    store.path.write_bytes(store.path.read_bytes() + b"<<<<<<< HEAD\n")
    with pytest.raises(ValueError, match=r"results\.jsonl, line 4 is no line of results: JSONDecodeError.*; restore"):
        store.check()


def test_writers_share_a_file(store):
    def add_many(name):
        for number in range(50):
            Store(store.path, "digits").add(f"{name}{number}", result(lr=number, name=name))

    writers = [threading.Thread(target=add_many, args=(name,)) for name in "ab"]
    for step in ("start", "join"):
        for writer in writers:
            getattr(writer, step)()
    assert {each["key"] for each in store.read()} == {f"{name}{number}" for name in "ab" for number in range(50)}
    assert store.path.read_text().count('"study"') == 1


def test_measurement_that_is_there_is_made_again_only_if_asked(tmp_path):
    store, made = Store(tmp_path / "x.jsonl", "x"), []
    wanted = {"key": lambda: made.append(1) or {"value": len(made)}}
    measure(store, wanted)
    measure(store, wanted)
    assert [result["value"] for result in store.read()] == [1]
    measure(store, wanted, again=True)
    assert [result["value"] for result in store.read()] == [2]
