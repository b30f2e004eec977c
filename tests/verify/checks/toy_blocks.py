"""Kernels of sel with faults that show on blocks as callers of block_attention pass them."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from nsa_backend_sdpa import decode as decode_forms
from nsa_backend_sdpa import sel
from nsa_backend_sdpa.plugin import nsa_register_backends as sdpa
from nsa_core.contract import DecodeCall, SlotCall, SlotSpec
from nsa_core.packing import token_positions
from nsa_core.plan.registry import Registry
from nsa_verify.problems.combination import Combination


def subject(
    forward: str = "forward", backward: str = "backward", decode: str = "decode", **fields: bool
) -> Combination:
    """Return a combination whose backend for sel runs these functions of this file."""
    paths = (f"{__name__}:{name}" for name in (forward, backward, decode))
    slot = SlotSpec(*paths, **{"partial": True, **fields})
    spec = dataclasses.replace(sdpa(), name="toy", slots={"sel": slot})
    return Combination({"sel": "toy"}, registry=Registry(()).with_backend(spec))


forward, backward, decode = sel.forward, sel.backward, decode_forms.sel


def _current(q: Tensor, call: SlotCall) -> Tensor:
    """Return the block of each query, [S, 1, 1]."""
    if call.cu_seqlens is None:
        position = torch.arange(q.shape[-3]) + call.first_query
    else:
        position = token_positions(call.cu_seqlens, q.shape[-3], call.first_query).position
    return (position // call.geometry.select_block_size)[:, None, None]


def forward_reading_minus_one(q, k, v, blocks, *, call):
    return forward(q, k, v, torch.where(blocks == -1, 0, blocks), call=call)


def forward_reading_negative(q, k, v, blocks, *, call):
    return forward(q, k, v, blocks.clamp(min=0), call=call)


def forward_clamping_the_future(q, k, v, blocks, *, call):
    return forward(q, k, v, blocks.minimum(_current(q, call)), call=call)


def forward_with_16_bits(q, k, v, blocks, *, call):
    return forward(q, k, v, blocks.to(torch.int16), call=call)


def forward_without_the_first_block(q, k, v, blocks, *, call):
    return forward(q, k, v, blocks[..., 1:], call=call)


def forward_without_the_current_block(q, k, v, blocks, *, call):
    return forward(q, k, v, blocks.masked_fill(blocks == _current(q, call), -1), call=call)


def forward_with_the_current_block(q, k, v, blocks, *, call):
    own = _current(q, call).expand_as(blocks[..., :1]).to(blocks.dtype)
    return forward(q, k, v, torch.cat([blocks, own], -1), call=call)


def forward_at_the_start(q, k, v, blocks, *, call):
    return forward(q, k, v, blocks, call=dataclasses.replace(call, first_query=0))


def forward_counting_twice(q, k, v, blocks, *, call):
    o, lse = forward(q, k, v, blocks, call=call)
    valid = (blocks >= 0) & (blocks <= _current(q, call))
    twice = (valid & (blocks == blocks[..., -1:])).sum(-1) > 1  # [.., S, G]
    twice = twice.repeat_interleave(q.shape[-2] // k.shape[-2], -1)
    return o, lse + twice.transpose(-1, -2) * 0.01


def forward_with_one_list(q, k, v, blocks, *, call):
    return forward(q, k, v, blocks[..., :1, :].expand_as(blocks), call=call)


def forward_with_many_cut_off(q, k, v, blocks, *, call):
    return forward(q, k, v, blocks[..., :64], call=call)


def forward_without_zeros(q, k, v, blocks, *, call):
    o, lse = forward(q, k, v, blocks, call=call)
    return o + 1e-6 * torch.isinf(lse).transpose(-1, -2)[..., None].to(o.dtype), lse


def backward_with_16_bits(do, q, k, v, blocks, o, lse, *, call):
    return backward(do, q, k, v, blocks.to(torch.int16), o, lse, call=call)


def backward_at_the_start(do, q, k, v, blocks, o, lse, *, call):
    call = dataclasses.replace(call, first_query=0)
    return backward(do, q, k, v, blocks, o, lse, call=call)


def backward_reading_minus_one(do, q, k, v, blocks, o, lse, *, call):
    return backward(do, q, k, v, torch.where(blocks == -1, 0, blocks), o, lse, call=call)


def backward_with_one_list(do, q, k, v, blocks, o, lse, *, call):
    return backward(do, q, k, v, blocks[..., :1, :].expand_as(blocks), o, lse, call=call)


def decode_reading_minus_one(q, k, v, blocks, *, call: DecodeCall):
    return decode(q, k, v, torch.where(blocks == -1, 0, blocks), call=call)


def decode_with_16_bits(q, k, v, blocks, *, call: DecodeCall):
    return decode(q, k, v, blocks.to(torch.int16), call=call)


def decode_with_one_list(q, k, v, blocks, *, call: DecodeCall):
    return decode(q, k, v, blocks[..., :1, :].expand_as(blocks), call=call)


def decode_with_many_cut_off(q, k, v, blocks, *, call: DecodeCall):
    return decode(q, k, v, blocks[..., :64], call=call)


def decode_one_token_early(q, k, v, blocks, *, call: DecodeCall):
    earlier = (call.starts - 1).clamp(min=0)
    return decode(q, k, v, blocks, call=dataclasses.replace(call, starts=earlier))


def decode_without_the_newest(q, k, v, blocks, *, call: DecodeCall):
    fewer = (call.lengths - 1).clamp(min=0)
    return decode(q, k, v, blocks, call=dataclasses.replace(call, lengths=fewer))


def decode_in_the_first_pages(q, k, v, blocks, *, call: DecodeCall):
    table = torch.arange(call.tables.sel.numel(), dtype=torch.int32).view_as(call.tables.sel)
    tables = call.tables._replace(sel=table)
    return decode(q, k, v, blocks, call=dataclasses.replace(call, tables=tables))


def decode_with_written_padding(q, k, v, blocks, *, call: DecodeCall):
    o, lse = decode(q, k, v, blocks, call=call)
    return o + 1e-3 * torch.isinf(lse).transpose(1, 2)[..., None].to(o.dtype), lse


def decode_with_the_default_scale(q, k, v, blocks, *, call: DecodeCall):
    return decode(q, k, v, blocks, call=dataclasses.replace(call, scale=q.shape[-1] ** -0.5))
