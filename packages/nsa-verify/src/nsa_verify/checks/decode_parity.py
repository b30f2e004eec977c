"""Compare decode forms with the oracle on a step of sequences of different lengths.

The caches are filled with NaN before the tokens of the sequences are written: to pages in a random
order, and to the ring positions that the contract defines. Table entries of unused pages are -1. So
a kernel that reads memory outside a sequence returns a visible error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from nsa_core.contract import DecodeCall
from nsa_core.dtypes import dtype_name
from nsa_core.plan.plan import Plan
from nsa_verify.checks.calls import DECODE, may_call
from nsa_verify.judge.selection import MAX_REGRET, judge_selection
from nsa_verify.judge.slot import judge_slot
from nsa_verify.problems.cases import PAPER, SMALL, TINY, Case, config_of
from nsa_verify.problems.combination import Combination
from nsa_verify.problems.findings import Finding, judged, same_bits

ODD = (16, 8, 48, 4, 20)  # l, d, l', n, w: l'/d is no power of two


@dataclasses.dataclass(frozen=True)
class Step:
    """One decode step of several sequences.

    Attributes:
        case: Configuration and data source. Its batch and lengths are replaced by those below.
        lengths: Tokens of each sequence after the step.
        new: New tokens of each sequence in this step, at most ``rows``.
        rows: Rows per sequence. Rows beyond the new tokens are padding.
        page_size: Tokens per page of the sel cache; None uses one page per sequence.
        spare_ring: Rows of the ring of win beyond the required ones; None is 3 with pages, else 0.
        wide_gates: Whether gates are from -2 to 3 instead of from 0 to 1.
        strided: Whether starts and lengths have gaps between their entries, and the block table is
            transposed.
    """

    case: Case
    lengths: tuple[int, ...]
    new: tuple[int, ...]
    rows: int = 1
    page_size: int | None = None
    spare_ring: int | None = None
    wide_gates: bool = False
    strided: bool = False


@dataclasses.dataclass(frozen=True)
class StepData:
    """The tensors of a decode step.

    Attributes:
        q: Queries of the step [B, m, Hq, Dk].
        gates: Gates of the step [B, m, Hq, 3].
        dense: All tensors of the sequences [B, S, ...], for the oracle.
        stores: Cached keys and values by name, for the decode forms.
        call: Arguments of the decode forms.
    """

    q: torch.Tensor
    gates: torch.Tensor
    dense: dict[str, torch.Tensor]
    stores: dict[str, torch.Tensor]
    call: DecodeCall


def step_data(
    step: Step, dtype: torch.dtype, device: torch.device | str = "cpu", order: int = 0
) -> StepData:
    """Create the tensors of ``step``.

    The values depend on ``step`` and ``dtype``, but not on ``device`` and ``order``.

    Args:
        step: The decode step.
        dtype: Dtype of q, keys and values.
        device: Device of the tensors; ``dense`` stays on the CPU.
        order: Seed of the page order.
    """
    longest, batch = max(step.lengths), len(step.lengths)
    case = dataclasses.replace(step.case, batch=batch, lengths=(longest,))
    config, geometry, data = case.config, case.config.geometry, case.data(dtype)
    lengths = torch.tensor(step.lengths, dtype=torch.int32)
    starts = lengths - torch.tensor(step.new, dtype=torch.int32)
    size = step.page_size or -(-longest // geometry.select_block_size) * geometry.select_block_size
    pages = -(-longest // size)
    shuffled = torch.randperm(
        batch * pages, generator=torch.Generator().manual_seed(case.seed + order)
    )
    table = shuffled.view(batch, pages).int()
    for b, length in enumerate(step.lengths):
        table[b, -(-length // size) :] = -1  # never read
    # A ring may be longer than required; steps with pages test this.
    default_spare = 3 if step.page_size else 0
    spare = default_spare if step.spare_ring is None else step.spare_ring
    ring = config.window_size + step.rows - 1 + spare
    dense = {
        name: getattr(data, name)
        for name in ("q", "gates", "k_cmp", "v_cmp", "k_sel", "v_sel", "k_win", "v_win")
    }
    if step.wide_gates:
        dense["gates"] = 5 * dense["gates"] - 2
    positions = (starts[:, None] + torch.arange(step.rows)).clamp(max=longest - 1).long()
    sequences = torch.arange(batch)[:, None]
    stores = {}
    for name, x in dense.items():
        if name in ("q", "gates"):
            continue
        rows = (
            ring
            if name.endswith("_win")
            else size
            if name.endswith("_sel")
            else size // geometry.compress_stride
        )
        store = x.new_full(
            (batch if name.endswith("_win") else batch * pages, rows, *x.shape[2:]), torch.nan
        )
        for b, length in enumerate(step.lengths):
            owned = geometry.num_compressed(length) if name.endswith("_cmp") else length
            token = torch.arange(owned)
            if name.endswith("_win"):
                store[b, token[-ring:] % ring] = x[b, token[-ring:]]
            else:
                store[table[b, token // rows].long(), token % rows] = x[b, :owned]
        stores[name] = store.to(device)
    starts, lengths, table = (x.to(device) for x in (starts, lengths, table))
    if step.strided:
        starts, lengths = column_of_table(starts), column_of_table(lengths)
        table = table.T.contiguous().T
    call = DecodeCall(geometry, config.softmax_scale, starts, lengths, table, max_len=longest)
    q, gates = (dense[name][sequences, positions].to(device) for name in ("q", "gates"))
    return StepData(q, gates, dense, stores, call)


def column_of_table(metadata: torch.Tensor) -> torch.Tensor:
    """Return integers as a column of a table: between two of the last axis is another number."""
    table = torch.stack([metadata, metadata.flip(-1) // 2 + 1], -1)
    return table[..., 0]


Results = dict[str, tuple[torch.Tensor, ...]]  # slot -> (o, lse), or (blocks,) of select
DECODE_SLOTS = ("cmp", "select", "sel", "win")


def decode_inputs(slot: str, data: StepData, upstream: Results) -> tuple[torch.Tensor, ...]:
    """Return the inputs of a decode form: tensors of the step and results of earlier slots."""
    s = data.stores
    if slot == "cmp":
        return data.q, s["k_cmp"], s["v_cmp"]
    if slot == "select":
        return data.q, s["k_cmp"], upstream["cmp"][1]
    if slot == "sel":
        return data.q, s["k_sel"], s["v_sel"], upstream["select"][0]
    return data.q, s["k_win"], s["v_win"]


def run_step(
    plan: Plan, data: StepData, slots: Sequence[str] = DECODE_SLOTS, results: Results | None = None
) -> Results:
    """Run the decode forms of ``slots`` once, in the order of the data flow.

    Args:
        plan: A plan for decoding.
        data: Tensors of the step.
        slots: Slots to run.
        results: Results of the slots before them.
    """
    results = dict(results or {})
    for slot in slots:
        result = getattr(plan, slot)(*decode_inputs(slot, data, results), call=data.call)
        results[slot] = (result,) if isinstance(result, torch.Tensor) else tuple(result)
    return results


def decode_plan(
    combination: Combination, step: Step, dtype: torch.dtype, *, deterministic: bool = False
) -> Plan:
    """Plan ``step`` with the backends of ``combination``.

    Raises:
        NSAError: As :meth:`Combination.plan`.
    """
    return combination.plan(
        step.case.config,
        dtype,
        needs_grad=False,
        phase="decode",
        page_size=step.page_size,
        deterministic=deterministic,
    )


@may_call(*DECODE)
def decode_parity(
    combination: Combination,
    step: Step,
    dtype: torch.dtype,
    reorder: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> Iterator[Finding]:
    """Check that every decode form equals the oracle, and that padding rows are empty.

    Memory outside the sequences holds NaN, so this check includes the poison check of prefill.

    Args:
        combination: Combination to judge.
        step: The step.
        dtype: Dtype of q, k and v.
        reorder: Changes the blocks that sel receives; None passes on those of select.
    """
    data = step_data(step, dtype, combination.device)
    plan = decode_plan(combination, step, dtype)
    results = run_step(plan, data, ("cmp", "select", "win"))
    yield from judge_step(step, dtype, data, results, ("cmp", "select", "win"))
    if reorder is not None:
        results["select"] = (reorder(results["select"][0]),)
    results = run_step(plan, data, ("sel",), results)
    yield from judge_step(step, dtype, data, results, ("sel",))


def judge_step(
    step: Step, dtype: torch.dtype, data: StepData, results: Results, slots: Sequence[str]
) -> Iterator[Finding]:
    """Judge ``slots`` of ``results``.

    ``results`` must also hold the inputs that these slots received: the lse of cmp for select, and
    the blocks of select for sel.
    """
    for b, new in enumerate(step.new):
        yield from _judge_padding(step, dtype, b, new, results, slots)
    p, config = packed(step, data), step.case.config
    common: dict[str, Any] = {"cu_seqlens": p.cu_seqlens, "rows": p.rows}
    t = p.tensors
    inputs = {
        "cmp": {"q": t["q"], "k_cmp": t["k_cmp"], "v_cmp": t["v_cmp"]},
        "sel": {"q": t["q"], "k": t["k_sel"], "v": t["v_sel"]},
        "win": {"q": t["q"], "k": t["k_win"], "v": t["v_win"]},
    }
    if "select" in results:
        inputs["sel"]["blocks"] = blocks = p.scatter(results["select"][0])
    for slot in slots:
        if slot == "select":
            lse = p.scatter(results["cmp"][1].transpose(1, 2)).T.contiguous()
            verdict = judge_selection(
                t["q"], t["k_cmp"], lse, blocks, config.geometry, config.softmax_scale, **common
            )
            detail = (
                verdict.why + p.describe(verdict.where[:1])
                if verdict.why
                else f"regret {verdict.regret:.2g}"
            )
            fraction = verdict.regret / MAX_REGRET
            yield Finding(
                "decode",
                slot,
                step.case.name,
                dtype_name(dtype),
                "blocks",
                verdict.ok,
                fraction,
                detail=detail,
            )
            continue
        o, lse = results[slot]
        outputs = {"o": p.scatter(o), "lse": p.scatter(lse.transpose(1, 2)).T.contiguous()}
        verdicts = judge_slot(
            slot, inputs[slot], outputs, config.geometry, config.softmax_scale, **common
        )
        verdicts = {
            n: dataclasses.replace(v, why=v.why and v.why + p.describe(v.where[1:]))
            for n, v in verdicts.items()
        }
        yield from judged("decode", slot, step.case, dtype, verdicts)


@dataclasses.dataclass(frozen=True)
class PackedStep:
    """The sequences of a step, concatenated as packed documents.

    The rows of a step are judged together. The bias rule needs many rows: the error of a single row
    is biased towards its largest weight.

    Attributes:
        tensors: Tensors of the sequences [T, ...]; k_cmp and v_cmp [T // d, ...].
        cu_seqlens: Document bounds.
        rows: Packed indices of the new tokens of the step.
        places: (sequence, row of the step) of each new token.
        shape: (sequences, rows of the step).
    """

    tensors: dict[str, torch.Tensor]
    cu_seqlens: torch.Tensor
    rows: list[int]
    places: list[tuple[int, int]]
    shape: tuple[int, int]

    def gather(self, x: torch.Tensor, fill: float) -> torch.Tensor:
        """Gather the rows of the step from [T, ...] to [B, m, ...], with ``fill`` in padding."""
        gathered = x.new_full((*self.shape, *x.shape[1:]), fill)
        if self.rows:
            sequences, rows = zip(*self.places)
            gathered[list(sequences), list(rows)] = x[self.rows]
        return gathered

    def scatter(self, x: torch.Tensor) -> torch.Tensor:
        """Scatter [B, m, ...] to [T, ...] on the CPU, with zeros outside the step."""
        scattered = torch.zeros((int(self.cu_seqlens[-1]), *x.shape[2:]), dtype=x.dtype)
        if self.rows:
            sequences, rows = zip(*self.places)
            scattered[self.rows] = x.cpu()[list(sequences), list(rows)]
        return scattered

    def describe(self, where: tuple[int, ...]) -> str:
        """Name the sequence and row of the packed token ``where``, for a message."""
        matches = [place for token, place in zip(self.rows, self.places) if where == (token,)]
        return f" (row {matches[0][1]} of sequence {matches[0][0]})" if matches else ""


def packed(step: Step, data: StepData) -> PackedStep:
    """Concatenate the sequences of ``step`` as packed documents on the CPU."""
    ends = torch.tensor([0, *step.lengths]).cumsum(0)
    geometry, tensors = step.case.config.geometry, {}
    for name, x in data.dense.items():
        owned = [
            geometry.num_compressed(length) if name.endswith("_cmp") else length
            for length in step.lengths
        ]
        parts = [x[b, :count].cpu() for b, count in enumerate(owned)]
        if name.endswith("_cmp"):  # the contract allocates T // d rows; the tail is never read
            parts.append(
                parts[0].new_full(
                    (int(ends[-1]) // geometry.compress_stride - sum(owned), *x.shape[2:]), 0.0
                )
            )
        tensors[name] = torch.cat(parts)
    places = [(b, r) for b, new in enumerate(step.new) for r in range(new)]
    rows = [int(ends[b + 1]) - step.new[b] + r for b, r in places]
    return PackedStep(tensors, ends.int(), rows, places, (len(step.lengths), step.rows))


def _judge_padding(
    step: Step, dtype: torch.dtype, b: int, new: int, results: Results, slots: Sequence[str]
) -> Iterator[Finding]:
    """Check that the padding rows of sequence ``b`` hold o = 0, lse = -inf and blocks = -1."""
    if new == step.rows:
        return
    for slot in slots:
        if slot == "select":
            tail = results[slot][0][b, new:]
            yield same_bits(
                "decode",
                slot,
                step.case,
                dtype,
                "blocks of padding",
                tail,
                torch.full_like(tail, -1),
            )
            continue
        o, lse = results[slot][0][b, new:], results[slot][1][b, :, new:]
        yield same_bits("decode", slot, step.case, dtype, "o of padding", o, torch.zeros_like(o))
        yield same_bits(
            "decode",
            slot,
            step.case,
            dtype,
            "lse of padding",
            lse,
            torch.full_like(lse, -torch.inf),
        )


def quick_steps() -> tuple[Step, ...]:
    """Return the steps of the quick preset.

    They have one or several new tokens, different lengths around the edges of blocks and windows,
    and run with and without pages.
    """
    tiny, small = config_of(4, 2, 16, 16, TINY), config_of(12, 2, 64, 64, SMALL)
    free = dataclasses.replace(tiny, init_blocks=0, local_blocks=0)
    ragged = (1, 7, 8, 15, 16, 17, 23, 24, 25, 64, 77)
    return (
        Step(Case("one token", tiny, ()), ragged, (1,) * 11),
        Step(Case("one token, pages", tiny, ()), ragged, (1,) * 11, page_size=16),
        Step(
            Case("five tokens, some absent", tiny, ()),
            (5, 8, 31, 40, 0, 66),
            (5, 0, 3, 5, 0, 1),
            5,
            page_size=32,
        ),
        Step(
            Case("reports 12/2/64", small, ()),
            (150, 133, 149, 164, 96, 127),
            (5,) * 6,
            rows=5,
            page_size=64,
        ),
        Step(Case("a chunk", tiny, ()), (21, 10, 75), (10, 10, 10), rows=10, page_size=16),
        Step(
            Case("h=20", config_of(20, 1, 24, 16, ODD), ()),
            (196, 48, 64, 97),
            (3, 3, 3, 3),
            3,
            page_size=48,
        ),
        Step(
            Case("h=3, Dk != Dv", config_of(3, 1, 32, 16, TINY), ()),
            (70, 20, 33, 9),
            (2, 2, 2, 2),
            rows=2,
        ),
        Step(Case("nothing forced", free, ()), (70, 33, 90, 65, 49, 81, 17, 96), (1,) * 8),
        Step(
            Case("h=1", config_of(2, 2, 16, 16, TINY), ()),
            (90, 33, 64, 21, 48, 12, 80, 35),
            (1,) * 8,
        ),
        Step(
            Case("large scores", config_of(2, 2, 16, 16, TINY), (), sharpness=30.0),
            (70, 9, 24, 33),
            (2, 2, 1, 2),
            rows=2,
        ),
    )


def full_steps() -> tuple[Step, ...]:
    """Return the steps of the full preset.

    It adds the paper's block sizes around their edges, and steps at the end of long caches.
    """
    reports = config_of(12, 2, 64, 64, PAPER)
    edges = (1, 31, 32, 33, 63, 64, 65, 127, 511, 512, 513, 1025)
    return (
        *quick_steps(),
        Step(Case("real blocks", reports, ()), edges, (1, *(4,) * 11), rows=4, page_size=128),
        Step(
            Case("real blocks, eight tokens", reports, ()),
            (1100, 40, 515, 700),
            (8, 8, 3, 8),
            8,
            page_size=64,
        ),
        Step(
            Case("long cache", reports, ()),
            (4096, 4033, 3000, 2049),
            (8, 8, 8, 8),
            rows=8,
            page_size=128,
        ),
        # Sharpness below 1: an fp32 product of 192 terms has an error of about 16 units of 2^-24. A
        # row with few compressed tokens, one of which dominates, is scaled by the error of that
        # score. At sharpness 1 this biases a head by 2.2 units where the bias rule allows 1.9, also
        # in the fp32 arithmetic of the reference.
        Step(
            Case("paper 16/1 192/128", config_of(16, 1, 192, 128, PAPER), (), sharpness=0.5),
            (1100, 513, 640, 597),
            (8,) * 4,
            8,
            64,
        ),
        Step(
            Case("MQA h=64", config_of(64, 1, 16, 16, TINY), ()),
            (65, 30, 48, 17),
            (2, 1, 2, 2),
            2,
            page_size=16,
        ),
        Step(
            Case("h=7, Dv > Dk", config_of(7, 1, 16, 24, TINY), ()),
            (64, 17, 33, 80, 49, 25),
            (1,) * 6,
            page_size=32,
        ),
        Step(
            Case("large scores 12/2/64", config_of(12, 2, 64, 64, SMALL), (), sharpness=100.0),
            (150, 133, 64, 127),
            (3, 1, 2, 3),
            rows=3,
            page_size=64,
        ),
    )


def interpreter_steps() -> tuple[Step, ...]:
    """Return the steps for interpreted kernels.

    They have a page edge, a sequence shorter than l, a ring that has wrapped around, and padding.
    """
    tiny = config_of(2, 1, 16, 16, (8, 4, 16, 3, 12))
    odd = dataclasses.replace(
        config_of(3, 1, 16, 16, (8, 4, 16, 3, 5)), init_blocks=0, local_blocks=0
    )
    return (
        Step(Case("interpreted step", tiny, ()), (70, 16, 5, 33, 49, 77), (1,) * 6, page_size=16),
        Step(
            Case("interpreted step, three tokens", tiny, ()),
            (33, 3, 21, 60),
            (3, 3, 0, 2),
            rows=3,
            page_size=32,
        ),
        Step(Case("interpreted step, nothing forced", odd, ()), (65, 17, 80, 50), (1,) * 4),
    )


STEPS: dict[str, Callable[[], tuple[Step, ...]]] = {
    "quick": quick_steps,
    "full": full_steps,
    "interpreter": interpreter_steps,
}
