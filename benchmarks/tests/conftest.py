"""Tests of the scripts of benchmarks: without user settings, with an empty cache, on one thread."""

from __future__ import annotations

import sys

import pytest
import torch

collect_ignore_glob = ["test_study_*.py"] if sys.version_info < (3, 11) else []  # needs tomllib


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    for name in ("NSA_PLUGINS", "NSA_DISABLE_PLUGINS", "COLUMNS", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    torch.set_num_threads(1)
