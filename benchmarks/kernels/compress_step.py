"""Compare captured decode steps with the fused compress and with PyTorch's operators.

    python benchmarks/kernels/compress_step.py --json compress_step.json    # on a GPU
    TRITON_INTERPRET=1 python benchmarks/kernels/compress_step.py --quick   # on the CPU, no times

For each shape and kind of phi, two caches with equal contents take the same steps: once as the plan
of the triton backend says, once without its fused compress. Printed are the largest differences of
the compressed tokens and of the outputs, the kernels of a step, and the median time of a graph's
replay in us: of steps that complete no block, and of steps that complete one in some sequence. The
sequences complete their blocks in the same steps, or by turns. The GPU spins before each replay, so
that the launch of the graph is not in the time.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from nsa_bench.environment import machine
from nsa_core import NSAConfig, NSAttention
from nsa_core.cache.state import NewTokens

STRIDE = NSAConfig.compress_stride
# Hq, G, D, sequences, tokens
SHAPES = ((12, 2, 64, 8, 8192), (64, 4, 128, 16, 32768), (8, 2, 32, 1, 1024))
QUICK_SHAPES = ((4, 2, 16, 3, 64),)
QUICK_BLOCKS = {
    **{"compress_block_size": 8, "compress_stride": 4},
    **{"select_block_size": 16, "num_selected_blocks": 4, "window_size": 24},
}
COMPARED, QUICK_COMPARED, WARM_UP, TIMED = 40, 6, 20, 200
ROOM = 512  # tokens of cache space for the steps
SPIN_CYCLES = 1_000_000  # about 0.5 ms
Replay = Callable[[], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Case:
    """Decode steps of a layer.

    Attributes:
        shape: Hq, G, D, number of sequences and tokens of the longest one.
        kind: Kind of phi.
        by_turns: Whether each sequence is one token shorter than the one before it.
    """

    shape: tuple[int, int, int, int, int]
    kind: str
    by_turns: bool

    def lengths(self) -> list[int]:
        """Return the tokens of each sequence before the first step."""
        *_, batch, length = self.shape
        return [length - 5 - (i if self.by_turns else 0) for i in range(batch)]

    def __str__(self) -> str:
        heads, groups, width, batch, length = self.shape
        order = "by turns" if self.by_turns else "together"
        return f"{heads}/{groups}/{width} {batch} x {length} {self.kind}, {order}"


def layer_of(case: Case, device: str, dtype: torch.dtype) -> NSAttention:
    """Return a layer on the triton backend, with positions and biases that are not 0."""
    torch.manual_seed(0)
    heads, groups, width, *_ = case.shape
    config = NSAConfig(
        dim=heads * width,
        n_heads=heads,
        n_kv_heads=groups,
        head_dim=width,
        compress=case.kind,
        **(QUICK_BLOCKS if device == "cpu" else {}),
    )
    layer = NSAttention(config, backends="triton").to(device, dtype).requires_grad_(False)
    for name, parameter in layer.named_parameters():
        if name.endswith(("bias", "position")):
            parameter.add_(0.3 * torch.randn_like(parameter))
    return layer


def filled_cache(layer: NSAttention, case: Case, dtype: torch.dtype, fused: bool) -> Any:
    """Return a cache with random contents; without ``fused``, its plan has no fused compress."""
    *_, batch, length = case.shape
    options: dict[str, Any] = {"page_size": 128, "max_step": 1, "dtype": dtype}
    cache = layer.new_cache(batch, length + ROOM, **options)
    if not fused:
        forms = {name: form for name, form in cache.plan.fused.items() if name != "compress"}
        plan = dataclasses.replace(cache.plan, fused=MappingProxyType(forms))
        cache = layer.new_cache(batch, length + ROOM, plan=plan, **options)
    assert ("compress" in cache.plan.fused) == fused, cache.plan.fused
    before, device = case.lengths(), cache.device
    cache.admit(before)
    generator = torch.Generator(device).manual_seed(1)
    for store in cache.kv.tensors():
        store.normal_(generator=generator)
    counts = torch.tensor(before, dtype=torch.int32, device=device)
    cache.advance(NewTokens(max(before), before, counts, True))
    return cache


def step_of(layer: NSAttention, cache: Any, x: torch.Tensor) -> Replay:
    """Return a function that runs a step on x: the replay of a CUDA graph, eager on the CPU."""
    if x.device.type != "cuda":
        return lambda: layer(x, cache=cache)
    cache.reserve(cache.max_len)
    cache.reserve_workspace(rows=1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x, cache=cache)

    def replay() -> torch.Tensor:
        graph.replay()
        return y

    return replay


def differences(steps: dict[bool, Replay], caches: dict[bool, Any], x: torch.Tensor) -> dict:
    """Take the same steps with both plans; return the largest differences of tokens and outputs."""
    y_difference = 0.0
    for seed in range(COMPARED if x.is_cuda else QUICK_COMPARED):
        x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)))
        fused, plain = steps[True]().clone(), steps[False]().clone()
        y_difference = max(y_difference, (fused - plain).abs().max().item())
    pages = max(
        (a.float() - b.float()).abs().max().item()
        for a, b in zip(
            *((caches[f].kv.pages.cmp.k, caches[f].kv.pages.cmp.v) for f in (True, False))
        )
    )
    return {"cmp_difference": pages, "y_difference": y_difference}


def times(replay: Replay, lengths: list[int]) -> dict[str, float | None]:
    """Return the median us of replays that complete no block, and of those that complete one."""
    samples: dict[bool, list[float]] = {False: [], True: []}
    for i in range(1, WARM_UP + TIMED + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(SPIN_CYCLES)
        start.record()
        replay()
        end.record()
        torch.cuda.synchronize()
        if i > WARM_UP:
            completes = any((n + i) % STRIDE == 0 for n in lengths)
            samples[completes].append(start.elapsed_time(end) * 1e3)
    names = {False: "no_block_us", True: "a_block_us"}
    return {
        names[completes]: round(statistics.median(values), 2) if values else None
        for completes, values in samples.items()
    }


def count_kernels(replay: Replay) -> int:
    """Return the number of kernels of a step."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        replay()
        torch.cuda.synchronize()
    cuda = torch.autograd.DeviceType.CUDA
    return sum(event.device_type == cuda for event in profile.events())


