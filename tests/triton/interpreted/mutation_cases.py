"""Tiny slot calls whose launches detect mutants: slots, sizes, options and tile settings."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Mapping
from unittest import mock

import torch
from torch import Tensor

from launches import InterpretedLaunch, apart, recorded
from mutation import reached
from nsa_backend_triton.combine import kernels as combine
from nsa_backend_triton.core import backward as core
from nsa_backend_triton.host import configs, document_starts
from nsa_backend_triton.host.sequences import Sequences
from nsa_backend_triton.sel import backward as sel_backward
from nsa_backend_triton.sel import pair_bits, pair_lists, runs
from nsa_backend_triton.sel import slot as sel
from nsa_backend_triton.select import forward as select
from nsa_backend_triton.span import cmp, win
from nsa_core.contract import SlotCall
from nsa_core.layout import BlockGeometry

TABLE = configs.table(0)  # the interpreter's
MODULES = {"cmp": cmp, "win": win, "combine": combine}
#                        l  d  l' n init local w
GEOMETRY = BlockGeometry(4, 2, 4, 5, 1, 2, 5)


@dataclasses.dataclass(frozen=True)
class Tiny:
    """One call of a slot, forward and backward.

    Several ``lengths`` are packed documents. ``tiles`` are settings by kernel that replace those of
    the interpreter's table.
    """

    slot: str
    lengths: tuple[int, ...]
    batch: int = 1
    heads: int = 2  # query heads per kv head
    groups: int = 1
    dk: int = 4
    dv: int = 3
    geometry: BlockGeometry = GEOMETRY
    scale: float = 0.7
    deterministic: bool = False
    dtype: torch.dtype = torch.float64
    ties: bool = False  # every compressed key except one is 0
    nan_key: int | None = None  # index of a compressed key of NaN; lse is finite
    adds: bool = False  # whether sel's dq is added to another gradient
    full: bool = False  # every token has a key: with one block per token no pair is left out
    sort: bool = False  # whether pairs are sorted as in long sequences
    run: int = 0  # rows whose partial outputs are computed at a time; 0: all
    bounds: tuple[int, ...] = ()  # cu_seqlens that differ from ``lengths``
    piece: tuple[int, int] | None = None  # first and end of the rows of q; None: all
    tiles: Mapping[str, Mapping[str, int]] = dataclasses.field(default_factory=dict, hash=False)

    @property
    def packed(self) -> bool:
        return len(self.lengths) > 1

    def call(self) -> SlotCall:
        bounds = self.bounds or [0, *itertools.accumulate(self.lengths)]
        cu = torch.tensor(bounds, dtype=torch.int32) if self.packed else None
        first = self.piece[0] if self.piece else 0
        longest = max(self.lengths)
        return SlotCall(self.geometry, self.scale, cu, longest, self.deterministic, first)

    def part(self, x: Tensor, axis: int = -3) -> Tensor:
        """Return the rows of ``x`` that belong to ``piece``."""
        first, end = self.piece or (0, x.shape[axis])
        return x.narrow(axis, first, end - first)

    def random(self, *shape: int) -> Tensor:
        """Return random [B, *shape], packed [*shape], with gaps between rows and heads."""
        lead = () if self.packed else (self.batch,)
        return apart(torch.randn(*lead, *shape, dtype=self.dtype))

    def calls(self) -> None:
        """Run forward and, if the slot has one, backward."""
        limit = 0 if self.sort else pair_bits.MAX_WORDS_PER_PAIR
        with mock.patch.multiple(pair_bits, MAX_WORDS_PER_PAIR=limit, COUNT_BLOCK=64):
            self._calls()

    def _calls(self) -> None:
        torch.manual_seed(len(self.slot) + sum(self.lengths))
        total, call = sum(self.lengths), self.call()
        q, do = (
            self.random(total, self.heads * self.groups, width) for width in (self.dk, self.dv)
        )
        if self.slot == "combine":
            inputs = [self.random(total, self.heads, width) for width in (3, *[self.dv] * 3)]
            combine.forward(*inputs, call=call)
            combine.backward(do[..., : self.heads, :], *inputs, call=call)
            return
        if self.slot == "core":
            self._core(q, do, call)
            return
        if self.slot == "lists":
            pair_lists.build(self._blocks(total), Sequences.of(q, q, call), self.geometry)
            return
        if self.slot == "starts":
            document_starts.compressed_starts(call.cu_seqlens, self.geometry, total)
            return
        rows = total
        if self.slot in ("cmp", "select"):
            rows = (
                self.geometry.max_compressed(total)
                if self.packed
                else self.geometry.num_compressed(total)
            )
        k, v = self.random(rows, self.groups, self.dk), self.random(rows, self.groups, self.dv)
        if self.slot == "select":
            self._select(q, k, v, call)
        elif self.slot == "sel":
            whole = q, do, self._blocks(total)
            q, do, blocks = (apart(self.part(x)) for x in whole)
            blocks[..., -1, :, :] = torch.arange(blocks.shape[-1])
            if not self.full:
                q[..., :2, :, :] = torch.nan  # queries of tokens without a key
                blocks[..., :2, :, :] = -1
            bytes_per_row = (
                8 * self.heads * self.groups * self.geometry.num_selected_blocks * self.dv
            )
            run_bytes = (self.run or total * self.batch) * bytes_per_row
            with mock.patch.multiple(runs, PARTIAL_BYTES=run_bytes, MAX_RUNS=total):
                o, lse = sel.forward(q, k, v, blocks, call=call)
            with mock.patch.object(sel_backward, "ROUND_BLOCK", 64):
                problem = sel_backward.prepare(do, q, k, v, apart(o), lse, call=call)
                dq = torch.randn(q.shape, dtype=q.dtype) if self.adds else None
                sel_backward.gradients(problem, blocks, dq=dq)
        else:
            module, q, do = MODULES[self.slot], self.part(q), self.part(do)
            o, lse = module.forward(q, k, v, call=call)
            module.backward(do, q, k, v, apart(o), lse, call=call)

    def _core(self, q: Tensor, do: Tensor, call: SlotCall) -> None:
        total, pairs = q.shape[-3], []
        count = self.geometry.max_compressed if self.packed else self.geometry.num_compressed
        for rows in (count(total), total, total):
            pairs.append([self.random(rows, self.groups, width) for width in (self.dk, self.dv)])
        o, lse = cmp.forward(q, *pairs[0], call=call)
        blocks = select.forward(q, pairs[0][0], lse, call=call)
        results = o, lse, *sel.forward(q, *pairs[1], blocks, call=call)
        results += win.forward(q, *pairs[2], call=call)
        gates = self.random(total, self.heads * self.groups, 3).abs()
        gates[..., 0, 1] = 0
        outputs, statistics = ([apart(x) for x in results[i::2]] for i in (0, 1))
        core.backward(
            do, q, *itertools.chain(*pairs), gates, blocks, *statistics, outputs=outputs, call=call
        )

    def _select(self, q: Tensor, k: Tensor, v: Tensor, call: SlotCall) -> None:
        # makes the last key decide the last token's selection
        k[..., -1, :, :] = 4 * q[..., -1, :: self.heads, :]
        if self.ties:
            k[..., torch.arange(k.shape[-3]) != 20, :, :] = 0
        _, lse = cmp.forward(q, k, v, call=dataclasses.replace(call, first_query=0))
        if self.nan_key is not None:
            k[..., self.nan_key, :, :] = torch.nan
        select.forward(self.part(q), k, self.part(lse, -1), call=call)

    def _blocks(self, total: int) -> Tensor:
        """Return blocks that are unsorted, repeated, negative, in the future or out of range."""
        draw, n = random.Random(total), self.geometry.num_selected_blocks
        last = max(self.lengths) // self.geometry.select_block_size + 1
        values = [
            draw.choice([-1, -3, 2**29, *range(last), *range(last)])
            for _ in range(total * self.groups * n)
        ]
        blocks = torch.tensor(values, dtype=torch.int32).view(-1, total, self.groups, n)
        if self.full:
            blocks[:] = 0
        else:
            blocks[..., :2, :, :] = -1  # tokens without a key
        blocks[..., -1, :, :] = torch.arange(n)  # the last token selects n blocks
        return apart(blocks[0] if self.packed else blocks.expand(self.batch, -1, -1, -1))


def _rows(
    tiles: Mapping[str, Mapping[str, int]],
) -> dict[str, list[tuple[dict[str, int], dict[str, int]]]]:
    """Return the interpreter's table with ``tiles`` in it."""
    return {
        kernel: [({}, {**rows[0][1], **tiles.get(kernel, {})})] for kernel, rows in TABLE.items()
    }


