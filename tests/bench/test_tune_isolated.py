"""A third-party backend that ends its process is that candidate's failure in `nsa tune`."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import tune_faults
from nsa_backend_sdpa.plugin import nsa_register_backends as sdpa
from nsa_bench import tune as tuning_module
from nsa_bench.gate import NOT_CORRECT
from nsa_bench.shapes import parse_shape
from nsa_bench.timing import FAILED
from nsa_bench.tune import Tuning, tune
from nsa_bench.tune_candidates import find_tune_candidates
from nsa_core.contract import API_VERSION, SLOTS, BackendSpec, SlotSpec
from nsa_core.plan.loading import load_spec
from nsa_core.plan.registry import Registry
from nsa_core.util.child import Child

CONFIG = parse_shape("2/1/8").config((8, 4, 16, 3, 24))
# name -> (forward, probe, how it fails)
FAULTS = {
    "crash": ("tune_faults:crash", "accept", "forward: ended its process with exit status 3"),
    "import": ("no_such_module:forward", "accept", "its kernel does not load: ModuleNotFoundError"),
    "probe": ("tune_faults:crash", "end_probe", "ended its process with exit status 5"),
    "late": ("tune_faults:crash_while_timed", "accept", "ended its process with exit status 4"),
    "hang": ("tune_faults:hang_while_timed", "accept", "a call did not end within 4 s"),
}


def tuning_with(*names: str) -> Tuning:
    registry = Registry(()).with_backend(sdpa())
    for name in names:
        forward, probe, _ = FAULTS[name]
        slot = SlotSpec(forward, backward="nsa_backend_sdpa.win:backward")
        # Its priority is the highest: the plans of other candidates must not use it either.
        spec = BackendSpec(name, API_VERSION, {"win": slot}, f"tune_faults:{probe}", priority=100)
        entry = dataclasses.replace(load_spec(spec, "1.0", "toy"), child=Child())
        registry = Registry((*registry.entries, entry))
    candidates = find_tune_candidates(CONFIG, registry, device="cpu", dtype=torch.float32)
    steps: list[str] = []
    result = tune(candidates, length=tune_faults.TIMED, budget_s=0.001, advance=steps.append)
    assert len(steps) == candidates.steps
    return result


def assert_only_these_fail(result: Tuning, names: tuple[str, ...]) -> None:
    assert result.failed
    for use in ("inference", "training"):
        times = {(t.slot, t.backend): t for t in result.times if t.use == use}
        assert times.keys() == {*((slot, "sdpa") for slot in SLOTS), *(("win", n) for n in names)}
        assert all(times[slot, "sdpa"].time_ms for slot in SLOTS)
        for name in names:
            assert times["win", name].time_ms is None
            assert times["win", name].reason.startswith((FAILED, NOT_CORRECT))
            reasons = [times["win", name].reason]
            if reasons == [NOT_CORRECT]:
                gates = [gate for gate in result.gates if gate.combo == f"win={name}"]
                reasons = [gate.failures[0] for gate in gates]
                assert len(gates) == 2
            assert all(FAULTS[name][2] in reason for reason in reasons), (name, reasons)
    assert all(gate.ok for gate in result.gates if gate.combo.endswith("=sdpa"))
    # `auto` keeps the order of priorities in the slot of a backend without a time.
    assert {record.slot for record in result.records} == {*SLOTS} - {"win"}


@pytest.mark.slow
def test_a_kernel_that_ends_its_process_fails_and_the_others_are_timed() -> None:
    assert_only_these_fail(tuning_with("crash"), ("crash",))


@pytest.mark.slow
def test_every_end_of_a_process_is_the_failure_of_its_candidate(monkeypatch) -> None:
    monkeypatch.setattr(tuning_module, "CALL_LIMIT_S", 4.0)
    assert_only_these_fail(tuning_with(*FAULTS), (*FAULTS,))
