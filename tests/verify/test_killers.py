"""The list of killers names exactly the faults that the tests plant."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType

import killers
import pytest

TESTS = Path(__file__).resolve().parents[1]


def named(faults: Iterable[object]) -> list[str]:
    """Return the names of faults that are functions or have an attribute ``name``."""
    return [str(getattr(fault, "name", None) or getattr(fault, "__name__", "")) for fault in faults]


# suite -> file of its tests, the names of its faults
SUITES: dict[str, tuple[str, Callable[[ModuleType], list[str]]]] = {
    "mutants of sdpa and the core": (
        "verify/mutants/test_mutants.py",
        lambda m: named(m.MUTANTS + m.DECODE_MUTANTS),
    ),
    "generated cases": ("verify/drawn/test_planted_faults.py", lambda m: named(m.FAULTS)),
    "generated functions": (
        "verify/drawn/test_planted_faults.py",
        lambda m: named(m.FUNCTION_FAULTS),
    ),
    "layers with recompute": (
        "verify/drawn/test_planted_faults.py",
        lambda m: named(m.RECOMPUTE_FAULTS),
    ),
    "generated steps": (
        "verify/drawn/test_drawn_steps.py",
        lambda m: [f"{slot} {change.__name__}" for slot, change in m.FAULTS],
    ),
    "cache histories, quick": ("verify/drawn/test_histories.py", lambda m: list(m.ORDINARY)),
    "cache histories, full": ("verify/drawn/test_histories.py", lambda m: named(m.FAULTS)),
    "page histories": ("verify/drawn/test_pools.py", lambda m: named(m.FAULTS)),
    "behaviour of a kernel": (
        "verify/isolation/test_faulty_kernels.py",
        lambda m: list(m.BEHAVIOURS),
    ),
    "judge": (
        "verify/truth/test_truth_planted_faults.py",
        lambda m: [f"{fault}, {setting}" for setting in m.SETTINGS for fault in m.FAULTS],
    ),
    "judge at large scores": (
        "verify/truth/test_truth_large_scores.py",
        lambda m: [f"{fault}, {size:.0f}" for fault in m.FAULTS for size in m.SHARPNESS],
    ),
    "judge of a layer": ("core/layer/test_parameters.py", lambda m: named(m.FAULTS)),
    "block attention": (
        "verify/checks/test_block_attention_check.py",
        lambda m: m.KERNELS + [f"split {name}" for name in named(m.SPLITS)],
    ),
    "block attention decode": ("verify/checks/test_block_decode_check.py", lambda m: m.FORMS),
    "decode checks": (
        "verify/checks/test_decode_checks.py",
        lambda m: [
            m.WRITING,
            *(name for broken in m.BROKEN.values() for f in broken for name in f.values()),
        ],
    ),
    "decode reads": ("verify/checks/test_reads.py", lambda m: [form for _, form, *_ in m.FAULTS]),
    "fused backward": (
        "verify/checks/test_core_gradients.py",
        lambda m: [*m.FAULTS, *m.CHECK_FAULTS, "changed keys"],
    ),
    "report rows": (
        "verify/report_rows/test_report_row_01.py",
        lambda m: (
            [f"row 1 {name}" for name in named(m.FAULTS)]
            + [
                f"row 3 {name} {slot}"
                for name, slot in importlib.import_module("test_report_row_03").PLANTED
            ]
        ),
    ),
    "conformance": (
        "verify/conformance/test_conformance_suite.py",
        lambda m: [*m.FAULTY, *m.LAYOUTS, *m.STEP_FAULTS],
    ),
    "mode sequence": ("core/parallel/test_context_parallel.py", lambda m: list(m.MUTANTS)),
}


@pytest.mark.parametrize("suite", SUITES)
def test_the_list_has_every_planted_fault_and_no_other(
    suite: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, faults_of = SUITES[suite]
    monkeypatch.syspath_prepend(str((TESTS / file).parent))
    planted = faults_of(importlib.import_module(Path(file).stem))
    assert len(set(planted)) == len(planted)
    assert set(planted) == killers.load()[suite].keys()


def test_every_suite_is_known() -> None:
    assert killers.load().keys() == SUITES.keys() | {"kernels of triton"}
