"""Variants of the kernels that no tuned table asks for yet, beside what ships: judged on small cases, then timed.

    python benchmarks/triton_variants.py [--only "sel backward" "cmp dkdv"] [--shape 64/4/128] [--budget 420]

A piece is a kernel, a variant a change of its settings. A piece is judged, a few variants to a process, against
nsa_core.verify's float64 truth, all of a shape at the same time, which also compiles; then each is timed in turn
(median of do_bench, bf16, batch 1), sel on ``random`` blocks and on ``near`` ones (a token keeps its neighbour's
each with probability 0.8). A variant that fails is a row with its error; one that says nothing for a while is killed,
and the next goes on. Shapes and pieces come by importance: what --budget (seconds) cuts off is the least of them.
With TRITON_INTERPRET=1 and --tiny everything runs on the CPU: that tests this script, not the kernels' speed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor
from variants import SHAPES, TINY, VARIANTS, Settings, milliseconds

from nsa_backend_triton import configs, launch, sel_backward, sel_forward, sel_lists, select, span_backward
from nsa_backend_triton import span_forward as span
from nsa_backend_triton.launch import Sequences
from nsa_core.contract import SlotCall
from nsa_core.layout import BlockGeometry
from nsa_core.verify import dense
from nsa_core.verify.interpreter import strict
from nsa_core.verify.judge import heads_first, judge
from nsa_core.verify.regret import judge_selection

GEOMETRY = BlockGeometry()
SILENCE = {"check": 90.0, "time": 40.0}  # seconds without a word after which a process is killed
TOGETHER = 3 if not launch.interpreted() else 20  # variants judged in one process


def device() -> torch.device:
    """Where it runs."""
    return torch.device("cpu" if launch.interpreted() else "cuda")


def past_blocks(kind: str, length: int, groups: int) -> Tensor:
    """int32 [1, S, G, n]: block 0, the last two, and others before them."""
    size, free = GEOMETRY.select_block_size, GEOMETRY.num_selected_blocks - 3
    current = torch.arange(length, device=device())[:, None, None] // size
    drawn = torch.rand(length, groups, free, device=device())
    if kind == "near":
        epoch = (torch.rand(length, groups, free, device=device()) > 0.8).long().cumsum(0)
        drawn = drawn.gather(0, epoch.clamp(max=length - 1))
    # Distinct inside a token: the i-th draw from the i-th of `free` strides.
    others = 1 + torch.arange(free, device=device()) + free * (drawn * ((current - 3) / free).clamp(min=0)).long()
    others = torch.where(others < current - 1, others, -1)
    forced = torch.cat([torch.zeros_like(current), current - 1, current], -1).expand(length, groups, 3)
    return torch.cat([forced, others], -1).int()[None]


class Case:
    """Inputs of one piece at one length, and how a variant runs on them."""

    def __init__(self, piece: str, shape: str, length: int, kind: str) -> None:
        heads, groups, width, _ = (SHAPES | TINY)[shape]
        self.piece, self.slot, self.what = piece, piece.split()[0], piece.split()[-1]
        self.scale, self.dtype = width**-0.5, torch.bfloat16
        torch.manual_seed(0)
        keys = GEOMETRY.num_compressed(length) if self.slot in ("cmp", "select") else length
        sizes = ((heads, length), (groups, keys), (groups, keys), (heads, length))
        self.q, self.k, self.v, self.do = (
            torch.randn((1, n, h, width), device=device()).to(self.dtype) for h, n in sizes
        )
        self.call = SlotCall(GEOMETRY, self.scale, None, length)
        self.seqs = Sequences.of(self.q, self.call)
        self.blocks = past_blocks(kind, length, groups) if self.slot == "sel" else None
        self.span = (1, 1, GEOMETRY.window_size) if self.slot == "win" else (32, 16, 0)
        traits = {"head_dim": width, "v_head_dim": width, "itemsize": self.q.itemsize, "heads": heads // groups}
        self.traits = traits | {"block": 64, "selected": 16, "window": self.span[2], "pointers": 0}
        if self.slot in ("cmp", "win", "select"):
            span_of = (32, 16, 0) if self.slot == "select" else self.span
            self.o, self.lse = span.forward(self.q, self.k, self.v, self.seqs, span_of, self.scale)
        elif self.what != "forward":
            self.o, self.lse = sel_forward.forward(self.q, self.k, self.v, self.blocks, call=self.call)
        if self.what in ("blocks", "tiles"):
            self.problem = sel_backward.prepare(self.do, self.q, self.k, self.v, self.o, self.lse, call=self.call)
            self.lists = sel_lists.build(self.blocks, self.seqs, GEOMETRY)
        if self.what == "dkdv":
            self.stats = self._dq(None)[1]

    def shipped(self, kernel: str) -> Settings:
        """The row of the table of this GPU."""
        traits = self.traits | ({"heads": self.q.shape[2]} if kernel.startswith("span") else {})
        return dict(configs.pick(kernel, launch.architecture(self.q.device), **traits))

    def _dq(self, settings: Settings | None) -> tuple[Tensor, Tensor]:
        given = (self.do, self.q, self.k, self.v, self.o, self.lse)
        return span_backward.dq_of(*given, self.seqs, self.span, self.scale, settings)

    def run(self, change: Settings) -> dict[str, Tensor]:
        """Results by the names of nsa_core.verify.dense."""
        tail = "_cmp" if self.slot == "cmp" else ""
        if self.piece == "sel forward":
            return {"o": sel_forward.forward(self.q, self.k, self.v, self.blocks, call=self.call,
                                             tuned=self.tuned(change))[0]}  # fmt: skip
        if self.slot == "select":
            settings = self.shipped("select_forward") | change
            return {"blocks": select.forward(self.q, self.k, self.lse, call=self.call, settings=settings)}
        if self.what == "blocks":
            settings = self.shipped("sel_block_backward") | change
            ordered = bool(settings.pop("ordered"))
            grads = sel_backward.block_gradients(
                self.problem, self.lists, settings, ordered=ordered, add_dq=not ordered
            )
            return {name: x for name, x in zip(("dq", "dk", "dv"), grads) if x is not None}
        if self.what == "tiles":
            settings = self.shipped("sel_tile_backward") | change
            return {"dq": sel_backward.tile_gradients(self.problem, self.blocks, settings)}
        if self.what == "forward":
            return {"o": span.forward(self.q, self.k, self.v, self.seqs, self.span, self.scale, change or None)[0]}
        if self.what == "dq":
            return {"dq": self._dq(change or None)[0]}
        given = (self.do, self.q, self.k, self.v, self.lse, self.stats, self.seqs, self.span, self.scale)
        return dict(zip((f"dk{tail}", f"dv{tail}"), span_backward.dkdv_of(*given, change or None)))

    def tuned(self, change: Settings) -> sel_forward.Settings:
        """The three rows of sel's forward; "bucket x" and "merge x" change theirs."""
        made = {name: self.shipped(name) for name in ("sel_forward", "sel_bucket", "sel_merge")}
        for name, value in change.items():
            *of, key = name.split()
            made["sel_" + (of[0] if of else "forward")][key] = value
        for settings in made.values():
            if not settings.get("maxnreg", 1):
                del settings["maxnreg"]
        if "LEAST" in change or "bucket LEAN" in change:
            made["sel_forward"]["SHORT"] = 0
        return made

    def truths(self) -> tuple[dict[str, Tensor], ...]:
        """golden, rounded and magnitude, results by name."""
        if self.slot == "select":
            return ()
        function: Callable[..., dense.Dense] = getattr(dense, self.slot)
        given = (self.q, self.k, self.v, *((self.blocks,) if self.slot == "sel" else ()), GEOMETRY, self.scale)
        do = None if self.what == "forward" else self.do
        made = (function(*given, do=do, arithmetic=a, dtype=self.dtype) for a in ("exact", "rounded", "magnitude"))
        return tuple({"o": one.o, **one.grads} for one in made)

    def verdict(self, change: Settings, truths: tuple[dict[str, Tensor], ...]) -> str:
        """ "right", or what is wrong, with the numbers of the judge."""
        found = self.run(change)
        if self.slot == "select":
            length = self.q.shape[1]
            sampled = sorted({*torch.randperm(length)[:24].tolist(), 0, 31, length - 1})
            said = judge_selection(self.q, self.k, self.lse, found["blocks"], GEOMETRY, self.scale, rows=sampled)
            return f"right, regret {said.regret:.1f}" if said.ok else f"WRONG: {said.why}"
        words = []
        for name, x in found.items():
            three = (heads_first(truth[name]) for truth in truths)
            said = judge(heads_first(x.cpu()), *three, self.dtype, grad=name != "o")
            words.append(f"{name} {said.row:.2f} {said.elem:.1f}" + (f" WRONG: {said.why}" if said.why else ""))
        return ("WRONG " if any("WRONG" in word for word in words) else "right ") + ", ".join(words)


