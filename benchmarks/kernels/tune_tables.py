"""Time settings of one kernel of the Triton backend, to fill a row of its tables in `tuned/`.

    python benchmarks/kernels/tune_tables.py SWEEPS [--graph] [--json FILE] [--processes 14]
    python benchmarks/rehearse.py --arch 80 -- python benchmarks/kernels/tune_tables.py SWEEPS

SWEEPS is a text file. A line names a kernel, a slot, a shape Hq/G/D or Hq/G/Dk/Dv, a number of
tokens, and the settings to vary; every combination of their values replaces those of the tuned row:

    span_dkdv cmp 64/4/128 65536 BLOCK_N=64,128 BLOCK_M=32,64 num_warps=4,8 num_stages=2

A name such as sel_block_backward.ORDERED is a setting of another kernel of the slot. A field of
NSAConfig such as select_block_size=128, with one value, belongs to the timed problem. So does
random_blocks=256: each token and kv head then has num_selected_blocks random blocks of 256 keys,
the initial and local ones among them. sel takes them in parts of select_block_size keys. With
sharing=2, eight neighbouring tokens choose among the random blocks of the first two of them, as
neighbours in a trained model share blocks. batch=8 is the number of sequences. With runs=64, the
forward of sel divides its pairs into at most 64 runs (`sel/runs.py`), even if few bytes of partial
outputs would need fewer.

Every candidate first runs on a short sequence, in a pool of processes that compiles all of them. It
is compared with the tuned row there: `nsa verify` judges the row that is chosen in the end. A
candidate that does not fit the GPU prints its error. Then the slot is timed in bf16, at batch 1 by
default, with all other kernels as tuned: its forward or its backward, median ms of do_bench,
fastest first. With
``--graph``, a CUDA graph of the call is replayed, which leaves out the time of the host: use it for
short sequences. Without random_blocks, the blocks of sel are those that select chooses for random
queries and keys.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import itertools
import json
import multiprocessing
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nsa_backend_triton.host import configs, launch_cache
from nsa_backend_triton.host.device import architecture
from nsa_backend_triton.sel import runs
from nsa_bench.environment import machine
from nsa_core import NSAConfig, plan_block_attention, resolve
from nsa_core.block.plans import split_blocks
from nsa_core.contract import BRANCHES

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from random_blocks import random_causal_blocks, share_blocks

CHECKED_TOKENS = 1500  # length of the compared calls: several tiles and partial ones
MAX_DISTANCE = 0.01  # rms of the difference relative to the tuned row's rms; bf16 rounds to 2**-9
SLOTS = tuple(configs.FORWARD)
NOT_OF_CONFIG = ("random_blocks", "sharing", "batch", "runs")
PROBLEM_FIELDS = ("select_block_size", "num_selected_blocks", "window_size", *NOT_OF_CONFIG)
RUNS = runs.PARTIAL_BYTES, runs.MAX_RUNS
Settings = dict[str, int]


@dataclasses.dataclass(frozen=True)
class Sweep:
    """A line of SWEEPS.

    Attributes:
        kernel: Name of the kernel in the tables.
        slot: The slot that launches it.
        shape: Hq/G/D or Hq/G/Dk/Dv.
        tokens: Length of the timed sequence.
        grid: Setting -> its values.
        fields: Fields of NSAConfig that differ from their defaults, random_blocks, sharing, batch
            and runs.
    """

    kernel: str
    slot: str
    shape: str
    tokens: int
    grid: tuple[tuple[str, tuple[int, ...]], ...]
    fields: tuple[tuple[str, int], ...] = ()

    @classmethod
    def parse(cls, line: str) -> Sweep:
        """Return the sweep of a line.

        Raises:
            ValueError: The line is no sweep; the message names it.
        """
        words = line.split()
        try:
            kernel, slot, shape, tokens, *settings = words
            pairs = [setting.split("=") for setting in settings]
            grid = tuple(
                (name, tuple(map(int, values.split(","))))
                for name, values in pairs
                if name not in PROBLEM_FIELDS
            )
            fields = tuple((name, int(value)) for name, value in pairs if name in PROBLEM_FIELDS)
            length = int(tokens)
        except ValueError:
            form = "KERNEL SLOT SHAPE TOKENS NAME=VALUE,VALUE ..."
            raise ValueError(f"{line.strip()!r} is not of the form {form!r}") from None
        if kernel not in (*configs.FORWARD.get(slot, ()), *configs.BACKWARD.get(slot, ())):
            raise ValueError(f"{line.strip()!r}: slot {slot!r} launches no kernel {kernel!r}")
        given = dict(fields)
        if size := given.get("random_blocks"):
            part = given.get("select_block_size", NSAConfig.select_block_size)
            if slot != "sel" or size % part:
                raise ValueError(
                    f"{line.strip()!r}: random_blocks={size} needs the slot sel, and a"
                    f" select_block_size that divides it, got {slot} and {part}"
                )
        if "sharing" in given and not ("random_blocks" in given and 1 <= given["sharing"] <= 8):
            raise ValueError(
                f"{line.strip()!r}: sharing={given['sharing']} must be 1 to 8, and needs"
                f" random_blocks"
            )
        if "runs" in given and (given["runs"] < 1 or kernel not in configs.FORWARD["sel"]):
            raise ValueError(
                f"{line.strip()!r}: runs={given['runs']} must be at least 1, and belongs to the"
                f" forward of sel"
            )
        return cls(kernel, slot, shape, length, grid, fields)

    def changes(self) -> list[Settings]:
        """Return what each candidate changes; the first one, the tuned row, changes nothing."""
        names = [name for name, _ in self.grid]
        products = itertools.product(*(values for _, values in self.grid))
        return [{}, *(dict(zip(names, values)) for values in products)]

    @property
    def is_forward(self) -> bool:
        """Whether the kernel belongs to the slot's forward."""
        return self.kernel in configs.FORWARD[self.slot]

    @property
    def widths(self) -> tuple[int, int, int, int]:
        """Hq, G, Dk and Dv."""
        heads, groups, dk, *dv = map(int, self.shape.split("/"))
        return heads, groups, dk, dv[0] if dv else dk

    @property
    def config(self) -> NSAConfig:
        """The configuration of the timed problem."""
        heads, groups, dk, dv = self.widths
        blocks = {name: value for name, value in self.fields if name not in NOT_OF_CONFIG}
        sizes: dict[str, Any] = {"head_dim": dk, "v_head_dim": dv, **blocks}
        return NSAConfig(dim=heads * dk, n_heads=heads, n_kv_heads=groups, **sizes)

    def __str__(self) -> str:
        direction = "forward" if self.is_forward else "backward"
        fields = "".join(f" {name}={value}" for name, value in self.fields)
        return f"{self.kernel}, {self.slot} {direction} {self.shape} {self.tokens} tokens{fields}"

    def normal(self, rows: int, count: int, width: int) -> Tensor:
        """Return a bf16 tensor [batch, rows, count, width] of normal numbers."""
        batch = dict(self.fields).get("batch", 1)
        return torch.randn((batch, rows, count, width), device="cuda", dtype=torch.bfloat16)


