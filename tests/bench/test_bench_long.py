"""Long sequences have a separate plan, which is judged and timed separately."""

from __future__ import annotations

import dataclasses

import pytest

from nsa_bench import prefill
from nsa_bench.gate import gate_case
from nsa_bench.render import tables
from nsa_bench.shapes import parse_shape
from nsa_core.plan import default_plan
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
    def by_length(config, device, seed, length=0):
        case = gate_case(config, device, seed)
        return dataclasses.replace(case, name="long") if length >= 64 else case

    monkeypatch.setattr(prefill, "gate_case", by_length)
    auto = (Combination({}, name="auto"),)
    result = run(registry_with("other"), lengths=[40, 64, 72], phases=["forward"], combos=auto)
    assert [gate.case == "long" for gate in result.gates] == [False, True]


@pytest.mark.parametrize(("blocks", "least"), [((), 4127), ((64, 64, 64, 8, 256), 16447)])
def test_on_a_gpu_the_case_of_long_calls_has_256_compressed_tokens(blocks, least):
    config = parse_shape("64/4/128").config(*[blocks] * bool(blocks))
    tokens = [gate_case(config, "cuda:1", 0, n).lengths[0] for n in (0, least - 1, least, 2**20)]
    assert tokens[0] == tokens[1] < 1200
    assert tokens[2:] == [least] * 2
    assert gate_case(config, "cpu", 0, 2**20) == gate_case(config, "cpu", 0)
