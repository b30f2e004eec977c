"""attn(x, cache=cache): what is decoded in pieces is what the whole sequence gives."""

from __future__ import annotations

import pytest
import torch

from nsa_core import NSAConfig, NSAttention

CONFIG = NSAConfig(
    dim=24, n_heads=4, n_kv_heads=2, head_dim=8, v_head_dim=6, compress_block_size=8, compress_stride=4,
    select_block_size=8, num_selected_blocks=4, window_size=9,
)  # fmt: skip


@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("first", [0, 1, 7, 8, 9, 20])
def test_prefill_and_steps_equal_prefill(first, page_size):
    torch.manual_seed(0)
    attn = NSAttention(CONFIG).double()
    x = torch.randn(2, 40, 24, dtype=torch.float64)
    cache = attn.new_cache(2, 40, page_size=page_size)
    parts = [attn(x[:, :first], cache=cache), *(attn(x[:, t : t + 1], cache=cache) for t in range(first, 40))]
    torch.testing.assert_close(torch.cat(parts, 1), attn(x).detach(), rtol=1e-12, atol=1e-12)
