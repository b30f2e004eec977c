"""Planning with faulty probes, missing devices and many threads (rows 21, 49, 52, 53, 57)."""

from __future__ import annotations

import dataclasses
import logging
import subprocess
import sys
import threading
import time

import pytest
import torch

from nsa_core.contract import SLOTS, Reason
from nsa_core.errors import BackendUnavailable, InvalidInput, Unsupported
from nsa_core.plan.candidates import details
from nsa_core.plan.plan import resolve
from nsa_core.plan.registry import Registry, default_registry
from planning import CONFIG, backends, registry_of, spec

R, OF_LIST = Reason("x", "refuses"), "of its probe's list is"


@pytest.mark.parametrize(
    ("probe", "code", "message"),
    [
        (lambda r: None, "probe_nonsense", "its probe returned NoneType, not a list of Reasons"),
        (lambda r: Reason("x", "alone"), "probe_nonsense", "returned Reason, not a list of R"),
        (lambda r: ["text"], "probe_nonsense", f"item 0 {OF_LIST} str, not a Reason"),
        (lambda r: [R, Reason("x", 3)], "probe_nonsense", f"item 1 {OF_LIST} Reason, not a Reason"),
        (lambda r: [Reason("x", "")], "probe_nonsense", "not a Reason with code and message"),
        (lambda r: {}["x"], "probe_raised", "KeyError: 'x'"),
        (lambda r: sys.exit(3), "probe_raised", "SystemExit: 3"),
        (lambda r: (_ for _ in ()).throw(TimeoutError("mine")), "probe_raised", "Error: mine"),
    ],
)
def test_row_57_faulty_probe_is_a_reason_against_its_backend(toy, probe, code, message):
    toy.bad = probe
    plan = resolve(CONFIG, registry=registry_of(spec("bad", "bad", priority=9), spec("good")))
    assert backends(plan) == dict.fromkeys(SLOTS, "good")
    (candidate,) = (c for c in plan.choices["win"].candidates if c.backend == "bad")
    assert candidate.reasons[0].code == code
    assert message in candidate.reasons[0].message


@pytest.mark.parametrize("result", [None, "one line"])
def test_a_detail_function_that_returns_no_list_is_described(toy, result):
    toy.lines = lambda: result
    (entry,) = registry_of(spec("bad", detail="planned:lines")).entries
    kind = type(result).__name__
    assert details(entry) == [f"its detail function returned {kind}, not a list of texts"]


def test_probe_that_cannot_be_imported_is_a_reason(toy):
    plan = resolve(CONFIG, registry=registry_of(spec("bad", "absent", priority=9), spec("good")))
    assert backends(plan)["cmp"] == "good"
    assert "AttributeError" in plan.explain()


def test_missing_or_out_of_range_device_raises(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BackendUnavailable, match=r"device 'cuda:0' cannot be used: torch .* CUDA"):
        resolve(CONFIG, device="cuda:0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(InvalidInput, match="'cuda:2' does not exist: there are 2 CUDA devices"):
        resolve(CONFIG, device="cuda:2")


@pytest.mark.parametrize("capability", [(7, 5), (12, 0)])
def test_row_49_error_names_required_and_actual_capability(toy, monkeypatch, capability):
    def probe(request):
        major, minor = request.capability
        fits = (8, 0) <= request.capability <= (9, 0)
        return (
            [] if fits else [Reason("sm", f"needs sm_80 to sm_90, this GPU is sm_{major}{minor}")]
        )

    toy.gpu = probe
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    capabilities = {1: capability, None: (8, 6)}
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda device: capabilities[device.index]
    )
    registry = registry_of(spec("gpu", "gpu"))
    assert resolve(CONFIG, device="cuda", registry=registry).requests["cmp"].capability == (8, 6)
    with pytest.raises(Unsupported) as caught:
        resolve(CONFIG, device="cuda:1", registry=registry)
    number = "{}{}".format(*capability)
    assert f"needs sm_80 to sm_90, this GPU is sm_{number}" in str(caught.value)
    assert f"on cuda sm_{number}" in str(caught.value)


def run_in_threads(work, count: int = 8) -> list:
    """Call ``work`` in ``count`` threads that start at the same moment; return the results."""
    barrier, results = threading.Barrier(count), []

    def run():
        barrier.wait()
        results.append(work())

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_row_52_concurrent_first_calls_share_one_registry(monkeypatch):
    registry_module, calls = sys.modules["nsa_core.plan.registry"], []
    monkeypatch.setattr(registry_module, "_default", None)
    real = registry_module.discover
    monkeypatch.setattr(
        registry_module, "discover", lambda: calls.append(1) or time.sleep(0.05) or real()
    )
    registries = run_in_threads(default_registry)
    assert len(calls) == 1
    assert len(registries) == 8
    assert all(registry is registries[0] for registry in registries)


def test_row_52_concurrent_first_plans_and_calls_give_bitwise_equal_results():
    sdpa = default_registry().get("sdpa").spec
    # Under a new name, so that the operators are not defined yet.
    registry = Registry().with_backend(dataclasses.replace(sdpa, name="sdpa-threads"))
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 70, 4, 8), torch.randn(1, 70, 2, 8), torch.randn(1, 70, 2, 8)

    def run():
        return resolve(CONFIG, registry=registry).win(q, k, v)[0]

    outputs = run_in_threads(run)
    assert len(outputs) == 8
    assert all(torch.equal(o, outputs[0]) for o in outputs)


def test_row_52_many_threads_log_the_choice_of_auto_once(toy, caplog):
    registry = registry_of(spec("logged-by-many"))
    with caplog.at_level(logging.INFO, logger="nsa"):
        run_in_threads(lambda: resolve(CONFIG, registry=registry))
    assert len(caplog.records) == 1


@pytest.mark.slow
def test_row_53_import_and_cpu_plan_do_not_query_cuda():
    code = """
import torch
def trap(*args, **options): raise AssertionError("CUDA was queried")
properties = ("get_device_capability", "get_device_properties")
for name in ("_lazy_init", "is_available", "device_count", *properties):
    setattr(torch.cuda, name, trap)
from nsa_core import NSAConfig, NSAttention, nsa_attention, resolve
plan = resolve(NSAConfig(dim=32, n_heads=4, n_kv_heads=2), device="cpu")
assert plan.win.backend == "sdpa"
assert not torch.cuda.is_initialized()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
