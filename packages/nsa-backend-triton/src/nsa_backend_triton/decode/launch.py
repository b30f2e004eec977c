"""Host side of the decode kernels: what a launch is cut into, its scratch, its arguments.

How often keys are split depends on the batch and on max_len, numbers that the host has; lengths are
read on the device. So a step replays from a CUDA graph with other numbers in the same tensors. Bits
depend on the number of splits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nsa_backend_triton.decode.choose import decode_choose
from nsa_backend_triton.decode.sel import decode_sel
from nsa_backend_triton.decode.span import decode_span
from nsa_backend_triton.decode.step import decode_step
from nsa_backend_triton.host import configs
from nsa_backend_triton.host.launch_cache import Launch
from nsa_backend_triton.host.sequences import accumulator, architecture, multiprocessors
from nsa_backend_triton.shared.rows import LOG2E
from nsa_backend_triton.span.forward import launch_options
from nsa_core.contract import DecodeCall

_FEW_BLOCKS = 256
# a choice among so few takes no more of these settings
_MOST_OF_FEW = {
    "BLOCKS": _FEW_BLOCKS,
    "SUMS": 4 * _FEW_BLOCKS,
}
# of more, several would hold parts of one sum over heads: no such binary has run on a GPU
_CHOICE_WARPS = 4
_STATIC_PAGE = 4096  # rows: pages of a power of two up to this are a constant of the binary

Pair = tuple[Tensor, Tensor]


# Plain integers: triton's own cdiv and next_power_of_2 take 10 us a call on the host.
def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def power(n: int) -> int:
    """The least power of two that is >= n >= 1."""
    return 1 << (n - 1).bit_length()


def _padded(width: int) -> int:
    return max(16, power(width))


def _splits(
    units: int, tiles: int, chosen: configs.Settings, device: torch.device, name: str = "PROGRAMS"
) -> int:
    """How many programs share the ``tiles`` of each of ``units``: together ``name`` a
    multiprocessor, or fewer.
    """
    wanted = chosen[name] * multiprocessors(device) // max(1, units)
    return max(1, min(wanted, tiles // chosen["LEAST"]))


Slices = tuple[tuple[int, ...], tuple[int, ...]]


def aligned_slices(floats: list[int], ints: list[int]) -> Slices:
    """Sizes of scratch, rounded so that every slice is aligned."""
    first, second = (tuple(-(-size // 64) * 64 for size in sizes) for sizes in (floats, ints))
    return first, second


def allocate(
    q: Tensor, slices: Slices, zero: bool
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Scratch in these slices: fp32 (fp64 for fp64 q), and int32, 0 where a launch splits."""
    floats, ints = slices
    stats = torch.float64 if q.dtype == torch.float64 else torch.float32
    first = torch.empty(sum(floats), dtype=stats, device=q.device)
    make = torch.zeros if zero else torch.empty
    second = make(sum(ints), dtype=torch.int32, device=q.device)
    return torch.split_with_sizes(first, floats), torch.split_with_sizes(second, ints)


def _store(x: Tensor | None, like: Tensor) -> tuple[Tensor, int, int, int]:
    """A store [P, rows, G, D] and its strides (page, row, head)."""
    return (like, 0, 0, 0) if x is None else (x, x.stride(0), x.stride(1), x.stride(2))


def _page(rows: int) -> int:
    """``rows`` where kernels have it as a constant, else 0."""
    return rows if rows & (rows - 1) == 0 and rows <= _STATIC_PAGE else 0


