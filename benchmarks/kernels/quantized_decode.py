"""Compare and time decode steps over pages of bf16, e4m3 and int8.

    python benchmarks/kernels/quantized_decode.py [--shapes 32x65536,1x65536] [--tune] --json FILE

First the triton backend is compared with sdpa on small shapes. A timed step is one call of
nsa_decode, a CUDA graph that appends a token to each sequence and attends; the L2 cache is
overwritten before each one. Keys are random. --tune also times other settings of the kernels.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import itertools
import json
import multiprocessing
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

from nsa_backend_triton.host import configs, launch_cache
from nsa_core import LayerPages, NSAConfig, PagedKV, decode_rows, nsa_decode, rope_angles
from nsa_core.decode.pages import kv_scale, quantize
from nsa_core.layer.phi.kinds import make_phi

PAGE = 256
CONFIG = NSAConfig(dim=64, n_heads=64, n_kv_heads=4, head_dim=128)
DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "int8": torch.int8}
# changes of the tuned settings of (decode_span, decode_sel)
CHANGES: list[tuple[dict[str, int], dict[str, int]]] = [
    ({}, {}),
    ({"BLOCK_N": 64}, {}),
    ({"num_stages": 4}, {"num_stages": 4}),
    ({"BLOCK_N": 64, "num_stages": 4, "maxnreg": 168, "PROGRAMS_PER_SM": 3}, {}),
    ({"PROGRAMS_PER_SM": 5, "maxnreg": 96}, {"PROGRAMS_PER_SM": 5}),
    ({"num_stages": 5, "PROGRAMS_PER_SM": 3, "maxnreg": 168}, {"PROGRAMS_PER_SM": 3}),
]


class Cell(NamedTuple):
    """One measured step.

    Attributes:
        kv: the dtype of pages, a key of DTYPES.
        batch: number of sequences.
        length: tokens of each sequence.
        page_scales: whether pages have scales of their own.
        change: an index of CHANGES.
    """

    kv: str
    batch: int
    length: int
    page_scales: bool = False
    change: int = 0


@contextlib.contextmanager
def changed(cell: Cell) -> Iterator[None]:
    """Use the settings of a cell inside the block."""
    pick, changes = configs.pick, dict(zip(("decode_span", "decode_sel"), CHANGES[cell.change]))

    def patched(kernel: str, *args: Any, **traits: int) -> configs.Settings:
        return {**pick(kernel, *args, **traits), **changes.get(kernel, {})}

    launch_cache.clear()
    with mock.patch.object(configs, "pick", patched):
        yield


class Step:
    """The tensors of a step on the current GPU; ``call`` runs it."""

    def __init__(
        self, cell: Cell, full: bool = True, dtype: torch.dtype = torch.bfloat16, new: int = 1
    ) -> None:
        """``full``: the sequences share no pages; otherwise all write to a few, in any order."""
        torch.manual_seed(0)
        self.config, geometry = CONFIG, CONFIG.geometry
        kv_dtype = dtype if cell.kv == "bf16" else DTYPES[cell.kv]
        columns = -(-(cell.length + new) // PAGE)

        def part(rows: int, columns: int, quantized: bool = True) -> PagedKV:
            number = cell.batch * columns
            table = torch.arange(number, dtype=torch.int32, device="cuda").view(cell.batch, -1)
            if not full:
                number, table = 8, table % 8
            shape, width = (number, rows, CONFIG.n_kv_heads), CONFIG.qk_dim
            store = [torch.empty((*shape, width), dtype=dtype, device="cuda") for _ in "kv"]
            for x in store:
                x.normal_()
            if not quantized or cell.kv == "bf16":
                return PagedKV(*store, table)
            scales = torch.stack([kv_scale(x[:8], kv_dtype, margin=1.2) for x in store], -1)
            scales = scales.expand(number, -1, -1)
            if cell.page_scales:
                scales = scales * (0.5 + torch.rand_like(scales[..., :1]))
            parts = []
            for i, x in enumerate(store):
                parts.append(torch.empty_like(x, dtype=kv_dtype))
                for first in range(0, number, 512):
                    some = slice(first, first + 512)
                    scale = scales[some, None, :, i]
                    parts[-1][some] = quantize(x[some], scale, kv_dtype)
            return PagedKV(*parts, table, scales)

        newest = -(-(geometry.window_size + new) // PAGE) + 1
        self.pages = LayerPages(
            part(PAGE // geometry.compress_stride, columns),
            part(PAGE, columns),
            part(PAGE, newest),
            part(64, 1, quantized=False),
        )
        lengths = torch.full((cell.batch,), cell.length + new, dtype=torch.int32, device="cuda")
        ends = torch.arange(cell.batch + 1, dtype=torch.int32, device="cuda") * new
        tokens = cell.batch * new
        self.rows = decode_rows(ends, lengths, tokens)
        self.phi = tuple(
            make_phi("mlp", geometry, CONFIG.qk_dim).to("cuda", dtype).requires_grad_(False)
            for _ in "kv"
        )
        self.max_len = cell.length + new
        self.rope = rope_angles(CONFIG, self.max_len, dtype=dtype, device="cuda")
        self.q = torch.randn(tokens, CONFIG.n_heads, CONFIG.qk_dim, dtype=dtype, device="cuda")
        self.k, self.v = torch.randn(
            2, tokens, CONFIG.n_kv_heads, CONFIG.qk_dim, dtype=dtype, device="cuda"
        )
        self.gates = torch.rand(tokens, CONFIG.n_heads, 3, device="cuda")

    def call(self, backends: str = "triton") -> torch.Tensor:
        """Run the step."""
        return nsa_decode(
            self.q, self.k, self.v, self.gates, self.pages, self.rows, config=self.config,
            phi=self.phi, rope=self.rope, max_len=self.max_len, backends=backends,
        )  # fmt: skip


def warm(cell: Cell) -> str:
    """Compile the kernels of a cell, so that Triton's cache has them; return an error."""
    try:
        with changed(cell):
            Step(cell, full=False).call()
        torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001  a configuration that does not compile is left out
        return f"{type(error).__name__}: {str(error)[:200]}"
    return ""


