"""resolve: the choice of backends, the collected reasons, and the errors."""

from __future__ import annotations

import copy
import dataclasses
import logging
import pickle

import pytest
import torch

from nsa_core.config import NSAConfig
from nsa_core.contract import API_VERSION, SLOTS, BackendSpec, Rank, Reason, SlotSpec
from nsa_core.errors import BackendUnavailable, InvalidInput, NSAError, Unsupported
from nsa_core.plan import candidates
from nsa_core.plan.plan import resolve
from nsa_core.plan.registry import Registry, default_registry
from nsa_core.torch_ops.decode_kernel import DecodeKernel
from planning import CONFIG, backends, registry_of, spec


def test_auto_prefers_the_highest_priority_then_the_first_name(toy):
    low, b, a = (
        spec("low"),
        spec("b-toy", priority=3),
        spec("a-toy", priority=3, slot_priority={"win": 2}),
    )
    plan = resolve(CONFIG, registry=registry_of(low, b, a))
    assert backends(plan) == {**dict.fromkeys(SLOTS, "a-toy"), "win": "b-toy"}
    assert not any(choice.explicit for choice in plan.choices.values())
    assert [c.backend for c in plan.choices["win"].candidates] == ["b-toy", "a-toy", "low"]
    assert all(getattr(plan, slot).backend == plan.choices[slot].backend for slot in SLOTS)


def test_rank_function_overrides_priority_and_its_failure_is_a_reason(toy):
    toy.rank = lambda request: 5 if request.slot == "win" else -1
    toy.broken = lambda request: 1 / 0
    toy.text = lambda request: "high"
    ranked, fixed = spec("ranked", priority=3, rank="planned:rank"), spec("fixed", priority=1)
    registry = registry_of(
        ranked, fixed, spec("bad", rank="planned:broken"), spec("odd", rank="planned:text")
    )
    plan = resolve(CONFIG, registry=registry)
    assert backends(plan) == {**dict.fromkeys(SLOTS, "fixed"), "win": "ranked"}
    reasons = {c.backend: [str(r) for r in c.reasons] for c in plan.choices["win"].candidates}
    assert "its rank raised ZeroDivisionError" in reasons["bad"][0]
    assert "its rank returned str, not an integer" in reasons["odd"][0]


def test_mapping_sets_single_slots_and_auto_the_others(toy):
    registry = registry_of(spec("strong", priority=9), spec("weak"))
    plan = resolve(CONFIG, backends={"win": "weak", "cmp": "auto", "sel": None}, registry=registry)
    assert backends(plan) == {**dict.fromkeys(SLOTS, "strong"), "win": "weak"}
    assert [slot for slot, choice in plan.choices.items() if choice.explicit] == ["win"]
    assert backends(resolve(CONFIG, backends="auto", registry=registry)) == dict.fromkeys(
        SLOTS, "strong"
    )


def test_refusal_of_a_named_backend_lists_its_reasons_and_backends_that_accept(toy):
    toy.refuse = lambda r: [
        Reason("a", f"no {r.slot}", "try harder"),
        Reason("b", f"not {r.dtype}"),
    ]
    registry = registry_of(spec("picky", "refuse"), spec("easy"), spec("fussy", "refuse"))
    with pytest.raises(Unsupported) as caught:
        resolve(
            CONFIG,
            backends={"win": "picky", "cmp": "picky"},
            dtype="bfloat16",
            registry=registry,
            seq_len=77,
        )
    text = str(caught.value)
    for words in (
        "no win (try harder)",
        "no cmp (try harder)",
        "not bfloat16",
        "easy 1.0: accepted",
        "asked for 'picky'",
    ):
        assert words in text
    for words in ("B=any S=77 Hq=4 G=2 Dk=8 Dv=8", "w=512", "bfloat16 on cpu", "prefill"):
        assert words in text
    assert "fussy" not in text  # neither asked for nor able to run
    # The summary names only the slots without a backend.
    assert "sel" not in text.split("request:")[0]


def test_error_of_auto_lists_why_each_backend_refuses(toy):
    toy.refuse = lambda r: [Reason("x", "only on Tuesdays")]
    registry = registry_of(spec("one", "refuse"), spec("two", slots=("cmp",)))
    with pytest.raises(Unsupported) as caught:
        resolve(CONFIG, registry=registry)
    assert "no backend takes select, sel, win, combine" in str(caught.value)
    assert "one 1.0: not supported: only on Tuesdays" in str(caught.value)
    assert "two 1.0: not supported: does not offer win" in str(caught.value)
    assert not isinstance(caught.value, BackendUnavailable)


def test_row_60_error_without_any_backend_suggests_an_installation():
    with pytest.raises(BackendUnavailable, match="pip install nsa-backend-sdpa") as caught:
        resolve(CONFIG, registry=Registry())
    assert caught.value.nothing_usable


def test_forward_only_slot_is_refused_for_training_but_not_select(toy):
    slots = {slot: SlotSpec("planned:forward") for slot in SLOTS}
    registry = registry_of(BackendSpec("once", API_VERSION, slots, "planned:accept"))
    assert backends(resolve(CONFIG, registry=registry))["sel"] == "once"
    with pytest.raises(Unsupported) as caught:
        resolve(CONFIG, needs_grad=True, registry=registry)
    assert "no backend takes cmp, sel, win, combine\n" in str(caught.value)
    assert "has no backward for win" in str(caught.value)


