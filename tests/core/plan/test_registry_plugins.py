"""Installed toy plugins: valid ones work, faulty ones are listed with a reason (rows 57, 58)."""

from __future__ import annotations

import dataclasses
import sys

import pytest
import torch

import toys
from installed import install as install_into
from nsa_core.config import NSAConfig
from nsa_core.contract import API_VERSION, BackendSpec, Reason, SlotSpec, Unavailable
from nsa_core.errors import BackendUnavailable, NSAError, Unsupported
from nsa_core.plan.loading import STATUSES, installed
from nsa_core.plan.plan import resolve
from nsa_core.plan.registry import discover
from nsa_core.plan.spec_checks import faults_of

CONFIG = NSAConfig(dim=32, n_heads=4, n_kv_heads=2)


def by_distribution(registry):
    return {entry.distribution: entry for entry in registry.entries}


@pytest.mark.slow
def test_row_57_valid_plugin_runs_beside_every_faulty_one(discovered):
    registry = discovered
    entry = by_distribution(registry)["toy-good"]
    assert (entry.status, entry.version, entry.reason, entry.first_party) == (
        "ready",
        "3.1",
        None,
        False,
    )
    assert by_distribution(registry)["nsa-backend-sdpa"].status == "ready"
    plan = resolve(CONFIG, needs_grad=True, registry=registry)
    assert plan.choices["combine"].backend == "toy-good"  # priority 5 beats 0
    assert plan.choices["win"].backend == "sdpa"
    gates, o = (
        torch.rand(1, 3, 4, 3, requires_grad=True),
        [torch.randn(1, 3, 4, 8) for _ in range(3)],
    )
    out = plan.combine(gates, *o)
    torch.testing.assert_close(out, sum(gates[..., i : i + 1] * o[i] for i in range(3)))
    out.sum().backward()
    assert gates.grad is not None
    assert (
        plan.workspace_bytes(dataclasses.replace(plan.requests["combine"], batch=2, seq_len=5))
        == 10
    )


@pytest.mark.parametrize("name", toys.REFUSED)
def test_row_57_faulty_plugin_is_listed_with_its_reason(discovered, name):
    status, words = toys.REFUSED[name]
    entry = by_distribution(discovered)[name]
    assert entry.status == status
    assert words in (entry.reason.message if name != "toy-rude" else str(entry.reason))
    assert entry.spec is None
    assert entry.version == "1.2"
    with pytest.raises(BackendUnavailable) as caught:
        resolve(CONFIG, backends=entry.name, registry=discovered)
    assert f"{name} 1.2: {status}: " in str(caught.value)
    assert "Traceback" not in str(caught.value)


def test_row_57_every_fault_of_a_spec_is_named(discovered):
    message = by_distribution(discovered)["toy-bad-spec"].reason.message
    for fault in (
        "slot rope: forward must be 'module:function', got 'no colon'",
        "slot cmp: backward must be None or",
        "priority must be an integer, got '9'",
        "slots['win'] must be a SlotSpec, got 4",
    ):
        assert fault in message


@pytest.mark.parametrize("kind", [BackendSpec, SlotSpec, Unavailable])
def test_every_field_that_a_plugin_registers_is_checked(kind):
    slot = SlotSpec("x:f")
    valid = {
        BackendSpec: BackendSpec("toy", API_VERSION, {"win": slot}, "x:f"),
        SlotSpec: slot,
        Unavailable: Unavailable("toy", Reason("no", "not today")),
    }
    for field in dataclasses.fields(kind):
        wrong = dataclasses.replace(valid[kind], **{field.name: object()})
        if kind is SlotSpec:
            wrong = dataclasses.replace(valid[BackendSpec], slots={"win": wrong})
        assert f"{field.name} must be" in "".join(faults_of(wrong)), field.name


