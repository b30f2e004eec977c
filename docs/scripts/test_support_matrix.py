"""The page of supported requests is that of the probes, with slots, gradients and devices."""

from __future__ import annotations

import pathlib

import pytest
import torch
from support_matrix import _range, support_matrix

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
    assert "| request | toy |\n" in page
    assert "| bfloat16; deterministic; " in page
    assert "; Dk=320, Dv=320 | sm_80+: win; forward of cmp |\n" in page
    assert "| float16 | sm_80+: forward of cmp, win |\n" in page
    assert "| float32; float64; " in page


@pytest.mark.parametrize(
    ("titles", "text"),
    [
        (["CPU", "sm_75", "sm_80", "sm_90", "sm_120"], "all"),
        (["CPU", "sm_90", "sm_120"], "CPU, sm_90+"),
        (["CPU", "sm_75", "sm_80"], "CPU, sm_75, sm_80"),
        (["sm_120"], "sm_120"),
    ],
)
def test_devices_up_to_the_newest_are_a_range(titles, text) -> None:
    assert _range(titles) == text
