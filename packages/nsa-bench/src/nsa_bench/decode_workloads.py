"""The workloads of one decode cell, on the same cache.

They are whole steps, the slots within a step, the step of a layer, and dense baselines.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from nsa_bench.baselines import is_installed
from nsa_bench.cells import Cell
from nsa_bench.clocks import CpuClock, CudaClock
from nsa_bench.result import LAYER, UNFUSED
from nsa_bench.roofline import Cost
from nsa_bench.timing import MAX_SAMPLES, Performance, Workload, summarise
from nsa_core.cache.state import NewTokens
from nsa_core.config import NSAConfig
from nsa_core.contract import SLOTS, BlockTables, DecodeCall
from nsa_core.dtypes import stats_dtype
from nsa_core.layer.module import NSAttention
from nsa_core.plan.plan import Plan

LAYER_ROOM = 2048  # free space in a layer's cache for the timed steps, in tokens


@dataclasses.dataclass(frozen=True)
class State:
    """A filled cache, and the queries and gates of one decode step."""

    q: torch.Tensor  # [B, 1, Hq, Dk]
    gates: torch.Tensor  # [B, 1, Hq, 3]
    stores: Mapping[str, torch.Tensor]
    call: DecodeCall

    @property
    def dense(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values [B, S, G, D] for dense attention: the same memory, unpaged."""
        batch, length = len(self.q), self.call.max_len
        k, v = (self.stores[name] for name in ("k_sel", "v_sel"))
        k, v = (x.view(batch, -1, *x.shape[2:])[:, :length] for x in (k, v))
        return k, v


