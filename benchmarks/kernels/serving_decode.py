"""Time nsa_decode over the pages of an engine, beside dense attention of one token.

    python benchmarks/kernels/serving_decode.py [--batches 1 8 32 128] [--lengths 8192 32768 131072]
        [--layout BLNHC] [--budget SECONDS] [--json FILE]

The memory is that of nsa_vllm: one pool of blocks, which hold tokens of one branch each, and the
compressed tokens beside the keys and values of sel. First, ragged steps over such pages are
compared with the oracle; if they differ, nothing is timed. Then it prints a line per cell:

- nsa: microseconds of one layer's step, in a CUDA graph: append, compression and attention
- blocks: the same with a page of cmp per block, as a cache has them; the difference is the price
  of compressed tokens that sequences can share
- eager: microseconds of a step without a graph, host included
- dense: microseconds of dense attention of one token by FlashAttention over contiguous keys and
  values, without an append, and the bandwidth of its keys and values
- tokens per second of one layer
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

import torch
import torch.nn.functional as F
from graph_time import graph_ms
from torch.nn.attention import SDPBackend, sdpa_kernel

from nsa_core import LayerPages, NSAConfig, NSAttention, PagedKV, decode_rows, nsa_decode
from nsa_core.decode.layer_step import Rope
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

    def pages(self, shared: bool = True) -> LayerPages:
        """Return the pages; with ``shared`` compressed tokens as nsa_vllm has them."""
        cmp, table = self.views["cmp"], self.tables["sel"]
        if shared:
            geometry, states = self.config.geometry, cmp.shape[1]
            table = state_table(table, geometry, states, pitch(cmp), self.max_len)
            cmp = state_pages(cmp)
        tokens = {branch: (self.views["sel"], self.tables[branch]) for branch in self.tables}
        parts = {"cmp": (cmp, table), **tokens}
        widths = [self.config.qk_dim, self.config.v_dim]
        return LayerPages(**{b: PagedKV(*x.split(widths, -1), t) for b, (x, t) in parts.items()})


def angles(config: NSAConfig, positions: int, device: str) -> Rope:
    """Return the argument ``rope`` of nsa_decode."""
    index = torch.arange(positions, device=device)
    table = rope_table(index, config.qk_dim, config.frequencies, torch.float32)
    return table.cos[:, 0], table.sin[:, 0]


@torch.no_grad()
def check(device: str, dtype: torch.dtype, layout: str = LAYOUTS[0]) -> float:
    """Return the largest error of ragged steps over a pool, relative to the limit.

    The steps add single tokens, several tokens and chunks of prompts to sequences whose blocks are
    in random order, between memory of NaN. The last sequence begins after two blocks of the first
    one, which it shares. In bfloat16 all blocks are selected, because rounding may change a choice.
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
        cu_seqlens = torch.tensor([0, *new], device=device).cumsum(0).int()
        rows = decode_rows(cu_seqlens, torch.tensor(lengths, device=device).int(), len(x))
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


def eager_us(run: Callable[[], Any], repeats: int = 30) -> float:
    """Return the mean microseconds of a run, host included."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats * 1e6


@torch.no_grad()
def nsa_times(batch: int, length: int, layout: str) -> dict[str, float]:
    """Return the microseconds of one layer's step that adds a token to each sequence."""
    config, dtype, device = TIMED, torch.bfloat16, "cuda"
    pool = Pool(config, [length] * batch, dtype, device, layout, free=True)
    phi = tuple(
        make_phi(config.compress, config.geometry, 128).to(device, dtype).requires_grad_(False)
        for _ in range(2)
    )
    lengths = torch.full((batch,), length, dtype=torch.int32, device=device)
    cu_seqlens = torch.arange(batch + 1, dtype=torch.int32, device=device)
    rows, rope = decode_rows(cu_seqlens, lengths, batch), angles(config, length, device)
    q, kv = (
        torch.randn(batch, n, 128, device=device, dtype=dtype)
        for n in (config.n_heads, config.n_kv_heads)
    )
    gates = torch.rand(batch, config.n_heads, 3, device=device)

    def step(pages: LayerPages) -> Callable[[], Any]:
        return lambda: nsa_decode(
            q, kv, kv, gates, pages, rows, config=config, phi=phi, rope=rope, max_len=length
        )

    return {
        "nsa": graph_ms(step(pool.pages()), repeats=5) * 1e3,
        "blocks": graph_ms(step(pool.pages(shared=False)), repeats=5) * 1e3,
        "eager": eager_us(step(pool.pages())),
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
        from flash_attn import flash_attn_with_kvcache  # type: ignore[import-not-found, unused-ignore]
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


def line(row: dict[str, Any]) -> str:
    """Return a row of the table."""
    start = f"{row['batch']:>5} {row['length']:>7}"
    numbers = [
        f"{row[name]:>9.1f}" if name in row else f"{'-':>9}"
        for name in ("nsa", "blocks", "eager", "dense", "flash-attn")
    ]
    ratio = rate = bandwidth = f"{'-':>9}"
    if "nsa" in row:
        rate = f"{row['batch'] / row['nsa'] * 1e3:>9.1f}"
    if "dense" in row:
        best = min(row[name] for name in ("dense", "flash-attn") if name in row)
        size = 2 * row["batch"] * row["length"] * TIMED.n_kv_heads * 128 * 2
        bandwidth = f"{size / best / 1e6:>9.2f}"
        ratio = f"{best / row['nsa']:>9.2f}" if "nsa" in row else ratio
    return " ".join([start, *numbers, ratio, rate, bandwidth, row.get("error", "")])


def main() -> None:
    """Check, time, and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 32768, 131072])
    parser.add_argument("--layout", choices=LAYOUTS, default=LAYOUTS[0])
    parser.add_argument("--budget", type=float, default=600, help="seconds for all cells")
    parser.add_argument("--device", default="cuda", help="cpu checks, and times nothing")
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    deadline = time.monotonic() + options.budget
    for dtype in (torch.float32, torch.bfloat16):
        error = check(options.device, dtype, options.layout)
        print(f"{options.layout} {dtype}: {error:.2f} of the limit to the oracle", flush=True)
        if not error < 1:
            raise SystemExit("the steps over the pool are wrong; nothing is timed")
    if options.device == "cpu":
        return
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, us; 64/4/128 bf16")
    print("batch  length       nsa    blocks     eager     dense flash-attn  speedup  ktok/s  TB/s")
    rows = []
    for row in cells(options.batches, options.lengths, options.layout, deadline):
        rows.append(row)
        print(line(row), flush=True)
        if options.json is not None:
            device, shape = torch.cuda.get_device_name(), "64/4/128 bfloat16"
            result = {"device": device, "torch": torch.__version__, "shape": shape, "cells": rows}
            options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
