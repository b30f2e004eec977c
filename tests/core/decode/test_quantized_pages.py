"""Quantized pages of nsa_decode: scales, compiled calls, and errors.

The histories of nsa_verify judge the results, and tests/triton the codes of the kernels.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nsa_core import (
    InvalidInput,
    LayerPages,
    NSAConfig,
    PagedKV,
    decode_rows,
    kv_scale,
    nsa_decode,
    resolve,
)

CONFIG = NSAConfig(dim=64, n_heads=4, n_kv_heads=2, compress="mean", rope=False)
KV_DTYPES = pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.int8])


def pages_of(kv_dtype: torch.dtype | None, scale: float = 0.02) -> LayerPages:
    table = torch.tensor([[2, 0], [1, 3]], dtype=torch.int32)

    def part(rows: int, quantized: bool = True) -> PagedKV:
        k, v = torch.zeros(2, 4, rows, 2, 16)
        if kv_dtype is None or not quantized:
            return PagedKV(k, v, table)
        return PagedKV(k.to(kv_dtype), v.to(kv_dtype), table, torch.full((4, 2, 2), scale))

    return LayerPages(part(4), part(64), part(512), part(64, quantized=False))


def call(pages: LayerPages, seed: int = 0, step: Any = nsa_decode, **options: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = decode_rows(torch.tensor([0, 40, 43]).int(), torch.tensor([40, 3]).int(), 43)
    q = torch.randn(43, 4, 16, generator=generator)
    k, v = torch.randn(2, 43, 2, 16, generator=generator)
    gates = torch.rand(43, 4, 3, generator=generator)
    return step(q, k, v, gates, pages, rows, config=CONFIG, **options)


@KV_DTYPES
def test_results_are_near_those_of_plain_pages(kv_dtype: torch.dtype) -> None:
    plain, quantized = call(pages_of(None)), call(pages_of(kv_dtype, 5 / 127))
    error = float((quantized - plain).norm() / plain.norm())
    assert 1e-3 < error < 5e-2


@KV_DTYPES
def test_a_scale_maps_the_largest_number_to_the_largest_code(kv_dtype: torch.dtype) -> None:
    x = torch.randn(7, 3, 2, 8)
    x[5, 1, 1, 3] = 50.0
    x[..., 0, :] = 0
    scale = kv_scale(x, kv_dtype, margin=2.0)
    largest = 127 if kv_dtype == torch.int8 else 448
    assert float(scale[1] * largest) == pytest.approx(100.0)
    assert scale[0] > 0  # a head without a number still has a valid scale
    with pytest.raises(InvalidInput, match=r"kv_dtype must be .*int8, got torch\.float16"):
        kv_scale(x, torch.float16)
    for margin in (0.0, -1.0, torch.inf, torch.nan, "1", None, True):
        with pytest.raises(InvalidInput, match=rf"margin must be finite and > 0, got {margin!r}"):
            kv_scale(x, kv_dtype, margin)  # type: ignore[arg-type]
    for wrong in (torch.ones(3), torch.ones(0, 2, 4)):
        with pytest.raises(InvalidInput, match=r"x must be \[\.\.\., G, D\] with elements"):
            kv_scale(wrong, kv_dtype)
    with pytest.raises(InvalidInput, match=r"x must be a tensor, got list"):
        kv_scale(x.tolist(), kv_dtype)  # type: ignore[arg-type]


@pytest.mark.slow
@KV_DTYPES
def test_a_compiled_call_writes_the_same_codes(kv_dtype: torch.dtype) -> None:
    eager, compiled = pages_of(kv_dtype), pages_of(kv_dtype)
    torch._dynamo.reset()
    step = torch.compile(nsa_decode, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(call(compiled, step=step), call(eager), rtol=0, atol=0)
    for one, other in zip(eager, compiled):
        assert torch.equal(one.k.view(torch.uint8), other.k.view(torch.uint8))


def wrong(branch: str, **fields: Any) -> LayerPages:
    pages = pages_of(torch.int8)
    return pages._replace(**{branch: getattr(pages, branch)._replace(**fields)})


@pytest.mark.parametrize(
    ("pages", "words"),
    [
        (wrong("sel", scales=None), r"pages\.sel\.scales must be float32 \[P, G, 2\]"),
        (wrong("win", scales=torch.ones(4, 2)), r"pages\.win\.scales must be \[P_win, G, 2\]"),
        (
            wrong("win", scales=torch.ones(4, 2, 3)),
            r"\[P_win, G, 2\] with a scale for each of k and",
        ),
        (wrong("win", scales=torch.ones(5, 2, 2)), r"pages\.win\.scales has 5 pages"),
        (wrong("cmp", scales=torch.ones(4, 2, 2).double()), "got float64"),
        (wrong("cmp", scales=torch.ones(4, 2, 4)[..., ::2]), "contiguous but for the first axis"),
        (wrong("raw", scales=torch.ones(4, 2, 2)), r"pages\.raw\.scales must be None"),
        (wrong("sel", k=torch.zeros(4, 64, 2, 16)), "must have one dtype"),
        (
            pages_of(None)._replace(raw=pages_of(torch.int8).sel),
            r"pages\.raw\.k and pages\.raw\.v are int8",
        ),
        (
            wrong("win", v=torch.zeros(4, 512, 2, 17, dtype=torch.int8)[..., :16]),
            r"rows of pages\.win\.v must begin at even addresses, its offset is 0, its strides are",
        ),
        (
            wrong("cmp", k=torch.zeros(4, 4, 2, 18, dtype=torch.int8)[..., 1:17]),
            "even addresses, its offset is 1",
        ),
        (
            pages_of(torch.int8, -0.5),
            r"pages\.cmp\.scales must be finite .*, got -0\.5 at \[\d, 0, 0\]",
        ),
        (pages_of(torch.int8, torch.nan), r"must be finite and > 0 .*, got nan at"),
    ],
)
def test_scales_that_do_not_fit_are_named(pages: LayerPages, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        call(pages)


def test_a_plan_is_for_one_dtype_of_pages() -> None:
    plan = resolve(CONFIG, phase="decode", page_size=64, kv_dtype=torch.int8)
    call(pages_of(torch.int8), plan=plan)
    with pytest.raises(InvalidInput, match=r"kv_dtype int8, but that of the pages is None"):
        call(pages_of(None), plan=plan)
    with pytest.raises(InvalidInput, match=r"kv_dtype must be None or, for decode, one of"):
        resolve(CONFIG, kv_dtype="int8")
