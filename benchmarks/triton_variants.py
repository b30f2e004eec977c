"""Variants of the kernels that no tuned table asks for yet, beside what ships: compiled or judged, then timed.

    python benchmarks/triton_variants.py [--no-judge] [--only "sel backward" "cmp dkdv"] [--shape 64/4/128]

A piece is a kernel (or all of sel's backward), a variant a change of its settings. All variants are first judged, a
few to a process, all processes at once, against nsa_core.verify's float64 truth, which also compiles them; --no-judge
compiles alone. Then one process times each in turn (median of do_bench, bf16, batch 1), sel on ``random`` blocks and on
``near`` ones (a token keeps its neighbour's each with probability 0.8). A variant that fails is a row with its error;
one that says nothing for a while is killed, and the next goes on. What --budget (seconds) cuts off is the least of
them. With TRITON_INTERPRET=1 and --tiny everything runs on the CPU: that tests this script, not the kernels' speed.
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
from variants import GEOMETRY, SHAPES, TINY, VARIANTS, Job, Settings, change, device, jobs, milliseconds, past_blocks

from nsa_backend_triton import configs, launch, sel_backward, sel_forward, sel_lists, select, span_backward
from nsa_backend_triton import span_forward as span
from nsa_backend_triton.launch import Sequences
from nsa_core.contract import SlotCall
from nsa_core.verify import dense
from nsa_core.verify.interpreter import strict
from nsa_core.verify.judge import heads_first, judge
from nsa_core.verify.regret import judge_selection

SILENCE = {"check": 90.0, "compile": 75.0, "time": 40.0}  # seconds without a word after which a process is killed


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
        if self.piece == "sel backward":
            return dict(zip(("dq", "dk", "dv"), self._sel_backward(self.shipped("sel_block_backward") | change)))
        if self.what == "dq":
            return {"dq": self._dq(self.shipped("span_dq") | change)[0]}
        given = (self.do, self.q, self.k, self.v, self.lse, self.stats, self.seqs, self.span, self.scale)
        found = span_backward.dkdv_of(*given, self.shipped("span_dkdv") | change)
        return dict(zip((f"dk{tail}", f"dv{tail}"), found))

    def _sel_backward(self, settings: Settings) -> tuple[Tensor, ...]:
        """As sel_backward.backward, from its lists to the end."""
        ordered = bool(settings.pop("ordered"))
        given = (self.do, self.q, self.k, self.v, self.o, self.lse)
        problem = sel_backward.prepare(*given, call=self.call)
        lists = sel_lists.build(self.blocks, problem.seqs, GEOMETRY)
        dq, dk, dv = sel_backward.block_gradients(problem, lists, settings, ordered=ordered)
        if dq is None:
            dq = sel_backward.tile_gradients(problem, self.blocks, self.shipped("sel_tile_backward"))
        return dq, dk, dv

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


def child(mode: str, mine: list[Job]) -> None:
    """Judge, compile or time variants; a JSON line each: [its place in ``mine``, verdict or ms, or the error]."""
    torch.set_num_threads(1)
    print("ready", flush=True)
    with strict() if launch.interpreted() else contextlib.nullcontext():
        what, case, truths = None, None, ()
        for place, job in enumerate(mine):
            try:
                if (job.shape, job.piece, job.kind) != what:
                    case = None  # its memory is free before the next one's is taken
                    case = _case(mode, job)
                    truths, what = case.truths() if mode == "check" else (), (job.shape, job.piece, job.kind)
                said = _said(mode, case, change(job), truths)
            except Exception as error:  # noqa: BLE001  a variant that does not fit must not end the others
                lines = str(error).strip().splitlines()
                said = f"{type(error).__name__}: {lines[-1][:90] if lines else ''}"
            print(json.dumps([place, said]), flush=True)


def _case(mode: str, job: Job) -> Case:
    length = (SHAPES | TINY)[job.shape][3]
    if mode != "time" and not launch.interpreted():
        length = {"sel": 330, "select": 1500}.get(job.piece.split()[0], 600)
    return Case(job.piece, job.shape, length, job.kind)


def _said(mode: str, case: Case, settings: Settings, truths: tuple[dict[str, Tensor], ...]) -> str | float:
    if mode == "check":
        return case.verdict(settings, truths)
    if mode == "time":
        return milliseconds(lambda: case.run(settings))
    case.run(settings)
    if not launch.interpreted():
        torch.cuda.synchronize()
    return "compiled"


def follow(mode: str, mine: list[Job]) -> Iterator[tuple[Job, str | float]]:
    """What child says of ``mine``, killed and begun again behind the one at which it falls silent or dies."""
    left = list(mine)
    while left:
        command = [sys.executable, __file__, "--child", mode, json.dumps(left)]
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
        why, ready, spoilt, given = "died at it:", False, False, left
        try:
            while left and (line := said.get(timeout=SILENCE[mode])) is not None:
                ready = ready or line.startswith("ready")
                if line.startswith("["):
                    place, result = json.loads(line)
                    left = given[place + 1 :]
                    yield given[place], result
                    spoilt = "Error" in str(result)  # a failed launch may spoil the process for those after it
                    if spoilt:
                        break
        except queue.Empty:
            why = "hung, killed"
        finally:
            process.kill()
            process.wait()
        threads[1].join(5)
        why = f"{why} {errors[-1].strip()[:80] if errors else ''}"
        while left and not spoilt:  # all of them, if it did not come as far as the first
            yield left.pop(0), why
            if ready:
                break


def prepare(mode: str, mine: list[Job], processes: int, together: int) -> dict[Job, str]:
    """The verdict on each of ``mine``, a few of one piece to a process."""
    groups: dict[tuple[str, str], list[Job]] = {}
    for job in mine:
        groups.setdefault((job.piece, job.shape), []).append(job)
    parts = [group[n : n + together] for group in groups.values() for n in range(0, len(group), together)]
    with ThreadPoolExecutor(processes) as pool:
        made = list(pool.map(lambda part: [(job, str(said)) for job, said in follow(mode, part)], parts))
    return {job: said for part in made for job, said in part}


def _binary(job: Job) -> tuple[str, ...]:
    """What of a job decides its binaries: one serves every length and every kind of blocks."""
    return job.piece, job.shape.split()[0], str(change(job))


def report(timed: dict[Job, str | float], verdicts: dict[Job, str], mine: list[Job]) -> None:
    """A table for each piece, shape and kind; ratios to its first row."""
    title, base = "", None
    for job in mine:
        heading = f"{job.piece} {job.shape} {job.kind}"
        ms = timed.get(job, "no time left")
        if heading != title:
            print(f"\n{heading}", flush=True)
            title, base = heading, ms if isinstance(ms, float) else None
        label = " ".join(f"{k}={v}" for k, v in change(job).items()) or "ships"
        text = f"{ms:9.3f} ms" if isinstance(ms, float) else f"{ms:>12}"
        gain = f"{ms / base:6.2f}" if isinstance(ms, float) and base else "      "
        print(f"  {label:60} {text} {gain}  {verdicts[job]}", flush=True)


def main() -> None:
    """Judge or compile all, then time all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(VARIANTS), help="pieces, or how their names begin")
    parser.add_argument("--shape", nargs="+", choices=[*SHAPES, *TINY], default=list(SHAPES))
    parser.add_argument("--no-judge", action="store_true")
    parser.add_argument("--budget", type=float, default=420.0)
    parser.add_argument("--processes", type=int, default=max(1, os.cpu_count() or 2))
    parser.add_argument("--tiny", action="store_true", help="one small shape")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        child(given.child[0], [Job(*job) for job in json.loads(given.child[1])])
        return
    began, shapes = time.monotonic(), list(TINY) if given.tiny else given.shape
    mine = jobs([piece for piece in VARIANTS if any(piece.startswith(name) for name in given.only)], shapes)
    mode, together = ("compile" if given.no_judge else "check"), 20 if launch.interpreted() else 3
    first = {_binary(job): job for job in mine if job.kind != "random"}
    said = prepare(mode, list(first.values()), given.processes, together)
    verdicts = {job: said[first[_binary(job)]] for job in mine}
    print(f"{len(first)} variants prepared in {time.monotonic() - began:.0f} s", flush=True)
    right = [job for job in mine if verdicts[job].startswith(("right", "compiled"))]
    timed: dict[Job, str | float] = {}
    for job, ms in follow("time", right):
        timed[job] = ms
        if time.monotonic() - began > given.budget:
            break
    report(timed, verdicts, mine)
    print(f"done in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
