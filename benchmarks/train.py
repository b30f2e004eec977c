"""Training speed and memory of m7c_125m with NSA beside the same model with dense attention, in one run on one GPU.

    python benchmarks/train.py --json train.json        # --time-limit (540 s) cuts: what has a target comes first
    python benchmarks/train.py --quick --device cpu     # every section on a tiny model, in seconds

Sections (--only): throughput, stall, memory, layers, toy. Every cell is a row: one that runs out of memory or
fails says so, and the rest goes on. The file is written after every cell.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from nsa_core.bench.crossover import crossing
from nsa_core.bench.machine import machine
from nsa_core.bench.roofline import measure_peaks
from nsa_core.files import write_atomic
from nsa_core.lm.config import LMConfig, size
from nsa_core.lm.data import Batch
from nsa_core.lm.flops import row_flops
from nsa_core.lm.graph import Graphed
from nsa_core.lm.model import LanguageModel, parameter_count
from nsa_core.lm.parallel import World
from nsa_core.lm.recipe import Recipe
from nsa_core.lm.task import DataSpec, open_data
from nsa_core.lm.trainer import Trainer
from nsa_core.text import describe_error

Row = dict[str, Any]
SECTIONS = ("stall", "layers", "toy", "memory", "throughput")


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is measured."""

    model: LMConfig
    device: str
    precision: str = "bfloat16"
    modes: tuple[str, ...] = ("compile", "compile+graph", "eager")
    # Those with a target first: a time limit cuts from the end. The rest locate the crossover.
    shapes: tuple[tuple[int, int], ...] = (
        (2048, 1), (2048, 8), (16384, 1), (65536, 1), (2048, 2), (2048, 16), (32768, 1), (8192, 1), (4096, 1),
    )  # fmt: skip
    seconds: float = 2.0  # of steps in a cell
    batches: tuple[int, ...] = (16, 32, 48, 64, 96, 128, 192, 256)
    batch_length: int = 2048
    lengths: tuple[int, ...] = (2048, 4096, 8192, 16384, 32768, 65536)
    stalls: tuple[tuple[int, int], ...] = ((512, 2), (2048, 1), (2048, 2))
    stall_steps: int = 200
    layers: tuple[int, ...] = (1, 2, 4, 12)
    layer_length: int = 256
    toy: tuple[int, int] = (128, 8)


def quick(device: str) -> Plan:
    """Every section, small."""
    tiny = size("tiny", n_layers=1)
    return Plan(
        tiny, device, "float32", ("eager",), ((64, 1), (128, 1)), 0.02, (1, 2), 64, (64, 128), ((64, 1),), 4, (1, 2),
        32, (32, 2),
    )  # fmt: skip


class Bench:
    """Runs cells and keeps their rows."""

    def __init__(self, plan: Plan, file: Path | None, limit_s: float) -> None:
        self.plan, self.file, self.until = plan, file, time.monotonic() + limit_s
        self.cuda = plan.device.startswith("cuda")
        self.peak = measure_peaks(plan.device, getattr(torch, plan.precision)).flops_per_s
        self.document: Row = {
            "kind": "nsa-train-bench", "schema_version": 1, "machine": machine(plan.device), "torch": torch.__version__,
            "model": plan.model.to_dict(), "precision": plan.precision, "matrix_flops_per_s": self.peak, "rows": [],
        }  # fmt: skip

    def cell(self, section: str, facts: Row, measure: Callable[[], Row]) -> Row:
        """The row of one measurement, with the reason where there is none; printed and written at once."""
        row: Row = {"section": section, **facts}
        if time.monotonic() > self.until:
            row["reason"] = "not begun: time limit"
        else:
            started = time.monotonic()
            try:
                row |= measure()
            except (RuntimeError, ValueError, NotImplementedError) as error:  # out of memory is a RuntimeError
                row["reason"] = describe_error(error)[:400]
            row["cell_s"] = round(time.monotonic() - started, 1)
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()
        print(section + "  " + "  ".join(f"{k}={v}" for k, v in row.items() if k != "section"), flush=True)
        self.document["rows"].append(row)
        self.write()
        return row

    def write(self) -> None:
        """The file as far as it is."""
        if self.file is not None:
            write_atomic(self.file, json.dumps(self.document, indent=1) + "\n", force=True)

    def sync(self) -> None:
        """Wait for the device."""
        if self.cuda:
            torch.cuda.synchronize()

    def trainer(self, config: LMConfig, length: int, batch: int, mode: str = "eager") -> Trainer:
        """A trainer on uniform tokens."""
        torch.manual_seed(0)
        recipe = Recipe(
            steps=10**6, batch=batch, warmup=100, learning_rate=1e-4, precision=self.plan.precision,
            compile=mode.startswith("compile"), graph=mode.endswith("graph"),
        )  # fmt: skip
        data = open_data(DataSpec("uniform", length, vocab_size=config.vocab_size), held_out_rows=1)
        # Rows made beforehand: the bench is of the step, and Python's lists are slow at 64k tokens.
        data.rows = Repeated(data.rows, 4)  # type: ignore[assignment]
        return Trainer(LanguageModel(config), data, recipe, World(torch.device(self.plan.device)))

    def times(self, trainer: Trainer, at_least: int = 5, at_most: int = 10**6) -> Iterator[float]:
        """Seconds of each step, until plan.seconds have gone by."""
        until = time.monotonic() + self.plan.seconds
        count = 0
        while count < at_least or (time.monotonic() < until and count < at_most):
            self.sync()
            started = time.perf_counter()
            trainer.step()
            self.sync()
            yield time.perf_counter() - started
            count += 1


