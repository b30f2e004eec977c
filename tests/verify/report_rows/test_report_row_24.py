"""Report row 24, 'masked selection: empty rows give 0; strict fallback on non-finite'.

Empty rows have outputs and gradients of exactly 0, without NaN. A non-finite output is an error
that names layer, branch and backend; no other backend runs instead.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from nsa_core import NSAttention
from nsa_core.errors import NSAError
from nsa_core.layout import BlockGeometry
from nsa_core.torch_ops.backend_call import record_dispatch
from nsa_verify.problems.cases import config_of
from observed import slot_kernel

GEOMETRY = BlockGeometry(8, 4, 16, 4, window_size=16)
WHERE = [("sdpa", "cpu"), ("fa2", "cpu")]
WHERE += [
    pytest.param(backend, "cuda", marks=pytest.mark.gpu) for backend in ("sdpa", "fa2", "triton")
]
EMPTY = slice(5, 12)  # rows without a block


def run(
    backend: str, slot: str, device: str, fault: Any = lambda kernel: kernel
) -> dict[str, torch.Tensor]:
    """Run a slot with rows that see no key; return o, lse and gradients."""
    dtype, length = torch.float16 if device == "cuda" else torch.float32, 41
    keys = GEOMETRY.num_compressed(length) if slot == "cmp" else length
    q, k, v = (
        torch.randn(2, n, h, 16, device=device).to(dtype)
        for n, h in ((length, 4), (keys, 2), (keys, 2))
    )
    blocks = torch.arange(4, dtype=torch.int32, device=device).repeat(2, length, 2, 1)
    blocks[:, EMPTY] = -1
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o, lse = fault(slot_kernel(backend, slot, GEOMETRY, 0.25))(
        *leaves, *([blocks] if slot == "sel" else [])
    )
    do = torch.zeros_like(o)
    rows = EMPTY if slot == "sel" else slice(0, GEOMETRY.compress_block_size - 1)
    do[:, rows] = 1.0  # only rows without a visible key have a gradient
    grads = torch.autograd.grad(o, leaves, do)
    return {
        "o": o[:, rows],
        "lse": lse[:, :, rows],
        **dict(zip(("dq", "dk", "dv"), grads)),
        "others": o[:, rows.stop :],
    }


@pytest.mark.parametrize("slot", ["cmp", "sel"])
@pytest.mark.parametrize(("backend", "device"), WHERE)
def test_report_row_24_empty_rows_are_exact_zeros(
    backend: str, device: str, slot: str, fa2_here: None
) -> None:
    assert_zeros(run(backend, slot, device))


def assert_zeros(results: dict[str, torch.Tensor]) -> None:
    """Check for exact zeros in rows without a visible key, and for finite values in the others."""
    assert (results.pop("lse") == -torch.inf).all()
    others = results.pop("others")
    assert torch.isfinite(others).all()
    assert others.any()
    for name, tensor in results.items():
        assert (tensor == 0).all(), name


@pytest.mark.parametrize(("backend", "device"), WHERE)
def test_report_row_24_empty_block_lists_give_zeros(
    backend: str, device: str, fa2_here: None
) -> None:
    """With blocks [B, S, G, 0], no row of `sel` sees a key."""
    dtype = torch.float16 if device == "cuda" else torch.float32
    leaves = [
        torch.randn(2, 9, heads, 16, device=device).to(dtype).requires_grad_()
        for heads in (4, 2, 2)
    ]
    blocks = torch.empty(2, 9, 2, 0, dtype=torch.int32, device=device)
    with record_dispatch() as trace:
        o, lse = slot_kernel(backend, "sel", GEOMETRY, 0.25)(*leaves, blocks)
        grads = torch.autograd.grad(o, leaves, torch.ones_like(o))
    assert not trace  # no kernel runs
    assert (lse == -torch.inf).all()
    assert not any(tensor.any() for tensor in (o, *grads))


@pytest.mark.parametrize("branch", ["cmp", "sel", "win"])
def test_report_row_24_non_finite_is_an_error_and_never_a_reroute(branch: str) -> None:
    config = config_of(4, 2, 8, 8, (8, 4, 8, 4, 8), compress="mean", rope=False)
    attention = NSAttention(config, backends="sdpa", layer=3, check=True)
    first = (
        attention._widths[0]
        + sum(attention._widths[1:4])
        + 16 * ("cmp", "sel", "win").index(branch)
    )
    with torch.no_grad():
        attention.qkv.weight[first] = torch.inf  # the first value channel of the branch
    with record_dispatch() as trace, pytest.raises(NSAError) as error:
        attention(torch.randn(1, 40, 32))  # more than n * l' tokens, so that sel runs
    for text in ("layer 3", f"branch '{branch}'", "backend 'sdpa'", "not finite"):
        assert text in str(error.value)
    assert {record.backend for record in trace} == {"sdpa"}
    calls = [record.slot for record in trace]
    assert calls[-1] == branch
    assert len(set(calls)) == len(calls)  # no retry


def test_report_row_24_names_the_token_of_a_nan() -> None:
    """Row 7 is the first that is not finite, because tiles spread the NaN of v."""
    config = config_of(4, 2, 8, 8, (8, 4, 8, 4, 8), compress="mean", rope=False)
    x = torch.randn(1, 40, 32)
    x[0, 30] = torch.nan
    places = "q from index [0, 30, 0, 0], k_cmp from index [0, 6, 0, 0], v_cmp from"
    with pytest.raises(
        NSAError, match=re.escape(f"[0, 7, 0, 0]; of its inputs, these are not finite: {places}")
    ):
        NSAttention(config, backends="sdpa", check=True)(x)


def test_report_row_24_checks_a_step_over_a_cache_of_codes() -> None:
    """torch.isfinite does not take float8."""
    config = config_of(4, 2, 8, 8, (8, 4, 8, 4, 8), compress="mean", rope=False)
    attention = NSAttention(config, backends="sdpa", check=True)
    cache = attention.new_cache(1, 16, kv_dtype=torch.float8_e4m3fn)
    with torch.no_grad(), pytest.raises(NSAError, match="not finite: q from"):
        attention(torch.full((1, 1, 32), torch.nan), cache=cache)


def test_report_row_24_finds_uniform_weights_in_empty_rows() -> None:
    """Masks with large finite values give uniform weights in rows without a visible key."""

    def uniform(kernel: Any) -> Any:
        def filled(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: torch.Tensor) -> Any:
            o, lse = kernel(q, k, v, blocks)
            return torch.where(
                (lse == -torch.inf).transpose(1, 2)[..., None], v.mean((1, 2), keepdim=True), o
            ), lse

        return filled

    results = run("sdpa", "sel", "cpu", uniform)
    assert results["o"].any()
    assert results["dv"].any()
    with pytest.raises(AssertionError):
        assert_zeros(results)
