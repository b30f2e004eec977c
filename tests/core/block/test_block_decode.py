"""block_attention_decode: the last tokens of block_attention, over pages and contiguous caches."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from nsa_core import (
    InvalidInput,
    Unsupported,
    block_attention,
    block_attention_decode,
    block_attention_decode_with_lse,
    block_attention_with_lse,
    plan_block_attention,
)
from nsa_core.block.plans import BlockSizes
from nsa_core.dtypes import stats_dtype

LENGTHS = (130, 64, 1, 0)


def problem(
    page: int = 64, rows: int = 1, n: int = 4, dtype: torch.dtype = torch.float32, last: int = 10
) -> dict[str, Any]:
    """Return a step of four sequences over pages in random order; unowned memory is NaN."""
    torch.manual_seed(0)
    columns = -(-max(LENGTHS) // page) + 1
    pages = len(LENGTHS) * columns
    table = torch.randperm(pages, dtype=torch.int32).view(len(LENGTHS), columns)
    k = torch.full((pages, page, 2, 24), torch.nan, dtype=dtype)
    v = torch.full((pages, page, 2, 8), torch.nan, dtype=dtype)
    for b, length in enumerate(LENGTHS):
        for t in range(length):
            where = int(table[b, t // page]), t % page
            k[where], v[where] = torch.randn(2, 24), torch.randn(2, 8)
    blocks = torch.randint(-1, last, (len(LENGTHS), rows, 2, n))
    blocks[..., 0][torch.rand(len(LENGTHS), rows, 2) < 0.2] = 2**40
    return {
        "q": torch.randn(len(LENGTHS), rows, 6, 24, dtype=dtype),
        "k": k,
        "v": v,
        "blocks": blocks,
        "lengths": torch.tensor(LENGTHS, dtype=torch.int32),
        "block_table": table,
    }


def expected(x: dict[str, Any], size: int, scale: float | None = None) -> tuple[Any, Any]:
    """Return the rows of block_attention on each whole sequence."""
    rows = x["q"].shape[1]
    o = x["q"].new_zeros(*x["q"].shape[:3], 8)
    lse = x["q"].new_full((4, 6, rows), -torch.inf, dtype=stats_dtype(o.dtype))
    for b, length in enumerate(LENGTHS):
        first = max(length - rows, 0)
        count = length - first
        if count:
            pages = [t[x["block_table"][b].long()].flatten(0, 1) for t in (x["k"], x["v"])]
            o_b, lse_b = block_attention_with_lse(
                x["q"][b : b + 1, :count],
                *(t[None, :length] for t in pages),
                x["blocks"][b : b + 1, :count],
                block_size=size,
                scale=scale,
                first_query=first,
            )
            o[b, :count], lse[b, :, :count] = o_b[0], lse_b[0]
    return o, lse


@pytest.mark.parametrize(
    ("page", "size", "rows", "n"),
    [(64, 64, 1, 4), (64, 16, 3, 5), (256, 256, 2, 3), (64, 128, 1, 3), (16, 48, 2, 70)],
)
def test_steps_equal_the_rows_of_the_whole_sequences(
    page: int, size: int, rows: int, n: int
) -> None:
    """Also blocks that are longer than a page."""
    x = problem(page, rows, n, last=-(-max(LENGTHS) // size) + 1)
    o, lse = block_attention_decode_with_lse(**x, block_size=size)
    wanted, wanted_lse = expected(x, size)
    assert torch.allclose(o, wanted, atol=1e-6)
    assert torch.allclose(lse, wanted_lse, atol=1e-5)
    assert torch.equal(block_attention_decode(**x, block_size=size), o)


def test_a_contiguous_cache_equals_pages() -> None:
    x = problem(page=130)
    table = x.pop("block_table").long()
    paged = block_attention_decode(**x, block_size=10, block_table=table.int())
    for name in ("k", "v"):  # heads before tokens, as in a static cache of Hugging Face
        x[name] = x[name][table[:, 0]].transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.allclose(block_attention_decode(**x, block_size=10), paged, atol=1e-6)
    assert torch.isfinite(block_attention_decode(**x, block_size=7)).all()  # 130 is no multiple
    x["k"], x["v"] = (torch.cat([x[name], x[name][:1]]) for name in ("k", "v"))
    with pytest.raises(
        InvalidInput, match="k and v have batch size 5, but q, blocks and lengths have batch size 4"
    ):
        block_attention_decode(**x, block_size=7)


def test_starts_place_the_queries() -> None:
    x = problem(rows=3)
    o = block_attention_decode(**x, block_size=64)
    starts = torch.tensor([127, 61, 0, 0], dtype=torch.int32)
    assert torch.equal(block_attention_decode(**x, block_size=64, starts=starts), o)
    later = torch.tensor([128, 63, 1, 0], dtype=torch.int32)
    shifted = block_attention_decode(**x, block_size=64, starts=later)
    assert not shifted[0, 2:].any()  # padding
    assert not shifted[1:, 1:].any()
    assert not torch.equal(shifted[0, :2], o[0, :2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtypes_and_scale(dtype: torch.dtype) -> None:
    x = problem(dtype=dtype)
    o, lse = block_attention_decode_with_lse(**x, block_size=64, scale=-0.3)
    wanted, wanted_lse = expected(x, 64, -0.3)
    assert (o.dtype, lse.dtype) == (dtype, stats_dtype(dtype))
    assert torch.allclose(o, wanted, atol=1e-2 if dtype == torch.bfloat16 else 1e-13)
    assert torch.allclose(lse, wanted_lse, atol=1e-5 if dtype == torch.bfloat16 else 1e-13)


@pytest.mark.parametrize("change", [{"n": 0}, {"batch": 0}, {"rows": 0}])
def test_a_step_without_work_gives_zeros(change: dict[str, int]) -> None:
    x = problem(rows=change.get("rows", 1))
    x["blocks"] = x["blocks"][..., : change.get("n", 4)]
    count = change.get("batch", 4)
    x |= {name: x[name][:count] for name in ("q", "blocks", "lengths", "block_table")}
    o, lse = block_attention_decode_with_lse(**x, block_size=64)
    assert o.shape == (count, change.get("rows", 1), 6, 8)
    assert not o.any()
    assert (lse == -torch.inf).all()


@pytest.mark.parametrize("shortage", ["pages", "columns", "rows"])
def test_a_cache_without_tokens_gives_zeros(shortage: str) -> None:
    x = problem()
    x["lengths"] = torch.zeros_like(x["lengths"])
    if shortage == "columns":
        x["block_table"] = x["block_table"][:, :0]
    if shortage == "pages":
        x |= {name: x[name][:0] for name in ("k", "v")}
    if shortage == "rows":
        del x["block_table"]
        x |= {name: x[name][:4, :0] for name in ("k", "v")}
    o, lse = block_attention_decode_with_lse(**x, block_size=64)
    assert not o.any()
    assert (lse == -torch.inf).all()


def test_a_plan_serves_its_steps() -> None:
    x = problem(page=64)
    plan = plan_block_attention(
        6, 2, 24, v_head_dim=8, block_size=256, n_blocks=4, phase="decode", page_size=64
    )
    assert plan.sizes.kernel_blocks == (64, 16)
    o = block_attention_decode(**x, block_size=256, plan=plan)
    assert torch.equal(o, block_attention_decode(**x, block_size=256, backends="sdpa"))
    contiguous = {name: t[:4] for name, t in x.items() if name != "block_table"}
    with pytest.raises(InvalidInput, match="plan is for page_size 64, the call has None"):
        block_attention_decode(**contiguous, block_size=256, plan=plan)
    with pytest.raises(Unsupported, match="needs cuda"):
        block_attention_decode(**x, block_size=64, backends="triton")


def test_plans_are_for_one_phase() -> None:
    options: dict[str, Any] = {"block_size": 64, "n_blocks": 4, "v_head_dim": 8}
    step, whole = (
        plan_block_attention(6, 2, 24, **options, phase=phase) for phase in ("decode", "prefill")
    )
    x = problem(page=64)
    del x["block_table"]
    x["k"], x["v"] = x["k"][:4].nan_to_num(), x["v"][:4].nan_to_num()
    x["lengths"] = x["lengths"].clamp(max=64)  # the room of a sequence without pages
    with pytest.raises(InvalidInput, match="plan is for prefill, but this call is a decode step"):
        block_attention_decode(**x, block_size=64, plan=whole)
    assert block_attention_decode(**x, block_size=64, plan=step).isfinite().all()
    del x["lengths"]
    x["q"], x["blocks"] = x["q"].expand(4, 64, 6, 24), x["blocks"].expand(4, 64, 2, 4)
    with pytest.raises(InvalidInput, match="plan is for decode, but this call is a prefill"):
        block_attention(**x, block_size=64, plan=step)


def test_a_size_that_fits_no_page_is_named() -> None:
    x = problem(page=72)
    with pytest.raises(InvalidInput, match="pages of 72 rows do not hold whole blocks of 20 keys"):
        block_attention_decode(**x, block_size=20)
    assert BlockSizes(6, 2, 24, 8, 24, 3, None, 72).kernel_blocks == (24, 3)
    assert BlockSizes(6, 2, 24, 8, 32, 3, None, 48).kernel_blocks == (16, 6)
    assert BlockSizes(6, 2, 24, 8, 300, 3, None, 600).kernel_blocks == (300, 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"q": torch.zeros(4, 6, 24)},
            r"q must be \[B, S, Hq, Dk\], got \[4, 6, 24\]: add the batch axis",
        ),
        ({"blocks": torch.zeros(4, 1, 2, 4)}, "blocks must be integers, got float32"),
        (
            {"lengths": torch.tensor(LENGTHS)},
            "lengths must be int32, got int64: pass",
        ),
        ({"lengths": torch.tensor([1], dtype=torch.int32)}, "lengths have batch size 1, but q, "),
        ({"starts": [0, 0, 0, 0]}, "starts must be a tensor, got list"),
        ({"k": torch.zeros(2, 64, 2, 24)}, "v has 16 pages, but k has 2 pages"),
        ({"v": torch.zeros(16, 64, 2, 16)[..., ::2]}, "the columns of v must be contiguous"),
        ({"q": torch.zeros(4, 1, 6, 24, requires_grad=True)}, r"call it under torch\.no_grad\(\)"),
        ({"q": torch.zeros(4, 1, 5, 24)}, "q has 5 heads and k has 2: the number of"),
        ({"backends": {"sel": "sdpa"}}, "backends must be None or the name of a backend"),
        ({"backends": "spda"}, "sdpa"),
        ({"block_size": 0}, "block_size must be an integer >= 1"),
        ({"scale": "a"}, "scale must be finite"),
        ({"scale": [1.0]}, "scale must be finite"),
    ],
)
def test_bad_input_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput) as error:
        block_attention_decode(**{**problem(), "block_size": 64, **changes})
    assert re.search(message, str(error.value)), str(error.value)


def test_entries_outside_the_pool_and_lengths_beyond_the_cache_are_named() -> None:
    x = problem(rows=2)
    x["blocks"] = torch.zeros(4, 2, 2, 1, dtype=torch.int64)
    o = block_attention_decode(**x, block_size=64)
    table = x["block_table"].clone()
    table[:, 1] = 99  # no block names these pages
    assert torch.equal(block_attention_decode(**{**x, "block_table": table}, block_size=64), o)
    for entry in (-1, 16):
        wrong = table.clone()
        wrong[1, 0] = entry
        message = rf"block_table must name one of 16 pages .* got {entry} .* sequence 1"
        with pytest.raises(InvalidInput, match=message):
            block_attention_decode(**{**x, "block_table": wrong}, block_size=64)
    for length in (-1, 257):
        lengths = torch.tensor([130, length, 1, 0], dtype=torch.int32)
        message = rf"lengths must be from 0 to 256, .* got {length} at \[1\]"
        with pytest.raises(InvalidInput, match=message):
            block_attention_decode(**{**x, "lengths": lengths}, block_size=64)
