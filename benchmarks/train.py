"""Compare the training speed and memory of m7c_125m with NSA and with dense attention on one GPU.

    python benchmarks/train.py --json train.json
    python benchmarks/train.py --quick --device cpu     # every section on a tiny model, in seconds

Sections (--only): throughput, stall, memory, layers, toy, and parts, which divides a step among
groups of kernels and runs only if it is named. Cells with a target figure run first; no
cell starts after --time-limit (540 s). Every cell is a row, and the file is written after each. If
a cell fails or runs out of memory, its row has the reason and the run continues.

A mode of --modes is "eager", or options joined with "+": flash4 (dense attention only: it runs on
FlashAttention-4), bf16 (parameters in bf16, without fp32 copies), recompute (NSA only: the backward
runs the branches again), compile, graph. Sections that need none of them measure "eager"; memory
also measures "recompute".
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path

import torch
from train_cells import Bench, Grid, Mode, Row, median, quick
from train_parts import step_parts

from nsa_bench.crossover import crossing
from nsa_models.lm.config import LMConfig, size
from nsa_models.lm.data import Batch
from nsa_models.lm.flops import matrix_share, row_flops
from nsa_models.lm.graph import GraphedWork
from nsa_models.lm.model import parameter_count

DEFAULT_SECTIONS = ("stall", "layers", "toy", "memory", "throughput")
SECTIONS = (*DEFAULT_SECTIONS, "parts")


def throughput(bench: Bench) -> None:
    """Measure tokens/s and peak memory of training steps at every shape, and find the crossover."""
    best: dict[tuple[str, int, int], float] = {}
    for length, batch in bench.grid.shapes:
        torch._dynamo.reset()  # one static compilation per shape
        for attention in ("nsa", "dense"):
            for mode in bench.grid.modes_of(attention):
                config = dataclasses.replace(bench.grid.model, attention=attention)
                facts = {"attention": attention, "S": length, "B": batch, "mode": mode}
                row = bench.cell(
                    "throughput",
                    facts,
                    lambda c=config, n=length, b=batch, m=mode: _speed(bench, c, n, b, m),
                )
                key = (attention, length, batch)
                best[key] = max(best.get(key, 0.0), row.get("tokens_per_s", 0.0))
    lengths = sorted(
        {n for n, b in bench.grid.shapes if b == 1 and best["nsa", n, 1] and best["dense", n, 1]}
    )
    pairs = [(n, best["dense", n, 1] / best["nsa", n, 1]) for n in lengths]
    length, sentence = crossing(pairs)
    bench.cell("throughput", {"crossover": length, "sentence": f"NSA trains {sentence}"}, dict)


def _speed(bench: Bench, config: LMConfig, length: int, batch: int, mode: str) -> Row:
    with Mode.of(mode).kernels():
        return _timed_steps(bench, config, length, batch, mode)


def _timed_steps(bench: Bench, config: LMConfig, length: int, batch: int, mode: str) -> Row:
    trainer = bench.trainer(config, length, batch, mode)
    # Reset before the first step: a replayed graph does not call the allocator, so its memory shows
    # only at its capture.
    if bench.cuda:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        trainer.step()
    bench.sync()
    step_times = list(bench.times(trainer))
    tokens = length * batch
    flops_per_s = row_flops(trainer.model, length) * batch / median(step_times)
    share = matrix_share(flops_per_s, bench.peak)
    return {
        "tokens_per_s": round(tokens / median(step_times)),
        "step_ms": round(median(step_times) * 1e3, 3),
        "steps": len(step_times),
        "slowest_ms": round(max(step_times) * 1e3, 3),
        "peak_gib": round(trainer.memory() / 2**30, 3),
        "matrix_share": share and round(share, 4),
        "parameters": parameter_count(trainer.model),
    }


def parts(bench: Bench) -> None:
    """Divide the time of a step among groups of kernels, in the last mode, by shape."""
    for length, batch in bench.grid.shapes:
        torch._dynamo.reset()
        for attention in ("nsa", "dense"):
            mode = bench.grid.modes_of(attention)[-1]
            config = dataclasses.replace(bench.grid.model, attention=attention)
            facts = {"attention": attention, "S": length, "B": batch, "mode": mode}
            bench.cell(
                "parts",
                facts,
                lambda c=config, n=length, b=batch, m=mode: _parts(bench, c, n, b, m),
            )


def _parts(bench: Bench, config: LMConfig, length: int, batch: int, mode: str) -> Row:
    trainer = bench.trainer(config, length, batch, mode)
    for _ in range(3):
        trainer.step()
    return step_parts(trainer, list(bench.times(trainer)))


def memory(bench: Bench) -> None:
    """Measure activation memory by length, its log-log slope, and the largest batch in 80 GiB."""
    for attention, mode in (("nsa", "eager"), ("nsa", "recompute"), ("dense", "eager")):
        config, points = dataclasses.replace(bench.grid.model, attention=attention), []
        kind = {"attention": attention, "mode": mode}
        for length in bench.grid.lengths:
            row = bench.cell(
                "memory",
                {**kind, "S": length, "B": 1},
                lambda c=config, n=length, m=mode: _memory(bench, c, n, 1, m),
            )
            if row.get("activation_gib"):
                points.append((length, row["activation_gib"]))
        if len(points) > 1:
            x, y = (torch.tensor(v, dtype=torch.float64).log() for v in zip(*points))
            slope = float(((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum())
            bench.cell("memory", {**kind, "slope_in_S": round(slope, 3)}, dict)
        largest = 0
        for batch in bench.grid.batches:
            facts = {**kind, "S": bench.grid.batch_length, "B": batch}
            row = bench.cell(
                "memory",
                facts,
                lambda c=config, b=batch, m=mode: _memory(bench, c, bench.grid.batch_length, b, m),
            )
            if "reason" in row or row["peak_gib"] > 80:
                break
            largest = batch
        bench.cell("memory", {**kind, "largest_B_in_80_GiB": largest}, dict)


def _memory(bench: Bench, config: LMConfig, length: int, batch: int, mode: str) -> Row:
    trainer = bench.trainer(config, length, batch, mode)
    trainer.step()
    bench.sync()
    if not bench.cuda:
        return {"peak_gib": round(trainer.memory() / 2**30, 3)}
    torch.cuda.reset_peak_memory_stats()
    trainer.step()
    bench.sync()
    peak = torch.cuda.max_memory_allocated()
    trainer.optimizer.zero_grad()
    tokens = torch.zeros((batch, length), dtype=torch.long, device=bench.grid.device)
    before = torch.cuda.memory_allocated()
    with trainer._autocast():
        loss = trainer.model(tokens, targets=tokens)
    activations = torch.cuda.memory_allocated() - before  # saved for backward
    del loss
    return {"peak_gib": round(peak / 2**30, 3), "activation_gib": round(activations / 2**30, 4)}


def stall(bench: Bench) -> None:
    """Measure 200 steps: p99 over median of the time, and memory growth after the first 50."""
    for length, batch in bench.grid.stalls:
        torch._dynamo.reset()
        facts = {"S": length, "B": batch, "mode": bench.grid.modes_of("nsa")[0]}
        bench.cell("stall", facts, lambda n=length, b=batch: _step_stability(bench, n, b))


def _step_stability(bench: Bench, length: int, batch: int) -> Row:
    trainer = bench.trainer(bench.grid.model, length, batch, bench.grid.modes_of("nsa")[0])
    for _ in range(5):
        trainer.step()
    step_times, memory_bytes = [], []
    for seconds in bench.times(trainer, bench.grid.stall_steps, bench.grid.stall_steps):
        step_times.append(seconds)
        memory_bytes.append(torch.cuda.memory_reserved() if bench.cuda else trainer.memory())
    p99 = sorted(step_times)[min(len(step_times) - 1, round(0.99 * len(step_times)))]
    return {
        "median_ms": round(median(step_times) * 1e3, 3),
        "p99_over_median": round(p99 / median(step_times), 3),
        "steps": len(step_times),
        "grown_bytes": memory_bytes[-1] - memory_bytes[len(memory_bytes) // 4],
    }


def layers(bench: Bench) -> None:
    """Time forward and backward by number of layers, and fit a line."""
    for mode in ("eager", "graph") if bench.cuda else ("eager",):
        points = []
        for count in bench.grid.layers:
            facts = {"layers": count, "S": bench.grid.layer_length, "B": 1, "mode": mode}
            row = bench.cell(
                "layers", facts, lambda n=count, m=mode: _forward_backward(bench, n, m)
            )
            if "ms" in row:
                points.append((count, row["ms"]))
        if len(points) > 1:
            x, y = (torch.tensor(v, dtype=torch.float64) for v in zip(*points))
            slope = ((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum()
            residual = (y - y.mean() - slope * (x - x.mean())).square().sum()
            r2 = float(1 - residual / (y - y.mean()).square().sum())
            bench.cell(
                "layers",
                {"mode": mode, "ms_per_layer": round(float(slope), 3), "R2": round(r2, 5)},
                dict,
            )


def _forward_backward(bench: Bench, count: int, mode: str) -> Row:
    trainer = bench.trainer(
        dataclasses.replace(bench.grid.model, n_layers=count), bench.grid.layer_length, 1
    )
    work: Callable[[Batch], torch.Tensor] = trainer._forward_backward
    tokens = torch.randint(
        trainer.model.config.vocab_size, (1, bench.grid.layer_length), device=bench.grid.device
    )
    batch = Batch(tokens, tokens, None, None, tokens.numel())
    if mode == "graph":
        work = GraphedWork(work, list(trainer.model.parameters()))
    times = []
    for _ in range(30 if bench.cuda else 4):
        if mode == "eager":  # as a training step does; a graph overwrites its gradients
            trainer.optimizer.zero_grad()
        bench.sync()
        started = time.perf_counter()
        work(batch)
        bench.sync()
        times.append(time.perf_counter() - started)
    return {"ms": round(median(times[len(times) // 3 :]) * 1e3, 3)}


def toy(bench: Bench) -> None:
    """Measure tokens/s of the earlier reports' single layer of width 128, at S=128, B=8."""
    length, batch = bench.grid.toy
    for mode in bench.grid.modes_of("nsa"):
        bench.cell(
            "toy",
            {"S": length, "B": batch, "mode": mode},
            lambda m=mode: _speed(bench, size("toy"), length, batch, m),
        )


