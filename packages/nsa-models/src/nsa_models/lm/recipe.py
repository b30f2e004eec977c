"""Recipe: how a model is trained, validated when it is made; its learning rate and its
optimizer.
"""

from __future__ import annotations

import dataclasses
import math

import torch

from nsa_core.errors import InvalidInput
from nsa_models.lm.model import LanguageModel
from nsa_models.lm.parallel import KINDS

PRECISIONS = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A training run. ``batch`` counts the rows of a step over all processes; each part of a step
    has batch / (accumulate * processes) rows, so that more processes or parts change speed and
    memory and not the loss.

    Raises:
        InvalidInput: a field is out of range; all offending fields are named with their values.
    """

    steps: int = 1000
    batch: int = 8
    accumulate: int = 1
    learning_rate: float = 2e-3
    final_rate: float = 0.1  # share of the learning rate that the cosine ends at
    warmup: int = 50  # steps of a linear ramp before it
    weight_decay: float = 0.1  # of matrices; vectors have none
    beta1: float = 0.9
    beta2: float = 0.95
    clip: float = 1.0  # norm of all gradients together
    precision: str = "float32"  # bfloat16: products under autocast, parameters stay fp32
    recompute: bool = False  # activation checkpointing, a block at a time
    compile: bool = False
    graph: bool = False  # CUDA graph of forward and backward; one GPU
    parallel: str = "ddp"  # of several processes: ddp or fsdp
    eval_every: int = 100
    save_every: int = 500
    seed: int = 0

    def __post_init__(self) -> None:
        wrong = []
        for name in ("steps", "batch", "accumulate", "eval_every", "save_every"):
            if getattr(self, name) < 1:
                wrong.append(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("learning_rate", "clip"):
            if not 0 < getattr(self, name) < math.inf:
                wrong.append(f"{name} must be finite and > 0, got {getattr(self, name)}")
        if not 0 <= self.final_rate <= 1:
            wrong.append(f"final_rate must lie in [0, 1], got {self.final_rate}")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                wrong.append(f"{name} must be >= 0 and < 1, got {getattr(self, name)}")
        for name in ("warmup", "weight_decay"):
            if not 0 <= getattr(self, name) < math.inf:
                wrong.append(f"{name} must be finite and >= 0, got {getattr(self, name)}")
        for name, known in (("precision", PRECISIONS), ("parallel", KINDS)):
            if getattr(self, name) not in known:
                wrong.append(
                    f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}"
                )
        if wrong:
            raise InvalidInput("; ".join(wrong))

    def rows_of(self, rank: int, part: int, world: int) -> slice:
        """Rows of a step that ``rank`` of ``world`` processes has in the ``part``-th of its
        accumulated parts.

        Raises:
            InvalidInput: the rows of a step do not divide over parts and processes.
        """
        parts = self.accumulate * world
        if self.batch % parts:
            raise InvalidInput(
                f"batch {self.batch} does not divide over accumulate {self.accumulate} x {world}"
                " processes"
            )
        first, rows = part * world + rank, self.batch // parts
        return slice(first * rows, (first + 1) * rows)

    def rate(self, step: int) -> float:
        """Learning rate of a step, counted from 0: a ramp, then a cosine down to final_rate of it
        at the last step.
        """
        ramp = min(1.0, (step + 1) / (self.warmup + 1))
        way = min(1.0, max(0, step - self.warmup) / max(1, self.steps - 1 - self.warmup))
        return (
            self.learning_rate
            * ramp
            * (self.final_rate + (1 - self.final_rate) * (1 + math.cos(math.pi * way)) / 2)
        )

    def optimizer(self, model: LanguageModel) -> torch.optim.AdamW:
        """AdamW, fused where the parameters are on a GPU; matrices decay, vectors do not."""
        matrices = [p for p in model.parameters() if p.dim() > 1]
        vectors = [p for p in model.parameters() if p.dim() <= 1]
        groups = [
            {"params": matrices, "weight_decay": self.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        fused = matrices[0].device.type == "cuda"
        return torch.optim.AdamW(
            groups, lr=self.learning_rate, betas=(self.beta1, self.beta2), fused=fused
        )
