"""Configurations and inputs that the tests of the layer share."""

from __future__ import annotations

from typing import NamedTuple

import torch

from nsa_core import NSAConfig, NSAttention, Plan, resolve

SMALL = {
    "dim": 24,
    "n_heads": 4,
    "n_kv_heads": 2,
    "head_dim": 8,
    "v_head_dim": 6,
    "compress_block_size": 8,
    "compress_stride": 4,
    "select_block_size": 8,
    "num_selected_blocks": 4,
    "window_size": 9,
}


def small(**changes: object) -> NSAConfig:
    """A config with l=8, d=4, l'=8, n=4, w=9, 4/2 heads, widths 8/6; ``changes`` replace fields."""
    return NSAConfig(**{**SMALL, **changes})


def sdpa_plan(config: NSAConfig, dtype: torch.dtype = torch.float64, **options: object) -> Plan:
    """A plan on which every slot runs on sdpa, with gradients unless ``options`` say otherwise."""
    return resolve(config, backends="sdpa", dtype=dtype, **{"needs_grad": True, **options})


def layer_of(dtype: torch.dtype = torch.float64, **changes: object) -> NSAttention:
    """A layer with the config of :func:`small`, in ``dtype``."""
    return NSAttention(small(**changes)).to(dtype)


class Inputs(NamedTuple):
    """The tensor arguments of nsa_attention."""

    q: torch.Tensor
    k: tuple[torch.Tensor, ...]
    v: tuple[torch.Tensor, ...]
    gates: torch.Tensor


def inputs(
    config: NSAConfig, *lead: int, dtype: torch.dtype = torch.float64, requires_grad: bool = False
) -> Inputs:
    """Random q, keys and values of three branches, and gates.

    ``lead`` is (B, S), or (T,) if packed.
    """

    def random(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return (
            torch.randn(*lead, *shape, dtype=torch.float64).to(dtype).requires_grad_(requires_grad)
        )

    stats = torch.float64 if dtype == torch.float64 else torch.float32
    return Inputs(
        random(config.n_heads, config.qk_dim),
        tuple(random(config.n_kv_heads, config.qk_dim) for _ in range(3)),
        tuple(random(config.n_kv_heads, config.v_dim) for _ in range(3)),
        random(config.n_heads, 3, dtype=stats),
    )


def boundaries(*lengths: int) -> torch.Tensor:
    """cu_seqlens of documents with these lengths."""
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
