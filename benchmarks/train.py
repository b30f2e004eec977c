"""Training speed and memory of m7c_125m with NSA beside the same model with dense attention, in one
run on one GPU.

    python benchmarks/train.py --json train.json
    # --time-limit (540 s) cuts: what has a target comes first
    python benchmarks/train.py --quick --device cpu     # every section on a tiny model, in seconds

Sections (--only): throughput, stall, memory, layers, toy. Every cell is a row: one that runs out of
memory or fails says so, and the rest goes on. The file is written after every cell.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path

import torch
from train_cells import Bench, Plan, Row, median, quick

from nsa_bench.crossover import crossing
from nsa_models.lm.config import LMConfig, size
from nsa_models.lm.data import Batch
from nsa_models.lm.flops import row_flops
from nsa_models.lm.graph import Graphed
from nsa_models.lm.model import parameter_count

SECTIONS = ("stall", "layers", "toy", "memory", "throughput")


def throughput(bench: Bench) -> None:
    """Tokens/s of whole steps, and peak memory, at every shape; the length from which NSA is
    faster.
    """
    best: dict[tuple[str, int, int], float] = {}
    for length, batch in bench.plan.shapes:
        torch._dynamo.reset()  # one static compilation a shape
        for attention in ("nsa", "dense"):
            for mode in bench.plan.modes:
                config = dataclasses.replace(bench.plan.model, attention=attention)
                facts = {"attention": attention, "S": length, "B": batch, "mode": mode}
                row = bench.cell(
                    "throughput",
                    facts,
                    lambda c=config, n=length, b=batch, m=mode: _speed(bench, c, n, b, m),
                )
                key = (attention, length, batch)
                best[key] = max(best.get(key, 0.0), row.get("tokens_per_s", 0.0))
    lengths = sorted(
        {n for n, b in bench.plan.shapes if b == 1 and best["nsa", n, 1] and best["dense", n, 1]}
    )
    pairs = [(n, best["dense", n, 1] / best["nsa", n, 1]) for n in lengths]
    length, sentence = crossing(pairs)
    bench.cell("throughput", {"crossover": length, "sentence": f"NSA trains {sentence}"}, dict)


def _speed(bench: Bench, config: LMConfig, length: int, batch: int, mode: str) -> Row:
    trainer = bench.trainer(config, length, batch, mode)
    # before the first step: a replayed graph calls no allocator, so its memory is seen at its
    # capture
    if bench.cuda:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        trainer.step()
    bench.sync()
    took = list(bench.times(trainer))
    tokens = length * batch
    return {
        "tokens_per_s": round(tokens / median(took)),
        "step_ms": round(median(took) * 1e3, 3),
        "steps": len(took),
        "slowest_ms": round(max(took) * 1e3, 3),
        "peak_gib": round(trainer.memory() / 2**30, 3),
        "matrix_share": round(
            row_flops(trainer.model, length) * batch / median(took) / bench.peak, 4
        ),
        "parameters": parameter_count(trainer.model),
    }


def memory(bench: Bench) -> None:
    """Activation memory over S, its slope on log-log axes, and the largest batch within 80 GiB."""
    for attention in ("nsa", "dense"):
        config, points = dataclasses.replace(bench.plan.model, attention=attention), []
        for length in bench.plan.lengths:
            row = bench.cell(
                "memory",
                {"attention": attention, "S": length, "B": 1},
                lambda c=config, n=length: _held(bench, c, n, 1),
            )
            if row.get("activation_gib"):
                points.append((length, row["activation_gib"]))
        if len(points) > 1:
            x, y = (torch.tensor(v, dtype=torch.float64).log() for v in zip(*points))
            slope = float(((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum())
            bench.cell("memory", {"attention": attention, "slope_in_S": round(slope, 3)}, dict)
        fits = 0
        for batch in bench.plan.batches:
            facts = {"attention": attention, "S": bench.plan.batch_length, "B": batch}
            row = bench.cell(
                "memory",
                facts,
                lambda c=config, b=batch: _held(bench, c, bench.plan.batch_length, b),
            )
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
    torch.cuda.reset_peak_memory_stats()
    trainer.step()
    bench.sync()
    peak = torch.cuda.max_memory_allocated()
    trainer.optimizer.zero_grad()
    tokens = torch.zeros((batch, length), dtype=torch.long, device=bench.plan.device)
    before = torch.cuda.memory_allocated()
    with trainer._autocast():
        loss = trainer.model(tokens, targets=tokens)
    kept = torch.cuda.memory_allocated() - before  # for backward
    del loss
    return {"peak_gib": round(peak / 2**30, 3), "activation_gib": round(kept / 2**30, 4)}


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
        "median_ms": round(median(took) * 1e3, 3),
        "p99_over_median": round(p99 / median(took), 3),
        "steps": len(took),
        "grown_bytes": held[-1] - held[len(held) // 4],
    }


def layers(bench: Bench) -> None:
    """Forward and backward over the number of layers, and how straight the line is."""
    for mode in ("eager", "graph") if bench.cuda else ("eager",):
        points = []
        for count in bench.plan.layers:
            facts = {"layers": count, "S": bench.plan.layer_length, "B": 1, "mode": mode}
            row = bench.cell(
                "layers", facts, lambda n=count, m=mode: _forward_backward(bench, n, m)
            )
            if "ms" in row:
                points.append((count, row["ms"]))
        if len(points) > 1:
            x, y = (torch.tensor(v, dtype=torch.float64) for v in zip(*points))
            slope = ((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum()
            left = (y - y.mean() - slope * (x - x.mean())).square().sum()
            r2 = float(1 - left / (y - y.mean()).square().sum())
            bench.cell(
                "layers",
                {"mode": mode, "ms_per_layer": round(float(slope), 3), "R2": round(r2, 5)},
                dict,
            )


def _forward_backward(bench: Bench, count: int, mode: str) -> Row:
    trainer = bench.trainer(
        dataclasses.replace(bench.plan.model, n_layers=count), bench.plan.layer_length, 1
    )
    work: Callable[[Batch], torch.Tensor] = trainer._part
    tokens = torch.randint(
        trainer.model.config.vocab_size, (1, bench.plan.layer_length), device=bench.plan.device
    )
    batch = Batch(tokens, tokens, None, None, tokens.numel())
    if mode == "graph":
        work = Graphed(work, list(trainer.model.parameters()))
    took = []
    for _ in range(30 if bench.cuda else 4):
        if mode == "eager":  # as a step does; a graph's gradients are its own memory
            trainer.optimizer.zero_grad()
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
        bench.cell(
            "toy",
            {"S": length, "B": batch, "mode": mode},
            lambda m=mode: _speed(bench, size("toy"), length, batch, m),
        )


def main() -> None:
    """Measure, print, write."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--only", default=",".join(SECTIONS), help="comma-separated sections")
    options.add_argument(
        "--modes",
        help="comma-separated, of eager, compile, graph, compile+graph (default: the plan's)",
    )
    options.add_argument("--quick", action="store_true", help="a tiny model, in seconds")
    options.add_argument(
        "--time-limit", type=float, default=540.0, help="seconds after which no cell begins"
    )
    options.add_argument("--json", type=Path)
    given = options.parse_args()
    sections = given.only.split(",")
    if unknown := sorted(set(sections) - set(SECTIONS)):
        options.error(f"--only must be of {', '.join(SECTIONS)}; got {', '.join(unknown)}")
    plan = quick(given.device) if given.quick else Plan(size("m7c_125m"), given.device)
    if given.modes:
        plan = dataclasses.replace(plan, modes=tuple(given.modes.split(",")))
    if unknown := sorted(set(plan.modes) - {"eager", "compile", "graph", "compile+graph"}):
        options.error(
            f"--modes must be of eager, compile, graph, compile+graph; got {', '.join(unknown)}"
        )
    bench = Bench(plan, given.json, given.time_limit)
    for section in sections:
        globals()[section](bench)


if __name__ == "__main__":
    main()
