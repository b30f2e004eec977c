"""Check a cache: random histories of a real layer and its NSACache.

Each operation is compared with a model of the sequences: lengths, every key and value that a later
step may read (bit for bit, because the layer's projections are exact), the tensors that the decode
forms receive, and their results. In float64, the output is judged against the oracle on the whole
sequences. If the combination refuses float64, the best backend that accepts it runs; the code of
the cache is the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from nsa_core.dtypes import dtype_name
from nsa_core.errors import Unsupported
from nsa_core.plan.plan import Plan, resolve
from nsa_verify.histories.draw import draw_histories
from nsa_verify.histories.history import History, parse_history
from nsa_verify.histories.outputs import judge_output
from nsa_verify.histories.replay import Failure, Plans, Replay
from nsa_verify.histories.shrink import shrink
from nsa_verify.isolation import gpu_context
from nsa_verify.problems.cases import Case
from nsa_verify.problems.combination import Combination
from nsa_verify.problems.findings import Finding

NAME = "cache histories"
# Histories in float64, and in each other dtype.
COUNTS = {"quick": (8, 3), "full": (72, 24), "interpreter": (0, 0)}
# Edges of pages that random histories seldom reach; they run in float64.
PAGE_EDGES = (
    # Two sequences share a page that the first token of their next compression block is in.
    "batch=2 page_size=4 step=5,0 reorder=0,0 step=1,1",
    # A prefill ends with a page, and the padding after it has no page.
    "batch=2 page_size=4 step=8,4",
)


@dataclasses.dataclass(frozen=True)
class OnHistory:
    """Adapter that runs a history as a check of a case.

    Attributes:
        history: The history.
    """

    history: History

    def __call__(
        self, combination: Combination, case: Case, dtype: torch.dtype
    ) -> Iterator[Finding]:
        """Run the history; ``case`` names it."""
        return replay(combination, case, self.history, dtype)


def jobs_for(
    preset: str, dtypes: Sequence[torch.dtype], seed: int, job: Callable[..., Any]
) -> list[Any]:
    """List the histories of a preset, as ``job(name, check, case, dtype)``.

    Those in float64 come first: the edges of pages, then the drawn ones. The other dtypes share the
    rest of the design.
    """
    exact, others = COUNTS[preset]
    rest = [dtype for dtype in dtypes if dtype != torch.float64]
    histories = draw_histories(exact + others * len(rest), seed)
    wanted = [torch.float64] * exact + [dtype for dtype in rest for _ in range(others)]
    edges = [parse_history(line) for line in PAGE_EDGES] if exact else []
    return [
        history_job(history, torch.float64, f"history of a page edge {number}", job)
        for number, history in enumerate(edges)
    ] + [
        history_job(history, dtype, f"history {number}", job)
        for number, (history, dtype) in enumerate(zip(histories, wanted))
    ]


def history_job(history: History, dtype: torch.dtype, name: str, job: Callable[..., Any]) -> Any:
    """Return the job of one history, created by ``job(name, check, case, dtype)``."""
    sizes = history.sizes
    case = Case(name, history.config, (sizes.max_len,), batch=sizes.batch, seed=sizes.seed)
    return job(NAME, OnHistory(history), case, dtype)


def replay(
    combination: Combination, case: Case, history: History, dtype: torch.dtype
) -> Iterator[Finding]:
    """Run ``history`` on a layer of the combination; a failure is shrunk to a small history."""

    def failure(shrunk: History) -> Failure | None:
        return Replay(shrunk, dtype, _plans(combination, shrunk, dtype)).first_failure(judge_output)

    def fails(shrunk: History) -> int | None:
        try:
            result = failure(shrunk)
        except Unsupported:
            return None
        return None if result is None else result.number

    first = failure(history)
    common = (case.name, dtype_name(dtype))
    if first is None:
        yield Finding(NAME, "", *common, "history", True)
        return
    small = history
    if not gpu_context.gpu_error():  # on an unusable GPU every smaller history would fail too
        small = shrink(history, fails)
        first = failure(small) or first
    number, fault = first
    operations = small.operations
    after = f"after {operations[number]}" if number < len(operations) else "at the end"
    yield Finding(
        NAME,
        fault.slot,
        *common,
        fault.quantity,
        False,
        detail=f"{after}: {fault.detail}; repeat with --dtype {dtype_name(dtype)}"
        f" --history '{small}'",
    )


def _plans(combination: Combination, history: History, dtype: torch.dtype) -> Plans:
    """Return the plans of the combination, or in float64 the best ones that accept it."""
    if dtype == torch.float64:
        try:
            if combination.device != "cpu":
                raise Unsupported("float64 runs on the CPU")
            return _plans_of(combination.plan, history, dtype, "cpu")
        except Unsupported:
            return _plans_of(lambda c, d, **x: resolve(c, dtype=d, **x), history, dtype, "cpu")
    return _plans_of(combination.plan, history, dtype, combination.device)


def _plans_of(
    plan: Callable[..., Plan], history: History, dtype: torch.dtype, device: str
) -> Plans:
    """Return the plans that ``plan(config, dtype, **options)`` resolves."""
    page_size = history.sizes.page_size or None
    try:
        partial = plan(history.config, dtype, needs_grad=False, partial=True)
    except Unsupported:
        partial = None
    return Plans(
        plan(history.config, dtype, needs_grad=False),
        plan(history.config, dtype, needs_grad=False, phase="decode", page_size=page_size),
        partial,
        device,
    )
