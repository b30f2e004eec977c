"""Decode forms against the oracle: a step at the end of sequences of different lengths, over a
cache full of NaN.

Every store is filled with NaN before the sequences' own tokens are put in: pages in an order of
their own, rings at the places the contract names; pages that no token needs are -1. What a kernel
reads beyond them shows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from nsa_core.contract import DecodeCall
from nsa_core.dispatch.plan import Plan
from nsa_core.dtypes import dtype_name
from nsa_verify.cases import PAPER, SMALL, TINY, Case, config_of
from nsa_verify.combination import Combination
from nsa_verify.findings import Finding, judged, same_bits
from nsa_verify.judge.selection import judge_selection
from nsa_verify.judge.slot import judge_slot

ODD = (16, 8, 48, 4, 20)  # l, d, l', n, w: l'/d is no power of two


@dataclasses.dataclass(frozen=True)
class Step:
    """Sequences of ``lengths`` tokens, the last ``new`` of each arriving in this step of ``rows``
    rows.
    """

    case: Case  # its batch and lengths are taken from the fields below
    lengths: tuple[int, ...]
    new: tuple[int, ...]
    rows: int = 1
    page_size: int | None = None


@dataclasses.dataclass(frozen=True)
class StepData:
    """A step's tensors: ``whole`` dense [B, S, ...] as the oracle takes them, ``stores`` as decode
    forms do.
    """

    q: torch.Tensor  # [B, m, Hq, Dk]
    gates: torch.Tensor  # [B, m, Hq, 3]
    whole: dict[str, torch.Tensor]
    stores: dict[str, torch.Tensor]
    call: DecodeCall


def step_data(
    step: Step, dtype: torch.dtype, device: torch.device | str = "cpu", order: int = 0
) -> StepData:
    """The tensors of ``step``; equal for equal (step, dtype, order), whatever the device.

    ``order`` shuffles the pages: the sequences' own numbers are the same, they lie elsewhere.
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
    # larger than it must be, too
    ring = config.window_size + step.rows - 1 + (3 if step.page_size else 0)
    whole = {
        name: getattr(data, name)
        for name in ("q", "gates", "k_cmp", "v_cmp", "k_sel", "v_sel", "k_win", "v_win")
    }
    at = (starts[:, None] + torch.arange(step.rows)).clamp(max=longest - 1).long()
    every = torch.arange(batch)[:, None]
    stores = {}
    for name, x in whole.items():
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
    call = DecodeCall(
        geometry,
        config.softmax_scale,
        starts.to(device),
        lengths.to(device),
        table.to(device),
        max_len=longest,
    )
    return StepData(
        whole["q"][every, at].to(device), whole["gates"][every, at].to(device), whole, stores, call
    )


# slot -> what its decode form returned: o and lse, or blocks
Results = dict[str, tuple[torch.Tensor, ...]]
DECODE_SLOTS = ("cmp", "select", "sel", "win")


def received(slot: str, data: StepData, upstream: Results) -> tuple[torch.Tensor, ...]:
    """The tensors that ``slot``'s decode form takes: the step's, and what the slots before it
    returned.
    """
    s = data.stores
    if slot == "cmp":
        return data.q, s["k_cmp"], s["v_cmp"]
    if slot == "select":
        return data.q, s["k_cmp"], upstream["cmp"][1]
    if slot == "sel":
        return data.q, s["k_sel"], s["v_sel"], upstream["select"][0]
    return data.q, s["k_win"], s["v_win"]


def run_step(plan: Plan, data: StepData) -> Results:
    """Every decode form of ``plan`` once, in the order data flows."""
    results: Results = {}
    for slot in DECODE_SLOTS:
        made = getattr(plan, slot)(*received(slot, data, results), call=data.call)
        results[slot] = (made,) if isinstance(made, torch.Tensor) else tuple(made)
    return results


def decode_plan(
    combination: Combination, step: Step, dtype: torch.dtype, *, deterministic: bool = False
) -> Plan:
    """The combination's plan for ``step``; resolve()'s errors pass through."""
    return combination.plan(
        step.case.config,
        dtype,
        needs_grad=False,
        phase="decode",
        page_size=step.page_size,
        deterministic=deterministic,
    )


def decode_parity(combination: Combination, step: Step, dtype: torch.dtype) -> Iterator[Finding]:
    """Every slot's decode form equals the oracle's rows of the same sequences; padding rows are
    empty.

    All that no sequence owns is NaN here (the module's first paragraph): there is no poison check
    of its own.
    """
    data = step_data(step, dtype, combination.device)
    results = run_step(decode_plan(combination, step, dtype), data)
    yield from judge_step(step, dtype, data, results, DECODE_SLOTS)


