"""Compress the blocks that a step completes, those of many sequences at once: an MLP, or the mean.

A row is a head of a sequence. A program owns BLOCK_UNITS rows of W of one tensor, k or v, with
rotary both rows of BLOCK_UNITS / 2 pairs, and every PROGRAMS_PER_TILE-th group of BLOCK_ROWS rows
with a complete block. So W is read once per group, and matrix units multiply it.

The tokens of a block are divided between SPLITS programs, whose sums the second layer adds: the
first layer has 2 MB of weights in bf16 for k with D = 128 and l = 32, and all multiprocessors read
them at once. Inputs and positions are multiplied by W without rounding, since they have its dtype,
and hidden units as the sum of two numbers of this dtype. Sums, hidden units and the rotation are
fp32; the result is rounded once. For the mean, a program owns all D units of a sequence.

Where this is faster than :mod:`compress` says benchmarks/results/h200/compress_rows.json.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nsa_backend_triton.decode.codes import encode, store_scale
from nsa_backend_triton.decode.walk import clamp_index


@triton.jit
def _two_pages(
    table, stride_x, first_token, page_size, columns, num_pages, head, row_valid,
    TWO_PAGES: tl.constexpr,
):  # fmt: skip
    """Return where the tokens of a block lie, as :func:`_token_offsets` takes it.

    The last of the three is how many tokens lie in the first page.
    """
    stride_xp, stride_xr, stride_xh = stride_x
    row, page_column = first_token % page_size, first_token // page_size % columns
    begin, begin_next, rest = head, head, page_size - row
    if TWO_PAGES:
        page = tl.load(table + page_column, mask=row_valid, other=0)
        begin = clamp_index(page, num_pages).to(tl.int64) * stride_xp
        begin += row.to(tl.int64) * stride_xr + head * stride_xh
        page = tl.load(table + (page_column + 1) % columns, mask=row_valid, other=0)
        begin_next = clamp_index(page, num_pages).to(tl.int64) * stride_xp
        begin_next += head * stride_xh - rest.to(tl.int64) * stride_xr
    return begin, begin_next, rest


@triton.jit
def _token_offsets(
    token, place, table, stride_x, first_token, page_size, columns, num_pages, head, row_valid,
    TWO_PAGES: tl.constexpr,
):  # fmt: skip
    """Return the offsets [rows] of token ``token`` of a block.

    TWO_PAGES: a block lies in at most two pages. No offset depends on a load then, so that loads
    of tokens overlap.
    """
    stride_xp, stride_xr, stride_xh = stride_x
    if TWO_PAGES:
        begin, begin_next, rest = place
        offs = tl.where(token < rest, begin, begin_next) + tl.cast(token, tl.int64) * stride_xr
    else:
        row = first_token + token
        page = tl.load(table + row // page_size % columns, mask=row_valid, other=0)
        offs = clamp_index(page, num_pages).to(tl.int64) * stride_xp
        offs += (row % page_size).to(tl.int64) * stride_xr + head * stride_xh
    return offs


@triton.jit
def _mean(
    X, table, stride_x, first_token, page_size, columns, num_pages, head, row_valid, unit,
    unit_valid, TWO_PAGES: tl.constexpr, TOKENS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Return the mean [rows, units] of TOKENS tokens; see :func:`_products`."""
    place = _two_pages(
        table, stride_x, first_token, page_size, columns, num_pages, head, row_valid, TWO_PAGES
    )
    mask = row_valid[:, None] & unit_valid[None, :]
    total = tl.zeros([head.shape[0], unit.shape[0]], ACC)
    for token in tl.range(TOKENS, loop_unroll_factor=4):
        offs = _token_offsets(
            token, place, table, stride_x, first_token, page_size, columns, num_pages, head,
            row_valid, TWO_PAGES,
        )  # fmt: skip
        total += tl.load(X + offs[:, None] + unit[None, :], mask=mask, other=0.0).to(ACC)
    return total / TOKENS


@triton.jit
def _add_product(products, w, x, ACC: tl.constexpr):
    """Return products + w x^T; x in ACC is multiplied as the sum of two numbers of w's dtype."""
    high = x.to(w.dtype)
    if x.dtype != w.dtype:
        low = tl.trans((x.to(ACC) - high.to(ACC)).to(w.dtype))
        products = tl.dot(w, low, products, input_precision="ieee", out_dtype=ACC)
    return tl.dot(w, tl.trans(high), products, input_precision="ieee", out_dtype=ACC)


