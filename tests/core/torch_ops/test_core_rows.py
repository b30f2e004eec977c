"""Rows of the fault table that nsa_core handles for every backend."""

from __future__ import annotations

import math
import re

import pytest
import torch

import misbehaving
from nsa_core import (
    InvalidInput,
    NSAConfig,
    NSAError,
    Unsupported,
    nsa_attention,
    nsa_attention_with_lse,
    resolve,
)
from nsa_core.plan.registry import default_registry
from nsa_core.torch_ops.backend_call import record_dispatch, run_backend
from nsa_verify.checks.invariants import nan_storage
from nsa_verify.problems.cases import Case, config_of
from nsa_verify.problems.combination import Combination
from nsa_verify.run.suite import Job

CONFIG = config_of(4, 2, 8, 8, (4, 2, 8, 3, 6))


def tensors(*lead: int, grad: bool = True) -> list[torch.Tensor]:
    q = torch.randn(*lead, 4, 8, requires_grad=grad)
    k, v = (torch.randn(*lead, 2, 8, requires_grad=grad) for _ in range(2))
    return [q, k, v, torch.rand(*lead, 4, 3, requires_grad=grad)]


@pytest.mark.parametrize(
    "lead", [(2, 0), (0, 5), (0, 0)], ids=["row01-S=0", "row02-B=0", "row02-both"]
)
def test_rows_01_02_empty_call_runs_no_kernel(lead: tuple[int, int]) -> None:
    inputs = tensors(*lead)
    with record_dispatch() as trace:
        o, lse, blocks = nsa_attention_with_lse(*inputs, config=CONFIG)
        o.sum().backward()
    assert o.shape == (*lead, 4, 8)
    assert blocks.shape == (*lead, 2, 3)
    assert [x.shape for x in lse] == [(lead[0], 4, lead[1])] * 3
    assert all(t.grad is not None and t.grad.shape == t.shape for t in inputs)
    assert trace == []


def test_row_01_packed_call_without_tokens() -> None:
    inputs = tensors(0)
    cu = torch.zeros(3, dtype=torch.int32)
    o = nsa_attention(*inputs, config=CONFIG, cu_seqlens=cu)
    o.sum().backward()
    assert o.shape == (0, 4, 8)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"num_selected_blocks": 2},
            "num_selected_blocks must be >= init_blocks + local_blocks, got 2 < 1 + 2",
        ),
        ({"num_selected_blocks": 0}, "num_selected_blocks must be an integer >= 1, got 0"),
        ({"compress_block_size": 0}, "compress_block_size must be an integer >= 1, got 0"),
        ({"select_block_size": 0}, "select_block_size must be an integer >= 1, got 0"),
        ({"window_size": 0}, "window_size must be an integer >= 1, got 0"),
        (
            {"window_size": -3, "init_blocks": -1},
            "init_blocks must be an integer >= 0, got -1; window_size",
        ),
        (
            {"compress_block_size": 32, "compress_stride": 12},
            "must divide compress_block_size, got 12 and 32",
        ),
        (
            {"compress_block_size": 24, "compress_stride": 24},
            "must divide select_block_size, got 24 and 64",
        ),
        (
            {"compress_block_size": 128},
            "compress_block_size must be <= select_block_size, got 128 and 64",
        ),
        (
            {"dim": 13 * 8, "n_heads": 13, "n_kv_heads": 4},
            "13 query heads do not divide over 4",
        ),
        *(({"scale": x}, "scale must be finite") for x in (math.nan, math.inf, -math.inf)),
    ],
)
def test_rows_08_09_11_41_wrong_sizes_and_scales_of_a_config(
    fields: dict[str, float], message: str
) -> None:
    with pytest.raises(InvalidInput, match=re.escape(message)):
        NSAConfig(**{"dim": 64, "n_heads": 4, "n_kv_heads": 2, **fields})


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        (torch.tensor([0, 3, 10]), "int32"),
        (torch.tensor([1, 3, 10], dtype=torch.int32), "start at 0, got 1"),
        (torch.tensor([0, 6, 4, 10], dtype=torch.int32), "must not decrease, got 6 then 4"),
        (torch.tensor([0, 4, 9], dtype=torch.int32), "end at the 10 tokens given, got 9"),
        (torch.tensor([[0, 10]], dtype=torch.int32), "int32"),
        (torch.tensor([0], dtype=torch.int32), "at least one document"),
    ],
)
def test_row_17_malformed_cu_seqlens_raise(bounds: torch.Tensor, message: str) -> None:
    """In a direct call of a slot; test_wrong_calls.py has them in nsa_attention and the layer."""
    plan = resolve(CONFIG, varlen=True)
    q, k, v, _ = tensors(10, grad=False)
    for kernel, rows in ((plan.win, 10), (plan.cmp, CONFIG.geometry.max_compressed(10))):
        with pytest.raises(InvalidInput, match=message):
            kernel(q, k[:rows], v[:rows], cu_seqlens=bounds, max_seqlen=10)