@torch.no_grad()
def rows_of(case: Case, device: str, dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    """Yield the row of the differences, and on a GPU the rows of the times."""
    layer = layer_of(case, device, dtype)
    x = torch.randn(case.shape[3], 1, layer.config.dim, device=device, dtype=dtype)
    caches = {fused: filled_cache(layer, case, dtype, fused) for fused in (True, False)}
    steps = {fused: step_of(layer, caches[fused], x) for fused in (True, False)}
    yield {"case": str(case), **differences(steps, caches, x)}
    for fused in (True, False) if device == "cuda" else ():
        kernels = count_kernels(steps[fused])
        lengths = caches[fused].lengths.tolist()
        row = {"compress": "fused" if fused else "PyTorch", "kernels": kernels}
        yield {"case": str(case), **row, **times(steps[fused], lengths)}
    for cache in caches.values():
        cache.check()


def interpreted() -> contextlib.AbstractContextManager[object]:
    """Return a context in which the kernels run on the CPU."""
    from nsa_backend_triton.strict.interpreter import strict

    return strict()


def main() -> None:
    """Compare all cases, print a line per row, and write the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a small shape in fp32 on the CPU")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args()
    device = "cpu" if options.quick else "cuda"
    dtype = torch.float32 if options.quick else torch.bfloat16
    rows = []
    shapes = QUICK_SHAPES if options.quick else SHAPES
    with interpreted() if options.quick else contextlib.nullcontext():
        for shape, kind, by_turns in itertools.product(shapes, ("mlp", "linear"), (False, True)):
            for row in rows_of(Case(shape, kind, by_turns), device, dtype):
                print("  ".join(f"{name}={value}" for name, value in row.items()), flush=True)
                rows.append(row)
    if options.json:
        document = {"machine": machine(device), "torch": torch.__version__, "rows": rows}
        options.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
