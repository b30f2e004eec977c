"""Decode forms against the oracle: a step at the end of sequences of different lengths, over a cache full of NaN.

Every store is filled with NaN before the sequences' own tokens are put in: pages in an order of their own, rings at
the places the contract names. What a kernel reads beyond them shows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from nsa_core.contract import DecodeCall
from nsa_core.verify.cases import SMALL, TINY, Case, config_of
from nsa_core.verify.parity import judge_slot
from nsa_core.verify.regret import judge_selection
from nsa_core.verify.subject import Finding, Subject, judged, name_of, same_bits


@dataclasses.dataclass(frozen=True)
class Step:
    """Sequences of ``lengths`` tokens, the last ``new`` of each arriving in this step of ``rows`` rows."""

    case: Case  # its batch and lengths are taken from the fields below
    lengths: tuple[int, ...]
    new: tuple[int, ...]
    rows: int = 1
    page_size: int | None = None


@dataclasses.dataclass(frozen=True)
class StepData:
    """A step's tensors: ``whole`` dense [B, S, ...] as the oracle takes them, ``stores`` as decode forms do."""

    q: torch.Tensor  # [B, m, Hq, Dk]
    gates: torch.Tensor  # [B, m, Hq, 3]
    whole: dict[str, torch.Tensor]
    stores: dict[str, torch.Tensor]
    call: DecodeCall


