"""Fused decode forms (contract.FUSED): the step given its own blocks, append against plain writes,
gates by formula.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from nsa_core.dispatch.plan import Plan
from nsa_core.dtypes import dtype_name, stats_dtype
from nsa_core.layer.rope import RopeTable, rope_table, rotate
from nsa_verify import oracle
from nsa_verify.checks.decode_parity import Step, StepData, decode_plan, packed, step_data
from nsa_verify.combination import Combination
from nsa_verify.findings import Finding, judged, same_bits
from nsa_verify.judge.selection import judge_selection
from nsa_verify.judge.tensor import Verdict, gate_rows, heads_first, judge
from nsa_verify.reference import attention

_DIM = 200  # of a layer: wider than a tile, and no multiple of one


def fused_step(combination: Combination, step: Step, dtype: torch.dtype) -> Iterator[Finding]:
    """:func:`step_parity`, where the combination's backend has a fused step."""
    plan = decode_plan(combination, step, dtype)
    if "step" in plan.fused:
        yield from step_parity(combination, step, dtype)
    else:
        yield _missing(plan, "step", step, dtype)


def fused_append(combination: Combination, step: Step, dtype: torch.dtype) -> Iterator[Finding]:
    """:func:`append_parity` with and without rotary, where the combination's backend has a fused
    append.
    """
    plan = decode_plan(combination, step, dtype)
    if "append" not in plan.fused:
        yield _missing(plan, "append", step, dtype)
        return
    ring = step.case.config.compress_block_size + step.rows - 1
    for rope, rotate_raw in ((False, False), (True, False), (True, True)):
        yield from append_parity(
            combination, step, dtype, rope=rope, rotate_raw=rotate_raw, raw_ring=ring, exact=False
        )


