"""Layers, caches filled with NaN, and comparisons for the tests of decoding."""

from __future__ import annotations

from typing import Any

import torch

from nsa_core import NSACache, NSAConfig, NSAttention
from nsa_verify import oracle
from nsa_verify.judge.tensor import judge

# l, d, l', n and w are small and all different, so that their boundaries do not coincide.
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
    """A layer of TINY with ``changes``, and with random biases, encodings and norm weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        attn = NSAttention(NSAConfig(**{**TINY, **changes}))
        with torch.no_grad():
            for name, parameter in attn.named_parameters():
                if name.endswith(("bias", "position", "norm.weight")):
                    parameter.add_(0.3 * torch.randn_like(parameter))
    return attn.to(dtype)


def tokens(attn: NSAttention, batch: int, length: int, seed: int = 1) -> torch.Tensor:
    """Random x [batch, length, dim] in the layer's dtype."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, length, attn.config.dim, dtype=torch.float64, generator=generator)
    return x.to(attn.out.weight)


def poisoned_cache(attn: NSAttention, batch: int, max_len: int, **options: Any) -> NSACache:
    """A cache whose tensors are NaN wherever nothing was written."""
    cache = attn.new_cache(batch, max_len, **options)
    for store in cache.kv.tensors():
        store.fill_(torch.nan)
    return cache


def whole(attn: NSAttention, x: torch.Tensor) -> torch.Tensor:
    """The output of the layer over whole sequences, without a cache."""
    with torch.no_grad():
        return attn(x)


def one_by_one(attn: NSAttention, x: torch.Tensor, cache: NSACache) -> torch.Tensor:
    """The output of the layer over x, one token per step."""
    return torch.cat([attn(x[:, t : t + 1], cache=cache) for t in range(x.shape[1])], 1)


def assert_equal(
    actual: torch.Tensor, golden: torch.Tensor, magnitude: torch.Tensor | None = None
) -> None:
    """Judge float64 outputs [B, S, dim] in units of rounding noise.

    ``magnitude`` [B, S, dim] replaces the absolute values of ``golden`` where its terms cancel.
    """
    assert actual.dtype == golden.dtype == torch.float64
    verdict = judge(
        actual, golden, golden, golden.abs() if magnitude is None else magnitude, torch.float64
    )
    assert verdict, verdict.why


def truth(attn: NSAttention, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The oracle's output of the layer over x [B, S, dim], and its magnitude.

    The magnitude is the output with the absolute value of every term of the last two sums.
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
    """A copy of all tensors of a cache."""
    return [t.clone() for t in (*cache.kv.tensors(), cache.lengths)]


def assert_unchanged(cache: NSACache, before: list[torch.Tensor]) -> None:
    """Assert that a cache has the bits of ``before``, from :func:`content`, except unread rows."""
    for new, old in zip(content(cache), before):
        rows = len(new) - (new.dim() > 1)
        torch.testing.assert_close(new[:rows], old[:rows], rtol=0, atol=0, equal_nan=True)
    assert cache.host_lengths() == before[-1].tolist()
