"""The results of a step: judged at slot boundaries, and in float64 from input to output."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from nsa_verify import oracle
from nsa_verify.checks.decode_fused import judge_composed
from nsa_verify.checks.decode_parity import judge_step
from nsa_verify.drawn.caches import layers
from nsa_verify.drawn.caches.chunks import ChunkCall, chunk_faults, chunk_of
from nsa_verify.drawn.caches.contents import Fault, received, received_faults
from nsa_verify.drawn.caches.replay import Called, Done, Replay
from nsa_verify.drawn.case import EXCHANGES
from nsa_verify.judge.tensor import judge
from nsa_verify.problems.cases import Case
from nsa_verify.problems.step_data import StepData
from nsa_verify.problems.step_runs import DECODE_SLOTS
from nsa_verify.problems.steps import Step

# One call of every decode form, by slot; of a fused step, "step" alone.
Group = dict[str, Called]


def judge_output(replay: Replay, done: Done) -> Iterator[Fault]:
    """Yield the faults of a step.

    The decode forms, or the kernels of a long chunk, must receive the lengths of the model and the
    rows of a prefill. Their results are judged given the tensors that they received. In float64,
    the output of the layer is judged against the oracle on the whole sequences, given the selected
    blocks, which are judged too.
    """
    lengths = list(done.before)
    chunks: list[ChunkCall] = []
    groups: list[Group] = []
    rows = [replay.rows.of(sequence.tokens) for sequence in done.model.sequences]
    for group in _groups(done.calls):
        call = next(iter(group.values())).call
        if call is None:
            last = chunks[-1].sequences[-1] if chunks else -1
            chunk = chunk_of(group, lengths, done.model.lengths, last)
            yield from chunk_faults(replay.history, chunk, rows, replay.fused_append)
            if not chunk.sequences:
                return
            for b in chunk.sequences:
                lengths[b] = chunk.end
            chunks.append(chunk)
            continue
        groups.append(group)
        spans = list(zip(call.starts.tolist(), call.lengths.tolist()))
        if [start for start, _ in spans] != lengths:
            yield Fault("", "lengths of a step", f"it starts at {spans}, expected {lengths}")
            return
        lengths = [length for _, length in spans]
        yield from _group_faults(replay, group, spans, rows)
    if (groups or chunks) and lengths != done.model.lengths:
        yield Fault("", "lengths of a step", f"{lengths}, expected {done.model.lengths}")
        return
    if replay.history.torch_dtype == torch.float64:
        yield from _output_faults(replay, done, groups, chunks)


def _groups(calls: Sequence[Called]) -> list[Group]:
    """Return the calls of decode forms and of long chunks, one group per chunk; none in a prefill.

    The calls of a long chunk have no ``call``.
    """
    groups: list[Group] = []
    for called in calls:
        if called.call is None and called.first_query is None:
            continue
        if called.slot in ("cmp", "step"):
            groups.append({})
        groups[-1][called.slot] = called
    return groups


def _group_faults(
    replay: Replay,
    group: Group,
    spans: Sequence[tuple[int, int]],
    rows: Sequence[layers.Rows],
) -> Iterator[Fault]:
    """Yield the faults of one call of the decode forms on sequences (start, length)."""
    config = replay.history.config
    stores = _stores(group)
    first = next(iter(group.values()))
    q, call = first.tensors[0], first.call
    assert call is not None
    dense = received(config, q, stores, call, spans)
    yield from received_faults(config, dense, rows, spans, replay.fused_append)
    lengths, new = (tuple(length for _, length in spans), tuple(b - a for a, b in spans))
    case = Case("history", config, (max(lengths),), batch=len(spans))
    page_size = replay.history.page_size or None
    step = Step(case, lengths, new, q.shape[1], page_size, exchanges=EXCHANGES)
    data = StepData(q, q, dense, stores, call)
    if "step" in group:
        gates = group["step"].tensors[1]
        dense["gates"] = torch.zeros((*dense["q"].shape[:-1], 3), dtype=gates.dtype)
        for b, (start, length) in enumerate(spans):
            dense["gates"][b, start:length] = gates[b, : length - start].cpu()
        findings = judge_composed(step, replay.history.torch_dtype, data, *group["step"].results)
    else:
        results = {slot: called.results for slot, called in group.items()}
        slots = ("select",) if replay.history.torch_dtype == torch.float64 else DECODE_SLOTS
        findings = judge_step(step, replay.history.torch_dtype, data, results, slots)
    for finding in findings:
        if finding.ok is False:
            yield Fault(finding.slot, f"{finding.quantity} of a step", finding.detail)


def _stores(group: Group) -> dict[str, torch.Tensor]:
    """Return the stores that the decode forms received, by name."""
    if "step" in group:
        names = ("k_cmp", "v_cmp", "k_sel", "v_sel", "k_win", "v_win")
        return dict(zip(names, group["step"].tensors[2:]))
    branches = itertools.product(("cmp", "sel", "win"), enumerate("kv"))
    return {f"{kind}_{slot}": group[slot].tensors[1 + i] for slot, (i, kind) in branches}


def _output_faults(
    replay: Replay, done: Done, groups: Sequence[Group], chunks: Sequence[ChunkCall]
) -> Iterator[Fault]:
    """Judge the output of the new tokens in float64 against the oracle on whole sequences."""
    config, attn = replay.history.config, replay.attn
    active = [b for b, new in enumerate(done.operation.values) if new]
    if not active:
        return
    sequences = [done.model.sequences[b].tokens for b in active]
    ends = torch.tensor([0, *map(len, sequences)]).cumsum(0).int()
    x = torch.cat([layers.inputs(tokens, attn) for tokens in sequences])
    state = attn.state_dict()
    p = oracle.project(state, x, config, cu_seqlens=ends)
    first = {b: int(ends[i]) for i, b in enumerate(active)}
    rows = [first[b] + t for b in active for t in range(done.before[b], done.model.lengths[b])]
    blocks = _blocks(done, groups, chunks, active, first, (len(x), config))
    options: dict[str, Any] = {"cu_seqlens": ends, "rows": rows}

    def output(absolute: bool) -> torch.Tensor:
        """The layer's output, or its magnitude: the sums over absolute values."""
        (_, v_sel, v_win), v_cmp = p.v, p.v_cmp
        weight = state["out.weight"].double()
        if absolute:
            v_sel, v_win, v_cmp, weight = (t.abs() for t in (v_sel, v_win, v_cmp, weight))
        sizes = (config.geometry, config.softmax_scale)
        o = oracle.combine(
            p.gates,
            oracle.cmp(p.q, p.k_cmp, v_cmp, *sizes, **options).o,
            oracle.sel(p.q, p.k[1], v_sel, blocks, *sizes, **options).o,
            oracle.win(p.q, p.k[2], v_win, *sizes, **options).o,
        ).o
        y: torch.Tensor = o[rows].flatten(-2) @ weight.T
        return y

    golden = output(absolute=False)
    actual = torch.cat([done.y[b, : done.operation.values[b]] for b in active])
    verdict = judge(
        actual[None], golden[None], golden[None], output(absolute=True)[None], torch.float64
    )
    if not verdict:
        place = _place(done, active, verdict.where)
        yield Fault("", "y", f"{verdict.why}{place}")


