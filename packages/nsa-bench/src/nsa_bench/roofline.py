"""Roofline floors: the minimum operations and bytes of a shape, at the machine's peak rates."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from nsa_core.config import NSAConfig
from nsa_core.flops import visible_pairs

if TYPE_CHECKING:
    import torch

# The kernels of a call. In a sequence of at most n * l' tokens, causal stands for select and sel.
PARTS = ("compress", "cmp", "select", "sel", "causal", "win", "combine")


@dataclasses.dataclass(frozen=True)
class Peaks:
    """Peak rates measured in this run.

    Attributes:
        flops_per_s: Rate of a large matrix product.
        bytes_per_s: Rate of the fastest of several calls that read large tensors, and write
            nothing, a third as much or as much. It counts bytes read and written.
    """

    flops_per_s: float
    bytes_per_s: float

    def floor_ms(self, cost: Cost) -> float:
        """Return the minimum time of ``cost`` at these rates, in ms."""
        return max(cost.flops / self.flops_per_s, cost.bytes / self.bytes_per_s) * 1e3


@dataclasses.dataclass(frozen=True)
class Cost:
    """Floating-point operations, and the bytes that must cross the memory bus at least once."""

    flops: int
    bytes: int


def part_costs(
    config: NSAConfig, batch: int, length: int, element_bytes: int, phase: str
) -> dict[str, Cost]:
    """Return the cost of each part of the core, of the core ("total") and of dense ("dense").

    Forward needs 2 (Dk + Dv) operations per visible pair and head (q.k and p.v), and 2 Dk for
    selection. Backward has 5 products where forward has 2, and none for selection. The bytes of the
    total are those of the core's inputs and outputs alone. A sequence of at most n * l' tokens
    needs no selection: every token selects all its blocks.

    Args:
        config: Heads, widths and block sizes.
        batch: Number of sequences.
        length: Tokens per sequence.
        element_bytes: Bytes per element of q, k, v and o.
        phase: "forward", "backward" or "both".
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
    twice = 2 if is_backward else 1  # backward also writes the gradient of every input

    def attention(name: str, keys: str, extra: int = 0) -> Cost:
        moved = twice * (sizes["q"] + sizes[keys]) + twice * sizes["o"] + sizes["lse"] + extra
        return Cost(per_pair * pairs[name], moved)

    select = Cost(
        2 * batch * heads * dk * pairs["cmp"], sizes["q"] + sizes["kv_cmp"] // 2 + sizes["lse"]
    )
    selects = not is_backward and length > geometry.num_selected_blocks * geometry.select_block_size
    costs = {
        "compress": Cost(
            compressed * kv * (dk + dv) * geometry.compress_block_size,
            sizes["kv"] + sizes["kv_cmp"],
        ),
        "cmp": attention("cmp", "kv_cmp"),
        "select": select if selects else Cost(0, 0),
        "sel": attention("sel", "kv", sizes["blocks"]),
        "causal": attention("sel", "kv"),
        "win": attention("win", "kv"),
        "combine": Cost(
            6 * twice * tokens * heads * dv, twice * (3 * sizes["o"] + sizes["gates"]) + sizes["o"]
        ),
        "dense": attention("dense", "kv"),
    }
    moved = twice * (sizes["q"] + sizes["kv"] + sizes["gates"]) + sizes["o"]
    parts = ("compress", "cmp", "select", "sel", "win", "combine")
    return costs | {"total": Cost(sum(costs[part].flops for part in parts), moved)}


def measure_peaks(device: str, dtype: torch.dtype) -> Peaks:
    """Measure peak rates in about a second, each the best of several calls.

    GPU memory reads faster than it writes, so copies alone would understate its rate.
    """
    import torch

    cuda = device.startswith("cuda")
    size, moved = 512, 1 << 27
    if cuda:  # large, because a call takes microseconds to reach its rate
        free, _ = torch.cuda.mem_get_info(device)
        size, moved = 8192, min(1 << 33, free // 2 & -(1 << 20))
    generator = torch.Generator(device).manual_seed(0)  # a resumed run's random state must not move
    a, b = (torch.randn(size, size, generator=generator, device=device).to(dtype) for _ in range(2))
    x = torch.zeros(4, moved // 16, dtype=torch.float32, device=device)
    halves = x.view(2, -1)

    def seconds(work: Callable[[], object]) -> float:
        """Return the time of a call in the best of three runs of five, which hide its launch."""
        best = float("inf")
        for _ in range(3):
            if cuda:
                torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(5):
                work()
            if cuda:
                torch.cuda.synchronize()
            best = min(best, (time.perf_counter() - start) / 5)
        return best

    rows = x.view(-1, 4096)
    calls: tuple[Callable[[], object], ...] = (
        lambda: halves[0].copy_(halves[1]),
        lambda: torch.addcmul(x[0], x[1], x[2], out=x[3]),
        lambda: rows.sum(1),
    )
    fastest = min(map(seconds, calls))  # each reads or writes all bytes of x
    return Peaks(2 * size**3 / seconds(lambda: torch.mm(a, b)), moved / fastest)
