"""Third-party plugins tried in child processes: cached outcomes and cleanup (row 57)."""

from __future__ import annotations

import json
import os
import pathlib
import textwrap
import time

import pytest

import toys
from nsa_core.plan import trial
from nsa_core.plan.loading import Plugin, installed
from nsa_core.plan.registry import discover


def plugin(name: str) -> Plugin:
    return next(p for p in installed() if p.name == name)


def test_cached_crash_marks_a_plugin_as_broken_without_a_child(install):
    install("toy-segfault", toys.DEADLY["toy-segfault"][1])
    assert "SIGSEGV" in discover(isolate=True).get("toy-segfault").reason.message
    entry = discover().get("toy-segfault")  # importing it here would end the test run
    assert (entry.status, entry.reason.code) == ("broken", "crashes")
    assert str(trial.cache_file()) in entry.reason.hint


def test_change_of_the_plugin_invalidates_the_cached_outcome(install):
    target = install("toy-mended", "import os\nos._exit(7)")
    assert discover(isolate=True).get("toy-mended").reason.code == "exits"
    source = target / "toy_mended.py"
    source.write_text(textwrap.dedent(toys.good("toy-mended", "toy_mended")))
    os.utime(source, (time.time() + 5, time.time() + 5))
    assert discover(isolate=True).get("toy-mended").status == "ready"


def test_survival_is_cached(install, monkeypatch):
    install("toy-fine", toys.good("toy-fine", "toy_fine"))
    assert trial.failed_trials([plugin("toy-fine")]) == {}

    def no_child(plugin, names):
        raise AssertionError("a child was started")

    monkeypatch.setattr(trial, "_start", no_child)
    assert trial.failed_trials([plugin("toy-fine")]) == {}


@pytest.mark.slow
def test_slow_or_raising_probe_counts_as_survived(install, monkeypatch):
    bodies = {"toy-thinks": "import time; time.sleep(600)", "toy-raises": "raise SystemExit(3)"}
    for name, body in bodies.items():
        source = toys.good(name, name.replace("-", "_"), probe="own_probe")
        install(name, textwrap.dedent(source) + f"\ndef own_probe(request):\n    {body}\n")
    assert trial.failed_trials([plugin(name) for name in bodies]) == {}


@pytest.mark.slow
def test_cached_hang_is_retried_under_a_longer_limit(install):
    install(
        "toy-slow",
        "import time\ntime.sleep(1.5)\n" + textwrap.dedent(toys.good("toy-slow", "toy_slow")),
    )
    assert "within 0.2 s" in discover(isolate=True, limit_s=0.2).get("toy-slow").reason.message
    assert discover(isolate=True, limit_s=0.1).get("toy-slow").status == "broken"  # from the cache
    assert discover(isolate=True, limit_s=60).get("toy-slow").status == "ready"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe\x00",
        b"[]",
        b'{"schema": 3, "verdicts": []}',
        b'{"schema": 99, "verdicts": {"x": 1}}',
        b"[" * 100_000,
        "entry",
    ],
    ids=["empty", "cut", "binary", "list", "verdicts", "schema", "deep", "entry"],
)
def test_corrupted_cache_is_ignored_and_rewritten(install, content):
    install("toy-fine", toys.good("toy-fine", "toy_fine"))
    file = trial.cache_file()
    trial.failed_trials([plugin("toy-fine")])
    if content == "entry":
        document = json.loads(file.read_text())
        for key in document["verdicts"]:
            document["verdicts"][key]["reason"] = {"code": 3}
        content = json.dumps(document).encode()
    file.write_bytes(content)
    assert discover(isolate=True).get("toy-fine").status == "ready"
    verdicts = json.loads(file.read_text())["verdicts"]
    assert [v["reason"] for v in verdicts.values()] == [None]
    assert list(file.parent.iterdir()) == [file]  # no temporary file remains


def test_unwritable_cache_does_not_prevent_discovery(install, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("a file where a directory is expected")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    install("toy-fine", toys.good("toy-fine", "toy_fine"))
    assert discover(isolate=True).get("toy-fine").status == "ready"


def test_children_run_concurrently_and_their_processes_are_killed(install, tmp_path):
    source = (
        "import os, pathlib, subprocess, sys, time\nchild = subprocess.Popen(['sleep', '600'])\n"
    )
    source += "pathlib.Path({!r}).write_text(f'{{os.getpid()}} {{child.pid}}')\ntime.sleep(600)"
    for i in range(4):
        install(f"toy-sleeper-{i}", source.format(str(tmp_path / f"pids{i}")))
    started = time.monotonic()
    registry = discover(isolate=True, limit_s=4)
    assert time.monotonic() - started < 12  # one after another takes 16 s
    assert [registry.get(f"toy-sleeper-{i}").reason.code for i in range(4)] == ["hangs"] * 4
    time.sleep(0.2)
    for file in tmp_path.glob("pids*"):
        for pid in file.read_text().split():
            state = pathlib.Path(f"/proc/{pid}/stat")
            assert not state.exists() or state.read_text().split()[2] == "Z", pid