class Span:
    """One launch of decode_span over ``rows`` tokens of a step: the branches given; the choice in a
    launch of its own.

    The table's KEYS, ROWS (queries a program), PROGRAMS (of the compressed tokens, a
    multiprocessor), RING (of the window), LEAST (tiles a split), MERGE (1: a step of one token is
    one launch), BLOCKS (that a choice ranks at once), SUMS (pairs of numbers that it reads at
    once), maxnreg (registers a thread where all is one launch), PDL (1, from sm_90 on: of several
    launches each begins before the one in front has ended). A tile holds whole blocks: KEYS grow to
    l'/d where that is more, and are then not fetched ahead.
    """

    def __init__(
        self, q: Tensor, rows: int, cmp: Pair | None, win: Pair | None, call: DecodeCall,
        attend: bool, choose: bool,
        chosen: configs.Settings | None = None,
    ) -> None:  # fmt: skip
        self.call, self.cmp, self.win, self.attend, self.choose, self.rows = (
            call,
            cmp,
            win,
            attend,
            choose,
            rows,
        )
        k, v = cmp or win  # type: ignore[misc]  # one of them is given
        self.batch, self.heads, self.dk = q.shape[0], q.shape[2], q.shape[3]
        self.groups, self.dv, geometry = k.shape[2], v.shape[3], call.geometry
        group = self.heads // self.groups
        self.taps = configs.taps(geometry)
        traits = {
            "head_dim": self.dk,
            "v_head_dim": self.dv,
            "itemsize": q.itemsize,
            "heads": group,
            "taps": self.taps,
        }
        self.chosen = chosen or configs.pick("decode_span", architecture(q.device), **traits)
        self.keys = max(self.chosen["KEYS"], self.taps)
        most = max(1, self.chosen["ROWS"] // group)
        self.tokens = min(power(rows), 1 << (most.bit_length() - 1))
        self.merge = self.tokens == 1 and bool(self.chosen["MERGE"])
        self.max_len = call.max_len
        if cmp is not None:
            self.max_len = min(
                call.max_len, call.block_table.shape[1] * k.shape[1] * geometry.compress_stride
            )
        units = self.batch * cdiv(rows, self.tokens) * self.groups
        of_tile = self.keys // self.taps  # blocks
        tiles = cdiv(
            geometry.num_compressed(self.max_len) * geometry.compress_stride,
            of_tile * geometry.select_block_size,
        )
        window = min(geometry.window_size, self.max_len) + self.tokens - 1
        self.splits = _splits(units, tiles, self.chosen, q.device)
        self.win_splits = _splits(units, cdiv(window, self.keys), self.chosen, q.device, "RING")
        self.cmp_programs = units * self.splits if cmp is not None else 0
        self.programs = self.cmp_programs + (units * self.win_splits if win is not None else 0)
        self.m, self.block_dv = _padded(self.tokens * group), _padded(self.dv)
        # a second binary, for short caches
        few = geometry.num_select_blocks(self.max_len) <= _FEW_BLOCKS
        choice = {
            n: min(self.chosen[n], most) if few else self.chosen[n]
            for n, most in _MOST_OF_FEW.items()
        }
        self.blocks = max(of_tile, choice["BLOCKS"])
        self.at_once = min(power(group), max(1, choice["SUMS"] // self.blocks))
        self.sum_row, self.reference_row = cdiv(tiles * of_tile * 2, 16) * 16, cdiv(tiles, 16) * 16

    @property
    def split(self) -> bool:
        """Whether counters are needed."""
        return (
            self.attend and max(self.splits * bool(self.cmp), self.win_splits * bool(self.win)) > 1
        )

    def sizes(self) -> tuple[list[int], list[int]]:
        """Scratch: (stats, partial outputs, sums over blocks, what they are relative to),
        (counters).
        """
        parts = self.programs * self.m if self.split else 0
        rows = self.batch * self.rows * self.heads if self.choose else 0
        floats = [2 * parts, parts * self.block_dv, rows * self.sum_row, rows * self.reference_row]
        return floats, [self.programs if self.split else 0]

    def launch(
        self, q: Tensor, first: int, outputs: tuple[Tensor, ...], blocks: Tensor | None,
        scratch: Sequence[Tensor],
        counters: Sequence[Tensor],
    ) -> None:  # fmt: skip
        """Run on ``q`` [B, rows, Hq, Dk], from row ``first`` of the step on; ``outputs`` (o, o_win,
        lse, lse_win).
        """
        call, geometry, (o, o_win, lse, lse_win) = self.call, self.call.geometry, outputs
        stats, parts, sums, references = scratch
        k, *k_at = _store(self.cmp and self.cmp[0], q)
        v, *v_at = _store(self.cmp and self.cmp[1], q)
        k_win, *kw_at = _store(self.win and self.win[0], q)
        v_win, *vw_at = _store(self.win and self.win[1], q)
        decode_span[(self.programs,)](
            q, k, v, k_win, v_win, o, o_win, lse, lse_win, sums, references, stats, parts,
            *counters, call.starts,
            call.lengths, call.block_table,
            *q.stride()[:3], *k_at, *v_at, *kw_at, *vw_at, o.stride(0), o.stride(1), lse.stride(0),
            lse.stride(1),
            call.block_table.stride(0), call.scale * LOG2E.value, first, self.rows, self.max_len,
            k.shape[1], k_win.shape[1], self.splits, self.win_splits, self.cmp_programs,
            self.sum_row,
            self.reference_row,
            HAS_CMP=self.cmp is not None, HAS_WIN=self.win is not None, PAGE=_page(k.shape[1]),
            TOKENS=self.tokens,
            ATTEND=self.attend, KEEP=self.choose, PDL=self.early, **self.constants(q),
            **self.options(("num_warps", "num_stages")),
        )  # fmt: skip
        if blocks is not None:
            decode_choose[(self.batch * self.rows * self.groups,)](
                sums, references, lse, blocks, call.starts, call.lengths, lse.stride(0),
                lse.stride(1),
                blocks.stride(0), first, self.rows, self.max_len, self.sum_row, self.reference_row,
                GROUPS=self.groups, GROUP=self.heads // self.groups,
                SIZE=geometry.compress_block_size,
                STRIDE=geometry.compress_stride, SELECT=geometry.select_block_size,
                ACC=accumulator(q.dtype),
                BLOCKS=self.blocks, OF_TILE=self.keys // self.taps, PDL=self.early, **self.choice(),
                num_warps=_CHOICE_WARPS, **({"launch_pdl": True} if self.early else {}),
            )  # fmt: skip

    @property
    def early(self) -> bool:
        """Whether the launch after this one may come before its end."""
        return bool(self.chosen.get("PDL"))

    def options(self, names: tuple[str, ...]) -> dict[str, int]:
        """Of a launch: those of ``names`` that the table gives."""
        given = (
            dict(self.chosen)
            if self.keys == self.chosen["KEYS"]
            else {**self.chosen, "num_stages": 2}
        )
        return {name: given[name] for name in names if given.get(name)}

    def constants(self, q: Tensor) -> dict[str, object]:
        """Constants of a walk over either branch."""
        geometry = self.call.geometry
        return {
            "GROUPS": self.groups, "GROUP": self.heads // self.groups, "M": self.m,
            "KEYS": self.keys, "DK": self.dk,
            "DV": self.dv, "BLOCK_DK": _padded(self.dk), "BLOCK_DV": self.block_dv,
            "TAPS": self.taps,
            "SIZE": geometry.compress_block_size, "STRIDE": geometry.compress_stride,
            "WINDOW": geometry.window_size,
            "SELECT": geometry.select_block_size, "ACC": accumulator(q.dtype),
        }  # fmt: skip

    def choice(self) -> dict[str, int]:
        """Constants of the choice."""
        geometry = self.call.geometry
        return {
            "N": geometry.num_selected_blocks, "SLOTS": _padded(geometry.num_selected_blocks),
            "INIT": geometry.init_blocks, "LOCAL": geometry.local_blocks, "HEADS": self.at_once,
            "PIECES": cdiv(self.heads // self.groups, self.at_once),
        }  # fmt: skip


class Sel:
    """One launch of decode_sel over ``rows`` tokens. The table's KEYS, PROGRAMS, LEAST and PDL are
    as Span's.
    """

    def __init__(
        self, q: Tensor, rows: int, k: Tensor, v: Tensor, call: DecodeCall,
        chosen: configs.Settings | None = None,
        keys: int | None = None,
    ) -> None:  # fmt: skip
        self.call, self.k, self.v, self.rows = call, k, v, rows
        geometry, self.groups, self.group = call.geometry, k.shape[2], q.shape[2] // k.shape[2]
        traits = {
            "head_dim": q.shape[3],
            "v_head_dim": v.shape[3],
            "itemsize": q.itemsize,
            "heads": self.group,
        }
        self.chosen = chosen or configs.pick("decode_sel", architecture(q.device), **traits)
        self.keys = keys or self.chosen["KEYS"]
        units = q.shape[0] * rows * self.groups
        tiles = cdiv(geometry.num_selected_blocks * geometry.select_block_size, self.keys)
        self.splits = _splits(units, tiles, self.chosen, q.device)
        self.programs, self.m, self.block_dv = (
            units * self.splits,
            _padded(self.group),
            _padded(v.shape[3]),
        )
        self.max_len = min(call.max_len, call.block_table.shape[1] * k.shape[1])

    @property
    def split(self) -> bool:
        """Whether counters are needed."""
        return self.splits > 1

    def sizes(self) -> tuple[list[int], list[int]]:
        """Scratch: (stats, partial outputs), (counters)."""
        parts = self.programs * self.m if self.split else 0
        return [2 * parts, parts * self.block_dv], [self.programs if self.split else 0]

    def launch(
        self, q: Tensor, first: int, blocks: Tensor, o: Tensor, lse: Tensor,
        scratch: Sequence[Tensor],
        counters: Sequence[Tensor], gates: Tensor | None = None, others: Pair | None = None,
    ) -> None:  # fmt: skip
        """Run on ``q`` [B, rows, Hq, Dk] from row ``first`` on; ``others``: o_cmp, o_win [B, rows,
        Hq, Dv] in fp32.
        """
        call, k, v, n = self.call, self.k, self.v, self.call.geometry.num_selected_blocks
        o_cmp, o_win = others or (o, o)
        gate = lse if gates is None else gates
        early = gates is not None and bool(self.chosen.get("PDL"))
        decode_sel[(self.programs,)](
            q, gate, k, v, blocks, o_cmp, o_win, o, lse, *scratch, *counters, call.starts,
            call.lengths,
            call.block_table, *q.stride()[:3], *gate.stride()[:3], *k.stride()[:3], *v.stride()[:3],
            *blocks.stride()[:3], o.stride(0), o.stride(1), lse.stride(0), lse.stride(1),
            call.block_table.stride(0),
            call.scale * LOG2E.value, first, self.rows, self.max_len, k.shape[1], self.splits,
            PAGE=_page(k.shape[1]), GROUPS=self.groups, GROUP=self.group, M=self.m, KEYS=self.keys,
            DK=q.shape[3],
            DV=v.shape[3], BLOCK_DK=_padded(q.shape[3]), BLOCK_DV=self.block_dv,
            SELECT=call.geometry.select_block_size, N=n, SLOTS=_padded(n),
            DISTINCT=gates is not None,
            GATED=gates is not None, ACC=accumulator(q.dtype), PDL=early,
            **launch_options(self.chosen),
            **({"launch_pdl": True} if early else {}),
        )  # fmt: skip


class Step:
    """One launch of decode_step: all that ``span`` and ``sel``, of its tile of keys, would do, and
    the choice.
    """

    def __init__(self, span: Span, sel: Sel) -> None:
        self.span, self.sel = span, sel
        self.programs = span.programs + sel.programs

    def sizes(self) -> tuple[list[int], list[int]]:
        """Scratch: (stats, partial outputs, sums over blocks, what they are relative to),
        (counters, flags, ticket).
        """
        span = self.span
        parts = self.programs * span.m if span.split or self.sel.split else 0
        flags = span.batch * span.rows * span.groups * 2
        return [2 * parts, parts * span.block_dv, *span.sizes()[0][2:]], [self.programs, flags, 1]

    def launch(self, q: Tensor, gates: Tensor, first: int, rows: int) -> Launch:
        """For ``q`` [B, span.rows, Hq, Dk], from row ``first`` on of a step of ``rows``, whose
        outputs are contiguous.

        It takes q, gates, k and v of cmp, sel and win, o, o_cmp, o_win, lse and lse_win (those but
        o in scratch, of this run's rows), sums, references, stats, parts, the zeros, blocks,
        starts, lengths, the block table.
        """
        span, sel, call = self.span, self.sel, self.span.call
        assert span.cmp is not None  # a step has both
        assert span.win is not None
        stores = (*span.cmp, sel.k, sel.v, *span.win)
        heads, width, chosen = span.heads, span.heads * span.dv, call.geometry.num_selected_blocks
        return Launch(
            decode_step, (self.programs,),
            *(n for x in (q, gates, *stores) for n in x.stride()[:3]),
            rows * span.groups * chosen, span.groups * chosen, chosen, rows * width, width,
            span.rows * width, width, heads * span.rows, span.rows, call.block_table.stride(0),
            call.scale * LOG2E.value, first, span.rows, min(span.max_len, sel.max_len),
            stores[0].shape[1], sel.k.shape[1], stores[4].shape[1], span.splits, span.win_splits,
            sel.splits,
            span.cmp_programs, span.programs - span.cmp_programs, span.sum_row, span.reference_row,
            CMP_PAGE=_page(stores[0].shape[1]), PAGE=_page(sel.k.shape[1]), AT_ONCE=span.blocks,
            **span.constants(q),
            **span.choice(), **span.options(("num_warps", "num_stages", "maxnreg")),
        )  # fmt: skip
