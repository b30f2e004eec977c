"""Steps over a cache on a GPU, for every backend that decodes: CUDA graphs, no synchronisation, no
new memory.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch

from nsa_core import InvalidInput, NSACache, NSAConfig, NSAttention
from nsa_core.contract import SLOTS
from nsa_core.dispatch.registry import default_registry
from nsa_verify.judge.tensor import judge

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
CONFIG = NSAConfig(
    dim=256,
    n_heads=8,
    n_kv_heads=2,
    head_dim=32,
    compress_block_size=16,
    compress_stride=8,
    select_block_size=32,
    num_selected_blocks=4,
    window_size=48,
)
ROOM = 300
BACKENDS = [
    entry.name
    for entry in default_registry().entries
    if entry.status == "ready" and entry.spec and set(SLOTS) <= set(entry.spec.slots)
    if all(slot.decode for name, slot in entry.spec.slots.items() if name != "combine")
]
PAGES = pytest.mark.parametrize("page_size", [None, 64])


@pytest.fixture(params=BACKENDS)
def attn(request: pytest.FixtureRequest) -> NSAttention:
    """A layer in fp32 (where two ways to add differ too little to choose other blocks) on one
    backend.
    """
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layer = NSAttention(CONFIG, backends=dict.fromkeys(SLOTS, request.param)).to(DEVICE)
    return layer.requires_grad_(False)


def tokens(
    batch: int, length: int, seed: int = 1, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(batch, length, CONFIG.dim, device=DEVICE, dtype=dtype, generator=generator)


def truth(attn: NSAttention, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The layer over whole sequences: in fp64 and in the layer's dtype."""
    exact = copy.deepcopy(attn).double()
    exact.backends = "sdpa"
    return exact(x.double()), attn(x)


def assert_right(y: torch.Tensor, golden: torch.Tensor, rounded: torch.Tensor) -> None:
    verdict = judge(y, golden, rounded, golden.abs(), torch.float32)
    assert verdict, verdict.why


def new_cache(attn: NSAttention, page_size: int | None, **options: object) -> NSACache:
    cache = attn.new_cache(2, ROOM, page_size=page_size, **options)
    for store in cache.stores.tensors():
        store.fill_(torch.nan)
    return cache


class Graph:
    """A captured step of ``rows`` rows: put the rows into ``x``, the counts into ``new``, replay,
    read ``y``.
    """

    def __init__(
        self, attn: NSAttention, cache: NSACache, rows: int, counted: bool = False
    ) -> None:
        self.x = torch.zeros(
            cache.batch, rows, CONFIG.dim, device=DEVICE, dtype=attn.out.weight.dtype
        )
        self.new = (
            torch.full((cache.batch,), rows, dtype=torch.int32, device=DEVICE) if counted else None
        )
        cache.reserve_workspace(rows)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.y = attn(self.x, cache=cache, new=self.new)

    def __call__(self, x: torch.Tensor, new: list[int] | None = None) -> torch.Tensor:
        self.x.copy_(x)
        if new is not None:
            assert self.new is not None
            self.new.copy_(torch.tensor(new, dtype=torch.int32))
        self.graph.replay()
        return self.y.clone()


@pytest.fixture
def no_synchronisation() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@PAGES
def test_replayed_steps_equal_whole_sequences(attn: NSAttention, page_size: int | None) -> None:
    x, caches = tokens(2, ROOM), [new_cache(attn, page_size) for _ in range(2)]
    golden, rounded = truth(attn, x[:, :200])
    for cache in caches:
        attn(x[:, :70], cache=cache)
    caches[0].reserve(ROOM)
    step = Graph(attn, caches[0], 1)
    assert caches[0].lengths.tolist() == [70, 70]  # a capture runs nothing
    for run, cache in ((step, caches[0]), (lambda row: attn(row, cache=caches[1]), caches[1])):
        y = torch.cat([run(x[:, t : t + 1]) for t in range(70, 200)], 1)
        assert_right(y, golden[:, 70:], rounded[:, 70:])
        cache.check()
        assert cache.host_lengths() == [200, 200]


def test_replayed_ragged_steps_equal_whole_sequences(attn: NSAttention) -> None:
    x, cache = tokens(2, ROOM), new_cache(attn, 64)
    golden, rounded = truth(attn, x)
    cache.reserve(ROOM)
    step, have, parts = Graph(attn, cache, 5, counted=True), [0, 0], [[], []]
    for turn in range(40):
        new = [turn % 6, (turn * 7 + 3) % 6]
        rows = torch.full_like(x[:, :5], torch.nan)
        for b, n in enumerate(new):
            rows[b, :n] = x[b, have[b] : have[b] + n]
        y = step(rows, new)
        for b, n in enumerate(new):
            assert (y[b, n:] == 0).all()
            parts[b].append(y[b, :n])
            have[b] += n
    for b, length in enumerate(have):
        assert_right(
            torch.cat(parts[b])[None], golden[b : b + 1, :length], rounded[b : b + 1, :length]
        )
    assert cache.host_lengths() == have


