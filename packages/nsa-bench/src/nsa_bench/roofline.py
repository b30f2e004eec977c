"""Arithmetic and byte floors: what the mathematics needs at least, from shapes, at this machine's
peak rates.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import torch

from nsa_core.config import NSAConfig
from nsa_core.contract import SLOTS
from nsa_core.layout import BlockGeometry

PARTS = ("compress", *SLOTS)


@dataclasses.dataclass(frozen=True)
class Peaks:
    """Rates measured in this run: a large matrix product, and a large copy (bytes read and
    written).
    """

    flops_per_s: float
    bytes_per_s: float

    def floor_ms(self, cost: Cost) -> float:
        """Time below which no kernel can do ``cost`` here."""
        return max(cost.flops / self.flops_per_s, cost.bytes / self.bytes_per_s) * 1e3


@dataclasses.dataclass(frozen=True)
class Cost:
    """Floating point operations, and bytes that must cross the memory bus at least once."""

    flops: int
    bytes: int


def visible_pairs(geometry: BlockGeometry, length: int) -> dict[str, int]:
    """(query, key) pairs per head of each branch over a sequence, and of dense causal attention.

    Exact where the current block is always chosen (local_blocks >= 1), else the upper bound for
    sel.
    """
    size, stride, block = (
        geometry.compress_block_size,
        geometry.compress_stride,
        geometry.select_block_size,
    )
    t = torch.arange(length, dtype=torch.int64)
    cmp = ((t + 1 - size).div(stride, rounding_mode="floor") + 1).clamp(min=0)
    chosen = (t // block + 1).clamp(max=geometry.num_selected_blocks)
    sel = (chosen - 1) * block + t % block + 1
    win = (t + 1).clamp(max=geometry.window_size)
    return {
        "cmp": int(cmp.sum()),
        "sel": int(sel.sum()),
        "win": int(win.sum()),
        "dense": length * (length + 1) // 2,
    }


def part_costs(
    config: NSAConfig, batch: int, length: int, element_bytes: int, phase: str
) -> dict[str, Cost]:
    """Cost of each part of the core, of the whole core ("total") and of dense attention ("dense").

    Forward: 2 (Dk + Dv) operations per pair and head (q.k and p.v), 2 Dk for selection. Backward: 5
    products where forward has 2; selection has none. The total's bytes are the core's inputs and
    outputs alone.
    """
    if phase == "both":
        forward, backward = (
            part_costs(config, batch, length, element_bytes, p) for p in ("forward", "backward")
        )
        return {
            n: Cost(f.flops + backward[n].flops, f.bytes + backward[n].bytes)
            for n, f in forward.items()
        }
    geometry, dk, dv = config.geometry, config.qk_dim, config.v_dim
    pairs = visible_pairs(geometry, length)
    tokens, compressed = batch * length, batch * geometry.num_compressed(length)
    heads, kv = config.n_heads, config.n_kv_heads
    is_backward = phase == "backward"
    per_pair = 2 * batch * heads * ((3 * dk + 2 * dv) if is_backward else (dk + dv))
    sizes = {"q": tokens * heads * dk, "o": tokens * heads * dv, "kv": tokens * kv * (dk + dv)}
    sizes = {name: count * element_bytes for name, count in sizes.items()}
    sizes |= {"kv_cmp": compressed * kv * (dk + dv) * element_bytes, "lse": tokens * heads * 4}
    sizes |= {
        "blocks": tokens * kv * geometry.num_selected_blocks * 4,
        "gates": tokens * heads * 12,
    }
    twice = 2 if is_backward else 1  # every input's gradient is written

    def attention(name: str, keys: str, extra: int = 0) -> Cost:
        moved = twice * (sizes["q"] + sizes[keys]) + twice * sizes["o"] + sizes["lse"] + extra
        return Cost(per_pair * pairs[name], moved)

    select = Cost(
        2 * batch * heads * dk * pairs["cmp"], sizes["q"] + sizes["kv_cmp"] // 2 + sizes["lse"]
    )
    costs = {
        "compress": Cost(
            compressed * kv * (dk + dv) * geometry.compress_block_size,
            sizes["kv"] + sizes["kv_cmp"],
        ),
        "cmp": attention("cmp", "kv_cmp"),
        "select": Cost(0, 0) if is_backward else select,
        "sel": attention("sel", "kv", sizes["blocks"]),
        "win": attention("win", "kv"),
        "combine": Cost(
            6 * twice * tokens * heads * dv, twice * (3 * sizes["o"] + sizes["gates"]) + sizes["o"]
        ),
        "dense": attention("dense", "kv"),
    }
    moved = twice * (sizes["q"] + sizes["kv"] + sizes["gates"]) + sizes["o"]
    return costs | {"total": Cost(sum(costs[part].flops for part in PARTS), moved)}


def measure_peaks(device: str, dtype: torch.dtype) -> Peaks:
    """Best of several large matrix products in ``dtype`` and of several copies; about a second."""
    cuda = device.startswith("cuda")
    size, copied = (8192, 1 << 30) if cuda else (512, 1 << 25)
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    source = torch.zeros(copied, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)

    def seconds(work: Callable[[], object], repeats: int) -> float:
        best = float("inf")
        for _ in range(repeats):
            if cuda:
                torch.cuda.synchronize()
            start = time.perf_counter()
            work()
            if cuda:
                torch.cuda.synchronize()
            best = min(best, time.perf_counter() - start)
        return best

    product = seconds(lambda: torch.mm(a, b), 10)
    return Peaks(2 * size**3 / product, 2 * copied / seconds(lambda: target.copy_(source), 10))
