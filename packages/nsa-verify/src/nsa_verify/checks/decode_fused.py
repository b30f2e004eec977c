"""Checks of fused decode forms (contract.FUSED): step, append and gates.

A fused step is judged given the blocks that it selected. A fused append is compared with plain
writes, and fused gates with their formula.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from nsa_core.dtypes import stats_dtype
from nsa_core.layer.rope import RopeTable, rope_table, rotate
from nsa_verify import oracle
from nsa_verify.checks.under_test import StepUnderTest, step_check
from nsa_verify.judge.selection import judge_selection
from nsa_verify.judge.tensor import Verdict, gate_rows, heads_first, judge
from nsa_verify.problems.combination import Combination
from nsa_verify.problems.findings import Finding, Findings
from nsa_verify.problems.step_data import PackedStep, StepData, packed
from nsa_verify.problems.steps import Step
from nsa_verify.reference import attention

_DIM = 200  # layer width of the gates check: larger than a tile, and not a multiple of one


@step_check("decode fused append")
def fused_append(subject: StepUnderTest) -> Iterator[Finding]:
    """Run :func:`append_parity` with and without rotary if the backend has a fused append."""
    if "append" not in subject.plan().fused:
        yield subject.missing_form("append")
        return
    ring = subject.case.config.compress_block_size + subject.step.rows - 1
    target = (subject.combination, subject.step, subject.dtype)
    for rope, rotate_raw in ((False, False), (True, False), (True, True)):
        yield from append_parity(*target, rope=rope, rotate_raw=rotate_raw, raw_ring=ring)


@step_check("decode fused gates")
def fused_gates(subject: StepUnderTest) -> Iterator[Finding]:
    """Judge sigmoid(x W^T + b) in the dtype of gates, if the backend has fused gates."""
    plan, data, dtype = subject.plan(), subject.data, subject.dtype
    if "gates" not in plan.fused:
        yield subject.missing_form("gates")
        return
    (batch, m), heads = data.q.shape[:2], subject.case.config.n_heads
    generator = torch.Generator().manual_seed(subject.case.seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(subject.combination.device, dtype)

    x = normal(batch, m, _DIM + 8)[..., :_DIM]  # rows with gaps between them
    weight, bias = normal(3 * heads, _DIM) * _DIM**-0.5, normal(3 * heads)
    actual = plan.fused["gates"](x, weight, bias, call=data.call)
    gates_dtype = stats_dtype(dtype)

    def logits(
        kind: torch.dtype, transform: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.clone
    ) -> torch.Tensor:
        x_, weight_, bias_ = (transform(t.to(kind)) for t in (x, weight, bias))
        return torch.unflatten(x_ @ weight_.mT + bias_, -1, (heads, 3))

    golden = logits(torch.float64).sigmoid()
    # The magnitude of a logit, multiplied by the derivative of the sigmoid.
    magnitude = golden * (1 - golden) * logits(torch.float64, torch.abs) + golden
    actual, golden, rounded, magnitude = (
        gate_rows(t) for t in (actual, golden, logits(gates_dtype).sigmoid(), magnitude)
    )
    verdict = judge(actual, golden, rounded, magnitude, gates_dtype)
    yield from subject.judged("", {"gates": verdict})


@step_check("decode fused step")
def fused_step(subject: StepUnderTest) -> Iterator[Finding]:
    """Check the blocks of a fused step, its output given these blocks, and its padding rows.

    The output is the gated sum of the branches (Eq. 5). It is judged like a composition of slots,
    whose outputs are rounded before the gates; a fused step may round less.
    """
    plan, step, data = subject.plan(), subject.step, subject.data
    if "step" not in plan.fused:
        yield subject.missing_form("step")
        return
    names = ("k_cmp", "v_cmp", "k_sel", "v_sel", "k_win", "v_win")
    stores = (data.stores[name] for name in names)
    o, blocks = plan.fused["step"](data.q, data.gates, *stores, call=data.call)
    for b, new in enumerate(step.new):
        if new < step.rows:
            yield subject.filled("", "o of padding", o[b, new:], 0)
            yield subject.filled("", "blocks of padding", blocks[b, new:], -1)
    p = packed(step, data)
    yield from judge_composed(subject, p, p.pick(o), p.pick(blocks), step.exchanges)


def judge_composed(
    findings: Findings,
    p: PackedStep,
    o: torch.Tensor,  # [N, Hq, Dv]
    blocks: torch.Tensor,  # [N, G, n]
    exchanges: int,
) -> Iterator[Finding]:
    """Judge the gated sum and the blocks of the new tokens of a step.

    Args:
        findings: Makes the findings.
        p: The sequences.
        o: The gated sum.
        blocks: The selected blocks.
        exchanges: As in :func:`nsa_verify.judge.selection.judge_selection`.
    """
    dtype, config = findings.dtype, findings.case.config
    t, selected, sizes = p.tensors, p.scatter(blocks), (config.geometry, config.softmax_scale)
    options: dict[str, Any] = {"cu_seqlens": p.cu_seqlens, "rows": p.rows}
    cmp_args = (t["q"], t["k_cmp"], t["v_cmp"], *sizes)
    sel_args = (t["q"], t["k_sel"], t["v_sel"], selected, *sizes)
    win_args = (t["q"], t["k_win"], t["v_win"], *sizes)
    truth = oracle.cmp(*cmp_args, **options)
    assert truth.lse is not None  # cmp has one
    selection = judge_selection(
        t["q"],
        t["k_cmp"],
        truth.lse.to(stats_dtype(dtype)),
        selected,
        *sizes,
        **options,
        exchanges=exchanges,
    )
    yield findings.selected("", selection, p.describe(selection.where[:1]))
    golden = oracle.combine(
        t["gates"], truth.o, oracle.sel(*sel_args, **options).o, oracle.win(*win_args, **options).o
    ).o

    def reference(arithmetic: attention.Arithmetic) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the gated sum, and its noise of large scores."""
        kwargs: dict[str, Any] = {**options, "arithmetic": arithmetic, "dtype": dtype}
        branches = (
            attention.cmp(*cmp_args, **kwargs),
            attention.sel(*sel_args, **kwargs),
            attention.win(*win_args, **kwargs),
        )
        gated = attention.combine(
            t["gates"], *(x.o for x in branches), arithmetic=arithmetic, dtype=dtype
        ).o
        gates = t["gates"].double().abs()[..., None].unbind(-2)
        noises = [g * x.score_noise["o"] for g, x in zip(gates, branches) if x.score_noise]
        return gated, torch.stack(noises).sum(0)[p.rows] if noises else None

    rounded = golden if dtype == torch.float64 else reference("rounded")[0]
    magnitude, score_noise = reference("magnitude")
    golden, rounded, magnitude = (heads_first(x[p.rows]) for x in (golden, rounded, magnitude))
    score_noise = None if score_noise is None else heads_first(score_noise)
    verdict = judge(heads_first(o), golden, rounded, magnitude, dtype, score_noise=score_noise)
    yield from findings.judged("", {"o": verdict})