def step_data(step: Step, dtype: torch.dtype, device: torch.device | str = "cpu") -> StepData:
    """The tensors of ``step``; equal for equal (step, dtype), whatever the device."""
    longest, batch = max(step.lengths), len(step.lengths)
    case = dataclasses.replace(step.case, batch=batch, lengths=(longest,))
    config, geometry, data = case.config, case.config.geometry, case.data(dtype)
    lengths = torch.tensor(step.lengths, dtype=torch.int32)
    starts = lengths - torch.tensor(step.new, dtype=torch.int32)
    size = step.page_size or -(-longest // geometry.select_block_size) * geometry.select_block_size
    pages = -(-longest // size)
    table = torch.randperm(batch * pages, generator=torch.Generator().manual_seed(case.seed)).view(batch, pages).int()
    ring = config.window_size + step.rows - 1 + (3 if step.page_size else 0)  # larger than it must be, too
    whole = {name: getattr(data, name) for name in ("q", "gates", "k_cmp", "v_cmp", "k_sel", "v_sel", "k_win", "v_win")}
    at = (starts[:, None] + torch.arange(step.rows)).clamp(max=longest - 1).long()
    every = torch.arange(batch)[:, None]
    stores = {}
    for name, x in whole.items():
        if name in ("q", "gates"):
            continue
        rows = ring if name.endswith("_win") else size if name.endswith("_sel") else size // geometry.compress_stride
        store = x.new_full((batch if name.endswith("_win") else batch * pages, rows, *x.shape[2:]), torch.nan)
        for b, length in enumerate(step.lengths):
            owned = geometry.num_compressed(length) if name.endswith("_cmp") else length
            token = torch.arange(owned)
            if name.endswith("_win"):
                store[b, token[-ring:] % ring] = x[b, token[-ring:]]
            else:
                store[table[b, token // rows].long(), token % rows] = x[b, :owned]
        stores[name] = store.to(device)
    call = DecodeCall(
        geometry, config.softmax_scale, starts.to(device), lengths.to(device), table.to(device), max_len=longest
    )
    return StepData(whole["q"][every, at].to(device), whole["gates"][every, at].to(device), whole, stores, call)


def decode_parity(subject: Subject, step: Step, dtype: torch.dtype) -> Iterator[Finding]:
    """Every slot's decode form equals the oracle's rows of the same sequences; padding rows are empty."""
    data, config = step_data(step, dtype, subject.device), step.case.config
    plan = subject.plan(config, dtype, needs_grad=False, phase="decode", page_size=step.page_size)
    s, call = data.stores, data.call
    o_cmp, lse_cmp = plan.cmp(data.q, s["k_cmp"], s["v_cmp"], call=call)
    blocks = plan.select(data.q, s["k_cmp"], lse_cmp, call=call)
    o_sel, lse_sel = plan.sel(data.q, s["k_sel"], s["v_sel"], blocks, call=call)
    o_win, lse_win = plan.win(data.q, s["k_win"], s["v_win"], call=call)
    outputs = {"cmp": (o_cmp, lse_cmp), "sel": (o_sel, lse_sel), "win": (o_win, lse_win)}
    for b, (length, new) in enumerate(zip(step.lengths, step.new)):
        yield from _empty(step, dtype, b, new, outputs, blocks)
        if not new:
            continue
        w = {name: x[b : b + 1, :length].cpu() for name, x in data.whole.items() if not name.endswith("_cmp")}
        n_c = config.geometry.num_compressed(length)
        w |= {name: data.whole[name][b : b + 1, :n_c].cpu() for name in ("k_cmp", "v_cmp")}
        rows = list(range(length - new, length))
        yield from _judge_sequence(step, dtype, b, w, rows, outputs, blocks)


def _judge_sequence(
    step: Step,
    dtype: torch.dtype,
    b: int,
    w: dict[str, torch.Tensor],
    rows: list[int],
    outputs: dict[str, tuple[torch.Tensor, torch.Tensor]],
    blocks: torch.Tensor,
) -> Iterator[Finding]:
    config, q, new = step.case.config, w["q"], len(rows)
    lse_cmp = _placed(outputs["cmp"][1][b, :, :new].T, q, rows).transpose(1, 2).contiguous()
    chosen = _placed(blocks[b, :new], q, rows)
    verdict = judge_selection(q, w["k_cmp"], lse_cmp, chosen, config.geometry, config.softmax_scale, rows=rows)
    name, kind = f"{step.case.name}, sequence {b}", name_of(dtype)
    said = verdict.why or f"regret {verdict.regret:.2g}"
    yield Finding("decode", "select", name, kind, "blocks", verdict.ok, verdict.regret / 8, detail=said)
    inputs = {
        "cmp": {"q": q, "k_cmp": w["k_cmp"], "v_cmp": w["v_cmp"]},
        "sel": {"q": q, "k": w["k_sel"], "v": w["v_sel"], "blocks": chosen},
        "win": {"q": q, "k": w["k_win"], "v": w["v_win"]},
    }
    for slot, (o, lse) in outputs.items():
        got = {"o": _placed(o[b, :new], q, rows)}
        got["lse"] = _placed(lse[b, :, :new].T, q, rows).transpose(1, 2).contiguous()
        verdicts = judge_slot(slot, inputs[slot], got, config.geometry, config.softmax_scale, rows=rows)
        yield from judged("decode", slot, dataclasses.replace(step.case, name=name), dtype, verdicts)


def _placed(part: torch.Tensor, q: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """[r, ...] as rows ``rows`` of a [1, S, ...] tensor on the CPU, zero elsewhere."""
    placed = torch.zeros((1, q.shape[1], *part.shape[1:]), dtype=part.dtype)
    placed[0, rows] = part.cpu()
    return placed


def _empty(
    step: Step,
    dtype: torch.dtype,
    b: int,
    new: int,
    outputs: dict[str, tuple[torch.Tensor, torch.Tensor]],
    blocks: torch.Tensor,
) -> Iterator[Finding]:
    """Rows past a sequence's last token: o 0, lse -inf, blocks -1."""
    if new == step.rows:
        return
    for slot, (o, lse) in outputs.items():
        o_tail, lse_tail = o[b, new:], lse[b, :, new:]
        yield same_bits("decode", slot, step.case, dtype, "o of padding", o_tail, torch.zeros_like(o_tail))
        empty = torch.full_like(lse_tail, -torch.inf)
        yield same_bits("decode", slot, step.case, dtype, "lse of padding", lse_tail, empty)
    tail = blocks[b, new:]
    yield same_bits("decode", "select", step.case, dtype, "blocks of padding", tail, torch.full_like(tail, -1))


def quick_steps() -> tuple[Step, ...]:
    """One token and several, ragged, with and without pages, around the edges of blocks and windows."""
    tiny, small = config_of(4, 2, 16, 16, TINY), config_of(12, 2, 64, 64, SMALL)
    ragged = (1, 7, 8, 15, 16, 17, 23, 24, 25, 64, 77)
    return (
        Step(Case("one token", tiny, ()), ragged, (1,) * len(ragged)),
        Step(Case("one token, pages", tiny, ()), ragged, (1,) * len(ragged), page_size=16),
        Step(Case("five tokens, some absent", tiny, ()), (5, 8, 31, 40, 66), (5, 0, 3, 5, 1), rows=5, page_size=32),
        Step(Case("reports 12/2/64", small, ()), (150, 33), (1, 1), page_size=64),
        Step(Case("h=3, Dk != Dv", config_of(3, 1, 32, 16, TINY), ()), (70, 20), (2, 2), rows=2),
        Step(Case("h=1", config_of(2, 2, 16, 16, TINY), ()), (90,), (1,)),
    )
