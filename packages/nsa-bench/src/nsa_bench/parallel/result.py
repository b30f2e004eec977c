"""The result file of a benchmark of context parallelism."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from nsa_bench.gate import Gate
from nsa_bench.result import Interrupted, read_record, record_text
from nsa_bench.timing import FAILED, Performance

KIND = "nsa-bench-parallel"
SCHEMA_VERSION = 1
MEASURED, PROJECTED = "measured", "projection"


@dataclasses.dataclass(frozen=True)
class Traffic:
    """One collective of a call on one rank.

    Attributes:
        op: Name of the operator: gather_rows, scatter_sum, extend, extend_back, to_heads or
            to_rows.
        received_bytes: Bytes that the rank receives from other ranks.
        ms: Time of the collective alone; None if it was not repeated alone.
    """

    op: str
    received_bytes: int
    ms: float | None = None


@dataclasses.dataclass(frozen=True)
class Row:
    """Forward and backward of one layer on one document, on one or several GPUs.

    Lists have an entry for each rank. If ``performance`` is null, ``reason`` states why.
    """

    kind: str  # measured or projection
    shape: str
    dtype: str
    length: int  # tokens of the whole sequence
    ranks: int
    mode: str  # sequence or heads; empty on one GPU
    layout: str  # head_tail or contiguous; empty on one GPU
    performance: Performance | None
    reason: str
    speed_up: float | None  # time of one GPU over this time
    compute_ms: list[float]  # without the collectives
    waiting_ms: list[float]  # inside the collectives: communication, and waiting for other ranks
    communication_ms: float | None  # the collectives alone, all ranks starting together
    received_bytes: list[int]
    peak_bytes: list[int]  # all memory that the process has allocated; empty on the CPU
    traffic: list[Traffic]  # of rank 0

    @property
    def problem(self) -> tuple[str, str]:
        """Return the shape and the dtype."""
        return (self.shape, self.dtype)

    @property
    def division(self) -> tuple[int, str, str]:
        """Return the number of GPUs, the mode and the layout."""
        return (self.ranks, self.mode, self.layout)


@dataclasses.dataclass(frozen=True)
class Largest:
    """The longest sequence whose forward and backward succeed.

    Attributes:
        shape, dtype, ranks, mode, layout: As in :class:`Row`.
        length: Tokens of the longest sequence that succeeded; None if none did.
        failed_length: Tokens of the shortest sequence that failed; None if none did.
        reason: Why it failed, or why the search ended.
    """

    shape: str
    dtype: str
    ranks: int
    mode: str
    layout: str
    length: int | None
    failed_length: int | None
    reason: str


@dataclasses.dataclass(frozen=True)
class ParallelResult:
    """Everything that one run measured."""

    settings: dict[str, Any]
    environment: dict[str, Any]
    gates: list[Gate]
    rows: list[Row]
    largest: list[Largest]
    skipped: dict[str, str]  # division -> reason
    seconds: float
    interrupted: Interrupted | None = None
    kind: str = KIND
    schema_version: int = SCHEMA_VERSION

    @property
    def failed(self) -> bool:
        """Return whether a division is not correct, or failed while it was timed."""
        return any(not gate.ok for gate in self.gates) or any(
            row.reason.startswith(FAILED) for row in self.rows
        )

    @property
    def timed_nothing(self) -> bool:
        """Return whether no division over several GPUs has a measured time."""
        return not any(r.performance for r in self.rows if r.ranks > 1 and r.kind == MEASURED)

    def to_json(self) -> str:
        """Return the text of the result file."""
        return record_text(self)


def read_parallel_result(path: Path) -> ParallelResult:
    """Read a result file.

    Raises:
        InvalidInput: The file cannot be read, is not JSON, or is not a result of this schema; the
            message names the field.
    """
    return read_record(path, ParallelResult, KIND, SCHEMA_VERSION)
