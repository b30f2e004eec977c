"""Time the kernels of the source tree on PYTHONPATH, as a child process of compare_trees.py.

Messages are lines of JSON: a case to prepare, or the name of a kernel to time once. The script
imports only torch and names that every version of nsa_core has.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

SLOTS = ("cmp", "select", "sel", "win", "combine")
ROOM = 4096  # cache space for the tokens of timed steps
SPIN_CYCLES = 1_000_000  # about 0.5 ms
STEP_KERNELS = {  # row -> how the names of its kernels begin, rows of a step
    "append": (("decode_append",), 1),
    "gates": (("decode_gates",), 1),
    "fused step": (("decode_step",), 1),
    "attention of 4 tokens": (("decode_step", "decode_span", "decode_choose", "decode_sel"), 4),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A problem: the core over ``length`` tokens, or decode steps with caches of ``length`` tokens.

    Attributes:
        shape: Hq/G/D, or Hq/G/Dk/Dv.
        length: Number of tokens.
        batch: Number of sequences of a decode step; 0 for the core.
        small: Use small blocks for tests instead of the paper's.
    """

    shape: str
    length: int
    batch: int = 0
    small: bool = False

    def __str__(self) -> str:
        count = f"{self.length // 1024}k" if self.length % 1024 == 0 else str(self.length)
        return f"{self.shape} {f'{self.batch} x ' if self.batch else ''}{count}"


def serve(device: str, backend: str) -> None:
    """Answer the parent's messages until it closes the pipe."""
    replies, sys.stdout = sys.stdout, sys.stderr  # output of kernels must not reach the parent

    def reply(**message: Any) -> None:
        print(json.dumps(message), file=replies, flush=True)

    try:
        import nsa_core
    except ImportError as error:
        return reply(error=f"nsa_core cannot be imported: {error}")
    files = {"nsa_core": str(nsa_core.__file__)}
    spec = importlib.util.find_spec(f"nsa_backend_{backend}")
    if spec is not None and spec.origin is not None:  # otherwise a backend of another name
        files[spec.name] = spec.origin
    reply(answer=files)
    clocks: dict[str, Callable[[], float]] = {}
    for text in sys.stdin:
        message = json.loads(text)
        try:
            if "case" in message:
                clocks.clear()
                gc.collect()
                clocks, reasons = prepare(Case(**message["case"]), device, backend)
                reply(answer=reasons)
            else:
                reply(answer=clocks[message["name"]]())
        except Exception as error:  # noqa: BLE001  the parent reports it
            reply(error=f"{type(error).__name__}: {str(error)[:300]}")
    return None


def prepare(
    case: Case, device: str, backend: str
) -> tuple[dict[str, Callable[[], float]], dict[str, str]]:
    """Return a clock per kernel of ``case``, and per kernel the reason why it has none, or ""."""
    import torch

    if device == "cuda":
        torch.cuda.empty_cache()
    torch.manual_seed(0)
    clock_of_kernel: dict[str, Callable[[], float]] = {}
    reasons: dict[str, str] = {}
    clocks = (
        step_clocks(case, device, backend) if case.batch else core_clocks(case, device, backend)
    )
    for name, make in clocks.items():
        try:
            clock_of_kernel[name], reasons[name] = make(), ""
            clock_of_kernel[name]()  # compile the kernel and fill caches
        except Exception as error:  # noqa: BLE001  go on with the other kernels
            reasons[name] = f"{type(error).__name__}: {str(error)[:200]}"
    return clock_of_kernel, reasons


def config_of(case: Case, dim: int | None = None) -> Any:
    """Return the configuration of a case."""
    from nsa_core import NSAConfig

    heads, groups, dk, *dv = map(int, case.shape.split("/"))
    sizes = {"dim": dim or heads * dk, "n_heads": heads, "n_kv_heads": groups, "head_dim": dk}
    names = ("compress_block_size", "compress_stride", "select_block_size")
    names += ("num_selected_blocks", "window_size")
    small = dict(zip(names, (8, 4, 16, 3, 24))) if case.small else {}
    return NSAConfig(**sizes, v_head_dim=dv[0] if dv else None, **small)


def core_clocks(case: Case, device: str, backend: str) -> dict[str, Callable[[], Any]]:
    """Return, per slot and direction, a function that creates its clock."""
    import torch

    from nsa_core import resolve

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    config, length = config_of(case), case.length
    plan = resolve(
        config,
        device=device,
        dtype=dtype,
        backends=dict.fromkeys(SLOTS, backend),
        needs_grad=True,
        batch=1,
        seq_len=length,
    )
    heads, groups, dk, *dv = map(int, case.shape.split("/"))
    width = dv[0] if dv else dk
    rows = (length - config.compress_block_size) // config.compress_stride + 1

    def normal(count: int, heads: int, width: int) -> Any:
        return torch.randn((1, count, heads, width), device=device, dtype=dtype)

    q, do = normal(length, heads, dk), normal(length, heads, width)
    short = normal(rows, groups, dk), normal(rows, groups, width)
    full = normal(length, groups, dk), normal(length, groups, width)
    branches = [normal(length, heads, width) for _ in range(3)]
    gates = torch.rand((1, length, heads, 3), device=device, dtype=torch.float32)
    with torch.no_grad():
        _, lse = plan.cmp(q, *short)
        blocks = plan.select(q, short[0], lse)
    calls: dict[str, tuple[Any, list[Any], list[Any]]] = {
        "cmp": (plan.cmp, [q, *short], []),
        "select": (plan.select, [q, short[0], lse], []),
        "sel": (plan.sel, [q, *full], [blocks]),
        "win": (plan.win, [q, *full], []),
        "combine": (plan.combine, [gates, *branches], []),
    }
    clock = functools.partial(clock_of, device=device)
    makers: dict[str, Callable[[], Any]] = {}
    for slot, (kernel, inputs, extra) in calls.items():
        makers[f"{slot} forward"] = functools.partial(clock, forward_of(kernel, inputs, extra))
        if slot != "select":
            makers[f"{slot} backward"] = functools.partial(
                clock, backward_of(kernel, inputs, extra, do)
            )
    return makers


