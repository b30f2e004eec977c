"""The rank of fa2: above triton where FlashAttention-2 was measured to be faster."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import pytest

from nsa_backend_fa2 import rank as ranks
from nsa_backend_triton.plugin import nsa_register_backends as triton_backend
from nsa_core import NSAConfig, resolve
from nsa_core.contract import BackendSpec, Rank, Request
from nsa_core.plan.candidates import find_candidates
from nsa_core.plan.gpus import gpu_named
from nsa_core.plan.options import PlanOptions
from nsa_core.plan.registry import Registry, discover
from slot_requests import make_request

SHAPE = {"n_heads": 64, "n_kv_heads": 4, "head_dim": 128, "v_head_dim": 128}
A100 = make_request("cmp", 65536, capability=(8, 0), **SHAPE)
RESULTS = pathlib.Path(__file__).parents[2] / "benchmarks/results/h200_as_sm80/branch_ranks.json"


WIDE = {"n_heads": 8, "n_kv_heads": 1, "head_dim": 256, "v_head_dim": 256}


@pytest.mark.parametrize(
    "changes",
    [{}, WIDE, {**WIDE, "needs_grad": False}, {**WIDE, "slot": "win"}],
)
def test_long_sequences_of_wide_heads_prefer_fa2_on_an_a100(changes: dict[str, object]) -> None:
    answer = ranks.rank(dataclasses.replace(A100, **changes))
    assert isinstance(answer, Rank)
    assert answer.value > triton_backend().priority
    assert answer.reason == "measured faster than triton on sm_80"


@pytest.mark.parametrize(
    "changes",
    [
        {"seq_len": 8192},
        {"seq_len": None},
        {"capability": (9, 0)},
        {"capability": (8, 6)},
        {"phase": "decode", "needs_grad": False},
        {"varlen": True},
        {"partial": True},
        {"deterministic": True},
        {"needs_grad": False},
        {"head_dim": 64, "v_head_dim": 64},
        {"slot": "win"},
        {**WIDE, "slot": "win", "seq_len": 4096},
    ],
)
def test_other_requests_keep_the_usual_rank(changes: dict[str, object]) -> None:
    rank = ranks.rank(dataclasses.replace(A100, **changes))
    assert rank == ranks.PRIORITY < triton_backend().priority


def test_sel_comes_last() -> None:
    assert ranks.rank(dataclasses.replace(A100, slot="sel")) == ranks.SEL_PRIORITY


def test_ranks_follow_the_measurement() -> None:
    """In the result file fa2 is at least as fast as triton wherever it ranks first."""
    rows = json.loads(RESULTS.read_text())["rows"]
    chosen = 0
    for row in rows:
        heads, groups, width = map(int, row["shape"].split("/"))
        for training, phase in ((True, "training"), (False, "forward")):
            request = dataclasses.replace(
                A100,
                slot=row["slot"],
                n_heads=heads,
                n_kv_heads=groups,
                head_dim=width,
                v_head_dim=width,
                seq_len=row["tokens"],
                needs_grad=training,
            )
            if ranks.rank(request) != ranks.PRIORITY:
                chosen += 1
                ratio = row[f"triton_{phase}_ms"] / row[f"fa2_{phase}_ms"]
                assert ratio >= 1, (row, phase)
    assert len(rows) == 96
    assert chosen >= 10


def registry_of_a_ready_fa2(monkeypatch: pytest.MonkeyPatch) -> Registry:
    monkeypatch.setattr("nsa_backend_fa2.probe.probe", lambda request: [])
    return discover()


def test_explain_says_why_auto_took_fa2(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = registry_of_a_ready_fa2(monkeypatch)
    config = NSAConfig(dim=8192, n_heads=64, n_kv_heads=4, head_dim=128)
    options = PlanOptions(device="cuda", dtype="bfloat16", needs_grad=True, batch=1, seq_len=65536)
    found = find_candidates(config, options, registry=registry, gpu=gpu_named("a100"))
    first = {slot: candidates[0] for slot, candidates in found.by_slot.items()}
    assert (first["cmp"].backend, first["win"].backend) == ("fa2", "triton")
    assert "measured faster than triton" in first["cmp"].rank_reason
    assert "fa2" not in (first["sel"].backend, first["select"].backend)


def test_plan_explains_the_rank_of_its_choice() -> None:
    def backend(reason: object) -> BackendSpec:
        sdpa = discover().get("sdpa").spec
        assert sdpa is not None
        path = f"{__name__}:{'prefer' if reason else 'nonsense'}"
        return dataclasses.replace(sdpa, name="ranked", rank=path)

    config = NSAConfig(dim=64, n_heads=2, n_kv_heads=1)
    plan = resolve(config, device="cpu", registry=discover().with_backend(backend("why")))
    assert "win: ranked" in plan.explain()
    assert "(auto, it is quick)" in plan.explain()
    nonsense = resolve(config, device="cpu", registry=discover().with_backend(backend(None)))
    refused = next(c for c in nonsense.choices["win"].candidates if c.backend == "ranked")
    assert refused.reasons[0].message == "its rank returned Rank, not an integer or a Rank"


def prefer(request: Request) -> Rank:
    """Rank first, with a reason."""
    return Rank(99, "it is quick")


def nonsense(request: Request) -> Rank:
    """Return a rank whose reason is no text."""
    return Rank(99, 5)  # type: ignore[arg-type]
