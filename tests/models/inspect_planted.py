"""A layer whose selection is known."""

from __future__ import annotations

import torch
from torch import nn

from nsa_core import NSAConfig, NSAttention


class Planted(nn.Module):
    """One NSA layer whose queries all attend to the tokens of id 1."""

    def __init__(self) -> None:
        super().__init__()
        config = NSAConfig(
            dim=8,
            n_heads=2,
            n_kv_heads=1,
            head_dim=4,
            compress_block_size=4,
            compress_stride=4,
            select_block_size=4,
            num_selected_blocks=4,
            window_size=8,
            compress="mean",
            rope=False,
        )
        self.embed, self.attn = nn.Embedding(2, 8), NSAttention(config)
        with torch.no_grad():
            self.embed.weight.zero_()
            self.embed.weight[:, 0] = 1  # every token asks
            self.embed.weight[1, 1] = 1  # the tokens of id 1 answer
            self.attn.qkv.weight.zero_()
            self.attn.qkv.weight[0:8:4, 0] = 6  # the first feature of both queries
            self.attn.qkv.weight[8:20:4, 1] = 6  # and of the keys of the three branches

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.attn(self.embed(tokens))
