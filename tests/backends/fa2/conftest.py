"""Fixtures: the backend over the CPU stand-in, one provider at a time."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from packaging.version import Version

sys.path.insert(0, str(Path(__file__).parent))

from nsa_backend_fa2 import providers
from standin import Library, aten_ops, flash_attn_interface

PROVIDERS = ("2.5.8", "2.6.3", "2.7.4", "2.8.3.post2", "aten")


def make(name: str, library: Library) -> providers.Provider:
    """The provider ``name`` over ``library``: a release of flash-attn, or "aten"."""
    if name == "aten":
        return providers.TorchFlash(aten_ops(library))
    version = Version(name)
    release = "2.7" if version >= Version("2.7") else f"2.{version.minor}"
    return providers.FlashAttnPackage(flash_attn_interface(release, library), version)


@pytest.fixture
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Library:
    """The stand-in that serves the backend for one test; parametrize indirectly with a name of PROVIDERS."""
    library = Library()
    provider = make(getattr(request, "param", "2.8.3.post2"), library)
    monkeypatch.setattr(providers, "serving", lambda: provider)
    return library
