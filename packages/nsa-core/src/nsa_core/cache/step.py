"""A layer's step over a cache: what is new is projected, put into the cache, and attends to what
lies there.

    stores[starts .. lengths)  <-  rotary(k), v                     the step's own tokens
    k_cmp[i]  <-  rotary(phi(raw[i*d .. i*d + l)))
    of every block whose last token has come
    o         =   sum over c of g^c Attn(q, stores^c)               the decode forms of a plan

Steps run without gradient. Nothing here asks the device anything: lengths stay there, and what does
not exist is masked. Only what the host knows anyway (a block completes, no page is missing) is left
out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from nsa_core.cache.cache import NSACache
from nsa_core.cache.chunk import MOST_ROWS, keep_newest, lengthened
from nsa_core.cache.compress_step import compress
from nsa_core.cache.new_cache import check_plan
from nsa_core.cache.new_tokens import Arrival, New, arrival_of
from nsa_core.cache.prefill import prefill
from nsa_core.contract import DecodeCall
from nsa_core.dispatch.finite_checks import checked_plan
from nsa_core.errors import InvalidInput
from nsa_core.layer.gating import as_it_was_made, gates_of
from nsa_core.layer.plain_linear import dtype_and_device_from
from nsa_core.layer.rope import RopeTable, rotate
from nsa_core.torch_ops.torch_state import capturing

if TYPE_CHECKING:
    from nsa_core.cache.kv_store import Stores
    from nsa_core.config import NSAConfig
    from nsa_core.dispatch.plan import Plan
    from nsa_core.layer.module import NSAttention

FEW_TOKENS = 32  # whose gates are few enough that launches are what they cost
Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@torch.compiler.disable(
    reason="a step changes its cache, and the host decides on pages; capture it in a CUDA graph"
)
def step(
    attn: NSAttention,
    x: torch.Tensor,  # [B, m, dim]
    cache: NSACache | None,
    new: New = None,
    plan: Plan | None = None,
    packed: bool = False,
) -> torch.Tensor:
    """Append the tokens of x and return the layer's output for them; see NSAttention.forward."""
    if cache is not None and not isinstance(cache, NSACache):
        raise InvalidInput(
            f"cache must be what new_cache() of this layer gave, got {type(cache).__name__}"
        )
    if cache is None or packed:
        why = (
            "new goes with cache="
            if cache is None
            else "a cache takes x [B, m, dim] and new=, not cu_seqlens"
        )
        raise InvalidInput(why)
    in_graph = capturing(cache.device)
    _refuse(attn, x, cache, in_graph)
    arrival = arrival_of(cache, x.shape[1], new, in_graph)
    with torch.no_grad():
        # Padding behind the longest costs nothing, where the host knows it.
        rows = arrival.rows if arrival.counts is None else max(arrival.counts)
        if rows == 0:
            return x.new_zeros(x.shape, dtype=cache.dtype)
        if arrival.counts is None:
            cache.captured = True
            return _piece(attn, x, cache, arrival, plan)
        cache.admit(arrival.counts)
        y = _run(attn, x[:, :rows], cache, arrival.piece(0, rows), plan)
        return y if rows == arrival.rows else F.pad(y, (0, 0, 0, arrival.rows - rows))


def _run(
    attn: NSAttention, x: torch.Tensor, cache: NSACache, arrival: Arrival, plan: Plan | None
) -> torch.Tensor:
    """A step that was admitted."""
    assert arrival.counts is not None
    if arrival.rows > 1 and not any(n and c for n, c in zip(cache.bounds, arrival.counts)):
        return prefill(attn, x, cache, arrival, plan)
    most = max(cache.max_step, MOST_ROWS)
    pieces = [
        _piece(attn, x[:, i : i + most], cache, arrival.piece(i, most), plan)
        for i in range(0, arrival.rows, most)
    ]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)