class TunedRows:
    """The rows that the calls of a sweep use, with changes."""

    def __init__(self, kernel: str) -> None:
        self._kernel, self._pick = kernel, configs.pick

    def change(self, settings: Settings) -> None:
        """Replace settings of the rows that the tables give; maxnreg=0 removes the limit."""

        def pick(kernel: str, architecture: int, **traits: int) -> configs.Settings:
            row = dict(self._pick(kernel, architecture, **traits))
            for name, value in settings.items():
                of, _, setting = name.rpartition(".")
                if (of or self._kernel) == kernel:
                    row[setting] = value
            return {name: value for name, value in row.items() if value or name != "maxnreg"}

        configs.pick = pick if settings else self._pick
        launch_cache.clear()


def slot_call(sweep: Sweep, tokens: int) -> Callable[[], tuple[Tensor, ...]]:
    """Return the call that the sweep times, for ``tokens`` tokens."""
    limit = dict(sweep.fields).get("runs")
    runs.PARTIAL_BYTES, runs.MAX_RUNS = (1, limit) if limit else RUNS
    if "random_blocks" in dict(sweep.fields):
        return random_call(sweep, tokens)
    heads, groups, dk, width = sweep.widths
    config = sweep.config
    plan = resolve(
        config,
        device="cuda",
        dtype=torch.bfloat16,
        backends=dict.fromkeys(SLOTS, "triton"),
        needs_grad=True,
        batch=dict(sweep.fields).get("batch", 1),
        seq_len=tokens,
    )
    torch.manual_seed(0)
    q, do = sweep.normal(tokens, heads, dk), sweep.normal(tokens, heads, width)
    rows = config.geometry.num_compressed(tokens) if sweep.slot in ("cmp", "select") else tokens
    k, v = sweep.normal(rows, groups, dk), sweep.normal(rows, groups, width)
    extra: list[Tensor] = []
    if sweep.slot in ("select", "sel"):
        short = config.geometry.num_compressed(tokens)
        k_cmp, v_cmp = (
            (k, v) if rows == short else (sweep.normal(short, groups, x) for x in (dk, width))
        )
        with torch.no_grad():
            lse = plan.cmp(q, k_cmp, v_cmp)[1]
            extra = [lse] if sweep.slot == "select" else [plan.select(q, k_cmp, lse)]
    kernel = getattr(plan, sweep.slot)
    inputs = [q, k] if sweep.slot == "select" else [q, k, v]
    if sweep.slot == "combine":
        gates = torch.rand((*q.shape[:-1], 3), device="cuda")
        inputs = [gates, *(sweep.normal(tokens, heads, width) for _ in BRANCHES)]
    return _timed(sweep, kernel, inputs, extra, do)


