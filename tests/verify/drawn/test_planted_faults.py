"""Faults that the hand-written cases of quick do not have, and the generated ones must find."""

from __future__ import annotations

import killers
import pytest

from generated_faults import FAULTS, Fault
from harness import Mutant, faulty_module
from nsa_core.contract import DTYPES, SLOTS
from nsa_verify.checks import layer
from nsa_verify.drawn.draw import PARTIAL, draw
from nsa_verify.drawn.function_levels import FUNCTIONS
from nsa_verify.drawn.judge import judge
from nsa_verify.problems.combination import Combination
from nsa_verify.problems.findings import Finding
from nsa_verify.run import suite


def first_failure(combination: Combination, slot: str) -> Finding | None:
    """Return the first failed finding of the generated quick cases of ``slot``."""
    for kind in (slot, f"partial {slot}"):
        for case in draw(kind, "quick", DTYPES) if kind in (slot, *PARTIAL) else ():
            for finding in judge(combination, case):
                if finding.ok is False:
                    return finding
    return None


@pytest.mark.slow  # the commands of verify run these cases too
@pytest.mark.parametrize("slot", SLOTS)
def test_sdpa_passes_every_generated_case(slot: str) -> None:
    combination = Combination({slot: "sdpa"})
    for case in draw(slot, "quick", DTYPES):
        findings = judge(combination, case)
        assert findings
        assert [f for f in findings if f.ok is not True] == []


@pytest.mark.few_cases(
    "cmp ignores a given scale",
    "win reads another kv head from the fifth on",
    "win has a gradient error in fp16 only",
    "win has a wrong dk in groups of 10 to 16",
)
@pytest.mark.parametrize(
    "fault",
    # The default run plants every twelfth fault, the slow run all of them.
    [f if i % 12 == 0 else pytest.param(f, marks=pytest.mark.slow) for i, f in enumerate(FAULTS)],
    ids=lambda fault: fault.name,
)
def test_planted_fault_is_found(fault: Fault) -> None:
    finding = first_failure(fault.combination(), fault.slot)
    assert finding is not None, f"{fault.name}: no generated case of quick fails"
    assert finding.quantity != "run", finding.detail
    killers.expect("generated cases", fault.name, killers.killer(finding))


@pytest.mark.parametrize("seed", [0, *[pytest.param(s, marks=pytest.mark.slow) for s in (1, 2)]])
@pytest.mark.parametrize(
    "fault", [f for f in FAULTS if "batch entry" in f.name], ids=lambda f: f.name
)
def test_every_design_finds_a_fault_in_a_large_batch(fault: Fault, seed: int) -> None:
    """With both sizes of a large batch, in a case whose other values do not hide it."""
    cases = draw(fault.slot, "quick", DTYPES, seed=seed)
    combination = fault.combination()
    for size in (5, 8):
        findings = (judge(combination, case) for case in cases if case.batch == size)
        assert any(f.ok is False for judged in findings for f in judged), size


CORE = "nsa_core.torch_ops.core_kernels"
FUNCTION_FAULTS = (
    Mutant(
        "recompute takes the values of win for sel",
        CORE,
        "inputs = CoreInputs(*[saved[name] for name in CoreInputs._fields])",
        "inputs = CoreInputs(*[saved[n] for n in CoreInputs._fields])\n"
        "        inputs = inputs._replace(v_sel=saved['v_win'])",
    ),
    Mutant(
        "the cmp part of dq is lost without a gradient of k_cmp and v_cmp",
        CORE,
        "if needs[0] or needs[k] or needs[k + 1]:",
        "if (needs[0] and k > 1) or needs[k] or needs[k + 1]:",
    ),
    Mutant(
        "a branch has no gradients without one of q",
        CORE,
        "if needs[0] or needs[k] or needs[k + 1]:",
        "if needs[0]:",
    ),
    Mutant(
        "dv of a branch is lost without a gradient of its k",
        CORE,
        "if needs[0] or needs[k] or needs[k + 1]:",
        "if needs[0] or needs[k]:",
    ),
    Mutant(
        "the default starts of short sequences are below 0",
        "nsa_core.block.step",
        "(lengths - q.shape[1]).clamp_(min=0)",
        "lengths - q.shape[1]",
    ),
)


@pytest.mark.parametrize("fault", FUNCTION_FAULTS, ids=lambda fault: fault.name)
def test_planted_fault_of_a_function_is_found(fault: Mutant) -> None:
    combination = Combination(dict.fromkeys(SLOTS, "sdpa"))
    kinds = FUNCTIONS if fault.module == CORE else ["block_attention_decode"]
    with faulty_module(fault):
        for case in (case for kind in kinds for case in draw(kind, "quick", ["float32"])):
            failed = [f for f in judge(combination, case) if f.ok is False]
            if failed:
                break
    assert failed, f"{fault.name}: no generated case of quick fails"
    assert not any(f.quantity.startswith("o") for f in failed) or fault.module != CORE
    killers.expect("generated functions", fault.name, killers.killer(failed[0]))


RECOMPUTE_FAULTS = (
    FUNCTION_FAULTS[0],
    Mutant(
        "a layer with recompute has no gradient of its gates",
        "nsa_core.layer.projection",
        "k_win, v_win, gates)",
        "k_win, v_win, gates.detach() if self.recompute else gates)",
    ),
)


@pytest.mark.parametrize("fault", RECOMPUTE_FAULTS, ids=lambda fault: fault.name)
def test_planted_fault_of_recompute_is_found_in_a_layer(fault: Mutant) -> None:
    combination = Combination(dict.fromkeys(SLOTS, "sdpa"))
    todo = layer.jobs_for("quick", 0, suite.Job)
    assert todo
    with faulty_module(fault):
        for job in todo:
            failed = [f for f in job.run(combination) if f.ok is False]
            assert failed
            assert all(finding.quantity.endswith(" recomputed") for finding in failed)
            killers.expect("layers with recompute", fault.name, killers.killer(failed[0]))