SPANS = ("span_forward", "span_dq", "span_dkdv")
SMALL = {"span_forward": {"BLOCK_M": 8, "BLOCK_N": 4}, "span_dkdv": {"BLOCK_M": 4, "BLOCK_N": 4}}
SMALL |= {"span_dq": SMALL["span_forward"]}
# tiles of one token with two heads
ONE_TOKEN = {**SMALL, "span_forward": {"BLOCK_M": 2, "BLOCK_N": 4}}
DESCRIBED = {kernel: {**tile, "USE_TMA": 1} for kernel, tile in SMALL.items()}
WIDE = dataclasses.replace(GEOMETRY, window_size=18)
MALFORMED = {
    bounds: Tiny("", (15, 5, 10), bounds=bounds, tiles=SMALL)
    for bounds in ((0, 9, 70, 30), (0, -20, 11, 30), (6, 11, 20, 30))
}

SPAN_CASES = {
    "cmp packed": Tiny("cmp", (2, 0, 37), tiles=SMALL),
    "cmp dense": Tiny("cmp", (19,), batch=2, heads=2, groups=2),
    "cmp l=d": Tiny("cmp", (31,), heads=3, geometry=BlockGeometry(3, 3, 6, 5), tiles=SMALL),
    "cmp l=2 d=1": Tiny("cmp", (4, 7), geometry=BlockGeometry(2, 1, 4, 5)),
    "cmp described": Tiny("cmp", (21,), batch=2, groups=2, dk=16, dv=32, tiles=DESCRIBED),
    "cmp in thirds": Tiny("cmp", (13,), groups=2, dk=33, dv=33, tiles=SMALL),
    "win described in thirds": Tiny(
        "win", (9,), batch=2, dk=48, dv=48, geometry=WIDE, tiles=DESCRIBED
    ),
    "cmp apart": Tiny(
        "cmp",
        (17,),
        groups=2,
        tiles={**SMALL, "span_dkdv": {"BLOCK_M": 4, "BLOCK_N": 4, "SEPARATE_DK_DV": 1}},
    ),
    "win apart": Tiny(
        "win",
        (9,),
        dk=16,
        dv=16,
        tiles={**DESCRIBED, "span_dkdv": {**DESCRIBED["span_dkdv"], "SEPARATE_DK_DV": 1}},
    ),
    "cmp far": Tiny("cmp", (23,), scale=-400.0, dv=16, tiles=SMALL),
    "cmp documents": Tiny("starts", (5,) * 2048),
    "win packed": Tiny("win", (2, 0, 37), tiles=SMALL, geometry=WIDE),
    "win dense": Tiny("win", (19,), batch=2, heads=3, groups=2),
    "win described": Tiny(
        "win", (29,), batch=2, groups=2, dk=32, dv=16, geometry=WIDE, tiles=DESCRIBED
    ),
    "win far": Tiny("win", (11,), scale=400.0, tiles=SMALL),
    "win fp32": Tiny("win", (9,), dtype=torch.float32, tiles=SMALL, geometry=WIDE),
    "win w=1": Tiny(
        "win", (9,), geometry=dataclasses.replace(GEOMETRY, window_size=1), tiles=SMALL
    ),
}
SPAN_CASES |= {
    "cmp piece": Tiny("cmp", (24,), batch=2, piece=(7, 20), tiles=SMALL),
    "cmp piece packed": Tiny("cmp", (3, 0, 22, 9), piece=(9, 27), tiles=ONE_TOKEN),
    "cmp piece at the start": Tiny("cmp", (5, 9), piece=(0, 8), tiles=SMALL),
    "win piece": Tiny("win", (23,), batch=2, piece=(9, 17), tiles=SMALL),
    "win piece described": Tiny(
        "win", (29,), batch=2, dk=32, dv=16, geometry=WIDE, tiles=DESCRIBED, piece=(6, 27)
    ),
    "win piece packed": Tiny("win", (3, 0, 22, 9), piece=(9, 27), tiles=SMALL),
}
SPAN_CASES |= {
    f"{s} piece {bounds}": dataclasses.replace(case, slot=s, piece=(8, 21))
    for s in ("cmp", "win")
    for bounds, case in MALFORMED.items()
}
SPAN_CASES |= {
    f"{s} {bounds}": dataclasses.replace(case, slot=s)
    for s in ("cmp", "win")
    for bounds, case in MALFORMED.items()
}