def _blocks(
    done: Done,
    groups: Sequence[Group],
    chunks: Sequence[ChunkCall],
    active: Sequence[int],
    first: dict[int, int],
    shape: tuple[int, Any],
) -> torch.Tensor:
    """Return the blocks that the layer selected, int32 [T, G, n] of the packed sequences."""
    total, config = shape
    blocks = torch.full((total, config.n_kv_heads, config.num_selected_blocks), -1).int()
    for group in groups:
        called = group["step" if "step" in group else "select"]
        assert called.call is not None
        for b, (start, length) in enumerate(
            zip(called.call.starts.tolist(), called.call.lengths.tolist())
        ):
            if length > start:
                at = slice(first[b] + start, first[b] + length)
                blocks[at] = called.results[-1][b, : length - start].cpu()
    for chunk in chunks:
        for row, b in enumerate(chunk.sequences):
            at = slice(first[b] + chunk.start, first[b] + chunk.end)
            blocks[at] = chunk.calls["select"].results[0][row].cpu()
    if not groups and not chunks:
        (selected,) = next(called for called in done.calls if called.slot == "select").results
        # A host that has upper bounds only does not know which sequences get no token.
        rows = active if len(selected) == len(active) else range(len(selected))
        for row, b in enumerate(rows):
            if b in first:
                length = done.model.lengths[b]
                blocks[first[b] : first[b] + length] = selected[row, :length].cpu()
    return blocks


def _place(done: Done, active: Sequence[int], where: tuple[int, ...]) -> str:
    """Name the sequence and token of a judged row."""
    places = [(b, t) for b in active for t in range(done.before[b], done.model.lengths[b])]
    if len(where) < 2 or where[1] >= len(places):
        return ""
    b, t = places[where[1]]
    return f" (token {t} of sequence {b})"
