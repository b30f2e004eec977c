"""Decode forms of the sdpa backend, each compared with the oracle on the same sequences."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from nsa_backend_sdpa import decode, engine
from nsa_core import NSAConfig, resolve
from nsa_core.errors import InvalidInput
from nsa_verify.checks.decode_parity import decode_parity
from nsa_verify.problems.combination import Combination
from nsa_verify.problems.step_data import step_data
from nsa_verify.problems.steps import quick_steps

SDPA = Combination(dict.fromkeys(("cmp", "select", "sel", "win", "combine"), "sdpa"))
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.few_cases
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("step", quick_steps(), ids=lambda step: step.case.name)
def test_decode_forms_match_the_oracle(step, dtype):
    findings = list(decode_parity(SDPA, step, dtype))
    assert {f.slot for f in findings} == {"cmp", "select", "sel", "win"}
    assert len(findings) >= 7
    assert not [f for f in findings if not f.ok]


@pytest.mark.parametrize("step", quick_steps()[1:3], ids=lambda step: step.case.name)
def test_decode_forms_in_the_smallest_chunks_match_the_oracle(step, monkeypatch):
    """The score limit makes chunks of one key in cmp, win and select, and of one query in sel."""
    monkeypatch.setattr(engine, "SCORE_BYTES", {"cpu": 1, "cuda": 1})
    assert not [f for f in decode_parity(SDPA, step, torch.float64) if not f.ok]


@pytest.mark.few_cases
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(
    "step", [s for s in quick_steps() if s.rows > 2], ids=lambda step: step.case.name
)
def test_decode_forms_split_into_query_chunks_match_the_oracle(step, rows, monkeypatch):
    """Steps are split as long steps are; the ring holds far more rows than a chunk sees."""
    monkeypatch.setattr(engine, "SCORE_BYTES", {"cpu": 1, "cuda": 1})
    for limit in ("_MIN_ROWS", "_MIN_SELECT_ROWS"):
        monkeypatch.setattr(decode, limit, rows)
    fields = {**vars(step.case), "config": dataclasses.replace(step.case.config, window_size=7)}
    step = dataclasses.replace(step, case=type(step.case)(**fields))
    assert not [f for f in decode_parity(SDPA, step, torch.float64) if not f.ok]


@pytest.mark.parametrize("head", [0, 1])
def test_gather_from_a_store_that_is_a_slice_of_a_wider_tensor(head):
    """Keys and values interleaved in one tensor: the store cannot be viewed as a matrix."""
    generator = torch.Generator().manual_seed(0)
    interleaved = torch.randn(3, 8, 2, 10, generator=generator)
    keys = interleaved[..., 5 * head : 5 * head + 5]
    index = torch.randint(3 * 8 * 2, (4, 6), generator=generator)
    assert torch.equal(decode._gathered(keys, index), keys.reshape(-1, 5)[index])


def test_decode_step_follows_in_place_changes_of_its_lengths():
    """A CUDA graph replays a step with new numbers in the same tensors."""
    step = quick_steps()[0]
    data = step_data(step, torch.float64)
    shorter = data.call.lengths - 1
    plan = SDPA.plan(step.case.config, torch.float64, needs_grad=False, phase="decode")
    k, v = data.stores["k_win"], data.stores["v_win"]
    data.call.lengths.copy_(shorter)
    data.call.starts.copy_((shorter - 1).clamp(min=0))
    o, lse = plan.win(data.q, k, v, call=data.call)
    assert (lse[0] == -torch.inf).all()  # the sequence of one token is now empty
    assert torch.isfinite(lse[1:]).all()
    assert (o[0] == 0).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"needs_grad": True}, "decode has no gradient"),
        ({"varlen": True}, "takes no packed documents"),
        ({"page_size": 40}, "page_size must be a multiple of select_block_size 64, got 40"),
    ],
)
def test_invalid_decode_requests_raise(options, message):
    with pytest.raises(InvalidInput, match=message):
        resolve(NSAConfig(dim=64, n_heads=4, n_kv_heads=2), phase="decode", **options)