@triton.jit
def _products(
    X, table, POSITION, WEIGHT, BIAS, stride_x, stride_w, num_runs, run, first_token, page_size,
    columns, num_pages, head, row_valid, unit, unit_valid, split, FIRST: tl.constexpr,
    TWO_PAGES: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_DIM: tl.constexpr, DTYPE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Return W x + b [rows, units]; a row is a head of a run.

    FIRST: x are the tokens of ``split`` among the TOKENS tokens from ``first_token`` on, in the
    pages of ``table``, which wraps around, and their positions are added; only split 0 adds b.
    Otherwise x is the GELU of the sums of SPLITS pages, of which ``run`` is the first. Weights are
    rounded to DTYPE.
    """
    stride_xp, _, stride_xh = stride_x
    products = tl.zeros([unit.shape[0], head.shape[0]], ACC)
    if FIRST:
        SPLIT_TOKENS: tl.constexpr = (TOKENS + SPLITS - 1) // SPLITS
        place = _two_pages(
            table, stride_x, first_token, page_size, columns, num_pages, head, row_valid, TWO_PAGES
        )
        for i in tl.range(SPLIT_TOKENS):
            token = split * SPLIT_TOKENS + i
            offs = _token_offsets(
                token, place, table, stride_x, first_token, page_size, columns, num_pages, head,
                row_valid, TWO_PAGES,
            )  # fmt: skip
            for first_column in tl.static_range(0, WIDTH, BLOCK_DIM):
                column = first_column + tl.arange(0, BLOCK_DIM)
                column_valid = (column < WIDTH) & (token < TOKENS)
                weight = token * WIDTH + column
                w = tl.load(
                    WEIGHT + unit[:, None] * stride_w + weight[None, :],
                    mask=unit_valid[:, None] & column_valid[None, :],
                    other=0.0,
                ).to(DTYPE)
                mask = row_valid[:, None] & column_valid[None, :]
                x = tl.load(X + offs[:, None] + column[None, :], mask=mask, other=0.0)
                products = _add_product(products, w, x, ACC)
                position = tl.load(POSITION + weight, mask=column_valid, other=0.0)
                position = tl.broadcast_to(position[None, :], [head.shape[0], BLOCK_DIM])
                products = _add_product(products, w, position, ACC)
    else:
        for first_column in range(0, WIDTH, BLOCK_DIM):
            column = first_column + tl.arange(0, BLOCK_DIM)
            column_valid = column < WIDTH
            w = tl.load(
                WEIGHT + unit[:, None] * stride_w + column[None, :],
                mask=unit_valid[:, None] & column_valid[None, :],
                other=0.0,
            ).to(DTYPE)
            mask = row_valid[:, None] & column_valid[None, :]
            x = tl.zeros([head.shape[0], BLOCK_DIM], ACC)
            for other in tl.static_range(SPLITS):
                offs = (run + other * num_runs).to(tl.int64) * stride_xp + head * stride_xh
                x += tl.load(X + offs[:, None] + column[None, :], mask=mask, other=0.0)
            x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
            products = _add_product(products, w, x, ACC)
    bias = tl.load(BIAS + unit, mask=unit_valid, other=0.0).to(ACC)
    return tl.trans(products + tl.where(split == 0, bias, 0.0)[:, None])


@triton.jit
def _compress_units(
    X, table, POSITION, WEIGHT, BIAS, OUT, SCALES, COS, SIN,
    stride_x, stride_w, stride_out, stride_scales, num_runs, run, first_token, page_size, columns,
    num_pages, out_page, out_row, head, row_valid, out_valid, position, tile, split,
    IS_V: tl.constexpr,
    FIRST: tl.constexpr, LAST: tl.constexpr, MEAN: tl.constexpr, ROTATE: tl.constexpr,
    TWO_PAGES: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr, UNITS: tl.constexpr,
    BLOCK_UNITS: tl.constexpr, SPLITS: tl.constexpr, BLOCK_DIM: tl.constexpr,
    DTYPE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Write a tile of units of each row to row ``out_row`` of page ``out_page`` of OUT, if valid.

    ROTATE: a tile has pairs of units, first the first ones of all pairs, then the second ones.
    """
    PARTS: tl.constexpr = 2 if ROTATE else 1
    OWNED: tl.constexpr = UNITS // PARTS
    BLOCK_OWNED: tl.constexpr = BLOCK_UNITS // PARTS
    index = tl.arange(0, BLOCK_UNITS)
    owned = tile * BLOCK_OWNED + index % BLOCK_OWNED
    unit, unit_valid = owned + index // BLOCK_OWNED * OWNED, owned < OWNED
    if MEAN:
        y = _mean(
            X, table, stride_x, first_token, page_size, columns, num_pages, head, row_valid, unit,
            unit_valid, TWO_PAGES, TOKENS, ACC,
        )  # fmt: skip
    else:
        y = _products(
            X, table, POSITION, WEIGHT, BIAS, stride_x, stride_w, num_runs, run, first_token,
            page_size, columns, num_pages, head, row_valid, unit, unit_valid, split,
            FIRST, TWO_PAGES, TOKENS, WIDTH, SPLITS, BLOCK_DIM, DTYPE, ACC,
        )  # fmt: skip
    stride_outp, stride_outr, stride_outh = stride_out
    offs = out_page.to(tl.int64) * stride_outp + out_row.to(tl.int64) * stride_outr
    offs += head * stride_outh
    OUT_DTYPE: tl.constexpr = OUT.dtype.element_ty
    scale = store_scale(SCALES, out_page, stride_scales, head, out_valid, IS_V, OUT_DTYPE)
    if ROTATE:
        pair = tile * BLOCK_OWNED + tl.arange(0, BLOCK_OWNED)
        y, y2 = tl.split(tl.permute(tl.reshape(y, [head.shape[0], 2, BLOCK_OWNED]), [0, 2, 1]))
        angle = position.to(tl.int64)[:, None] * OWNED + pair[None, :]
        mask = out_valid[:, None] & (pair < OWNED)[None, :]
        cos = tl.load(COS + angle, mask=mask, other=0.0)
        sin = tl.load(SIN + angle, mask=mask, other=0.0)
        rotated = encode((y * cos - y2 * sin).to(DTYPE), scale[:, None], OUT_DTYPE)
        rotated2 = encode((y2 * cos + y * sin).to(DTYPE), scale[:, None], OUT_DTYPE)
        out = OUT + offs[:, None] + pair[None, :]
        tl.store(out, rotated, mask=mask)
        tl.store(out + OWNED, rotated2, mask=mask)
    else:
        if LAST:
            y = encode(y.to(DTYPE), scale[:, None], OUT_DTYPE)
        mask = out_valid[:, None] & unit_valid[None, :]
        tl.store(OUT + offs[:, None] + unit[None, :], y, mask=mask)


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
def decode_compress_rows(
    K, V, K_POSITION, V_POSITION, K_WEIGHT, V_WEIGHT, K_BIAS, V_BIAS, K_OUT, V_OUT, COS, SIN,
    STARTS, LENGTHS, SEQUENCES, RAW_TABLE, CMP_TABLE, SCALES,
    stride_k, stride_v, stride_k_out, stride_v_out,
    stride_k_weight, stride_v_weight, stride_raw_table, stride_cmp_table, stride_scales,
    num_runs, raw_page_size, raw_columns, cmp_page_size, num_blocks, num_positions,
    num_sequences, num_raw_pages, num_cmp_pages,
    FIRST: tl.constexpr, LAST: tl.constexpr, MEAN: tl.constexpr, ROPE: tl.constexpr,
    RAGGED: tl.constexpr, TWO_PAGES: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, COMPRESS_BLOCK: tl.constexpr, STRIDE: tl.constexpr,
    K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, K_UNITS: tl.constexpr, V_UNITS: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_UNITS: tl.constexpr, PROGRAMS_PER_TILE: tl.constexpr,
    SPLITS: tl.constexpr, K_BLOCK_DIM: tl.constexpr, V_BLOCK_DIM: tl.constexpr,
    DTYPE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Compute one layer of an MLP of the block that each run completes; MEAN: phi is the mean.

    FIRST: K and V are the pages of tokens; otherwise, they are sums that make the hidden units.
    LAST: K_OUT and V_OUT are pages of compressed tokens; otherwise, they are the sums. A run has
    SPLITS pages of sums, of one row, num_runs pages apart.
    """
    WRITE_SPLITS: tl.constexpr = 1 if LAST else SPLITS
    K_TILES: tl.constexpr = (K_UNITS + BLOCK_UNITS - 1) // BLOCK_UNITS
    turn, task = tl.program_id(0) % PROGRAMS_PER_TILE, tl.program_id(0) // PROGRAMS_PER_TILE
    tile, split = task // WRITE_SPLITS, task % WRITE_SPLITS
    for first_run in range(0, num_runs, BLOCK_B):
        runs = first_run + tl.arange(0, BLOCK_B)
        start = tl.load(STARTS + runs, mask=runs < num_runs, other=0)
        length = tl.load(LENGTHS + runs, mask=runs < num_runs, other=0)
        blocks = (tl.maximum(start, COMPRESS_BLOCK - STRIDE) - (COMPRESS_BLOCK - STRIDE)) // STRIDE
        complete = (start >= 0) & (blocks < num_blocks)
        complete = complete & (blocks * STRIDE + COMPRESS_BLOCK <= length)
        rank = tl.cumsum(complete.to(tl.int32), 0)
        num_rows = tl.sum(complete.to(tl.int32), 0) * NUM_KV_HEADS
        for first_row in range(turn * BLOCK_ROWS, num_rows, PROGRAMS_PER_TILE * BLOCK_ROWS):
            row = first_row + tl.arange(0, BLOCK_ROWS)
            row_valid = row < num_rows
            head = (row % NUM_KV_HEADS).to(tl.int64)  # the strides of a head-major pool are large
            is_own = complete[None, :] & (rank[None, :] == (row // NUM_KV_HEADS + 1)[:, None])
            run = tl.sum(tl.where(is_own, runs[None, :], 0), 1)
            block = tl.sum(tl.where(is_own, blocks[None, :], 0), 1)
            out_page, out_row, out_valid = run + split * num_runs, tl.zeros_like(run), row_valid
            sequence = run
            if RAGGED:
                sequence = tl.load(SEQUENCES + run, mask=row_valid, other=0)
                out_valid = out_valid & (sequence >= 0) & (sequence < num_sequences)
                sequence = clamp_index(sequence, num_sequences)
            if LAST:
                cmp_table = CMP_TABLE + sequence.to(tl.int64) * stride_cmp_table
                out_page = tl.load(cmp_table + block // cmp_page_size, mask=row_valid, other=0)
                out_valid = out_valid & (out_page >= 0) & (out_page < num_cmp_pages)
                out_row = block % cmp_page_size
            raw_table = RAW_TABLE + sequence.to(tl.int64) * stride_raw_table
            first_token = block * STRIDE
            position = tl.minimum(first_token, num_positions - 1)
            if tile < K_TILES:
                _compress_units(
                    K, raw_table, K_POSITION, K_WEIGHT, K_BIAS, K_OUT, SCALES, COS, SIN,
                    stride_k, stride_k_weight, stride_k_out, stride_scales, num_runs, run,
                    first_token, raw_page_size, raw_columns, num_raw_pages, out_page, out_row,
                    head, row_valid, out_valid, position, tile, split, False,
                    FIRST, LAST, MEAN, ROPE, TWO_PAGES, COMPRESS_BLOCK, K_WIDTH, K_UNITS,
                    BLOCK_UNITS, SPLITS, K_BLOCK_DIM, DTYPE, ACC,
                )  # fmt: skip
            else:
                _compress_units(
                    V, raw_table, V_POSITION, V_WEIGHT, V_BIAS, V_OUT, SCALES, COS, SIN,
                    stride_v, stride_v_weight, stride_v_out, stride_scales, num_runs, run,
                    first_token, raw_page_size, raw_columns, num_raw_pages, out_page, out_row,
                    head, row_valid, out_valid, position, tile - K_TILES, split, True,
                    FIRST, LAST, MEAN, False, TWO_PAGES, COMPRESS_BLOCK, V_WIDTH, V_UNITS,
                    BLOCK_UNITS, SPLITS, V_BLOCK_DIM, DTYPE, ACC,
                )  # fmt: skip
