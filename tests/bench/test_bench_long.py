"""Long sequences have a separate plan, which is judged and timed separately."""

from __future__ import annotations

import dataclasses

import pytest

from nsa_bench import prefill
from nsa_bench.gate import gate_case, long_cases
from nsa_bench.render import tables
from nsa_bench.shapes import parse_shape
from nsa_core.plan import default_plan
from nsa_core.plan.registry import discover
from nsa_verify.problems.combination import Combination


@pytest.mark.slow
@pytest.mark.parametrize(("factor", "right"), [(1.0, True), (1.01, False)])
def test_the_plan_of_long_sequences_is_judged_and_timed_separately(
    run, registry_with, monkeypatch, factor, right
):
    resolve = prefill.resolve

    def by_length(config, options, *, registry):
        is_other = options.seq_len == 64
        backends = {**options.backends, "win": "other"} if is_other else options.backends
        return resolve(config, options, registry=registry, backends=backends)

    monkeypatch.setattr(default_plan, "PLANNED_LENGTHS", (64, 96))
    monkeypatch.setattr(prefill, "resolve", by_length)
    registry = registry_with("other", lambda o: o * factor)
    result = run(
        registry, lengths=[48, 64, 96], phases=["forward"], combos=(Combination({}, name="auto"),)
    )
    assert [gate.ok for gate in result.gates] == [True, right]
    assert [
        (name.partition(" from ")[2], backends["win"].split()[0])
        for name, backends in result.combos.items()
    ] == [("", "sdpa"), ("64 tokens on", "other"), ("96 tokens on", "sdpa")]
    verdicts = {row[2] for row in tables._combos(result)[2]}
    assert verdicts == ({"ok"} if right else {"ok; FAILED on 2/1/8 float32"})
    timed = {
        m.length: m.performance is not None for m in result.measurements if m.subject == "auto"
    }
    assert timed == dict.fromkeys((48, 64, 96), right)  # all have one name, so one verdict
    if right:
        assert {
            m.length: m.parts["win"].backend for m in result.measurements if m.subject == "auto"
        } == {
            48: "sdpa",
            64: "other",
            96: "sdpa",
        }


def test_long_calls_are_judged_on_a_case_of_their_own(run, registry_with, monkeypatch):
    def cases(registry, backends, config, device, seed, longest):
        long = dataclasses.replace(gate_case(config, device, seed), name=f"as of {longest}")
        return [long] if longest >= 64 else []

    auto = (Combination({}, name="auto"),)
    options = {"phases": ["forward"], "combos": auto}
    monkeypatch.setattr(default_plan, "PLANNED_LENGTHS", (64,))
    monkeypatch.setattr(prefill, "long_cases", cases)
    result = run(registry_with("other"), lengths=[72, 40, 64], **options)
    assert [gate.case == "as of 72" for gate in result.gates] == [False, True]


def test_a_gpu_has_a_case_of_the_length_that_reaches_every_kernel():
    """fa2 states 16512 tokens for cmp, and none for win."""
    registry, config = discover(), parse_shape("64/4/128").config()

    def tokens(slot, backend, device, longest):
        cases = long_cases(registry, {slot: backend}, config, device, 0, longest)
        return [case.tokens for case in cases]

    assert [tokens("cmp", "fa2", "cuda:1", n) for n in (1153, 1154, 2**20)] == [[], [1154], [16512]]
    assert tokens("win", "fa2", "cuda:1", 2**20) == tokens("cmp", "sdpa", "cuda", 2**20) == []
    assert tokens("cmp", "fa2", "cpu", 2**20) == []