def _refuse(attn: NSAttention, x: torch.Tensor, cache: NSACache, in_graph: bool) -> None:
    wrong, dtype = [], attn.out_dtype
    if cache.attn is not attn:
        wrong.append("the cache is another layer's")
    if x.shape[0] != cache.batch:
        wrong.append(f"x has {x.shape[0]} sequences, the cache {cache.batch}")
    if (x.device, dtype) != (cache.device, cache.dtype):
        wrong.append(
            f"the layer computes {dtype} on {x.device}, the cache is {cache.dtype} on"
            f" {cache.device}"
        )
    if torch.is_grad_enabled() and x.requires_grad:
        wrong.append(
            "x requires grad, and no gradient flows through a cache: call the layer under"
            " torch.no_grad()"
        )
    if in_graph and x.shape[1] > cache.max_step:
        wrong.append(
            f"a captured step takes at most max_step = {cache.max_step} rows, got {x.shape[1]}"
        )
    if wrong:
        raise InvalidInput("; ".join(wrong))


def rehearse(cache: NSACache, rows: int) -> None:
    """A step of ``rows`` rows with every sequence full: all is run, nothing written; see
    reserve_workspace.
    """
    if isinstance(rows, bool) or not isinstance(rows, int) or not 1 <= rows <= cache.max_step:
        longer = "a longer step, which is never captured, takes more memory while it runs"
        allowed = f"an integer from 1 to max_step = {cache.max_step}"
        raise InvalidInput(f"reserve_workspace: rows must be {allowed}, got {rows!r}; {longer}")
    weight, kept = (
        dtype_and_device_from(cache.attn.qkv),
        (cache.lengths.clone(), cache.overflowed.clone()),
    )
    x = torch.zeros((cache.batch, rows, cache.config.dim), dtype=weight.dtype, device=cache.device)
    cache.lengths.fill_(cache.max_len)
    try:
        with torch.no_grad():
            _piece(cache.attn, x, cache, Arrival(rows, None, None, True), None)
    finally:
        cache.lengths.copy_(kept[0])
        cache.overflowed.copy_(kept[1])


def _piece(
    attn: NSAttention, x: torch.Tensor, cache: NSACache, arrival: Arrival, plan: Plan | None
) -> torch.Tensor:
    """At most MOST_ROWS rows over what the cache holds."""
    plan = _plan_of(attn, cache, plan, arrival.counts is None)
    known, is_long = cache.bounds, arrival.rows > cache.max_step
    with cache.unless_done() as undo:
        call = cache.advance(arrival.rows, arrival.counts, arrival.new, arrival.exact)
        positions, absent = _places(cache, arrival, "append" not in plan.fused)
        stores = lengthened(cache, arrival.rows) if is_long else cache.stores
        if arrival.new is not None:
            assert absent is not None
            x = x.masked_fill(absent[..., None], 0)
        q, k, v = attn.heads(x)
        gates, pairs = _gates(attn, plan, x, call), (_three(k), _three(v))
        if "append" in plan.fused:
            q = _fused_append(plan, stores, q, pairs, call)
        else:
            q = _append(attn.config, stores, q, pairs, call, positions, absent)
        if arrival.counts is None or not cache.exact or _completes(cache, known):
            compress(attn, stores, call, arrival.rows)
        o = _attend(plan, stores, q, gates, call)
        if is_long:
            keep_newest(cache, stores, arrival.rows)
        undo.pop_all()
    result: torch.Tensor = attn.out(o.flatten(-2))
    return result


def _plan_of(attn: NSAttention, cache: NSACache, plan: Plan | None, in_graph: bool) -> Plan:
    """Who runs this step; ``check`` needs every branch's output on its own, and the host, so not a
    graph.
    """
    if plan is None:
        plan = cache.plan
    else:
        check_plan(cache, plan)
    if attn.check and not in_graph:
        # a fused form shows no branch
        return dataclasses.replace(checked_plan(plan, attn.layer), fused={})
    return plan


