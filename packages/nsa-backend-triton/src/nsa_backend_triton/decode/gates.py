"""Gates of a step: sigmoid(x W^T + b), one launch where PyTorch casts three tensors, multiplies,
and takes the sigmoid.

A program owns TOKENS tokens and OUTPUTS rows of W, COLUMNS of them at a time, and keeps a sum for
each product of a tile [TOKENS, OUTPUTS, COLUMNS] in registers: rows are added up once, at the end.
Multiply-adds in fp32, as gates are computed everywhere: a matrix unit's sums would be rounded
otherwise. Bytes: x once for every OUTPUTS rows of W, W once for every TOKENS tokens, from L2;
operations: 2 dim for a gate. Latency binds: of a tile's loads, dim / COLUMNS times.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa_backend_triton.decode.launch import cdiv, power
from nsa_backend_triton.host import configs
from nsa_backend_triton.host.launch_cache import Launch, remembered
from nsa_backend_triton.host.sequences import accumulator, architecture
from nsa_core.contract import DecodeCall


@triton.jit(do_not_specialize=["tokens", "rows"])
def decode_gates(
    X, WEIGHT, BIAS, GATES, x_seq: tl.int64, x_row: tl.int64, w_row, dim, tokens, rows,
    GATES_OF_TOKEN: tl.constexpr, TOKENS: tl.constexpr, OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """gates [tokens, GATES_OF_TOKEN], contiguous; x [sequences, rows, dim] by strides."""
    TILES: tl.constexpr = (GATES_OF_TOKEN + OUTPUTS - 1) // OUTPUTS
    program = tl.program_id(0)
    token = program // TILES * TOKENS + tl.arange(0, TOKENS)
    output = program % TILES * OUTPUTS + tl.arange(0, OUTPUTS)
    some, real = token < tokens, output < GATES_OF_TOKEN
    of_x, of_w = X + token // rows * x_seq + token % rows * x_row, WEIGHT + output * w_row
    products = tl.zeros([TOKENS, OUTPUTS, COLUMNS], ACC)
    for first in range(0, dim, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        inside = column < dim
        x = tl.load(
            of_x[:, None] + column[None, :], mask=some[:, None] & inside[None, :], other=0.0
        ).to(ACC)
        w = tl.load(
            of_w[:, None] + column[None, :], mask=real[:, None] & inside[None, :], other=0.0
        ).to(ACC)
        products += x[:, None, :] * w[None, :, :]
    sums = tl.sum(products, 2) + tl.load(BIAS + output, mask=real, other=0.0).to(ACC)[None, :]
    to = GATES + token.to(tl.int64)[:, None] * GATES_OF_TOKEN + output[None, :]
    tl.store(to, 1.0 / (1.0 + tl.exp(-sums)), mask=some[:, None] & real[None, :])


def gates(
    x: Tensor,  # [B, m, dim]
    weight: Tensor,  # [3 Hq, dim], rows head-major
    bias: Tensor,  # [3 Hq]
    *,
    call: DecodeCall,  # not asked: gates know no cache
) -> Tensor:
    """sigmoid(x W^T + b) [B, m, Hq, 3] in fp32, fp64 for fp64 x."""
    x, weight = (t if t.stride(-1) == 1 else t.contiguous() for t in (x, weight))
    kept = torch.float64 if x.dtype == torch.float64 else torch.float32
    out = torch.empty((*x.shape[:2], weight.shape[0] // 3, 3), dtype=kept, device=x.device)
    _launch(x, weight, bias)(x, weight, bias, out)
    return out


@remembered
def _launch(x: Tensor, weight: Tensor, bias: Tensor) -> Launch:
    (batch, rows, dim), count = x.shape, weight.shape[0]
    chosen = configs.pick("decode_gates", architecture(x.device))
    together = min(chosen["TOKENS"], power(batch * rows))
    programs = cdiv(batch * rows, together) * cdiv(count, chosen["OUTPUTS"])
    columns = min(chosen["PRODUCTS"] // (together * chosen["OUTPUTS"]), power(dim))
    return Launch(
        decode_gates, (programs,), x.stride(0), x.stride(1), weight.stride(0), dim, batch * rows,
        rows,
        GATES_OF_TOKEN=count, TOKENS=together, OUTPUTS=chosen["OUTPUTS"],
        COLUMNS=columns, ACC=accumulator(x.dtype), num_warps=chosen["num_warps"],
    )  # fmt: skip
