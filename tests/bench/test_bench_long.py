"""Long calls, which have a plan of their own: judged and timed apart from short ones."""

from __future__ import annotations

import pytest

from nsa_bench import run as room
from nsa_core.dispatch import default_plan
from nsa_verify.combination import Combination


@pytest.mark.parametrize(("factor", "right"), [(1.0, True), (1.01, False)])
def test_a_backend_taken_for_long_calls_is_judged_and_timed_there(
    run, registry_with, monkeypatch, factor, right
):
    resolve = room.resolve

    def by_length(config, options, *, registry):
        is_short = options.seq_len is None
        backends = options.backends if is_short else {**options.backends, "win": "other"}
        return resolve(config, options, registry=registry, backends=backends)

    for where in (room, default_plan):
        monkeypatch.setattr(where, "LONG_SEQUENCE", 64)
    monkeypatch.setattr(room, "resolve", by_length)
    registry = registry_with("other", lambda o: o * factor)
    result = run(
        registry, lengths=[48, 64], phases=["forward"], combos=(Combination({}, name="auto"),)
    )
    assert [gate.ok for gate in result.gates] == [True, right]
    (long,) = (who for name, who in result.combos.items() if name.endswith("from 64 tokens on"))
    assert (result.combos["auto"]["win"].split()[0], long["win"].split()[0]) == ("sdpa", "other")
    timed = {
        m.length: m.performance is not None for m in result.measurements if m.subject == "auto"
    }
    assert timed == {48: right, 64: right}  # one name, so one verdict
    if right:
        assert {
            m.length: m.parts["win"].backend for m in result.measurements if m.subject == "auto"
        } == {
            48: "sdpa",
            64: "other",
        }
