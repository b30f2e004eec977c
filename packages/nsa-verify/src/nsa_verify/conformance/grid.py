"""The grid of requests that tests probes: one factor at a time varies around a small base case."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from nsa_core.config import NSAConfig
from nsa_core.contract import DTYPES, Request
from nsa_core.plan.candidates import request_of
from nsa_verify.problems.cases import Case
from nsa_verify.problems.steps import Step, step_of

BASE = NSAConfig(
    dim=64,
    n_heads=4,
    n_kv_heads=2,
    head_dim=16,
    compress_block_size=8,
    compress_stride=4,
    select_block_size=16,
    num_selected_blocks=3,
    init_blocks=1,
    local_blocks=1,
    window_size=24,
    rope=False,
)
# The block sizes of the paper.
PAPER: dict[str, Any] = {
    "compress_block_size": 32,
    "compress_stride": 16,
    "select_block_size": 64,
    "num_selected_blocks": 16,
    "local_blocks": 2,
    "window_size": 512,
}
LENGTH = 61  # the last 13 tokens select one of two blocks; their other blocks are forced


@dataclasses.dataclass(frozen=True)
class Point:
    """A request, and the case or decode step that runs if the probe accepts it.

    Attributes:
        label: Name in test ids.
        case: Case to run.
        dtype: Name of the dtype of q, k and v.
        deterministic: Whether the request requires deterministic kernels.
        sized: Whether the request states batch and seq_len.
        step: Decode step to run; None: the point is the prefill of ``case``.
    """

    label: str
    case: Case
    dtype: str = "float32"
    deterministic: bool = False
    sized: bool = True
    step: Step | None = None

    def request(
        self,
        slot: str,
        device: str,
        capability: tuple[int, int] | None,
        needs_grad: bool = False,
    ) -> Request:
        """Return the request that a plan makes for ``slot``."""
        case, step, fields = self.case, self.step, dict[str, Any]()
        if step is None:
            sizes = (1 if case.packed else case.batch, case.tokens)
            fields = {"varlen": case.packed, "needs_grad": needs_grad}
        else:
            sizes = (len(step.lengths), max(step.lengths))
            fields = {"phase": "decode", "page_size": step.page_size}
        batch, seq_len = sizes if self.sized else (None, None)
        return request_of(
            case.config,
            slot,
            dtype=self.dtype,
            device=device,
            capability=capability,
            deterministic=self.deterministic,
            batch=batch,
            seq_len=seq_len,
            **fields,
        )


def _point(
    label: str,
    lengths: tuple[int, ...] = (LENGTH,),
    batch: int = 1,
    packed: bool = False,
    **config: Any,
) -> Point:
    config_ = dataclasses.replace(BASE, **config)
    return Point(label, Case(label, config_, lengths, batch=batch, packed=packed))


def _shapes() -> Iterator[Point]:
    for heads, groups in ((2, 2), (3, 1), (7, 1), (32, 2), (64, 1)):
        yield _point(f"Hq={heads} G={groups}", n_heads=heads, n_kv_heads=groups)
    for dk, dv in ((13, 13), (65, 65), (96, 96), (192, 128), (320, 320), (16, 24), (128, 64)):
        yield _point(f"Dk={dk} Dv={dv}", head_dim=dk, v_head_dim=dv)
    # Zero and one token, around the edges of compression blocks, w and w + 1, and four selection
    # blocks.
    for length in (0, 1, 7, 8, 11, 12, 24, 25, 64):
        yield _point(f"S={length}", (length,))
    yield _point("B=0", batch=0)
    yield _point("B=3", batch=3)
    yield _point("packed", (0, 5, 57, 1, 17, 0), packed=True)
    yield _point("packed, one document", (LENGTH,), packed=True)
    yield _point("packed, no token", (0, 0), packed=True)
    yield _point("w=1", window_size=1)
    yield _point("w>S", window_size=100)
    yield _point("l=d", compress_block_size=4)
    yield _point("l=l'", compress_block_size=16)
    yield _point("nothing forced", init_blocks=0, local_blocks=0, num_selected_blocks=1)
    yield _point("n*l'>S", num_selected_blocks=8)
    yield _point("real block sizes", (130,), **PAPER)


def _varied(base: Point, prefix: str = "") -> list[Point]:
    """Return the base point in each dtype, without sizes, and deterministic."""
    points = [dataclasses.replace(base, label=prefix + dtype, dtype=dtype) for dtype in DTYPES]
    points.append(dataclasses.replace(base, label=f"{prefix}sizes unknown", sized=False))
    points.append(dataclasses.replace(base, label=f"{prefix}deterministic", deterministic=True))
    return points


def grid() -> tuple[Point, ...]:
    """Return all points, first the base case in each dtype."""
    return (*_varied(_point("base")), *_shapes())


_RAGGED = (1, 7, 8, 12, 24, 25, 61, 80)


def _step(
    label: str,
    lengths: tuple[int, ...] = _RAGGED,
    new: int = 1,
    page_size: int | None = None,
    **config: Any,
) -> Point:
    step = step_of(label, dataclasses.replace(BASE, **config), lengths, new, page_size)
    return Point(label, step.case, step=step)


def _step_shapes() -> Iterator[Point]:
    yield _step("step, pages of 16", page_size=16)
    yield _step("step, pages of 48", page_size=48)
    yield _step("step, three rows", new=3)
    yield _step("step, five rows, pages", (5, 3, 40, 66), 5, 32)
    yield _step("step, B=1", (61,))
    for heads, groups in ((2, 2), (3, 1), (7, 1), (32, 2)):
        yield _step(f"step, Hq={heads} G={groups}", n_heads=heads, n_kv_heads=groups)
    for dk, dv in ((13, 13), (96, 96), (192, 128), (320, 320), (16, 24)):
        yield _step(f"step, Dk={dk} Dv={dv}", head_dim=dk, v_head_dim=dv)
    yield _step("step, w=1", window_size=1)
    yield _step("step, w>S", window_size=100)
    yield _step("step, nothing forced", init_blocks=0, local_blocks=0, num_selected_blocks=1)
    yield _step("step, real block sizes", (130, 33, 96, 64), 4, 64, **PAPER)


TWO_SEQUENCES = _point("base", batch=2)
MANY_SEQUENCES = _step("step", (LENGTH,) * 64)  # their workspace is many granules of an allocator


def step_grid() -> tuple[Point, ...]:
    """Return all points of decode steps, first the base step in each dtype."""
    return (*_varied(_step("step"), "step, "), *_step_shapes())
