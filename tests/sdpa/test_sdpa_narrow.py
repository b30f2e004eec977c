"""Heads of a few elements, whose strides make `pad` choose layouts that the operators misread."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from nsa_backend_sdpa import aten
from nsa_core import resolve
from nsa_verify.problems.cases import Case, config_of
from nsa_verify.problems.slot_runs import run_slots
from slot_results import assert_slot_correct

CONFIG = config_of(4, 2, 1, 2, (8, 4, 16, 3, 64), dim=64, rope=False)


@pytest.mark.few_cases
@pytest.mark.parametrize("scale", [-0.7, 0.0, 0.9])
@pytest.mark.parametrize("v_width", [1, 2, 3, 4])
@pytest.mark.parametrize("width", [1, 2])
def test_narrow_heads_match_the_oracle(width: int, v_width: int, scale: float) -> None:
    """Covers all branches, forward and backward.

    The window covers the sequence, so that win also runs as one causal attention call.
    """
    config = dataclasses.replace(CONFIG, head_dim=width, v_head_dim=v_width, scale=scale)
    case = Case("narrow", config, (21,), batch=2)
    plan = resolve(config, dtype=torch.float64, backends="sdpa", needs_grad=True)
    data = case.data(torch.float64)
    runs = run_slots(plan, case, data)
    for slot in ("cmp", "sel", "win"):
        run = runs[slot]
        assert_slot_correct(slot, run.inputs, run.outputs, config.geometry, scale, do=data.do)


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("heads", [1, 2])
def test_operands_have_a_last_axis_of_unit_stride(width: int, heads: int) -> None:
    """Other strides raise an error on CUDA and give wrong results on the CPU."""
    q = -torch.randn(3, 5, heads, width).transpose(1, 2)
    k, v = torch.randn(3, 5, width), torch.randn(3, 5, 3)
    assert [x.stride(-1) for x in aten._operands(q, k, v, 8)] == [1, 1, 1]
