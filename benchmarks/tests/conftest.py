"""Tests of the scripts of benchmarks: without user settings, with an empty cache, on one thread."""

from __future__ import annotations

import sys

import pytest
import torch

from clean_environment import clean_environment as clean_environment

collect_ignore_glob = ["test_study_*.py"] if sys.version_info < (3, 11) else []  # needs tomllib


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