def test_backend_without_a_decode_form_is_refused_for_decode():
    assert isinstance(resolve(CONFIG, phase="decode", backends="sdpa").win, DecodeKernel)
    sdpa = default_registry().get("sdpa").spec
    slots = {**sdpa.slots, "win": dataclasses.replace(sdpa.slots["win"], decode=None)}
    registry = Registry().with_backend(dataclasses.replace(sdpa, name="old", slots=slots))
    with pytest.raises(Unsupported, match="has no decode form of win"):
        resolve(CONFIG, phase="decode", backends="old", registry=registry)


def test_request_contains_every_argument_of_resolve(toy):
    toy.accept = lambda request: seen.append(request) or []
    seen = []
    config = NSAConfig(dim=32, n_heads=4, n_kv_heads=2, head_dim=6, v_head_dim=10, window_size=17)
    resolve(
        config,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        needs_grad=True,
        deterministic=True,
        varlen=True,
        batch=3,
        seq_len=5,
        registry=registry_of(spec("toy")),
    )
    # The last one is about the causal kernel of sel.
    assert [request.slot for request in seen] == [*SLOTS, "win"]
    longest = config.num_selected_blocks * config.select_block_size
    assert [request.geometry.window_size for request in seen] == [17] * 5 + [longest]
    expected = {
        "n_heads": 4,
        "n_kv_heads": 2,
        "head_dim": 6,
        "v_head_dim": 10,
        "dtype": "bfloat16",
        "device": "cpu",
        "capability": None,
        "phase": "prefill",
        "needs_grad": True,
        "deterministic": True,
        "varlen": True,
        "batch": 3,
        "seq_len": 5,
        "geometry": config.geometry,
    }
    assert {name: getattr(seen[0], name) for name in expected} == expected
    assert hash(seen[0]) == hash(dataclasses.replace(seen[0]))


@pytest.mark.parametrize("enabled", [False, True])
def test_deterministic_follows_torch_unless_it_is_an_argument(toy, enabled):
    registry = registry_of(spec("toy"))
    try:
        torch.use_deterministic_algorithms(enabled)
        default = resolve(CONFIG, registry=registry)
        explicit = resolve(CONFIG, deterministic=not enabled, registry=registry)
    finally:
        torch.use_deterministic_algorithms(False)
    assert default.requests["win"].deterministic is default.win.deterministic is enabled
    assert explicit.requests["win"].deterministic is explicit.win.deterministic is not enabled


def test_auto_logs_its_choice_once(toy, caplog):
    registry = registry_of(spec("logged-once"))
    with caplog.at_level(logging.INFO, logger="nsa"):
        for _ in range(3):
            resolve(CONFIG, registry=registry)
        resolve(CONFIG, backends="logged-once", registry=registry)
        assert len(caplog.records) == 1
        assert "auto chose cmp: logged-once 1.0, select: logged-once 1.0" in caplog.text
        resolve(CONFIG, dtype="float64", registry=registry)
        assert len(caplog.records) == 2


def test_auto_logs_the_reason_of_each_choice(toy, caplog, monkeypatch):
    toy.rank = lambda request: Rank(5, "faster than\nthe others") if request.slot == "win" else 5
    registry = registry_of(spec("with-reason", rank="planned:rank"))
    measured = "1 ms against slow 50 ms"
    with caplog.at_level(logging.INFO, logger="nsa"):
        resolve(CONFIG, registry=registry)
        monkeypatch.setattr(
            candidates, "_prefer_tuned", lambda *arguments: {"win": measured, "sel": measured}
        )
        resolve(CONFIG, dtype="float64", registry=registry)
    ranked, tuned = [record.getMessage() for record in caplog.records]
    name = "with-reason 1.0"
    assert f"select: {name}, sel: {name}, win: {name} (faster than the others), combine" in ranked
    assert f"sel: {name} (tuned: {measured}), win: {name} (tuned: {measured}), combine" in tuned


def test_plan_is_immutable_and_its_copy_is_itself(toy):
    plan = resolve(CONFIG, registry=registry_of(spec("toy")))
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.cmp = None
    for mapping in (plan.requests, plan.choices):
        with pytest.raises(TypeError):
            mapping["cmp"] = None
    assert copy.copy(plan) is plan
    assert copy.deepcopy({"plan": plan})["plan"] is plan


def test_unpickled_plan_has_the_same_requests_and_choices():
    plan = resolve(
        CONFIG, backends={"win": "sdpa"}, dtype=torch.float64, needs_grad=True, varlen=True
    )
    again = pickle.loads(pickle.dumps(plan))
    assert dict(again.requests) == dict(plan.requests)
    assert backends(again) == backends(plan)
    assert [c.explicit for c in again.choices.values()] == [
        c.explicit for c in plan.choices.values()
    ]


