"""Decode forms built on those of sdpa: correct and faulty fused forms, and faulty branches."""

from __future__ import annotations

import dataclasses
import itertools

import torch

from nsa_backend_sdpa import combine, decode
from nsa_backend_sdpa.plugin import nsa_register_backends as sdpa
from nsa_core.contract import FUSED, SLOTS, DecodeCall, SlotCall
from nsa_core.layer.rope import RopeTable, rotate
from nsa_core.plan.registry import Registry
from nsa_verify.problems.combination import Combination

_calls = itertools.count()


def subject(**forms: str) -> Combination:
    """Return sdpa with functions of this file as decode (win=...) or fused (step=...) forms."""
    slots = {
        slot: dataclasses.replace(spec, decode=f"{__name__}:{forms[slot]}")
        if slot in forms
        else spec
        for slot, spec in sdpa().slots.items()
    }
    fused = {form: f"{__name__}:{name}" for form, name in forms.items() if form in FUSED}
    spec = dataclasses.replace(sdpa(), name="toy", slots=slots, fused=fused)
    return Combination(dict.fromkeys(SLOTS, "toy"), registry=Registry(()).with_backend(spec))


def step(q, gates, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, *, call: DecodeCall):
    o_cmp, lse = decode.cmp(q, k_cmp, v_cmp, call=call)
    blocks = decode.select(q, k_cmp, lse, call=call)
    o_sel, _ = decode.sel(q, k_sel, v_sel, blocks, call=call)
    o_win, _ = decode.win(q, k_win, v_win, call=call)
    return combine.forward(
        gates, o_cmp, o_sel, o_win, call=SlotCall(call.geometry, call.scale)
    ), blocks


def step_with_fewer_blocks(*tensors, call: DecodeCall):
    o, blocks = step(*tensors, call=call)
    return o, blocks.masked_fill(blocks == blocks.amax(-1, keepdim=True), -1)


def step_with_swapped_gates(q, gates, *stores, call: DecodeCall):
    return step(q, gates[..., [0, 2, 1]].contiguous(), *stores, call=call)


def step_with_written_padding(*tensors, call: DecodeCall):
    o, blocks = step(*tensors, call=call)
    return o, blocks.clamp(min=0)


