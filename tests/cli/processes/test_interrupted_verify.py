"""Ctrl-C at any moment of `nsa verify --jobs 2` ends it and all of its processes."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

PROCESSES = pathlib.Path("/proc")
LIMIT_S = 4.0  # twice the promise, because other tests use the cores too
ATTEMPTS = 3  # on a busy machine, one of them may take longer
pytestmark = pytest.mark.skipif(not PROCESSES.is_dir(), reason="reads /proc")


def processes(mark: str) -> list[int]:
    """Return the ids of the processes whose environment has ``mark``."""
    found = []
    for folder in PROCESSES.glob("[0-9]*"):
        try:
            is_zombie = (folder / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
            if mark.encode() in (folder / "environ").read_bytes() and not is_zombie:
                found.append(int(folder.name))
        except OSError:  # it has ended, or is another user's
            continue
    return found


def wait_for(happened: Callable[[], bool]) -> None:
    """Wait until something happened, at most 90 s."""
    deadline = time.monotonic() + 90
    while not happened() and time.monotonic() < deadline:
        time.sleep(0.01)


# Each moment, and the number of processes that tells it: the command, the tracker of resources and
# the fork server, which imports for seconds; then workers.
MOMENTS = {"imports": 1, "imports of the fork server": 3, "drawing or checks": 3, "checks": 5}
SECONDS_LATER = {"imports": 0.3, "drawing or checks": 2.0, "checks": 1.0}


@pytest.mark.few_cases("imports of the fork server", "checks")
@pytest.mark.parametrize("moment", MOMENTS)
def test_ctrl_c_ends_the_command_and_its_processes(moment: str, tmp_path: pathlib.Path) -> None:
    seconds = []
    for attempt in range(ATTEMPTS):
        file = tmp_path / f"{attempt}.json"  # a second file of one name would be refused
        seconds.append(interrupt(moment, f"NSA_TEST={file}", file))
        if seconds[-1] < LIMIT_S:
            break
    assert min(seconds) < LIMIT_S, seconds


def interrupt(moment: str, mark: str, file: pathlib.Path) -> float:
    """Press Ctrl-C at a moment; return the seconds until no process of the command is left."""
    command = start(mark, "verify", "--jobs", "2", "--json", str(file))
    wait_for(lambda: len(processes(mark)) >= MOMENTS[moment] or command.poll() is not None)
    time.sleep(SECONDS_LATER.get(moment, 0))
    assert command.poll() is None, command.communicate()
    interrupted_at = time.monotonic()
    os.killpg(command.pid, signal.SIGINT)  # as a terminal does
    out, err = command.communicate(timeout=60)  # until no process has the pipes any more
    assert command.returncode == 130, err
    assert "interrupted by SIGINT" in err or "INTERRUPTED by SIGINT" in out
    wait_for(lambda: not processes(mark))
    seconds = time.monotonic() - interrupted_at
    assert not processes(mark)
    if "INTERRUPTED" in out:
        assert json.loads(file.read_text())["interrupted"]["signal"] == "SIGINT"
    return seconds


def start(mark: str, *arguments: str) -> subprocess.Popen[str]:
    """Start `nsa` as a foreground job with a mark in its environment, in a group of its own."""
    name, _, value = mark.partition("=")
    return subprocess.Popen(
        [sys.executable, "-m", "nsa_cli", *arguments],
        env={**os.environ, name: value, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # In a background job of a shell, SIGINT is ignored and child processes inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
