"""Settings: what a prefill benchmark measures."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from nsa_bench.shapes import PAPER_BLOCKS, Shape
from nsa_bench.timing import METHODS
from nsa_verify.problems.combination import Combination


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a prefill benchmark.

    Attributes:
        shapes: The heads to measure.
        lengths: Tokens per sequence.
        phases: Any of "forward", "backward" and "both".
        dtypes: Names of torch dtypes.
        inputs: "random", "real" or both.
        combos: Combinations to time; empty for all that are ready.
        rivals: Other libraries to time; None for all known ones on a GPU and none elsewhere.
        blocks: l, d, l', n, w.
        batch: Number of sequences.
        device: "cpu", "cuda" or "cuda:N".
        seed: Seed of the random tensors.
        text: Text of real inputs.
        text_name: Name of the text in the result file.
        checkpoints: Models for real inputs, one per shape; empty for an untrained layer.
        budget_s: Seconds of samples per workload.
        max_call_s: Skip calls that are expected to take longer than this many seconds, and end
            calls that do.
        cell_limit_s: Seconds after which a cell prepares no further workload.
        time_limit_s: Seconds after which the run ends: nothing more is prepared, and slow calls
            are ended.
    """

    shapes: Sequence[Shape]
    lengths: Sequence[int]
    phases: Sequence[str] = ("forward", "backward")
    dtypes: Sequence[str] = ("float32",)
    inputs: Sequence[str] = ("random",)
    combos: Sequence[Combination] = ()
    rivals: Sequence[str] | None = None
    blocks: Sequence[int] = PAPER_BLOCKS
    batch: int = 1
    device: str = "cpu"
    seed: int = 0
    text: bytes = b""
    text_name: str = ""
    checkpoints: Sequence[Path] = ()
    budget_s: float = 0.3
    max_call_s: float = 5.0
    cell_limit_s: float = 60.0
    time_limit_s: float = 420.0

    def as_json(self) -> dict[str, Any]:
        """Return the settings as a result file stores them, with the text's length for the text."""
        values = dataclasses.asdict(self)
        values["shapes"] = [shape.name for shape in self.shapes]
        values["combos"] = [combo.name for combo in self.combos]
        values.pop("checkpoints")
        values |= {
            "text_bytes": len(values.pop("text")),
            "threads": torch.get_num_threads(),
            "methods": METHODS,
        }
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in values.items()
        }