def _places(
    cache: NSACache, arrival: Arrival, wanted: bool
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Positions int64 [B, m] of the step's rows, and which are no tokens; None: nobody asks, and
    all are.
    """
    some = arrival.new is not None
    if not (some or wanted):
        return None, None
    positions = cache.starts[:, None] + cache.stores.count[: arrival.rows]
    if arrival.rows > cache.max_step:
        # what is absent, in a table of angles that ends soon after
        positions.clamp_(max=cache.max_len)
    return positions, (
        positions >= cache.lengths[:, None] if some or arrival.counts is None else None
    )


def _completes(cache: NSACache, before: Sequence[int]) -> bool:
    size, stride = cache.config.compress_block_size, cache.config.compress_stride
    return any(
        n >= size and (n - size) // stride > (old - size) // stride
        for n, old in zip(cache.bounds, before)
    )


def _three(parts: list[torch.Tensor]) -> Three:
    """Of cmp, sel and win, which may be one."""
    return parts[0], parts[len(parts) // 3], parts[-1]


def _gates(attn: NSAttention, plan: Plan, x: torch.Tensor, call: DecodeCall) -> torch.Tensor:
    """[B, m, Hq, 3]; by the plan's own form where it has one and the host binds, that is, for few
    tokens.
    """
    plain = (
        as_it_was_made(attn.gate)
        if "gates" in plan.fused and x.shape[0] * x.shape[1] <= FEW_TOKENS
        else None
    )
    if plain is None:
        return gates_of(attn.gate, x)
    gates: torch.Tensor = plan.fused["gates"](x, plain.weight, plain.bias, call=call)
    return gates


def _fused_append(
    plan: Plan, stores: Stores, q: torch.Tensor, pairs: tuple[Three, Three], call: DecodeCall
) -> torch.Tensor:
    """:func:`_append` by the plan's own form."""
    rope = stores.rope
    targets = [(pair.k, pair.v) for pair in (stores.raw, stores.sel, stores.win)]
    tables = None if rope is None else (rope.cos[:, 0], rope.sin[:, 0])
    before = plan.config.rope_before_compress
    rotated: torch.Tensor = plan.fused["append"](
        q, *pairs, *targets, rope=tables, rotate_raw=before, call=call
    )
    return rotated


def _append(
    config: NSAConfig,
    stores: Stores,
    q: torch.Tensor,  # [B, m, Hq, Dk]
    pairs: tuple[Three, Three],  # keys and values of (cmp, sel, win), [B, m, G, D]
    call: DecodeCall,
    positions: torch.Tensor | None,  # int64 [B, m]
    absent: torch.Tensor | None,  # bool [B, m], which rows are no tokens; None: none
) -> torch.Tensor:
    """q, rotated; keys, rotated, and values are in the stores."""
    (k_raw, k_sel, k_win), values = pairs
    assert positions is not None  # _places makes them where no fused form does it all
    rope = stores.rope
    if rope is not None:
        table = RopeTable(rope.cos[positions], rope.sin[positions])
        rows = [q, k_sel, k_win, *([k_raw] if config.rope_before_compress else [])]
        q, k_sel, k_win, *rest = rotate(torch.cat(rows, -2), table).split(
            [x.shape[-2] for x in rows], -2
        )
        k_raw = rest[0] if rest else k_raw
    stores.sel.write(stores.sel.in_pages(positions, call.block_table, absent), k_sel, values[1])
    stores.raw.write(stores.raw.in_ring(positions, absent), k_raw, values[0])
    stores.win.write(stores.win.in_ring(positions, absent), k_win, values[2])
    return q


def _attend(
    plan: Plan, stores: Stores, q: torch.Tensor, gates: torch.Tensor, call: DecodeCall
) -> torch.Tensor:
    """Eq. 5 over the stores, [B, m, Hq, Dv]."""
    cmp, sel, win = stores.cmp, stores.sel, stores.win
    if "step" in plan.fused:
        o: torch.Tensor = plan.fused["step"](
            q, gates, cmp.k, cmp.v, sel.k, sel.v, win.k, win.v, call=call
        )[0]
        return o
    o_cmp, lse = plan.cmp(q, cmp.k, cmp.v, call=call)
    blocks = plan.select(q, cmp.k, lse, call=call)
    o_sel, _ = plan.sel(q, sel.k, sel.v, blocks, call=call)
    o_win, _ = plan.win(q, win.k, win.v, call=call)
    o = plan.combine(gates, o_cmp, o_sel, o_win)
    return o
