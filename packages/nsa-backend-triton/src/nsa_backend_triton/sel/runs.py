"""The path over buckets, run by run, so that few partial outputs exist at a time.

A run is a part of the kv heads and of the rows. sel_bucket_kernel writes its partial outputs, and
sel_merge_kernel adds them to the output of the tiles.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import triton
from torch import Tensor

from nsa_backend_triton.host.configs import Tuned, launch_options
from nsa_backend_triton.host.constexprs import common_constants
from nsa_backend_triton.host.fork import Fork
from nsa_backend_triton.host.launch_cache import Launch, Memo, cached_by_metadata
from nsa_backend_triton.host.sequences import Sequences
from nsa_backend_triton.host.strides import lse_strides, strides
from nsa_backend_triton.sel import pair_lists
from nsa_backend_triton.sel.buckets import sel_bucket_kernel
from nsa_backend_triton.sel.merge import sel_merge_kernel
from nsa_backend_triton.shared.rows import LOG2E
from nsa_core.contract import SlotCall

# Pairs are processed in runs. Partial outputs of a run take about PARTIAL_BYTES, or more so that
# there are at most MAX_RUNS. Heads are divided first: if rows are, a bucket has fewer pairs in each
# run, and the last tile of a bucket is partly empty.
PARTIAL_BYTES, MAX_RUNS = 2**28, 8


def _parts(num_bytes: int, num_kv_heads: int, num_rows: int) -> tuple[int, int]:
    """Return the kv heads of a run, and the parts of the rows, for partial outputs of this size."""
    wanted = triton.cdiv(num_bytes, PARTIAL_BYTES)
    run_heads = triton.cdiv(num_kv_heads, min(num_kv_heads, wanted, MAX_RUNS))
    head_runs = triton.cdiv(num_kv_heads, run_heads)
    row_parts = min(triton.cdiv(wanted, head_runs), max(1, MAX_RUNS // head_runs), num_rows)
    return run_heads, row_parts


def divide(o: Tensor, num_kv_heads: int, n: int, seqs: Sequences) -> pair_lists.Runs:
    """Return the runs of the pairs of ``o`` [B, S, Hq, Dv] or [T, Hq, Dv] with ``n`` blocks.

    In each run, the first pairs of a block take the causal mask (buckets.py). The mask rounds
    scores once more, because it keeps the compiler from fusing their multiplication with the
    subtraction after it. If runs begin at other rows, the last bits of some outputs therefore
    differ. ``seqs.apart`` asks for the bits that each entry of the batch has alone, so each entry
    is divided as it would be alone: into equal parts of its rows, or not at all. There may then be
    more runs than MAX_RUNS, or larger ones.
    """
    num_rows = o.numel() // (o.shape[-1] * o.shape[-2])
    num_bytes = o.numel() * n * o.itemsize
    run_heads, row_parts = _parts(num_bytes, num_kv_heads, num_rows)
    if not seqs.apart:
        return pair_lists.Runs(run_heads, triton.cdiv(num_rows, row_parts))
    _, most = _parts(num_bytes // seqs.n, num_kv_heads, seqs.seq_len)
    entry_parts = max(parts for parts in range(1, most + 1) if seqs.seq_len % parts == 0)
    entries = triton.cdiv(seqs.n, row_parts) if entry_parts == 1 else 1
    return pair_lists.Runs(run_heads, entries * seqs.seq_len // entry_parts)


class Run(NamedTuple):
    """A run: its number, its rows and its kv heads.

    ``room`` is the number of heads for which its partial outputs have room.
    """

    index: int
    first_row: int
    rows: int
    first_head: int
    heads: int
    room: int


def each_run(runs: pair_lists.Runs, num_kv_heads: int, num_rows: int) -> Iterator[Run]:
    """Yield the runs in the order of their buckets."""
    corners = itertools.product(range(0, num_kv_heads, runs.heads), range(0, num_rows, runs.rows))
    for index, (head, row) in enumerate(corners):
        rows, heads = min(runs.rows, num_rows - row), min(runs.heads, num_kv_heads - head)
        yield Run(index, row, rows, head, heads, runs.heads)


class _BucketLaunches(NamedTuple):
    """The launches over buckets, and the shape of the partial outputs."""

    attend: Launch
    merge: Launch
    partial_shape: tuple[int, int, int]


@cached_by_metadata
def _prepare_buckets(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    seqs: Sequences,
    call: SlotCall,
    run: Run,
    n: int,
    num_pairs: int,
    num_buckets: int,
    tuned: Tuned,
) -> _BucketLaunches:
    num_kv_heads, select_block = k.shape[-2], call.geometry.select_block_size
    group = q.shape[-2] // num_kv_heads
    bucket_settings = tuned["sel_bucket"]
    constants = common_constants(
        q, v, group, seqs, use_tma=False, max_band=bucket_settings.get("MAX_BAND", 256)
    )
    block_t = max(1, bucket_settings["BLOCK_M"] // group)
    tiles_per_program = bucket_settings["TILES_PER_PROGRAM"]
    num_slots = run.rows * run.room * n  # of partial outputs
    run_pairs, pairs_per_program = run.rows * run.heads * n, block_t * tiles_per_program
    attend = Launch(
        sel_bucket_kernel, (run_pairs // pairs_per_program + num_buckets + (run.index > 0),),
        seqs.n, seqs.seq_len, seqs.first_query, num_buckets,
        pair_lists.buckets_per_head(seqs, call.geometry), num_pairs,
        run.index, run.first_head, run.room,
        call.scale * LOG2E.value,
        *(strides(x, seqs.packed) for x in (q, k, v)),
        **constants,
        SELECT_BLOCK=select_block,
        BLOCK_N=max(16, triton.next_power_of_2(select_block)),
        BLOCK_T=block_t, BLOCK_M=max(16, triton.next_power_of_2(block_t * group)),
        TILES_PER_PROGRAM=tiles_per_program, NEGATIVE_SCALE=call.scale < 0,
        **launch_options(bucket_settings),
    )  # fmt: skip
    merge_settings = tuned["sel_merge"]
    block_t = max(1, merge_settings["BLOCK_M"] // group)
    merge = Launch(
        sel_merge_kernel, (triton.cdiv(run.rows, block_t) * run.heads,),
        seqs.seq_len, run.first_row, run.rows, run.first_head,
        run.index * num_buckets, num_kv_heads,
        *lse_strides(lse, seqs.packed),
        V_HEAD_DIM=v.shape[-1], V_HEAD_DIM_PAD=max(16, triton.next_power_of_2(v.shape[-1])),
        GROUP=group, VARLEN=seqs.packed, ACC=constants["ACC"],
        NUM_SELECTED=n,
        BLOCK_T=block_t, BLOCK_M=triton.next_power_of_2(block_t * group),
        UNROLL=merge_settings["UNROLL"],
        **launch_options(merge_settings),
    )  # fmt: skip
    return _BucketLaunches(attend, merge, (num_slots, group, v.shape[-1]))


def _list_runs(o: Tensor, blocks: Tensor, seqs: Sequences) -> tuple[pair_lists.Runs, list[Run]]:
    """Return the division of the pairs, and its runs in the order of their buckets."""
    num_kv_heads, n = blocks.shape[-2:]
    runs = divide(o, num_kv_heads, n, seqs)
    return runs, list(each_run(runs, num_kv_heads, blocks.numel() // (num_kv_heads * n)))


def attend_buckets(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Tensor,
    unshared: Tensor,
    o: Tensor,
    lse: Tensor,
    seqs: Sequences,
    call: SlotCall,
    tuned: Tuned,
    memo: Memo,
    fork: Fork,
) -> None:
    """Add the pairs marked in ``unshared`` to o and lse, run by run.

    ``memo`` is that of the metadata of q, k, v, blocks and the call. The kernels that write o and
    lse may run beside those of ``fork`` until the first sum.
    """
    n = blocks.shape[-1]
    runs, each = memo.get_or_make("runs", _list_runs, o, blocks, seqs)
    lists = pair_lists.build(blocks, seqs, call.geometry, memo, mask=unshared, runs=runs)
    num_pairs, num_buckets = lists.tokens.numel(), (lists.offsets.numel() - 1) // len(each)
    partial_o, partial_lse = None, None
    for run in each:
        launches = memo.get_or_make(
            run, _prepare_buckets,
            q, k, v, lse, seqs, call, run, n, num_pairs, num_buckets, tuned,
        )  # fmt: skip
        if partial_o is None or partial_lse is None:  # the first run is the largest
            partial_o = q.new_empty(launches.partial_shape)
            partial_lse = lse.new_empty(launches.partial_shape[:2])
        launches.attend(q, k, v, lists.tokens, lists.offsets, partial_o, partial_lse, seqs.cu)
        fork.join()
        launches.merge(partial_o, partial_lse, lists.places, lists.offsets, o, lse)
