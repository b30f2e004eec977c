"""Mutants of the decode kernels.

The ordinary suite takes those of decode/walk.py only: the walk over keys and the merge of splits.
"""

from __future__ import annotations

import pytest

import decode_problems
from mutation_suite import FUNCTIONS, OF_DECODE, Mutants

WALK = "decode.walk."


class TestWalk(Mutants):
    names = tuple(name for name in FUNCTIONS if name.startswith(WALK))
    cases = decode_problems.CASES


@pytest.mark.slow
class TestDecode(Mutants):
    names = tuple(
        name for name in FUNCTIONS if name.startswith(OF_DECODE) and not name.startswith(WALK)
    )
    cases = decode_problems.CASES
