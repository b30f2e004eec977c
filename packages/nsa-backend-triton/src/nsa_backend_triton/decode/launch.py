"""Host side of the decode kernels: tiles, splits, scratch and launch arguments.

The number of splits depends on the batch and on max_len, which the host has; the kernels read the
lengths on the device. So a CUDA graph of a step can replay with other values in the same tensors.
The number of splits decides the bits of the results.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nsa_backend_triton.decode.choose import decode_choose
from nsa_backend_triton.decode.codes import has_page_scales, scales_of
from nsa_backend_triton.decode.sel import decode_sel
from nsa_backend_triton.decode.span import decode_span
from nsa_backend_triton.decode.step import decode_step
from nsa_backend_triton.host import configs
from nsa_backend_triton.host.constexprs import accumulator, value_band
from nsa_backend_triton.host.device import architecture, multiprocessors
from nsa_backend_triton.host.launch_cache import Launch
from nsa_backend_triton.shared.rows import LOG2E
from nsa_core.contract import DecodeCall
from nsa_core.dtypes import as_bytes

_SHORT_BLOCKS = 256
# Upper limits of these settings if a sequence has at most _SHORT_BLOCKS selection blocks.
_SHORT_LIMITS = {"RANK_BLOCKS": _SHORT_BLOCKS, "RANK_PAIRS": 4 * _SHORT_BLOCKS}
# With more warps, several would hold parts of one sum over heads; no such binary has run on a GPU.
_SELECTION_WARPS = 4
_MAX_STATIC_PAGE = 4096  # rows; a power of two up to this is a constexpr of the kernel

Pair = tuple[Tensor, Tensor]


# Plain integers: Triton's cdiv and next_power_of_2 take 10 us per call on the host.
def cdiv(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


def power(n: int) -> int:
    """Return the least power of two that is >= n >= 1."""
    return 1 << (n - 1).bit_length()


def _padded(width: int) -> int:
    return max(16, power(width))


def _band(width: int, call: DecodeCall) -> int:
    """Return the band of a row of K, of which half must fit a product if it is of codes."""
    return max(_padded(width), 16 if call.scales is None else 32)


def _value_band(q: Tensor, v_head_dim: int, call: DecodeCall) -> int:
    """Return the band of V beside that of ``q``; a decode kernel has no TMA."""
    bands = _band(q.shape[3], call), _band(v_head_dim, call)
    return value_band(*bands, architecture(q.device), use_tma=False)


def _num_splits(
    units: int,
    tiles: int,
    settings: configs.Settings,
    device: torch.device,
    setting: str = "PROGRAMS_PER_SM",
) -> int:
    """Return how many programs share the ``tiles`` of each unit.

    All units together get ``settings[setting]`` programs per multiprocessor, or fewer if a split
    would have less than MIN_TILES_PER_SPLIT tiles.
    """
    programs = settings[setting] * multiprocessors(device) // max(1, units)
    return max(1, min(programs, tiles // settings["MIN_TILES_PER_SPLIT"]))


Slices = tuple[tuple[int, ...], tuple[int, ...]]


def aligned_slices(floats: list[int], ints: list[int]) -> Slices:
    """Round the sizes of scratch up, so that every slice is aligned."""
    float_sizes, int_sizes = (tuple(-(-n // 64) * 64 for n in sizes) for sizes in (floats, ints))
    return float_sizes, int_sizes


def allocate(
    q: Tensor, slices: Slices, zero: bool
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Allocate scratch of these sizes: fp32 (fp64 for fp64 q), and int32; ``zero``: int32 is 0."""
    float_sizes, int_sizes = slices
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    floats = torch.empty(sum(float_sizes), dtype=dtype, device=q.device)
    new = torch.zeros if zero else torch.empty
    ints = new(sum(int_sizes), dtype=torch.int32, device=q.device)
    # Without the record of views that autograd needs, a split takes half the time.
    split = torch.unsafe_split_with_sizes
    return split(floats, float_sizes), split(ints, int_sizes)


