"""The cells of benchmarks/train.py, and the class that runs, prints and saves them."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from nsa_backend_fa2 import flash4
from nsa_backend_fa2.providers import Attention
from nsa_bench.environment import machine
from nsa_bench.roofline import measure_peaks
from nsa_core.util.atomic_files import write_atomic
from nsa_core.util.text import describe_error
from nsa_models.lm import dense
from nsa_models.lm.config import LMConfig, size
from nsa_models.lm.model import LanguageModel
from nsa_models.lm.parallel import World
from nsa_models.lm.recipe import Recipe
from nsa_models.lm.task import DataSpec, open_data
from nsa_models.lm.trainer import Trainer

Row = dict[str, Any]
# Options of a mode, in the order in which its name joins them with "+".
MODE_OPTIONS = ("flash4", "bf16", "recompute", "compile", "graph")


@dataclasses.dataclass(frozen=True)
class Mode:
    """How a step is trained: "eager", or options joined with "+", such as "compile+graph".

    Attributes:
        flash4: FlashAttention-4 runs dense attention, not the kernel that PyTorch chooses.
        bf16: Parameters and AdamW's moments in bf16, without fp32 copies and without autocast.
        recompute: The backward runs NSA's branches again, as :class:`nsa_core.NSAttention` says.
        compile: Compiled blocks.
        graph: Forward and backward as one CUDA graph.
    """

    flash4: bool = False
    bf16: bool = False
    recompute: bool = False
    compile: bool = False
    graph: bool = False

    @classmethod
    def of(cls, name: str) -> Mode:
        """Return the mode of a name.

        Raises:
            ValueError: The name is no mode; the message describes the names.
        """
        options = [] if name == "eager" else name.split("+")
        ordered = [option for option in MODE_OPTIONS if option in options]
        if options != ordered:
            raise ValueError(
                f"a mode is eager, or some of {', '.join(MODE_OPTIONS)} in this order, joined with"
                f" +; got {name!r}"
            )
        return cls(**dict.fromkeys(options, True))

    def runs(self, attention: str) -> bool:
        """Return whether a model with ``attention``, "nsa" or "dense", has this mode."""
        return not (self.flash4 if attention == "nsa" else self.recompute)

    @contextlib.contextmanager
    def kernels(self) -> Iterator[None]:
        """Run dense attention on FlashAttention-4 inside the block, if this mode says so.

        Raises:
            RuntimeError: flash-attn-4 does not load.
        """
        if not self.flash4:
            yield
            return
        if reason := flash4.source().reason:
            raise RuntimeError(str(reason))
        torch._dynamo.reset()  # compiled blocks keep the kernel for which they were compiled
        with mock.patch.object(dense, "causal", causal_on_flash4):
            yield


def causal_on_flash4(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None
) -> torch.Tensor:
    """Return causal attention [B, S, Hq, D], as dense.causal does."""
    o: torch.Tensor = flash4_forward(q, k, v, q.shape[-1] ** -0.5 if scale is None else scale)[0]
    return o


@torch.library.custom_op("nsa_benchmarks::flash4_forward", mutates_args=())
def flash4_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return o [B, S, Hq, D] and lse [B, Hq, S] of causal attention."""
    provider = flash4.source().provider
    assert provider is not None  # Mode.kernels raises an error
    return provider.forward(q, k, v, Attention(scale))