ODD = BlockGeometry(4, 1, 5, 3, 1, 1, 5)  # l' = 5: a key tile of 4 keys and one of 1 key
EVEN = BlockGeometry(4, 2, 4, 3)
# Tiles of 4 tokens at 2 heads a group; every block that not all of them selected goes to buckets.
BUCKETS = {
    "sel_forward": {"BLOCK_M": 8, "BLOCK_N": 4, "MIN_SHARING_TOKENS": 4, "SHARE_ALL_MAX_LEN": 0},
    "sel_bucket": {"BLOCK_M": 4, "TILES_PER_PROGRAM": 3},
    "sel_merge": {"BLOCK_M": 8},
    "sel_block_backward": {"BLOCK_N": 4, "BLOCK_M": 8, "SEGMENT_ROWS": 16, "CHUNK_PAIRS": 3},
    "sel_tile_backward": {"BLOCK_N": 4, "BLOCK_M": 8},
}
FIVE_SHARING = {
    **BUCKETS,
    "sel_forward": {"BLOCK_M": 16, "BLOCK_N": 4, "MIN_SHARING_TOKENS": 5, "SHARE_ALL_MAX_LEN": 0},
    "sel_bucket": {"BLOCK_M": 8, "TILES_PER_PROGRAM": 1},
}
FIVE_SHARING["sel_block_backward"] = {"BLOCK_N": 4, "BLOCK_M": 8, "CHUNK_PAIRS": 3}
SHARE_ALL = {**BUCKETS, "sel_forward": {"BLOCK_M": 8, "BLOCK_N": 4, "MIN_SHARING_TOKENS": 1}}
TILES_OF_32 = {"sel_forward": {"BLOCK_M": 32, "MIN_SHARING_TOKENS": 12, "SHARE_ALL_MAX_LEN": 0}}
QUERY_MAJOR = {
    **SHARE_ALL,
    "sel_block_backward": {"QUERY_MAJOR": 1, "BLOCK_N": 4, "BLOCK_M": 4, "SEGMENT_ROWS": 16},
}
TWO_ROWS = {**SHARE_ALL, "sel_block_backward": {"BLOCK_N": 4, "BLOCK_M": 2, "SEGMENT_ROWS": 16}}
WHOLE_BLOCK_TMA = {**QUERY_MAJOR, "sel_tile_backward": {"USE_TMA": 1, "BLOCK_N": 16, "BLOCK_M": 8}}
WHOLE_BLOCK_TMA["sel_forward"] = {**SHARE_ALL["sel_forward"], "USE_TMA": 1, "BLOCK_N": 16}
HALF_BLOCK_TMA = {**QUERY_MAJOR, "sel_tile_backward": {"USE_TMA": 1, "BLOCK_N": 8, "BLOCK_M": 8}}
HALF_BLOCK_TMA["sel_forward"] = {**SHARE_ALL["sel_forward"], "USE_TMA": 1, "BLOCK_N": 8}
# Buckets of more pairs than a block has tokens, in several programs.
LONG_BUCKETS = {
    **BUCKETS,
    "sel_forward": {"BLOCK_M": 8, "BLOCK_N": 4, "MIN_SHARING_TOKENS": 8, "SHARE_ALL_MAX_LEN": 0},
}
LONG_BUCKETS["sel_bucket"] = {"BLOCK_M": 2, "TILES_PER_PROGRAM": 5}
BLOCK_OF_16 = BlockGeometry(4, 2, 16, 4)
SEL_CASES = {
    "sel TMA": Tiny(
        "sel",
        (38,),
        batch=2,
        groups=2,
        dk=16,
        dv=32,
        geometry=BLOCK_OF_16,
        tiles=WHOLE_BLOCK_TMA,
        deterministic=True,
    ),
    "sel in thirds": Tiny("sel", (11,), heads=3, dk=33, dv=33, geometry=ODD, tiles=FIVE_SHARING),
    "sel query-major in thirds": Tiny("sel", (11,), dk=48, dv=33, geometry=EVEN, tiles=QUERY_MAJOR),
    "sel ordered in thirds": Tiny(
        "sel", (9,), dk=33, dv=33, geometry=EVEN, tiles=SHARE_ALL, deterministic=True
    ),
    "sel packed": Tiny("sel", (2, 0, 19), run=9, geometry=ODD, tiles=BUCKETS),
    "sel dense": Tiny("sel", (11,), batch=2, heads=3, groups=2, geometry=ODD, tiles=FIVE_SHARING),
    "sel TMA of half blocks": Tiny(
        "sel",
        (70,),
        heads=1,
        dk=16,
        dv=16,
        geometry=BLOCK_OF_16,
        tiles=HALF_BLOCK_TMA,
        deterministic=True,
    ),
    "sel unmasked": Tiny("sel", (19,), heads=3, tiles=FIVE_SHARING, deterministic=True),
    "sel two rows a tile": Tiny("sel", (14,), heads=3, geometry=EVEN, tiles=TWO_ROWS),
    "sel two tiles a program": Tiny(
        "sel",
        (16,),
        heads=3,
        geometry=ODD,
        tiles={**FIVE_SHARING, "sel_bucket": {"BLOCK_M": 8, "TILES_PER_PROGRAM": 2}},
    ),
    "sel ordered": Tiny(
        "sel",
        (9,),
        batch=2,
        heads=3,
        groups=2,
        geometry=ODD,
        tiles=FIVE_SHARING,
        deterministic=True,
    ),
    "sel ordered packed": Tiny(
        "sel", (2, 0, 26), geometry=ODD, tiles=SHARE_ALL, deterministic=True
    ),
    "sel query-major": Tiny(
        "sel", (18,), scale=-300.0, dk=5, dv=16, geometry=EVEN, tiles=QUERY_MAJOR
    ),
    "sel runs of rows": Tiny("sel", (7,), batch=2, run=5, geometry=ODD, tiles=BUCKETS),
    "sel 32 tokens": Tiny(
        "sel", (37,), heads=1, geometry=BlockGeometry(4, 2, 16, 2, 0, 1, 5), tiles=TILES_OF_32
    ),
    "sel one token a tile": Tiny(
        "sel", (16,), heads=8, scale=300.0, geometry=EVEN, tiles=SHARE_ALL, deterministic=True
    ),
    "sel one block": Tiny(
        "sel", (3,), heads=8, geometry=BlockGeometry(4, 2, 4, 1, 0, 1), tiles=SHARE_ALL
    ),
    "sel full": Tiny(
        "sel", (3,), geometry=BlockGeometry(4, 2, 4, 1, 0, 1), tiles=BUCKETS, full=True
    ),
    "sel long lists": Tiny("lists", (350,), geometry=EVEN),
    "sel dv=256": Tiny("sel", (6,), heads=7, dv=256, geometry=EVEN),
    "sel long buckets": Tiny(
        "sel", (30,), heads=1, dv=16, scale=400.0, geometry=BLOCK_OF_16, tiles=LONG_BUCKETS
    ),
    "sel document of one token": Tiny("sel", (3, 1), scale=-0.7, geometry=ODD, tiles=BUCKETS),
    "sel large scale": Tiny("sel", (13,), scale=400.0, geometry=ODD, tiles=SHARE_ALL),
    "sel malformed": Tiny(
        "sel", (10, 2, 6), bounds=(0, -20, 7, 18), deterministic=True, geometry=ODD, tiles=BUCKETS
    ),
}
PARTIAL_CASES = {
    "sel partial": Tiny(
        "sel",
        (19,),
        batch=2,
        heads=3,
        groups=2,
        piece=(7, 16),
        geometry=ODD,
        tiles={**FIVE_SHARING, "sel_block_backward": BUCKETS["sel_block_backward"]},
    ),
    "sel partial packed": Tiny(
        "sel", (2, 0, 13, 4), run=6, piece=(6, 16), geometry=ODD, tiles=BUCKETS
    ),
    "sel partial ordered": Tiny(
        "sel",
        (11,),
        batch=2,
        piece=(3, 9),
        geometry=ODD,
        tiles=SHARE_ALL,
        deterministic=True,
    ),
    "sel partial ordered packed": Tiny(
        "sel", (4, 0, 9), piece=(2, 11), geometry=ODD, tiles=SHARE_ALL, deterministic=True
    ),
    "sel partial malformed": Tiny(
        "sel", (4, 0, 9, 5), bounds=(0, 9, -2, 4, 30), piece=(2, 16), geometry=ODD, tiles=BUCKETS
    ),
}
SEL_CASES |= PARTIAL_CASES
SEL_CASES["sel added"] = dataclasses.replace(SEL_CASES["sel dense"], adds=True)
# Long sequences sort their pairs.
SORTED = ("sel packed", "sel dense", "sel runs of rows", "sel malformed", "sel partial packed")
SORTED += ("sel full", "sel long lists", "sel partial", "sel document of one token")
SEL_CASES |= {f"{name}, sorted": dataclasses.replace(SEL_CASES[name], sort=True) for name in SORTED}
COMBINE_CASES = {
    "combine dense": Tiny("combine", (9,), batch=2),
    "combine packed": Tiny("combine", (2, 0, 7)),
    "core": Tiny("core", (13,), batch=2, heads=3, groups=2, dk=33, tiles=SMALL),
    "core packed": Tiny("core", (2, 0, 11), heads=3, dv=5, tiles=SMALL),
    "core short": Tiny("core", (4,), heads=1),
    "core described": Tiny("core", (11,), heads=2, dk=16, dv=16, tiles=DESCRIBED),
}


def launches_of(cases: Mapping[str, Tiny]) -> list[InterpretedLaunch]:
    """Return every distinct launch of ``cases``, those of fewest operations first.

    The order does not depend on how busy the machine is.
    """
    launches: list[InterpretedLaunch] = []
    for label, case in cases.items():
        with (
            mock.patch.object(configs, "table", lambda _, tiles=case.tiles: _rows(tiles)),
            recorded(label, launches),
        ):
            case.calls()
    distinct = {launch.identity(): launch for launch in launches}
    for launch in launches:
        launch.ran = reached(launch.ran)
    return sorted(distinct.values(), key=lambda launch: launch.operations)
