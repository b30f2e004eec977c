"""Fused decode forms: a step against the oracle's branches and gates, and an append against plain tensor code."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import torch

from nsa_core.rope import RopeTable, rope_table, rotate
from nsa_core.verify.decode import Step, StepData, step_data
from nsa_core.verify.judge import heads_first, judge
from nsa_core.verify.parity import truths
from nsa_core.verify.regret import judge_selection
from nsa_core.verify.subject import Finding, Subject, judged, name_of, same_bits

_STORES = ("k_cmp", "v_cmp", "k_sel", "v_sel", "k_win", "v_win")


def step_parity(subject: Subject, step: Step, dtype: torch.dtype) -> Iterator[Finding]:
    """The fused step's o equals gates and oracle branches over its own blocks; its blocks are a right choice.

    Judged as a composition of slots would be, whose outputs are rounded before the gates: a fused step may round less.
    """
    data, config = step_data(step, dtype, subject.device), step.case.config
    plan = subject.plan(config, dtype, needs_grad=False, phase="decode", page_size=step.page_size)
    stores = (data.stores[name] for name in _STORES)
    o, blocks = plan.fused["step"](data.q, data.gates, *stores, call=data.call)
    geometry, scale = config.geometry, config.softmax_scale
    for b, (length, new) in enumerate(zip(step.lengths, step.new)):
        case = dataclasses.replace(step.case, name=f"{step.case.name}, sequence {b}")
        for what, tail, empty in (("o", o[b, new:], 0), ("blocks", blocks[b, new:], -1)):
            want = torch.full_like(tail, empty)
            yield same_bits("decode", "step", case, dtype, f"{what} of padding", tail, want)
        if not new:
            continue
        rows = list(range(length - new, length))
        w = {name: x[b : b + 1, :length].cpu() for name, x in data.whole.items() if not name.endswith("_cmp")}
        n_c = geometry.num_compressed(length)
        w |= {name: data.whole[name][b : b + 1, :n_c].cpu() for name in ("k_cmp", "v_cmp")}
        chosen = torch.full((1, length, *blocks.shape[2:]), -1, dtype=torch.int32)
        chosen[0, rows] = blocks[b, :new].cpu()
        golden, rounded, magnitude, lse = _composed(w, chosen, step, dtype, torch.tensor(rows))
        found = heads_first(o[b : b + 1, :new].cpu())
        whole = judge(found, heads_first(golden), heads_first(rounded), heads_first(magnitude), dtype)
        yield from judged("decode", "step", case, dtype, {"o": whole})
        verdict = judge_selection(w["q"], w["k_cmp"], lse, chosen, geometry, scale, rows=rows)
        said = verdict.why or f"regret {verdict.regret:.2g}"
        flags = ("decode", "step", case.name, name_of(dtype), "blocks", verdict.ok, verdict.regret / 8)
        yield Finding(*flags, detail=said)


def _composed(
    w: Mapping[str, torch.Tensor], blocks: torch.Tensor, step: Step, dtype: torch.dtype, rows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Golden, rounded and magnitude of the gated sum, [1, rows, Hq, Dv], and the golden lse of cmp [1, Hq, S]."""
    geometry, scale, gates = step.case.config.geometry, step.case.config.softmax_scale, w["gates"][:, rows].double()
    inputs = {
        "cmp": [w["q"], w["k_cmp"], w["v_cmp"]],
        "sel": [w["q"], w["k_sel"], w["v_sel"], blocks],
        "win": [w["q"], w["k_win"], w["v_win"]],
    }
    sums, lse = [], None
    for index, (slot, tensors) in enumerate(inputs.items()):
        made = truths(slot, [*tensors, geometry, scale], {"do": None, "cu_seqlens": None, "rows": rows}, dtype)
        if slot == "cmp":
            lse = made[0].lse.to(torch.float64 if dtype == torch.float64 else torch.float32)
        gate = gates[..., index, None]
        parts = [x.o[:, rows].double() for x in made]
        sums.append([gate * parts[0], gate * parts[1], gate.abs() * parts[2]])
    golden, rounded, magnitude = (sum(branch[1:], branch[0]) for branch in zip(*sums))
    assert lse is not None
    return golden, rounded.to(dtype), magnitude, lse


def append_parity(
    subject: Subject, step: Step, dtype: torch.dtype, *, rope: bool, rotate_raw: bool, raw_ring: int
) -> Iterator[Finding]:
    """Every store is, bit for bit, what plain code writes into it, and untouched elsewhere; q is rotated."""
    data, config = step_data(step, dtype, subject.device), step.case.config
    plan = subject.plan(config, dtype, needs_grad=False, phase="decode", page_size=step.page_size)
    table = None
    if rope:
        positions = torch.arange(max(step.lengths) + step.rows, device=subject.device)
        table = rope_table(positions, config.qk_dim, config.rope_base, dtype)
    rows, stores = _arrivals(step, data, raw_ring)
    want = {name: (k.clone(), v.clone()) for name, (k, v) in stores.items()}
    q = _plain(step, data, rows, want, table, rotate_raw)
    tables = None if table is None else (table.cos[:, 0], table.sin[:, 0])
    triples = [tuple(rows[name][i] for name in ("raw", "sel", "win")) for i in (0, 1)]
    got = plan.fused["append"](
        data.q, *triples, stores["raw"], stores["sel"], stores["win"], rope=tables, rotate_raw=rotate_raw,
        call=data.call,
    )  # fmt: skip
    for b, new in enumerate(step.new):
        yield same_bits("decode", "append", step.case, dtype, f"q of {b}", got[b, :new], q[b, :new])
    for name, pair in stores.items():
        for kind, found, expected in zip("kv", pair, want[name]):
            yield same_bits("decode", "append", step.case, dtype, f"{kind}_{name}", found, expected)


Pairs = dict[str, tuple[torch.Tensor, torch.Tensor]]


def _arrivals(step: Step, data: StepData, raw_ring: int) -> tuple[Pairs, Pairs]:
    """The step's rows of raw, sel, win, views of one buffer as a projection leaves them, and stores of NaN."""
    batch, m = data.q.shape[:2]
    config, generator = step.case.config, torch.Generator().manual_seed(step.case.seed)
    groups, dk, dv = config.n_kv_heads, config.qk_dim, config.v_dim
    buffer = torch.randn((batch, m, 3 * groups * (dk + dv)), generator=generator).to(data.q.dtype).to(data.q.device)
    parts = buffer.split([groups * dk] * 3 + [groups * dv] * 3, -1)
    rows, stores = {}, {}
    for i, name in enumerate(("raw", "sel", "win")):
        rows[name] = (parts[i].unflatten(-1, (groups, dk)), parts[3 + i].unflatten(-1, (groups, dv)))
        like = data.stores["k_sel" if name == "sel" else "k_win"].shape[:2]
        shape = (batch, raw_ring) if name == "raw" else like
        stores[name] = tuple(data.q.new_full((*shape, groups, d), torch.nan) for d in (dk, dv))
    return rows, stores  # type: ignore[return-value]


def _plain(
    step: Step, data: StepData, rows: Pairs, stores: Pairs, table: RopeTable | None, rotate_raw: bool
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