def test_a_step_past_the_end_is_masked_and_reported(attn: NSAttention) -> None:
    x, cache = tokens(2, ROOM), new_cache(attn, None)
    attn(x[:, : ROOM - 1], cache=cache, new=[ROOM - 1, 50])
    step = Graph(attn, cache, 1)
    step(x[:, :1])
    cache.check()
    stores = (cache.stores.sel, cache.stores.cmp, cache.stores.win, cache.stores.raw)
    kept = [pair.k[0].clone() for pair in stores]
    y = step(x[:, :1])
    assert (y[0] == 0).all()
    assert (y[1] != 0).any()
    for pair, before in zip(stores, kept):
        torch.testing.assert_close(pair.k[0], before, rtol=0, atol=0, equal_nan=True)
    with pytest.raises(InvalidInput, match=f"sequence 0 has {ROOM} tokens and room for {ROOM}"):
        cache.check()
    assert cache.host_lengths() == [ROOM, 52]
    with pytest.raises(InvalidInput, match="1 more do not fit"):
        attn(x[:, :1], cache=cache)


@PAGES
def test_steps_do_not_synchronise(
    attn: NSAttention, page_size: int | None, no_synchronisation: None
) -> None:
    torch.cuda.set_sync_debug_mode("default")
    attn.bfloat16()
    x, cache = tokens(2, ROOM, dtype=torch.bfloat16), new_cache(attn, page_size)
    attn(x[:, :40], cache=cache)
    attn(x[:, 40:41], cache=cache)
    attn(x[:, 41:44], cache=cache, new=[3, 1])
    counts = torch.tensor([1, 0], dtype=torch.int32, device=DEVICE)
    torch.cuda.set_sync_debug_mode("error")
    for t in range(44, 110):  # across pages and blocks
        attn(x[:, t : t + 1], cache=cache)
    attn(x[:, 110:113], cache=cache, new=[3, 1])
    attn(x[:, 113:114], cache=cache, new=counts)


@PAGES
def test_eager_steps_take_no_new_segment(attn: NSAttention, page_size: int | None) -> None:
    attn.bfloat16()
    x, caches = (
        tokens(2, ROOM, dtype=torch.bfloat16),
        [new_cache(attn, page_size) for _ in range(2)],
    )
    for cache in caches:
        attn(x[:, :30], cache=cache)
    caches[0].reserve_workspace()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()
    outs = [attn(x[:, t : t + 1], cache=caches[0]) for t in range(30, ROOM)]
    after = torch.cuda.memory_stats()
    for key in ("segment.all.allocated", "num_alloc_retries"):
        assert after[key] == before[key], key
    assert torch.equal(
        torch.cat(outs, 1),
        torch.cat([attn(x[:, t : t + 1], cache=caches[1]) for t in range(30, ROOM)], 1),
    )


def test_a_replay_calls_no_allocator(attn: NSAttention) -> None:
    attn.bfloat16()
    x, cache = tokens(2, ROOM, dtype=torch.bfloat16), new_cache(attn, 64)
    cache.reserve(ROOM)
    step = Graph(attn, cache, 1)
    step.x.copy_(x[:, :1])
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()
    for _ in range(50):
        step.graph.replay()
    torch.cuda.synchronize()
    after = torch.cuda.memory_stats()
    for key in ("allocation.all.allocated", "segment.all.allocated"):
        assert after[key] == before[key], key
    assert cache.host_lengths() == [50, 50]


@PAGES
def test_between_replays_the_cache_can_be_changed(attn: NSAttention, page_size: int | None) -> None:
    """Speculative decoding: a graph of five rows, and a crop of what was not wanted; then other
    sequences.
    """
    # one more than two sequences need, for the snapshot
    pages = {"num_pages": 11} if page_size else {}
    x, cache = tokens(2, ROOM), new_cache(attn, page_size, max_rollback=5, **pages)
    golden, rounded = truth(attn, x[:, :60])
    cache.reserve(ROOM)
    step, parts = Graph(attn, cache, 5), []
    for have in range(0, 40, 2):
        parts.append(step(torch.cat([x[:, have : have + 2], tokens(2, 3, seed=have)], 1))[:, :2])
        cache.crop(have + 2)
        cache.reserve(ROOM)
    assert_right(torch.cat(parts, 1), golden[:, :40], rounded[:, :40])
    prefix = cache.snapshot(0)
    cache.reset()
    cache.load(prefix, 1)
    cache.reserve(ROOM)
    assert cache.host_lengths() == [0, 40]
    y = step(torch.stack([x[1, :5], x[0, 40:45]]))
    assert_right(y[1:], golden[:1, 40:45], rounded[:1, 40:45])
    assert_right(y[:1], golden[1:, :5], rounded[1:, :5])
    cache.check()


@PAGES
def test_long_steps_over_a_filled_cache(attn: NSAttention, page_size: int | None) -> None:
    """Chunks of far more rows than the rings are made for, ragged, and nothing asked of the device
    on the way.
    """
    x, cache = tokens(2, ROOM), new_cache(attn, page_size, max_step=2)
    golden, rounded = truth(attn, x)
    attn(x[:, :60], cache=cache)
    counts = torch.tensor([160, 90], device=DEVICE, dtype=torch.int32)
    cache.reserve(ROOM)
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        y = attn(x[:, 60:220], cache=cache, new=counts)
    finally:
        torch.cuda.set_sync_debug_mode(before)
    assert_right(y[:1], golden[:1, 60:220], rounded[:1, 60:220])
    assert_right(y[1:, :90], golden[1:, 60:150], rounded[1:, 60:150])
    assert (y[1, 90:] == 0).all()
    y = attn(torch.stack([x[0, 220:300], x[1, 150:230]]), cache=cache)
    assert_right(y[:1], golden[:1, 220:300], rounded[:1, 220:300])
    assert_right(y[1:], golden[1:, 150:230], rounded[1:, 150:230])
