"""Fixtures: the backend on a fake FlashAttention-2 on the CPU, one provider at a time."""

from __future__ import annotations

import pytest

from fa2_standin import Library, make
from nsa_backend_fa2 import providers
from nsa_backend_fa2.providers import Source


@pytest.fixture
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Library:
    """The fake library of one test; parametrize indirectly with a name of PROVIDERS."""
    library = Library()
    provider = make(getattr(request, "param", "2.8.3.post2"), library)
    monkeypatch.setattr(providers, "active_provider", lambda: provider)
    return library


@pytest.fixture
def use_provider(monkeypatch: pytest.MonkeyPatch):
    """Return a function that makes the fake provider of a given name the only one."""

    def use(name: str) -> None:
        source = Source(name, make(name, Library()), None)
        monkeypatch.setattr(providers, "sources", lambda: (source,))

    return use