def random_call(sweep: Sweep, tokens: int) -> Callable[[], tuple[Tensor, ...]]:
    """Return the call of sel on random blocks that the sweep times, for ``tokens`` tokens."""
    heads, groups, dk, width = sweep.widths
    fields = dict(sweep.fields)
    size = fields.pop("random_blocks")
    batch, sharing, _ = (fields.pop(name, 0) for name in ("batch", "sharing", "runs"))
    part = fields.pop("select_block_size", NSAConfig.select_block_size)
    geometry = NSAConfig(heads * dk, heads, groups, dk, select_block_size=size, **fields).geometry
    blocks = random_causal_blocks(tokens, groups, geometry, "cuda", batch or 1)
    if sharing:
        blocks = share_blocks(blocks, sharing)
    blocks = split_blocks(blocks, size // part)
    plan = plan_block_attention(
        heads,
        groups,
        dk,
        v_head_dim=width,
        block_size=part,
        n_blocks=blocks.shape[-1],
        device="cuda",
        dtype=torch.bfloat16,
        backends="triton",
        needs_grad=True,
        batch=dict(sweep.fields).get("batch", 1),
        seq_len=tokens,
    )
    torch.manual_seed(0)
    q, do = sweep.normal(tokens, heads, dk), sweep.normal(tokens, heads, width)
    k, v = sweep.normal(tokens, groups, dk), sweep.normal(tokens, groups, width)
    return _timed(sweep, plan.kernel, [q, k, v], [blocks], do)


def _timed(
    sweep: Sweep, kernel: Any, inputs: list[Tensor], extra: list[Tensor], do: Tensor
) -> Callable[[], tuple[Tensor, ...]]:
    """Return the forward, or the backward from ``do`` to ``inputs``."""
    if sweep.is_forward:
        return functools.partial(_forward, kernel, [*inputs, *extra])
    leaves = [x.requires_grad_() for x in inputs]
    out = kernel(*leaves, *extra)
    o = out[0] if isinstance(out, tuple) else out
    return lambda: torch.autograd.grad(o, leaves, do, retain_graph=True)


@torch.no_grad()
def _forward(kernel: Any, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    out = kernel(*inputs)
    return out if isinstance(out, tuple) else (out,)


def distance(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> float:
    """Return the largest rms of a difference, relative to the rms of what is expected."""
    worst = 0.0
    for x, y in zip(found, expected):
        same = (x == y) & ~y.isfinite()
        x, y = (z.double().masked_fill(same, 0.0) for z in (x, y))
        worst = max(worst, float((x - y).square().mean().sqrt() / y.square().mean().sqrt()))
    return worst


def problem_of(sweep: Sweep, change: Settings) -> str:
    """Compile and check a candidate; return why it cannot be used, or ""."""
    rows = TunedRows(sweep.kernel)
    try:
        call = slot_call(sweep, CHECKED_TOKENS)
        expected = call()
        rows.change(change)
        found = distance(call(), expected)
    except Exception as error:  # noqa: BLE001  it may not fit: report it and go on
        return f"{type(error).__name__}: {' '.join(str(error).split())[:90]}"
    finally:
        rows.change({})
    return "" if found < MAX_DISTANCE else f"WRONG: distance {found:.2g} from the tuned row"


def bench(sweep: Sweep, graph: bool) -> Callable[[], float]:
    """Return a function that times the call of ``sweep`` with the rows as they are, in ms."""
    if graph:
        from tree_clocks import cuda_clock  # beside this script

        # Captured each time, because the rows change between the times.
        return lambda: cuda_clock(lambda: slot_call(sweep, sweep.tokens))()
    from triton.testing import do_bench

    call = slot_call(sweep, sweep.tokens)
    return lambda: float(do_bench(call, warmup=10, rep=60, return_mode="median"))


def measure(sweep: Sweep, problems: list[str], graph: bool) -> dict[str, Any]:
    """Time the candidates without a problem; print and return the results."""
    rows, times = TunedRows(sweep.kernel), []
    time_call = bench(sweep, graph)
    print(f"\n{sweep}", flush=True)
    for change, problem in zip(sweep.changes(), problems):
        label = " ".join(f"{name}={value}" for name, value in change.items()) or "tuned"
        if problem:
            print(f"           {label}  {problem}", flush=True)
            continue
        rows.change(change)
        times.append((time_call(), label))
    rows.change({})
    for ms, label in sorted(times):
        print(f"{ms:9.3f}  {label}", flush=True)
    return dataclasses.asdict(sweep) | {"ms": {label: round(ms, 4) for ms, label in times}}


def main() -> None:
    """Check every candidate in parallel, then time them one after the other."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sweeps", type=Path, metavar="SWEEPS")
    parser.add_argument("--graph", action="store_true", help="replay CUDA graphs")
    parser.add_argument("--json", type=Path, help="also write the times to this file")
    parser.add_argument("--processes", type=int, default=14)
    options = parser.parse_args()
    lines = options.sweeps.read_text().splitlines()
    try:
        sweeps = [Sweep.parse(line) for line in lines if line.strip() and line[0] != "#"]
    except ValueError as error:
        parser.error(str(error))
    device = torch.device("cuda", torch.cuda.current_device())
    facts = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "machine": machine("cuda"),
        "graph": options.graph,
    }
    print(f"{facts['gpu']}, table of sm_{architecture(device)}", flush=True)
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(options.processes, mp_context=spawn) as pool:
        checked = [[pool.submit(problem_of, s, change) for change in s.changes()] for s in sweeps]
        results = []
        for sweep, tasks in zip(sweeps, checked):
            problems = [task.result() for task in tasks]
            results.append((sweep, problems))
    rows = []
    for sweep, problems in results:
        rows.append(measure(sweep, problems, options.graph))
        torch.cuda.empty_cache()
        if options.json:
            options.json.write_text(json.dumps(facts | {"sweeps": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