def child(mode: str, piece: str, shape: str, kind: str, numbers: list[int]) -> None:
    """Judge or time the variants ``numbers`` of a piece; a JSON line each: [number, verdict or ms, or the error]."""
    tiny, length = launch.interpreted(), (SHAPES | TINY)[shape][3]
    if mode == "check" and not tiny:
        length = {"sel": 330, "select": 1500}.get(piece.split()[0], 600)
    torch.set_num_threads(2)
    with strict() if tiny else contextlib.nullcontext():
        _child(mode, Case(piece, shape, length, kind), piece, numbers)


def _child(mode: str, case: Case, piece: str, numbers: list[int]) -> None:
    truths = case.truths() if mode == "check" else ()
    print("ready", flush=True)
    for number in numbers:
        change = VARIANTS[piece][number]
        try:
            said: str | float = (
                case.verdict(change, truths) if mode == "check" else milliseconds(lambda c=change: case.run(c))
            )
        except Exception as error:  # noqa: BLE001  a variant that does not fit must not end the others
            lines = str(error).strip().splitlines()
            said = f"{type(error).__name__}: {lines[-1][:90] if lines else ''}"
        print(json.dumps([number, said]), flush=True)


def follow(mode: str, piece: str, shape: str, kind: str, numbers: list[int]) -> Iterator[tuple[int, str | float]]:
    """What child says of ``numbers``, killed and begun again behind the one at which it falls silent or dies."""
    left = list(numbers)
    while left:
        command = [sys.executable, __file__, "--child", mode, piece, shape, kind, json.dumps(left)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        said: queue.Queue[str | None] = queue.Queue()
        errors: list[str] = []

        def read(process: subprocess.Popen[str] = process, said: queue.Queue[str | None] = said) -> None:
            for line in process.stdout or ():
                said.put(line)
            said.put(None)

        def drain(process: subprocess.Popen[str] = process, errors: list[str] = errors) -> None:
            errors.extend(list(process.stderr or ())[-1:])

        threads = [threading.Thread(target=target, daemon=True) for target in (read, drain)]
        for thread in threads:
            thread.start()
        why, ready = "died at it:", False
        try:
            while left and (line := said.get(timeout=SILENCE[mode])) is not None:
                ready = ready or line.startswith("ready")
                if line.startswith("["):
                    number, result = json.loads(line)
                    left.remove(number)
                    yield number, result
        except queue.Empty:
            why = "hung, killed"
        process.kill()
        process.wait()
        threads[1].join(5)
        why = f"{why} {errors[-1].strip()[:80] if errors else ''}"
        while left:  # all of them, if it did not come as far as the first
            yield left.pop(0), why
            if ready:
                break


def judge_all(pieces: list[str], shape: str, processes: int) -> dict[str, dict[int, str]]:
    """The verdict on each variant of each piece, a few to a process."""
    jobs = [(piece, n, len(VARIANTS[piece])) for piece in pieces for n in range(0, len(VARIANTS[piece]), TOGETHER)]
    judged: dict[str, dict[int, str]] = {piece: {} for piece in pieces}

    def judge_some(piece: str, first: int, end: int) -> None:
        for number, said in follow("check", piece, shape, "near", list(range(first, min(first + TOGETHER, end)))):
            judged[piece][number] = str(said)

    with ThreadPoolExecutor(processes) as pool:
        list(pool.map(lambda job: judge_some(*job), jobs))
    return judged


def table(piece: str, shape: str, kind: str, verdicts: dict[int, str]) -> None:
    """Time what was judged right, or fails to be judged for want of memory, and print it."""
    print(f"\n{piece} {shape} {kind}", flush=True)
    right = [number for number, said in verdicts.items() if said.startswith("right")]
    times = dict(follow("time", piece, shape, kind, right))
    base = min((t for n, t in times.items() if isinstance(t, float) and n < (2 if piece.endswith("blocks") else 1)),
               default=None)  # fmt: skip
    for number, change in enumerate(VARIANTS[piece]):
        label = " ".join(f"{k}={v}" for k, v in change.items()) or "ships"
        ms = times.get(number, "")
        text = f"{ms:9.3f} ms" if isinstance(ms, float) else f"{ms:>12}"
        gain = f"{ms / base:6.2f}" if isinstance(ms, float) and base else "      "
        print(f"  {label:92} {text} {gain}  {verdicts.get(number, 'not judged')}", flush=True)


def main() -> None:
    """Judge and time, a shape after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(VARIANTS), help="pieces, or how their names begin")
    parser.add_argument("--shape", nargs="+", choices=[*SHAPES, *TINY], default=list(SHAPES))
    parser.add_argument("--budget", type=float, default=420.0)
    parser.add_argument("--processes", type=int, default=max(1, min(14, (os.cpu_count() or 2) - 2)))
    parser.add_argument("--tiny", action="store_true", help="one small shape")
    parser.add_argument("--child", nargs=5, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        *what, numbers = given.child
        child(*what, json.loads(numbers))
        return
    began, shapes = time.monotonic(), list(TINY) if given.tiny else given.shape
    pieces = [piece for piece in VARIANTS if any(piece.startswith(name) for name in given.only)]
    for shape in shapes:
        if time.monotonic() - began > given.budget:
            print(f"{shape}: no time left")
            continue
        judged = judge_all(pieces, shape, given.processes)
        print(f"{shape} judged, {time.monotonic() - began:.0f} s", flush=True)
        for piece in pieces:
            for kind in ("near", "random") if piece.startswith("sel ") else ("-",):
                if time.monotonic() - began > given.budget:
                    print(f"{piece} {shape} {kind}: no time left")
                    continue
                table(piece, shape, kind, judged[piece])
    print(f"done in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