@torch.library.custom_op("nsa_benchmarks::flash4_backward", mutates_args=())
def flash4_backward(
    do: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return dq, dk and dv of :func:`flash4_forward`."""
    provider = flash4.source().provider
    assert provider is not None  # the forward ran
    return provider.backward([do, q, k, v, o, lse], Attention(scale))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx: Any, do: torch.Tensor, dlse: torch.Tensor | None) -> tuple[Any, ...]:
    return *flash4_backward(do.contiguous(), *ctx.saved_tensors, ctx.scale), None


flash4_forward.register_fake(
    lambda q, k, v, scale: (
        q.new_empty(q.shape),
        q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32),
    )
)
flash4_backward.register_fake(
    lambda do, q, k, v, *_: (q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape))
)
flash4_forward.register_autograd(_backward, setup_context=_save)


@dataclasses.dataclass(frozen=True)
class Grid:
    """The cells to measure. Pairs are (length, batch)."""

    model: LMConfig
    device: str
    precision: str = "bfloat16"
    modes: tuple[str, ...] = (
        *("compile", "compile+graph", "eager", "recompute+compile+graph"),
        *("bf16+compile", "bf16+compile+graph"),
    )
    # Shapes with a target figure come first, because a time limit drops shapes from the end. The
    # others locate the crossover.
    shapes: tuple[tuple[int, int], ...] = (
        (2048, 1),
        (2048, 8),
        (16384, 1),
        (65536, 1),
        (2048, 2),
        (2048, 16),
        (32768, 1),
        (8192, 1),
        (4096, 1),
    )
    seconds: float = 2.0  # duration of the timed steps of a cell
    batches: tuple[int, ...] = (16, 32, 48, 64, 96, 128, 192, 256)
    batch_length: int = 2048
    lengths: tuple[int, ...] = (2048, 4096, 8192, 16384, 32768, 65536)
    stalls: tuple[tuple[int, int], ...] = ((512, 2), (2048, 1), (2048, 2))
    stall_steps: int = 200
    layers: tuple[int, ...] = (1, 2, 4, 12)
    layer_length: int = 256
    toy: tuple[int, int] = (128, 8)

    def modes_of(self, attention: str) -> list[str]:
        """Return the names of the modes that a model with ``attention`` has."""
        return [name for name in self.modes if Mode.of(name).runs(attention)]


def quick(device: str) -> Grid:
    """Return small cells for every section."""
    tiny = size("tiny", n_layers=1)
    return Grid(
        tiny,
        device,
        "float32",
        ("eager", "recompute", "bf16"),
        ((64, 1), (128, 1)),
        0.02,
        (1, 2),
        64,
        (64, 128),
        ((64, 1),),
        4,
        (1, 2),
        32,
        (32, 2),
    )


class Bench:
    """Runs cells and collects their rows."""

    def __init__(self, grid: Grid, file: Path | None, limit_s: float) -> None:
        self.grid, self.file, self.deadline = grid, file, time.monotonic() + limit_s
        self.cuda = grid.device.startswith("cuda")
        self.peak = measure_peaks(grid.device, getattr(torch, grid.precision)).flops_per_s
        self.document: Row = {
            "kind": "nsa-train-bench",
            "schema_version": 1,
            "machine": machine(grid.device),
            "torch": torch.__version__,
            "model": dataclasses.asdict(grid.model),
            "precision": grid.precision,
            "matrix_flops_per_s": self.peak,
            "rows": [],
        }

    def cell(self, section: str, facts: Row, measure: Callable[[], Row]) -> Row:
        """Run one cell; print, save and return its row, which has a reason if it failed."""
        row: Row = {"section": section, **facts}
        if time.monotonic() > self.deadline:
            row["reason"] = "not begun: time limit"
        else:
            started = time.monotonic()
            try:
                row |= measure()
            # Out of memory is a RuntimeError.
            except (RuntimeError, ValueError, NotImplementedError) as error:
                row["reason"] = describe_error(error)[:400]
            row["cell_s"] = round(time.monotonic() - started, 1)
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()
        print(
            section + "  " + "  ".join(f"{k}={v}" for k, v in row.items() if k != "section"),
            flush=True,
        )
        self.document["rows"].append(row)
        self.write()
        return row

    def write(self) -> None:
        """Write the file with all rows so far."""
        if self.file is not None:
            write_atomic(self.file, json.dumps(self.document, indent=1) + "\n", force=True)

    def sync(self) -> None:
        """Wait for the device."""
        if self.cuda:
            torch.cuda.synchronize()

    def trainer(self, config: LMConfig, length: int, batch: int, mode: str = "eager") -> Trainer:
        """Return a trainer on uniform tokens.

        Args:
            config: The model.
            length: Tokens of a row.
            batch: Rows of a step.
            mode: Name of a :class:`Mode` that the model's attention has.
        """
        torch.manual_seed(0)
        options, model = Mode.of(mode), LanguageModel(config)
        assert options.runs(config.attention)
        if options.bf16:
            model.to(torch.bfloat16)
        if options.recompute:
            for block in model.blocks:
                block.attn.recompute = True
        recipe = Recipe(
            steps=10**6,
            batch=batch,
            warmup=100,
            learning_rate=1e-4,
            # No autocast with bf16 parameters: the operators run in the dtype of the parameters.
            precision="float32" if options.bf16 else self.grid.precision,
            compile=options.compile,
            graph=options.graph,
        )
        data = open_data(DataSpec("uniform", length, vocab_size=config.vocab_size, held_out_rows=1))
        # Create the rows in advance: only the step is timed, and Python lists of 64k tokens are
        # slow.
        data.rows = Repeated(data.rows, 4)  # type: ignore[assignment]
        return Trainer(model, data, recipe, World(torch.device(self.grid.device)))

    def times(self, trainer: Trainer, at_least: int = 5, at_most: int = 10**6) -> Iterator[float]:
        """Yield the seconds between the ends of successive steps, for about ``grid.seconds``.

        As in the training loop, each step is queued before the previous one is awaited.
        """
        self.sync()
        pending, last = trainer.step(), 0.0
        deadline, count = time.monotonic() + self.grid.seconds, 0
        while count < at_least or (time.monotonic() < deadline and count < at_most):
            following = trainer.step()
            pending.read()
            now = time.perf_counter()
            if last:  # the first step has no previous end
                yield now - last
                count += 1
            pending, last = following, now
        self.sync()


class Repeated:
    """Repeats a few rows without end."""

    packed = False

    def __init__(self, rows: Any, count: int) -> None:
        self.length, self._rows, self._next = rows.length, [next(rows) for _ in range(count)], 0

    def __next__(self) -> Any:
        self._next += 1
        return self._rows[self._next % len(self._rows)]

    def lane(self, number: int, count: int) -> Repeated:
        """Return these rows: every row of a step is one of the few."""
        return self

    def state_dict(self) -> Row:
        """Return the position; a trainer needs nothing else of rows that never fail."""
        return {"next": self._next}


def median(values: list[float]) -> float:
    """Return the upper median."""
    return sorted(values)[len(values) // 2]
