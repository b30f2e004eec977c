"""nsa_core.util.interruption: an alarm ends a block, and leaves imports whole."""

from __future__ import annotations

import importlib
import signal
import sys
import time

import pytest

from nsa_core.util.interruption import alarm_in

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
