"""Fixtures: the backend on a fake FlashAttention-2 on the CPU, one provider at a time."""

from __future__ import annotations

import pytest

from fa2_standin import FLASH4, Library, make
from nsa_backend_fa2 import flash4, providers
from nsa_backend_fa2.providers import Source


@pytest.fixture
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Library:
    """The fake library of one test; parametrize indirectly with a name of PROVIDERS.

    FlashAttention-4 runs every call that it can, beside flash-attn 2.8.
    """
    library, name = Library(), getattr(request, "param", "2.8.3.post2")
    if name == FLASH4:
        monkeypatch.setattr(flash4, "MIN_RUNS", 1)
        monkeypatch.setattr(flash4, "_supports", lambda width, device: True)
        source = Source(name, make(name, library), None)
        monkeypatch.setattr(flash4, "source", lambda: source)
        name = "2.8.3.post2"
    provider = make(name, library)
    monkeypatch.setattr(providers, "active_provider", lambda: provider)
    return library


@pytest.fixture
def use_provider(monkeypatch: pytest.MonkeyPatch):
    """Return a function that makes the fake provider of a given name the only one."""

    def use(name: str) -> None:
        source = Source(name, make(name, Library()), None)
        monkeypatch.setattr(providers, "sources", lambda: (source,))

    return use
