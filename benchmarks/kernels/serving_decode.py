"""Time nsa_decode over the pages of an engine, beside dense attention of one token.

    python benchmarks/kernels/serving_decode.py [--batches 1 8 32 128] [--lengths 8192 32768 131072]
        [--prompts 8192 32768] [--runs 64 256 1024] [--layout BLNHC] [--budget SECONDS]
        [--json FILE]

The memory is that of nsa_vllm: one pool of blocks, which hold tokens of one branch each, and the
compressed tokens beside the keys and values of sel. First, ragged steps over such pages are
compared with the oracle; if they differ, nothing is timed. Then it prints three tables.

A step of one layer that adds a token to each sequence, in microseconds. Every d-th step of a
sequence completes a block, which phi (an MLP) compresses; the sequences take turns:

- nsa: microseconds of one layer's step, in a CUDA graph: append, compression and attention; the
  mean of d consecutive steps
- together: the same for a step in which all sequences complete a block
- eager: microseconds of a step without a graph, host included; the mean of d consecutive steps
- dense: microseconds of dense attention of one token by FlashAttention over contiguous keys and
  values, without an append, and the bandwidth of its keys and values
- tokens per second of one layer

A prompt in chunks of 2,048 tokens, in milliseconds of one layer with its projections:

- chunks: by nsa_decode, with the tokens of a chunk together
- rows: by nsa_decode, with each token alone
- cache: over an NSACache of pages
- whole: in one call without a cache

A run of a few tokens after many, in microseconds of nsa_decode, host included, as a chunk and as
rows: where a chunk begins to be faster, nsa_core.decode.chunks.MIN_ROWS should be.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from graph_time import eager_ms, graph_ms
from torch.nn.attention import SDPBackend, sdpa_kernel

from nsa_core import LayerPages, NSAConfig, NSAttention, PagedKV, decode_rows, nsa_decode
from nsa_core.decode import chunks
from nsa_core.decode.layer_step import Rope
from nsa_core.decode.run import DecodeRows
from nsa_core.layer.gating import compute_gates
from nsa_core.layer.phi.kinds import make_phi
from nsa_core.layer.rope import rope_table
from nsa_verify import oracle
from nsa_vllm.layout import pitch, state_pages, state_table

TIMED = NSAConfig(dim=8192, n_heads=64, n_kv_heads=4, head_dim=128)
SMALL = NSAConfig(
    dim=64, n_heads=8, n_kv_heads=2, head_dim=32, compress_block_size=16, compress_stride=8,
    select_block_size=32, num_selected_blocks=4, window_size=48,
)  # fmt: skip
BLOCK = 64  # tokens
LAYOUTS = ("BLNHC", "BLHNC")
CHUNK = 2048  # tokens of a prompt in a step
DENSE = ("dense", "flash-attn")  # names of the times of dense attention


class Pool:
    """Blocks of memory for one layer, and those that each sequence has.

    Args:
        config: the sizes of the layer.
        lengths: tokens that each sequence has room for.
        dtype: dtype of keys and values.
        device: device of the pool.
        layout: BLNHC or BLHNC, vLLM's names.
        free: free all blocks of a window behind the newest token and ``new`` tokens before it.
        new: tokens of a sequence that a step may add.
    """

    def __init__(
        self,
        config: NSAConfig,
        lengths: Sequence[int],
        dtype: torch.dtype,
        device: str,
        layout: str = LAYOUTS[0],
        free: bool = False,
        new: int = 1,
    ) -> None:
        self.config, self.max_len = config, max(lengths)
        columns, states = -(-self.max_len // BLOCK), BLOCK // config.compress_stride
        needed = {"sel": columns}
        for branch, window in (("win", config.window_size), ("raw", config.compress_block_size)):
            needed[branch] = min(columns, -(-(window + new) // BLOCK) + 1) if free else columns
        batch, heads, width = len(lengths), config.n_kv_heads, config.qk_dim + config.v_dim
        order = torch.randperm(1 + batch * sum(needed.values()), device=device, dtype=torch.int32)
        blocks = iter(order[order > 0].split([batch * n for n in needed.values()]))
        self.tables = {}
        for branch, count in needed.items():
            table = torch.zeros(batch, columns, dtype=torch.int32, device=device)  # 0: no block
            table[:, columns - count :] = next(blocks).view(batch, count)
            self.tables[branch] = table
        memory = torch.empty(
            len(order), (BLOCK + states) * heads * width, device=device, dtype=dtype
        )
        self.memory = memory.normal_() if free else memory.fill_(torch.nan)
        self.views = {}
        for branch, first, count in (("sel", 0, BLOCK), ("cmp", BLOCK, states)):
            part = memory[:, first * heads * width :][:, : count * heads * width]
            shape = (count, heads) if layout == "BLNHC" else (heads, count)
            view = part.unflatten(1, (*shape, width))
            self.views[branch] = view if layout == "BLNHC" else view.transpose(1, 2)

    def pages(self) -> LayerPages:
        """Return the pages as nsa_vllm has them."""
        cmp, sel, geometry = self.views["cmp"], self.tables["sel"], self.config.geometry
        table = state_table(sel, geometry, cmp.shape[1], pitch(cmp), self.max_len)
        tokens = {branch: (self.views["sel"], self.tables[branch]) for branch in self.tables}
        parts = {"cmp": (state_pages(cmp), table), **tokens}
        widths = [self.config.qk_dim, self.config.v_dim]
        return LayerPages(**{b: PagedKV(*x.split(widths, -1), t) for b, (x, t) in parts.items()})


def angles(config: NSAConfig, positions: int, device: str) -> Rope:
    """Return the argument ``rope`` of nsa_decode."""
    index = torch.arange(positions, device=device)
    table = rope_table(index, config.qk_dim, config.frequencies, torch.float32)
    return table.cos[:, 0], table.sin[:, 0]


def least(rows: int) -> Any:
    """Let runs of this many rows be chunks."""
    return mock.patch.object(chunks, "MIN_ROWS", {"cpu": rows, "cuda": rows})


def rows_of(new: Sequence[int], lengths: Sequence[int], rows: int, device: str) -> DecodeRows:
    """Return the rows of a step, with its chunks."""
    on_host = ([0, *itertools.accumulate(new)], lengths)
    cu_seqlens, ends = (torch.tensor(x, dtype=torch.int32, device=device) for x in on_host)
    return decode_rows(cu_seqlens, ends, rows, on_host)


@torch.no_grad()
def check(
    device: str, dtype: torch.dtype, layout: str = LAYOUTS[0], together: bool = True
) -> float:
    """Return the largest error of ragged steps over a pool, relative to the limit.

    The steps add single tokens, several tokens and chunks of prompts to sequences whose blocks are
    in random order, between memory of NaN. The last sequence begins after two blocks of the first
    one, which it shares. In bfloat16 all blocks are selected, because rounding may change a choice.
    With ``together``, sequences that get 16 tokens and more run the prefill kernels.
    """
    torch.manual_seed(0)
    config, limit, shared = SMALL, 1e-4, 2 * BLOCK
    if dtype != torch.float32:
        config, limit = dataclasses.replace(config, num_selected_blocks=12), 3e-2
    ends = (230, 1, 37, 129, 200)
    attn = NSAttention(config).to(device, dtype).requires_grad_(False)
    inputs = [torch.randn(end, config.dim, device=device).to(dtype) for end in ends]
    inputs[-1][:shared] = inputs[0][:shared]
    pool = Pool(config, ends, dtype, device, layout)
    for table in pool.tables.values():
        table[-1, : shared // BLOCK] = table[0, : shared // BLOCK]
    pages, rope = pool.pages(), angles(config, pool.max_len, device)
    lengths, outputs = [0, 0, 0, 0, shared], [[x[:0]] for x in inputs]
    counts = [(90, 1, 20, 0, 0), (50, 0, 1, 64, 9), (3, 0, 5, 1, 1), (0, 0, 1, 1, 0)]
    for wanted in itertools.cycle(counts):
        new = [min(n, end - length) for n, end, length in zip(wanted, ends, lengths)]
        if lengths[0] + new[0] < shared:
            new[-1] = 0
        if lengths == [*ends]:
            break
        tokens = [x[a : a + n] for x, a, n in zip(inputs, lengths, new)]
        lengths = [a + n for a, n in zip(lengths, new)]
        x = torch.cat([*tokens, torch.full_like(inputs[1], torch.nan)])  # a row of padding
        with least(16 if together else len(x) + 1):
            rows = rows_of(new, lengths, len(x), device)
        q, k, v = attn.heads(x)
        o = nsa_decode(
            q, k, v, compute_gates(attn.gate, x), pages, rows,
            config=config, phi=(attn.phi_k, attn.phi_v), rope=rope, max_len=pool.max_len,
        )  # fmt: skip
        for parts, part in zip(outputs, attn.out(o.flatten(1))[:-1].split(new)):
            parts.append(part)
    worst = 0.0
    for parts, x in zip(outputs, inputs):
        actual = torch.cat(parts).cpu().double()
        expected = oracle.layer(attn.state_dict(), x[None], config)[0]
        error = (actual - expected[-len(actual) :]).abs().max() / expected.abs().max()
        worst = max(worst, float(error.nan_to_num(torch.inf)) / limit)
    return worst


@torch.no_grad()
def nsa_times(batch: int, length: int, layout: str) -> dict[str, float]:
    """Return the microseconds of one layer's step that adds a token to each sequence."""
    config, dtype, device = TIMED, torch.bfloat16, "cuda"
    pool = Pool(config, [length] * batch, dtype, device, layout, free=True)
    phi = tuple(
        make_phi(config.compress, config.geometry, 128).to(device, dtype).requires_grad_(False)
        for _ in range(2)
    )
    pages, rope = pool.pages(), angles(config, length, device)
    cu_seqlens = torch.arange(batch + 1, dtype=torch.int32, device=device)
    index = cu_seqlens[:-1]
    q, kv = (
        torch.randn(batch, n, 128, device=device, dtype=dtype)
        for n in (config.n_heads, config.n_kv_heads)
    )
    gates = torch.rand(batch, config.n_heads, 3, device=device)

    def step(lengths: torch.Tensor) -> Callable[[], Any]:
        rows = decode_rows(cu_seqlens, lengths, batch)
        return lambda: nsa_decode(
            q, kv, kv, gates, pages, rows, config=config, phi=phi, rope=rope, max_len=length
        )

    count = config.compress_stride
    steps = [step(length - (index + i) % count) for i in range(count)]

    def consecutive() -> None:
        for run in steps:
            run()

    return {
        "nsa": graph_ms(consecutive, repeats=2) * 1e3 / count,
        "together": graph_ms(step(torch.full_like(index, length)), repeats=5) * 1e3,
        "eager": eager_ms(consecutive, repeats=5) * 1e3 / count,
    }


