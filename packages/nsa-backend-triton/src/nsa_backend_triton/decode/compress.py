"""Compress the block that a step completes, in two launches (phi of kind mlp) or one.

    hidden[j] = GELU(W_up flatten(block + position) + b_up)[j]
    k_cmp     = rotary(W_down hidden + b_down) at the block's first position; v_cmp without rotary

A linear phi has no hidden units, and the mean no weights. An MLP runs decode_compress_rows
(compress_rows.py) if the sequences have MIN_ROWS heads together, and so does the mean; otherwise
decode_compress serves, which takes one sequence at a time.

With d = 16, 15 of 16 steps complete no block, so the time of programs without work matters most.
Their number does not grow with the batch beyond PROGRAMS_PER_TILE sequences. Each one reads the
lengths of all sequences, BLOCK_B at a time, and ends if no block is complete.

A program owns BLOCK_UNITS rows of W of one tensor, k or v, and every PROGRAMS_PER_TILE-th sequence
with a complete block. With rotary it owns as many pairs of rows. It walks the columns BLOCK_DIM at
a time, accumulates each product of a tile [heads, BLOCK_UNITS, BLOCK_DIM] in registers, and adds
over the columns once, at the end. Multiply-adds, hidden units and the rotation are fp32; the result
is rounded once. A sequence reads W once, from L2 if several sequences complete a block: 2 MB in
bf16 for k with D = 128 and l = 32. The limit is the latency of a tile's loads,
l D / BLOCK_DIM times.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_backend_triton.decode.codes import encode, scales_of, store_scale
from nsa_backend_triton.decode.compress_rows import decode_compress_rows
from nsa_backend_triton.decode.launch import cdiv, power
from nsa_backend_triton.decode.walk import clamp_index, table_row
from nsa_backend_triton.host import configs
from nsa_backend_triton.host.constexprs import accumulator
from nsa_backend_triton.host.device import architecture
from nsa_backend_triton.host.launch_cache import Launch, cached_by_metadata
from nsa_core.contract import DecodeCall
from nsa_core.dtypes import as_bytes
from nsa_core.layout import BlockGeometry

Weights = tuple[Tensor, ...]  # position, weight, bias; of an MLP also the weight and bias of down
Strides = tuple[tuple[int, ...], ...]  # (page, row, head) of k and of v
_ROUNDED = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}
_MEAN_PROGRAMS = 64  # per tensor
_MAX_SUMS = 4096  # splits of all runs, which bounds the memory of their sums


@triton.jit
def _products(
    X, TABLE, POSITION, WEIGHT, BIAS, stride_x, stride_w, run, first_token, page_size, columns,
    num_pages, unit, unit_valid, FIRST: tl.constexpr, RING: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, BLOCK_H: tl.constexpr, TOKENS: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK_UNITS: tl.constexpr, BLOCK_DIM: tl.constexpr,
    DTYPE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Return W x + b [BLOCK_H, BLOCK_UNITS], x TOKENS rows of X [P, page, NUM_KV_HEADS, WIDTH].

    FIRST: x are the tokens from ``first_token`` on, in the pages of TABLE, which wraps around;
    RING: it has one column. The positions are added to x. Otherwise x is row 0 of page ``run``.
    Weights are rounded to DTYPE.
    """
    head = tl.arange(0, BLOCK_H).to(tl.int64)  # the strides of a head-major pool are large
    stride_xp, stride_xr, stride_xh = stride_x
    page = tl.cast(run, tl.int64)
    if RING:
        page = clamp_index(tl.load(TABLE), num_pages).to(tl.int64)
    products = tl.zeros([BLOCK_H, BLOCK_UNITS, BLOCK_DIM], ACC)
    for first_column in range(0, TOKENS * WIDTH, BLOCK_DIM):
        column = first_column + tl.arange(0, BLOCK_DIM)
        column_valid = column < TOKENS * WIDTH
        row, x_page = first_token + column // WIDTH, page
        if RING:
            row = tl.where(row < page_size, row, row - page_size)
        elif FIRST:
            x_page = tl.load(TABLE + row // page_size % columns, mask=column_valid, other=0)
            x_page, row = clamp_index(x_page, num_pages).to(tl.int64), row % page_size
        offs_x = x_page * stride_xp + row.to(tl.int64) * stride_xr + column % WIDTH
        x = tl.load(
            X + head[:, None] * stride_xh + offs_x[None, :],
            mask=(head < NUM_KV_HEADS)[:, None] & column_valid[None, :],
            other=0.0,
        ).to(ACC)
        if FIRST:
            x += tl.load(POSITION + column, mask=column_valid, other=0.0).to(ACC)[None, :]
        w = tl.load(
            WEIGHT + unit[:, None] * stride_w + column[None, :],
            mask=unit_valid[:, None] & column_valid[None, :],
            other=0.0,
        )
        products += x[:, None, :] * w.to(DTYPE).to(ACC)[None, :, :]
    bias = tl.load(BIAS + unit, mask=unit_valid, other=0.0).to(ACC)
    return tl.sum(products, 2) + bias[None, :]


@triton.jit
def _compress_units(
    X, TABLE, POSITION, WEIGHT, BIAS, OUT, SCALES, COS, SIN,
    stride_x, stride_w, stride_out, stride_scales, run, first_token, page_size, columns, num_pages,
    out_page, out_row, out_valid, position, tile, IS_V: tl.constexpr,
    FIRST: tl.constexpr, LAST: tl.constexpr, ROTATE: tl.constexpr,
    RING: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, BLOCK_H: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr,
    UNITS: tl.constexpr, BLOCK_UNITS: tl.constexpr, BLOCK_DIM: tl.constexpr,
    DTYPE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Write a tile of units of one run to row ``out_row`` of page ``out_page`` of OUT, if valid.

    Not LAST: the units are hidden ones, whose GELU is written. ROTATE: tiles have pairs of units.
    """
    OWNED: tl.constexpr = UNITS // 2 if ROTATE else UNITS
    head = tl.arange(0, BLOCK_H).to(tl.int64)
    unit = tile * BLOCK_UNITS + tl.arange(0, BLOCK_UNITS)
    unit_valid = unit < OWNED
    y = _products(
        X, TABLE, POSITION, WEIGHT, BIAS, stride_x, stride_w, run, first_token, page_size,
        columns, num_pages, unit, unit_valid,
        FIRST, RING, NUM_KV_HEADS, BLOCK_H, TOKENS, WIDTH, BLOCK_UNITS, BLOCK_DIM, DTYPE, ACC,
    )  # fmt: skip
    stride_outp, stride_outr, stride_outh = stride_out
    OUT += tl.cast(out_page, tl.int64) * stride_outp + tl.cast(out_row, tl.int64) * stride_outr
    out = OUT + (head[:, None] * stride_outh + unit[None, :])
    mask = (head < NUM_KV_HEADS)[:, None] & unit_valid[None, :] & out_valid
    OUT_DTYPE: tl.constexpr = OUT.dtype.element_ty
    scale = store_scale(
        SCALES, out_page, stride_scales, head, (head < NUM_KV_HEADS) & out_valid, IS_V, OUT_DTYPE
    )[:, None]  # fmt: skip
    if ROTATE:
        y2 = _products(
            X, TABLE, POSITION, WEIGHT + OWNED * stride_w, BIAS + OWNED, stride_x, stride_w,
            run, first_token, page_size, columns, num_pages, unit, unit_valid, FIRST, RING,
            NUM_KV_HEADS, BLOCK_H, TOKENS, WIDTH, BLOCK_UNITS, BLOCK_DIM, DTYPE, ACC,
        )  # fmt: skip
        angle = tl.cast(position, tl.int64) * OWNED + unit
        cos = tl.load(COS + angle, mask=unit_valid, other=0.0)[None, :]
        sin = tl.load(SIN + angle, mask=unit_valid, other=0.0)[None, :]
        rotated = encode((y * cos - y2 * sin).to(DTYPE), scale, OUT_DTYPE)
        rotated2 = encode((y2 * cos + y * sin).to(DTYPE), scale, OUT_DTYPE)
        tl.store(out, rotated, mask=mask)
        tl.store(out + OWNED, rotated2, mask=mask)
    elif LAST:
        tl.store(out, encode(y.to(DTYPE), scale, OUT_DTYPE), mask=mask)
    else:
        tl.store(out, 0.5 * y * (1.0 + tl.erf(y * 0.7071067811865476)), mask=mask)


@triton.jit(
    do_not_specialize=[
        "stride_raw_table", "stride_cmp_table", "num_runs", "raw_page_size", "raw_columns",
        "cmp_page_size", "num_blocks", "num_positions", "num_sequences", "num_raw_pages",
        "num_cmp_pages", "stride_scales",
    ],
    do_not_specialize_on_alignment=[
        "STARTS", "LENGTHS", "SEQUENCES", "RAW_TABLE", "CMP_TABLE", "SCALES",
    ],
)  # fmt: skip
def decode_compress(
    K, V, K_POSITION, V_POSITION, K_WEIGHT, V_WEIGHT, K_BIAS, V_BIAS, K_OUT, V_OUT, COS, SIN,
    STARTS, LENGTHS, SEQUENCES, RAW_TABLE, CMP_TABLE, SCALES,
    stride_k, stride_v, stride_k_out, stride_v_out,
    stride_k_weight, stride_v_weight, stride_raw_table, stride_cmp_table, stride_scales,
    num_runs, raw_page_size, raw_columns, cmp_page_size, num_blocks, num_positions,
    num_sequences, num_raw_pages, num_cmp_pages,
    FIRST: tl.constexpr, LAST: tl.constexpr, ROPE: tl.constexpr,
    RAGGED: tl.constexpr, RING: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, BLOCK_H: tl.constexpr,
    COMPRESS_BLOCK: tl.constexpr, STRIDE: tl.constexpr,
    K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, K_UNITS: tl.constexpr, V_UNITS: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_UNITS: tl.constexpr, PROGRAMS_PER_TILE: tl.constexpr,
    K_BLOCK_DIM: tl.constexpr, V_BLOCK_DIM: tl.constexpr,
    DTYPE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Compute one layer of phi of the block that each run completes.

    FIRST: K and V are the pages of tokens; otherwise, they are the hidden units. LAST: K_OUT and
    V_OUT are pages of compressed tokens; otherwise, they are the hidden units. Hidden units of a
    run are a page of one row.
    """
    K_PAIRS: tl.constexpr = K_UNITS // 2 if ROPE else K_UNITS
    K_TILES: tl.constexpr = (K_PAIRS + BLOCK_UNITS - 1) // BLOCK_UNITS
    TOKENS: tl.constexpr = COMPRESS_BLOCK if FIRST else 1
    tile, turn = tl.program_id(0) // PROGRAMS_PER_TILE, tl.program_id(0) % PROGRAMS_PER_TILE
    for first_run in range(0, num_runs, BLOCK_B):
        runs = first_run + tl.arange(0, BLOCK_B)
        start = tl.load(STARTS + runs, mask=runs < num_runs, other=0)
        length = tl.load(LENGTHS + runs, mask=runs < num_runs, other=0)
        blocks = (tl.maximum(start, COMPRESS_BLOCK - STRIDE) - (COMPRESS_BLOCK - STRIDE)) // STRIDE
        complete = (start >= 0) & (blocks < num_blocks)
        complete = complete & (blocks * STRIDE + COMPRESS_BLOCK <= length)
        rank = tl.cumsum(complete.to(tl.int32), 0)
        for i in range(turn, tl.sum(complete.to(tl.int32), 0), PROGRAMS_PER_TILE):
            is_own = complete & (rank == i + 1)
            run = tl.sum(tl.where(is_own, runs, 0), 0)
            block = tl.sum(tl.where(is_own, blocks, 0), 0)
            out_page, out_row, out_valid = run, 0, True
            if LAST:
                cmp_table = table_row(
                    CMP_TABLE, SEQUENCES, run, stride_cmp_table, num_sequences, RAGGED
                )
                out_page = tl.load(cmp_table + block // cmp_page_size)
                out_valid = (out_page >= 0) & (out_page < num_cmp_pages)
                if RAGGED:
                    sequence = tl.load(SEQUENCES + run)
                    out_valid = out_valid & (sequence >= 0) & (sequence < num_sequences)
                out_row = block % cmp_page_size
            raw_table = RAW_TABLE
            first_token = 0
            if FIRST:
                raw_table = table_row(
                    RAW_TABLE, SEQUENCES, run, stride_raw_table, num_sequences, RAGGED
                )
                first_token = block * STRIDE
            if RING:
                first_token = first_token % raw_page_size
            position = tl.minimum(block * STRIDE, num_positions - 1)
            if tile < K_TILES:
                _compress_units(
                    K, raw_table, K_POSITION, K_WEIGHT, K_BIAS, K_OUT, SCALES, COS, SIN,
                    stride_k, stride_k_weight, stride_k_out, stride_scales, run, first_token,
                    raw_page_size, raw_columns, num_raw_pages, out_page, out_row, out_valid,
                    position, tile, False,
                    FIRST, LAST, ROPE, RING, NUM_KV_HEADS, BLOCK_H, TOKENS, K_WIDTH,
                    K_UNITS, BLOCK_UNITS, K_BLOCK_DIM, DTYPE, ACC,
                )  # fmt: skip
            else:
                _compress_units(
                    V, raw_table, V_POSITION, V_WEIGHT, V_BIAS, V_OUT, SCALES, COS, SIN,
                    stride_v, stride_v_weight, stride_v_out, stride_scales, run, first_token,
                    raw_page_size, raw_columns, num_raw_pages, out_page, out_row, out_valid,
                    position, tile - K_TILES, True,
                    FIRST, LAST, False, RING, NUM_KV_HEADS, BLOCK_H, TOKENS, V_WIDTH,
                    V_UNITS, BLOCK_UNITS, V_BLOCK_DIM, DTYPE, ACC,
                )  # fmt: skip


def compress(
    k: Tensor,  # [P, page, G, Dk]
    v: Tensor,  # [P, page, G, Dv]
    k_cmp: Tensor,  # [P, page, G, Dk]
    v_cmp: Tensor,  # [P, page, G, Dv]
    phi_k: Weights,
    phi_v: Weights,
    *,
    rope: tuple[Tensor, Tensor] | None,  # fp32 cos, sin [positions, Dk / 2]
    call: DecodeCall,
) -> None:
    """Write the compressed token of the block that a step completes to the pages k_cmp and v_cmp.

    Raises:
        ValueError: A weight has another shape than k, v and the block sizes require.
    """
    phi_k, phi_v = (
        tuple(x if x.is_contiguous() else x.contiguous() for x in phi) for phi in (phi_k, phi_v)
    )
    angles = (k, k) if rope is None else [x.contiguous() for x in rope]
    k_cmp, v_cmp = as_bytes(k_cmp), as_bytes(v_cmp)
    tables = (call.tables.raw, call.tables.cmp, scales_of(call)[0])
    sequences = call.sequences
    placeholder = call.starts if sequences is None else sequences
    positions = (call.starts, call.lengths, placeholder, *tables)
    k_position, k_weight, k_bias, *k_down = phi_k or (k, k, k)  # placeholders for the mean
    v_position, v_weight, v_bias, *v_down = phi_v or (v, v, v)
    first, last, hidden_shapes = _launches(
        k, v, k_cmp, v_cmp, angles[0], call.starts, *tables,
        call.geometry, (rope is not None, sequences is not None, not phi_k), k_position,
        v_position, k_weight, v_weight, k_bias, v_bias, *k_down, *v_down,
    )  # fmt: skip
    pairs = (k_position, v_position, k_weight, v_weight, k_bias, v_bias)
    if last is None:
        first(k, v, *pairs, k_cmp, v_cmp, *angles, *positions)
        return
    dtype = torch.float64 if k.dtype == torch.float64 else torch.float32
    k_hidden, v_hidden = (torch.empty(x, dtype=dtype, device=k.device) for x in hidden_shapes)
    first(k, v, *pairs, k_hidden, v_hidden, *angles, *positions)
    down = (k_down[0], v_down[0], k_down[1], v_down[1])
    last(k_hidden, v_hidden, *pairs[:2], *down, k_cmp, v_cmp, *angles, *positions)


@cached_by_metadata
def _launches(
    k: Tensor,
    v: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    cos: Tensor,
    starts: Tensor,
    raw_table: Tensor,
    cmp_table: Tensor,
    scales: Tensor,
    geometry: BlockGeometry,
    options: tuple[bool, bool, bool],  # whether there is rope and sequences, and phi is the mean
    *weights: Tensor,  # positions, weights and biases of k and v by turns; then k's and v's down
) -> tuple[Launch, Launch | None, tuple[tuple[int, ...], ...]]:
    """Prepare the launches; the second one is None if phi has one layer.

    Returns also the shapes of the hidden units of k and v, or of the sums that make them.
    """
    size, is_mlp, (rope, ragged, is_mean) = geometry.compress_block_size, len(weights) > 6, options
    k_weight, v_weight, down = weights[2], weights[3], weights[6:]
    batch, (_, _, heads, dk), dv = len(starts), k.shape, v.shape[3]
    hidden = (k_weight.shape[0], v_weight.shape[0]) if is_mlp else (dk, dv)
    expected = [
        *((size, width) for width in (dk, dv)),
        *((units, size * width) for units, width in zip(hidden, (dk, dv))),
        *((units,) for units in hidden),
    ]
    if is_mlp:
        expected += [(dk, hidden[0]), (dk,), (dv, hidden[1]), (dv,)]
    shapes = [tuple(x.shape) for x in weights]
    if shapes != expected and not is_mean:
        raise ValueError(f"compress expects weights of shapes {expected}, got {shapes}")
    page_size, columns = k_cmp.shape[1], raw_table.shape[1]
    gpu, traits = architecture(k.device), {"head_dim": dk, "v_head_dim": dv, "kv_heads": heads}
    settings = configs.pick("decode_compress_rows", gpu, itemsize=k.itemsize, **traits)
    by_rows = is_mean or (is_mlp and 0 < settings["MIN_ROWS"] <= batch * heads)
    groups, splits, block_rows = batch, 1, settings["BLOCK_ROWS"]
    if is_mean:
        block_rows = min(block_rows, power(heads))
    if by_rows:
        groups = cdiv(batch * heads, block_rows)
    else:
        settings = configs.pick("decode_compress", gpu)
    if by_rows and is_mlp:
        splits = max(1, min(settings["SPLITS"], size, _MAX_SUMS // batch))
    block_units = power(max(dk, dv)) if is_mean else settings["BLOCK_UNITS"]
    programs_per_tile = _MEAN_PROGRAMS if is_mean else settings["PROGRAMS_PER_TILE"]
    programs_per_tile = min(programs_per_tile, groups)
    numbers = (columns, page_size, cmp_table.shape[1] * page_size, cos.shape[0], len(cmp_table))
    row_strides = (raw_table.stride(0), cmp_table.stride(0), scales.stride(0), batch)

    def launch(
        inputs: Strides, outputs: Strides, of_weights: tuple[int, int], rows: int, tokens: int,
        widths: tuple[int, int], units: tuple[int, int], is_first: bool, is_last: bool,
    ) -> Launch:  # fmt: skip
        tiles = [cdiv(n, block_units) for n in units]
        if by_rows:
            most = settings["BLOCK_DIM" if is_first else "BLOCK_HIDDEN"]
            block_dims = [max(16, min(most, power(width))) for width in widths]
            own = {
                "TWO_PAGES": k.shape[1] >= size, "MEAN": is_mean, "BLOCK_ROWS": block_rows,
                "SPLITS": splits, "num_stages": settings["num_stages"] if is_first else 1,
            }  # fmt: skip
        else:
            if rope and is_last:  # a tile has pairs of units of k
                tiles[0] = cdiv(units[0] // 2, block_units)
            most = max(1, settings["TILE_PRODUCTS"] // (power(heads) * block_units))
            block_dims = [min(most, power(tokens * width)) for width in widths]
            own = {"RING": is_first and columns == 1, "BLOCK_H": power(heads)}
        programs = sum(tiles) * programs_per_tile * (1 if is_last else splits)
        return Launch(
            decode_compress_rows if by_rows else decode_compress, (programs,),
            *inputs, *outputs, *of_weights, *row_strides, rows, *numbers, len(k), len(k_cmp),
            FIRST=is_first, LAST=is_last, ROPE=rope and is_last, RAGGED=ragged, **own,
            NUM_KV_HEADS=heads, COMPRESS_BLOCK=size, STRIDE=geometry.compress_stride,
            K_WIDTH=widths[0], V_WIDTH=widths[1], K_UNITS=units[0], V_UNITS=units[1],
            BLOCK_B=settings["BLOCK_B"], BLOCK_UNITS=block_units,
            PROGRAMS_PER_TILE=programs_per_tile,
            K_BLOCK_DIM=block_dims[0], V_BLOCK_DIM=block_dims[1],
            DTYPE=_ROUNDED[k.dtype], ACC=accumulator(k.dtype), num_warps=settings["num_warps"],
        )  # fmt: skip

    raw, cmp = ((x.stride()[:3], y.stride()[:3]) for x, y in ((k, v), (k_cmp, v_cmp)))
    of_hidden = tuple((heads * units, 0, units) for units in hidden)
    strides = (k_weight.stride(0), v_weight.stride(0))
    outputs = of_hidden if is_mlp else cmp
    first = launch(raw, outputs, strides, k.shape[1], size, (dk, dv), hidden, True, not is_mlp)
    if not is_mlp:
        return first, None, ()
    strides = (down[0].stride(0), down[2].stride(0))
    last = launch(of_hidden, cmp, strides, 1, 1, hidden, (dk, dv), False, True)
    return first, last, tuple((splits * batch, 1, heads, units) for units in hidden)