def append(
    q, k, v, raw, sel, win, *, rope, rotate_raw, call: DecodeCall, shift=0, extra=0, rotated=(1, 2)
):
    """Append all tokens of a step at once."""
    sequence, row = (
        (torch.arange(q.shape[1]) < (call.lengths - call.starts + extra)[:, None]).nonzero().T
    )
    token = call.starts.long()[sequence] + row
    angle = token + shift
    table = (
        None
        if rope is None
        else RopeTable(*(x[angle.clamp(max=len(x) - 1)][:, None] for x in rope))
    )
    rotated_stores = rotated if not rotate_raw else (0, *rotated)
    for i, (keys, values) in enumerate((raw, sel, win)):
        key, value = k[i][sequence, row], v[i][sequence, row]
        key = rotate(key, table) if table is not None and i in rotated_stores else key
        size, pages = keys.shape[1], (call.tables.raw, call.tables.sel, call.tables.win)[i]
        index = (pages[sequence, token // size % pages.shape[1]].long(), token % size)
        keys[index], values[index] = key, value
    out = q.clone()
    out[sequence, row] = q[sequence, row] if table is None else rotate(q[sequence, row], table)
    return out


def append_rotated_one_early(*tensors, **options):
    return append(*tensors, **options, shift=-1)


def append_with_padding(*tensors, **options):
    return append(*tensors, **options, extra=1)


def append_without_rotary_of_win(*tensors, **options):
    return append(*tensors, **options, rotated=(1,))


def append_with_swapped_values(q, k, v, *stores, **options):
    return append(q, k, (v[0], v[2], v[1]), *stores, **options)


def gates(x, weight, bias, *, call: DecodeCall):
    kind = torch.float64 if x.dtype == torch.float64 else torch.float32
    return (
        torch.nn.functional.linear(*(t.to(kind) for t in (x, weight, bias)))
        .sigmoid()
        .unflatten(-1, (-1, 3))
    )


def gates_without_bias(x, weight, bias, *, call: DecodeCall):
    return gates(x, weight, bias * 0, call=call)


def gates_with_bf16_sums(x, weight, bias, *, call: DecodeCall):
    return (x @ weight.mT).bfloat16().float().add(bias).sigmoid().unflatten(-1, (-1, 3))


def gates_with_shifted_heads(x, weight, bias, *, call: DecodeCall):
    return gates(x, weight, bias, call=call).roll(1, -2)


def compress(
    k,
    v,
    k_cmp,
    v_cmp,
    phi_k,
    phi_v,
    *,
    rope,
    call: DecodeCall,
    early=0,  # tokens before its end from which a block counts as complete
    shift=0,  # rows of the ring
):
    """Compress block by block, in float64."""
    geometry = call.geometry
    size, stride = geometry.compress_block_size, geometry.compress_stride
    for b, (start, length) in enumerate(zip(call.starts.tolist(), call.lengths.tolist())):
        i = geometry.num_compressed(start)
        if i * stride + size > length + early:
            continue
        page, row = divmod(i, k_cmp.shape[1])
        for x, out, weights in ((k, k_cmp, phi_k), (v, v_cmp, phi_v)):
            token, table = i * stride + shift + torch.arange(size), call.tables.raw[b]
            page_of_token = table[token // x.shape[1] % len(table)].long()
            tokens = x[page_of_token, token % x.shape[1]].transpose(0, 1)
            y = tokens.double().mean(1)
            if weights:
                position, weight, bias, *down = (w.double() for w in weights)
                y = (tokens + position).flatten(1) @ weight.mT + bias
                if down:
                    y = torch.nn.functional.gelu(y) @ down[0].mT + down[1]
            if rope is not None and x is k:
                angles = RopeTable(*(t[i * stride, None, None].double() for t in rope))
                y = rotate(y[None], angles)[0]
            out[call.tables.cmp[b, page], row] = y.to(out.dtype)


def compress_one_early(*tensors, **options):
    compress(*tensors, **options, early=1)


def compress_one_late(*tensors, **options):
    compress(*tensors, **options, early=-1)


def compress_with_another_ring_row(*tensors, **options):
    compress(*tensors, **options, shift=-1)


def compress_without_rotary(*tensors, rope, call: DecodeCall):
    compress(*tensors, rope=None, call=call)


def compress_without_position(*stores, rope, call: DecodeCall):
    *stores, phi_k, phi_v = stores
    phis = [tuple(w * (i > 0) for i, w in enumerate(weights)) for weights in (phi_k, phi_v)]
    compress(*stores, *phis, rope=rope, call=call)


def compress_with_tanh_gelu(*tensors, **options):
    def approximate(x):
        return gelu(x, approximate="tanh")

    gelu, torch.nn.functional.gelu = torch.nn.functional.gelu, approximate
    compress(*tensors, **options)
    torch.nn.functional.gelu = gelu


def win_not_deterministic(q, k, v, *, call: DecodeCall):
    o, lse = decode.win(q, k, v, call=call)
    return o.add_(1e-6 * next(_calls) * o.abs()), lse


def win_with_page_numbers(q, k, v, *, call: DecodeCall):
    o, lse = decode.win(q, k, v, call=call)
    return o.add_(1e-6 * call.tables.sel[0, 0] * o.abs()), lse


def win_with_stale_lengths(q, k, v, *, call: DecodeCall):
    lengths, starts = call.__dict__.setdefault("first", (call.lengths.clone(), call.starts.clone()))
    return decode.win(q, k, v, call=dataclasses.replace(call, lengths=lengths, starts=starts))


def win_writing_its_input(q, k, v, *, call: DecodeCall):
    return decode.win(q, k, v.nan_to_num_(0.0), call=call)


def win_without_evidence(q, k, v, *, call: DecodeCall):
    # The arithmetic of sdpa without its event in a profile.
    rows, last = decode._grouped(q, k.shape[2]), decode.positions(q, call)[:, None, :, None, None]
    window = call.geometry.window_size
    token = call.starts.long()[:, None] + torch.arange(1 - window, q.shape[1])
    place, present = decode._page_rows(k, token, call.tables.win), token >= 0
    present = present & (token < call.lengths[:, None])
    keys, values = (decode._read(x, place, None, present, q) for x in (k, v))
    token = token[:, None, None, None]
    hidden = (token > last) | (token <= last - window) | (token < 0)
    return decode._out(*decode.engine.attend(rows, keys, values, hidden, call.scale), q)


def _with_window(call: DecodeCall, more: int) -> DecodeCall:
    window = call.geometry.window_size + more
    return dataclasses.replace(
        call, geometry=dataclasses.replace(call.geometry, window_size=window)
    )


def win_one_more(q, k, v, *, call: DecodeCall):
    return decode.win(q, k, v, call=_with_window(call, 1))


def win_one_fewer(q, k, v, *, call: DecodeCall):
    return decode.win(q, k, v, call=_with_window(call, -1))


def cmp_one_more(q, k_cmp, v_cmp, *, call: DecodeCall):
    shifted_call = dataclasses.replace(
        call, starts=call.starts + 4, lengths=call.lengths + 4, max_len=call.max_len + 4
    )
    return decode.cmp(q, k_cmp, v_cmp, call=shifted_call)


def sel_one_more(q, k, v, blocks, *, call: DecodeCall):
    return decode.sel(
        q,
        k,
        v,
        blocks,
        call=dataclasses.replace(call, starts=call.starts + 1, lengths=call.lengths + 1),
    )


def sel_one_fewer(q, k, v, blocks, *, call: DecodeCall):
    return decode.sel(
        q,
        k,
        v,
        blocks,
        call=dataclasses.replace(call, starts=call.starts - 1, lengths=call.lengths - 1),
    )


def sel_with_an_unread_key(q, k, v, blocks, *, call: DecodeCall):
    k = k.clone()
    k[:, 3] = k[:, 4]  # key 3 is never read, but its value is
    return decode.sel(q, k, v, blocks, call=call)
