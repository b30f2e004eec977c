"""Decode steps on a GPU for every backend with decode forms: graphs, synchronisation, memory."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch

from nsa_core import InvalidInput, NSACache, NSAttention
from nsa_core.contract import SLOTS
from nsa_core.plan.registry import default_registry
from nsa_verify.judge.tensor import judge
from nsa_verify.problems.cases import config_of

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
CONFIG = config_of(8, 2, 32, 32, (16, 8, 32, 4, 48))
CAPACITY = 300
BACKENDS = [
    entry.name
    for entry in default_registry().entries
    if entry.status == "ready" and entry.spec and set(SLOTS) <= set(entry.spec.slots)
    if all(slot.decode for name, slot in entry.spec.slots.items() if name != "combine")
]
PAGES = pytest.mark.parametrize("page_size", [None, 64])


@pytest.fixture(params=BACKENDS)
def attn(request: pytest.FixtureRequest) -> NSAttention:
    """A layer on one backend, in fp32, where rounding differences do not change the selection."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layer = NSAttention(CONFIG, backends=dict.fromkeys(SLOTS, request.param)).to(DEVICE)
    return layer.requires_grad_(False)


def make_tokens(
    batch: int, length: int, seed: int = 1, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(batch, length, CONFIG.dim, device=DEVICE, dtype=dtype, generator=generator)


def full_forward(attn: NSAttention, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the layer's output on whole sequences, in fp64 on sdpa and in the layer's dtype."""
    float64_layer = copy.deepcopy(attn).double()
    float64_layer.backends = "sdpa"
    return float64_layer(x.double()), attn(x)


def assert_correct(y: torch.Tensor, truth: torch.Tensor, rounded: torch.Tensor) -> None:
    verdict = judge(y, truth, rounded, truth.abs(), torch.float32)
    assert verdict, verdict.why


def new_cache(attn: NSAttention, page_size: int | None, **options: object) -> NSACache:
    cache = attn.new_cache(2, CAPACITY, page_size=page_size, **options)
    for store in cache.kv.tensors():
        store.fill_(torch.nan)
    return cache


class Graph:
    """A captured decode step of ``rows`` rows per sequence.

    A call copies its rows to ``x`` and their counts to ``new``, replays the graph, and returns a
    copy of ``y``.
    """

    def __init__(
        self, attn: NSAttention, cache: NSACache, rows: int, counted: bool = False
    ) -> None:
        self.x = torch.zeros(
            cache.batch, rows, CONFIG.dim, device=DEVICE, dtype=attn.out.weight.dtype
        )
        # Every second element of a longer tensor: metadata may have any strides.
        counts = torch.full((2 * cache.batch,), rows, dtype=torch.int32, device=DEVICE)
        self.new = counts[::2] if counted else None
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
def test_replayed_steps_equal_a_full_forward(attn: NSAttention, page_size: int | None) -> None:
    x, caches = make_tokens(2, CAPACITY), [new_cache(attn, page_size) for _ in range(2)]
    truth, rounded = full_forward(attn, x[:, :200])
    for cache in caches:
        attn(x[:, :70], cache=cache)
    caches[0].reserve(CAPACITY)
    step = Graph(attn, caches[0], 1)
    assert caches[0].lengths.tolist() == [70, 70]  # a capture does not run the kernels
    for run, cache in ((step, caches[0]), (lambda row: attn(row, cache=caches[1]), caches[1])):
        y = torch.cat([run(x[:, t : t + 1]) for t in range(70, 200)], 1)
        assert_correct(y, truth[:, 70:], rounded[:, 70:])
        cache.check()
        assert cache.host_lengths() == [200, 200]


def test_replayed_ragged_steps_equal_a_full_forward(attn: NSAttention) -> None:
    x, cache = make_tokens(2, CAPACITY), new_cache(attn, 64)
    truth, rounded = full_forward(attn, x)
    cache.reserve(CAPACITY)
    step, lengths, outputs = Graph(attn, cache, 5, counted=True), [0, 0], [[], []]
    for index in range(40):
        new = [index % 6, (index * 7 + 3) % 6]
        rows = torch.full_like(x[:, :5], torch.nan)
        for b, n in enumerate(new):
            rows[b, :n] = x[b, lengths[b] : lengths[b] + n]
        y = step(rows, new)
        for b, n in enumerate(new):
            assert (y[b, n:] == 0).all()
            outputs[b].append(y[b, :n])
            lengths[b] += n
    for b, length in enumerate(lengths):
        assert_correct(
            torch.cat(outputs[b])[None], truth[b : b + 1, :length], rounded[b : b + 1, :length]
        )
    assert cache.host_lengths() == lengths


def test_a_step_beyond_the_capacity_is_masked_and_reported(attn: NSAttention) -> None:
    x, cache = make_tokens(2, CAPACITY), new_cache(attn, None)
    attn(x[:, : CAPACITY - 1], cache=cache, new=[CAPACITY - 1, 50])
    step = Graph(attn, cache, 1)
    step(x[:, :1])
    cache.check()
    stores = (cache.kv.pages.sel, cache.kv.pages.cmp, cache.kv.pages.win, cache.kv.pages.raw)
    keys_before = [pair.k[0].clone() for pair in stores]
    y = step(x[:, :1])
    assert (y[0] == 0).all()
    assert (y[1] != 0).any()
    for pair, before in zip(stores, keys_before):
        torch.testing.assert_close(pair.k[0], before, rtol=0, atol=0, equal_nan=True)
    with pytest.raises(
        InvalidInput, match=f"sequence 0 has {CAPACITY} tokens and room for {CAPACITY}"
    ):
        cache.check()
    assert cache.host_lengths() == [CAPACITY, 52]
    with pytest.raises(InvalidInput, match="1 more do not fit"):
        attn(x[:, :1], cache=cache)


@PAGES
def test_steps_do_not_synchronise(
    attn: NSAttention, page_size: int | None, no_synchronisation: None
) -> None:
    torch.cuda.set_sync_debug_mode("default")
    attn.bfloat16()
    x, cache = make_tokens(2, CAPACITY, dtype=torch.bfloat16), new_cache(attn, page_size)
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
def test_eager_steps_allocate_no_new_segment(attn: NSAttention, page_size: int | None) -> None:
    attn.bfloat16()
    x, caches = (
        make_tokens(2, CAPACITY, dtype=torch.bfloat16),
        [new_cache(attn, page_size) for _ in range(2)],
    )
    for cache in caches:
        attn(x[:, :30], cache=cache)
    caches[0].reserve_workspace()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()
    outputs = [attn(x[:, t : t + 1], cache=caches[0]) for t in range(30, CAPACITY)]
    after = torch.cuda.memory_stats()
    for key in ("segment.all.allocated", "num_alloc_retries"):
        assert after[key] == before[key], key
    assert torch.equal(
        torch.cat(outputs, 1),
        torch.cat([attn(x[:, t : t + 1], cache=caches[1]) for t in range(30, CAPACITY)], 1),
    )


def test_a_replay_does_not_call_the_allocator(attn: NSAttention) -> None:
    attn.bfloat16()
    x, cache = make_tokens(2, CAPACITY, dtype=torch.bfloat16), new_cache(attn, 64)
    cache.reserve(CAPACITY)
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
def test_the_cache_may_change_between_replays(attn: NSAttention, page_size: int | None) -> None:
    """Speculative decoding replays a graph of five rows and crops three; then sequences change."""
    # one page more than two sequences need, for the snapshot
    pages = {"num_pages": 11} if page_size else {}
    x, cache = make_tokens(2, CAPACITY), new_cache(attn, page_size, max_rollback=5, **pages)
    truth, rounded = full_forward(attn, x[:, :60])
    cache.reserve(CAPACITY)
    step, outputs = Graph(attn, cache, 5), []
    for length in range(0, 40, 2):
        draft = torch.cat([x[:, length : length + 2], make_tokens(2, 3, seed=length)], 1)
        outputs.append(step(draft)[:, :2])
        cache.crop(length + 2)
        cache.reserve(CAPACITY)
    assert_correct(torch.cat(outputs, 1), truth[:, :40], rounded[:, :40])
    prefix = cache.snapshot(0)
    cache.reset()
    cache.load(prefix, 1)
    cache.reserve(CAPACITY)
    assert cache.host_lengths() == [0, 40]
    y = step(torch.stack([x[1, :5], x[0, 40:45]]))
    assert_correct(y[1:], truth[:1, 40:45], rounded[:1, 40:45])
    assert_correct(y[:1], truth[1:, :5], rounded[1:, :5])
    cache.check()


@PAGES
def test_chunks_over_a_filled_cache(attn: NSAttention, page_size: int | None) -> None:
    """Ragged chunks with many more rows than ``max_step`` are correct and do not synchronise."""
    x, cache = make_tokens(2, CAPACITY), new_cache(attn, page_size, max_step=2)
    truth, rounded = full_forward(attn, x)
    attn(x[:, :60], cache=cache)
    counts = torch.tensor([160, 90], device=DEVICE, dtype=torch.int32)
    cache.reserve(CAPACITY)
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        y = attn(x[:, 60:220], cache=cache, new=counts)
    finally:
        torch.cuda.set_sync_debug_mode(before)
    assert_correct(y[:1], truth[:1, 60:220], rounded[:1, 60:220])
    assert_correct(y[1:, :90], truth[1:, 60:150], rounded[1:, 60:150])
    assert (y[1, 90:] == 0).all()
    y = attn(torch.stack([x[0, 220:300], x[1, 150:230]]), cache=cache)
    assert_correct(y[:1], truth[:1, 220:300], rounded[:1, 220:300])
    assert_correct(y[1:], truth[1:, 150:230], rounded[1:, 150:230])
