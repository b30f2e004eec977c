"""Commands keep working with plugins that crash, hang or exit while loading or probing (row 57)."""

from __future__ import annotations

import json
import pathlib

import pytest

PROBE_PLUGIN = """
from nsa_core.contract import BackendSpec, SlotSpec, hookimpl
@hookimpl
def nsa_register_backends():
    return BackendSpec("{name}", (1, 0), {{"win": SlotSpec("{name}:forward")}}, "{name}:probe", 99)
def probe(request):
    {statement}
"""
DEADLY = {
    "segfaults": ("import ctypes\nctypes.string_at(0)\n", "SIGSEGV"),
    "hangs": (
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(600)\n",
        "within 3 s",
    ),
    "probecrash": (
        PROBE_PLUGIN.format(name="probecrash", statement="import ctypes; ctypes.string_at(0)"),
        "SIGSEGV while loading or probing",
    ),
    "probeexit": (
        PROBE_PLUGIN.format(name="probeexit", statement="import os; os._exit(0)"),
        "exit status 0 while loading or probing",
    ),
}
LIMIT = ("--plugin-limit", "3")


@pytest.fixture
def site(tmp_path: pathlib.Path) -> pathlib.Path:
    """A directory with all of these plugins installed."""
    for name, (source, _) in DEADLY.items():
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (tmp_path / f"{name}.py").write_text(source)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[nsa.backends]\n{name} = {name}\n")
    return tmp_path


@pytest.mark.slow  # test_doctor.py covers crashes in the ordinary run
def test_row_57_doctor_reports_each_plugin(nsa, site) -> None:
    done = nsa(*LIMIT, "doctor", "--json", path=site)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["works"] is True
    problems = {problem["what"]: problem for problem in document["troubles"]}
    for name, (_, expected) in DEADLY.items():
        problem = problems[f"backend {name} 1.0 ({name})"]
        assert expected in problem["message"]
        assert problem["hint"]


def test_row_57_list_and_verify_report_each_plugin(nsa, site) -> None:
    done = nsa(*LIMIT, "backends", "list", path=site)
    assert done.returncode == 0, done.stderr
    assert all(expected in done.stdout for _, expected in DEADLY.values())
    assert "sdpa" in done.stdout
    done = nsa(*LIMIT, "verify", "--win", "hangs", path=site)
    assert (done.returncode, DEADLY["hangs"][1] in done.stderr, "Traceback" in done.stderr) == (
        3,
        True,
        False,
    )


@pytest.mark.slow
def test_row_57_verify_checks_the_other_backends(nsa, site) -> None:
    done = nsa(*LIMIT, "verify", "--dtype", "float32", path=site)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr
    assert "0 failed" in done.stdout
