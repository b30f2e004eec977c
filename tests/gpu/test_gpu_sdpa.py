"""sdpa reads packed boundaries on the host once, and refuses them in a CUDA graph."""

from __future__ import annotations

import pytest
import torch

from nsa_core import NSAConfig, NSAttention, Unsupported
from nsa_core.errors import NSAError

pytestmark = pytest.mark.gpu

CONFIG = NSAConfig(dim=256, n_heads=8, n_kv_heads=2, head_dim=64)


def test_packed_boundaries_synchronise_once() -> None:
    attn = NSAttention(CONFIG, backends="sdpa").to("cuda", torch.bfloat16)
    x = torch.randn(3000, 256, device="cuda", dtype=torch.bfloat16)
    cu_seqlens = torch.tensor([0, 1100, 1150, 3000], dtype=torch.int32, device="cuda")

    def forward_backward() -> None:
        attn(x, cu_seqlens, max_seqlen=1850).square().sum().backward()

    forward_backward()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        forward_backward()
        with pytest.raises(NSAError, match="synchroniz"):  # the mode detects new boundaries
            attn(x, cu_seqlens.clone(), max_seqlen=1850)
    finally:
        torch.cuda.set_sync_debug_mode(before)


def test_capturing_packed_documents_is_refused() -> None:
    attn = NSAttention(CONFIG, backends="sdpa").to("cuda", torch.bfloat16).requires_grad_(False)
    x = torch.randn(300, 256, device="cuda", dtype=torch.bfloat16)
    cu_seqlens = torch.tensor([0, 110, 300], dtype=torch.int32, device="cuda")
    attn(x, cu_seqlens, max_seqlen=190)  # the cached boundaries must not be used in the graph
    with (
        pytest.raises(Unsupported, match="cannot be captured"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        attn(x, cu_seqlens, max_seqlen=190)
