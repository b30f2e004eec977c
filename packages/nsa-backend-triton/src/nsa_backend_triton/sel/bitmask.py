"""Host side of the bitmask form of the backward of sel: its condition and its launches."""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from nsa_backend_triton.host import device, strides
from nsa_backend_triton.host.configs import Settings
from nsa_backend_triton.host.fork import Fork
from nsa_backend_triton.host.launch_cache import Launch, Memo, cached_by_metadata
from nsa_backend_triton.host.parts import head_parts, sum_launch
from nsa_backend_triton.sel.backward_bitmask import (
    NUM_BITS,
    sel_bitmask_dkdv,
    sel_bitmask_dq,
)
from nsa_backend_triton.sel.problem import Problem, tuned_settings

# Settings that are no arguments of the kernels.
_HOST_SETTINGS = ("MAX_LEN", "BUSY_TOKENS", "BUSY_MAX_LEN", "PROGRAMS_PER_SM")


@cached_by_metadata
def fits(problem: Problem, blocks: Tensor) -> bool:
    """Return whether the bitmask form computes the gradients of ``problem``.

    It does if the sequences have at most MAX_LEN tokens, a setting of sel_bitmask_dq, and NUM_BITS
    blocks. The work grows with the square of their length, unlike that of the lists. So the limit
    is BUSY_MAX_LEN if the sequences of ``seqs.divided`` together have more than BUSY_TOKENS, which
    occupy the GPU. The lists of ``blocks`` [B, S, G, n] must not be longer than NUM_BITS, because a
    program holds those of its rows in registers; and the rows of a tile must lie within 2^31
    elements.
    """
    seqs, call = problem.seqs, problem.call
    select_block = call.geometry.select_block_size
    settings = tuned_settings(problem.q, problem.k, problem.v, call.geometry, "sel_bitmask_dq")
    longest = call.max_seqlen if seqs.packed else seqs.end
    tokens = seqs.seq_len if seqs.packed else seqs.divided.n * seqs.seq_len
    limit = settings["BUSY_MAX_LEN" if tokens > settings["BUSY_TOKENS"] else "MAX_LEN"]
    if longest > min(limit, NUM_BITS.value * select_block):
        return False
    rows = min(longest, strides.MAX_TILE_TOKENS)
    longest_stride = max(stride_t for _, stride_t, _ in problem.strides())
    return blocks.shape[-1] <= NUM_BITS.value and rows * longest_stride < 2**31


class _Launches(NamedTuple):
    """The launches, and the shapes of the partial sums of dk and dv; empty: there are none."""

    dq: Launch
    dkdv: Launch
    add: Launch | None
    partial_shapes: tuple[tuple[int, ...], ...]


def _kernel_settings(settings: Settings) -> dict[str, int]:
    """Return the constexprs and compiler options among ``settings``."""
    return {name: value for name, value in settings.items() if name not in _HOST_SETTINGS}


@cached_by_metadata
def _prepare(problem: Problem, blocks: Tensor) -> _Launches:
    q, k, v, seqs, call = problem.q, problem.k, problem.v, problem.seqs, problem.call
    select_block, groups, n = call.geometry.select_block_size, k.shape[-2], blocks.shape[-1]
    settings = tuned_settings(q, k, v, call.geometry, "sel_bitmask_dq")
    block_t = max(1, settings["BLOCK_M"] // problem.group)
    tiles = seqs.tiles(block_t)
    tile = {
        "BLOCK_T": block_t,
        "BLOCK_M": max(16, triton.next_power_of_2(block_t * problem.group)),
    }
    dq = Launch(
        sel_bitmask_dq, (tiles * groups,),
        *problem.strides(),
        0 if seqs.packed else blocks.stride(0), (blocks.stride(-3), blocks.stride(-2)),
        call.scale, seqs.n, seqs.seq_len, seqs.first_query, tiles,
        NUM_SELECTED=n, NUM_SELECTED_PAD=triton.next_power_of_2(n),
        **problem.constants(), **{**_kernel_settings(settings), **tile},
    )  # fmt: skip
    settings = tuned_settings(q, k, v, call.geometry, "sel_bitmask_dkdv")
    of_block = triton.cdiv(select_block, settings["BLOCK_N"]) * groups
    least = settings["PROGRAMS_PER_SM"] * device.multiprocessors(q.device)
    parts = head_parts(problem.group, seqs.divided.key_tiles(select_block) * of_block, least)
    dkdv = Launch(
        sel_bitmask_dkdv, (seqs.key_tiles(select_block) * of_block * parts,),
        *problem.strides(),
        k.numel(), v.numel(),
        call.scale, seqs.n, seqs.seq_len, seqs.first_query, k.shape[-3], parts,
        **problem.constants(), **_kernel_settings(settings),
    )  # fmt: skip
    if parts == 1:
        return _Launches(dq, dkdv, None, ())
    add = sum_launch(k, v, parts, seqs.n, varlen=False)
    return _Launches(dq, dkdv, add, tuple((parts, *x.shape) for x in (k, v)))


def gradients(
    problem: Problem, blocks: Tensor, memo: Memo, fork: Fork | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv in the dtypes of q, k and v; see :func:`fits`.

    dq is complete at once, dk and dv when ``fork`` ends, if it is given. ``memo`` is that of the
    metadata of ``problem`` and ``blocks``.
    """
    q, k, v, seqs = problem.q, problem.k, problem.v, problem.seqs
    launches = memo.get_or_make("bitmask", _prepare, problem, blocks)
    rows = (problem.do, problem.lse2, problem.delta)
    dq = q.new_empty(q.shape)
    bits = blocks.new_empty(blocks.shape[:-1], dtype=torch.int64)
    launches.dq(q, k, v, *rows, blocks, seqs.cu, dq, bits)
    # No program writes the keys after the last query.
    unseen = k.shape[-3] > seqs.end
    grads = [x.new_zeros(x.shape) if unseen else x.new_empty(x.shape) for x in (k, v)]
    outputs = grads
    if launches.add is not None:
        new = problem.delta.new_zeros if unseen else problem.delta.new_empty
        outputs = [new(shape) for shape in launches.partial_shapes]
    with fork.beside(*rows, bits, *outputs, *grads) if fork else contextlib.nullcontext():
        launches.dkdv(q, k, v, *rows, bits, seqs.cu, *outputs)
        if launches.add is not None:
            launches.add(*outputs, *grads, seqs.cu)
    return dq, grads[0], grads[1]
