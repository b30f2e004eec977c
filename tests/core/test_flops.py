"""Visible pairs and operations of attention equal those that a plain computation counts."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from nsa_core import BlockGeometry, InvalidInput, NSAConfig, attention_flops
from nsa_core.flops import visible_pairs


def geometry_of(blocks: tuple[int, ...]) -> BlockGeometry:
    """Return the geometry of (l, d, l', n, w)."""
    size, stride, block, n, window = blocks
    return BlockGeometry(size, stride, block, n, init_blocks=1, local_blocks=1, window_size=window)


def counted_pairs(blocks, length):
    """Count every visible key of every query."""
    size, stride, block, n, window = blocks
    count = dict.fromkeys(("cmp", "sel", "win", "dense"), 0)
    for t in range(length):
        count["cmp"] += sum(i * stride + size - 1 <= t for i in range(length))
        current = t // block
        chosen = [current, *range(current)][:n]  # any selection that contains the current block
        count["sel"] += sum(key // block in chosen for key in range(t + 1))
        count["win"] += sum(t - window < key <= t for key in range(length))
        count["dense"] += t + 1
    return count


@pytest.mark.parametrize(
    "blocks",
    [(8, 4, 16, 3, 24), (8, 4, 16, 4, 9), (3, 1, 5, 3, 1), (6, 3, 6, 4, 40), (4, 4, 4, 3, 11)],
    ids=str,
)
def test_visible_pairs_equal_a_count_of_every_key(blocks):
    geometry = geometry_of(blocks)
    for length in (0, 1, 2, 5, 7, 8, 12, 15, 16, 47, 48, 49, 63, 64, 65, 81):
        assert visible_pairs(geometry, length) == counted_pairs(blocks, length), length


def seen_keys(geometry: BlockGeometry, t: int) -> list[int]:
    """Return how many keys query ``t`` sees in cmp, sel, win and dense attention."""
    block = geometry.select_block_size
    chosen = [t // block, *range(t // block)][: geometry.num_selected_blocks]
    selected = sum(min(block, t + 1 - first * block) for first in chosen)
    return [geometry.num_compressed(t + 1), selected, min(t + 1, geometry.window_size), t + 1]


@pytest.mark.parametrize("length", [5, 8, 47, 48, 70])
@pytest.mark.parametrize("dense", [False, True])
def test_attention_flops_equal_those_of_plain_attention_over_the_visible_keys(length, dense):
    """Count the products of q.k and p.v, query by query, forward and backward."""
    blocks = {"compress_block_size": 8, "compress_stride": 4, "select_block_size": 16}
    counts = {"num_selected_blocks": 3, "init_blocks": 1, "local_blocks": 1, "window_size": 24}
    heads = {"n_heads": 4, "n_kv_heads": 2, "head_dim": 8, "v_head_dim": 12}
    config = NSAConfig(dim=32, **heads, **blocks, **counts)
    q = torch.randn(4, length, 8, requires_grad=True)
    k, v = (torch.randn(4, length, width, requires_grad=True) for width in (8, 12))
    with FlopCounterMode(display=False) as counter:
        out = torch.zeros(())
        for t in range(length):
            *branches, everything = seen_keys(config.geometry, t)
            for keys in [everything] if dense else branches:
                if keys:
                    weights = (q[:, t : t + 1] @ k[:, :keys].mT).softmax(-1)
                    out = out + (weights @ v[:, :keys]).sum()
        out.backward()
    assert attention_flops(config, length, dense=dense) == counter.get_total_flops()


@pytest.mark.parametrize("length", [0, True, 2.5, 2**31])
def test_attention_flops_name_a_wrong_length(length):
    with pytest.raises(InvalidInput, match="seq_len must be"):
        attention_flops(NSAConfig(dim=32, n_heads=4, n_kv_heads=2), length)
