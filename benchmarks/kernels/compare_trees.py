"""Time every kernel of two source trees in one run on one GPU, and judge which became slower.

    python benchmarks/kernels/compare_trees.py --old site_old --new site_new

``--old`` and ``--new`` are folders of installed packages, each the PYTHONPATH of a child process:

    pip install --no-deps --target site_new ./packages/*

Both children prepare the same case, then time its kernels in turn: old, new, new, old, and so on.
The children use only names that every version of nsa_core has.

Rows are the slots' forward and backward at the core's shapes, and decode steps: the layer's step of
one token and of four, and inside it the kernels of append, gates and the fused step. A time is the
median over the rounds. A round is the median of several replays of a CUDA graph, or of the call
where it cannot be captured; kernels inside a step are means over ten profiled steps. The spread is
the interquartile range of the rounds over their median, the larger one of the two trees. A row is
slower when new / old exceeds 1.03 and the excess is more than twice the spread.

Exit codes: 0 nothing is slower; 1 a row is slower, could be timed in the old tree only, or was left
out by ``--minutes``, or a child ended; 2 wrong usage.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

SLOTS = ("cmp", "select", "sel", "win", "combine")
THRESHOLD = 1.03  # new / old above which a row may be slower
ROOM = 4096  # tokens that the timed steps of a case may append
STEP_KERNELS = {  # row -> how the names of its kernels begin, rows of a step
    "append": (("decode_append",), 1),
    "gates": (("decode_gates",), 1),
    "fused step": (("decode_step",), 1),
    "attention of 4 tokens": (("decode_step", "decode_span", "decode_choose", "decode_sel"), 4),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A problem: the core over ``length`` tokens, or steps over caches of ``length`` tokens.

    Attributes:
        shape: Query heads / kv heads / head dim, or / Dk / Dv.
        length: Tokens.
        batch: Sequences of a decode step; 0 for the core.
        small: Blocks of a test's size instead of the paper's.
    """

    shape: str
    length: int
    batch: int = 0
    small: bool = False

    def __str__(self) -> str:
        count = f"{self.length // 1024}k" if self.length % 1024 == 0 else str(self.length)
        return f"{self.shape} {f'{self.batch} x ' if self.batch else ''}{count}"


CASES = (
    Case("64/4/128", 8192),
    Case("64/4/128", 32768),
    Case("32/8/128", 32768),
    Case("12/2/64", 32768),
    Case("12/2/64", 65536),
    Case("64/4/192/128", 32768),
    Case("64/4/128", 32768, 16),
    Case("12/2/64", 8192, 8),
    Case("8/2/32", 2048, 1),
)
TINY = (Case("4/2/8", 96, small=True), Case("4/2/8", 48, 2, small=True))


@dataclasses.dataclass(frozen=True)
class Row:
    """One kernel in both trees.

    Attributes:
        name: Case and kernel.
        old_ms: Median of the rounds of the old tree; None where ``reason`` says why.
        new_ms: The same for the new tree.
        spread: The larger interquartile range over the median.
        verdict: "slower", "faster", "same", "missing" (cannot be timed in the new tree only) or
            "not timed".
        reason: Why a time is absent.
    """

    name: str
    old_ms: float | None
    new_ms: float | None
    spread: float
    verdict: str
    reason: str = ""

    @property
    def ratio(self) -> float | None:
        """New over old: above 1 the new tree is slower."""
        return self.new_ms / self.old_ms if self.old_ms and self.new_ms else None


def judged(name: str, old: Sequence[float], new: Sequence[float]) -> Row:
    """The row of a kernel with the times of its rounds."""
    middle = statistics.median(old), statistics.median(new)
    noise = max(spread(old), spread(new))
    ratio, verdict = middle[1] / middle[0], "same"
    if max(ratio, 1 / ratio) > THRESHOLD and max(ratio, 1 / ratio) - 1 > 2 * noise:
        verdict = "slower" if ratio > 1 else "faster"
    return Row(name, *middle, noise, verdict)


def spread(times: Sequence[float]) -> float:
    """Interquartile range over the median."""
    if len(times) < 2:
        return 0.0
    first, _, third = statistics.quantiles(times, n=4, method="inclusive")
    return (third - first) / statistics.median(times)


