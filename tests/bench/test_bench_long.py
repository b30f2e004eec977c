"""Long sequences have a separate plan, which is judged and timed separately."""

from __future__ import annotations

import pytest

from nsa_bench import prefill, subjects
from nsa_core.plan import default_plan
from nsa_verify.problems.combination import Combination


@pytest.mark.slow
@pytest.mark.parametrize(("factor", "right"), [(1.0, True), (1.01, False)])
def test_the_plan_of_long_sequences_is_judged_and_timed_separately(
    run, registry_with, monkeypatch, factor, right
):
    resolve = subjects.resolve

    def by_length(config, options, *, registry):
        is_short = options.seq_len is None
        backends = options.backends if is_short else {**options.backends, "win": "other"}
        return resolve(config, options, registry=registry, backends=backends)

    for where in (prefill, subjects, default_plan):
        monkeypatch.setattr(where, "LONG_SEQUENCE", 64)
    monkeypatch.setattr(subjects, "resolve", by_length)
    registry = registry_with("other", lambda o: o * factor)
    result = run(
        registry, lengths=[48, 64], phases=["forward"], combos=(Combination({}, name="auto"),)
    )
    assert [gate.ok for gate in result.gates] == [True, right]
    (long,) = (
        backends for name, backends in result.combos.items() if name.endswith("from 64 tokens on")
    )
    assert (result.combos["auto"]["win"].split()[0], long["win"].split()[0]) == ("sdpa", "other")
    timed = {
        m.length: m.performance is not None for m in result.measurements if m.subject == "auto"
    }
    assert timed == {48: right, 64: right}  # both have one name, so one verdict
    if right:
        assert {
            m.length: m.parts["win"].backend for m in result.measurements if m.subject == "auto"
        } == {
            48: "sdpa",
            64: "other",
        }
