"""Fixtures of the report rows: a fixed seed, fa2 on CPU, and measured figures for the report."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


@pytest.fixture
def fa2_here(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run fa2 over a stand-in library without a GPU and return it; return None on a GPU."""
    from fa2_standin import Library, make
    from nsa_backend_fa2 import providers

    if torch.cuda.is_available():
        return None
    library = Library()
    provider = make("2.8.3.post2", library)
    monkeypatch.setattr(providers, "active_provider", lambda: provider)
    return library


@pytest.fixture
def figure(record_property: Any) -> Any:
    """Return a function that records a measured figure for README.md."""
    return lambda text: record_property("figure", text)
