"""nsa_core.util.interruption: recorded and deferred signals, and alarms."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import time

import pytest

from nsa_core.util import interruption
from nsa_core.util.interruption import (
    SIGNALS,
    alarm_in,
    deferred_signals,
    exit_code,
    is_ctrl_c,
    recorded_signals,
    signal_of,
)

pytestmark = pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs setitimer")


@pytest.fixture(autouse=True)
def default_handlers():
    """Handlers as of a foreground job; a shell that starts the tests may have replaced them."""
    default = {signal.SIGINT: signal.default_int_handler}
    previous = {n: signal.signal(n, default.get(n, signal.SIG_DFL)) for n in SIGNALS}
    yield
    for number, handler in previous.items():
        assert signal.signal(number, handler) is default.get(number, signal.SIG_DFL)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_raises_and_names_itself(number):
    with recorded_signals() as stop:
        with pytest.raises(KeyboardInterrupt) as raised:
            os.kill(os.getpid(), number)
        assert stop.name == number.name
        assert is_ctrl_c(KeyboardInterrupt())
    codes = {"SIGINT": 130, "SIGTERM": 143, "SIGHUP": 129}
    assert exit_code(signal_of(raised.value)) == codes[number.name]


@pytest.mark.parametrize("number", SIGNALS)
def test_a_deferred_signal_raises_at_its_second_time(number, monkeypatch):
    with deferred_signals() as stop:
        signal.raise_signal(number)
        signal.raise_signal(number)  # as `timeout` does
        assert stop.name == number.name
        monkeypatch.setattr(interruption, "_SAME_S", 0.0)
        with pytest.raises(KeyboardInterrupt, match=number.name):
            signal.raise_signal(number)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_that_the_process_ignores_stays_ignored(number):
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with recorded_signals() as stop:
            signal.raise_signal(number)
            assert not stop.received
        assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)


def test_a_block_inside_another_one_has_the_same_record():
    with recorded_signals() as outer:
        with deferred_signals() as inner:
            signal.raise_signal(signal.SIGTERM)
        assert inner is outer
        with pytest.raises(KeyboardInterrupt, match="SIGTERM"):
            outer.check()


@pytest.mark.parametrize("number", SIGNALS)
def test_a_handler_that_the_block_installs_stays(number):
    """A process that ends ignores SIGTERM, also while Python shuts down after the block."""
    before = {n: signal.getsignal(n) for n in SIGNALS}
    try:
        with recorded_signals():
            signal.signal(number, signal.SIG_IGN)
        after = {n: signal.getsignal(n) for n in SIGNALS}
        assert after == before | {number: signal.SIG_IGN}
    finally:
        signal.signal(number, before[number])


@pytest.mark.parametrize("error", [ImportError, AttributeError, RuntimeError])
def test_an_import_that_swallows_a_signal_and_fails_does_not_hide_it(error):
    def load() -> None:
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        raise error("cannot load module more than once per process")

    with pytest.raises(KeyboardInterrupt), recorded_signals():
        load()
    with pytest.raises(error), recorded_signals():
        raise error("no signal")


def test_a_block_that_goes_on_after_a_signal_ends_after_its_grace():
    started = time.monotonic()
    with recorded_signals() as stop:
        with stop.stop_on_interrupt(grace_s=0.1):
            signal.raise_signal(signal.SIGTERM)
            time.sleep(5)
        with stop.stop_on_interrupt(grace_s=0.1):
            pass
        time.sleep(0.2)  # no alarm is left
    assert time.monotonic() - started < 2
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL


class Rung(Exception):
    """Raised by the alarm of a test."""


def test_an_alarm_ends_a_block_and_is_off_after_it():
    started = time.monotonic()
    with pytest.raises(Rung), alarm_in(0.05, Rung()):
        time.sleep(5)
    assert time.monotonic() - started < 2
    with alarm_in(0.05, Rung()):
        pass
    time.sleep(0.1)


def test_an_alarm_waits_for_the_end_of_an_import(tmp_path, monkeypatch):
    """A package that is half imported stays broken for the rest of the process."""
    (tmp_path / "slow_import.py").write_text("import time\ntime.sleep(0.3)\nREST = 5\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(Rung), alarm_in(0.05, Rung()):
        time.sleep(importlib.import_module("slow_import").REST)
    assert sys.modules.pop("slow_import").REST == 5


def test_an_alarm_that_rings_while_its_block_ends_is_stopped(monkeypatch):
    """It rings every 0.1 s, and a slow machine takes that long to leave the block."""

    def ringing(number):
        handler = getsignal(number)
        handler(number, None)
        return handler

    getsignal = signal.getsignal
    monkeypatch.setattr(signal, "getsignal", ringing)
    with pytest.raises(Rung), alarm_in(0.01, Rung()):
        time.sleep(5)
    assert getsignal(signal.SIGALRM) is signal.SIG_DFL
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0