@pytest.mark.parametrize("evidence", [("",), ("win_kernel", ""), "win_kernel", ["win_kernel"]])
def test_evidence_is_a_tuple_of_nonempty_strings(evidence):
    slot = SlotSpec("x:f", evidence=evidence)
    message = f"slot win: evidence must be a tuple of nonempty strings, got {evidence!r}"
    assert faults_of(BackendSpec("toy", API_VERSION, {"win": slot}, "x:f")) == [message]


@pytest.mark.parametrize("version", ["1.1", 1.1, [1, 1], (1,), (1, -1), (True, 1)])
def test_a_malformed_version_of_the_contract_is_named_with_a_valid_one(version):
    (fault,) = faults_of(BackendSpec("toy", version, {"win": SlotSpec("x:f")}, "x:f"))
    assert fault == f"api_version must be (major, minor), such as {API_VERSION}, got {version!r}"


def test_row_57_a_plugin_in_a_child_is_planned_without_its_kernels_here(isolated):
    """Its probe, rank and import of kernels run in the child; the plan says where it runs."""
    imported = {name for name in sys.modules if name.startswith("toy_")}
    plan = resolve(CONFIG, registry=isolated)
    assert plan.choices["combine"].backend == "toy-good"
    with pytest.raises(NSAError, match="'toy-good', slot 'combine': it runs in a child process"):
        plan.combine(torch.rand(1, 3, 4, 3))
    with pytest.raises(BackendUnavailable, match=r"no-kernel 1\.2: not supported: its kernel does"):
        resolve(CONFIG, backends={"combine": "toy-no-kernel"}, registry=isolated)
    assert {name for name in sys.modules if name.startswith("toy_")} == imported


def test_row_57_raising_probe_is_a_reason_of_its_slot(discovered):
    registry = discovered
    plan = resolve(CONFIG, registry=registry)
    candidates = plan.choices["combine"].candidates
    candidate = next(c for c in candidates if c.backend == "toy-probe-raises")
    assert candidate.status == "ready"
    assert [r.code for r in candidate.reasons] == ["probe_raised"]
    assert "ZeroDivisionError" in candidate.reasons[0].message
    with pytest.raises(Unsupported, match="ZeroDivisionError"):
        resolve(CONFIG, backends={"combine": "toy-probe-raises"}, registry=registry)


def test_row_57_kernel_that_cannot_be_imported_is_a_reason(discovered):
    registry = discovered
    with pytest.raises(
        BackendUnavailable, match=r"toy-no-kernel 1\.2: not supported: its kernel does not load"
    ):
        resolve(CONFIG, backends={"combine": "toy-no-kernel"}, registry=registry)
    preferred = dataclasses.replace(
        registry.get("toy-no-kernel").spec, name="toy-first", priority=99
    )
    plan = resolve(CONFIG, registry=registry.with_backend(preferred))
    assert plan.choices["combine"].backend == "toy-good"  # auto chooses the next candidate
    first = plan.choices["combine"].candidates[0]
    assert (first.backend, [r.code for r in first.reasons]) == (
        "toy-first",
        ["kernel_import_failed"],
    )


def test_row_58_name_conflict_names_both_distributions(discovered):
    registry = discovered
    twins = [by_distribution(registry)[name] for name in ("toy-twin-one", "toy-twin-two")]
    for entry in twins:
        assert entry.status == "broken"
        assert entry.reason.code == "name_conflict"
        assert "toy-twin-one 1.2" in entry.reason.message
        assert "toy-twin-two 1.2" in entry.reason.message
    with pytest.raises(BackendUnavailable, match=r"claimed by toy-twin-one .* and toy-twin-two"):
        resolve(CONFIG, backends={"combine": "toy-twin"}, registry=registry)


