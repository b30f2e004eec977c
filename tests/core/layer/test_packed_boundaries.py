"""The boundaries of packed documents on the host: read once a batch, not once a layer."""

from __future__ import annotations

import pytest
import torch

from nsa_core import NSAConfig, NSAttention, Unsupported, packing

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
        Unsupported, match="cannot be captured in a CUDA graph: take a backend that leaves them"
    ):
        attn(torch.randn(60, 16), torch.tensor([0, 25, 60], dtype=torch.int32))
