"""The boundaries of packed documents: checked once a call, and read by the host once a batch, not
once a layer.
"""

from __future__ import annotations

import contextlib
import sys

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from cases import inputs
from nsa_core import InvalidInput, NSAConfig, NSAttention, Unsupported, nsa_attention, packing
from nsa_core.torch_ops.tensor_checks import check_cu_seqlens, checked_boundaries

CONFIG = NSAConfig(
    dim=16,
    n_heads=4,
    n_kv_heads=2,
    compress_block_size=8,
    compress_stride=4,
    select_block_size=16,
    num_selected_blocks=3,
    window_size=21,
)


@pytest.fixture
def reads(monkeypatch):
    """As on a GPU: tensors that cost a synchronisation; every read of one is noted."""
    seen, read = [], torch.Tensor.tolist

    class Noting(packing.WeakTensorKeyDictionary):
        def __setitem__(self, key, value):
            seen.append(read(key))
            super().__setitem__(key, value)

    monkeypatch.setattr(packing, "_read", Noting())
    monkeypatch.setattr(packing, "_on_gpu", lambda cu_seqlens: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return seen


def layers():
    torch.manual_seed(0)
    return [NSAttention(CONFIG, backends="sdpa") for _ in range(2)]


def passed_through(attns, x, cu_seqlens):
    for attn in attns:
        x = attn(x, cu_seqlens)
    x.square().sum().backward()
    return x.detach(), [p.grad.clone() for attn in attns for p in attn.parameters()]


def test_all_layers_and_both_passes_read_once(reads):
    x = torch.randn(60, 16, requires_grad=True)
    cu_seqlens = torch.tensor([0, 25, 60], dtype=torch.int32)
    passed_through(layers(), x, cu_seqlens)
    assert reads == [[0, 25, 60]]
    passed_through(layers(), x, cu_seqlens.clone())
    assert len(reads) == 2


def test_boundaries_that_change_in_place_are_read_again(reads):
    x = torch.randn(60, 16)
    cu_seqlens = torch.tensor([0, 25, 60], dtype=torch.int32)
    passed_through(layers(), x, cu_seqlens)
    cu_seqlens[1] = 40
    y, grads = passed_through(layers(), x, cu_seqlens)
    golden, expected = passed_through(layers(), x, torch.tensor([0, 40, 60], dtype=torch.int32))
    assert torch.equal(y, golden)
    assert all(map(torch.equal, grads, expected))
    assert [bounds[1] for bounds in reads] == [25, 40, 40]


def test_what_inference_mode_made_is_not_remembered(reads):
    attn, x = layers()[0].requires_grad_(False), torch.randn(60, 16)
    with torch.inference_mode():
        cu_seqlens = torch.tensor([0, 25, 60], dtype=torch.int32)
        first = attn(x, cu_seqlens)
        cu_seqlens[1] = 40
        assert not torch.equal(attn(x, cu_seqlens), first)
    assert not reads


def test_capture_is_refused(reads, monkeypatch):
    attn = layers()[0].requires_grad_(False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(
        Unsupported, match="cannot be captured in a CUDA graph: use a backend that keeps cu_seqlens on"
    ):
        attn(torch.randn(60, 16), torch.tensor([0, 25, 60], dtype=torch.int32))


@pytest.fixture
def checks(monkeypatch):
    """The arguments of every check of the boundaries' values, wherever it is called from."""
    calls = []

    def counting(cu_seqlens, total, max_seqlen=None):
        calls.append((cu_seqlens, total, max_seqlen))
        check_cu_seqlens(cu_seqlens, total, max_seqlen)

    users = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith("nsa_") and getattr(module, "check_cu_seqlens", None) is check_cu_seqlens
    ]
    assert users
    for module in users:
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
def test_boundaries_are_checked_once_a_call(run, profiled, checks):
    """Forward and backward. A profiler sees every slot as an operator, which must not check
    either.
    """
    with torch.profiler.profile() if profiled else contextlib.nullcontext():
        y = run()
        assert len(checks) == 1
        y.sum().backward()
    assert len(checks) == 1
    assert checks[0][0] is BOUNDARIES


def test_a_checkpoint_checks_once_in_each_forward(checks):
    y = by_layer(checkpointed=True)
    assert len(checks) == 1
    y.sum().backward()
    assert len(checks) == 2


def test_a_slot_called_on_its_own_checks(checks):
    attn, x = layers()[0].requires_grad_(False), torch.randn(60, 16)
    q, _, _, k_cmp, v_cmp = attn.project(x, BOUNDARIES)
    plan = attn.plan_of(x, q, True)
    for wrong, text in (
        ([1, 25, 60], "must start at 0, got 1"),
        ([0, 25, 20], "must not decrease, got 25 then 20"),
        ([0, 25, 59], "must end at the 60 tokens given, got 59"),
    ):
        cu_seqlens = torch.tensor(wrong, dtype=torch.int32)
        with pytest.raises(InvalidInput, match=text):
            plan.cmp(q, k_cmp, v_cmp, cu_seqlens=cu_seqlens)
    with pytest.raises(InvalidInput, match="longest document's 35 tokens, got 34"):
        plan.cmp(q, k_cmp, v_cmp, cu_seqlens=BOUNDARIES, max_seqlen=34)
    assert len(checks) == 4


def test_only_the_boundaries_that_were_checked_count_as_checked(checks):
    """Another tensor, or another bound, is checked by the slot; so is everything afterwards."""
    attn, x = layers()[0].requires_grad_(False), torch.randn(60, 16)
    q, _, _, k_cmp, v_cmp = attn.project(x, BOUNDARIES)
    plan, other = attn.plan_of(x, q, True), torch.tensor([0, 25, 20], dtype=torch.int32)
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


def test_compiled_slots_check_when_they_run(checks):
    torch._dynamo.reset()
    attn, x = layers()[0].requires_grad_(False), torch.randn(60, 16)
    compiled = torch.compile(attn, backend="aot_eager", fullgraph=True)
    compiled(x, BOUNDARIES)
    assert checks
    with pytest.raises(InvalidInput, match="must not decrease"):
        compiled(x, torch.tensor([0, 61, 60], dtype=torch.int32))
