"""Requests of slots that tests vary by one field."""

from __future__ import annotations

from typing import Any

from nsa_core import BlockGeometry, Request


def make_request(slot: str, seq_len: int | None = 2048, **fields: Any) -> Request:
    """Return a bf16 training request of Hq=12, G=2, D=64 on an sm_90 GPU, with other ``fields``."""
    defaults: dict[str, Any] = {
        "geometry": BlockGeometry(),
        "n_heads": 12,
        "n_kv_heads": 2,
        "head_dim": 64,
        "v_head_dim": 64,
        "dtype": "bfloat16",
        "device": "cuda",
        "capability": (9, 0),
        "needs_grad": True,
        "batch": 1,
    }
    return Request(slot=slot, seq_len=seq_len, **{**defaults, **fields})
