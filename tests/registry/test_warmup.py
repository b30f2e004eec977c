"""plan.warmup(): every slot once, forward and backward as planned, nothing left changed."""

from __future__ import annotations

import pytest
import torch

from nsa_core import InvalidInput, NSAConfig, resolve
from nsa_core.contract import SLOTS
from nsa_core.ops import record_dispatch

CONFIG = NSAConfig(
    dim=32, n_heads=4, n_kv_heads=2, head_dim=8, v_head_dim=4, compress_block_size=8, compress_stride=4,
    select_block_size=16, num_selected_blocks=4, window_size=24,
)  # fmt: skip


@pytest.mark.parametrize("varlen", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("needs_grad", [False, True], ids=["forward", "both"])
def test_every_slot_runs_as_planned(varlen: bool, needs_grad: bool) -> None:
    plan = resolve(CONFIG, backends="sdpa", needs_grad=needs_grad, varlen=varlen)
    state = torch.get_rng_state()
    with record_dispatch() as trace:
        plan.warmup()
    expected = [(slot, way) for slot in SLOTS for way in ("forward", "backward") if needs_grad or way == "forward"]
    expected = [pair for pair in expected if pair != ("select", "backward")]
    assert [(r.slot, r.direction) for r in trace] == expected
    assert torch.equal(torch.get_rng_state(), state)


def test_another_kind_of_device_is_refused() -> None:
    with pytest.raises(InvalidInput, match="the plan is for cpu, got cuda"):
        resolve(CONFIG, backends="sdpa").warmup("cuda")