def append_parity(
    combination: Combination,
    step: Step,
    dtype: torch.dtype,
    *,
    rope: bool,
    rotate_raw: bool,
    raw_ring: int,
) -> Iterator[Finding]:
    """Check that a fused append writes what plain code writes, and nothing else.

    Rotated tensors are judged, because a fused multiply-add rounds once less than a product and a
    sum. All others must have equal bits.

    Args:
        combination: Combination whose backend has a fused append.
        step: The decode step.
        dtype: Dtype of q, keys and values.
        rope: Whether to rotate q and the keys of sel and win.
        rotate_raw: Whether to rotate the uncompressed keys of cmp, too.
        raw_ring: Rows of the ring of uncompressed keys and values of cmp.
    """
    subject = StepUnderTest("decode fused append", step.case, dtype, combination, step)
    plan, data, config, table = subject.plan(), subject.data, step.case.config, None
    if rope:
        positions = torch.arange(max(step.lengths) + step.rows, device=combination.device)
        table = rope_table(positions, config.qk_dim, config.frequencies, dtype)
    rows, stores = _append_tensors(step, data, raw_ring)
    expected = {name: (k.clone(), v.clone()) for name, (k, v) in stores.items()}
    expected_q = _plain_append(step, data, rows, expected, table, rotate_raw)
    tables = None if table is None else (table.cos[:, 0], table.sin[:, 0])
    keys, values = (tuple(rows[name][i] for name in ("raw", "sel", "win")) for i in (0, 1))
    written = (stores[name] for name in ("raw", "sel", "win"))
    options = {"rope": tables, "rotate_raw": rotate_raw, "call": data.call}
    q = plan.fused["append"](data.q, keys, values, *written, **options)
    label = "no rotary" if not rope else "rotary of raw too" if rotate_raw else "rotary"
    is_new = (torch.arange(step.rows) < torch.tensor(step.new)[:, None]).to(expected_q.device)
    pairs = {"q": (q[is_new], expected_q[is_new], rope)}
    for name, store in stores.items():
        rotated = rope and (name != "raw" or rotate_raw)
        k, v = ((x.flatten(0, 1), y.flatten(0, 1)) for x, y in zip(store, expected[name]))
        pairs |= {f"k_{name}": (*k, rotated), f"v_{name}": (*v, False)}
    for name, (actual, plain, rotated) in pairs.items():  # [rows, heads, D]
        quantity = f"{name}, {label}"
        if not rotated:
            yield subject.same_bits("", quantity, actual, plain)
        elif len(actual):
            yield from subject.judged("", {quantity: judge_rotated(actual, plain, dtype)})


