"""Fixtures of the tests of the layer: default plans from the dense test backend, and a seed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch

from dense_backend import dense_plan
from nsa_core.plan import default_plan


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """Resolve default plans to the dense test backend; return the list of requested options."""
    requested: list[dict[str, object]] = []

    def resolve(config, options):
        requested.append(dataclasses.asdict(options))
        flags = {"varlen": options.varlen, "needs_grad": options.needs_grad}
        return dense_plan(config, options.dtype, **flags)

    monkeypatch.setattr(default_plan, "resolve", resolve)
    monkeypatch.setattr(
        default_plan, "_plans", default_plan.ObjectCache(default_plan._resolve_default)
    )
    return requested


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
