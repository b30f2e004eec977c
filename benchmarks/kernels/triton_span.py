"""Check and time the span kernels (cmp and win, forward and backward) over tile shapes.

    python benchmarks/kernels/triton_span.py [--shape 64/4/128] [--slot win]
        [--piece forward dq dkdv]

Prints the median ms of do_bench in bf16. Every configuration first runs on a short sequence and is
compared with float64 (in parallel processes: one binary serves every length), then on the long one.
A configuration that fails prints its error. TFLOP/s count the operations of the equations (4
products forward, 10 backward, of which dq has 6/14 and dk, dv 8/14), not those of recomputed
scores.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import math
import multiprocessing
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton.errors import TritonError
from triton.testing import do_bench

from nsa_backend_triton.host import configs
from nsa_backend_triton.host.sequences import Sequences, architecture
from nsa_backend_triton.span import backward as span_backward
from nsa_backend_triton.span import forward as span_forward
from nsa_core.contract import SlotCall
from nsa_core.layout import BlockGeometry

GEOMETRY = BlockGeometry()
SHAPES = {  # heads, kv heads, Dk, Dv, tokens
    "64/4/128": (64, 4, 128, 128, 65536),
    "32/8/128": (32, 8, 128, 128, 32768),
    "12/2/64": (12, 2, 64, 64, 65536),
    "64/4/192/128": (64, 4, 192, 128, 32768),
}
# target ms on an H200, forward and backward
TARGETS = {
    ("win", "64/4/128"): (2.5, 7.0),
    ("cmp", "64/4/128"): (9.0, 25.0),
    ("win", "32/8/128"): (1.2, 3.7),
    ("cmp", "32/8/128"): (1.5, 4.0),
    ("win", "12/2/64"): (0.5, 1.4),
    ("cmp", "12/2/64"): (1.1, 3.1),
}


def rows(names: str, *values: tuple[int, ...]) -> list[dict[str, int]]:
    """Return settings from a line of names and rows of values."""
    return [dict(zip(names.split(), row)) for row in values]


FORWARD = DQ = "BLOCK_M BLOCK_H BLOCK_N num_warps num_stages maxnreg USE_TMA"
DKDV = "BLOCK_N BLOCK_M QUERY_SPLITS num_warps num_stages maxnreg USE_TMA"
CANDIDATES = {
    ("win", "forward"): rows(
        FORWARD,
        (128, 4, 64, 8, 2, 128, 0),
        (128, 4, 64, 8, 2, 128, 1),
        (64, 4, 64, 4, 2, 0, 1),
        (64, 4, 64, 4, 2, 168, 1),
        (64, 4, 32, 4, 3, 0, 1),
        (64, 4, 32, 4, 2, 0, 1),
    ),
    ("cmp", "forward"): rows(
        FORWARD,
        (128, 1, 64, 8, 2, 128, 0),
        (128, 1, 64, 8, 2, 128, 1),
        (64, 1, 64, 4, 2, 168, 1),
        (128, 1, 128, 8, 2, 0, 1),
    ),
    ("win", "dq"): rows(
        DQ,
        (64, 4, 64, 4, 2, 0, 0),
        (64, 4, 64, 4, 2, 0, 1),
        (64, 4, 64, 4, 3, 0, 1),
        (64, 4, 64, 4, 2, 168, 1),
        (128, 4, 64, 8, 2, 0, 1),
        (128, 4, 64, 8, 3, 0, 1),
        (128, 4, 64, 8, 2, 128, 1),
        (128, 4, 128, 8, 2, 0, 1),
        (64, 4, 32, 4, 2, 0, 1),
    ),
    ("cmp", "dq"): rows(
        DQ,
        (128, 1, 128, 8, 2, 0, 0),
        (128, 1, 128, 8, 2, 0, 1),
        (64, 1, 64, 4, 2, 0, 1),
        (128, 1, 64, 8, 2, 128, 1),
        (128, 1, 64, 8, 3, 0, 1),
        (64, 1, 64, 4, 2, 168, 1),
    ),
    ("win", "dkdv"): rows(
        DKDV,
        (64, 32, 1, 4, 3, 0, 0),
        (64, 64, 1, 4, 2, 0, 0),
        (64, 64, 1, 4, 2, 0, 1),
        (64, 32, 1, 4, 3, 0, 1),
        (64, 32, 1, 4, 2, 0, 1),
        (128, 64, 1, 8, 2, 0, 1),
    ),
    ("cmp", "dkdv"): rows(
        DKDV,
        (128, 64, 1, 8, 3, 0, 0),
        (64, 64, 4, 4, 2, 0, 0),
        (64, 64, 1, 4, 2, 0, 1),
        (64, 64, 4, 4, 2, 0, 1),
        (64, 32, 1, 4, 3, 0, 1),
        (128, 64, 1, 8, 2, 0, 1),
    ),
}
WIDE = {  # Dk 192: three bands of 64 columns
    ("win", "forward"): rows(
        FORWARD,
        (128, 4, 64, 8, 2, 0, 1),
        (128, 4, 64, 8, 2, 128, 1),
        (64, 4, 64, 4, 2, 168, 1),
        (64, 4, 32, 4, 3, 168, 1),
        (128, 4, 32, 8, 2, 128, 1),
        (128, 4, 32, 8, 2, 128, 0),
    ),
    ("cmp", "forward"): rows(
        FORWARD,
        (128, 1, 64, 8, 2, 0, 1),
        (128, 1, 64, 8, 2, 128, 1),
        (64, 1, 64, 4, 2, 168, 1),
        (64, 1, 32, 4, 3, 168, 1),
        (128, 1, 32, 8, 2, 128, 1),
        (128, 1, 32, 8, 2, 128, 0),
    ),
    ("win", "dq"): rows(
        DQ,
        (64, 4, 32, 4, 2, 0, 1),
        (64, 4, 32, 4, 3, 0, 1),
        (64, 4, 64, 4, 2, 0, 1),
        (128, 4, 64, 8, 2, 0, 1),
        (64, 4, 32, 4, 2, 0, 0),
        (64, 4, 32, 4, 3, 0, 0),
    ),
    ("cmp", "dq"): rows(
        DQ,
        (64, 1, 32, 4, 2, 0, 1),
        (64, 1, 32, 4, 3, 0, 1),
        (64, 1, 64, 4, 2, 0, 1),
        (128, 1, 64, 8, 2, 0, 1),
        (64, 1, 32, 4, 2, 0, 0),
        (64, 1, 32, 4, 3, 0, 0),
    ),
    ("win", "dkdv"): rows(
        DKDV,
        (64, 32, 1, 4, 2, 0, 1),
        (64, 32, 1, 4, 2, 0, 0),
        (128, 32, 1, 8, 2, 0, 1),
        (128, 32, 1, 8, 2, 0, 0),
        (64, 64, 1, 8, 2, 0, 1),
    ),
    ("cmp", "dkdv"): rows(
        DKDV,
        (64, 32, 4, 4, 2, 0, 1),
        (64, 32, 4, 4, 2, 0, 0),
        (64, 32, 1, 4, 2, 0, 1),
        (128, 32, 4, 8, 2, 0, 1),
        (128, 32, 4, 8, 2, 0, 0),
        (64, 64, 4, 8, 2, 0, 1),
    ),
}


def span_of(slot: str) -> tuple[int, int, int]:
    """Return COMPRESS_BLOCK, STRIDE, WINDOW."""
    if slot == "win":
        return 1, 1, GEOMETRY.window_size
    return GEOMETRY.compress_block_size, GEOMETRY.compress_stride, 0


def visible(slot: str, length: int, keys: int, device: str) -> Tensor:
    """Return the mask bool [S, keys] of keys that each token sees."""
    size, stride, window = span_of(slot)
    t, j = torch.arange(length, device=device)[:, None], torch.arange(keys, device=device)
    seen = j * stride + size - 1 <= t
    return seen & (t < j + window) if window else seen


class Case:
    """The tensors of one slot and shape at one length."""

    def __init__(self, slot: str, heads: int, groups: int, dk: int, dv: int, length: int) -> None:
        self.slot, self.span, self.scale = slot, span_of(slot), dk**-0.5
        keys = length if slot == "win" else GEOMETRY.num_compressed(length)
        torch.manual_seed(0)
        shapes = ((length, heads, dk), (keys, groups, dk), (keys, groups, dv), (length, heads, dv))
        made = [torch.randn((1, *shape), device="cuda", dtype=torch.bfloat16) for shape in shapes]
        self.q, self.k, self.v, self.do = made
        self.seqs = Sequences.of(self.q, self.k, SlotCall(GEOMETRY, self.scale))
        self.o, self.lse = span_forward.forward(
            self.q, self.k, self.v, self.seqs, self.span, self.scale
        )
        self.stats = self._dq(None)[1]

    def forward(self, settings: configs.Settings | None) -> tuple[Tensor, ...]:
        """Run the forward: o, lse."""
        return span_forward.forward(
            self.q, self.k, self.v, self.seqs, self.span, self.scale, settings
        )

    def dq(self, settings: configs.Settings | None) -> tuple[Tensor, ...]:
        """Run span_dq: dq, delta."""
        dq, stats = self._dq(settings)
        return dq, stats[0, ..., : self.q.shape[1]]

    def _dq(self, settings: configs.Settings | None) -> tuple[Tensor, Tensor]:
        tensors = (self.do, self.q, self.k, self.v, self.o, self.lse)
        return span_backward.dq_of(*tensors, self.seqs, self.span, self.scale, settings)

    def dkdv(self, settings: configs.Settings | None) -> tuple[Tensor, ...]:
        """Run span_dkdv and span_sum: dk, dv."""
        tensors = (self.do, self.q, self.k, self.v, self.lse, self.stats)
        return span_backward.dkdv_of(*tensors, self.seqs, self.span, self.scale, settings)

    def backward(self, settings: None) -> tuple[Tensor, ...]:
        """Run the backward with the tuned configurations: dq, dk, dv."""
        tensors = (self.do, self.q, self.k, self.v, self.o, self.lse)
        return span_backward.backward(*tensors, self.seqs, self.span, self.scale)

    def truth(self) -> dict[str, tuple[Tensor, ...]]:
        """Return the results of each piece in float64."""
        q, k, v, do = (x[0].transpose(0, 1).double() for x in (self.q, self.k, self.v, self.do))
        h = len(q) // len(k)
        s = (q.unflatten(0, (-1, h)) @ k[:, None].mT) * self.scale
        s = s.masked_fill(~visible(self.slot, q.shape[1], k.shape[1], "cuda"), -math.inf)
        p = s.softmax(-1).nan_to_num(0.0)
        do = do.unflatten(0, (-1, h))
        o, dp = p @ v[:, None], do @ v[:, None].mT
        delta = (do * o).sum(-1, keepdim=True)
        ds = p * (dp - delta) * self.scale
        dk, dv = (ds.mT @ q.unflatten(0, (-1, h))).sum(1), (p.mT @ do).sum(1)

        def by_token(x: Tensor) -> Tensor:
            return x.transpose(0, 1)[None]

        o, dq = by_token(o.flatten(0, 1)), by_token((ds @ k[:, None]).flatten(0, 1))
        lse, kv = s.logsumexp(-1).flatten(0, 1)[None], (by_token(dk), by_token(dv))
        return {
            "forward": (o, lse),
            "dq": (dq, delta.flatten(0, 1)[..., 0][None]),
            "dkdv": kv,
            "backward": (dq, *kv),
        }


def distance(found: tuple[Tensor, ...], truth: tuple[Tensor, ...]) -> float:
    """Return the largest rms error of a result relative to the rms of its truth."""
    worst = 0.0
    for x, y in zip(found, truth):
        same = (x == y).all() if not y.isfinite().all() and x.shape != y.shape else True
        x, y = x.double().nan_to_num(neginf=0.0, nan=1e9), y.nan_to_num(neginf=0.0)
        worst = (
            max(worst, float((x - y).square().mean().sqrt() / y.square().mean().sqrt()))
            if same
            else math.inf
        )
    return worst


FAILURES = (RuntimeError, TypeError, ValueError, KeyError, LookupError, AssertionError, TritonError)


def attempt(run: Callable[[], Any]) -> Any:
    """Return ``run``'s result, or the last line of its error as text.

    One bad configuration must not end a measurement.
    """
    try:
        return run()
    except FAILURES as error:
        return (
            f"{type(error).__name__}:"
            f" {str(error).strip().splitlines()[-1][:100] if str(error).strip() else ''}"
        )


@functools.cache
def short(slot: str, shape: str) -> tuple[Case, dict[str, tuple[Tensor, ...]]]:
    """Return a case of 700 tokens and its truth."""
    case = Case(slot, *SHAPES[shape][:4], 700)
    return case, case.truth()


def check(slot: str, shape: str, piece: str, settings: dict[str, int] | None) -> float | str:
    """Return the error of one configuration, in a process of its own.

    Its binary is in triton's cache afterwards.
    """
    case, truth = short(slot, shape)
    return attempt(lambda: distance(getattr(case, piece)(settings), truth[piece]))  # type: ignore[no-any-return]


def operations(slot: str, heads: int, widths: int, length: int) -> float:
    """Return the operations of the forward."""
    size, stride, window = span_of(slot)
    if window:
        pairs = length * window - window * (window - 1) / 2
    else:
        pairs = sum(max(0, (t + 1 - size) // stride + 1) for t in range(length))
    return 2.0 * pairs * heads * widths


def measure(slot: str, shape: str, work: list[tuple[str, Any]], errors: list[float | str]) -> None:
    """Time and print every configuration of one slot and shape."""
    heads, _, dk, dv, length = SHAPES[shape]
    big = Case(slot, *SHAPES[shape])
    forward_operations = operations(slot, heads, dk + dv, length)
    share = {"forward": 1.0, "dq": 2.5 * 6 / 14, "dkdv": 2.5 * 8 / 14, "backward": 2.5}
    print(
        f"\n{slot} {shape} S={length}; targets, forward and backward:"
        f" {TARGETS.get((slot, shape), 'none')}"
    )
    for (piece, settings), error in zip(work, errors):
        label = " ".join(f"{k}={v}" for k, v in settings.items()) if settings else "shipped"
        ms = error
        if isinstance(error, float):
            run = getattr(big, piece)
            ms = attempt(
                lambda r=run, s=settings: do_bench(
                    lambda: r(s), warmup=15, rep=60, return_mode="median"
                )
            )
        if not isinstance(ms, float):
            print(f"{piece:9}{label:92} {ms}", flush=True)
            continue
        rate = f"{ms:9.3f} ms {forward_operations * share[piece] / ms * 1e-9:7.0f} TFLOP/s"
        print(
            f"{piece:9}{label:92}{rate}   error {error:.1e}{'  WRONG' if not error < 0.02 else ''}",
            flush=True,
        )


def main() -> None:
    """Check everything in parallel, then measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--slot", nargs="+", choices=("win", "cmp"), default=["win", "cmp"])
    parser.add_argument(
        "--piece", nargs="*", choices=("forward", "dq", "dkdv"), default=["forward", "dq", "dkdv"]
    )
    parser.add_argument("--processes", type=int, default=14)
    options = parser.parse_args()
    device = torch.device("cuda", torch.cuda.current_device())
    print(
        f"{torch.cuda.get_device_name()}, sm_{architecture(device)}, torch {torch.__version__}",
        flush=True,
    )
    work = [(piece, None) for piece in ("forward", "dq", "dkdv", "backward")]
    tables = {
        (slot, shape): (
            [
                (p, s)
                for p in options.piece
                for s in (WIDE if SHAPES[shape][2] > 128 else CANDIDATES)[slot, p]
            ]
            + work
        )
        for shape in options.shape
        for slot in options.slot
    }
    began = time.monotonic()
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(options.processes, mp_context=spawn) as pool:
        futures = {
            at: [pool.submit(check, *at, *item) for item in items] for at, items in tables.items()
        }
        errors = {at: [attempt(future.result) for future in found] for at, found in futures.items()}
    print(f"checked in {time.monotonic() - began:.0f} s", flush=True)
    for at, items in tables.items():
        measure(*at, items, errors[at])
        torch.cuda.empty_cache()
    print(f"done in {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
