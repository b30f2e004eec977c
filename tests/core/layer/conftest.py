"""Fixtures of the module's tests: small configurations, and plans of the dense test backend."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch

from dense_backend import dense_plan
from nsa_core.dispatch import default_plan


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """Default plans come from the dense test backend; the requests made are listed."""
    asked: list[dict[str, object]] = []

    def resolve(config, options):
        asked.append(dataclasses.asdict(options))
        needs = {"varlen": options.varlen, "needs_grad": options.needs_grad}
        return dense_plan(config, options.dtype, **needs)

    monkeypatch.setattr(default_plan, "resolve", resolve)
    monkeypatch.setattr(default_plan, "_plans", default_plan._Plans())
    return asked


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
