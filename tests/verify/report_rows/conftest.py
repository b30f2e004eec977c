"""Fixtures: every backend's slot by name, and fa2 over its CPU stand-in where there is no GPU."""

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
    """On the CPU the slots of fa2 run over a stand-in, returned; on a GPU over the library
    installed there.
    """
    from fa2_standin import Library, make
    from nsa_backend_fa2 import providers

    if torch.cuda.is_available():
        return None
    library = Library()
    provider = make("2.8.3.post2", library)
    monkeypatch.setattr(providers, "serving", lambda: provider)
    return library


@pytest.fixture
def figure(record_property: Any) -> Any:
    """Call it with what a check measured: a line after the run, for docs/report-rows.md."""
    return lambda text: record_property("figure", text)
