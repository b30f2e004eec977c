"""The page of the support matrix is that of the probes, and shows slots, gradients and devices."""

from __future__ import annotations

import pathlib

import pytest
import torch
from support_matrix import support_matrix

from nsa_core.contract import API_VERSION, BackendSpec, Reason, SlotSpec
from nsa_core.plan.registry import Registry, discover

DOCS = pathlib.Path(__file__).resolve().parents[1]


@pytest.mark.skipif(
    torch.version.cuda is not None, reason="the page is generated with a CPU build of torch"
)
def test_the_support_matrix_matches_the_probes(monkeypatch) -> None:
    monkeypatch.delenv("NSA_DISABLE_PLUGINS", raising=False)
    page = (DOCS / "reference" / "backends.md").read_text()
    assert page == support_matrix(discover(safe=True)), (
        "python docs/scripts/support_matrix.py > docs/reference/backends.md"
    )


def probe(request) -> list[Reason]:
    """Accept bfloat16, and float16 forward, from sm_80 on; always report a missing package."""
    reasons = [Reason("missing", "the package x is not installed")]
    if request.device != "cuda" or request.capability < (8, 0):
        reasons.append(Reason("gpu", "needs sm_80"))
    if request.dtype not in ("bfloat16", "float16") or (
        request.dtype == "float16" and request.needs_grad
    ):
        reasons.append(Reason("dtype", f"no {request.dtype}"))
    return reasons


def test_the_matrix_shows_slots_gradients_and_devices() -> None:
    slots = {"win": SlotSpec("x:f", "x:b"), "cmp": SlotSpec("x:f")}
    spec = BackendSpec("toy", API_VERSION, slots, f"{__name__}:probe", summary="a toy")
    page = support_matrix(Registry().with_backend(spec))
    assert "A toy. Offers cmp, win." in page
    assert (
        "| bfloat16 | - | - | win; forward: cmp | win; forward: cmp | win; forward: cmp |" in page
    )
    assert "| float16 | - | - | forward: cmp, win | forward: cmp, win | forward: cmp, win |" in page
    assert "| float32 | - | - | - | - | - |" in page
    assert "- needs sm_80\n" in page
    assert "not installed" not in page  # a fact of this machine, not of the backend