def make_state(cell: Cell, device: str, seed: int) -> State:
    """Create a state of random tensors; pages are in random order, as in a long-running server."""
    dtype, config = getattr(torch, cell.dtype), cell.config
    generator, geometry = torch.Generator(device).manual_seed(seed), config.geometry
    block = geometry.select_block_size
    size = cell.page_size or -(-cell.length // block) * block
    pages = -(-cell.length // size)

    def normal(*shape: int, kind: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=kind, device=device)

    stores = {}
    rows = {"cmp": size // geometry.compress_stride, "sel": size, "win": geometry.window_size}
    for branch, count in rows.items():
        outer = cell.batch if branch == "win" else cell.batch * pages
        for name, width in (("k", config.qk_dim), ("v", config.v_dim)):
            stores[f"{name}_{branch}"] = normal(outer, count, config.n_kv_heads, width)
    table = (
        torch.randperm(cell.batch * pages, generator=generator, device=device)
        .int()
        .view(cell.batch, pages)
    )
    lengths = torch.full((cell.batch,), cell.length, dtype=torch.int32, device=device)
    rings = torch.arange(cell.batch, dtype=torch.int32, device=device)[:, None]
    tables = BlockTables(table, table, rings, rings)
    call = DecodeCall(geometry, config.softmax_scale, lengths - 1, lengths, tables, cell.length)
    gates = normal(cell.batch, 1, config.n_heads, 3, kind=stats_dtype(dtype)).sigmoid()
    return State(normal(cell.batch, 1, config.n_heads, config.qk_dim), gates, stores, call)


def one_by_one(plan: Plan, x: State, mark: Callable[[str], Any] = lambda slot: None) -> Any:
    """Run the step slot by slot; call ``mark`` with the name of each slot that has ended."""
    s = x.stores
    o_cmp, lse = plan.cmp(x.q, s["k_cmp"], s["v_cmp"], call=x.call)
    mark("cmp")
    blocks = plan.select(x.q, s["k_cmp"], lse, call=x.call)
    mark("select")
    o_sel, _ = plan.sel(x.q, s["k_sel"], s["v_sel"], blocks, call=x.call)
    mark("sel")
    o_win, _ = plan.win(x.q, s["k_win"], s["v_win"], call=x.call)
    mark("win")
    o = plan.combine(x.gates, o_cmp, o_sel, o_win)
    mark("combine")
    return o


def within_step(
    plan: Plan, x: State, clock: CpuClock | CudaClock, budget_s: float
) -> dict[str, Performance]:
    """Time each slot within the step.

    A slot timed alone would find its data in the caches, or pay for a graph launch of its own.
    """
    samples: dict[str, list[float]] = {slot: [] for slot in SLOTS}
    sample, method = clock.slot_times(lambda part_ended: one_by_one(plan, x, part_ended))
    started = time.perf_counter()
    while len(samples["cmp"]) < MAX_SAMPLES and (
        len(samples["cmp"]) < 5 or time.perf_counter() < started + budget_s
    ):
        for slot, time_ms in sample().items():
            samples[slot].append(time_ms)
    return {slot: summarise(times, method) for slot, times in samples.items()}


def fused_step(plan: Plan, x: State) -> Any:
    """Run the step with the plan's fused kernel."""
    s = x.stores
    names = ("k_cmp", "v_cmp", "k_sel", "v_sel", "k_win", "v_win")
    return plan.fused["step"](x.q, x.gates, *(s[name] for name in names), call=x.call)


def step_workloads(
    name: str, plan: Plan, state: Callable[[], State], cell: Cell, device: str
) -> list[Workload]:
    """Return workloads: the step, its slots one by one if it is fused, and a layer's step.

    Args:
        name: Name of the plan's combination, the first workload's key.
        plan: The plan.
        state: Returns the cache and the queries; called when a workload is set up.
        cell: The cell of ``state``.
        device: Its device.
    """

    def of_state(step: Callable[[Plan, State], Any]) -> Callable[[], Callable[[], Any]]:
        def make() -> Callable[[], Any]:
            x = state()
            return lambda: step(plan, x)

        return make

    workloads = [Workload(name, of_state(one_by_one), True)]
    if "step" in plan.fused:
        workloads = [
            Workload(name, of_state(fused_step), True),
            dataclasses.replace(workloads[0], key=name + UNFUSED),
        ]
    layer = Workload(name + LAYER, lambda: layer_step(plan, cell, device), True, has_state=True)
    return [*workloads, layer]


def layer_step(plan: Plan, cell: Cell, device: str) -> Callable[[], Any]:
    """Return a call that runs one decode step of a whole layer with default options.

    The cache is filled to the cell's length. Every call appends a token; the cache has room for
    LAYER_ROOM of them.
    """
    config, dtype = plan.config, getattr(torch, cell.dtype)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        attn = NSAttention(config).to(device, dtype).requires_grad_(False)
        x = torch.randn(cell.batch, 1, config.dim).to(device, dtype)
    cache = attn.new_cache(
        cell.batch,
        cell.length + LAYER_ROOM,
        page_size=cell.page_size,
        max_step=1,
        plan=plan,
        dtype=dtype,
    )
    before = [cell.length - 1] * cell.batch
    cache.admit(before)
    for store in cache.kv.tensors():
        store.normal_()
    cache.advance(NewTokens(cell.length - 1, before, None, True))
    return lambda: attn(x, cache=cache)


def dense_workloads(x: State, config: NSAConfig) -> tuple[list[Workload], dict[str, str]]:
    """Return the dense decode baselines, and the reason for each that cannot run here.

    They are SDPA and flash-attn, over the whole cache.
    """
    (k, v), scale = x.dense, config.softmax_scale
    groups = config.n_heads // config.n_kv_heads

    def sdpa() -> torch.Tensor:
        q, keys, values = (t.transpose(1, 2) for t in (x.q, k, v))
        # One query sees all keys, so no mask is needed.
        return F.scaled_dot_product_attention(q, keys, values, scale=scale, enable_gqa=groups > 1)

    workloads, skipped = [Workload("dense SDPA", lambda: sdpa, True)], dict[str, str]()
    if not x.q.is_cuda:
        return workloads, skipped
    name = "dense flash-attn with kvcache"
    if not is_installed("flash_attn"):
        skipped[name] = "the package flash-attn is not installed"
    elif x.q.dtype not in (torch.bfloat16, torch.float16) or config.qk_dim != config.v_dim:
        skipped[name] = "it requires bfloat16 or float16, and equal query and value head widths"
    else:
        from flash_attn import flash_attn_with_kvcache  # type: ignore[import-not-found, unused-ignore]

        lengths = x.call.lengths
        workloads.append(
            Workload(
                name,
                lambda: (
                    lambda: flash_attn_with_kvcache(
                        x.q, k, v, cache_seqlens=lengths, softmax_scale=scale
                    )
                ),
            )
        )
    return workloads, skipped


def step_costs(config: NSAConfig, batch: int, length: int, element_bytes: int) -> dict[str, Cost]:
    """Return the cost of each slot, of the whole step ("total") and of dense attention ("dense").

    Every row is read once. The total counts compressed keys once, because a fused step can read
    them once for both cmp and select.
    """
    geometry, heads, kv = config.geometry, config.n_heads, config.n_kv_heads
    dk, dv, last_token = config.qk_dim, config.v_dim, length - 1
    block = geometry.select_block_size
    chosen = min(geometry.num_selected_blocks, last_token // block + 1)
    tokens = {
        "cmp": geometry.num_compressed(length),
        "win": min(geometry.window_size, length),
        "dense": length,
    }
    tokens["sel"] = (chosen - 1) * block + last_token % block + 1
    qo_bytes = batch * heads * (dk + dv) * element_bytes  # q and o
    costs = {
        name: Cost(
            2 * batch * heads * (dk + dv) * count,
            batch * kv * (dk + dv) * count * element_bytes + qo_bytes,
        )
        for name, count in tokens.items()
    }
    scored = batch * kv * dk * tokens["cmp"] * element_bytes
    costs["select"] = Cost(
        2 * batch * heads * dk * tokens["cmp"], scored + batch * heads * dk * element_bytes
    )
    costs["combine"] = Cost(6 * batch * heads * dv, batch * heads * (4 * dv * element_bytes + 12))
    kv_bytes = sum(costs[name].bytes - qo_bytes for name in ("cmp", "sel", "win"))
    total = Cost(sum(costs[slot].flops for slot in SLOTS), kv_bytes + qo_bytes + batch * heads * 12)
    return costs | {"total": total}
