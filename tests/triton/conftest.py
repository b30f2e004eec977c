"""benchmarks/host_overhead.py for the tests of host code: a driver that launches nothing."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")  # its fake devices must not repeat
def bench() -> Any:
    """benchmarks/host_overhead.py as a module."""
    path = Path(__file__).parents[2] / "benchmarks" / "host_overhead.py"
    spec = importlib.util.spec_from_file_location("host_overhead", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["host_overhead"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def no_gpu(bench: Any) -> Iterator[Any]:
    if importlib.import_module("nsa_backend_triton.host.device").interpreted():
        pytest.skip("the interpreter launches by itself")
    with bench.no_gpu() as kernels:
        yield kernels