@torch.no_grad()
def dense_times(batch: int, length: int) -> dict[str, float]:
    """Return the microseconds of dense attention of one token, by each FlashAttention here."""
    config = TIMED
    q, k, v = (
        torch.randn(batch, n, tokens, 128, device="cuda", dtype=torch.bfloat16)
        for n, tokens in ((config.n_heads, 1), *[(config.n_kv_heads, length)] * 2)
    )

    def sdpa() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    times = {"dense": graph_ms(sdpa, repeats=5) * 1e3}
    try:
        from flash_attn import flash_attn_with_kvcache
    except ImportError:
        return times
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    times["flash-attn"] = graph_ms(lambda: flash_attn_with_kvcache(q, k, v), repeats=5) * 1e3
    return times


def cells(
    batches: Sequence[int], lengths: Sequence[int], layout: str, deadline: float
) -> Iterator[dict[str, Any]]:
    """Time the cells, small ones first, until the deadline; a cell that fails has its error."""
    for length, batch in sorted(itertools.product(lengths, batches), key=lambda c: c[0] * c[1]):
        if time.monotonic() > deadline:
            yield {"batch": batch, "length": length, "error": "no time left"}
            continue
        row: dict[str, Any] = {"batch": batch, "length": length}
        for measure in (lambda b, n: nsa_times(b, n, layout), dense_times):
            try:
                row |= measure(batch, length)
            except Exception as error:  # noqa: BLE001  # another cell may have the memory
                row["error"] = f"{type(error).__name__}: {error}".splitlines()[0][:80]
            torch.cuda.empty_cache()
        yield row


