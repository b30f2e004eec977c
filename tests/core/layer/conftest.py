"""Fixtures of the tests of the layer: the default plans that are resolved, and a seed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch

from nsa_core.plan import default_plan


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """Return the options of the default plans that are resolved, of which none exists before."""
    requested: list[dict[str, object]] = []
    resolve = default_plan.resolve

    def record(config, options):
        requested.append(dataclasses.asdict(options))
        return resolve(config, options)

    monkeypatch.setattr(default_plan, "resolve", record)
    monkeypatch.setattr(
        default_plan, "_plans", default_plan.ObjectCache(default_plan._resolve_default)
    )
    return requested


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
