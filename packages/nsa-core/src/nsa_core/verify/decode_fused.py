"""Fused decode forms (contract.FUSED): the step as a composition given its own blocks, append against plain writes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from nsa_core import oracle
from nsa_core.contract import DecodeCall
from nsa_core.ops import stats_dtype
from nsa_core.plan import Plan
from nsa_core.rope import RopeTable, rope_table, rotate
from nsa_core.verify import dense
from nsa_core.verify.decode import Step, StepData, decode_plan, packed, step_data
from nsa_core.verify.judge import Verdict, heads_first, judge
from nsa_core.verify.regret import judge_selection
from nsa_core.verify.subject import Finding, Subject, judged, name_of, same_bits

Store = tuple[torch.Tensor, torch.Tensor]  # k and v


def fused_step(subject: Subject, step: Step, dtype: torch.dtype) -> Iterator[Finding]:
    """The blocks are a right choice, and o is the gated sum of the branches over these blocks; padding is empty."""
    plan = decode_plan(subject, step, dtype)
    if "step" not in plan.fused:
        yield _missing(plan, "step", step, dtype)
        return
    data = step_data(step, dtype, subject.device)
    s = data.stores
    names = ("k_cmp", "v_cmp", "k_sel", "v_sel", "k_win", "v_win")
    o, blocks = plan.fused["step"](data.q, data.gates, *(s[name] for name in names), call=data.call)
    for b, new in enumerate(step.new):
        for name, tail, value in (("o", o[b, new:], 0), ("blocks", blocks[b, new:], -1)):
            if new < step.rows:
                want = torch.full_like(tail, value)
                yield same_bits("decode fused step", "", step.case, dtype, f"{name} of padding", tail, want)
    yield from _judge_composed(step, dtype, data, o, blocks)


def _missing(plan: Plan, name: str, step: Step, dtype: torch.dtype) -> Finding:
    backends = {choice.backend for choice in plan.choices.values()}
    why = f"{backends.pop()} has no fused {name}" if len(backends) == 1 else "the slots are of several backends"
    return Finding(f"decode fused {name}", "", step.case.name, name_of(dtype), name, None, detail=why)


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
    picked = judge_selection(w["q"], w["k_cmp"], truth.lse.to(stats_dtype(dtype)), chosen, *where, **at)
    common = ("decode fused step", "", step.case.name, name_of(dtype), "blocks", picked.ok, picked.regret / 8)
    said = picked.why + p.said(picked.where[:1]) if picked.why else f"regret {picked.regret:.2g}"
    yield Finding(*common, detail=said)
    golden = oracle.combine(w["gates"], truth.o, oracle.sel(*of_sel, **at).o, oracle.win(*of_win, **at).o).o

    def again(arithmetic: dense.Arithmetic) -> torch.Tensor:
        how: dict[str, Any] = {**at, "arithmetic": arithmetic, "dtype": dtype}
        branches = (dense.cmp(*of_cmp, **how), dense.sel(*of_sel, **how), dense.win(*of_win, **how))
        return dense.combine(w["gates"], *(x.o for x in branches), arithmetic=arithmetic, dtype=dtype).o

    rounded = golden if dtype == torch.float64 else again("rounded")
    mine, golden, rounded, magnitude = (
        heads_first(x[p.rows]) for x in (p.placed(o), golden, rounded, again("magnitude"))
    )
    verdict = judge(mine, golden, rounded, magnitude, dtype)
    yield from judged("decode fused step", "", step.case, dtype, {"o": verdict})


def fused_append(subject: Subject, step: Step, dtype: torch.dtype) -> Iterator[Finding]:
    """Keys and values reach their places and nothing else is written; rotated as nsa_core.rope.rotate would."""
    plan = decode_plan(subject, step, dtype)
    if "append" not in plan.fused:
        yield _missing(plan, "append", step, dtype)
        return
    data, config = step_data(step, dtype, subject.device), step.case.config
    table = rope_table(torch.arange(max(step.lengths)), config.qk_dim, config.rope_base, dtype)
    rope = RopeTable(*(x.squeeze(1).to(subject.device) for x in table))
    generator = torch.Generator().manual_seed(step.case.seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(subject.device, dtype)

    batch, lead = len(step.lengths), (len(step.lengths), step.rows, config.n_kv_heads)
    k, v = (tuple(normal(*lead, width) for _ in range(3)) for width in (config.qk_dim, config.v_dim))
    ring = config.geometry.compress_block_size + step.rows - 1
    raw = (normal(batch, ring, *lead[2:], config.qk_dim), normal(batch, ring, *lead[2:], config.v_dim))
    s = data.stores
    stores: list[Store] = [raw, (s["k_sel"], s["v_sel"]), (s["k_win"], s["v_win"])]
    stores = [(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in stores]
    for label, angles, rotate_raw in (("no rotary", None, False), ("rotary", rope, False), ("raw too", rope, True)):
        given, wanted = ([(a.clone(), b.clone()) for a, b in stores] for _ in range(2))
        q = plan.fused["append"](data.q, k, v, *given, rope=angles, rotate_raw=rotate_raw, call=data.call)
        plain = plain_append(data.q, k, v, *wanted, rope=angles, rotate_raw=rotate_raw, call=data.call)
        rotated = (rotate_raw, angles is not None, angles is not None)
        yield from _judge_append(step, dtype, label, (q, given), (plain, wanted), rotated, data.call)


def plain_append(
    q: torch.Tensor,  # [B, m, Hq, Dk]
    k: tuple[torch.Tensor, ...],  # of cmp, sel, win: [B, m, G, Dk]
    v: tuple[torch.Tensor, ...],
    raw: Store,  # [B, R, G, D], rings
    sel: Store,  # [P, page, G, D]
    win: Store,
    *,
    rope: RopeTable | None,
    rotate_raw: bool,
    call: DecodeCall,
) -> torch.Tensor:
    """What a fused append must do, a token at a time; q of padding rows is 0. Stores are written in place."""
    out, rings = torch.zeros_like(q), (raw, None, win)
    for b, (start, end) in enumerate(zip(call.starts.tolist(), call.lengths.tolist())):
        for r, t in enumerate(range(start, end)):
            at = None if rope is None else RopeTable(rope.cos[t : t + 1, None], rope.sin[t : t + 1, None])
            out[b, r] = q[b, r] if at is None else rotate(q[b, r : r + 1], at)[0]
            for i, ring in enumerate(rings):
                turned = at is not None and (i > 0 or rotate_raw)
                key = rotate(k[i][b, r : r + 1], at)[0] if turned and at is not None else k[i][b, r]
                if ring is None:
                    size = sel[0].shape[1]
                    page = int(call.block_table[b, t // size])
                    sel[0][page, t % size], sel[1][page, t % size] = key, v[i][b, r]
                else:
                    place = t % ring[0].shape[1]
                    ring[0][b, place], ring[1][b, place] = key, v[i][b, r]
    return out


_Appended = tuple[torch.Tensor, list[Store]]  # q, and the stores of cmp, sel and win


def _judge_append(
    step: Step, dtype: torch.dtype, label: str, got: _Appended, want: _Appended, rotated: tuple[bool, ...],
    call: DecodeCall,
) -> Iterator[Finding]:  # fmt: skip
    check = "decode fused append"
    real = torch.arange(step.rows) < (call.lengths - call.starts).cpu()[:, None]  # [B, m]
    pairs = {"q": (got[0].cpu()[real], want[0].cpu()[real], rotated[1])}
    for name, mine_kv, plain_kv, turned in zip(("raw", "sel", "win"), got[1], want[1], rotated):
        flat = [x.cpu().flatten(0, 1) for x in (*mine_kv, *plain_kv)]
        pairs |= {f"k of {name}": (flat[0], flat[2], turned), f"v of {name}": (flat[1], flat[3], False)}
    for name, (mine, plain, turned) in pairs.items():  # [rows, heads, D]
        quantity = f"{name}, {label}"
        if not turned:
            yield same_bits(check, "", step.case, dtype, quantity, mine, plain)
            continue
        # A product and sum fused into one instruction rounds once less: both are right, their last bits differ.
        verdict = _judge_rotated(mine, plain, dtype)
        yield from judged(check, "", step.case, dtype, {quantity: verdict})


def _judge_rotated(mine: torch.Tensor, plain: torch.Tensor, dtype: torch.dtype) -> Verdict:
    """``plain`` stands for golden: at most half a unit of the dtype from it, which the noise of a row counts."""
    mine, golden = heads_first(mine), heads_first(plain.double())
    return judge(mine, golden, golden, golden.abs(), dtype)
