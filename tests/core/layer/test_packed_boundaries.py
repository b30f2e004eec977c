"""Boundaries of packed documents: checked once per call, and read by the host once per batch."""

from __future__ import annotations

import contextlib
import sys

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from cases import inputs
from nsa_core import InvalidInput, NSAttention, Unsupported, nsa_attention, packing
from nsa_core.torch_ops.packing_checks import check_cu_seqlens, checked_boundaries
from nsa_verify.problems.cases import config_of

CONFIG = config_of(4, 2, 4, 4, (8, 4, 16, 3, 21))


@pytest.fixture
def reads(monkeypatch):
    """Simulate GPU tensors, whose reads synchronise, and record every read."""
    seen, read = [], torch.Tensor.tolist

    class Recording(packing.WeakTensorKeyDictionary):
        def __setitem__(self, key, value):
            seen.append(read(key))
            super().__setitem__(key, value)

    monkeypatch.setattr(packing, "_read", Recording())
    monkeypatch.setattr(packing, "_on_gpu", lambda cu_seqlens: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return seen


def layers():
    torch.manual_seed(0)
    return [NSAttention(CONFIG, backends="sdpa") for _ in range(2)]


def forward_and_backward(attns, x, cu_seqlens):
    for attn in attns:
        x = attn(x, cu_seqlens)
    x.square().sum().backward()
    return x.detach(), [p.grad.clone() for attn in attns for p in attn.parameters()]


def test_all_layers_and_passes_share_one_read(reads):
    x = torch.randn(60, 16, requires_grad=True)
    cu_seqlens = torch.tensor([0, 25, 60], dtype=torch.int32)
    forward_and_backward(layers(), x, cu_seqlens)
    assert reads == [[0, 25, 60]]
    forward_and_backward(layers(), x, cu_seqlens.clone())
    assert len(reads) == 2


def test_boundaries_that_change_in_place_are_read_again(reads):
    x = torch.randn(60, 16)
    cu_seqlens = torch.tensor([0, 25, 60], dtype=torch.int32)
    forward_and_backward(layers(), x, cu_seqlens)
    cu_seqlens[1] = 40
    y, grads = forward_and_backward(layers(), x, cu_seqlens)
    expected_y, expected_grads = forward_and_backward(
        layers(), x, torch.tensor([0, 40, 60], dtype=torch.int32)
    )
    assert torch.equal(y, expected_y)
    assert all(map(torch.equal, grads, expected_grads))
    assert [bounds[1] for bounds in reads] == [25, 40, 40]


def test_inference_tensors_are_not_cached(reads):
    attn, x = layers()[0].requires_grad_(False), torch.randn(60, 16)
    with torch.inference_mode():
        cu_seqlens = torch.tensor([0, 25, 60], dtype=torch.int32)
        first = attn(x, cu_seqlens)
        cu_seqlens[1] = 40
        assert not torch.equal(attn(x, cu_seqlens), first)
    assert not reads


def test_host_reads_during_capture_are_refused(reads, monkeypatch):
    attn = layers()[0].requires_grad_(False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(
        Unsupported,
        match="cannot be captured in a CUDA graph: use a backend that keeps cu_seqlens on",
    ):
        attn(torch.randn(60, 16), torch.tensor([0, 25, 60], dtype=torch.int32))


@pytest.fixture
def checks(monkeypatch):
    """Record the arguments of every check of boundary values."""
    calls = []

    def counting(cu_seqlens, total, max_seqlen=None):
        calls.append((cu_seqlens, total, max_seqlen))
        check_cu_seqlens(cu_seqlens, total, max_seqlen)

    modules = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith("nsa_") and getattr(module, "check_cu_seqlens", None) is check_cu_seqlens
    ]
    assert modules
    for module in modules:
        monkeypatch.setattr(module, "check_cu_seqlens", counting)
    return calls


BOUNDARIES = torch.tensor([0, 25, 60], dtype=torch.int32)


def by_layer(checkpointed=False):
    attn, x = layers()[0], torch.randn(60, 16, requires_grad=True)
    if checkpointed:
        return checkpoint(attn, x, BOUNDARIES, use_reentrant=False)
    return attn(x, BOUNDARIES, 35)


def by_function():
    tensors = inputs(CONFIG, 60, requires_grad=True)
    return nsa_attention(*tensors, config=CONFIG, cu_seqlens=BOUNDARIES)


@pytest.mark.parametrize("run", [by_layer, by_function])
@pytest.mark.parametrize("profiled", [False, True])
def test_boundaries_are_checked_once_per_call(run, profiled, checks):
    """Forward and backward share one check.

    Under a profiler every slot runs as an operator, which must not check again.
    """
    with torch.profiler.profile() if profiled else contextlib.nullcontext():
        y = run()
        assert len(checks) == 1
        y.sum().backward()
    assert len(checks) == 1
    assert checks[0][0] is BOUNDARIES


def test_checkpoint_checks_once_per_forward(checks):
    y = by_layer(checkpointed=True)
    assert len(checks) == 1
    y.sum().backward()
    assert len(checks) == 2


def test_unchecked_boundaries_are_checked_by_the_slot(checks):
    """A slot checks another tensor or another bound, and every call after the context."""
    attn, x = layers()[0].requires_grad_(False), torch.randn(60, 16)
    q, _, _, k_cmp, v_cmp = attn.project(x, BOUNDARIES)
    plan, other = attn.resolve_plan(x, q, True), torch.tensor([0, 25, 20], dtype=torch.int32)
    with checked_boundaries(BOUNDARIES, 60, 40):
        plan.cmp(q, k_cmp, v_cmp, cu_seqlens=BOUNDARIES, max_seqlen=40)
        assert not checks
        with pytest.raises(InvalidInput, match="longest document's 35 tokens, got 34"):
            plan.cmp(q, k_cmp, v_cmp, cu_seqlens=BOUNDARIES, max_seqlen=34)
        with pytest.raises(InvalidInput, match="must not decrease"):
            plan.cmp(q, k_cmp, v_cmp, cu_seqlens=other, max_seqlen=40)
        assert len(checks) == 2
    plan.cmp(q, k_cmp, v_cmp, cu_seqlens=BOUNDARIES, max_seqlen=40)
    assert len(checks) == 3


@pytest.mark.slow
def test_compiled_slots_check_when_they_run(checks):
    torch._dynamo.reset()
    attn, x = layers()[0].requires_grad_(False), torch.randn(60, 16)
    compiled = torch.compile(attn, backend="aot_eager", fullgraph=True)
    compiled(x, BOUNDARIES)
    assert checks
    with pytest.raises(InvalidInput, match="must not decrease"):
        compiled(x, torch.tensor([0, 61, 60], dtype=torch.int32))
