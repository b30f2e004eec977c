"""Count the cached tokens that a decode step reads, and compare them with the prediction.

docs/explanation/semantics.md states which tokens a step reads.

The experiment copies one sequence once per row of its cache. Each copy has one changed row: a large
number is added to a value, or a key is moved towards its query so that its score is high. The step
reads a row if o or the LSE of its copy differs from the original. Copies share all pages but one.
The result is a set of tokens per branch and kv head, which must equal the predicted set.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import torch

from nsa_core.config import NSAConfig
from nsa_core.contract import BRANCHES
from nsa_core.plan.plan import Plan
from nsa_verify.checks.under_test import StepUnderTest, step_check
from nsa_verify.problems.cases import Case
from nsa_verify.problems.combination import Combination
from nsa_verify.problems.findings import Finding
from nsa_verify.problems.step_data import StepData, step_data
from nsa_verify.problems.step_runs import Results, decode_plan, run_step
from nsa_verify.problems.steps import Step

CHUNK = 256  # copies per call
_VALUE = 1e4  # added to a value
_SCORE = 25.0  # added to the score of a key for the first head of its group
# Small queries make the weights nearly uniform, so that each row that is read changes o by more
# than _VALUE / keys / 100.
_SHARPNESS = 0.25


class Reads(NamedTuple):
    """The tokens that one branch reads for one kv head in a step; compressed tokens for cmp.

    Attributes:
        branch: cmp, sel or win.
        kv_head: Index of the kv head.
        predicted: The predicted tokens.
        values: The tokens whose values were read.
        keys: The tokens whose keys were read.
    """

    branch: str
    kv_head: int
    predicted: set[int]
    values: set[int]
    keys: set[int]

    @property
    def difference(self) -> str:
        """The differences from the predicted tokens; empty if there are none."""
        predicted = self.predicted
        return "; ".join(
            f"{kind} of {len(read - predicted)} token(s) too many {sorted(read - predicted)[:4]}, "
            f"{len(predicted - read)} too few {sorted(predicted - read)[:4]}"
            for kind, read in (("values", self.values), ("keys", self.keys))
            if read != predicted
        )


def count_reads(
    combination: Combination, config: NSAConfig, length: int, dtype: torch.dtype
) -> Iterator[Reads]:
    """Count the reads of a step of one token, with pages of one selection block.

    Args:
        combination: Combination to run.
        config: Configuration of the layer.
        length: Tokens of the sequence.
        dtype: Dtype of q, keys and values.

    Yields:
        The reads of each branch and kv head.

    Raises:
        Unsupported: The combination has no decode forms.
        NSAError: Planning the step failed for another reason.
    """
    case = Case(f"reads at {length}", config, (), sharpness=_SHARPNESS)
    step = Step(case, (length,), (1,), page_size=config.select_block_size)
    plan, data = decode_plan(combination, step, dtype), step_data(step, dtype, combination.device)
    data = dataclasses.replace(data, stores={n: x.nan_to_num(0.0) for n, x in data.stores.items()})
    results = run_step(plan, data)
    for branch in BRANCHES:
        predicted = _predicted(branch, config, length, results["select"][0][0, 0])
        values, keys = (_experiment(plan, branch, kind, data, results) for kind in "vk")
        for g in range(config.n_kv_heads):
            yield Reads(branch, g, predicted[g], values[g], keys[g])


@step_check("decode reads")
def reads(subject: StepUnderTest) -> Iterator[Finding]:
    """Check at each length of the step that every branch reads exactly the predicted tokens."""
    if subject.step.rows > 1:
        return
    for length in subject.step.lengths:
        for entry in count_reads(subject.combination, subject.case.config, length, subject.dtype):
            quantity = f"kv head {entry.kv_head}, {length} tokens"
            detail = entry.difference or f"{len(entry.predicted)} predicted and counted"
            yield subject.finding(entry.branch, quantity, not entry.difference, detail=detail)


def _predicted(branch: str, config: NSAConfig, length: int, blocks: torch.Tensor) -> list[set[int]]:
    """Return the tokens that each kv head reads by definition, given its ``blocks`` [G, n]."""
    geometry = config.geometry
    if branch == "cmp":
        size, stride = geometry.compress_block_size, geometry.compress_stride
        return [set(range(max(0, (length - size) // stride + 1)))] * len(blocks)
    if branch == "win":
        return [set(range(max(0, length - geometry.window_size), length))] * len(blocks)
    size = geometry.select_block_size
    return [
        {t for j in row if j >= 0 for t in range(j * size, min((j + 1) * size, length))}
        for row in blocks.tolist()
    ]


def _experiment(
    plan: Plan, branch: str, kind: str, data: StepData, results: Results
) -> list[set[int]]:
    """Return the tokens of each kv head whose change in the "k" or "v" store changes the output."""
    store, groups = data.stores[f"{kind}_{branch}"], data.stores[f"k_{branch}"].shape[2]
    ring = branch == "win"
    total = getattr(data.call.tables, branch).shape[1] * store.shape[1]
    o, lse = (x.double() for x in results[branch])
    read: list[set[int]] = [set() for _ in range(groups)]
    length = int(data.call.lengths[0])
    for rows in torch.arange(total, device=store.device).split(CHUNK):
        o_, lse_ = (x.double() for x in _run_copies(plan, branch, kind, data, results, rows))
        changed = (o_ - o).abs().amax((1, 3)) > 0.01 + 0.01 * o.abs().amax((1, 3))  # [copies, Hq]
        if kind == "k":
            changed |= ((lse_ - lse).abs() > 0.1).any(-1)
        changed |= o_.isnan().any(3).any(1)
        for copy, g in changed.unflatten(1, (groups, -1)).any(-1).nonzero().tolist():
            row = int(rows[copy])
            token = length - 1 - (length - 1 - row) % total if ring else row
            read[g].add(token)
    return read


def _run_copies(
    plan: Plan, branch: str, kind: str, data: StepData, results: Results, rows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run one copy of the sequence per entry of ``rows``, with that row of its store changed.

    Returns:
        o and lse of the copies.
    """
    call, count = data.call, len(rows)
    copies = torch.arange(count, device=rows.device)
    stores = {n: data.stores[f"{n}_{branch}"] for n in ("k", "v")}
    size, pages = stores[kind].shape[1], len(stores[kind])
    page, position = rows // size, rows % size
    table = getattr(call.tables, branch).repeat(count, 1)
    copied = {n: torch.cat((x, x[table[copies, page].long()])) for n, x in stores.items()}
    table[copies, page] = pages + copies.int()
    copies = pages + copies
    copied[kind][copies, position] = _changed(copied[kind][copies, position], kind, data)
    copies_call = dataclasses.replace(
        call,
        starts=call.starts.repeat(count),
        lengths=call.lengths.repeat(count),
        tables=call.tables._replace(**{branch: table}),
    )
    blocks = [results["select"][0].repeat(count, 1, 1, 1)] if branch == "sel" else []
    o, lse = getattr(plan, branch)(
        data.q.repeat(count, 1, 1, 1), copied["k"], copied["v"], *blocks, call=copies_call
    )
    return o, lse


def _changed(row: torch.Tensor, kind: str, data: StepData) -> torch.Tensor:
    """Change rows [copies, G, D] of a store so that reading one changes the output."""
    if kind == "v":
        return row + _VALUE
    heads: torch.Tensor = data.q[0, 0].unflatten(0, (row.shape[1], -1))
    first = heads[:, 0].double()  # [G, Dk]
    delta = first * (_SCORE / data.call.scale) / first.square().sum(-1, keepdim=True)
    return (row.double() + delta).to(row.dtype)