def _with_strides(x: Tensor | None, placeholder: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return a store [P, rows, G, D] and its strides (page, row, head)."""
    return (placeholder, (0, 0, 0)) if x is None else (as_bytes(x), x.stride()[:3])


def sequences_of(call: DecodeCall) -> Tensor:
    """Return the sequences of the runs; a placeholder if run b has row b of the tables."""
    return call.starts if call.sequences is None else call.sequences


def _static_page_size(rows: int) -> int:
    """Return ``rows`` if kernels take it as a constexpr, otherwise 0."""
    return rows if rows & (rows - 1) == 0 and rows <= _MAX_STATIC_PAGE else 0


class SpanLaunch:
    """One launch of decode_span over ``num_tokens`` tokens of a step, and one of decode_choose.

    ``cmp`` and ``win`` are the stores of the branches to run. Settings of the tuned table:

    BLOCK_N              keys of a tile
    BLOCK_M              query rows of a program
    PROGRAMS_PER_SM      programs of the compressed tokens per multiprocessor
    WIN_PROGRAMS_PER_SM  programs of the window per multiprocessor
    MIN_TILES_PER_SPLIT  least tiles of a split
    FUSE_STEP            1: a step of one token is one launch
    RANK_BLOCKS          blocks that the selection ranks in one pass
    RANK_PAIRS           pairs of sums that it loads at once
    maxnreg              registers per thread of the fused step

    A tile holds whole blocks: if l'/d exceeds BLOCK_N, the tile grows to l'/d keys, and its loads
    are not pipelined.
    """

    def __init__(
        self,
        q: Tensor,
        num_tokens: int,
        cmp: Pair | None,
        win: Pair | None,
        call: DecodeCall,
        attend: bool,
        choose: bool,
        settings: configs.Settings | None = None,
    ) -> None:
        self.call, self.cmp, self.win, self.num_tokens = call, cmp, win, num_tokens
        self.attend, self.choose = attend, choose
        k, v = cmp or win  # type: ignore[misc]  # at least one branch is given
        self.batch, self.heads, self.head_dim = q.shape[0], q.shape[2], q.shape[3]
        self.kv_heads, self.v_head_dim, geometry = k.shape[2], v.shape[3], call.geometry
        group = self.heads // self.kv_heads
        self.cmp_per_block_pad = configs.cmp_per_block_pad(geometry)
        traits = {
            "head_dim": self.head_dim,
            "v_head_dim": self.v_head_dim,
            "itemsize": q.itemsize,
            "heads": group,
            "cmp_per_block": self.cmp_per_block_pad,
        }
        self.settings = settings or configs.pick("decode_span", architecture(q.device), **traits)
        self.block_n = max(self.settings["BLOCK_N"], self.cmp_per_block_pad)
        max_tokens = max(1, self.settings["BLOCK_M"] // group)
        self.block_t = min(power(num_tokens), 1 << (max_tokens.bit_length() - 1))
        self.fuse = self.block_t == 1 and bool(self.settings["FUSE_STEP"])
        self.max_len = call.max_len
        if cmp is not None:
            # The longest sequence whose compressed tokens the table has room for.
            room = call.tables.cmp.shape[1] * k.shape[1] * geometry.compress_stride
            self.max_len = min(call.max_len, room + geometry.compress_block_size - 1)
        units = self.batch * cdiv(num_tokens, self.block_t) * self.kv_heads
        blocks_per_tile = self.block_n // self.cmp_per_block_pad
        tiles = cdiv(
            geometry.num_compressed(self.max_len) * geometry.compress_stride,
            blocks_per_tile * geometry.select_block_size,
        )
        window = min(geometry.window_size, self.max_len) + self.block_t - 1
        self.splits = _num_splits(units, tiles, self.settings, q.device)
        self.win_splits = _num_splits(
            units, cdiv(window, self.block_n), self.settings, q.device, "WIN_PROGRAMS_PER_SM"
        )
        self.cmp_programs = units * self.splits if cmp is not None else 0
        self.programs = self.cmp_programs + (units * self.win_splits if win is not None else 0)
        self.block_m = _padded(self.block_t * group)
        self.v_head_dim_band = _value_band(q, self.v_head_dim, call)
        # Short caches have a binary of their own.
        short = geometry.num_select_blocks(self.max_len) <= _SHORT_BLOCKS
        rank = {
            name: min(self.settings[name], limit) if short else self.settings[name]
            for name, limit in _SHORT_LIMITS.items()
        }
        self.rank_blocks = max(blocks_per_tile, rank["RANK_BLOCKS"])
        self.block_h = min(power(group), max(1, rank["RANK_PAIRS"] // self.rank_blocks))
        self.stride_sums = cdiv(tiles * blocks_per_tile * 2, 16) * 16
        self.stride_maxima = cdiv(tiles, 16) * 16

    @property
    def split(self) -> bool:
        """Whether the launch needs counters."""
        splits = self.splits * bool(self.cmp), self.win_splits * bool(self.win)
        return self.attend and max(splits) > 1

    def sizes(self) -> tuple[list[int], list[int]]:
        """Return the sizes of scratch: (SPLIT_ML, SPLIT_ACC, SUMS, MAXIMA), (COUNTERS)."""
        split_rows = self.programs * self.block_m if self.split else 0
        head_rows = self.batch * self.num_tokens * self.heads if self.choose else 0
        floats = [
            2 * split_rows,
            split_rows * self.v_head_dim_band,
            head_rows * self.stride_sums,
            head_rows * self.stride_maxima,
        ]
        return floats, [self.programs if self.split else 0]

    def launch(
        self,
        q: Tensor,
        first_token: int,
        outputs: tuple[Tensor, ...],
        blocks: Tensor | None,
        scratch: Sequence[Tensor],
        counters: Sequence[Tensor],
    ) -> None:
        """Run on ``q`` [B, num_tokens, Hq, Dk], from token ``first_token`` of the step on.

        ``outputs`` are (o, o_win, lse, lse_win). Writes ``blocks`` too if they are given.
        """
        call, geometry, (o, o_win, lse, lse_win) = self.call, self.call.geometry, outputs
        tables, (scales, _, win_scales) = call.tables, scales_of(call)
        split_ml, split_acc, sums, maxima = scratch
        k, stride_k = _with_strides(self.cmp and self.cmp[0], q)
        v, stride_v = _with_strides(self.cmp and self.cmp[1], q)
        k_win, stride_k_win = _with_strides(self.win and self.win[0], q)
        v_win, stride_v_win = _with_strides(self.win and self.win[1], q)
        decode_span[(self.programs,)](
            q, k, v, k_win, v_win, o, o_win, lse, lse_win, sums, maxima, split_ml, split_acc,
            *counters, call.starts, call.lengths, sequences_of(call), tables.cmp, tables.win,
            scales, win_scales,
            q.stride()[:3], stride_k, stride_v, stride_k_win, stride_v_win, o.stride()[:2],
            lse.stride(0), lse.stride(1), self.stride_sums, self.stride_maxima,
            tables.cmp.stride(0), tables.win.stride(0), scales.stride(0), win_scales.stride(0),
            call.scale * LOG2E.value, first_token, self.num_tokens, self.max_len,
            len(tables.cmp if self.cmp else tables.win), k.shape[1], len(k), k_win.shape[1],
            tables.win.shape[1], len(k_win), self.splits, self.win_splits, self.cmp_programs,
            HAS_CMP=self.cmp is not None, HAS_WIN=self.win is not None,
            RAGGED=call.sequences is not None, RING=tables.win.shape[1] == 1,
            PAGE_SIZE=_static_page_size(k.shape[1]), PAGE_SCALES=has_page_scales(call),
            BLOCK_T=self.block_t,
            ATTEND=self.attend, STORE_SUMS=self.choose, **self.walk_constants(q),
            **self.options(("num_warps", "num_stages")),
        )  # fmt: skip
        if blocks is not None:
            decode_choose[(self.batch * self.num_tokens * self.kv_heads,)](
                sums, maxima, lse, blocks, call.starts, call.lengths,
                self.stride_sums, self.stride_maxima, lse.stride(0), lse.stride(1),
                blocks.stride(0), first_token, self.num_tokens, self.max_len,
                NUM_KV_HEADS=self.kv_heads, GROUP=self.heads // self.kv_heads,
                COMPRESS_BLOCK=geometry.compress_block_size, STRIDE=geometry.compress_stride,
                SELECT_BLOCK=geometry.select_block_size, ACC=accumulator(q.dtype),
                RANK_BLOCKS=self.rank_blocks,
                BLOCKS_PER_TILE=self.block_n // self.cmp_per_block_pad,
                **self.selection_constants(), num_warps=_SELECTION_WARPS,
            )  # fmt: skip

    def options(self, names: tuple[str, ...]) -> dict[str, int]:
        """Return the launch options among ``names`` that the table sets."""
        options = self.settings
        if self.block_n != options["BLOCK_N"]:
            options = {**options, "num_stages": 2}
        return {name: options[name] for name in names if options.get(name)}

    def walk_constants(self, q: Tensor) -> dict[str, object]:
        """Return the constexprs that a walk over either branch takes."""
        geometry = self.call.geometry
        return {
            "NUM_KV_HEADS": self.kv_heads,
            "GROUP": self.heads // self.kv_heads,
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "HEAD_DIM": self.head_dim,
            "V_HEAD_DIM": self.v_head_dim,
            "HEAD_DIM_BAND": _band(self.head_dim, self.call),
            "V_HEAD_DIM_BAND": self.v_head_dim_band,
            "CMP_PER_BLOCK_PAD": self.cmp_per_block_pad,
            "COMPRESS_BLOCK": geometry.compress_block_size,
            "STRIDE": geometry.compress_stride,
            "WINDOW": geometry.window_size,
            "SELECT_BLOCK": geometry.select_block_size,
            "ACC": accumulator(q.dtype),
        }

    def selection_constants(self) -> dict[str, int]:
        """Return the constexprs that the selection takes."""
        geometry = self.call.geometry
        return {
            "NUM_SELECTED": geometry.num_selected_blocks,
            "NUM_SELECTED_PAD": _padded(geometry.num_selected_blocks),
            "INIT_BLOCKS": geometry.init_blocks,
            "LOCAL_BLOCKS": geometry.local_blocks,
            "BLOCK_H": self.block_h,
            "NUM_HEAD_TILES": cdiv(self.heads // self.kv_heads, self.block_h),
        }


class SelLaunch:
    """One launch of decode_sel over ``num_tokens`` tokens of a step.

    Settings of the tuned table: BLOCK_N, PROGRAMS_PER_SM and MIN_TILES_PER_SPLIT, as in
    :class:`SpanLaunch`. ``block_n`` replaces the table's BLOCK_N.
    """

    def __init__(
        self,
        q: Tensor,
        num_tokens: int,
        k: Tensor,
        v: Tensor,
        call: DecodeCall,
        settings: configs.Settings | None = None,
        block_n: int | None = None,
    ) -> None:
        self.call, self.k, self.v, self.num_tokens = call, k, v, num_tokens
        geometry, self.kv_heads, self.group = call.geometry, k.shape[2], q.shape[2] // k.shape[2]
        traits = {
            "head_dim": q.shape[3],
            "v_head_dim": v.shape[3],
            "itemsize": q.itemsize,
            "heads": self.group,
        }
        self.settings = settings or configs.pick("decode_sel", architecture(q.device), **traits)
        self.block_n = block_n or self.settings["BLOCK_N"]
        units = q.shape[0] * num_tokens * self.kv_heads
        tiles = cdiv(geometry.num_selected_blocks * geometry.select_block_size, self.block_n)
        self.splits = _num_splits(units, tiles, self.settings, q.device)
        self.programs, self.block_m = units * self.splits, _padded(self.group)
        self.v_head_dim_band = _value_band(q, v.shape[3], call)
        self.max_len = min(call.max_len, call.tables.sel.shape[1] * k.shape[1])

    @property
    def split(self) -> bool:
        """Whether the launch needs counters."""
        return self.splits > 1

    def sizes(self) -> tuple[list[int], list[int]]:
        """Return the sizes of scratch: (SPLIT_ML, SPLIT_ACC), (COUNTERS)."""
        programs = self.programs if self.split else 0
        rows = programs * self.block_m
        return [2 * rows, rows * self.v_head_dim_band], [programs]

    def launch(
        self,
        q: Tensor,
        first_token: int,
        blocks: Tensor,
        o: Tensor,
        lse: Tensor,
        scratch: Sequence[Tensor],
        counters: Sequence[Tensor],
        gates: Tensor | None = None,
        other_branches: Pair | None = None,
        *,
        distinct: bool = True,
    ) -> None:
        """Run on ``q`` [B, num_tokens, Hq, Dk], from token ``first_token`` of the step on.

        With ``gates``, o is the gated sum with ``other_branches``: o_cmp and o_win
        [B, num_tokens, Hq, Dv] in fp32. ``distinct``: the blocks are ascending and distinct.
        """
        call, k, v, n = self.call, self.k, self.v, self.call.geometry.num_selected_blocks
        o_cmp, o_win = other_branches or (o, o)
        gates_or_lse, scales = lse if gates is None else gates, scales_of(call)[1]
        decode_sel[(self.programs,)](
            q, gates_or_lse, as_bytes(k), as_bytes(v), blocks, o_cmp, o_win, o, lse,
            *scratch, *counters,
            call.starts, call.lengths, sequences_of(call), call.tables.sel, scales,
            q.stride()[:3], gates_or_lse.stride()[:3],
            k.stride(0), k.stride()[1:3], v.stride(0), v.stride()[1:3],
            scales.stride(0), blocks.stride()[:3], o.stride()[:2], lse.stride(0), lse.stride(1),
            call.tables.sel.stride(0),
            call.scale * LOG2E.value, first_token, self.num_tokens, self.max_len,
            len(call.tables.sel), k.shape[1], len(k), self.splits,
            PAGE_SIZE=_static_page_size(k.shape[1]), PAGE_SCALES=has_page_scales(call),
            NUM_KV_HEADS=self.kv_heads, GROUP=self.group,
            BLOCK_M=self.block_m, BLOCK_N=self.block_n, HEAD_DIM=q.shape[3], V_HEAD_DIM=v.shape[3],
            HEAD_DIM_BAND=_band(q.shape[3], call), V_HEAD_DIM_BAND=self.v_head_dim_band,
            SELECT_BLOCK=call.geometry.select_block_size,
            NUM_SELECTED=n, NUM_SELECTED_PAD=_padded(n), DISTINCT=distinct,
            GATED=gates is not None, RAGGED=call.sequences is not None, ACC=accumulator(q.dtype),
            **configs.launch_options(self.settings),
        )  # fmt: skip


class StepLaunch:
    """One launch of decode_step, which does the work of ``span``, the selection and ``sel``.

    ``sel`` must have the BLOCK_N of ``span``.
    """

    def __init__(self, span: SpanLaunch, sel: SelLaunch) -> None:
        self.span, self.sel = span, sel
        self.programs = span.programs + sel.programs

    def sizes(self) -> tuple[list[int], list[int]]:
        """Return the sizes of scratch.

        (SPLIT_ML, SPLIT_ACC, SUMS, MAXIMA), (COUNTERS, READY, TICKET).
        """
        span = self.span
        rows = self.programs * span.block_m if span.split or self.sel.split else 0
        flags = span.batch * span.num_tokens * span.kv_heads * 2
        floats = [2 * rows, rows * span.v_head_dim_band, *span.sizes()[0][2:]]
        return floats, [self.programs, flags, 1]

    def launch(self, q: Tensor, gates: Tensor, first_token: int, step_tokens: int) -> Launch:
        """Prepare the launch for ``q`` [B, span.num_tokens, Hq, Dk] of a step.

        ``q`` begins at token ``first_token`` of the ``step_tokens`` tokens of the step. The outputs
        of the step are contiguous. Call the launch with q, gates, k and v of cmp, sel and win; o,
        o_cmp, o_win, lse and lse_win (all but o in scratch, of these tokens alone); sums, maxima,
        split_ml, split_acc, the zeroed int32 scratch, blocks, starts, lengths, sequences, and the
        tables and the scales of cmp, sel and win.
        """
        span, sel, call = self.span, self.sel, self.span.call
        assert span.cmp is not None  # a step runs both branches
        assert span.win is not None
        stores = (*span.cmp, sel.k, sel.v, *span.win)
        heads, n = span.heads, call.geometry.num_selected_blocks
        width = heads * span.v_head_dim
        return Launch(
            decode_step, (self.programs,),
            *(x.stride()[:3] for x in (q, gates, *stores)),
            (step_tokens * span.kv_heads * n, span.kv_heads * n, n), (step_tokens * width, width),
            (span.num_tokens * width, width), heads * span.num_tokens, span.num_tokens,
            span.stride_sums, span.stride_maxima,
            *(x.stride(0) for x in (*call.tables[:3], *scales_of(call))),
            call.scale * LOG2E.value, first_token, span.num_tokens, min(span.max_len, sel.max_len),
            len(call.tables.sel), *stores[0].shape[1::-1], *sel.k.shape[1::-1],
            stores[4].shape[1], call.tables.win.shape[1], len(stores[4]),
            span.splits, span.win_splits, sel.splits,
            span.cmp_programs, span.programs - span.cmp_programs,
            RAGGED=call.sequences is not None, RING=call.tables.win.shape[1] == 1,
            CMP_PAGE_SIZE=_static_page_size(stores[0].shape[1]),
            PAGE_SIZE=_static_page_size(sel.k.shape[1]), PAGE_SCALES=has_page_scales(call),
            RANK_BLOCKS=span.rank_blocks,
            **span.walk_constants(q), **span.selection_constants(),
            **span.options(("num_warps", "num_stages", "maxnreg")),
        )  # fmt: skip
