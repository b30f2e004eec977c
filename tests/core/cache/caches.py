"""Layers, caches full of NaN, and verdicts that the tests of decoding share."""

from __future__ import annotations

from typing import Any

import torch

from nsa_core import NSACache, NSAConfig, NSAttention
from nsa_verify import oracle
from nsa_verify.judge.tensor import judge

# l, d, l', n, w are small and all different, so that an edge of one is not an edge of another.
TINY = {
    "dim": 20,
    "n_heads": 4,
    "n_kv_heads": 2,
    "head_dim": 8,
    "v_head_dim": 6,
    "compress_block_size": 8,
    "compress_stride": 4,
    "select_block_size": 16,
    "num_selected_blocks": 3,
    "window_size": 21,
}
EDGES = (0, 1, 7, 8, 9, 15, 16, 17, 20, 21, 22)  # of l, l', w
OPTIONS: dict[str, dict[str, Any]] = {
    "linear": {"compress": "linear"},
    "conv": {"compress": "conv"},
    "mean": {"compress": "mean"},
    "attn_pool": {"compress": "attn_pool"},
    "rotary before phi": {"rope_before_compress": True},
    "no rotary, odd widths": {"rope": False, "head_dim": 7, "v_head_dim": 9},
    "norms and mlp gates": {"qk_norm": True, "gate": "mlp"},
    "one pair": {"shared_kv": True},
    "one pair, rotary before phi": {
        "shared_kv": True,
        "rope_before_compress": True,
        "compress": "conv",
    },
    "l=d, h=1": {"compress_block_size": 4, "n_heads": 2},
    "l=l', w=1": {"compress_block_size": 16, "window_size": 1},
    "three of a group, n=1": {
        "n_heads": 6,
        "num_selected_blocks": 1,
        "init_blocks": 0,
        "local_blocks": 1,
    },
}


def layer_of(dtype: torch.dtype = torch.float64, seed: int = 0, **changes: Any) -> NSAttention:
    """A layer of TINY with ``changes``; gates, encodings and norms differ from token to token."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        attn = NSAttention(NSAConfig(**{**TINY, **changes}))
        with torch.no_grad():
            for name, parameter in attn.named_parameters():
                if name.endswith(("bias", "position", "norm.weight")):
                    parameter.add_(0.3 * torch.randn_like(parameter))
    return attn.to(dtype)


def tokens(attn: NSAttention, batch: int, length: int, seed: int = 1) -> torch.Tensor:
    """x [batch, length, dim] of the layer's dtype."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, length, attn.config.dim, dtype=torch.float64, generator=generator)
    return x.to(attn.out.weight)


def poisoned_cache(attn: NSAttention, batch: int, max_len: int, **options: Any) -> NSACache:
    """A cache whose stores are NaN wherever nothing was written."""
    cache = attn.new_cache(batch, max_len, **options)
    for store in cache.stores.tensors():
        store.fill_(torch.nan)
    return cache


def whole(attn: NSAttention, x: torch.Tensor) -> torch.Tensor:
    """The layer over whole sequences."""
    with torch.no_grad():
        return attn(x)


def one_by_one(attn: NSAttention, x: torch.Tensor, cache: NSACache) -> torch.Tensor:
    """The layer's output over x, a token at a time."""
    return torch.cat([attn(x[:, t : t + 1], cache=cache) for t in range(x.shape[1])], 1)


def assert_equal(
    actual: torch.Tensor, golden: torch.Tensor, magnitude: torch.Tensor | None = None
) -> None:
    """float64 [B, S, dim], judged in units of rounding noise; ``magnitude`` [B, S, dim] where
    golden cancels.
    """
    assert actual.dtype == golden.dtype == torch.float64
    verdict = judge(
        actual, golden, golden, golden.abs() if magnitude is None else magnitude, torch.float64
    )
    assert verdict, verdict.why


def truth(attn: NSAttention, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The oracle's whole layer over x [B, S, dim], and the same with every last term made
    positive.
    """
    state, config = attn.state_dict(), attn.config
    with torch.no_grad():
        p = oracle.project(state, x, config)
        o = oracle.attention(p.q, p.k, p.v, p.gates, config, k_cmp=p.k_cmp, v_cmp=p.v_cmp)
        v = (p.v[0].abs(), p.v[1].abs(), p.v[2].abs())
        m = oracle.attention(p.q, p.k, v, p.gates, config, k_cmp=p.k_cmp, v_cmp=p.v_cmp.abs())
        weight = state["out.weight"].double()
        return o.flatten(-2) @ weight.T, m.flatten(-2) @ weight.abs().T


def content(cache: NSACache) -> list[torch.Tensor]:
    """A copy of all that a cache holds."""
    return [t.clone() for t in (*cache.stores.tensors(), cache.lengths)]


def assert_unchanged(cache: NSACache, kept: list[torch.Tensor]) -> None:
    """The same bits as :func:`content` gave, but for the rows that nobody reads."""
    for now, before in zip(content(cache), kept):
        rows = len(now) - (now.dim() > 1)
        torch.testing.assert_close(now[:rows], before[:rows], rtol=0, atol=0, equal_nan=True)
    assert cache.host_lengths() == kept[-1].tolist()