def lines(rows: Sequence[Row]) -> list[str]:
    """The table."""
    cells = [("kernel", "old ms", "new ms", "new/old", "spread", "verdict")]
    for row in rows:
        took = [f"{ms:.4f}" if ms is not None else "-" for ms in (row.old_ms, row.new_ms)]
        ratio = f"{row.ratio:.3f}" if row.ratio else "-"
        verdict = f"{row.verdict}: {row.reason}" if row.reason else row.verdict
        cells.append((row.name, *took, ratio, f"{row.spread:.1%}", verdict))
    widths = [max(len(row[i]) for row in cells) for i in range(5)]
    made = []
    for row in cells:
        numbers = (cell.rjust(width) for cell, width in zip(row[1:5], widths[1:]))
        made.append("  ".join([row[0].ljust(widths[0]), *numbers, row[5]]))
    return made


class Tree(Protocol):
    """A source tree that can be timed."""

    def begin(self, case: Case) -> None:
        """Start to prepare a case."""

    def names(self) -> dict[str, str]:
        """Wait until the case is prepared; each kernel, with the reason why it cannot run or ""."""

    def ms(self, name: str) -> float:
        """Time a kernel of the case once; milliseconds."""


def compare(
    old: Tree, new: Tree, cases: Sequence[Case], rounds: int, until: float
) -> Iterator[Row | Case]:
    """A row per kernel; a case that was left out because ``until`` had passed comes as it is."""
    for case in cases:
        if time.monotonic() > until:
            yield case
            continue
        for tree in (old, new):
            tree.begin(case)
        reasons = old.names(), new.names()
        for name in dict.fromkeys((*reasons[0], *reasons[1])):
            title = f"{case} {name}"
            absent = [found.get(name, "the tree has no such kernel") for found in reasons]
            if any(absent):
                side = "old" if absent[0] else "new"
                verdict = "not timed" if absent[0] else "missing"
                yield Row(title, None, None, 0.0, verdict, f"{side}: {absent[0] or absent[1]}")
                continue
            times: tuple[list[float], list[float]] = ([], [])
            for turn in range(rounds):
                for side in ((0, 1), (1, 0))[turn % 2]:
                    times[side].append((old, new)[side].ms(name))
            yield judged(title, *times)


class ChildError(RuntimeError):
    """A child ended, or its tree cannot be used."""