def fused_gates(combination: Combination, step: Step, dtype: torch.dtype) -> Iterator[Finding]:
    """sigmoid(x W^T + b), where the combination's backend has a fused form of it, judged in the
    dtype that gates have.
    """
    plan, data = decode_plan(combination, step, dtype), step_data(step, dtype, combination.device)
    if "gates" not in plan.fused:
        yield _missing(plan, "gates", step, dtype)
        return
    (batch, m), heads = data.q.shape[:2], step.case.config.n_heads
    generator = torch.Generator().manual_seed(step.case.seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(combination.device, dtype)

    x = normal(batch, m, _DIM + 8)[..., :_DIM]  # rows that do not follow one another
    weight, bias = normal(3 * heads, _DIM) * _DIM**-0.5, normal(3 * heads)
    mine = plan.fused["gates"](x, weight, bias, call=data.call)
    kept = stats_dtype(dtype)

    def logits(
        kind: torch.dtype, size: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.clone
    ) -> torch.Tensor:
        rows, by, plus = (size(t.to(kind)) for t in (x, weight, bias))
        return torch.unflatten(rows @ by.mT + plus, -1, (heads, 3))

    golden = logits(torch.float64).sigmoid()
    # of a logit, as it reaches a gate
    magnitude = golden * (1 - golden) * logits(torch.float64, torch.abs) + golden
    mine, golden, rounded, magnitude = (
        gate_rows(t) for t in (mine, golden, logits(kept).sigmoid(), magnitude)
    )
    verdict = judge(mine, golden, rounded, magnitude, kept)
    yield from judged("decode fused gates", "", step.case, dtype, {"gates": verdict})


def _missing(plan: Plan, name: str, step: Step, dtype: torch.dtype) -> Finding:
    backends = {choice.backend for choice in plan.choices.values()}
    why = (
        f"{backends.pop()} has no fused {name}"
        if len(backends) == 1
        else "the slots are of several backends"
    )
    return Finding(
        f"decode fused {name}", "", step.case.name, dtype_name(dtype), name, None, detail=why
    )


def step_parity(combination: Combination, step: Step, dtype: torch.dtype) -> Iterator[Finding]:
    """The blocks are a right choice, and o is the gated sum of the branches over these blocks;
    padding is empty.

    Judged as a composition of slots would be, whose outputs are rounded before the gates: a fused
    step may round less.
    """
    plan = decode_plan(combination, step, dtype)
    data = step_data(step, dtype, combination.device)
    s = data.stores
    names = ("k_cmp", "v_cmp", "k_sel", "v_sel", "k_win", "v_win")
    o, blocks = plan.fused["step"](data.q, data.gates, *(s[name] for name in names), call=data.call)
    for b, new in enumerate(step.new):
        for name, tail, value in (("o", o[b, new:], 0), ("blocks", blocks[b, new:], -1)):
            if new < step.rows:
                want = torch.full_like(tail, value)
                yield same_bits(
                    "decode fused step", "", step.case, dtype, f"{name} of padding", tail, want
                )
    yield from _judge_composed(step, dtype, data, o, blocks)


def _judge_composed(
    step: Step, dtype: torch.dtype, data: StepData, o: torch.Tensor, blocks: torch.Tensor
) -> Iterator[Finding]:
    """o [B, m, Hq, Dv] and blocks [B, m, G, n]."""
    p, where = packed(step, data), (step.case.config.geometry, step.case.config.softmax_scale)
    w, chosen = p.whole, p.placed(blocks)
    at: dict[str, Any] = {"cu_seqlens": p.cu_seqlens, "rows": p.rows}
    of_cmp = (w["q"], w["k_cmp"], w["v_cmp"], *where)
    of_sel = (w["q"], w["k_sel"], w["v_sel"], chosen, *where)
    of_win = (w["q"], w["k_win"], w["v_win"], *where)
    truth = oracle.cmp(*of_cmp, **at)
    assert truth.lse is not None  # cmp has one
    picked = judge_selection(
        w["q"], w["k_cmp"], truth.lse.to(stats_dtype(dtype)), chosen, *where, **at
    )
    common = (
        "decode fused step",
        "",
        step.case.name,
        dtype_name(dtype),
        "blocks",
        picked.ok,
        picked.regret / 8,
    )
    said = picked.why + p.said(picked.where[:1]) if picked.why else f"regret {picked.regret:.2g}"
    yield Finding(*common, detail=said)
    golden = oracle.combine(
        w["gates"], truth.o, oracle.sel(*of_sel, **at).o, oracle.win(*of_win, **at).o
    ).o

    def again(arithmetic: attention.Arithmetic) -> torch.Tensor:
        how: dict[str, Any] = {**at, "arithmetic": arithmetic, "dtype": dtype}
        branches = (
            attention.cmp(*of_cmp, **how),
            attention.sel(*of_sel, **how),
            attention.win(*of_win, **how),
        )
        return attention.combine(
            w["gates"], *(x.o for x in branches), arithmetic=arithmetic, dtype=dtype
        ).o

    rounded = golden if dtype == torch.float64 else again("rounded")
    mine, golden, rounded, magnitude = (
        heads_first(x[p.rows]) for x in (p.placed(o), golden, rounded, again("magnitude"))
    )
    verdict = judge(mine, golden, rounded, magnitude, dtype)
    yield from judged("decode fused step", "", step.case, dtype, {"o": verdict})


def append_parity(
    combination: Combination,
    step: Step,
    dtype: torch.dtype,
    *,
    rope: bool,
    rotate_raw: bool,
    raw_ring: int,
    exact: bool = True,
) -> Iterator[Finding]:
    """Every store is what plain code writes into it, and untouched elsewhere; q is rotated.

    ``exact``: bit for bit, what is rotated too. Otherwise that is judged, for a product and a sum
    in one instruction round once less: both are right, and their last bits differ.
    """
    data, config = step_data(step, dtype, combination.device), step.case.config
    plan, table = decode_plan(combination, step, dtype), None
    if rope:
        positions = torch.arange(max(step.lengths) + step.rows, device=combination.device)
        table = rope_table(positions, config.qk_dim, config.rope_base, dtype)
    rows, stores = _arrivals(step, data, raw_ring)
    want = {name: (k.clone(), v.clone()) for name, (k, v) in stores.items()}
    q = _plain(step, data, rows, want, table, rotate_raw)
    tables = None if table is None else (table.cos[:, 0], table.sin[:, 0])
    triples = [tuple(rows[name][i] for name in ("raw", "sel", "win")) for i in (0, 1)]
    got = plan.fused["append"](
        data.q,
        *triples,
        stores["raw"],
        stores["sel"],
        stores["win"],
        rope=tables,
        rotate_raw=rotate_raw,
        call=data.call,
    )
    label = "no rotary" if not rope else "rotary of raw too" if rotate_raw else "rotary"
    real = (torch.arange(step.rows) < torch.tensor(step.new)[:, None]).to(q.device)
    pairs = {"q": (got[real], q[real], rope)}
    for name, pair in stores.items():
        turned = rope and (name != "raw" or rotate_raw)
        found = [(mine.flatten(0, 1), plain.flatten(0, 1)) for mine, plain in zip(pair, want[name])]
        pairs |= {f"k_{name}": (*found[0], turned), f"v_{name}": (*found[1], False)}
    for name, (mine, plain, turned) in pairs.items():  # [rows, heads, D]
        quantity = f"{name}, {label}"
        if exact or not turned:
            yield same_bits("decode fused append", "", step.case, dtype, quantity, mine, plain)
        elif len(mine):
            verdict = _judge_rotated(mine, plain, dtype)
            yield from judged("decode fused append", "", step.case, dtype, {quantity: verdict})


def _judge_rotated(mine: torch.Tensor, plain: torch.Tensor, dtype: torch.dtype) -> Verdict:
    """``plain`` stands for golden: at most half a unit of the dtype from it, which the noise of a
    row counts.
    """
    mine, golden = heads_first(mine), heads_first(plain.double())
    return judge(mine, golden, golden, golden.abs(), dtype)


Pairs = dict[str, tuple[torch.Tensor, torch.Tensor]]


def _arrivals(step: Step, data: StepData, raw_ring: int) -> tuple[Pairs, Pairs]:
    """The step's rows of raw, sel, win, views of one buffer as a projection leaves them, and stores
    of NaN.
    """
    batch, m = data.q.shape[:2]
    config, generator = step.case.config, torch.Generator().manual_seed(step.case.seed)
    groups, dk, dv = config.n_kv_heads, config.qk_dim, config.v_dim
    buffer = (
        torch.randn((batch, m, 3 * groups * (dk + dv)), generator=generator)
        .to(data.q.dtype)
        .to(data.q.device)
    )
    parts = buffer.split([groups * dk] * 3 + [groups * dv] * 3, -1)
    rows, stores = {}, {}
    for i, name in enumerate(("raw", "sel", "win")):
        rows[name] = (
            parts[i].unflatten(-1, (groups, dk)),
            parts[3 + i].unflatten(-1, (groups, dv)),
        )
        like = data.stores["k_sel" if name == "sel" else "k_win"].shape[:2]
        shape = (batch, raw_ring) if name == "raw" else like
        stores[name] = tuple(data.q.new_full((*shape, groups, d), torch.nan) for d in (dk, dv))
    return rows, stores  # type: ignore[return-value]


def _plain(
    step: Step,
    data: StepData,
    rows: Pairs,
    stores: Pairs,
    table: RopeTable | None,
    rotate_raw: bool,
) -> torch.Tensor:
    """Write what an append should, token by token; q as it should come back."""
    entries, q = data.call.block_table.tolist(), data.q.clone()
    for b, (length, new) in enumerate(zip(step.lengths, step.new)):
        for r in range(new):
            t = length - new + r
            at = None if table is None else RopeTable(table.cos[t : t + 1], table.sin[t : t + 1])
            if at is not None:
                q[b, r] = rotate(data.q[b, r : r + 1], at)[0]
            for name, (k, v) in rows.items():
                key = k[b, r]
                if at is not None and (name != "raw" or rotate_raw):
                    key = rotate(key[None], at)[0]
                size = stores[name][0].shape[1]
                outer = entries[b][t // size] if name == "sel" else b
                stores[name][0][outer, t % size], stores[name][1][outer, t % size] = key, v[b, r]
    return q
