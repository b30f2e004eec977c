"""Fixtures: every backend's slot by name, and fa2 over its CPU stand-in where there is no GPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "backends" / "fa2"))  # fa2_standin


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


@pytest.fixture
def fa2_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU the slots of fa2 run over the stand-in; on a GPU over the library that is installed there."""
    from fa2_standin import Library, make

    from nsa_backend_fa2 import providers

    real, provider = providers.serving, make("2.8.3.post2", Library())
    monkeypatch.setattr(providers, "serving", lambda: real() if torch.cuda.is_available() else provider)
