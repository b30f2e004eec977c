"""DecodeSettings: what a decode benchmark measures."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from nsa_bench.decode_workloads import DecodeCell
from nsa_bench.shapes import PAPER_BLOCKS, Shape, parse_shape
from nsa_bench.timing import METHODS
from nsa_verify.problems.combination import Combination


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeSettings:
    """Settings of a decode benchmark.

    Attributes:
        cells: Shapes, batch sizes and cache lengths; empty for the device's default cells.
        dtypes: Names of torch dtypes.
        combos: Combinations to time; empty for all that are ready.
        blocks: l, d, l', n, w.
        device: "cpu", "cuda" or "cuda:N".
        seed: Seed of the random tensors.
        budget_s: Seconds of samples per workload.
        cell_limit_s: Seconds after which a cell prepares no further workload.
        time_limit_s: Seconds after which the run ends: nothing more is judged or prepared.
    """

    cells: Sequence[DecodeCell] = ()
    dtypes: Sequence[str] = ("float32",)
    combos: Sequence[Combination] = ()
    blocks: Sequence[int] = PAPER_BLOCKS
    device: str = "cpu"
    seed: int = 0
    budget_s: float = 0.3
    cell_limit_s: float = 60.0
    time_limit_s: float = 420.0

    def as_json(self) -> dict[str, Any]:
        """Return the settings as a result file stores them."""
        values: dict[str, Any] = {
            n: getattr(self, n)
            for n in ("device", "seed", "budget_s", "cell_limit_s", "time_limit_s")
        }
        cells = [
            f"{c.shape.name} B={c.batch} S={c.length} page {c.page_size or 'none'}"
            for c in self.cells
        ]
        values |= {
            "cells": cells,
            "dtypes": list(self.dtypes),
            "combos": [c.name for c in self.combos],
        }
        values |= {
            "shapes": list(dict.fromkeys(c.shape.name for c in self.cells)),
            "blocks": list(self.blocks),
        }
        return values | {
            "phases": ["decode"],
            "inputs": ["random"],
            "threads": torch.get_num_threads(),
            "methods": METHODS,
        }


def parse_decode_shape(text: str) -> Shape:
    """Parse the shape of a decode cell: "reports" is 8/2/32, other names as in ``parse_shape``."""
    return Shape(8, 2, 32, 32) if text.strip() == "reports" else parse_shape(text)
