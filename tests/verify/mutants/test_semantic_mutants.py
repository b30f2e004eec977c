"""The checks of `nsa verify` find the semantic mutants; scores.json records which check finds each.

The ordinary run takes a ninth of the mutants and runs the recorded job on each. The slow run scores
all of them anew.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from nsa_core.contract import SLOTS
from nsa_verify.run import suite
from semantic import record
from semantic.catalog import ALL, CONTROLS
from semantic.model import RAISED, SemanticMutant, healthy_combination
from semantic.score import combination_of, default_jobs, failure, score

RECORDED = record.load()["mutants"]
# A ninth of the mutants that quick kills, in the order of scores.json.
_SAMPLED = [name for name, entry in RECORDED.items() if entry["preset"] == "quick"][::9]
SAMPLE = sorted((m for m in ALL if m.name in _SAMPLED), key=lambda m: _SAMPLED.index(m.name))


@functools.cache
def _jobs() -> dict[tuple[str, str, str], suite.Job]:
    return {
        (job.name, job.case.name, str(job.dtype).removeprefix("torch.")): job
        for job in default_jobs("quick")
    }


def _recorded_job(mutant: SemanticMutant) -> suite.Job:
    entry = RECORDED[mutant.name]
    return _jobs()[entry["check"], entry["case"], entry["dtype"]]


def test_mutants_are_many_and_in_every_slot_and_phase() -> None:
    assert len(ALL) >= 90
    assert len({m.name for m in ALL}) == len({m.backend for m in ALL}) == len(ALL)
    phases = {(m.slot, m.phase) for m in ALL}
    assert phases == {(s, p) for s in SLOTS for p in ("forward", "backward", "decode")} - {
        ("select", "backward"),
        ("combine", "decode"),
    }
    assert set(RECORDED) == {m.name for m in ALL}, "run record.py: the mutants changed"


def test_quick_kills_at_least_95_percent() -> None:
    killed = [name for name, entry in RECORDED.items() if entry["preset"] == "quick"]
    assert len(killed) >= 0.95 * len(RECORDED)


def test_documentation_shows_the_recorded_scores() -> None:
    assert record.section() == record.sentence(record.load()), "run record.py"


@pytest.mark.slow
def test_jobs_of_the_sample_pass_on_the_healthy_backend() -> None:
    """A job that always fails would kill every mutant."""
    healthy = healthy_combination()
    jobs = {id(job): job for job in map(_recorded_job, SAMPLE)}
    for job in jobs.values():
        finding = failure(job, healthy)
        assert finding is None, finding


@pytest.mark.few_cases(
    "select forward: blocks from the ninth on are not scored if the length is no multiple of l'",
    "select forward: fp64 is computed in fp32",
    "select forward: a list whose n is no power of two loses its last place",
    "sel forward: a row without blocks has lse 0",
    "sel forward: a negative scale loses its sign",
    "sel backward: a block named twice apart counts twice in dk and dv",
    "win forward: v at an unaligned address is read rounded down",
    "combine forward: the last channel of an odd Dv is zero",
    "cmp decode: kv heads from the fifth on read the fourth",
    "select decode: local blocks count from the longest sequence",
    "sel decode: a page that is just full is looked up one too early",
    "sel decode: padding rows repeat the last token",
    "win decode: a window across the end of the ring loses its first part",
    "win decode: rows of a step from the 33rd on give zero",
    "cmp forward: partial: lse is that of the previous row",
    "sel backward: partial: the offset is ignored",
)
@pytest.mark.parametrize("mutant", SAMPLE, ids=lambda m: m.name)
def test_semantic_mutant_is_killed(
    mutant: SemanticMutant, record_property: Callable[[str, object], None]
) -> None:
    job = _recorded_job(mutant)
    finding = failure(job, combination_of(mutant))
    record_property("mutant", mutant.name)
    record_property("killed_by", f"{job.name} on {job.case.name}" if finding else "")
    assert not RAISED, RAISED
    assert finding, f"{mutant.name} survives {job.name} on {job.case.name}; run record.py"


@pytest.mark.slow
def test_recorded_scores_are_those_of_all_mutants(
    record_property: Callable[[str, object], None],
) -> None:
    """Score all mutants with quick, and print the score and the kills of each check."""
    result = score((*CONTROLS, *ALL), default_jobs("quick"))
    assert not RAISED, RAISED
    assert not {c.name for c in CONTROLS} & result.kills.keys()
    record_property("semantic_score", f"{len(result.kills)} of {len(ALL)} killed by quick")
    for check, kills in result.kills_of_check().items():
        seconds = result.seconds_of_check[check]
        record_property(
            "semantic_score",
            f"{check:24} {kills:3} kills, {seconds:5.1f} s, {kills / max(seconds, 0.1):6.1f} /s",
        )
    recorded = {n: entry["check"] for n, entry in RECORDED.items() if entry["preset"] == "quick"}
    found = {name: kill.job for name, kill in result.kills.items()}
    assert found == recorded, sorted(set(found.items()) ^ set(recorded.items()))