@torch.no_grad()
def prompt_times(length: int, layout: str) -> dict[str, float]:
    """Return the milliseconds of one layer for a prompt in chunks."""
    config, dtype, device = TIMED, torch.bfloat16, "cuda"
    attn = NSAttention(config).to(device, dtype).requires_grad_(False)
    x = torch.randn(length, config.dim, device=device, dtype=dtype)
    pages, rope = (
        Pool(config, [length], dtype, device, layout).pages(),
        angles(config, length, device),
    )
    ends = [*range(CHUNK, length, CHUNK), length]
    parts = x.split(CHUNK)

    def paged(together: bool) -> Callable[[], Any]:
        with least(1 if together else length + 1):
            steps = [rows_of([len(part)], [n], len(part), device) for part, n in zip(parts, ends)]

        def run() -> None:
            for part, rows in zip(parts, steps):
                q, k, v = attn.heads(part)
                o = nsa_decode(
                    q, k, v, compute_gates(attn.gate, part), pages, rows,
                    config=config, phi=(attn.phi_k, attn.phi_v), rope=rope, max_len=length,
                )  # fmt: skip
                attn.out(o.flatten(1))

        return run

    cache = attn.new_cache(1, length, page_size=BLOCK)

    def over_cache() -> None:
        cache.reset()
        for part in parts:
            attn(part[None], cache=cache)

    runs = {"chunks": paged(True), "cache": over_cache, "whole": lambda: attn(x[None])}
    runs["rows"] = paged(False)
    return {name: eager_ms(run, repeats=3) for name, run in runs.items()}


