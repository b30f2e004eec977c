"""list, show, explain and doctor give each backend the same status and the same sentence."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import types

import pytest
import torch

from five_commands import TORCH, WITHOUT_CHILDREN, standings_by_command
from nsa_cli import health
from nsa_core.contract import Reason
from nsa_core.plan.loading import BackendEntry
from nsa_core.plan.registry import Registry, discover

SAME = ("list", "show", "explain", "doctor", "report")


@pytest.fixture
def by_command(nsa, monkeypatch):
    """Return a function that returns the standings by command, all from this process."""

    def collect(**torch_facts) -> dict[str, dict[str, tuple[str, str]]]:
        for name, stand_in in WITHOUT_CHILDREN.items():
            monkeypatch.setattr(health, name, stand_in)
        for name, fact in torch_facts.items():
            monkeypatch.setitem(TORCH, name, fact)
        return standings_by_command(lambda *arguments: nsa(*arguments).out)

    return collect


def assert_same(by_command: dict[str, dict[str, tuple[str, str]]]) -> dict[str, tuple[str, str]]:
    """Assert that all of them agree, and return what they say."""
    assert set(by_command) == set(SAME)
    for command in SAME:
        assert by_command[command] == by_command["list"], command
    return by_command["list"]


def test_without_a_gpu(by_command, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert assert_same(by_command()) == {
        "fa2": ("unavailable", "needs cuda, got cpu"),
        "sdpa": ("ready", "runs every slot"),
        "triton": ("unavailable", "needs cuda, got cpu"),
    }


def test_with_a_simulated_gpu(by_command, monkeypatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    gpu = {"name": "T4", "capability": [7, 5], "memory_bytes": 2**34}
    assert assert_same(by_command(gpus=[gpu], computes=True, cuda="13.0")) == {
        "fa2": ("unavailable", "needs sm_80, this GPU is sm_75"),
        "sdpa": ("ready", "runs every slot"),
        "triton": ("unavailable", "needs sm_80, this GPU is sm_75"),
    }


def picky(request) -> list[Reason]:
    return [] if request.slot == "cmp" else [Reason("small", f"too small for {request.slot}")]


def raising(request) -> list[Reason]:
    raise ZeroDivisionError("division by zero")


@pytest.mark.slow
def test_with_broken_plugins(by_command, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    module = types.ModuleType("broken_toys")
    module.picky, module.raising = picky, raising
    monkeypatch.setitem(sys.modules, "broken_toys", module)
    ours = discover(safe=True)
    sdpa = ours.get("sdpa").spec
    assert sdpa is not None
    registry = Registry((*ours.entries, *_not_loaded()))
    for name in ("picky", "raising"):
        spec = dataclasses.replace(sdpa, name=name, probe=f"broken_toys:{name}")
        registry = registry.with_backend(spec, distribution=f"nsa-{name}")
    monkeypatch.setattr("nsa_core.plan.registry.discover", lambda **options: registry)
    standings = assert_same(by_command())
    assert standings["sdpa"] == ("ready", "runs every slot")
    assert standings["crashed"] == ("broken", "killed its process with SIGSEGV while loading")
    assert standings["absent"] == ("unavailable", "needs a package")
    assert standings["old"] == ("incompatible", "written for contract 0.1")
    assert standings["refused"] == ("disabled", "not in NSA_PLUGINS")
    assert standings["raising"] == (
        "broken",
        "its probe raised ZeroDivisionError: division by zero",
    )
    assert standings["picky"] == (
        "ready",
        "runs cmp; does not support select, sel, win, combine: too small for select",
    )


def _not_loaded() -> list[BackendEntry]:
    """Return an entry of each status of a plugin that was not loaded."""
    facts = {
        "crashed": ("broken", "killed its process with SIGSEGV while loading"),
        "absent": ("unavailable", "needs a package"),
        "old": ("incompatible", "written for contract 0.1"),
        "refused": ("disabled", "not in NSA_PLUGINS"),
    }
    return [
        BackendEntry(name, f"nsa-{name}", "1.0", name, status, Reason("code", text))
        for name, (status, text) in facts.items()
    ]


# Run the commands of sys.argv in a process that cannot import numpy; Triton's interpreter needs it.
COMMANDS = """
import contextlib, io, json, sys
from nsa_cli import health
from nsa_cli.app import main
from five_commands import WITHOUT_CHILDREN, standings_by_command

def run(*arguments):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        main(arguments)
    return out.getvalue()

vars(health).update(WITHOUT_CHILDREN)
print(json.dumps(standings_by_command(run)))
"""


@pytest.mark.slow
def test_without_numpy(tmp_path) -> None:
    pytest.importorskip("triton")
    message = "No module named 'numpy'"
    (tmp_path / "numpy.py").write_text(f"raise ModuleNotFoundError({message!r}, name='numpy')")
    folders = [str(tmp_path), str(pathlib.Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    path = os.pathsep.join(folders)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COMMANDS],
        env={**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    by_command = {
        command: {name: tuple(standing) for name, standing in of_command.items()}
        for command, of_command in json.loads(done.stdout).items()
    }
    standings = assert_same(by_command)
    assert standings["triton"] == ("unavailable", f"triton cannot be imported: {message}")
    assert standings["sdpa"] == ("ready", "runs every slot")
