"""GPUs by name, backend names that a layer accepts, and the standing of a backend."""

from __future__ import annotations

import importlib.metadata

import pytest

from nsa_core import InvalidInput, NSAConfig, NSAttention
from nsa_core.contract import API_VERSION, BackendSpec, Reason, SlotSpec
from nsa_core.plan import registry as registries
from nsa_core.plan.candidates import Candidate, facts_of_this_machine, find_candidates
from nsa_core.plan.gpus import ARCHITECTURES, GPUS, gpu_named
from nsa_core.plan.loading import STATUSES, BackendEntry
from nsa_core.plan.options import PlanOptions
from nsa_core.plan.registry import Registry
from nsa_core.plan.standing import standing_of, standings

CONFIG = NSAConfig(64, 4, 2)
SPEC = BackendSpec(
    "toy", API_VERSION, {"win": SlotSpec("x:f"), "cmp": SlotSpec("x:f")}, "planned:probe"
)


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("a100", "A100 (sm_80)"),
        ("H100", "H100 (sm_90)"),
        ("rtx 4090", "RTX-4090 (sm_89)"),
        ("RTX4090", "RTX-4090 (sm_89)"),
        ("sm_80", "sm_80"),
        ("SM-120", "sm_120"),
    ],
)
def test_a_gpu_is_found_by_product_or_architecture(name: str, title: str) -> None:
    assert gpu_named(name).title == title


def test_every_gpu_is_found_by_its_name_and_has_its_architecture() -> None:
    for gpu in (*GPUS, *ARCHITECTURES):
        assert gpu_named(gpu.name) == gpu
        assert gpu_named(gpu.architecture).capability == gpu.capability


def test_an_unknown_gpu_is_refused_with_a_suggestion() -> None:
    with pytest.raises(InvalidInput, match=r"unknown GPU 'h300'; did you mean '.*\(known: v100,"):
        gpu_named("h300")


def entry() -> BackendEntry:
    (of_spec,) = Registry().with_backend(SPEC).entries
    return of_spec


def candidates(**reasons: list[Reason]) -> dict[str, Candidate]:
    return {
        slot: Candidate("toy", "0", "ready", tuple(reasons.get(slot, ()))) for slot in SPEC.slots
    }


def test_standing_of_a_loaded_backend() -> None:
    first, second = Reason("one", "needs\nthis", "do it"), Reason("two", "needs that")
    assert standing_of(entry(), candidates()).sentence == "runs cmp, win"
    some = standing_of(entry(), candidates(win=[first, second]))
    assert (some.status, some.sentence) == ("ready", "runs cmp; does not support win: needs this")
    none = standing_of(entry(), candidates(win=[second], cmp=[first, second]))
    assert (none.status, none.sentence) == ("unavailable", "needs this")


def test_a_disabled_backend_has_no_answers_of_its_namesake(toy) -> None:
    toy.probe = lambda request: []
    disabled = BackendEntry("toy", "other", "2", "x", "disabled", Reason("disabled", "not here"))
    registry = Registry((entry(), disabled))
    found = find_candidates(CONFIG, PlanOptions(), registry=registry)
    answers = {e.status: {c.accepted for c in found.of(e).values()} for e in registry.entries}
    assert answers == {"ready": {True, False}, "disabled": set()}


def test_a_failing_probe_makes_a_backend_broken() -> None:
    fault = Reason("probe_raised", "its probe raised ValueError")
    both = candidates(win=[Reason("one", "needs this"), fault], cmp=[Reason("one", "needs this")])
    standing = standing_of(entry(), both)
    assert (standing.status, standing.sentence) == ("broken", "its probe raised ValueError")
    assert standing.status in STATUSES


def test_facts_of_this_machine_are_reasons_against_every_request(toy) -> None:
    absent = Reason("absent", "not installed")
    toy.probe = lambda request: [
        absent,
        *[Reason("dtype", "no float64")] * (request.dtype == "float64"),
    ]
    registered = Registry().with_backend(SPEC).get("toy")
    assert facts_of_this_machine(registered) == {absent}
    toy.probe = lambda request: [absent] * (request.device == "cuda")
    assert facts_of_this_machine(registered) == frozenset()


def test_a_probe_that_fails_is_asked_once_for_facts(toy) -> None:
    calls = []

    def raising(request):
        calls.append(request)
        raise ValueError

    toy.probe = raising
    assert facts_of_this_machine(Registry().with_backend(SPEC).get("toy")) == frozenset()
    assert len(calls) == 1


def test_candidates_for_a_simulated_gpu_need_no_gpu(toy, monkeypatch) -> None:
    toy.probe = lambda request: [] if request.capability == (9, 0) else [Reason("old", "too old")]
    monkeypatch.setattr(
        "nsa_core.plan.candidates.usable_device",
        lambda device: pytest.fail("a simulated GPU needs no device"),
    )
    registry, options = Registry().with_backend(SPEC), PlanOptions(device="cuda", dtype="bfloat16")
    for gpu, status in ((gpu_named("h100"), "ready"), (gpu_named("a100"), "unavailable")):
        found = find_candidates(CONFIG, options, registry=registry, gpu=gpu)
        assert found.requests["win"].capability == gpu.capability
        assert found.requests["win"].device == "cuda"
        assert standings(found)["toy", "in-process"].status == status


def test_a_layer_reads_names_from_metadata_and_loads_no_plugin(monkeypatch) -> None:
    monkeypatch.setattr(registries, "_default", None)
    monkeypatch.setattr(registries, "load", lambda plugin: pytest.fail("a plugin was loaded"))
    NSAttention(CONFIG, backends="sdpa")
    NSAttention(CONFIG, backends={"win": "fa2", "sel": "auto", "cmp": None})
    NSAttention(CONFIG, backends="auto")
    NSAttention(CONFIG)


def test_a_layer_accepts_a_backend_that_no_entry_point_names(monkeypatch) -> None:
    points = [point.name for point in importlib.metadata.entry_points(group="nsa.backends")]
    assert "toy" not in points
    monkeypatch.setattr(registries, "_default", Registry().with_backend(SPEC))
    assert NSAttention(CONFIG, backends={"win": "toy"}).backends == (("win", "toy"),)
