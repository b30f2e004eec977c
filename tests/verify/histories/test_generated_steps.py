"""Generated decode steps: every pair of sizes, and faults that hand-written steps cannot show."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from nsa_core.dispatch.plan import Plan
from nsa_verify.checks import generated_steps
from nsa_verify.checks.decode_parity import decode_plan
from nsa_verify.combination import Combination
from nsa_verify.generated.design import longer_design, missing_tuples

AUTO = Combination({}, name="auto")


@dataclasses.dataclass(frozen=True)
class Changed(Combination):
    """A combination whose decode form of ``slot`` receives changed arguments."""

    slot: str = ""
    change: object = None

    def plan(self, config, dtype, **fields) -> Plan:
        plan = super().plan(config, dtype, **fields)
        kernel = getattr(plan, self.slot)
        wrapped = lambda *tensors, call: self.change(kernel, tensors, call)  # noqa: E731
        return dataclasses.replace(plan, **{self.slot: wrapped})


def _without_scale(kernel, tensors, call):
    scale = tensors[0].shape[-1] ** -0.5
    return kernel(*tensors, call=dataclasses.replace(call, scale=scale))


def _sixteen_blocks(kernel, tensors, call):
    q, k, v, blocks = tensors
    blocks = blocks.clone()
    blocks[..., 16:] = -1
    return kernel(q, k, v, blocks, call=call)


def _four_kv_heads(kernel, tensors, call):
    q, k, v, *rest = tensors
    heads = torch.arange(k.shape[-2]).clamp(max=3)
    return kernel(q, k[..., heads, :], v[..., heads, :], *rest, call=call)


FAULTS = [
    ("cmp", _without_scale),
    ("sel", _without_scale),
    ("win", _without_scale),
    ("sel", _sixteen_blocks),
    ("sel", _four_kv_heads),
    ("win", _four_kv_heads),
]


@pytest.mark.parametrize("seed", [0, 4])
def test_quick_steps_have_every_pair(seed):
    rows = longer_design(generated_steps.LEVELS, generated_steps.COUNTS["quick"], seed=seed)
    assert missing_tuples(generated_steps.LEVELS, rows) == []


def test_steps_are_valid_and_have_enough_rows_for_the_bias_rule():
    steps = generated_steps.draw_steps("quick", 0)
    assert len(steps) == generated_steps.COUNTS["quick"]
    for step in steps:
        assert all(0 <= new <= min(n, step.rows) for n, new in zip(step.lengths, step.new))
        assert sum(step.new) >= 12
    assert max(len(step.lengths) for step in steps) >= 7
    assert any(  # the blocks from the 17th on are read
        max(step.lengths) > 17 * step.case.config.select_block_size
        for step in steps
        if step.case.config.num_selected_blocks > 16
    )
    assert any(step.wide_gates for step in steps)


def _first_failure(combination, steps, dtype=torch.float32):
    for step in steps:
        for finding in generated_steps.parity(combination, step, dtype):
            if finding.ok is False:
                return finding
    return None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_healthy_backend_passes(dtype):
    assert _first_failure(AUTO, generated_steps.draw_steps("quick", 3)[:2], dtype) is None


@pytest.mark.parametrize(
    ("slot", "change"), FAULTS, ids=[f"{slot} {change.__name__}" for slot, change in FAULTS]
)
def test_fault_is_found_and_described(slot, change):
    steps = generated_steps.draw_steps("quick", 0)
    if change is _sixteen_blocks:
        steps = [
            step
            for step in steps
            if step.case.config.num_selected_blocks * step.case.config.select_block_size < 250
            and step.case.config.num_selected_blocks > 16
        ]
    failure = _first_failure(Changed({}, slot=slot, change=change), steps)
    assert failure is not None
    assert failure.slot == slot
    assert "--seed 0: Hq=" in failure.detail
    assert "decode" in decode_plan(AUTO, steps[0], torch.float32).requests["cmp"].phase