def judge_rotated(actual: torch.Tensor, plain: torch.Tensor, dtype: torch.dtype) -> Verdict:
    """Judge ``actual`` with ``plain`` as golden.

    ``plain`` differs from golden by at most half a unit of the dtype, which the noise includes.
    """
    actual, golden = heads_first(actual), heads_first(plain.double())
    return judge(actual, golden, golden, golden.abs(), dtype)


Pairs = dict[str, tuple[torch.Tensor, torch.Tensor]]


def _append_tensors(step: Step, data: StepData, raw_ring: int) -> tuple[Pairs, Pairs]:
    """Return the new (k, v) rows of raw, sel and win, and stores filled with NaN.

    The rows are views of one buffer, as a fused projection returns them.
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
        table = getattr(data.call.tables, name)
        size = -(-raw_ring // table.shape[1])
        if name != "raw":
            size = data.stores[f"k_{name}"].shape[1]
        stores[name] = tuple(
            data.q.new_full((table.numel(), size, groups, d), torch.nan) for d in (dk, dv)
        )
    return rows, stores  # type: ignore[return-value]


def _plain_append(
    step: Step,
    data: StepData,
    rows: Pairs,
    stores: Pairs,
    table: RopeTable | None,
    rotate_raw: bool,
) -> torch.Tensor:
    """Append token by token to ``stores`` in plain code; return the rotated q."""
    q = data.q.clone()
    for b, (length, new) in enumerate(zip(step.lengths, step.new)):
        for r in range(new):
            t = length - new + r
            angle = None if table is None else RopeTable(table.cos[t : t + 1], table.sin[t : t + 1])
            if angle is not None:
                q[b, r] = rotate(data.q[b, r : r + 1], angle)[0]
            for name, (k, v) in rows.items():
                key = k[b, r]
                if angle is not None and (name != "raw" or rotate_raw):
                    key = rotate(key[None], angle)[0]
                size, pages = stores[name][0].shape[1], getattr(data.call.tables, name)[b]
                outer = pages[t // size % len(pages)].long()
                stores[name][0][outer, t % size], stores[name][1][outer, t % size] = key, v[b, r]
    return q