def judge_step(
    step: Step, dtype: torch.dtype, data: StepData, results: Results, slots: Sequence[str]
) -> Iterator[Finding]:
    """Judge ``slots`` of ``results``; those that they were given (cmp's lse, select's blocks) must
    be among them.
    """
    for b, new in enumerate(step.new):
        yield from _empty(step, dtype, b, new, results, slots)
    p, config = packed(step, data), step.case.config
    common: dict[str, Any] = {"cu_seqlens": p.cu_seqlens, "rows": p.rows}
    inputs = {
        "cmp": {"q": p.whole["q"], "k_cmp": p.whole["k_cmp"], "v_cmp": p.whole["v_cmp"]},
        "sel": {"q": p.whole["q"], "k": p.whole["k_sel"], "v": p.whole["v_sel"]},
        "win": {"q": p.whole["q"], "k": p.whole["k_win"], "v": p.whole["v_win"]},
    }
    if "select" in results:
        inputs["sel"]["blocks"] = blocks = p.placed(results["select"][0])
    for slot in slots:
        if slot == "select":
            lse = p.placed(results["cmp"][1].transpose(1, 2)).T.contiguous()
            given = (
                p.whole["q"],
                p.whole["k_cmp"],
                lse,
                blocks,
                config.geometry,
                config.softmax_scale,
            )
            verdict = judge_selection(*given, **common)
            said = (
                verdict.why + p.said(verdict.where[:1])
                if verdict.why
                else f"regret {verdict.regret:.2g}"
            )
            share = verdict.regret / 8
            yield Finding(
                "decode",
                slot,
                step.case.name,
                dtype_name(dtype),
                "blocks",
                verdict.ok,
                share,
                detail=said,
            )
            continue
        o, lse = results[slot]
        got = {"o": p.placed(o), "lse": p.placed(lse.transpose(1, 2)).T.contiguous()}
        verdicts = judge_slot(
            slot, inputs[slot], got, config.geometry, config.softmax_scale, **common
        )
        told = {
            n: dataclasses.replace(v, why=v.why and v.why + p.said(v.where[1:]))
            for n, v in verdicts.items()
        }
        yield from judged("decode", slot, step.case, dtype, told)


@dataclasses.dataclass(frozen=True)
class PackedStep:
    """A step's sequences one after the other, as packed documents.

    So that the rows of a step are judged together: a bias is what the errors of many rows have in
    common, and the error of one row alone leans as its largest weight does.
    """

    whole: dict[str, torch.Tensor]  # [T, ...]; k_cmp, v_cmp [T // d, ...]
    cu_seqlens: torch.Tensor
    rows: list[int]  # the tokens of this step, in T
    places: list[tuple[int, int]]  # (sequence, row of the step) of each
    shape: tuple[int, int]  # sequences, and rows of the step

    def rows_of(self, x: torch.Tensor, fill: float) -> torch.Tensor:
        """This step's rows of [T, ...] as [B, m, ...], ``fill`` where a row is padding."""
        made = x.new_full((*self.shape, *x.shape[1:]), fill)
        if self.rows:
            sequences, rows = zip(*self.places)
            made[list(sequences), list(rows)] = x[self.rows]
        return made

    def placed(self, part: torch.Tensor) -> torch.Tensor:
        """[B, m, ...] as [T, ...] on the CPU, zero but for this step's tokens."""
        made = torch.zeros((int(self.cu_seqlens[-1]), *part.shape[2:]), dtype=part.dtype)
        if self.rows:
            sequences, rows = zip(*self.places)
            made[self.rows] = part.cpu()[list(sequences), list(rows)]
        return made

    def said(self, where: tuple[int, ...]) -> str:
        """Which sequence and row of the step the token ``where`` is, for a message."""
        found = [place for token, place in zip(self.rows, self.places) if where == (token,)]
        return f" (row {found[0][1]} of sequence {found[0][0]})" if found else ""


def packed(step: Step, data: StepData) -> PackedStep:
    """``step`` as packed documents on the CPU."""
    ends = torch.tensor([0, *step.lengths]).cumsum(0)
    geometry, whole = step.case.config.geometry, {}
    for name, x in data.whole.items():
        owned = [
            geometry.num_compressed(length) if name.endswith("_cmp") else length
            for length in step.lengths
        ]
        parts = [x[b, :count].cpu() for b, count in enumerate(owned)]
        if name.endswith("_cmp"):  # the contract's bound, its tail never read
            parts.append(
                parts[0].new_full(
                    (int(ends[-1]) // geometry.compress_stride - sum(owned), *x.shape[2:]), 0.0
                )
            )
        whole[name] = torch.cat(parts)
    places = [(b, r) for b, new in enumerate(step.new) for r in range(new)]
    rows = [int(ends[b + 1]) - step.new[b] + r for b, r in places]
    return PackedStep(whole, ends.int(), rows, places, (len(step.lengths), step.rows))


def _empty(
    step: Step, dtype: torch.dtype, b: int, new: int, results: Results, slots: Sequence[str]
) -> Iterator[Finding]:
    """Rows past a sequence's last token: o 0, lse -inf, blocks -1."""
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
    """One token and several, ragged, with and without pages, around the edges of blocks and
    windows.
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
    )


def full_steps() -> tuple[Step, ...]:
    """The quick steps, real block sizes around their edges, and steps sampled from a long cache."""
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
        # Flat: an fp32 product of 192 terms is wrong by some 16 units of 2^-24, and a row that one
        # of few compressed tokens dominates moves with its score as a whole; at sharpness 1 that
        # leans a head by more than the bias rule lets chance do, in the oracle's own fp32
        # arithmetic (2.2 units, 1.9 allowed) as in any kernel.
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
    )


def interpreter_steps() -> tuple[Step, ...]:
    """For kernels in an interpreter: a page edge, a sequence shorter than l, a ring that has come
    round, padding.
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