def test_row_18_empty_documents_do_not_change_results() -> None:
    torch.manual_seed(0)
    q, k, v, gates = tensors(20, grad=False)
    with_empty = torch.tensor([0, 0, 9, 9, 20, 20], dtype=torch.int32)
    without = torch.tensor([0, 9, 20], dtype=torch.int32)
    o = nsa_attention(q, k, v, gates, config=CONFIG, cu_seqlens=with_empty)
    expected = nsa_attention(q, k, v, gates, config=CONFIG, cu_seqlens=without)
    assert torch.equal(o, expected)


def test_row_28_planning_refuses_a_gpu_backend_for_cpu_tensors() -> None:
    from nsa_core import BackendUnavailable

    with pytest.raises((BackendUnavailable, Unsupported), match="triton"):
        resolve(CONFIG, device="cpu", backends="triton")


def test_row_41_default_scale_uses_the_unpadded_head_width() -> None:
    assert NSAConfig(dim=32, n_heads=4, n_kv_heads=2, head_dim=9, rope=False).softmax_scale == 1 / 3


def with_toy(fault: str) -> Combination:
    spec = misbehaving.spec(fault)
    registry = default_registry().with_backend(spec)
    return Combination({"win": spec.name}, registry=registry)


def call_win(fault: str) -> None:
    subject = with_toy(fault)
    plan = subject.plan(CONFIG, torch.float32, needs_grad=False)
    q, k, v, _ = tensors(1, 12, grad=False)
    plan.win(q, k, v)


def test_row_47_out_of_memory_error_passes_unchanged() -> None:
    with pytest.raises(torch.OutOfMemoryError, match=r"^planted$"):
        call_win("out_of_memory")


def test_row_56_error_of_a_kernel_names_backend_and_slot() -> None:
    with (
        record_dispatch() as trace,
        pytest.raises(NSAError, match="'toy-raises', slot 'win', forward: IndexError"),
    ):
        call_win("raises")
    assert {r.backend for r in trace if r.slot == "win"} == {"toy-raises"}  # there is no fallback


@pytest.mark.parametrize("fault", ["wrong_shape", "wrong_dtype", "too_few"])
def test_row_59_wrong_results_of_a_kernel_raise(fault: str) -> None:
    with pytest.raises(NSAError, match=f"'toy-{fault}', slot 'win', forward: "):
        call_win(fault)


def test_a_result_that_is_not_contiguous_is_copied() -> None:
    values = torch.arange(6.0).view(3, 2)
    where, specs = ("toy", "win", "decode"), [((2, 3), torch.float32)]
    (o,) = run_backend(where, lambda: values.T, (), specs, values.device, {})
    assert o.is_contiguous()
    assert torch.equal(o, values.T)


@pytest.mark.parametrize(
    ("fault", "detail"),
    [("mutates", "slot 'win', forward: it changed"), ("leaves_nan", "NaN or Inf that differs")],
)
def test_row_59_verify_detects_mutated_inputs_and_nan(fault: str, detail: str) -> None:
    job = Job("nan storage", nan_storage, Case("row 59", CONFIG, (20,)), torch.float32)
    assert any(f.ok is False and detail in f.detail for f in job.run(with_toy(fault)))
    assert all(f.ok is not False for f in job.run(Combination({})))
