"""Tiny calls of sel whose backward takes the bitmask form, for its mutants."""

from __future__ import annotations

from mutation_cases import EVEN, ODD, SHARE_ALL, Tiny
from nsa_core.layout import BlockGeometry

# 3 multiprocessors and 2 programs for each: the heads of a group are divided where there are few
# blocks.
BITMASK = {
    **SHARE_ALL,
    "sel_bitmask_dq": {"MAX_LEN": 100, "BUSY_TOKENS": 100, "BLOCK_M": 8, "BLOCK_N": 4},
    "sel_bitmask_dkdv": {"BLOCK_M": 4, "BLOCK_N": 4, "PROGRAMS_PER_SM": 2},
}
UNDIVIDED = {**BITMASK, "sel_bitmask_dkdv": {"BLOCK_M": 2, "BLOCK_N": 4, "PROGRAMS_PER_SM": 1}}
SIGN_BIT = BlockGeometry(1, 1, 1, 3, 0, 1)  # 64 blocks of one key
CASES = {
    "sel bitmask": Tiny("sel", (11,), batch=2, heads=3, groups=2, geometry=ODD, tiles=BITMASK),
    "sel bitmask packed": Tiny("sel", (2, 0, 14), geometry=ODD, tiles=UNDIVIDED),
    "sel bitmask divided": Tiny("sel", (9,), heads=6, dk=5, geometry=EVEN, tiles=BITMASK),
    "sel bitmask in thirds": Tiny("sel", (7,), dk=33, dv=33, geometry=EVEN, tiles=BITMASK),
    "sel bitmask 64 blocks": Tiny(
        "sel", (64,), heads=1, dk=2, dv=2, geometry=SIGN_BIT, tiles=UNDIVIDED
    ),
    "sel bitmask large scale": Tiny("sel", (13,), scale=-400.0, geometry=ODD, tiles=BITMASK),
    "sel bitmask partial": Tiny(
        "sel", (15,), batch=2, heads=3, groups=2, piece=(6, 13), geometry=ODD, tiles=BITMASK
    ),
    "sel bitmask partial packed": Tiny(
        "sel", (2, 0, 11, 4), piece=(5, 14), geometry=ODD, tiles=UNDIVIDED
    ),
    "sel bitmask malformed": Tiny(
        "sel", (4, 0, 9, 5), bounds=(0, 9, -2, 4, 30), piece=(2, 16), geometry=ODD, tiles=BITMASK
    ),
}
