"""What triton_variants.py tries, by piece: changes of the settings that ship ({}), the best hope first."""

from __future__ import annotations

import timeit
from collections.abc import Callable
from typing import Any

from nsa_backend_triton import launch

SHAPES = {"64/4/128": (64, 4, 128, 65536), "32/8/128": (32, 8, 128, 32768), "12/2/64": (12, 2, 64, 65536)}
TINY = {"8/2/16": (8, 2, 16, 96)}
Settings = dict[str, int]


def rows(names: str, *values: tuple[int, ...]) -> list[Settings]:
    """Settings from columns."""
    return [dict(zip(names.split(), row)) for row in values]


def milliseconds(function: Callable[[], Any]) -> float:
    """Median of do_bench; of one run in the interpreter."""
    if launch.interpreted():
        return 1e3 * timeit.timeit(function, number=1)
    from triton.testing import do_bench

    return float(do_bench(function, warmup=15, rep=90, return_mode="median"))


FORWARD = "BLOCK_M HEADS BLOCK_N num_warps num_stages maxnreg TMA WS"
DKDV = "BLOCK_N BLOCK_M CHUNKS num_warps num_stages maxnreg TMA EARLY WS"
BLOCK = "ordered WHOLE TURN ROWS num_warps num_stages"
TILE = "ROWS KEYS num_warps num_stages AHEAD TMA"
APART = (128, 1, 64, 4, 2, 0, 1, 1), (128, 1, 64, 4, 3, 0, 1, 1)
# Pieces by what they cost at 64/4/128 times the hope for them.
VARIANTS: dict[str, list[Settings]] = {
    "sel backward tiles": [{}, *rows(
        TILE, (64, 64, 4, 2, 1, 1), (64, 64, 4, 2, 1, 0), (64, 32, 4, 2, 1, 1), (64, 32, 4, 3, 1, 1),
        (64, 64, 4, 2, 0, 1), (128, 64, 8, 2, 1, 1))],
    "cmp dkdv": [{}, *rows(
        DKDV, (64, 64, 1, 4, 2, 0, 2, 0, 0), (64, 64, 1, 4, 2, 0, 2, 1, 0), (128, 64, 1, 4, 2, 0, 2, 0, 1),
        (128, 64, 1, 4, 2, 0, 2, 1, 1), (128, 64, 1, 8, 2, 0, 2, 1, 0), (128, 64, 1, 8, 3, 0, 2, 0, 0),
        (64, 64, 2, 4, 2, 0, 2, 0, 0), (128, 32, 1, 4, 3, 0, 2, 0, 1), (64, 32, 1, 4, 3, 0, 2, 1, 0))],
    "sel backward blocks": [
        {"ordered": 1}, {"ordered": 0},
        *rows(BLOCK, (1, 1, 0, 32, 4, 3), (1, 1, 0, 32, 4, 2), (1, 1, 0, 16, 4, 3), (0, 1, 0, 32, 8, 3),
              (1, 1, 0, 64, 8, 2), (0, 1, 0, 32, 4, 3), (0, 1, 0, 16, 4, 3), (0, 1, 0, 32, 4, 2), (1, 1, 1, 64, 4, 2),
              (0, 1, 0, 64, 8, 2)),
        {"ordered": 1, "WHOLE": 1, "ROWS": 32, "num_warps": 4, "num_stages": 3, "CHUNK": 1024},
        {"ordered": 0, "WHOLE": 1, "ROWS": 32, "num_warps": 4, "num_stages": 3, "SEGMENT": 8192},
    ],
    "cmp dq": [{}, *rows(FORWARD, *APART, (128, 1, 64, 8, 3, 0, 1, 0), (128, 1, 128, 4, 2, 0, 1, 1))],
    "cmp forward": [{}, *rows(FORWARD, *APART, (128, 1, 128, 4, 2, 0, 1, 1))],
    "sel forward": [{}, {"TMA": 1}, {"TMA": 1, "num_stages": 2, "maxnreg": 0},
                    {"TMA": 1, "num_stages": 2, "KEYS": 32, "maxnreg": 0},
                    {"TMA": 1, "num_stages": 3, "KEYS": 32, "maxnreg": 0},
                    {"TMA": 1, "num_stages": 2, "KEYS": 32, "maxnreg": 128},
                    {"bucket LEAN": 1}, {"TMA": 1, "bucket LEAN": 1},  # shapes whose rows have buckets
                    {"TMA": 1, "LEAST": 2, "bucket LEAN": 1}, {"TMA": 1, "LEAST": 4, "bucket LEAN": 1},
                    {"TMA": 1, "LEAST": 4, "bucket LEAN": 1, "bucket TILES": 32},
                    {"TMA": 1, "LEAST": 4, "bucket LEAN": 1, "bucket maxnreg": 168}],
    "select": [{}, {"POLY": 4}, {"POLY": 2}, {"POLY": 8}, {"POLY": 4, "ROWS": 8, "num_stages": 2}, {"ROWS": 8}],
    "win dkdv": [{}, *rows(
        DKDV, (64, 64, 1, 4, 2, 0, 2, 0, 0), (64, 64, 1, 4, 2, 0, 2, 1, 0), (64, 32, 1, 4, 3, 0, 2, 1, 0),
        (128, 64, 1, 4, 2, 0, 2, 0, 1), (64, 32, 1, 4, 2, 0, 2, 0, 0))],
    "win dq": [{}, *rows(FORWARD, (64, 4, 32, 4, 3, 0, 1, 0), (64, 4, 32, 4, 2, 0, 1, 0), *APART[:1],
                         (64, 1, 64, 4, 2, 0, 1, 0))],
    "win forward": [{}, *rows(FORWARD, (64, 4, 32, 4, 3, 128, 1, 0), *APART[:1], (128, 8, 64, 8, 2, 128, 1, 0),
                              (128, 4, 32, 8, 3, 128, 1, 0))],
}  # fmt: skip
