"""Recipe: the validated options of a training run, its learning rate and its optimizer."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from nsa_core.errors import InvalidInput
from nsa_core.limits import SEED, integer_problems
from nsa_models.lm.config import LMConfig

if TYPE_CHECKING:
    import torch

    from nsa_models.lm.model import LanguageModel

PRECISIONS = ("float32", "bfloat16")
KINDS = ("ddp", "fsdp")  # of data parallelism


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The options of a training run.

    ``batch`` counts the rows of a step over all processes. A data parallel rank is a group of
    ``context_parallel`` or ``tensor_parallel`` processes with the same rows, and runs
    ``accumulate`` parts of batch / (accumulate * data parallel ranks) rows. More processes or parts
    change the speed and the memory, but not the loss.

    Attributes:
        steps: Number of optimizer steps.
        batch: Rows per step, over all processes.
        accumulate: Parts per step (gradient accumulation).
        learning_rate: Peak learning rate.
        final_rate: Final learning rate of the cosine, as a share of the peak.
        warmup: Steps of the linear ramp before the cosine.
        weight_decay: Weight decay of matrices; vectors have none.
        beta1: AdamW's first moment coefficient.
        beta2: AdamW's second moment coefficient.
        clip: Maximum norm of all gradients together.
        precision: "float32", or "bfloat16" for autocast with fp32 parameters.
        recompute: Activation checkpointing, one block at a time.
        compile: Compile the blocks with torch.compile.
        graph: Run forward and backward as a CUDA graph; needs one process on one GPU.
        parallel: "ddp" or "fsdp", for several processes.
        context_parallel: Processes that share the tokens of a row.
        tensor_parallel: Processes that share the heads of each attention layer; not together with
            ``context_parallel``.
        eval_every: Steps between evaluations of the held-out loss.
        save_every: Steps between checkpoints.
        seed: Seed of the run.

    Raises:
        InvalidInput: A field is out of range; the message names every such field and its value.
    """

    steps: int = 1000
    batch: int = 8
    accumulate: int = 1
    learning_rate: float = 2e-3
    final_rate: float = 0.1
    warmup: int = 50
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    clip: float = 1.0
    precision: str = "float32"
    recompute: bool = False
    compile: bool = False
    graph: bool = False
    parallel: str = "ddp"
    context_parallel: int = 1
    tensor_parallel: int = 1
    eval_every: int = 100
    save_every: int = 500
    seed: int = 0

    def __post_init__(self) -> None:
        errors: list[str] = []
        counts = ("steps", "batch", "accumulate", "eval_every", "save_every")
        for name in (*counts, "context_parallel", "tensor_parallel"):
            errors += integer_problems(name, getattr(self, name))
        errors += integer_problems("warmup", self.warmup, 0)
        errors += integer_problems("seed", self.seed, -SEED)
        for name in ("learning_rate", "clip"):
            if not 0 < getattr(self, name) < 3e38:  # finite in float32 too
                errors.append(f"{name} must be finite and > 0, got {getattr(self, name)}")
        if not 0 <= self.final_rate <= 1:
            errors.append(f"final_rate must lie in [0, 1], got {self.final_rate}")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                errors.append(f"{name} must be >= 0 and < 1, got {getattr(self, name)}")
        if not 0 <= self.weight_decay < 3e38:
            errors.append(f"weight_decay must be finite and >= 0, got {self.weight_decay}")
        for name, known in (("precision", PRECISIONS), ("parallel", KINDS)):
            if getattr(self, name) not in known:
                errors.append(
                    f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}"
                )
        if self.context_parallel > 1 and self.tensor_parallel > 1:
            errors.append(
                f"context_parallel must be 1 with tensor_parallel {self.tensor_parallel}, got"
                f" {self.context_parallel}: an attention layer divides its tokens or its heads"
            )
        if errors:
            raise InvalidInput("; ".join(errors))

    def check_divisible(self, config: LMConfig, length: int) -> None:
        """Check that a model and rows of ``length`` tokens divide as this recipe says.

        Raises:
            InvalidInput: They do not; the message gives values that would.
        """
        errors = []
        for name in ("context_parallel", "tensor_parallel"):
            if getattr(self, name) > 1 and (config.attention != "nsa" or config.nsa_layers):
                model = "dense layers (nsa_layers)"
                if not config.nsa_layers:
                    model = f"attention {config.attention!r}"
                errors.append(
                    f"{name} must be 1 with {model}, got {getattr(self, name)}: only NSA layers can"
                    " be divided"
                )
        groups = config.layer.n_kv_heads
        if groups % self.tensor_parallel and not errors:
            divisors = [str(n) for n in range(1, groups + 1) if groups % n == 0]
            errors.append(
                f"tensor_parallel must divide the model's {groups} key/value heads, got"
                f" {self.tensor_parallel}: choose {' or '.join(divisors)}"
            )
        if length < 2 * self.context_parallel:
            errors.append(
                f"context_parallel must be at most {max(1, length // 2)} for rows of {length}"
                f" tokens, got {self.context_parallel}: each process has two pieces of a row"
            )
        if errors:
            raise InvalidInput("; ".join(errors))

    def rows_of(self, rank: int, part: int, world: int) -> slice:
        """Return which rows of a step belong to one accumulated part of one data parallel rank.

        Args:
            rank: Index of the data parallel rank.
            part: Index of its accumulated part.
            world: Number of data parallel ranks.

        Raises:
            InvalidInput: The rows of a step do not divide over parts and ranks.
        """
        parts = self.accumulate * world
        if self.batch % parts:
            shared = self.context_parallel * self.tensor_parallel
            of = "processes" if shared == 1 else f"groups of {shared} processes"
            raise InvalidInput(
                f"batch {self.batch} does not divide over accumulate {self.accumulate} x {world}"
                f" {of}: it must be a multiple of {parts}"
            )
        first, rows = part * world + rank, self.batch // parts
        return slice(first * rows, (first + 1) * rows)

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0.

        It rises linearly over ``warmup`` steps, then follows a cosine down to ``final_rate`` times
        the peak at the last step.
        """
        ramp = min(1.0, (step + 1) / (self.warmup + 1))
        progress = min(1.0, max(0, step - self.warmup) / max(1, self.steps - 1 - self.warmup))
        return (
            self.learning_rate
            * ramp
            * (self.final_rate + (1 - self.final_rate) * (1 + math.cos(math.pi * progress)) / 2)
        )

    def optimizer(self, model: LanguageModel) -> torch.optim.AdamW:
        """Return AdamW, fused for parameters on a GPU; matrices decay, vectors do not."""
        import torch

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


def check_graph(graph: bool, processes: int, device: str) -> None:
    """Check that processes on this type of device can do what ``Recipe.graph`` asks for.

    Raises:
        InvalidInput: They cannot.
    """
    if graph and (device != "cuda" or processes > 1):
        actual = f"{processes} process(es) on {device}"
        raise InvalidInput(f"graph=True needs one process on one GPU, got {actual}; leave it out")
