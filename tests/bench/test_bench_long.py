"""Long sequences have a separate plan, which is judged and timed separately."""

from __future__ import annotations

import pytest

from nsa_bench import prefill
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
