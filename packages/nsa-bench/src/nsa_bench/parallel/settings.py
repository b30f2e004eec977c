"""Settings: which layers, lengths and divisions of a sequence are measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from nsa_bench.shapes import PAPER_BLOCKS, Shape
from nsa_core.config import NSAConfig
from nsa_core.errors import InvalidInput
from nsa_core.parallel.layouts import LAYOUTS

MODES = ("sequence", "heads")
DIM = 256  # width of x; the projections of a narrow layer take little of the time


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelSettings:
    """Settings of a benchmark of context parallelism.

    Attributes:
        ranks: Number of ranks, P; each has a GPU of its own.
        shapes: The heads to measure.
        lengths: Tokens of the whole sequence.
        dtypes: Names of torch dtypes.
        modes: Any of "sequence" and "heads".
        layouts: Any of "head_tail" and "contiguous".
        projected: Numbers of GPUs whose time is projected.
        largest: Whether to search the longest sequence that one GPU and that all GPUs can train.
        judged: Names of the dtypes in which the layer is judged before it is timed.
        backends: Backends of the slots, as in :class:`nsa_core.NSAttention`; None for auto.
        blocks: l, d, l', n, w.
        device: "cpu" or "cuda".
        threads: CPU threads of a worker.
        seed: Seed of parameters and inputs.
        budget_s: Seconds of samples per cell.
        cell_limit_s: Seconds after which a cell starts no new call.
        time_limit_s: Seconds after which the run ends.

    Raises:
        InvalidInput: A mode, a layout or a number of GPUs is invalid, or no mode can divide a
            shape.
    """

    ranks: int
    shapes: Sequence[Shape]
    lengths: Sequence[int]
    dtypes: Sequence[str] = ("bfloat16",)
    modes: Sequence[str] = MODES
    layouts: Sequence[str] = ("head_tail", "contiguous")
    projected: Sequence[int] = (4, 8)
    largest: bool = True
    judged: Sequence[str] = ("bfloat16", "float32")
    backends: dict[str, str] | None = None
    blocks: Sequence[int] = PAPER_BLOCKS
    device: str = "cuda"
    threads: int = 1
    seed: int = 0
    budget_s: float = 1.0
    cell_limit_s: float = 60.0
    time_limit_s: float = 540.0

    def __post_init__(self) -> None:
        for name, known in (("modes", MODES), ("layouts", LAYOUTS)):
            values = getattr(self, name)
            if not values or not {*values} <= {*known}:
                raise InvalidInput(
                    f"{name} must be one or more of {', '.join(known)}, got {', '.join(values)!r}"
                )
        for shape in self.shapes:
            if {*self.modes} == {"heads"} and shape.n_kv_heads % self.ranks:
                raise InvalidInput(
                    f"modes 'heads' divides the key/value heads, but {self.ranks} ranks do not"
                    f" divide the {shape.n_kv_heads} of {shape.name}: use mode sequence"
                )
        if wrong := [ranks for ranks in self.projected if ranks < 2]:
            raise InvalidInput(f"projected must be numbers of GPUs >= 2, got {wrong[0]}")

    def config(self, shape: Shape) -> NSAConfig:
        """Return the config of the timed layer."""
        return dataclasses.replace(shape.config(self.blocks), dim=DIM)

    def as_json(self) -> dict[str, Any]:
        """Return the settings as a result file stores them."""
        values = dataclasses.asdict(self) | {"shapes": [shape.name for shape in self.shapes]}
        values |= {"dim": DIM, "torch_threads": torch.get_num_threads()}
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in values.items()
        }