def milliseconds(cell: Cell, step: Step, rounds: int = 40) -> tuple[float, float]:
    """Return the median and the least time of a step in a CUDA graph, with a cold L2 cache."""
    with changed(cell):
        step.call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step.call()
    flush = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(rounds)]
    for start, end in events:
        flush.zero_()
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    times = [start.elapsed_time(end) for start, end in events][5:]
    return statistics.median(times), min(times)


def differences() -> Iterator[tuple[str, float, int]]:
    """Yield small problems, the error of triton relative to sdpa in fp32, and unequal codes."""
    for kv in ("bf16", "fp8", "int8"):
        for dtype in (torch.bfloat16, torch.float16):
            for page_scales in (False, True)[: 1 + (kv != "bf16")]:
                cell = Cell(kv, 3, 1343, page_scales)
                steps = [Step(cell, dtype=dtype) for _ in range(2)]
                with changed(cell):
                    actual, expected = (
                        step.call(x).float() for step, x in zip(steps, ("triton", "sdpa"))
                    )
                unequal = 0
                for one, other in zip(*(step.pages for step in steps)):
                    for x, y in zip(one[:2], other[:2]):
                        size = torch.uint8 if x.element_size() == 1 else torch.int16
                        unequal += int((x.view(size) != y.view(size)).sum())
                error = float((actual - expected).norm() / expected.norm())
                yield f"{kv} {dtype} page_scales={page_scales}", error, unequal


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shapes", default="32x65536,1x65536,32x8192", help="BATCHxLENGTH,...")
    parser.add_argument("--tune", action="store_true", help="time other settings, too")
    parser.add_argument("--json", type=Path, help="file for the results")
    args = parser.parse_args()
    shapes = [tuple(map(int, x.split("x"))) for x in args.shapes.split(",")]
    cells = []
    for batch, length in shapes:
        cells += [Cell(kv, batch, length) for kv in DTYPES]
        cells += [Cell(kv, batch, length, page_scales=True) for kv in ("fp8", "int8")]
    if args.tune:
        changes = range(1, len(CHANGES))
        cells += [Cell(kv, *shapes[0], change=i) for kv in DTYPES for i in changes]
    order = [*DTYPES]
    cells.sort(key=lambda x: (shapes.index((x.batch, x.length)), order.index(x.kv), x.page_scales))
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(12, mp_context=context) as pool:
        errors = dict(zip(cells, pool.map(warm, cells)))
    checks = [*differences()]
    for name, error, unequal in checks:
        print(f"{name}: differs by {error:.1e} of the norm, {unequal} unequal elements in pages")
    print(f"{torch.cuda.get_device_name()}; ms of a step, its part of bf16's, settings")
    results, baseline = [], {}
    for _, group in itertools.groupby(cells, lambda x: x._replace(change=0)):
        step = None  # frees the tensors of the one before
        for cell in group:
            if errors[cell]:
                print(cell, errors[cell])
                continue
            step = Step(cell) if step is None else step
            median, least = milliseconds(cell, step)
            shape = f"{cell.batch}x{cell.length}"
            part = median / baseline.setdefault(shape, median)
            results.append({**cell._asdict(), "ms": median, "least": least})
            kind = cell.kv + " page scales" * cell.page_scales
            change = CHANGES[cell.change] if cell.change else ""
            print(f"{shape} {kind:16} {median:.4f} (least {least:.4f}) {part:.2f} {change}")
    if args.json:
        checked = [dict(zip(("name", "error", "unequal"), check)) for check in checks]
        args.json.write_text(json.dumps({"checks": checked, "steps": results}, indent=1))


if __name__ == "__main__":
    main()
