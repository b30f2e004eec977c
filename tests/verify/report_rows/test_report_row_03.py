"""Report row 3, '6/6 core invariants': six invariants of kernels, each tested with planted faults.

In the report, the test of masks compared shapes, the counters were compared with themselves, and
the equivalence compared V[0] with V[0].
"""

from __future__ import annotations

import dataclasses

import killers
import pytest

from nsa_core.layout import BlockGeometry
from row_03 import FAULTS, INVARIANTS, kernels_of

WHERE = [("sdpa", "cpu"), ("fa2", "cpu")]
WHERE += [
    pytest.param(backend, "cuda", marks=pytest.mark.gpu) for backend in ("sdpa", "fa2", "triton")
]
PLANTED = [(name, slot) for name, faults in FAULTS.items() for slot in faults]


@pytest.mark.few_cases
@pytest.mark.parametrize("name", INVARIANTS)
@pytest.mark.parametrize(("backend", "device"), WHERE)
def test_report_row_03(name: str, backend: str, device: str, fa2_here: None) -> None:
    INVARIANTS[name](kernels_of(backend, device))


@pytest.mark.parametrize(
    ("name", "slot"), PLANTED, ids=[f"{name}-{slot}" for name, slot in PLANTED]
)
def test_report_row_03_finds_the_planted_fault(name: str, slot: str) -> None:
    kernels = kernels_of("sdpa")
    with pytest.raises(AssertionError):
        INVARIANTS[name](dataclasses.replace(kernels, **{slot: FAULTS[name][slot](kernels)}))
    killers.expect("report rows", f"row 3 {name} {slot}", name)


def test_report_row_03_finds_a_missing_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockGeometry, "__post_init__", lambda self: None)
    with pytest.raises(AssertionError, match="not refused"):
        INVARIANTS["INV-4"](kernels_of("sdpa"))