def test_explain_lists_chosen_and_refused_backends(toy):
    toy.refuse = lambda r: [Reason("x", "too\x1b[2J tired", "sleep")]
    registry = registry_of(spec("first"), spec("tired", "refuse", priority=9))
    plan = resolve(CONFIG, backends={"win": "first"}, registry=registry)
    lines = plan.explain().splitlines()
    assert lines[0].startswith("B=any S=any Hq=4")
    assert "win: first 1.0 (asked for)" in lines
    assert "cmp: first 1.0 (auto)" in lines
    assert "  tired 1.0: not supported: too\\x1b[2J tired (sleep)" in lines
    assert str(plan).splitlines() == [line for line in lines if not line.startswith("  ")]
    assert len(str(plan).splitlines()) == 1 + len(SLOTS)


def test_workspace_bytes_calls_the_workspace_function_of_the_slots_backend(toy):
    toy.size = lambda request: request.batch * request.seq_len
    sized, bare = (
        spec("sized", slots=("win",), workspace="planned:size"),
        spec("bare", slots=set(SLOTS) - {"win"}),
    )
    plan = resolve(CONFIG, registry=registry_of(sized, bare))
    request = dataclasses.replace(plan.requests["win"], batch=3, seq_len=7)
    assert plan.workspace_bytes(request) == 21
    with pytest.raises(
        InvalidInput, match=r"batch must be >= 0, got None; seq_len must be >= 0, got None"
    ):
        plan.workspace_bytes(plan.requests["win"])
    with pytest.raises(InvalidInput, match="batch must be an integer >= 0 or None, got -1"):
        plan.workspace_bytes(dataclasses.replace(request, batch=-1))
    with pytest.raises(Unsupported, match="'bare' does not state the workspace of 'cmp'"):
        plan.workspace_bytes(dataclasses.replace(request, slot="cmp"))
    for invalid_size in (lambda r: 1.5, lambda r: -1, lambda r: 1 // 0):
        toy.size = invalid_size
        with pytest.raises(NSAError, match="backend 'sized', workspace of 'win'"):
            plan.workspace_bytes(request)


def with_fused(name: str, **fields) -> BackendSpec:
    return spec(name, fused={"backward": "planned:forward"}, **fields)


def test_workspace_bytes_of_a_fused_form_calls_the_function_of_the_backend(toy):
    toy.size = lambda request: request.batch * request.seq_len
    stated = with_fused("stated", fused_workspace={"backward": "planned:size"})
    plan = resolve(CONFIG, registry=registry_of(stated), needs_grad=True)
    request = dataclasses.replace(plan.requests["win"], batch=3, seq_len=7)
    assert plan.workspace_bytes(request, fused="backward") == 21
    with pytest.raises(Unsupported, match="'stated' does not state the workspace of 'win'"):
        plan.workspace_bytes(request)
    toy.size = lambda request: -1
    with pytest.raises(NSAError, match="'stated', workspace of the fused 'backward': -1 is not"):
        plan.workspace_bytes(request, fused="backward")
    silent = resolve(CONFIG, registry=registry_of(with_fused("silent")), needs_grad=True)
    with pytest.raises(Unsupported, match=r"'silent' does not state .* of the fused 'backward'"):
        silent.workspace_bytes(request, fused="backward")


def test_workspace_bytes_refuses_a_fused_form_that_does_not_run(toy):
    toy.size = lambda request: 1
    sized = with_fused("sized", fused_workspace={"backward": "planned:size"})
    registry = registry_of(sized, spec("other"))
    plan = resolve(CONFIG, registry=registry, needs_grad=True, backends="sized")
    request = dataclasses.replace(plan.requests["cmp"], batch=1, seq_len=64)
    with pytest.raises(InvalidInput, match="must be 'backward' or None, got 'step': the plan has"):
        plan.workspace_bytes(request, fused="step")
    for change in ({"needs_grad": False}, {"partial": True}):
        with pytest.raises(InvalidInput, match="fused must be None, got 'backward'"):
            plan.workspace_bytes(dataclasses.replace(request, **change), fused="backward")
    mixed = {"win": "other", **dict.fromkeys(("cmp", "select", "sel", "combine"), "sized")}
    for options in ({"backends": mixed, "needs_grad": True}, {"backends": "sized"}):
        without = resolve(CONFIG, registry=registry, **options)
        with pytest.raises(InvalidInput, match="fused must be None, got 'backward'"):
            without.workspace_bytes(request, fused="backward")


@pytest.mark.parametrize(
    ("stated", "fault"),
    [
        ({"step": "planned:size"}, "fused_workspace has 'step', which is not in fused"),
        ({"stop": "planned:size"}, "unknown key 'stop' in fused_workspace (known: step, "),
        ({"backward": 3}, "fused_workspace['backward'] must be 'module:function', got 3"),
        ("planned:size", "fused_workspace must be a mapping of step, "),
    ],
)
def test_a_stated_workspace_of_no_fused_form_is_a_fault_of_the_spec(toy, stated, fault):
    (entry,) = registry_of(with_fused("odd", fused_workspace=stated)).entries
    assert (entry.status, entry.reason.code) == ("broken", "bad_spec")
    assert fault in entry.reason.message
