"""Mutants of the sel kernels, forward and backward."""

from __future__ import annotations

import pytest

import bitmask_cases
import mutation_cases
from mutation_suite import FUNCTIONS, OF_SEL, Mutants


@pytest.mark.slow
class TestSel(Mutants):
    names = tuple(name for name in FUNCTIONS if name.startswith(OF_SEL))
    cases = mutation_cases.SEL_CASES | bitmask_cases.CASES
