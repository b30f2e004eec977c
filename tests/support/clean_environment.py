"""The fixture `clean_environment`, which the conftest.py of a room imports for all of its tests."""

from __future__ import annotations

import pathlib

import pytest


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """Remove the user's settings and use an empty cache directory."""
    for name in ("NSA_PLUGINS", "NSA_DISABLE_PLUGINS", "NSA_CHECK", "COLUMNS", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
