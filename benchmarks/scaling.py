r"""Time one layer on one document, on one GPU of this machine and divided over several.

    torchrun --standalone --nproc-per-node 4 benchmarks/scaling.py --json scaling.json
    torchrun --standalone --nproc-per-node 2 benchmarks/scaling.py --device cpu \\
        --shape tiny --length 512 --dtype float32                        # over gloo

The layer is first judged in every mode, layout and dtype: packed documents that begin and end
anywhere, divided, against one process. A division that fails is not timed, and the exit code is 1.
All slots of this check run on sdpa, because it judges how the sequence is divided; compiling the
timed kernels for its few rows would take most of the time of a run. `nsa verify` judges these
kernels, also for queries that begin inside a sequence. Then forward and backward are timed at each
length on one GPU and in each division. A division over fewer GPUs than there are processes runs on
all of them, in groups side by side. The result file is written after each row.

If one GPU runs out of memory, its row says so. If a GPU of several does, the others wait for it in
a collective: the run ends, and the file keeps the rows of shorter sequences.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from nsa_bench.environment import machine
from nsa_bench.render.format import number
from nsa_bench.render.words import tokens
from nsa_bench.shapes import PAPER_BLOCKS, parse_lengths, parse_shape
from nsa_bench.timing import MAX_SAMPLES, MIN_SAMPLES, summarise
from nsa_core.config import NSAConfig
from nsa_core.contract import SLOTS
from nsa_core.errors import NSAError
from nsa_core.layer.module import NSAttention
from nsa_core.parallel import ContextParallel, Shards, pad_to
from nsa_core.parallel.layouts import LAYOUTS
from nsa_core.util.atomic_files import write_atomic
from nsa_models.lm.parallel import World, join
from nsa_verify.judge.tensor import LIMITS, Verdict, judge
from nsa_verify.problems.combination import parse_combination

MODES = ("sequence", "heads")
JUDGED = ("bfloat16", "float32")  # and the timed dtype
DIM = 256  # width of x; the projections of a narrow layer take little of the time
SEED = 0  # of parameters and inputs
REPEATS = 3  # of a collective alone
COLUMNS = ("tokens", "GPUs", "mode", "layout", "ms", "x", "fwd", "bwd", "comm.", "wait", "GiB")
LEGEND = (
    "ms: forward and backward, median of the slowest GPU; x: time of one GPU / this time; fwd, bwd:"
    " the forward and the backward alone, ms; comm.: the collectives repeated alone, ms; wait:"
    " share of the time inside collectives, where it is largest; GiB: peak memory of a GPU"
)
# The judged problem has these rows and query heads per kv head, which the division treats alike.
ROWS, MAX_GROUP = {"cuda": 2048, "cpu": 256}, 4
# First rows of its documents, of SCALE rows: short, empty, across ranks, around whole pieces.
BOUNDS, SCALE = (0, 5, 1500, 1500, 1503, 3500, 8100), 8192
Tensors = dict[str, torch.Tensor]
Row = dict[str, Any]
Backends = dict[str, str] | None


@dataclasses.dataclass(frozen=True)
class Division:
    """How a sequence is divided.

    Attributes:
        ranks: Number of GPUs; one has neither a mode nor a layout.
        mode: "sequence" or "heads".
        layout: "head_tail" or "contiguous".
    """

    ranks: int = 1
    mode: str = ""
    layout: str = ""

    @property
    def name(self) -> str:
        """Return the division in words."""
        return f"{self.ranks} GPUs, {self.mode}, {self.layout}" if self.mode else "1 GPU"


ONE = Division()


def layer_config(shape: str, blocks: Sequence[int] = PAPER_BLOCKS) -> NSAConfig:
    """Return the configuration of the timed layer; ``blocks`` are l, d, l', n, w."""
    return dataclasses.replace(parse_shape(shape).config(blocks), dim=DIM)


def make_layer(
    config: NSAConfig, backends: Backends, dtype: torch.dtype, division: Division, world: World
) -> NSAttention:
    """Return the layer on this rank's device, with the same parameters on every rank."""
    torch.manual_seed(SEED)
    layer = NSAttention(config, backends).to(dtype)
    if division != ONE:
        assert world.mesh is not None  # main() arranges several processes
        parallelize_module(layer, world.mesh["cp"], ContextParallel(division.mode, division.layout))
    return layer.to(world.device)


