"""Quantized keys and values: codes in pages, with one scale a page and kv head.

    code = round(x / scale), to nearest even, at most 448 (e4m3) or 127 (int8)      x = code * scale

e4m3 is written and read as bytes, by integer arithmetic: no GPU before sm_89 has e4m3, and shared
memory does not transpose bytes. Every code is exact in bf16 and in fp16.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from nsa_core.contract import DecodeCall


@triton.jit
def _encode_e4m3(x):
    """Return x, at most 448 in magnitude, as the bytes of e4m3."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # The carry of the rounded mantissa moves the exponent, whose bias goes from 127 to 7.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 codes are multiples of 2^-9, which is the distance of numbers around 2^14.
    subnormal = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0x3C800000, subnormal, normal)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def encode(x, scale, dtype: tl.constexpr):
    """Return x as elements of pages: codes if ``dtype`` is one of codes, otherwise rounded."""
    if dtype == tl.uint8 or dtype == tl.int8:
        limit: tl.constexpr = 448.0 if dtype == tl.uint8 else 127.0
        x = tl.div_rn(x.to(tl.float32), scale)
        x = tl.where(x == x, tl.minimum(tl.maximum(x, -limit), limit), 0.0)
    if dtype == tl.uint8:
        code = _encode_e4m3(x)
    elif dtype == tl.int8:  # 1.5 * 2^23: to the nearest integer
        code = ((x + 12582912.0) - 12582912.0).to(tl.int8)
    else:
        code = x.to(dtype)
    return code


@triton.jit
def as_pairs(X):
    """Return a pointer to codes as one to pairs of them."""
    return X.to(tl.pointer_type(tl.uint16), bitcast=True)


@triton.jit
def _decode_low(x, DTYPE: tl.constexpr, IS_INT: tl.constexpr):
    """Return the codes in the low bytes of uint16 as numbers, without their scale.

    Operations on 16 bits run on two codes at once.
    """
    IS_FP16: tl.constexpr = tl.float16 == DTYPE
    KIND: tl.constexpr = tl.float16 if IS_FP16 else tl.bfloat16
    if IS_INT:  # the unit of the last place is 1 at ONE: ONE + low bits - (ONE + 128 if negative)
        ONE: tl.constexpr = 0x6400 if IS_FP16 else 0x4300
        low = ((x & 0x7F) | ONE).to(KIND, bitcast=True)
        number = low - ((x & 0x80) | ONE).to(KIND, bitcast=True)
    else:  # sign and magnitude go to their places; 2^8 or 2^120 is the difference of the biases
        SHIFT: tl.constexpr = 7 if IS_FP16 else 4
        FACTOR: tl.constexpr = 256.0 if IS_FP16 else 1.329227995784916e36
        number = (((x & 0x7F) << SHIFT) | ((x & 0x80) << 8)).to(KIND, bitcast=True)
        number *= tl.full([], FACTOR, tl.float32).to(KIND)
    return number.to(DTYPE)


@triton.jit
def decode(pairs, DTYPE: tl.constexpr, IS_INT: tl.constexpr):
    """Return the even and the odd ones of pairs of codes as numbers, without their scale."""
    return _decode_low(pairs, DTYPE, IS_INT), _decode_low(pairs >> 8, DTYPE, IS_INT)


@triton.jit
def load_scales(SCALES, page, stride_scales, kv_head, valid):
    """Return the scales of the keys, and of the values, of ``page``; 0 where not ``valid``."""
    scales = SCALES + page.to(tl.int64) * stride_scales + kv_head * 2
    return tl.load(scales, mask=valid, other=0.0), tl.load(scales + 1, mask=valid, other=0.0)


@triton.jit
def store_scale(SCALES, page, stride_scales, head, valid, IS_V: tl.constexpr, dtype: tl.constexpr):
    """Return the scales of heads of ``page`` to :func:`encode` with; 1 if there are no codes."""
    if dtype == tl.uint8 or dtype == tl.int8:
        offset = tl.cast(page, tl.int64) * stride_scales + head * 2 + IS_V
        scale = tl.load(SCALES + offset, mask=valid, other=1.0)
    else:
        scale = tl.full(head.shape, 1.0, tl.float32)
    return scale


def scales_of(call: DecodeCall) -> tuple[Tensor, Tensor, Tensor]:
    """Return the scales of cmp, sel and win; placeholders if the pages are not quantized."""
    return call.scales or (call.starts, call.starts, call.starts)


def has_page_scales(call: DecodeCall) -> bool:
    """Return whether pages have scales of their own."""
    return call.scales is not None and any(x.stride(0) for x in call.scales)
