"""The packages of this repository work without numpy, which none of them installs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

# The strict interpreter wraps Triton's interpreter, which needs numpy.
NEED_NUMPY = {"nsa_backend_triton.strict.memory_model"}

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
from nsa_core.plan.registry import discover
from nsa_core.plan.candidates import probe_candidate
entry = discover(safe=True).get("triton")
prefill = Request(
    slot="win", geometry=BlockGeometry(), n_heads=12, n_kv_heads=2, head_dim=64, v_head_dim=64,
    dtype="bfloat16",
    device="cuda", capability=(9, 0), needs_grad=True, batch=1, seq_len=4096,
)
decode = dataclasses.replace(prefill, needs_grad=False, phase="decode")
for request in (dataclasses.replace(r, slot=slot) for r in (prefill, decode) for slot in SLOTS):
    answer = probe_candidate(entry, request)
    assert answer.accepted, f"{request.phase} {request.slot}: {answer}"
    assert import_named(entry.spec.slots[request.slot].workspace)(request) >= 0
assert sys.modules["numpy"] is None
"""


def run(code: str, **variables: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment | variables
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def output() -> str:
    """The modules that need numpy, then the result of the probe, both from one process."""
    return run(f"{EVERY_MODULE}\nprint('imported')\n{SIMULATED_GPU}\nprint('accepted')")


@pytest.mark.slow
def test_every_module_imports_without_numpy(output: str) -> None:
    assert set(output.partition("imported")[0].split()) == NEED_NUMPY


@pytest.mark.slow
def test_probe_accepts_a_gpu_without_numpy(output: str) -> None:
    assert output.endswith("accepted\n")


def test_probe_names_numpy_if_the_interpreter_lacks_it() -> None:
    code = """
import sys
sys.modules["numpy"] = None
from nsa_backend_triton.probe import detail
print(detail())
"""
    detail = run(code, TRITON_INTERPRET="1")
    assert "triton cannot be imported" in detail
    assert "pip install numpy" in detail
