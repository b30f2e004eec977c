"""The gates of a step, sigmoid(x W^T + b), in one launch.

PyTorch would cast three tensors, multiply, and take the sigmoid in launches of their own.

A program owns BLOCK_T tokens and BLOCK_GATES rows of W and walks the columns BLOCK_DIM at a time.
It accumulates each product of a tile [BLOCK_T, BLOCK_GATES, BLOCK_DIM] in registers and adds over
the columns once, at the end. Multiply-adds are fp32, as in every other computation of gates; a
matrix unit would round the sums differently. It reads x once per BLOCK_GATES rows of W, and W once
per BLOCK_T tokens from L2; a gate takes 2 dim operations. The limit is the latency of a tile's
loads, dim / BLOCK_DIM times.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_backend_triton.decode.launch import cdiv, power
from nsa_backend_triton.host import configs
from nsa_backend_triton.host.constexprs import accumulator
from nsa_backend_triton.host.device import architecture
from nsa_backend_triton.host.launch_cache import Launch, cached_by_metadata
from nsa_core.contract import DecodeCall


@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def decode_gates(
    X, WEIGHT, BIAS, GATES, stride_x, stride_w, dim, num_rows, num_tokens,
    NUM_GATES: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_GATES: tl.constexpr,
    BLOCK_DIM: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Write contiguous gates [num_rows, NUM_GATES] of x [B, num_tokens, dim]."""
    TILES: tl.constexpr = (NUM_GATES + BLOCK_GATES - 1) // BLOCK_GATES
    program = tl.program_id(0)
    row = program // TILES * BLOCK_T + tl.arange(0, BLOCK_T)
    gate = program % TILES * BLOCK_GATES + tl.arange(0, BLOCK_GATES)
    row_valid, gate_valid = row < num_rows, gate < NUM_GATES
    stride_xb, stride_xt = stride_x
    seq, t = tl.cast(row // num_tokens, tl.int64), tl.cast(row % num_tokens, tl.int64)
    x_rows, w_rows = X + seq * stride_xb + t * stride_xt, WEIGHT + gate * stride_w
    products = tl.zeros([BLOCK_T, BLOCK_GATES, BLOCK_DIM], ACC)
    for first_column in range(0, dim, BLOCK_DIM):
        column = first_column + tl.arange(0, BLOCK_DIM)
        column_valid = column < dim
        x = tl.load(
            x_rows[:, None] + column[None, :],
            mask=row_valid[:, None] & column_valid[None, :],
            other=0.0,
        ).to(ACC)
        w = tl.load(
            w_rows[:, None] + column[None, :],
            mask=gate_valid[:, None] & column_valid[None, :],
            other=0.0,
        ).to(ACC)
        products += x[:, None, :] * w[None, :, :]
    sums = tl.sum(products, 2) + tl.load(BIAS + gate, mask=gate_valid, other=0.0).to(ACC)[None, :]
    out = GATES + row.to(tl.int64)[:, None] * NUM_GATES + gate[None, :]
    tl.store(out, 1.0 / (1.0 + tl.exp(-sums)), mask=row_valid[:, None] & gate_valid[None, :])


def gates(
    x: Tensor,  # [B, m, dim]
    weight: Tensor,  # [3 Hq, dim], rows head-major
    bias: Tensor,  # [3 Hq]
    *,
    call: DecodeCall,  # part of the form's signature; gates do not read the cache
) -> Tensor:
    """Return sigmoid(x W^T + b) [B, m, Hq, 3] in fp32, for fp64 x in fp64."""
    x, weight, bias = [  # a generator takes twice the time, at every step
        t if t.is_contiguous() or t.stride(-1) == 1 else t.contiguous() for t in (x, weight, bias)
    ]
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    out = torch.empty((*x.shape[:2], weight.shape[0] // 3, 3), dtype=dtype, device=x.device)
    _launch(x, weight, bias)(x, weight, bias, out)
    return out


@cached_by_metadata
def _launch(x: Tensor, weight: Tensor, bias: Tensor) -> Launch:
    (batch, num_tokens, dim), num_gates = x.shape, weight.shape[0]
    settings = configs.pick("decode_gates", architecture(x.device))
    block_t = min(settings["BLOCK_T"], power(batch * num_tokens))
    programs = cdiv(batch * num_tokens, block_t) * cdiv(num_gates, settings["BLOCK_GATES"])
    block_dim = min(settings["TILE_PRODUCTS"] // (block_t * settings["BLOCK_GATES"]), power(dim))
    return Launch(
        decode_gates, (programs,),
        x.stride()[:2], weight.stride(0), dim, batch * num_tokens, num_tokens,
        NUM_GATES=num_gates, BLOCK_T=block_t, BLOCK_GATES=settings["BLOCK_GATES"],
        BLOCK_DIM=block_dim, ACC=accumulator(x.dtype), num_warps=settings["num_warps"],
    )  # fmt: skip
