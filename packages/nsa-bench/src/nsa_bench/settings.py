"""Settings: what a benchmark measures."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nsa_bench.shapes import PAPER_BLOCKS, Shape, parse_shape
from nsa_bench.timing import METHODS
from nsa_core.config import NSAConfig

if TYPE_CHECKING:
    from nsa_bench.cells import Cell
    from nsa_verify.problems.combination import Combination


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Settings that every benchmark has. A value that a list names twice is measured once.

    Attributes:
        dtypes: Names of torch dtypes.
        combos: Combinations to time; empty for all that are ready.
        blocks: l, d, l', n, w.
        device: "cpu", "cuda" or "cuda:N".
        seed: Seed of the random tensors.
        budget_s: Seconds of samples per workload.
        cell_limit_s: Seconds after which a cell prepares no further workload.
        time_limit_s: Seconds after which the run ends: nothing more is judged or prepared, and slow
            calls are ended.
    """

    dtypes: Sequence[str] = ("float32",)
    combos: Sequence[Combination] = ()
    blocks: Sequence[int] = PAPER_BLOCKS
    device: str = "cpu"
    seed: int = 0
    budget_s: float = 0.3
    cell_limit_s: float = 60.0
    time_limit_s: float = 420.0

    def __post_init__(self) -> None:
        for name in {field.name for field in dataclasses.fields(self)} - {"blocks", "combos"}:
            if isinstance(values := getattr(self, name), (list, tuple)):
                object.__setattr__(self, name, type(values)(dict.fromkeys(values)))

    def as_json(self) -> dict[str, Any]:
        """Return the settings as a result file stores them."""
        import torch

        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {
            **{name: list(v) if isinstance(v, tuple) else v for name, v in values.items()},
            "combos": [combo.name for combo in self.combos],
            "threads": torch.get_num_threads(),
            "methods": METHODS,
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(RunSettings):
    """Settings of a prefill benchmark.

    Attributes:
        shapes: The heads to measure.
        lengths: Tokens per sequence.
        phases: Any of "forward", "backward" and "both".
        inputs: "random", "real" or both.
        rivals: Other libraries to time; None for all known ones on a GPU and none elsewhere.
        batch: Number of sequences.
        text: Text of real inputs.
        text_name: Name of the text in the result file.
        checkpoints: Models for real inputs, one per shape; empty for an untrained layer.
        max_call_s: Skip calls that are expected to take longer than this many seconds, and end
            calls that do.
    """

    shapes: Sequence[Shape]
    lengths: Sequence[int]
    phases: Sequence[str] = ("forward", "backward")
    inputs: Sequence[str] = ("random",)
    rivals: Sequence[str] | None = None
    batch: int = 1
    text: bytes = b""
    text_name: str = ""
    checkpoints: Sequence[Path] = ()
    max_call_s: float = 5.0

    def as_json(self) -> dict[str, Any]:
        """Return the settings as a result file stores them, with the text's length for the text."""
        values = super().as_json() | {"shapes": [shape.name for shape in self.shapes]}
        values.pop("checkpoints")
        return values | {"text_bytes": len(values.pop("text"))}


@dataclasses.dataclass(frozen=True)
class DecodeCell:
    """A decode configuration to measure.

    Attributes:
        shape: The heads.
        batch: Number of sequences.
        length: Cached tokens per sequence, including the token of the step.
        page_size: Tokens per page of the cache; None for a contiguous cache.
    """

    shape: Shape
    batch: int
    length: int
    page_size: int | None = None

    def of(self, dtype: str, blocks: Sequence[int] = PAPER_BLOCKS) -> Cell:
        """Return the cell of a dtype and of block sizes l, d, l', n, w."""
        from nsa_bench.cells import Cell

        config, pages = layer_config(self.shape, blocks), self.page_size
        cache = "random" if pages is None else f"random, pages of {pages}"
        return Cell(
            *(config, self.shape.name, dtype, cache, "decode", self.batch, self.length),
            page_size=pages,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeSettings(RunSettings):
    """Settings of a decode benchmark.

    Attributes:
        cells: Shapes, batch sizes and cache lengths; empty for the device's default cells.
    """

    cells: Sequence[DecodeCell] = ()

    def as_json(self) -> dict[str, Any]:
        """Return the settings as a result file stores them."""
        cells = [
            f"{c.shape.name} B={c.batch} S={c.length} page {c.page_size or 'none'}"
            for c in self.cells
        ]
        shapes = list(dict.fromkeys(c.shape.name for c in self.cells))
        described = {"phases": ["decode"], "inputs": ["random"]}
        return super().as_json() | {"cells": cells, "shapes": shapes} | described


def default_cells(device: str) -> list[DecodeCell]:
    """Return the default cells.

    On a GPU: caches of 4 GiB, and small cells. On the CPU: small cells. All caches are longer than
    n * l' = 1024 tokens; up to it, a step selects every block.
    """
    small = [DecodeCell(Shape(8, 2, 32, 32), 1, length) for length in (2048, 4096, 8192)]
    if not device.startswith("cuda"):
        return [*small, DecodeCell(Shape(8, 2, 32, 32), 4, 2048, 128)]
    large = Shape(64, 4, 128, 128)
    return [
        *(DecodeCell(large, b, s * 1024, 128) for b, s in ((256, 8), (32, 64), (16, 128))),
        *small,
    ]


def layer_config(shape: Shape, blocks: Sequence[int] = PAPER_BLOCKS) -> NSAConfig:
    """Return a layer with default options: mlp compression, one key/value pair per branch."""
    return dataclasses.replace(shape.config(blocks), compress="mlp", shared_kv=False)


def parse_decode_shape(text: str) -> Shape:
    """Parse the shape of a decode cell: "reports" is 8/2/32, other names as in ``parse_shape``."""
    return Shape(8, 2, 32, 32) if text.strip() == "reports" else parse_shape(text)