@torch.no_grad()
def run_times(new: int, length: int, layout: str) -> dict[str, float]:
    """Return the microseconds of ``new`` tokens at the end of a sequence."""
    config, dtype, device = TIMED, torch.bfloat16, "cuda"
    pages = Pool(config, [length], dtype, device, layout).pages()
    for part in pages:
        part.k.zero_()
        part.v.zero_()
    rope = angles(config, length, device)
    phi = tuple(
        make_phi(config.compress, config.geometry, 128).to(device, dtype).requires_grad_(False)
        for _ in range(2)
    )
    q, kv = (
        torch.randn(new, n, 128, device=device, dtype=dtype)
        for n in (config.n_heads, config.n_kv_heads)
    )
    gates = torch.rand(new, config.n_heads, 3, device=device)
    times = {}
    for name, fewest in (("chunk", 1), ("rows", new + 1)):
        with least(fewest):
            rows = rows_of([new], [length], new, device)

        def step(rows: DecodeRows = rows) -> Any:
            return nsa_decode(
                q, kv, kv, gates, pages, rows, config=config, phi=phi, rope=rope, max_len=length
            )

        times[name] = 1e3 * eager_ms(step, repeats=10)
    return times


def line(row: dict[str, Any]) -> str:
    """Return a row of the table."""
    start = f"{row['batch']:>5} {row['length']:>7}"
    numbers = [
        f"{row[name]:>9.1f}" if name in row else f"{'-':>9}"
        for name in ("nsa", "together", "eager", *DENSE)
    ]
    ratio = rate = bandwidth = f"{'-':>9}"
    if "nsa" in row:
        rate = f"{row['batch'] / row['nsa'] * 1e3:>9.1f}"
    if best := min((row[name] for name in DENSE if name in row), default=None):
        size = 2 * row["batch"] * row["length"] * TIMED.n_kv_heads * 128 * 2
        bandwidth = f"{size / best / 1e6:>9.2f}"
        ratio = f"{best / row['nsa']:>9.2f}" if "nsa" in row else ratio
    return " ".join([start, *numbers, ratio, rate, bandwidth, row.get("error", "")])


