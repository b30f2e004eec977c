"""What triton_variants.py tries, by piece and shape: changes of the settings that ship ({}), the best hope first."""

from __future__ import annotations

import timeit
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa_backend_triton import launch
from nsa_core.layout import BlockGeometry

GEOMETRY = BlockGeometry()
SHAPES = {
    "64/4/128": (64, 4, 128, 65536), "32/8/128": (32, 8, 128, 32768), "12/2/64": (12, 2, 64, 65536),
    "12/2/64 16k": (12, 2, 64, 16384), "12/2/64 8k": (12, 2, 64, 8192), "12/2/64 2k": (12, 2, 64, 2048),
    "64/4/128 8k": (64, 4, 128, 8192), "32/8/128 8k": (32, 8, 128, 8192),
}  # fmt: skip
TINY = {"8/2/16": (8, 2, 16, 96)}
Settings = dict[str, int]


class Job(NamedTuple):
    """One variant of a piece at a shape, on a kind of blocks ("-": it takes none)."""

    shape: str
    piece: str
    kind: str
    number: int


def device() -> torch.device:
    """Where it runs."""
    return torch.device("cpu" if launch.interpreted() else "cuda")


def past_blocks(kind: str, length: int, groups: int) -> Tensor:
    """int32 [1, S, G, n]: block 0, the last two, and others before them."""
    size, free = GEOMETRY.select_block_size, GEOMETRY.num_selected_blocks - 3
    current = torch.arange(length, device=device())[:, None, None] // size
    drawn = torch.rand(length, groups, free, device=device())
    if kind == "near":
        epoch = (torch.rand(length, groups, free, device=device()) > 0.8).long().cumsum(0)
        drawn = drawn.gather(0, epoch.clamp(max=length - 1))
    # Distinct inside a token: the i-th draw from the i-th of `free` strides.
    others = 1 + torch.arange(free, device=device()) + free * (drawn * ((current - 3) / free).clamp(min=0)).long()
    others = torch.where(others < current - 1, others, -1)
    forced = torch.cat([torch.zeros_like(current), current - 1, current], -1).expand(length, groups, 3)
    return torch.cat([forced, others], -1).int()[None]


def milliseconds(function: Callable[[], Any]) -> float:
    """Median of do_bench; of one run in the interpreter."""
    if launch.interpreted():
        return 1e3 * timeit.timeit(function, number=1)
    from triton.testing import do_bench

    return float(do_bench(function, warmup=15, rep=90, return_mode="median"))


BOTH: list[Settings] = [{"ordered": 0}, {"ordered": 1}]
MORE: list[Settings] = [
    *BOTH, {"ordered": 1, "ROWS": 32}, {"ordered": 1, "CHUNK": 1024}, {"ordered": 0, "ROWS": 32},
    {"ordered": 0, "PROGRAMS": 4},
]  # fmt: skip
# By piece, "sel backward" being the whole of it in both its forms: (shapes, variants of each).
VARIANTS: dict[str, list[tuple[tuple[str, ...], list[Settings]]]] = {
    "sel backward": [
        (("12/2/64", "32/8/128", "12/2/64 16k"), MORE),
        (("64/4/128",), [{"ordered": 1}]),
        (("12/2/64 8k", "12/2/64 2k", "64/4/128 8k", "32/8/128 8k"), BOTH),
    ],
    "cmp dkdv": [(("12/2/64", "32/8/128", "64/4/128"), [{}, {"TMA": 2, "EARLY": 1}, {"TMA": 1, "EARLY": 0}])],
    "win dkdv": [(
        ("64/4/128", "12/2/64"), [{}, {"TMA": 2, "EARLY": 1}, {"TMA": 2, "EARLY": 1, "BLOCK_M": 32, "num_stages": 3}]
    )],
    "win dq": [(
        ("64/4/128", "12/2/64"),
        [{}, {"BLOCK_N": 32, "num_stages": 3}, {"BLOCK_N": 32, "num_stages": 2}, {"HEADS": 1, "num_stages": 2}],
    )],
    "sel forward": [
        (("64/4/128",), [{}, {"TMA": 1}, {"TMA": 1, "num_stages": 2, "maxnreg": 0},
                         {"TMA": 1, "num_stages": 3, "KEYS": 32, "maxnreg": 0}]),
        (("12/2/64", "32/8/128"), [{}, {"bucket LEAN": 1}, {"TMA": 1, "bucket LEAN": 1}]),
    ],
    "select": [(("64/4/128",), [{}, {"POLY": 4}, {"POLY": 2}])],
}  # fmt: skip


def changes(piece: str, shape: str) -> list[Settings]:
    """The variants of ``piece`` at ``shape``; at a TINY one all of them, each once."""
    found: list[Settings] = []
    for shapes, tried in VARIANTS[piece]:
        if shape in TINY or shape in shapes:
            found += [change for change in tried if change not in found]
    return found


def jobs(pieces: list[str], shapes: list[str]) -> list[Job]:
    """All variants of ``pieces`` at ``shapes``, those of a piece, shape and kind together."""
    return [
        Job(shape, piece, kind, number)
        for piece in pieces
        for shape in shapes
        for kind in (("near", "random") if piece.startswith("sel ") else ("-",))
        for number in range(len(changes(piece, shape)))
    ]


def change(job: Job) -> Settings:
    """What ``job`` changes."""
    return changes(job.piece, job.shape)[job.number]
