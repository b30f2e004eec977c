"""nsa_decode on a GPU: no synchronisation, and a captured ragged batch replays with other values.

`nsa verify` judges the results, with its histories of pages.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nsa_core import (
    InvalidInput,
    LayerPages,
    NSAttention,
    PagedKV,
    decode_rows,
    nsa_decode,
    rope_angles,
)
from nsa_core.contract import SLOTS
from nsa_core.decode import chunks
from nsa_core.layer.gating import compute_gates
from nsa_core.plan.registry import default_registry
from nsa_verify.problems.cases import config_of
from nsa_verify.problems.findings import bits

pytestmark = pytest.mark.gpu

DEVICE, SEQUENCES, ROWS, MAX_LEN, PAGE = "cuda", 3, 40, 256, 64
CONFIG = config_of(8, 2, 32, 32, (16, 8, 32, 4, 48))
BACKENDS = [
    entry.name
    for entry in default_registry().entries
    if entry.status == "ready" and entry.spec and set(SLOTS) <= set(entry.spec.slots)
    if all(slot.decode for name, slot in entry.spec.slots.items() if name != "combine")
]


class Engine:
    """One layer, its pages in the layout [P, G, page, D], and the tensors of a step."""

    def __init__(self, backend: str, kv_dtype: torch.dtype | None = None) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.attn = NSAttention(CONFIG).to(DEVICE).requires_grad_(False)
        self.backend, self.kv_dtype = backend, kv_dtype
        generator = torch.Generator().manual_seed(2)
        columns = MAX_LEN // PAGE
        table = torch.randperm(SEQUENCES * columns, generator=generator).view(SEQUENCES, columns)
        self.table = table.int().to(DEVICE)
        rings = torch.arange(2 * SEQUENCES).view(SEQUENCES, 2).int().to(DEVICE)
        self.pages = LayerPages(
            self._new(PAGE // 8, self.table),
            self._new(PAGE, self.table),
            self._new(48, rings),
            self._new(32, rings, quantized=False),
        )
        self.x = torch.zeros(ROWS, CONFIG.dim, device=DEVICE)
        self.cu_seqlens = torch.zeros(SEQUENCES + 1, dtype=torch.int32, device=DEVICE)
        self.lengths = torch.zeros(SEQUENCES, dtype=torch.int32, device=DEVICE)
        self.rope = rope_angles(CONFIG, MAX_LEN, device=DEVICE)

    def _new(self, rows: int, table: torch.Tensor, quantized: bool = True) -> PagedKV:
        number, scales = table.numel(), None
        k, v = torch.full((2, number, 2, rows, 32), torch.nan, device=DEVICE)
        if quantized and self.kv_dtype is not None:
            k, v = k.to(self.kv_dtype), v.to(self.kv_dtype)
            scales = torch.rand(number, 2, 2, device=DEVICE) / 50 + 0.01
        return PagedKV(k.transpose(1, 2), v.transpose(1, 2), table, scales)

    def set(self, counts: tuple[int, ...], seed: int) -> None:
        """Set the inputs of a step that adds ``counts`` tokens; the padding is NaN."""
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(ROWS, CONFIG.dim, generator=generator)
        x[sum(counts) :] = torch.nan
        self.x.copy_(x)
        self.cu_seqlens.copy_(torch.tensor([0, *counts]).cumsum(0))
        self.lengths.add_(torch.tensor(counts, dtype=torch.int32).to(DEVICE))

    def step(self, on_host: Any = None) -> torch.Tensor:
        attn, rows = self.attn, decode_rows(self.cu_seqlens, self.lengths, ROWS, on_host)
        q, k, v = attn.heads(self.x)
        gates = compute_gates(attn.gate, self.x)
        return nsa_decode(
            q, k, v, gates, self.pages, rows, config=CONFIG, rope=self.rope,
            phi=(attn.phi_k, attn.phi_v), max_len=MAX_LEN, backends=self.backend,
        )  # fmt: skip


KV_DTYPES = pytest.mark.parametrize("kv_dtype", [None, torch.float8_e4m3fn, torch.int8])


@KV_DTYPES
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_captured_ragged_batch_replays_with_other_values(
    backend: str, kv_dtype: torch.dtype | None
) -> None:
    eager, captured = Engine(backend, kv_dtype), Engine(backend, kv_dtype)
    for one, other in zip(eager.pages, captured.pages):
        if one.scales is not None:
            other.scales.copy_(one.scales)
    steps = [(30, 5, 0), (1, 1, 38), (1, 1, 1), (0, 20, 3), (1, 1, 1), (9, 0, 8)]
    for engine in (eager, captured):
        engine.set(steps[0], 0)
        engine.step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    captured.cu_seqlens.zero_()  # a step without tokens writes nothing
    captured.step()
    with torch.cuda.graph(graph):
        o = captured.step()
    for seed, counts in enumerate(steps[1:], 1):
        for engine in (eager, captured):
            engine.set(counts, seed)
        expected = eager.step()
        graph.replay()
        assert torch.equal(bits(o), bits(expected)), counts
        assert (o[sum(counts) :] == 0).all()
        for one, other in zip(eager.pages, captured.pages):
            assert torch.equal(one.k.view(torch.uint8), other.k.view(torch.uint8))
            assert torch.equal(one.v.view(torch.uint8), other.v.view(torch.uint8))


@KV_DTYPES
@pytest.mark.parametrize("on_host", [None, ([0, 30, 35, 35], [30, 5, 0])], ids=["rows", "chunk"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_it_does_not_synchronise(
    backend: str, on_host: Any, kv_dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "MIN_ROWS", {"cuda": 16})
    engine = Engine(backend, kv_dtype)
    engine.set((30, 5, 0), 0)
    engine.step(on_host)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        engine.step(on_host)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_chunk_equals_its_rows_and_is_not_captured(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "MIN_ROWS", {"cuda": 16})
    rows, together = Engine(backend), Engine(backend)
    for engine in (rows, together):
        engine.set((20, 18, 0), 0)
    on_host = ([0, 20, 38, 38], [20, 18, 0])
    torch.testing.assert_close(together.step(on_host), rows.step(), rtol=1e-3, atol=1e-3)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(InvalidInput, match="without on_host"), torch.cuda.graph(graph):
        together.step(on_host)


def test_values_are_checked_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(BACKENDS[0])
    engine.set((30, 5, 0), 0)
    engine.table[0, 0] = SEQUENCES * MAX_LEN
    monkeypatch.setenv("NSA_CHECK", "1")
    with pytest.raises(InvalidInput, match="must name one of"):
        engine.step()