def test_row_58_first_party_backend_is_not_preferred_in_a_name_conflict(install, monkeypatch):
    install("toy-impostor", toys.good("sdpa", "toy_impostor"), point="sdpa")
    entries = [e for e in discover().entries if e.name == "sdpa"]
    assert [e.status for e in entries] == ["broken", "broken"]
    assert "nsa-backend-sdpa" in entries[0].reason.message
    assert "toy-impostor" in entries[0].reason.message
    monkeypatch.setenv("NSA_DISABLE_PLUGINS", "toy-impostor")
    registry = discover()
    assert registry.get("sdpa").status == "ready"
    assert registry.get("sdpa").first_party


def test_entry_has_a_reason_unless_it_is_ready(discovered):
    for entry in discovered.entries:
        assert entry.status in STATUSES
        assert (entry.spec is None) == (entry.reason is not None) == (entry.status != "ready")


def test_second_copy_of_a_distribution_on_the_path_is_ignored(install, tmp_path, monkeypatch):
    install("toy-twice", toys.good("toy-twice", "toy_twice"), version="2.0")
    second = tmp_path / "second"
    second.mkdir()
    install_into(second, "toy-twice", toys.good("toy-twice", "toy_twice"), version="1.0")
    with open(second / "toy_twice-1.0.dist-info" / "entry_points.txt", "a") as points:
        points.write("toy-gone-since = toy_twice\n")
    monkeypatch.setattr("sys.path", [*sys.path, str(second)])
    assert [(p.name, p.version) for p in installed() if p.distribution == "toy-twice"] == [
        ("toy-twice", "2.0")
    ]
    assert discover().get("toy-twice").status == "ready"


def test_unreadable_entry_points_give_one_broken_entry(install):
    target = install("toy-garbled", "x = 1")
    (target / "toy_garbled-1.2.dist-info" / "entry_points.txt").write_text(
        "[nsa.backends]\nno equals sign\n"
    )
    registry = discover()
    assert registry.get("toy-garbled").status == "broken"
    assert registry.get("sdpa").status == "ready"


@pytest.mark.parametrize(
    ("plugins", "disabled", "ready"),
    [
        (None, None, {"toy-a", "toy-b", "sdpa"}),
        ("", None, {"sdpa"}),
        ("Toy_A", None, {"toy-a", "sdpa"}),
        ("dist-b , nobody", None, {"toy-b", "sdpa"}),
        (None, "toy-a", {"toy-b", "sdpa"}),
        (None, "dist_a,sdpa", {"toy-b"}),
        ("toy-a", "toy-a", {"sdpa"}),
        (None, "1", {"sdpa"}),
        (None, "all", {"sdpa"}),
        (None, "0", {"toy-a", "toy-b", "sdpa"}),
        (None, "", {"toy-a", "toy-b", "sdpa"}),
    ],
)
def test_environment_variables_disable_plugins_by_name_or_distribution(
    install, monkeypatch, plugins, disabled, ready
):
    for letter in "ab":
        install(
            f"dist-{letter}", toys.good(f"toy-{letter}", f"dist_{letter}"), point=f"toy-{letter}"
        )
    for variable, value in (("NSA_PLUGINS", plugins), ("NSA_DISABLE_PLUGINS", disabled)):
        if value is not None:
            monkeypatch.setenv(variable, value)
    registry = discover()
    assert {e.name for e in registry.ready()} - {
        "fa2",
        "triton",
    } == ready  # fa2 and triton are ready on machines where they are installed
    for entry in registry.entries:
        if entry.name in {"toy-a", "toy-b", "sdpa"} - ready:
            assert entry.status == "disabled"
            assert "NSA_" in entry.reason.message


def test_safe_mode_imports_no_third_party_code(install, monkeypatch):
    monkeypatch.setenv("NSA_PLUGINS", "toy-trap")
    install("toy-trap", "raise AssertionError('imported')")
    entry = discover(safe=True).get("toy-trap")
    assert (entry.status, entry.reason.code) == ("disabled", "disabled")
    assert "safe mode" in entry.reason.message
    assert discover().get("toy-trap").status == "broken"