class Repeated:
    """The same few rows over and over."""

    packed = False

    def __init__(self, rows: Any, count: int) -> None:
        self.length, self._rows, self._next = rows.length, [next(rows) for _ in range(count)], 0

    def __next__(self) -> Any:
        self._next += 1
        return self._rows[self._next % len(self._rows)]


def median(values: list[float]) -> float:
    """The middle one."""
    return sorted(values)[len(values) // 2]


def throughput(bench: Bench) -> None:
    """Tokens/s of whole steps, and peak memory, at every shape; the length from which NSA is faster."""
    best: dict[tuple[str, int, int], float] = {}
    for length, batch in bench.plan.shapes:
        torch._dynamo.reset()  # one static compilation a shape
        for attention in ("nsa", "dense"):
            for mode in bench.plan.modes:
                config = dataclasses.replace(bench.plan.model, attention=attention)
                facts = {"attention": attention, "S": length, "B": batch, "mode": mode}
                row = bench.cell(
                    "throughput", facts, lambda c=config, n=length, b=batch, m=mode: _speed(bench, c, n, b, m)
                )
                key = (attention, length, batch)
                best[key] = max(best.get(key, 0.0), row.get("tokens_per_s", 0.0))
    lengths = sorted({n for n, b in bench.plan.shapes if b == 1 and best["nsa", n, 1] and best["dense", n, 1]})
    pairs = [(n, best["dense", n, 1] / best["nsa", n, 1]) for n in lengths]
    length, sentence = crossing(pairs)
    bench.cell("throughput", {"crossover": length, "sentence": f"NSA trains {sentence}"}, dict)


def _speed(bench: Bench, config: LMConfig, length: int, batch: int, mode: str) -> Row:
    trainer = bench.trainer(config, length, batch, mode)
    for _ in range(3):
        trainer.step()
    bench.sync()
    if bench.cuda:
        torch.cuda.reset_peak_memory_stats()
    took = list(bench.times(trainer))
    tokens = length * batch
    return {
        "tokens_per_s": round(tokens / median(took)), "step_ms": round(median(took) * 1e3, 3), "steps": len(took),
        "slowest_ms": round(max(took) * 1e3, 3), "peak_gib": round(trainer.memory() / 2**30, 3),
        "matrix_share": round(row_flops(trainer.model, length) * batch / median(took) / bench.peak, 4),
        "parameters": parameter_count(trainer.model),
    }  # fmt: skip


def memory(bench: Bench) -> None:
    """Activation memory over S, its slope on log-log axes, and the largest batch within 80 GiB."""
    for attention in ("nsa", "dense"):
        config, points = dataclasses.replace(bench.plan.model, attention=attention), []
        for length in bench.plan.lengths:
            row = bench.cell("memory", {"attention": attention, "S": length, "B": 1},
                             lambda c=config, n=length: _held(bench, c, n, 1))  # fmt: skip
            if row.get("activation_gib"):
                points.append((length, row["activation_gib"]))
        if len(points) > 1:
            x, y = (torch.tensor(v, dtype=torch.float64).log() for v in zip(*points))
            slope = float(((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum())
            bench.cell("memory", {"attention": attention, "slope_in_S": round(slope, 3)}, dict)
        fits = 0
        for batch in bench.plan.batches:
            facts = {"attention": attention, "S": bench.plan.batch_length, "B": batch}
            row = bench.cell("memory", facts, lambda c=config, b=batch: _held(bench, c, bench.plan.batch_length, b))
            if "reason" in row or row["peak_gib"] > 80:
                break
            fits = batch
        bench.cell("memory", {"attention": attention, "largest_B_in_80_GiB": fits}, dict)


def _held(bench: Bench, config: LMConfig, length: int, batch: int) -> Row:
    trainer = bench.trainer(config, length, batch)
    trainer.step()
    bench.sync()
    if not bench.cuda:
        return {"peak_gib": round(trainer.memory() / 2**30, 3)}
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    trainer.step()
    bench.sync()
    peak = torch.cuda.max_memory_allocated()
    return {"peak_gib": round(peak / 2**30, 3), "activation_gib": round((peak - before) / 2**30, 4)}


def stall(bench: Bench) -> None:
    """Step times and memory of 200 steps: p99 over median, and growth after the first 50."""
    for length, batch in bench.plan.stalls:
        torch._dynamo.reset()
        facts = {"S": length, "B": batch, "mode": bench.plan.modes[0]}
        bench.cell("stall", facts, lambda n=length, b=batch: _steady(bench, n, b))


def _steady(bench: Bench, length: int, batch: int) -> Row:
    trainer = bench.trainer(bench.plan.model, length, batch, bench.plan.modes[0])
    for _ in range(5):
        trainer.step()
    took, held = [], []
    for seconds in bench.times(trainer, bench.plan.stall_steps, bench.plan.stall_steps):
        took.append(seconds)
        held.append(torch.cuda.memory_reserved() if bench.cuda else trainer.memory())
    p99 = sorted(took)[min(len(took) - 1, round(0.99 * len(took)))]
    return {
        "median_ms": round(median(took) * 1e3, 3), "p99_over_median": round(p99 / median(took), 3), "steps": len(took),
        "grown_bytes": held[-1] - held[len(held) // 4],
    }  # fmt: skip


def layers(bench: Bench) -> None:
    """Forward and backward over the number of layers, and how straight the line is."""
    for mode in ("eager", "graph") if bench.cuda else ("eager",):
        points = []
        for count in bench.plan.layers:
            facts = {"layers": count, "S": bench.plan.layer_length, "B": 1, "mode": mode}
            row = bench.cell("layers", facts, lambda n=count, m=mode: _forward_backward(bench, n, m))
            if "ms" in row:
                points.append((count, row["ms"]))
        if len(points) > 1:
            x, y = (torch.tensor(v, dtype=torch.float64) for v in zip(*points))
            slope = ((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum()
            left = (y - y.mean() - slope * (x - x.mean())).square().sum()
            r2 = float(1 - left / (y - y.mean()).square().sum())
            bench.cell("layers", {"mode": mode, "ms_per_layer": round(float(slope), 3), "R2": round(r2, 5)}, dict)


def _forward_backward(bench: Bench, count: int, mode: str) -> Row:
    trainer = bench.trainer(dataclasses.replace(bench.plan.model, n_layers=count), bench.plan.layer_length, 1)
    work: Callable[[Batch], torch.Tensor] = trainer._part
    tokens = torch.randint(trainer.model.config.vocab_size, (1, bench.plan.layer_length), device=bench.plan.device)
    batch = Batch(tokens, tokens, None, None, tokens.numel())
    if mode == "graph":
        work = Graphed(work, list(trainer.model.parameters()))
    took = []
    for _ in range(30 if bench.cuda else 4):
        bench.sync()
        started = time.perf_counter()
        work(batch)
        bench.sync()
        took.append(time.perf_counter() - started)
    return {"ms": round(median(took[len(took) // 3 :]) * 1e3, 3)}


def toy(bench: Bench) -> None:
    """The reports' one layer of width 128 at S=128, B=8: tokens/s."""
    length, batch = bench.plan.toy
    for mode in bench.plan.modes:
        bench.cell("toy", {"S": length, "B": batch, "mode": mode},
                   lambda m=mode: _speed(bench, size("toy"), length, batch, m))  # fmt: skip


def main() -> None:
    """Measure, print, write."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--only", default=",".join(SECTIONS), help="comma-separated sections")
    options.add_argument("--quick", action="store_true", help="a tiny model, in seconds")
    options.add_argument("--time-limit", type=float, default=540.0, help="seconds after which no cell begins")
    options.add_argument("--json", type=Path)
    given = options.parse_args()
    sections = given.only.split(",")
    if unknown := sorted(set(sections) - set(SECTIONS)):
        options.error(f"--only must be of {', '.join(SECTIONS)}; got {', '.join(unknown)}")
    plan = quick(given.device) if given.quick else Plan(size("m7c_125m"), given.device)
    bench = Bench(plan, given.json, given.time_limit)
    for section in sections:
        globals()[section](bench)


if __name__ == "__main__":
    main()
