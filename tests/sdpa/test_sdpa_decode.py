"""Decode forms of the slots, each against the oracle's rows of the same sequences."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from nsa_backend_sdpa import decode, engine
from nsa_core import NSAConfig, resolve
from nsa_core.errors import InvalidInput
from nsa_verify.checks.decode_parity import decode_parity, quick_steps, step_data
from nsa_verify.combination import Combination

SDPA = Combination(dict.fromkeys(("cmp", "select", "sel", "win", "combine"), "sdpa"))
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("step", quick_steps(), ids=lambda step: step.case.name)
def test_decode_forms_equal_the_oracle(step, dtype):
    findings = list(decode_parity(SDPA, step, dtype))
    assert {f.slot for f in findings} == {"cmp", "select", "sel", "win"}
    assert len(findings) >= 7
    assert not [f for f in findings if not f.ok]


@pytest.mark.parametrize("step", quick_steps()[1:3], ids=lambda step: step.case.name)
def test_decode_forms_in_many_runs(step, monkeypatch):
    """A budget so small that cmp, win and select take a key, and sel a query, at a time."""
    monkeypatch.setattr(engine, "SCORE_BYTES", {"cpu": 1, "cuda": 1})
    assert not [f for f in decode_parity(SDPA, step, torch.float64) if not f.ok]


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(
    "step", [s for s in quick_steps() if s.rows > 2], ids=lambda step: step.case.name
)
def test_decode_forms_some_rows_at_a_time(step, rows, monkeypatch):
    """As long steps are taken, from a ring that holds far more than some rows see."""
    monkeypatch.setattr(engine, "SCORE_BYTES", {"cpu": 1, "cuda": 1})
    for least in ("_LEAST_ROWS", "_LEAST_CHOOSING"):
        monkeypatch.setattr(decode, least, rows)
    small = {**vars(step.case), "config": dataclasses.replace(step.case.config, window_size=7)}
    step = dataclasses.replace(step, case=type(step.case)(**small))
    assert not [f for f in decode_parity(SDPA, step, torch.float64) if not f.ok]


@pytest.mark.parametrize("head", [0, 1])
def test_a_store_in_one_tensor_with_another(head):
    """Keys and values that lie beside each other: rows that are no view of a matrix."""
    generator = torch.Generator().manual_seed(0)
    both = torch.randn(3, 8, 2, 10, generator=generator)
    keys = both[..., 5 * head : 5 * head + 5]
    index = torch.randint(3 * 8 * 2, (4, 6), generator=generator)
    assert torch.equal(decode._picked(keys, index), keys.reshape(-1, 5)[index])


def test_a_step_that_replays_with_other_numbers_in_its_tensors():
    step = quick_steps()[0]
    first = step_data(step, torch.float64)
    fewer = first.call.lengths - 1
    plan = SDPA.plan(step.case.config, torch.float64, needs_grad=False, phase="decode")
    k, v = first.stores["k_win"], first.stores["v_win"]
    first.call.lengths.copy_(fewer)
    first.call.starts.copy_((fewer - 1).clamp(min=0))
    o, lse = plan.win(first.q, k, v, call=first.call)
    assert (lse[0] == -torch.inf).all()  # the sequence of one token has none left
    assert torch.isfinite(lse[1:]).all()
    assert (o[0] == 0).all()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"needs_grad": True}, "decode has no gradient"),
        ({"varlen": True}, "takes no packed documents"),
        ({"page_size": 40}, "page_size must be a multiple of select_block_size 64, got 40"),
    ],
)
def test_requests_that_decode_cannot_have(given, said):
    with pytest.raises(InvalidInput, match=said):
        resolve(NSAConfig(dim=64, n_heads=4, n_kv_heads=2), phase="decode", **given)
