"""Caches of quantized keys and values: their codes are those of an unquantized cache, rounded."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nsa_core import (
    InvalidInput,
    LayerPages,
    NSACache,
    NSAConfig,
    NSAttention,
    PagedKV,
    decode_rows,
    kv_scale,
    nsa_decode,
    resolve,
    rope_angles,
)
from nsa_core.cache.cache import resized
from nsa_core.decode.pages import quantize
from nsa_core.layer.gating import compute_gates

CONFIG = NSAConfig(dim=64, n_heads=4, n_kv_heads=2, compress_block_size=8, compress_stride=4,
                   select_block_size=16, num_selected_blocks=4, window_size=24)  # fmt: skip
KV_DTYPES = pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.int8])


@pytest.fixture(scope="module")
def attn() -> NSAttention:
    torch.manual_seed(0)
    return NSAttention(CONFIG).requires_grad_(False)


def x(rows: int, seed: int) -> torch.Tensor:
    return torch.randn(2, rows, CONFIG.dim, generator=torch.Generator().manual_seed(seed))


def caches_of(attn: NSAttention, kv_dtype: torch.dtype, **options: Any) -> tuple[NSACache, ...]:
    """Return a cache and a quantized one, whose scales a few tokens exceed."""
    options = {"max_step": 4, "max_rollback": 3, **options}
    plain = attn.new_cache(2, 160, **options)
    attn(x(40, 9), cache=plain)
    scales = plain.kv_scales(kv_dtype, margin=0.9)
    plain.reset()
    return plain, attn.new_cache(2, 160, kv_dtype=kv_dtype, kv_scales=scales, **options)


def owned(cache: NSACache, sequence: int) -> list[tuple[PagedKV, torch.Tensor]]:
    """Return each branch, and the tokens of a sequence that its steps read."""
    length = cache.host_lengths()[sequence]
    ends = CONFIG.geometry.num_compressed(length), length, length, length
    counts = length, length, CONFIG.window_size, CONFIG.compress_block_size
    return [
        (pages, torch.arange(max(0, end - count), end)[None])
        for pages, end, count in zip(cache.kv.pages, ends, counts)
    ]


def check_codes(plain: NSACache, quantized: NSACache) -> None:
    assert quantized.host_lengths() == plain.host_lengths()
    for b in range(quantized.batch):
        for (one, tokens), (other, _) in zip(owned(plain, b), owned(quantized, b)):
            expected, actual = (p.read(tokens, torch.tensor([b])) for p in (one, other))
            if other.scales is not None:
                scales = other.scales[0].unbind(-1)
                codes = [quantize(y, s, other.k.dtype) for y, s in zip(expected, scales)]
                expected = tuple(y.float() * s[:, None] for y, s in zip(codes, scales))
            torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@KV_DTYPES
@pytest.mark.parametrize("page_size", [None, 32])
def test_codes_survive_every_operation(
    attn: NSAttention, kv_dtype: torch.dtype, page_size: int | None
) -> None:
    caches = caches_of(attn, kv_dtype, page_size=page_size)
    steps = [
        lambda cache: attn(x(50, 0), cache=cache, new=[50, 7]),
        lambda cache: attn(x(1, 1), cache=cache),
        lambda cache: attn(x(40, 2), cache=cache, new=[38, 40]),  # longer than its rings
        lambda cache: cache.crop([h - 2 for h in cache.host_lengths()]),
        lambda cache: attn(x(4, 3), cache=cache, new=[4, 1]),
        lambda cache: cache.load(cache.snapshot(0), 1),
        lambda cache: attn(x(3, 4), cache=cache),
        lambda cache: cache.reorder([1, 0]),
        lambda cache: cache.reset(0),
        lambda cache: attn(x(20, 5), cache=cache),
    ]
    for step in steps:
        for cache in caches:
            step(cache)
        check_codes(*caches)
    if page_size is None:
        check_codes(*(resized(cache, 200) for cache in caches))
    assert caches[1].kv.pages.raw.k.dtype == torch.float32
    plain, quantized = (sum(y.nbytes for y in c.kv.pages.sel[:2]) for c in caches)
    assert quantized * 4 == plain


@KV_DTYPES
def test_a_step_attends_to_codes(attn: NSAttention, kv_dtype: torch.dtype) -> None:
    _, cache = caches_of(attn, kv_dtype)
    attn(x(70, 0), cache=cache, new=[70, 33])
    new = x(2, 1)
    pages = LayerPages(
        *(PagedKV(p.k.clone(), p.v.clone(), p.table, p.scales) for p in cache.kv.pages)
    )
    q, k, v = attn.heads(new)
    lengths = cache.lengths + 2
    rows = decode_rows(torch.tensor([0, 2, 4]).int(), lengths, 4)
    o = nsa_decode(
        q.flatten(0, 1), [y.flatten(0, 1) for y in k], [y.flatten(0, 1) for y in v],
        compute_gates(attn.gate, new).flatten(0, 1), pages, rows, config=CONFIG,
        phi=(attn.phi_k, attn.phi_v), rope=rope_angles(CONFIG, 160), max_len=160,
    )  # fmt: skip
    expected = attn.out(o.flatten(-2)).unflatten(0, (2, 2))
    torch.testing.assert_close(attn(new, cache=cache), expected, rtol=1e-5, atol=1e-6)


@KV_DTYPES
@pytest.mark.parametrize("page_size", [None, 32])
def test_a_chunk_attends_to_codes(
    attn: NSAttention, kv_dtype: torch.dtype, page_size: int | None
) -> None:
    outputs = []
    for max_step in (4, 64):  # prefill kernels, and decode forms
        _, cache = caches_of(attn, kv_dtype, page_size=page_size, max_step=max_step)
        attn(x(60, 0), cache=cache, new=[60, 33])
        outputs.append(attn(x(40, 1), cache=cache))
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-6)


def test_scales_are_those_of_the_largest_tokens(attn: NSAttention) -> None:
    cache = attn.new_cache(2, 64)
    with pytest.raises(InvalidInput, match=r"compress_block_size 8 tokens, the lengths are \[0, 0"):
        cache.kv_scales(torch.int8)
    with pytest.raises(InvalidInput, match=r"kv_dtype must be .* got torch\.float16"):
        cache.kv_scales(torch.float16)
    attn(x(50, 0), cache=cache, new=[50, 30])
    branches = [owned(cache, b)[:3] for b in range(2)]
    for scales, *parts in zip(cache.kv_scales(torch.int8, margin=2.0), *branches):
        rows = [p.read(tokens, torch.tensor([b])) for b, (p, tokens) in enumerate(parts)]
        k, v = (torch.cat(y, 1) for y in zip(*rows))
        expected = torch.stack([kv_scale(y, torch.int8, 2.0) for y in (k, v)], -1)
        assert torch.equal(scales, expected)


def test_a_cache_keeps_its_scales_if_the_tensors_of_the_caller_change(attn: NSAttention) -> None:
    scales = [torch.ones(2, 2) for _ in range(3)]
    cache = attn.new_cache(1, 64, kv_dtype=torch.int8, kv_scales=scales)
    scales[0].zero_()
    assert all((kept == 1).all() for kept in cache.kv.pages.scales)


def test_scales_of_float8_are_1_by_default(attn: NSAttention) -> None:
    cache = attn.new_cache(1, 64, kv_dtype=torch.float8_e4m3fn)
    assert "float8_e4m3fn" in repr(cache)
    assert all((scales == 1).all() for scales in cache.kv.pages.scales)
    assert attn(x(30, 0)[:1], cache=cache).isfinite().all()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kv_dtype": torch.float16}, r"kv_dtype must be torch\.float8_e4m3fn or torch\.int8"),
        ({"kv_dtype": "int8"}, "kv_dtype must be"),
        ({"kv_dtype": [1]}, r"kv_dtype must be .*, got \[1\]"),
        ({"kv_dtype": torch.int8, "kv_scales": 3}, r"must be three tensors .* got \[3\]"),
        ({"kv_dtype": torch.int8, "kv_scales": [1, 2, 3]}, r"got \[1, 2, 3\]"),
        ({"kv_dtype": torch.int8}, r"needs kv_scales.*kv_scales=cache\.kv_scales\(torch\.int8\)"),
        ({"kv_scales": [torch.ones(2, 2)] * 3}, "kv_scales needs kv_dtype, which is None"),
        (
            {"kv_dtype": torch.int8, "kv_scales": [torch.ones(4, 2)] * 3},
            r"three tensors \[2, 2\], of cmp, sel and win.*got \[\[4, 2\]",
        ),
        ({"kv_dtype": torch.int8, "kv_scales": [torch.ones(2, 2)] * 2}, "must be three tensors"),
        ({"kv_dtype": torch.int8, "kv_scales": [torch.zeros(2, 2)] * 3}, "finite and > 0"),
        (
            {"kv_dtype": torch.float8_e4m3fn, "plan": resolve(CONFIG, phase="decode")},
            "kv_dtype None, but that of the pages is float8",
        ),
    ],
)
def test_wrong_options_are_named(attn: NSAttention, options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        attn.new_cache(2, 64, **options)
