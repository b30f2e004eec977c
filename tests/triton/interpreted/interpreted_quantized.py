"""Quantized pages on the Triton backend: every code, and histories that the oracle judges."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from nsa_backend_triton.decode.codes import as_pairs, decode, encode
from nsa_backend_triton.strict.interpreter import strict
from nsa_core import LayerPages, NSAConfig, PagedKV, decode_rows, kv_scale, nsa_decode
from nsa_core.decode.pages import quantize
from nsa_verify.drawn.judge import judge
from nsa_verify.drawn.parser import parse
from nsa_verify.problems.combination import Combination

STEPS = "step=17,3 step=1,14 move=0 fork=0,1 step=1,0+1 crop=15,17 step=0,2"
HISTORY = (
    "nsa_decode seed=3 l=4 d=2 block=16 n=3 w=12 h=2 groups=2 dk=16 dv=16 compress={} batch=2"
    " page_size=16 cmp_page=3 newest=freed newest_page=5 max_rollback=9 dtype={} kv={} {}"
)


@triton.jit
def _code(X, SCALES, CODES, NUMBERS, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    code = encode(tl.load(X + i), tl.load(SCALES + i), CODES.dtype.element_ty)
    tl.store(CODES + i, code)
    pair = tl.arange(0, SIZE // 2)
    is_int: tl.constexpr = CODES.dtype.element_ty == tl.int8
    even, odd = decode(tl.load(as_pairs(CODES) + pair), NUMBERS.dtype.element_ty, is_int)
    tl.store(NUMBERS + 2 * pair, even)
    tl.store(NUMBERS + 2 * pair + 1, odd)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_codes_are_those_of_torch(dtype: torch.dtype) -> None:
    """All codes, the ties between them, numbers of all magnitudes, NaN and infinities."""
    torch.manual_seed(0)
    exact = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    ordered = exact[exact.isfinite()].sort().values
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e-40])
    x = torch.cat([exact, (ordered[1:] + ordered[:-1]) / 2, special, torch.zeros(3000)])[:4096]
    scales = torch.ones(4096)
    x = torch.cat([x, torch.zeros(4096 - len(x))])
    x[1024:] = torch.randn(3072) * torch.exp2(torch.randint(-14, 10, (3072,)).float())
    scales[1024:] = torch.rand(3072) + 0.5
    expected = quantize(x[:, None], scales, dtype)[:, 0]
    kind = torch.uint8 if dtype.is_floating_point else dtype
    for narrow in (torch.bfloat16, torch.float16, torch.float64):
        codes, numbers = torch.empty(4096, dtype=kind), torch.empty(4096, dtype=narrow)
        with strict():
            _code[(1,)](x, scales, codes, numbers, 4096)
        assert torch.equal(codes, expected.view(kind))
        assert torch.equal(numbers.float(), expected.float())


@pytest.mark.parametrize(
    ("dtype", "kv"),
    [
        ("bfloat16", "fp8-pages"),
        pytest.param("bfloat16", "int8", marks=pytest.mark.slow),
        ("float16", "int8-pages"),
        pytest.param("float32", "fp8", marks=pytest.mark.slow),
        pytest.param("float64", "fp8-pages", marks=pytest.mark.slow),
        pytest.param("float16", "fp8", marks=pytest.mark.slow),
    ],
)
def test_histories_of_quantized_pages_pass(dtype: str, kv: str) -> None:
    combination = Combination(dict.fromkeys(("cmp", "select", "sel", "win", "combine"), "triton"))
    findings = judge(combination, parse(HISTORY.format("mlp", dtype, kv, STEPS)))
    assert [f for f in findings if f.ok is not True] == []


@pytest.mark.parametrize(("dtype", "first"), [(torch.float16, 1e-7), (torch.bfloat16, 0.0)])
def test_pages_may_have_scales_of_any_size(dtype: torch.dtype, first: float) -> None:
    """The first page has tiny values, so its scale is many orders of magnitude below the others."""
    config = NSAConfig(
        dim=64, n_heads=4, n_kv_heads=2, rope=False, compress="mean", compress_block_size=16,
        compress_stride=16, select_block_size=16, num_selected_blocks=4, window_size=64,
    )  # fmt: skip
    tokens, count = 49, 4
    k, v = torch.randn(2, tokens, 2, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    v[:16] *= first
    each_page = [x.split(16) for x in (k, v)]
    scales = torch.stack(
        [torch.stack([kv_scale(x, torch.int8) for x in pages]) for pages in each_page], -1
    )
    table = torch.arange(count, dtype=torch.int32)[None]

    def part(rows: int, kind: torch.dtype, scales: torch.Tensor | None) -> PagedKV:
        store = torch.zeros(2, count, rows, 2, 16, dtype=kind)
        return PagedKV(*store, table, scales)

    def o(backend: str) -> torch.Tensor:
        pages = LayerPages(
            *(part(rows, torch.int8, scales) for rows in (1, 16, 16)), part(16, dtype, None)
        )
        rows = decode_rows(torch.tensor([0, tokens]).int(), torch.tensor([tokens]).int(), tokens)
        q = torch.linspace(-2, 2, tokens * 64).view(tokens, 4, 16).to(dtype)
        gates = torch.ones(tokens, 4, 3)
        return nsa_decode(q, k, v, gates, pages, rows, config=config, backends=backend)

    with strict():
        actual = o("triton")
    limit = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(actual, o("sdpa"), rtol=limit, atol=limit)
