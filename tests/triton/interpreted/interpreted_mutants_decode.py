"""Mutants of the decode kernels."""

from __future__ import annotations

import pytest

import decode_problems
from mutation_suite import FUNCTIONS, OF_DECODE, Mutants


@pytest.mark.slow
class TestDecode(Mutants):
    names = tuple(name for name in FUNCTIONS if name.startswith(OF_DECODE))
    cases = decode_problems.CASES