def forward_of(kernel: Any, inputs: list[Any], extra: list[Any]) -> Callable[[], Callable[[], Any]]:
    """Return a function that creates the call of a slot's forward."""
    import torch

    @torch.no_grad()
    def call() -> Any:
        return kernel(*inputs, *extra)

    return lambda: call


def backward_of(
    kernel: Any, inputs: list[Any], extra: list[Any], do: Any
) -> Callable[[], Callable[[], Any]]:
    """Return a function that runs a slot's forward and creates the call of its backward."""
    import torch

    def make() -> Callable[[], Any]:
        leaves = [tensor.detach().requires_grad_() for tensor in inputs]
        out = kernel(*leaves, *extra)
        o = out[0] if isinstance(out, tuple) else out
        return lambda: torch.autograd.grad(o, leaves, do, retain_graph=True)

    return make


def step_clocks(case: Case, device: str, backend: str) -> dict[str, Callable[[], Any]]:
    """Return functions that create clocks of a layer's steps and, on a GPU, of their kernels."""
    import torch

    from nsa_core import NSAttention

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    config = config_of(case, dim=32 if case.small else 512)
    layer = NSAttention(config, backends=dict.fromkeys(SLOTS, backend))
    layer = layer.to(device, dtype).requires_grad_(False)
    cache = layer.new_cache(case.batch, case.length + ROOM, max_step=4)
    chunk = max(1, 65536 // case.batch)
    for first in range(0, case.length, chunk):
        count = min(chunk, case.length - first)
        layer(torch.randn(case.batch, count, config.dim, device=device, dtype=dtype), cache=cache)

    def step(rows: int) -> Callable[[], Any]:
        x = torch.randn(case.batch, rows, config.dim, device=device, dtype=dtype)
        return lambda: layer(x, cache=cache)

    makers: dict[str, Callable[[], Any]] = {}
    if device == "cuda":
        for name, (kernels, rows) in STEP_KERNELS.items():
            makers[name] = functools.partial(kernel_clock, step(rows), kernels)
    for name, rows in (("layer step", 1), ("layer step of 4 tokens", 4)):
        makers[name] = functools.partial(clock_of, lambda rows=rows: step(rows), device=device)
    return makers


def clock_of(make: Callable[[], Callable[[], Any]], device: str) -> Callable[[], float]:
    """Return a clock of a call; each reading is the median of a round, in ms."""
    if device == "cuda":
        return cuda_clock(make)
    call = make()

    def once() -> float:
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e3

    return lambda: statistics.median(once() for _ in range(5))


def cuda_clock(make: Callable[[], Callable[[], Any]]) -> Callable[[], float]:
    """Return a clock that replays a CUDA graph, or runs the call if it cannot be captured.

    The GPU spins for about half a millisecond before each call. The host launches the call in the
    meantime, so that the time of a short call does not include its launch.
    """
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    # A backward runs on its forward's stream, so the setup runs on the capture stream.
    with torch.cuda.stream(stream):
        call = make()
        call()
    torch.cuda.synchronize()
    run: Callable[[], Any] = call
    graph = torch.cuda.CUDAGraph()
    current = torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph, stream=stream):
            call()
        run = graph.replay
    except Exception as error:  # noqa: BLE001  after any failure the call itself is timed
        torch.cuda.set_stream(current)  # a failed capture leaves torch.cuda.graph's stream current
        torch.cuda.synchronize()
        print(f"not captured: {type(error).__name__}: {error}", file=sys.stderr)

    def once() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(SPIN_CYCLES)
        start.record()
        run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))

    def timed(call: Any = call) -> float:  # ``call`` keeps the tensors alive that the graph reads
        with torch.cuda.stream(stream):
            count = max(3, min(15, int(40 / max(once(), 1e-3))))
            return statistics.median(once() for _ in range(count))

    return timed


def kernel_clock(call: Callable[[], Any], names: Sequence[str]) -> Callable[[], float]:
    """Return a clock of the kernels in a step whose names begin with one of ``names``.

    Each reading is the profiled mean over ten steps, in ms.
    """
    import torch

    steps = 10

    def timed() -> float:
        call()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            for _ in range(steps):
                call()
            torch.cuda.synchronize()
        total = sum(
            event.device_time_total
            for event in profiler.key_averages()
            if event.key.startswith(tuple(names))
        )
        if not total:
            raise RuntimeError(f"a step runs no kernel with a name such as {' or '.join(names)}")
        return total / steps / 1e3

    return timed


if __name__ == "__main__":
    serve(*sys.argv[1:])
