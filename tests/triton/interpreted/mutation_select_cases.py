"""Tiny calls of select whose launches detect the mutants of its kernels."""

from __future__ import annotations

import dataclasses

import torch

from mutation_cases import MALFORMED, Tiny
from nsa_core.layout import BlockGeometry

# Head tiles of one head, and of several heads with one of padding; three ranking windows; a number
# of taps that is no power of two.
FEW_BYTES = {"select_forward": {"Q_BYTES": 2048, "RANK_ROWS": 2}}
LARGE = {"select_forward": {"BLOCK_M": 32, "BLOCK_N": 32, "RANK_ROWS": 32, "PROGRAMS_PER_SM": 1}}
# four scans of eight chunks
PACKS = {"select_forward": {**LARGE["select_forward"], "RANK_CHUNKS": 32, "RANK_LANES": 2}}
RANKED, FREE = BlockGeometry(4, 2, 4, 3, 1, 1), BlockGeometry(4, 2, 4, 3, 0, 0)
BEST = BlockGeometry(2, 2, 2, 2, 0, 0)
TAPS = BlockGeometry(6, 1, 6, 4, 0, 0)
# [2 taps, 4 blocks, 2 taps, 2 taps, block]
ROWS_OF_TAPS = {"select_forward": {"BLOCK_N": 32, "RANK_ROWS": 8}}
SELECT_CASES = {
    "select dense": Tiny("select", (18,), batch=2, heads=3, groups=2, geometry=RANKED),
    "select packed": Tiny("select", (2, 0, 21), heads=5, geometry=FREE, tiles=FEW_BYTES),
    "select free": Tiny("select", (34,), heads=1, geometry=BlockGeometry(4, 2, 4, 2, 0, 0)),
    "select windows": Tiny(
        "select", (76,), heads=1, dk=16, geometry=BlockGeometry(2, 2, 2, 10, 1, 1), tiles=LARGE
    ),
    "select ties": Tiny(
        "select", (76,), heads=1, ties=True, geometry=BlockGeometry(2, 2, 2, 12, 1, 1), tiles=LARGE
    ),
    "select fp32": Tiny(
        "select",
        (66,),
        heads=1,
        dtype=torch.float32,
        geometry=BlockGeometry(2, 2, 2, 30, 0, 0),
        tiles=LARGE,
    ),
    "select a whole window": Tiny(
        "select", (35,), heads=1, geometry=BlockGeometry(2, 2, 2, 16, 0, 0), tiles=LARGE
    ),
    "select packs": Tiny(
        "select", (100,), heads=1, geometry=BlockGeometry(2, 2, 2, 10, 1, 1), tiles=PACKS
    ),
    "select forced": Tiny(
        "select", (9,), heads=1, geometry=BlockGeometry(2, 2, 2, 2, 1, 1), tiles=LARGE
    ),
    "select no number": Tiny(
        "select", (9,), heads=1, dtype=torch.float32, geometry=BEST, scale=torch.nan, tiles=LARGE
    ),
    "select taps": Tiny("select", (38,), heads=2, geometry=TAPS, tiles=ROWS_OF_TAPS),
    "select last key": Tiny(
        "select", (27,), heads=8, geometry=BlockGeometry(4, 2, 6, 3, 0, 0), tiles=FEW_BYTES
    ),
    "select nan": Tiny(
        "select", (44,), geometry=BlockGeometry(4, 2, 8, 3, 0, 0), tiles=ROWS_OF_TAPS, nan_key=6
    ),
}
SELECT_CASES |= {
    "select piece": Tiny("select", (25,), batch=2, geometry=RANKED, piece=(7, 22)),
    "select piece packed": Tiny("select", (3, 0, 25, 9), geometry=RANKED, piece=(9, 30)),
}
SELECT_CASES |= {
    f"select {bounds}": dataclasses.replace(case, slot="select", geometry=RANKED)
    for bounds, case in MALFORMED.items()
}
LONG_RANKED = BlockGeometry(2, 2, 2, 10, 1, 1)
SELECT_CASES |= {
    "select spare": Tiny(
        "select", (110,), heads=1, geometry=BlockGeometry(2, 2, 2, 14, 0, 0), tiles=LARGE
    ),
    "select few rows": Tiny(
        "select",
        (70,),
        heads=1,
        geometry=LONG_RANKED,
        tiles={"select_forward": {"BLOCK_M": 16, "RANK_ROWS": 2}},
    ),
    "select two packs": Tiny(
        "select",
        (120,),
        heads=1,
        geometry=LONG_RANKED,
        tiles={"select_forward": {**LARGE["select_forward"], "RANK_CHUNKS": 16, "RANK_LANES": 4}},
    ),
    "select four packs": Tiny(
        "select",
        (200,),
        heads=1,
        geometry=LONG_RANKED,
        tiles={"select_forward": {**LARGE["select_forward"], "RANK_CHUNKS": 32, "RANK_LANES": 4}},
    ),
    # fewer scores than are wanted are not 0
    "select far": Tiny(
        "select",
        (76,),
        heads=1,
        scale=900.0,
        geometry=BlockGeometry(2, 2, 2, 12, 1, 1),
        tiles=LARGE,
    ),
}