class Child:
    """A source tree in a process of its own."""

    def __init__(self, label: str, folder: Path, device: str, backend: str) -> None:
        self.label, self.folder = label, folder
        words = [sys.executable, str(Path(__file__).resolve()), "--child", device, backend]
        self.process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(folder)},
        )

    def hello(self) -> str:
        """Where the child imports nsa_core from.

        Raises:
            ChildError: the folder does not hold nsa_core.
        """
        place = str(self._read())
        if not Path(place).is_relative_to(self.folder):
            raise ChildError(f"--{self.label} {self.folder} holds no nsa_core")
        return place

    def begin(self, case: Case) -> None:
        """Start to prepare a case."""
        self._write({"case": dataclasses.asdict(case)})

    def names(self) -> dict[str, str]:
        """Wait until the case is prepared."""
        return dict(self._read())

    def ms(self, name: str) -> float:
        """Time a kernel of the case."""
        self._write({"name": name})
        return float(self._read())

    def end(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.communicate()

    def _write(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the next read says that the child has ended
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()

    def _read(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise ChildError(f"the child of --{self.label} ended with code {self.process.wait()}")
        message = json.loads(line)
        if "error" in message:
            raise ChildError(f"--{self.label}: {message['error']}")
        return message["answer"]


# In a child: everything below runs with one of the trees on PYTHONPATH.


def serve(device: str, backend: str) -> None:
    """Answer the parent's messages until it closes the pipe."""
    answers, sys.stdout = sys.stdout, sys.stderr  # what kernels print is no answer

    def answer(**message: Any) -> None:
        print(json.dumps(message), file=answers, flush=True)

    try:
        import nsa_core
    except ImportError as error:
        return answer(error=f"nsa_core cannot be imported: {error}")
    answer(answer=str(nsa_core.__file__))
    works: dict[str, Callable[[], float]] = {}
    for text in sys.stdin:
        message = json.loads(text)
        try:
            if "case" in message:
                works.clear()
                gc.collect()
                works, reasons = prepared(Case(**message["case"]), device, backend)
                answer(answer=reasons)
            else:
                answer(answer=works[message["name"]]())
        except Exception as error:  # noqa: BLE001  the parent says it
            answer(error=f"{type(error).__name__}: {str(error)[:300]}")
    return None


def prepared(
    case: Case, device: str, backend: str
) -> tuple[dict[str, Callable[[], float]], dict[str, str]]:
    """A clock for each kernel of ``case``, and each kernel's reason why it has none, or ""."""
    import torch

    if device == "cuda":
        torch.cuda.empty_cache()
    torch.manual_seed(0)
    works: dict[str, Callable[[], float]] = {}
    reasons: dict[str, str] = {}
    clocks = (
        step_clocks(case, device, backend) if case.batch else core_clocks(case, device, backend)
    )
    for name, make in clocks.items():
        try:
            works[name], reasons[name] = make(), ""
            works[name]()  # compiles, and fills caches
        except Exception as error:  # noqa: BLE001  the other kernels can still be timed
            reasons[name] = f"{type(error).__name__}: {str(error)[:200]}"
    return works, reasons


def config_of(case: Case, dim: int | None = None) -> Any:
    """The configuration of a case."""
    from nsa_core import NSAConfig

    heads, groups, dk, *dv = map(int, case.shape.split("/"))
    sizes = {"dim": dim or heads * dk, "n_heads": heads, "n_kv_heads": groups, "head_dim": dk}
    names = ("compress_block_size", "compress_stride", "select_block_size")
    names += ("num_selected_blocks", "window_size")
    small = dict(zip(names, (8, 4, 16, 3, 24))) if case.small else {}
    return NSAConfig(**sizes, v_head_dim=dv[0] if dv else None, **small)


def core_clocks(case: Case, device: str, backend: str) -> dict[str, Callable[[], Any]]:
    """For each slot and pass a function that makes its clock."""
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
    made: dict[str, Callable[[], Any]] = {}
    for slot, (kernel, inputs, rest) in calls.items():
        made[f"{slot} forward"] = functools.partial(clock, forward_of(kernel, inputs, rest))
        if slot != "select":
            made[f"{slot} backward"] = functools.partial(
                clock, backward_of(kernel, inputs, rest, do)
            )
    return made


def forward_of(kernel: Any, inputs: list[Any], rest: list[Any]) -> Callable[[], Callable[[], Any]]:
    """Makes the call of a slot's forward."""
    import torch

    @torch.no_grad()
    def call() -> Any:
        return kernel(*inputs, *rest)

    return lambda: call


def backward_of(
    kernel: Any, inputs: list[Any], rest: list[Any], do: Any
) -> Callable[[], Callable[[], Any]]:
    """Runs a slot's forward, and makes the call of its backward."""
    import torch

    def make() -> Callable[[], Any]:
        leaves = [tensor.detach().requires_grad_() for tensor in inputs]
        out = kernel(*leaves, *rest)
        o = out[0] if isinstance(out, tuple) else out
        return lambda: torch.autograd.grad(o, leaves, do, retain_graph=True)

    return make


def step_clocks(case: Case, device: str, backend: str) -> dict[str, Callable[[], Any]]:
    """The same for the steps of a layer, and on a GPU for the kernels inside them."""
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

    made: dict[str, Callable[[], Any]] = {}
    if device == "cuda":
        for name, (kernels, rows) in STEP_KERNELS.items():
            made[name] = functools.partial(kernel_clock, step(rows), kernels)
    for name, rows in (("layer step", 1), ("layer step of 4 tokens", 4)):
        made[name] = functools.partial(clock_of, lambda rows=rows: step(rows), device=device)
    return made


def clock_of(make: Callable[[], Callable[[], Any]], device: str) -> Callable[[], float]:
    """Milliseconds of a call: the median of a round."""
    if device == "cuda":
        return cuda_clock(make)
    call = make()

    def once() -> float:
        began = time.perf_counter()
        call()
        return (time.perf_counter() - began) * 1e3

    return lambda: statistics.median(once() for _ in range(5))


def cuda_clock(make: Callable[[], Callable[[], Any]]) -> Callable[[], float]:
    """By replays of a CUDA graph, or by the call itself where it cannot be captured."""
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(
        stream
    ):  # a backward runs on its forward's stream: the one that captures
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
    except Exception as error:  # noqa: BLE001  whatever it is, the call itself is timed
        torch.cuda.set_stream(current)  # torch.cuda.graph leaves its own where a capture fails
        torch.cuda.synchronize()
        print(f"not captured: {type(error).__name__}: {error}", file=sys.stderr)

    def once() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))

    def timed(call: Any = call) -> float:  # ``call`` keeps the tensors that the graph reads
        with torch.cuda.stream(stream):
            count = max(3, min(15, int(40 / max(once(), 1e-3))))
            return statistics.median(once() for _ in range(count))

    return timed


def kernel_clock(call: Callable[[], Any], names: Sequence[str]) -> Callable[[], float]:
    """By the profiler: mean time of a step's kernels whose names begin with one of ``names``."""
    import torch

    steps = 10

    def timed() -> float:
        call()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
            for _ in range(steps):
                call()
            torch.cuda.synchronize()
        total = sum(
            event.device_time_total
            for event in seen.key_averages()
            if event.key.startswith(tuple(names))
        )
        if not total:
            raise RuntimeError(f"a step runs no kernel named {' or '.join(names)}")
        return total / steps / 1e3

    return timed


# In the parent.


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--old", type=Path, required=True, help="folder of installed packages")
    made.add_argument("--new", type=Path, required=True, help="folder of installed packages")
    made.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    made.add_argument("--backend", default="triton")
    made.add_argument(
        "--shapes", default="all", help="all, tiny, or comma-separated heads such as 12/2/64"
    )
    made.add_argument("--rounds", type=int, default=7, help="times each kernel is timed in a tree")
    made.add_argument("--minutes", type=float, default=6.0, help="after which no case begins")
    made.add_argument("--json", type=Path, help="also write the rows to this file")
    return made


def cases_of(text: str) -> list[Case]:
    """The cases that ``--shapes`` names.

    Raises:
        ValueError: a shape has no case.
    """
    if text in ("all", "tiny"):
        return [*(CASES if text == "all" else TINY)]
    known = list(dict.fromkeys(case.shape for case in CASES))
    unknown = [shape for shape in text.split(",") if shape not in known]
    if unknown:
        raise ValueError(f"--shapes: expected all, tiny or {', '.join(known)}; got {unknown[0]!r}")
    return [case for case in CASES if case.shape in text.split(",")]


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare two trees; the exit code."""
    options = parser()
    given = options.parse_args(arguments)
    try:
        cases = cases_of(given.shapes)
    except ValueError as error:
        options.error(str(error))
    if not 1 <= given.rounds <= 20:  # a step appends tokens, and there is ROOM for so many
        options.error(f"--rounds: expected 1 to 20, got {given.rounds}")
    until = time.monotonic() + 60 * given.minutes
    folders = {"old": given.old.absolute(), "new": given.new.absolute()}
    for label, folder in folders.items():
        if not folder.is_dir():
            options.error(f"--{label}: {folder} is no folder")
    children = [Child(n, folder, given.device, given.backend) for n, folder in folders.items()]
    rows: list[Row] = []
    left_out: list[Case] = []
    try:
        for child in children:
            print(f"{child.label}: {child.hello()}", file=sys.stderr)
        for item in compare(*children, cases, given.rounds, until):
            if isinstance(item, Case):
                left_out.append(item)
                continue
            rows.append(item)
            print(f"{item.name}: {item.verdict}", file=sys.stderr, flush=True)
    except ChildError as error:
        print(f"compare_trees.py: {error}", file=sys.stderr)
        return 1
    finally:
        for child in children:
            child.end()
    return report(rows, left_out, given.json)


def report(rows: Sequence[Row], left_out: Sequence[Case], file: Path | None) -> int:
    """Print the table and what follows from it; the exit code."""
    print("\n".join(lines(rows)))
    if file is not None:
        document = [dataclasses.asdict(row) for row in rows]
        file.write_text(json.dumps({"kind": "compare-trees", "rows": document}, indent=1) + "\n")
    wrong = [row.name for row in rows if row.verdict in ("slower", "missing")]
    if left_out:
        print(f"left out by --minutes: {', '.join(map(str, left_out))}")
    print(f"slower or missing: {', '.join(wrong)}" if wrong else "nothing is slower")
    return int(bool(wrong or left_out))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        serve(*sys.argv[2:])
    else:
        sys.exit(main())
