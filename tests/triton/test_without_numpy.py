"""Our packages in an environment without numpy, which none of them installs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

# The strict interpreter wraps triton's own interpreter, which needs numpy.
NEED_NUMPY = {"nsa_backend_triton.strict.memory_model", "nsa_backend_triton.strict.speedups"}

EVERY_MODULE = """
import importlib, pkgutil, sys
sys.modules["numpy"] = None
for name in ("nsa_core", "nsa_cli", "nsa_backend_sdpa", "nsa_backend_triton", "nsa_backend_fa2"):
    for module in pkgutil.walk_packages(importlib.import_module(name).__path__, name + "."):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            if error.name != "numpy":
                raise
            print(module.name)
"""

SIMULATED_GPU = """
import dataclasses, sys
sys.modules["numpy"] = None
from nsa_core import BlockGeometry, Request
from nsa_core.contract import SLOTS, import_named
from nsa_core.dispatch.registry import discover
from nsa_core.dispatch.probing import ask
entry = discover(safe=True).get("triton")
prefill = Request(
    slot="win", geometry=BlockGeometry(), n_heads=12, n_kv_heads=2, head_dim=64, v_head_dim=64,
    dtype="bfloat16",
    device="cuda", capability=(9, 0), needs_grad=True, batch=1, seq_len=4096,
)
decode = dataclasses.replace(prefill, needs_grad=False, phase="decode")
for asked in (dataclasses.replace(of, slot=slot) for of in (prefill, decode) for slot in SLOTS):
    answer = ask(entry, asked)
    assert answer.accepted, f"{asked.phase} {asked.slot}: {answer}"
    assert import_named(entry.spec.slots[asked.slot].workspace)(asked) >= 0
assert sys.modules["numpy"] is None
"""


def run(code: str, **variables: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment | variables
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def said() -> str:
    """The modules that need numpy, then the word of the probe: one process, as torch is slow to
    import.
    """
    return run(f"{EVERY_MODULE}\nprint('imported')\n{SIMULATED_GPU}\nprint('accepted')")


def test_every_module_imports_without_numpy(said: str) -> None:
    assert set(said.partition("imported")[0].split()) == NEED_NUMPY


def test_the_probe_accepts_a_gpu_without_numpy(said: str) -> None:
    assert said.endswith("accepted\n")


def test_the_interpreter_without_numpy_is_refused_with_the_package_to_install() -> None:
    code = """
import sys
sys.modules["numpy"] = None
from nsa_backend_triton.probe import detail
print(detail())
"""
    said = run(code, TRITON_INTERPRET="1")
    assert "triton cannot be imported" in said
    assert "pip install numpy" in said
