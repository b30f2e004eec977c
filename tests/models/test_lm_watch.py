"""Watch: a process that is silent or that raised ends the others, and a regular end does not."""

from __future__ import annotations

import threading
import time

import pytest

from nsa_core import InvalidInput
from nsa_models.lm import watch as watch_module
from nsa_models.lm.watch import Watch


class Store:
    """A store of one process; ``lost`` makes it fail like one whose host ended."""

    def __init__(self):
        self.values, self.lost = {}, False

    def set(self, key, value):
        if self.lost:
            raise RuntimeError("connection reset")
        self.values[key] = value.encode()

    def get(self, key):
        return self.values[key]

    def check(self, keys):
        return all(key in self.values for key in keys)


@pytest.fixture
def start(monkeypatch):
    """Return ``start(rank)``, which watches as one of three processes, and its ends."""
    monkeypatch.setattr(watch_module, "_EVERY_S", 0.01)
    monkeypatch.setattr(watch_module, "SILENT_S", 60.0)
    monkeypatch.setattr(watch_module, "SILENT_AFTER_ERROR_S", 0.3)
    monkeypatch.setattr(watch_module, "COMMON_ERROR_S", 0.3)
    store, ends = Store(), []

    def make(rank):
        return Watch(store, rank, 3, lambda *end: ends.append((rank, *end)))

    return make, store, ends


def until(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_an_error_of_one_process_is_told_to_the_others(start):
    make, _, ends = start
    with make(0), make(1):
        with pytest.raises(InvalidInput), make(2):
            raise InvalidInput("line 3 is not JSON")
        until(lambda: len(ends) == 2)
    assert sorted(ends) == [
        (rank, 2, "process 2 of 3 ended: InvalidInput: line 3 is not JSON") for rank in (0, 1)
    ]


def test_an_error_that_all_processes_meet_ends_none_of_the_others(start, monkeypatch):
    monkeypatch.setattr(watch_module, "COMMON_ERROR_S", 20.0)
    make, _, ends = start
    watches = [make(rank) for rank in range(3)]
    for watch in watches:
        watch.__enter__()
    for watch in watches:
        time.sleep(0.1)  # the others hear of the error before they meet it
        watch.__exit__(None, InvalidInput("refused"), None)
    assert ends == []


def test_regular_ends_are_no_loss(start):
    make, _, ends = start
    before = time.monotonic()
    with make(0):
        for error in (None, KeyboardInterrupt(), SystemExit(143)):
            leaving = make(1 if error is None else 2)
            leaving.__enter__()
            threading.Thread(target=leaving.__exit__, args=(None, error, None)).start()
        time.sleep(0.1)
    assert time.monotonic() - before < 5
    assert ends == []


@pytest.mark.slow
def test_a_silent_process_is_lost_soon_after_an_error_of_a_collective(start):
    make, _, ends = start
    with make(1):
        failing = make(0)
        failing.__enter__()
        time.sleep(0.4)
        assert ends == []  # without an error it may be silent for longer
        failing.__exit__(None, RuntimeError("Connection closed by peer"), None)
    assert {lost for _, lost, _ in ends} == {2}
    assert "process 2 of 3 was killed or is stuck: nothing heard of it for 0 s" in ends[0][2]


def test_the_end_of_the_store_is_the_end_of_torchrun(start):
    make, store, ends = start
    with make(0):
        store.lost = True
        until(lambda: ends)
    assert ends == [(0, -1, "torchrun, which started the processes, ended")]
