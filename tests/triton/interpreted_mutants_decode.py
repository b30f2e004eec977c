"""Mutants of the decode kernels: of what walks keys in a cache and merges splits."""

from __future__ import annotations

import decode_problems
from mutation_suite import FUNCTIONS, OF_DECODE, Mutants


class TestDecode(Mutants):
    names = tuple(name for name in FUNCTIONS if name.startswith(OF_DECODE))
    cases = decode_problems.CASES