def main() -> None:
    """Run the sections, print and save their rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--only", default=",".join(DEFAULT_SECTIONS), help="comma-separated sections"
    )
    parser.add_argument(
        "--modes",
        help="comma-separated modes, such as compile+graph,bf16+compile+graph (see above)",
    )
    parser.add_argument(
        "--shapes",
        help="comma-separated shapes of throughput and parts, such as 2048x8 (tokens x batch)",
    )
    parser.add_argument("--quick", action="store_true", help="a tiny model, in seconds")
    parser.add_argument(
        "--time-limit", type=float, default=540.0, help="seconds after which no cell starts"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    sections = options.only.split(",")
    if unknown := sorted(set(sections) - set(SECTIONS)):
        parser.error(f"--only must be among {', '.join(SECTIONS)}; got {', '.join(unknown)}")
    grid = quick(options.device) if options.quick else Grid(size("m7c_125m"), options.device)
    if options.shapes:
        shapes = [shape.split("x") for shape in options.shapes.split(",")]
        if not all(len(s) == 2 and all(n.isdecimal() and int(n) > 0 for n in s) for s in shapes):
            parser.error(f"--shapes must be like 2048x8,16384x1; got {options.shapes}")
        grid = dataclasses.replace(grid, shapes=tuple((int(n), int(b)) for n, b in shapes))
    if options.modes:
        grid = dataclasses.replace(grid, modes=tuple(options.modes.split(",")))
    try:
        modes = [Mode.of(name) for name in grid.modes]
    except ValueError as error:
        parser.error(f"--modes: {error}")
    for attention, option in (("dense", "recompute"), ("nsa", "flash4")):
        if not any(mode.runs(attention) for mode in modes):
            parser.error(
                f"--modes needs a mode without {option}, for {attention} attention;"
                f" got {options.modes}"
            )
    bench = Bench(grid, options.json, options.time_limit)
    for section in sections:
        globals()[section](bench)


if __name__ == "__main__":
    main()
