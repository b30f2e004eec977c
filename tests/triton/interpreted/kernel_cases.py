"""Cases small enough for the interpreter: S <= 80 and D = 16, one property varied in each."""

from __future__ import annotations

import dataclasses
from typing import Any

from nsa_core.plan.registry import default_registry
from nsa_verify.conformance.points import Point
from nsa_verify.conformance.slot_under_test import SlotUnderTest
from nsa_verify.problems.cases import Case, config_of

SLOTS = ("cmp", "select", "sel", "win", "combine")

BASE = config_of(4, 2, 16, 16, (8, 4, 16, 2, 20), init_blocks=0, local_blocks=1, rope=False)


def _case(
    name: str,
    *lengths: int,
    batch: int = 1,
    packed: bool = False,
    fused: bool = False,
    **fields: Any,
) -> Case:
    config = dataclasses.replace(BASE, **fields)
    return Case(name, config, lengths, batch=batch, packed=packed, fused=fused)


CASES = (
    _case("h=4", 35, batch=2, n_heads=4, n_kv_heads=1),
    _case("packed", 0, 5, 36, 1, 9, 0, packed=True),
    _case(
        "h=3, Dk 24 Dv 8, w > S",
        25,
        n_heads=6,
        head_dim=24,
        v_head_dim=8,
        window_size=80,
        fused=True,
    ),
    _case(
        "h=1, D 12 in 16",
        75,
        n_heads=2,
        head_dim=12,
        v_head_dim=12,
        num_selected_blocks=4,
        init_blocks=1,
    ),
    _case(
        "h=7, l=l', l'=d", 35, n_heads=7, n_kv_heads=1, compress_block_size=16, compress_stride=16
    ),
    _case("widths of three bands", 21, head_dim=48, v_head_dim=40, num_selected_blocks=1),
    _case("S < l", 5, batch=2),
    _case("S=1", 1),
)
EVERY_DTYPE = CASES[:3]
SLOW = (
    _case("long", 80, batch=2),
    _case("packed h=3 w=1", 3, 35, n_heads=3, n_kv_heads=1, packed=True, window_size=1),
    _case("one buffer", 50, fused=True, num_selected_blocks=4),
    _case("MQA h=16", 40, n_heads=16, n_kv_heads=1, head_dim=32, v_head_dim=16),
)
# For gradcheck: at most a few hundred input elements.
_SMALLEST: dict[str, Any] = {
    "n_heads": 2,
    "n_kv_heads": 1,
    "head_dim": 2,
    "compress_block_size": 4,
    "compress_stride": 2,
}
SMALLEST = (
    _case("dense", 8, v_head_dim=3, **_SMALLEST),
    _case("packed", 2, 6, v_head_dim=2, packed=True, **_SMALLEST),
)


def point(case: Case, dtype: str, deterministic: bool = False) -> Point:
    """Return ``case`` as a point of the conformance suite."""
    return Point(case, dtype, deterministic)


def under_test(slot: str) -> SlotUnderTest:
    """Return the Triton backend's ``slot``, on the CPU."""
    return SlotUnderTest(default_registry().get("triton"), slot)
