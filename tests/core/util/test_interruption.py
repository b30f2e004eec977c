"""nsa_core.util.interruption: an alarm ends a block, and leaves imports whole."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time

import pytest

from nsa_core.util.interruption import alarm_in, is_ctrl_c, recorded_ctrl_c

pytestmark = pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs setitimer")


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
    (tmp_path / "slow_module.py").write_text("import time\ntime.sleep(0.3)\ncomplete = True\n")
    monkeypatch.syspath_prepend(tmp_path)

    def import_and_wait() -> None:
        importlib.import_module("slow_module")
        time.sleep(5)

    with pytest.raises(Rung), alarm_in(0.05, Rung()):
        import_and_wait()
    assert sys.modules.pop("slow_module").complete


@pytest.fixture
def default_handler():
    """Python's own handler of SIGINT, which a shell that starts the tests may have replaced."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


@pytest.fixture
def pressed(tmp_path, monkeypatch):
    """Name of a module that sends SIGINT to its process while it is imported."""
    code = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nwhole = True\n"
    (tmp_path / "pressed_module.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    yield "pressed_module"
    sys.modules.pop("pressed_module", None)


@pytest.mark.usefixtures("default_handler")
def test_ctrl_c_waits_for_the_end_of_an_import(pressed):
    def import_and_wait() -> None:
        importlib.import_module(pressed)
        time.sleep(5)

    with pytest.raises(KeyboardInterrupt) as raised, recorded_ctrl_c():
        import_and_wait()
    assert sys.modules[pressed].whole
    assert is_ctrl_c(raised.value)
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL


@pytest.mark.usefixtures("default_handler")
def test_ctrl_c_during_the_last_import_does_not_outlive_the_block(pressed):
    with recorded_ctrl_c():
        importlib.import_module(pressed)
    time.sleep(0.2)
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL


@pytest.mark.usefixtures("default_handler")
def test_ctrl_c_outside_an_import_raises_at_once():
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt), recorded_ctrl_c():
        os.kill(os.getpid(), signal.SIGINT)
    assert time.monotonic() - started < 0.05