def others(
    name: str,
    sizes: Sequence[dict[str, int]],
    measure: Callable[..., dict[str, float]],
    layout: str,
    deadline: float,
) -> Iterator[dict[str, Any]]:
    """Time and print the rows of another table until the deadline."""
    for size in sizes:
        row: dict[str, Any] = dict(size)
        try:
            if time.monotonic() > deadline:
                raise TimeoutError("no time left")
            row |= measure(*size.values(), layout)
        except Exception as error:  # noqa: BLE001  # the other rows may run
            row["error"] = f"{type(error).__name__}: {error}".splitlines()[0][:80]
        torch.cuda.empty_cache()
        values = (f"{k} {v:.1f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items())
        print(f"{name}:", *values, flush=True)
        yield row


def main() -> None:
    """Check, time, and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 32, 128])
    parser.add_argument("--lengths", type=int, nargs="*", default=[8192, 32768, 131072])
    parser.add_argument("--prompts", type=int, nargs="*", default=[8192, 32768])
    parser.add_argument("--runs", type=int, nargs="*", default=[64, 128, 256, 512, 1024, 2048])
    parser.add_argument("--layout", choices=LAYOUTS, default=LAYOUTS[0])
    parser.add_argument("--budget", type=float, default=600, help="seconds for all cells")
    parser.add_argument("--device", default="cuda", help="cpu checks, and times nothing")
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    deadline = time.monotonic() + options.budget
    wrong = set()
    for dtype, together in itertools.product((torch.float32, torch.bfloat16), (False, True)):
        error = check(options.device, dtype, options.layout, together)
        name = "chunks" if together else "steps"
        print(
            f"{options.layout} {name} {dtype}: {error:.2f} of the limit to the oracle", flush=True
        )
        if not error < 1:
            wrong.add(name)
    if options.device == "cpu" or "steps" in wrong:
        raise SystemExit(f"wrong over the pool: {', '.join(wrong)}" if wrong else 0)
    device, shape = torch.cuda.get_device_name(), "64/4/128 bfloat16"
    result: dict[str, Any] = {"device": device, "torch": torch.__version__, "shape": shape}
    result |= {"layout": options.layout, "cells": [], "prompts": [], "runs": []}

    def save() -> None:
        if options.json is not None:
            options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")

    print(f"{device}, torch {torch.__version__}; {shape}")
    prompts = [{"tokens": n} for n in options.prompts if not wrong]
    runs = [{"tokens": n, "length": m} for n in options.runs for m in options.prompts if not wrong]
    target = (options.layout, deadline)
    for row in others("prompt, ms", prompts, prompt_times, *target):
        result["prompts"].append(row)
    for row in others("run, us", runs, run_times, *target):
        result["runs"].append(row)
    save()
    names = ("us     length", *(f"{name:>9}" for name in ("nsa", "together", "eager", *DENSE)))
    print(*names, f"{'speedup':>9} {'ktok/s':>9} {'TB/s':>9}")
    for row in cells(options.batches, options.lengths, *target):
        result["cells"].append(row)
        print(line(row), flush=True)
        save()
    if wrong:
        raise SystemExit("chunks over the pool are wrong, so prompts were not timed")


if __name__ == "__main__":
    main()
