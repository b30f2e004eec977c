"""Fixtures: a small benchmark run, and backends that are wrong or slow on purpose."""

from __future__ import annotations

import importlib
import itertools
import sys
import time
import types
from collections.abc import Callable

import pytest
import torch

from clean_environment import clean_environment as clean_environment
from nsa_bench import clocks, roofline
from nsa_bench.prefill import PrefillBench
from nsa_bench.settings import Settings
from nsa_bench.shapes import parse_shape
from nsa_core.contract import API_VERSION, BackendSpec, SlotSpec
from nsa_core.plan.registry import Registry, discover

BLOCKS = (8, 4, 16, 3, 24)
_numbers = itertools.count()  # operators are created once per function name, so names must be new


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run on one thread, with short samples, and with peak rates that are not measured."""
    torch.set_num_threads(1)
    monkeypatch.setattr(clocks, "SAMPLE_MS", 0.1)
    monkeypatch.setattr(roofline, "measure_peaks", lambda device, dtype: roofline.Peaks(1e11, 1e10))


@pytest.fixture
def small() -> Callable[..., Settings]:
    """Return settings of a run of about a second."""

    def make(**changes) -> Settings:
        defaults = {
            "shapes": [parse_shape("2/1/8")],
            "lengths": [40, 80],
            "blocks": BLOCKS,
            "budget_s": 0.001,
        }
        return Settings(**{**defaults, **changes})

    return make


@pytest.fixture
def run(small) -> Callable[..., object]:
    """Run a small benchmark."""

    def do(registry: Registry | None = None, **changes):
        return PrefillBench(small(**changes), registry or discover(), {"device": "?"}).run()

    return do


@pytest.fixture
def registry_with(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Registry]:
    """Return a registry with an extra win backend: sdpa's, with a changed output and a delay."""

    def make(
        name: str, change: Callable = lambda o: o, delay: float = 0.0, priority: int = -5
    ) -> Registry:
        module, win = (
            types.ModuleType(f"bench_{name}_{next(_numbers)}"),
            discover().get("sdpa").spec.slots["win"],
        )
        real, real_backward = (
            getattr(importlib.import_module(path.split(":")[0]), path.split(":")[1])
            for path in (win.forward, win.backward)
        )

        def forward(q, k, v, *, call):
            time.sleep(delay)
            o, lse = real(q, k, v, call=call)
            return change(o), lse

        module.forward, module.backward, module.accept = forward, real_backward, lambda request: []
        monkeypatch.setitem(sys.modules, module.__name__, module)
        slots = {"win": SlotSpec(f"{module.__name__}:forward", f"{module.__name__}:backward")}
        spec = BackendSpec(name, API_VERSION, slots, f"{module.__name__}:accept", priority=priority)
        return discover().with_backend(spec, version="1.0")

    return make
