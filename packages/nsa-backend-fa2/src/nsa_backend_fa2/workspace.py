"""Peak bytes of forward, or of forward and backward, beyond the inputs, what the library allocates inside included.

Backward counts o and lse, which live until then. A Request that does not say its size counts as one token.
"""

from __future__ import annotations

import dataclasses

import torch

from nsa_backend_fa2.operands import width_of
from nsa_backend_fa2.sel import keys_per_token, tokens_at_once
from nsa_core.contract import Request

_ITEM, _STAT, _INDEX = 2, 4, 8  # bytes of bf16 and fp16, of fp32, of int64


def _up(count: int, step: int) -> int:
    return -(-count // step) * step


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """The request in numbers; ``batch`` is 1 when packed, ``width`` that of the library call's heads."""

    batch: int
    length: int
    heads: int
    groups: int
    Dk: int
    Dv: int
    width: int

    @classmethod
    def of(cls, request: Request) -> _Sizes:
        batch = 1 if request.varlen else (1 if request.batch is None else request.batch)
        length = 1 if request.seq_len is None else request.seq_len
        width = width_of(request.head_dim, request.v_head_dim)
        return cls(batch, length, request.n_heads, request.n_kv_heads, request.head_dim, request.v_head_dim, width)

    @property
    def tokens(self) -> int:
        return self.batch * self.length

    @property
    def outputs(self) -> int:
        """o and lse."""
        return self.tokens * self.heads * (self.Dv * _ITEM + _STAT)

    def padded(self, rows: int, heads: int, own: int) -> int:
        """The copy of an operand [rows, heads, own] that is narrower than the call."""
        return rows * heads * self.width * _ITEM if own != self.width else 0


def _multiprocessors() -> int:
    return int(torch.cuda.get_device_properties().multi_processor_count) if torch.cuda.is_available() else 1


def _library_backward(
    batch: int, rows: int, heads: int, keys: int, kv_heads: int, width: int, deterministic: bool
) -> int:
    """dq, dk, dv; dq in fp32 and the rows' sums; dk, dv per query head, before they are summed over the group."""
    wide = _up(width, 32 if width <= 128 else 64)
    grads = width * (rows * heads + 2 * keys * kv_heads) * _ITEM * batch
    expanded = 2 * batch * keys * heads * width * _ITEM if heads != kv_heads else 0
    # One fp32 dq per thread block of a row and head, where the order of adding must not matter.
    splits = -(-_multiprocessors() // max(1, batch * heads)) if deterministic else 1
    return grads + expanded + batch * _up(rows, 128) * heads * (splits * wide + 1) * _STAT


def win(request: Request) -> int:
    """Outputs, padded copies of operands, and the library's own."""
    s = _Sizes.of(request)
    fits = s.padded(s.tokens, s.heads, s.Dk) + s.padded(s.tokens, s.groups, s.Dk) + s.padded(s.tokens, s.groups, s.Dv)
    forward = fits + s.outputs + s.padded(s.tokens, s.heads, s.Dv)
    if not request.needs_grad:
        return forward
    fits += 2 * s.padded(s.tokens, s.heads, s.Dv)
    inside = _library_backward(s.batch, s.length, s.heads, s.length, s.groups, s.width, request.deterministic)
    return max(forward, s.outputs + fits + inside)


def cmp(request: Request) -> int:
    """As :func:`win` for the folded call, and the folded copies."""
    s = _Sizes.of(request)
    geometry = request.geometry
    runs = geometry.max_compressed(s.length) if request.varlen else geometry.num_compressed(s.length)
    if runs == 0:
        return s.outputs + (s.tokens * s.heads * s.Dk * _ITEM if request.needs_grad else 0)
    if s.batch == 1 and not request.varlen:
        return _residues(s, runs, request)
    rows, heads = s.batch * runs, s.heads * geometry.compress_stride
    stats, unit = rows * heads * _STAT, rows * heads * _ITEM  # a folded lse, and a folded tensor of width 1
    keys = s.padded(rows, s.groups, s.Dk) + s.padded(rows, s.groups, s.Dv)
    index = _INDEX * (4 * s.length + 4 * runs * geometry.compress_stride) if request.varlen else 0
    fold_q, out = unit * s.Dk + s.padded(rows, heads, s.Dk), unit * s.width
    forward = index + max(keys + fold_q + out + stats, out + 2 * stats + s.outputs)
    if not request.needs_grad:
        return forward
    operands = fold_q + 2 * (unit * s.Dv + s.padded(rows, heads, s.Dv)) + 2 * stats + keys
    inside = _library_backward(s.batch, runs, heads, runs, s.groups, s.width, request.deterministic)
    return max(forward, index + s.outputs + operands + inside)


def _residues(s: _Sizes, runs: int, request: Request) -> int:
    """cmp of one sequence, which copies no operand that has the call's width."""
    places = request.geometry.compress_stride
    tokens = places * max(0, (s.length - request.geometry.compress_block_size + 1) // places)
    stats = tokens * s.heads * _STAT
    keys = s.padded(runs, s.groups, s.Dk) + s.padded(runs, s.groups, s.Dv)
    fit_q, fit_o = s.padded(tokens, s.heads, s.Dk), s.padded(tokens, s.heads, s.Dv)
    forward = s.outputs + keys + fit_q + tokens * s.heads * s.width * _ITEM + stats
    if not request.needs_grad:
        return forward
    rows = tokens // places
    inside = _library_backward(places, rows, s.heads, rows, s.groups, s.width, request.deterministic)
    own = s.tokens * s.heads * s.Dk * _ITEM + runs * s.groups * (s.Dk + s.Dv) * _STAT
    return max(forward, s.outputs + own + keys + fit_q + 2 * fit_o + stats + inside)


def sel(request: Request) -> int:
    """Outputs, the fp32 sums of dk and dv, and one chunk of gathered keys."""
    s = _Sizes.of(request)
    keys = keys_per_token(request.geometry, request.geometry.num_selected_blocks, max(1, s.length))
    tokens = min(s.tokens, tokens_at_once(s.groups, keys))
    gathered, rows = tokens * s.groups * keys, tokens * s.heads
    held = gathered * (s.Dk + s.Dv) * _ITEM + s.padded(gathered, 1, s.Dk) + s.padded(gathered, 1, s.Dv)
    places = 2 * s.tokens * _INDEX
    stats = s.tokens * s.heads * _STAT
    forward = s.outputs + stats + places + held + gathered * _INDEX + rows * 2 * s.width * _ITEM
    if not request.needs_grad:
        return forward
    documents = tokens * s.groups
    # Each document has 128 rows of its own in the library's fp32 dq.
    spare = documents * 128 * _up(s.width, 32 if s.width <= 128 else 64) * _STAT
    grads = 2 * gathered * s.width * _ITEM
    library = held + grads + spare + rows * 4 * s.width * _ITEM
    adding = grads + gathered * (max(s.Dk, s.Dv) * _STAT + _INDEX)
    sums = (s.tokens * s.groups + 1) * (s.Dk + s.Dv) * _STAT
    whole = s.outputs + stats + places + s.tokens * s.heads * s.Dk * _ITEM + sums
    return max(forward, whole + gathered * _INDEX + max(library, adding))
