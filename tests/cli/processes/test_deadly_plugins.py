"""Plugins that segfault or hang while they load, or leave when they are asked, leave the commands
working (row 57).
"""

from __future__ import annotations

import json
import pathlib

import pytest

ASKED = """
from nsa_core.contract import BackendSpec, SlotSpec, hookimpl
@hookimpl
def nsa_register_backends():
    return BackendSpec("{name}", (1, 0), {{"win": SlotSpec("{name}:forward")}}, "{name}:probe", 99)
def probe(request):
    {does}
"""
DEADLY = {
    "segfaults": ("import ctypes\nctypes.string_at(0)\n", "SIGSEGV"),
    "hangs": (
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(600)\n",
        "within 3 s",
    ),
    "asked": (
        ASKED.format(name="asked", does="import ctypes; ctypes.string_at(0)"),
        "SIGSEGV while loading or probing",
    ),
    "leaves": (
        ASKED.format(name="leaves", does="import os; os._exit(0)"),
        "exit status 0 while loading or probing",
    ),
}
LIMIT = ("--plugin-limit", "3")


@pytest.fixture
def site(tmp_path: pathlib.Path) -> pathlib.Path:
    """A directory with all of them installed."""
    for name, (source, _) in DEADLY.items():
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (tmp_path / f"{name}.py").write_text(source)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[nsa.backends]\n{name} = {name}\n")
    return tmp_path


@pytest.mark.slow  # in the ordinary run the doctor meets the crashes of test_doctor.py
def test_row_57_doctor_goes_on(nsa, site) -> None:
    done = nsa(*LIMIT, "doctor", "--json", path=site)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["works"] is True
    said = {trouble["what"]: trouble for trouble in document["troubles"]}
    for name, (_, words) in DEADLY.items():
        trouble = said[f"backend {name} 1.0 ({name})"]
        assert words in trouble["message"]
        assert trouble["hint"]


def test_row_57_list_and_verify_go_on(nsa, site) -> None:
    done = nsa(*LIMIT, "backends", "list", path=site)
    assert done.returncode == 0, done.stderr
    assert all(words in done.stdout for _, words in DEADLY.values())
    assert "sdpa" in done.stdout
    done = nsa(*LIMIT, "verify", "--win", "hangs", path=site)
    assert (done.returncode, DEADLY["hangs"][1] in done.stderr, "Traceback" in done.stderr) == (
        3,
        True,
        False,
    )


@pytest.mark.slow
def test_row_57_verify_judges_the_others(nsa, site) -> None:
    done = nsa(*LIMIT, "verify", "--dtype", "float32", path=site)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr
    assert "0 failed" in done.stdout