class Referee:
    """Judges divisions in one dtype, and keeps what one process computes for all of them.

    Several ranks and one process are both compared with one process in float64; the errors of
    several ranks may not exceed those of one by more than the limits of the verdict. All blocks are
    selected, because roundings may swap blocks of nearly equal scores.

    Args:
        config: The timed layer; the judged one has fewer heads, of the same widths.
        dtype: The dtype.
        world: The processes, arranged for the context parallelism of the divisions.
    """

    def __init__(self, config: NSAConfig, dtype: torch.dtype, world: World) -> None:
        self._dtype, self._world = dtype, world
        # No piece is a multiple of the stride, so pieces have different numbers of compressed rows.
        ranks = world.ranks_of("cp")
        pieces, rows = pad_to(1, ranks), ROWS[world.device.type]
        total = rows // pieces * pieces - pieces
        bounds = [first * total // SCALE for first in BOUNDS] + [total]
        self._longest = max(end - first for first, end in itertools.pairwise(bounds))
        self._documents = torch.tensor(bounds, dtype=torch.int32, device=world.device)
        kv = min(2, config.n_kv_heads) if config.n_kv_heads % ranks else ranks
        self._config = dataclasses.replace(
            config,
            n_heads=kv * min(MAX_GROUP, config.n_heads // config.n_kv_heads),
            n_kv_heads=kv,
            num_selected_blocks=max(
                config.num_selected_blocks, -(-self._longest // config.select_block_size)
            ),
        )
        generator = torch.Generator().manual_seed(SEED)
        x, up = (torch.randn(total, DIM, generator=generator) for _ in range(2))
        self._x, self._up = x.to(world.device, dtype), up.to(world.device, dtype)
        one = self._layer(ONE)
        self._one = self._gradients(one, self._x, self._up)
        self._truth = self._gradients(one.double(), self._x.double(), self._up.double())

    def _layer(self, division: Division) -> NSAttention:
        sdpa = dict.fromkeys(SLOTS, "sdpa")
        return make_layer(self._config, sdpa, self._dtype, division, self._world)

    def judge(self, division: Division) -> list[str]:
        """Return how a division differs from one process, on every rank; empty if it is right."""
        assert self._world.mesh is not None  # as in make_layer
        group, rank = self._world.mesh["cp"].get_group(), self._world.place_in("cp")
        shards = Shards(len(self._x), division.ranks, rank, division.layout)
        mine = self._gradients(self._layer(division), shards.take(self._x), shards.take(self._up))
        failures = []
        for name, own in mine.items():
            if name in ("y", "dx"):
                whole = shards.whole(own, group=group)
            else:  # the gradient of a weight may be a transposed view
                whole = own.double().contiguous()
                dist.all_reduce(whole, group=group)
            if why := self._difference(name, whole):
                failures.append(f"{name}: {why}")
        return failures

    def _gradients(self, layer: NSAttention, x: torch.Tensor, up: torch.Tensor) -> Tensors:
        """Return the output and the gradients of ``layer``, by name."""
        x = x.detach().requires_grad_()
        names, parameters = zip(*layer.named_parameters())
        y = layer(x, self._documents, self._longest)
        dx, *grads = torch.autograd.grad(y, (x, *parameters), up)
        return {"y": y.detach(), "dx": dx} | dict(zip(names, grads))

    def _verdict(self, name: str, actual: torch.Tensor) -> Verdict:
        tensors = (actual, self._one[name], self._truth[name])
        a, o, t = (x.double().reshape(1, -1, x.shape[-1]) for x in tensors)
        return judge(a, t, o, t.abs(), self._dtype, grad=name != "y")

    def _difference(self, name: str, actual: torch.Tensor) -> str:
        """Return why a tensor of several ranks is not that of one process; empty if it is."""
        verdict, limits = self._verdict(name, actual), LIMITS[self._dtype]
        # Terms that cancel in a parameter's gradient bias the result of one process too.
        bias = max(1.0, 1.25 * self._verdict(name, self._one[name]).bias)
        broken = []
        for key, most in (("row", limits.row), ("elem", limits.elem), ("bias", bias)):
            if not (value := getattr(verdict, key)) <= most:
                broken.append(f"{key} {value:.3g} > {most:.3g}")
        if not broken and not (verdict.ok or verdict.row or verdict.elem or verdict.bias):
            return verdict.why  # a wrong shape, or a value that is not finite
        return ", ".join(broken)


def now(device: torch.device) -> Any:
    """Return this moment of the device's work."""
    if device.type == "cpu":
        return time.perf_counter() * 1e3
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between(start: Any, end: Any) -> float:
    """Return the milliseconds between two moments; call it after a synchronisation."""
    return float(end - start if isinstance(start, float) else start.elapsed_time(end))


def slowest(world: World, *values: float) -> list[float]:
    """Return the largest of each value over the ranks, after all of them have called this."""
    tensor = torch.tensor(values, dtype=torch.float64, device=world.device)
    if world.size > 1:
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return [float(value) for value in tensor.tolist()]


def milliseconds(call: Callable[[], Any], world: World) -> float:
    """Return the time of ``call`` on this rank; all ranks begin together."""
    synchronize = torch.cuda.synchronize if world.device.type == "cuda" else lambda: None
    slowest(world, 0.0)
    synchronize()
    start = time.perf_counter()
    call()
    synchronize()
    return (time.perf_counter() - start) * 1e3


class Traced(TorchDispatchMode):
    """Record the collectives inside the block, and when this rank enters and leaves them.

    They are the operators of nsa_core.parallel; torch's own collectives run inside of these.

    Attributes:
        calls: Each collective with its arguments; tensors have no data.
        spans: The first and the last moment of each.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[Any, Any]] = []
        self.spans: list[tuple[Any, Any]] = []
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator; record it if it is a collective."""
        if func.namespace != "nsa_parallel":
            return func(*args, **(kwargs or {}))
        self.calls.append((func, tree_map_only(torch.Tensor, lambda t: t.to("meta"), args)))
        start = now(self._device)
        result = func(*args)
        self.spans.append((start, now(self._device)))
        return result


def measure(layer: NSAttention, rows: int, world: World, budget_s: float) -> Row:
    """Time forward and backward on random rows; every rank of ``world`` must call this.

    All ranks take the same number of samples: they follow the times of the slowest.

    Returns:
        Fields of a row in the result file, in ms and bytes: the performance, the forward and the
        backward of the slowest rank, the collectives of a call repeated alone and their sum, the
        time of this rank inside collectives, where it may wait for others, and its peak memory (0
        on the CPU).
    """
    device, cuda = world.device, world.device.type == "cuda"
    leaves: list[torch.Tensor] = list(layer.parameters())
    generator = torch.Generator(device).manual_seed(SEED + world.rank)
    size = (1, rows, DIM)
    x, up = (torch.randn(size, generator=generator, device=device).to(leaves[0]) for _ in range(2))
    leaves.append(x.requires_grad_())
    moments: list[Any] = []

    def train() -> None:
        begin = now(device)
        y = layer(x)
        middle = now(device)
        torch.autograd.grad(y, leaves, up)
        moments[:] = [begin, middle, now(device)]

    def sample() -> list[float]:
        total = milliseconds(train, world)
        return slowest(world, total, *(between(*pair) for pair in itertools.pairwise(moments)))

    sample()  # compiles kernels
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    samples = [sample()]
    rounds = min(MAX_SAMPLES, max(MIN_SAMPLES, int(budget_s * 1e3 / samples[0][0])))
    samples += [sample() for _ in range(rounds - 1)]
    totals, forward, backward = (list(column) for column in zip(*samples))
    peak = torch.cuda.max_memory_allocated() if cuda else 0
    with Traced(device) as traced:
        total = milliseconds(train, world)
    # The host takes longer for a traced call, so only the share of its time counts.
    waiting = sum(between(*span) for span in traced.spans) / total * statistics.median(totals)
    alone = [
        {"op": func._opname, "ms": round(time_alone(func, args, world), 4)}
        for func, args in traced.calls
    ]
    return {
        "performance": dataclasses.asdict(summarise(totals, "barrier")),
        "forward_ms": round(statistics.median(forward), 4),
        "backward_ms": round(statistics.median(backward), 4),
        "communication_ms": round(sum(each["ms"] for each in alone), 4),
        "collectives": alone,
        "waiting_ms": round(waiting, 4),
        "peak_bytes": peak,
    }


def time_alone(func: Any, arguments: Any, world: World) -> float:
    """Return the shortest time of a collective on zeros, without the computation around it."""
    device = world.device
    zeros = tree_map_only(torch.Tensor, lambda t: torch.zeros_like(t, device=device), arguments)
    times = (milliseconds(lambda: func(*zeros), world) for _ in range(REPEATS))
    return min(slowest(world, time)[0] for time in times)


class Run:
    """One run: judge the divisions, then time every length; the first rank writes and prints.

    Args:
        options: The options of the command.
        config: The layer to measure.
        lengths: Tokens of the sequences, ascending.
        world: The processes.
    """

    def __init__(
        self, options: argparse.Namespace, config: NSAConfig, lengths: list[int], world: World
    ) -> None:
        self._options, self._config, self._lengths, self._world = options, config, lengths, world
        self._worlds = {ranks: world.arranged(ranks, 1) for ranks in options.gpus}
        self._environment = machine(str(world.device)) | {"torch": torch.__version__}
        self._gates: list[Row] = []
        self._rows: list[Row] = []
        self._alone_ms: dict[int, float] = {}  # length -> time of one GPU
        self._refused: dict[Division, str] = {}  # division -> why it is not timed

    def run(self) -> int:
        """Measure everything, print the table, and return this rank's exit code."""
        options, kv_heads = self._options, self._config.n_kv_heads
        several = itertools.product(options.gpus, options.modes, options.layouts)
        divisions = [Division(*each) for each in several]
        for division in divisions:
            if division.mode == "heads" and kv_heads % division.ranks:
                reason = f"{division.ranks} GPUs do not divide {kv_heads} key/value heads"
                self._refused[division] = reason
        self._judge([d for d in divisions if d not in self._refused])
        for length in self._lengths:
            for division in (ONE, *divisions):
                if length in options.on_most and division.ranks != max(options.gpus):
                    continue
                self._rows.append(self._row(division, length))
                self._write()
                gc.collect()
                if self._world.device.type == "cuda":
                    torch.cuda.empty_cache()
        self._write(complete=True)
        if self._world.rank > 0:
            return 0  # torchrun ends all processes as soon as one has another exit code
        return self._print()

    def _judge(self, divisions: list[Division]) -> None:
        """Judge divisions in every dtype; one that fails is not timed."""
        dtypes = dict.fromkeys((*JUDGED, self._options.dtype))
        for dtype, (ranks, world) in itertools.product(dtypes, self._worlds.items()):
            referee = Referee(self._config, getattr(torch, dtype), world)
            for division in (d for d in divisions if d.ranks == ranks):
                failures = referee.judge(division)
                gate = {"division": division.name, "dtype": dtype, "ok": not failures}
                self._gates.append(gate | {"failures": failures})
                if failures:
                    self._refused[division] = "not correct: its check failed"

    def _row(self, division: Division, length: int) -> Row:
        """Return the row of a division, the same on every rank."""
        options, world = self._options, self._world
        row = {"shape": options.shape, "dtype": options.dtype, "length": length}
        row |= dataclasses.asdict(division) | {"performance": None, "speed_up": None}
        row["reason"] = self._refused.get(division, "")
        if length != pad_to(length, division.ranks, division.layout or "contiguous"):
            row["reason"] = f"{length} tokens do not divide over {division.ranks} GPUs"
        if row["reason"]:
            return row
        own = self._measured(division, length) if division != ONE or world.rank == 0 else {}
        every = [fields for fields in world.collect(own) if fields]
        row |= every[0]
        if row["reason"]:
            return row
        for name in ("waiting_ms", "peak_bytes"):  # lists with an entry for each process
            row[name] = [fields[name] for fields in every]
        median = row["performance"]["median_ms"]
        if division == ONE:
            self._alone_ms[length] = median
        elif length in self._alone_ms:
            row["speed_up"] = self._alone_ms[length] / median
        return row

    def _measured(self, division: Division, length: int) -> Row:
        """Return the fields of the row that this rank measures.

        Raises:
            SystemExit: A GPU of several ran out of memory, and the others wait for it.
        """
        options, dtype = self._options, getattr(torch, self._options.dtype)
        world = World(self._world.device) if division == ONE else self._worlds[division.ranks]
        try:
            layer = make_layer(self._config, options.combo, dtype, division, world)
            return measure(layer, length // division.ranks, world, options.budget)
        except torch.OutOfMemoryError as error:
            if division == ONE:
                return {"reason": "out of memory"}
            where = f"{division.name}, {tokens(length)} tokens, rank {world.rank}"
            raise SystemExit(f"{where}: out of memory; give a shorter --length ({error})") from None

    def _write(self, complete: bool = False) -> None:
        if self._options.json is None or self._world.rank > 0:
            return
        document = {
            "kind": "nsa-scaling",
            "schema_version": 1,
            "complete": complete,
            "settings": {name: x for name, x in vars(self._options).items() if name != "json"},
            "environment": self._environment,
            "gates": self._gates,
            "rows": self._rows,
        }
        text = json.dumps(document, indent=1, default=str) + "\n"
        write_atomic(self._options.json, text, force=True)

    def _print(self) -> int:
        """Print the table, the checks, and why rows have no time; return the exit code."""
        title = f"{self._options.shape} {self._options.dtype}, {self._environment['device']}"
        table = Table(title=title, title_justify="left", box=None, pad_edge=False)
        for name in COLUMNS:
            table.add_column(name, justify="left" if name in ("mode", "layout") else "right")
        for row in self._rows:
            table.add_row(*cells(row))
        console = Console(highlight=False, markup=False)
        console.print(table, LEGEND, sep="\n")
        failed = [gate for gate in self._gates if not gate["ok"]]
        passed = len(self._gates) - len(failed)
        console.print(f"{passed} of {len(self._gates)} checks against one GPU passed")
        for gate in failed:
            console.print(f"{gate['division']}, {gate['dtype']}: {'; '.join(gate['failures'])}")
        for row in self._rows:
            if row["reason"]:
                name = Division(row["ranks"], row["mode"], row["layout"]).name
                console.print(f"{name}, {tokens(row['length'])} tokens: {row['reason']}")
        timed = any(row["performance"] for row in self._rows if row["ranks"] > 1)
        if not timed:
            console.print("NO DIVISION WAS TIMED")
        return int(bool(failed) or not timed)


def cells(row: Row) -> list[str]:
    """Return the cells of a row in the printed table."""
    where = [tokens(row["length"]), str(row["ranks"]), row["mode"] or "-", row["layout"] or "-"]
    if row["performance"] is None:
        return [*where, *["-"] * (len(COLUMNS) - len(where))]
    median, alone = row["performance"]["median_ms"], row["ranks"] == 1
    times = (median, row["speed_up"], row["forward_ms"], row["backward_ms"])
    communication = "-" if alone else number(row["communication_ms"])
    waiting = "-" if alone else f"{max(row['waiting_ms']) / median:.0%}"
    peak = max(row["peak_bytes"])
    return [*where, *map(number, times), communication, waiting, number(peak / 2**30)]


def halved(processes: int) -> list[int]:
    """Return the number of processes, its half and so on, as long as each is even."""
    return [processes, *(halved(processes // 2) if processes % 4 == 0 else [])]


def main() -> None:
    """Run on every rank."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--shape", default="64/4/128", help="Hq/G/Dk[/Dv]")
    add("--length", default="64k,128k,256k", help="tokens: a list, or a range such as 2k..64k")
    add("--on-most", default="", help="tokens that are timed on the largest number of GPUs alone")
    add("--gpus", nargs="+", type=int, help="numbers of GPUs; default: all, half of them, ...")
    add("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    add("--modes", nargs="+", choices=MODES, default=MODES)
    add("--layouts", nargs="+", choices=LAYOUTS, default=("head_tail", "contiguous"))
    add("--blocks", nargs=5, type=int, default=PAPER_BLOCKS, help="sizes l d l' n w")
    add("--combo", help="backends, such as sdpa or win=sdpa,cmp=fa2; default: auto")
    add("--budget", type=float, default=0.5, help="seconds of samples for each row")
    add("--json", type=Path, help="result file; an existing one is replaced")
    options = parser.parse_args()
    if not dist.is_torchelastic_launched():
        parser.error("start it with torchrun --standalone --nproc-per-node N benchmarks/scaling.py")
    torch.set_num_threads(1)
    try:
        if options.combo is not None:
            options.combo = dict(parse_combination(options.combo).backends)
        config = layer_config(options.shape, options.blocks)
        options.on_most = parse_lengths(options.on_most) if options.on_most else []
        lengths = sorted({*parse_lengths(options.length), *options.on_most})
        world = join(options.device)
    except NSAError as error:
        parser.error(str(error))
    if world.size < 2:
        parser.error("needs two GPUs or more: give torchrun --nproc-per-node 2")
    options.gpus = options.gpus or halved(world.size)
    if wrong := [ranks for ranks in options.gpus if ranks < 2 or world.size % ranks]:
        parser.error(f"--gpus must be 2 or more and divide the {world.size} processes, got {wrong}")
    code = Run(options, config, lengths, world).run()
    world.close()
    raise SystemExit(code)


if __name__ == "__main__":
    main()
