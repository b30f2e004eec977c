"""Which cached tokens a step reads, found by experiment on the kernels, beside what
docs/semantics.md says.

One sequence, as many copies of it as there are rows in its cache, and in each copy one row changed:
a value by a large number, a key so that its score is high. A row is read where o (or the LSE) of
its copy is another than the original's. Copies share all pages but one. What is counted is a set of
tokens per branch and kv head, and the set must be right.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from nsa_core.config import NSAConfig
from nsa_core.contract import BRANCHES
from nsa_core.dispatch.plan import Plan
from nsa_core.dtypes import dtype_name
from nsa_verify.cases import PAPER, Case, config_of
from nsa_verify.checks.decode_parity import (
    Results,
    Step,
    StepData,
    decode_plan,
    run_step,
    step_data,
)
from nsa_verify.combination import Combination
from nsa_verify.findings import Finding

PAPER_BOUND = {8192: 2048, 16384: 2560, 32768: 3584, 65536: 5632}  # the paper's Table 4
CHUNK = 256  # copies of one call
_VALUE, _SCORE = 1e4, 25.0  # added to a value, and to the score of a key for its group's first head
# Weights are near uniform (queries are small), so that a read row moves o by more than a hundredth
# of _VALUE / keys.
_SHARPNESS = 0.25
LENGTHS = (1, 31, 32, 47, 48, 64, 511, 512, 513, 1024, 8192)  # of `nsa verify --reads`


@dataclasses.dataclass(frozen=True)
class Reads:
    """What one branch reads for one kv head in a step at ``length`` tokens: compressed tokens for
    cmp, else tokens.

    ``counted_values`` and ``counted_keys`` are sizes of the sets found by experiment; ``ok`` that
    both sets are the predicted one. Bytes of keys and values: ``distinct_bytes`` once each;
    ``again_bytes`` what a further slot reads of them (select scores the keys that cmp has read);
    ``shared_bytes`` what the group's other heads would read, did they not share the first one's.
    """

    branch: str
    kv_head: int
    length: int
    predicted: int
    counted_values: int
    counted_keys: int
    ok: bool
    distinct_bytes: int
    again_bytes: int
    shared_bytes: int
    detail: str = ""


def reads_config() -> NSAConfig:
    """The reports' and the paper's block sizes on few and narrow heads."""
    return config_of(4, 2, 16, 16, PAPER)


def predicted_total(config: NSAConfig, length: int) -> int:
    """Tokens of a step of one kv head that chooses its current block: the exact form of the paper's
    S/d + n*l' + w.
    """
    geometry, t = config.geometry, length - 1
    block, chosen = (
        geometry.select_block_size,
        min(geometry.num_selected_blocks, t // geometry.select_block_size + 1),
    )
    return (
        geometry.num_compressed(length)
        + (chosen - 1) * block
        + t % block
        + 1
        + min(geometry.window_size, length)
    )


def count_reads(
    combination: Combination,
    config: NSAConfig,
    length: int,
    dtype: torch.dtype,
    *,
    chunk: int = CHUNK,
) -> list[Reads]:
    """One entry per branch and kv head, for a step of one token over pages of one selection block.

    Raises:
        Unsupported: the combination has no decode forms; resolve()'s other errors likewise.
    """
    case = Case(f"reads at {length}", config, (), sharpness=_SHARPNESS)
    step = Step(case, (length,), (1,), page_size=config.select_block_size)
    plan, data = decode_plan(combination, step, dtype), step_data(step, dtype, combination.device)
    data = dataclasses.replace(data, stores={n: x.nan_to_num(0.0) for n, x in data.stores.items()})
    results = run_step(plan, data)
    found = []
    for branch in BRANCHES:
        predicted = _predicted(branch, config, length, results["select"][0][0, 0])
        of_values = _experiment(plan, branch, "v", data, results, chunk)
        of_keys = _experiment(plan, branch, "k", data, results, chunk)
        for g in range(config.n_kv_heads):
            found.append(
                _entry(branch, g, length, config, dtype, predicted[g], of_values[g], of_keys[g])
            )
    return found


def reads(combination: Combination, step: Step, dtype: torch.dtype) -> Iterator[Finding]:
    """At each length of the step, every branch reads the tokens it must, and no other."""
    if step.rows > 1:
        return
    for length in step.lengths:
        for entry in count_reads(combination, step.case.config, length, dtype):
            where = f"kv head {entry.kv_head}, {length} tokens"
            said = entry.detail or f"{entry.predicted} predicted and counted"
            common = (
                "decode reads",
                entry.branch,
                step.case.name,
                dtype_name(dtype),
                where,
                entry.ok,
            )
            yield Finding(*common, detail=said)


def _predicted(branch: str, config: NSAConfig, length: int, blocks: torch.Tensor) -> list[set[int]]:
    """Per kv head, by the rules of docs/semantics.md; ``blocks`` [G, n] are those that were
    chosen.
    """
    geometry = config.geometry
    if branch == "cmp":
        return [
            set(
                range(
                    max(0, (length - geometry.compress_block_size) // geometry.compress_stride + 1)
                )
            )
        ] * len(blocks)
    if branch == "win":
        return [set(range(max(0, length - geometry.window_size), length))] * len(blocks)
    size = geometry.select_block_size
    return [
        {t for j in row if j >= 0 for t in range(j * size, min((j + 1) * size, length))}
        for row in blocks.tolist()
    ]


def _experiment(
    plan: Plan, branch: str, kind: str, data: StepData, results: Results, chunk: int
) -> list[set[int]]:
    """Per kv head the tokens whose row of the branch's ``kind`` store ("k" or "v") moves its
    output.
    """
    store, groups = data.stores[f"{kind}_{branch}"], data.stores[f"k_{branch}"].shape[2]
    ring = branch == "win"
    total = store.shape[1] if ring else data.call.block_table.shape[1] * store.shape[1]
    o, lse = (x.double() for x in results[branch])
    found: list[set[int]] = [set() for _ in range(groups)]
    length = int(data.call.lengths[0])
    for first in range(0, total, chunk):
        rows = torch.arange(first, min(first + chunk, total), device=store.device)
        got_o, got_lse = (x.double() for x in _run_copies(plan, branch, kind, data, results, rows))
        moved = (got_o - o).abs().amax((1, 3)) > 0.01 + 0.01 * o.abs().amax((1, 3))  # [copies, Hq]
        if kind == "k":
            moved |= ((got_lse - lse).abs() > 0.1).any(-1)
        moved |= got_o.isnan().any(3).any(1)
        for copy, g in moved.unflatten(1, (groups, -1)).any(-1).nonzero().tolist():
            row = int(rows[copy])
            token = length - 1 - (length - 1 - row) % total if ring else row
            found[g].add(token)
    return found


def _run_copies(
    plan: Plan, branch: str, kind: str, data: StepData, results: Results, rows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """o and lse of a copy of the sequence per entry of ``rows``, that row of its ``kind`` store
    changed.
    """
    call, count = data.call, len(rows)
    copies = torch.arange(count, device=rows.device)
    stores = {n: data.stores[f"{n}_{branch}"] for n in ("k", "v")}
    if branch == "win":
        table, place = call.block_table.repeat(count, 1), rows
        made = {n: x.repeat(count, 1, 1, 1) for n, x in stores.items()}
    else:
        size, pages = stores[kind].shape[1], len(stores[kind])
        page, place = rows // size, rows % size
        table = call.block_table.repeat(count, 1)
        made = {n: torch.cat((x, x[table[copies, page].long()])) for n, x in stores.items()}
        table[copies, page] = pages + copies.int()
        copies = pages + copies
    made[kind][copies, place] = _changed(made[kind][copies, place], kind, data)
    of_copies = dataclasses.replace(
        call,
        starts=call.starts.repeat(count),
        lengths=call.lengths.repeat(count),
        block_table=table,
    )
    given = [results["select"][0].repeat(count, 1, 1, 1)] if branch == "sel" else []
    o, lse = getattr(plan, branch)(
        data.q.repeat(count, 1, 1, 1), made["k"], made["v"], *given, call=of_copies
    )
    return o, lse


def _changed(row: torch.Tensor, kind: str, data: StepData) -> torch.Tensor:
    """Rows [copies, G, D] of a store, changed so that reading one shows."""
    if kind == "v":
        return row + _VALUE
    heads: torch.Tensor = data.q[0, 0].unflatten(0, (row.shape[1], -1))
    first = heads[:, 0].double()  # [G, Dk]
    toward = first * (_SCORE / data.call.scale) / first.square().sum(-1, keepdim=True)
    return (row.double() + toward).to(row.dtype)


def _entry(
    branch: str,
    kv_head: int,
    length: int,
    config: NSAConfig,
    dtype: torch.dtype,
    predicted: set[int],
    of_values: set[int],
    of_keys: set[int],
) -> Reads:
    size, count = dtype.itemsize, len(of_values | of_keys)
    once = count * (config.qk_dim + config.v_dim) * size
    again = count * config.qk_dim * size if branch == "cmp" else 0
    wrong = [
        f"{kind} of {len(found - predicted)} token(s) too many {sorted(found - predicted)[:4]}, "
        f"{len(predicted - found)} too few {sorted(predicted - found)[:4]}"
        for kind, found in (("values", of_values), ("keys", of_keys))
        if found != predicted
    ]
    return Reads(
        branch,
        kv_head,
        length,
        len(predicted),
        len(of_values),
        len(of_keys),
        not wrong,
        once,
        again,
        once * (config.n_heads // config.n_kv_heads - 1),
        "; ".join(wrong),
    )
