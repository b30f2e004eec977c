"""Row 47 without a GPU: workspaces compared with sums by hand from the sources of flash-attn."""

from __future__ import annotations

import dataclasses

import pytest

from nsa_backend_fa2 import padding, providers, sel, workspace
from nsa_backend_fa2.plugin import nsa_register_backends
from nsa_core.contract import import_named
from nsa_core.dryrun import rounded
from slot_requests import make_request

S, HQ, G, D = 8192, 12, 2, 64
BASE = make_request("win", S)
OUTPUTS = S * HQ * (D * 2 + 4)  # o and lse
INF_MASK = S * HQ  # bool mask of rows whose lse is +inf
PACKAGE, PYTORCH = providers.FlashAttnPackage(None, providers.TOO_NEW), providers.TorchFlash(None)


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate an H200 with the package flash-attn."""
    monkeypatch.setattr(workspace, "_multiprocessors", lambda: 132)
    monkeypatch.setattr(providers, "first", lambda: PACKAGE)


def stated(**change: object) -> int:
    request = dataclasses.replace(BASE, **change)
    path = nsa_register_backends().slots[request.slot].workspace
    assert path is not None
    workspace._measure.cache_clear()  # some tests patch the measured code
    return int(import_named(path)(request))


def library_backward(
    sequences: int, rows: int, heads: int, keys: int, groups: int, copies: int = 1
) -> int:
    """Return the bytes of a library backward: results and buffers.

    The results are dq, dk and dv. The buffers are dq in fp32 and the row sums, both padded to
    tiles of 128 rows, and dk and dv per query head.
    """
    grads = sequences * (rows * heads + 2 * keys * groups) * D * 2
    tiles = sequences * -(-rows // 128) * 128 * heads * (copies * D + 1) * 4
    return grads + tiles + sequences * 2 * keys * heads * D * 2


def test_win_holds_its_outputs_and_library_buffers() -> None:
    assert stated(needs_grad=False) == OUTPUTS + INF_MASK
    assert stated() == OUTPUTS + library_backward(1, S, HQ, S, G)
    assert stated(batch=3) == 3 * stated()
    # With one query head per kv head, the library needs no separate dk and dv.
    equal_heads = S * G * (D * 2 + 4) + library_backward(1, S, G, S, G) - 2 * S * G * D * 2
    assert stated(n_heads=G) == equal_heads
    copies = -(-132 // HQ)
    assert stated(deterministic=True) == OUTPUTS + library_backward(1, S, HQ, S, G, copies)


def test_packed_win_pads_dq_per_document() -> None:
    one_document = stated(varlen=True, batch=None)
    boundaries = rounded(2 * 4)
    assert one_document == stated() + 128 * HQ * (D + 1) * 4 + boundaries
    assert stated(varlen=True, batch=3) == one_document + 2 * 128 * HQ * (D + 1) * 4


def test_packed_cmp_pads_dq_per_document_and_folded_head() -> None:
    """On an H200, three documents of 8192 tokens in all need 12779520 bytes more than one."""
    added = stated(slot="cmp", varlen=True, batch=3) - stated(slot="cmp", varlen=True, batch=1)
    assert added == pytest.approx(2 * 128 * HQ * 16 * (D + 1) * 4, abs=64)


@pytest.mark.slow
def test_packed_sel_does_not_depend_on_the_number_of_documents() -> None:
    assert stated(slot="sel", varlen=True, batch=3) == pytest.approx(
        stated(slot="sel", varlen=True), rel=1e-3
    )


def test_win_with_few_rows_holds_partial_outputs() -> None:
    """2 heads x 32 blocks of 64 rows do not fill an H200.

    The library splits the keys, and holds o and lse of each split in fp32.
    """
    assert stated(needs_grad=False, n_heads=2, seq_len=2048) == 2048 * 2 * (
        (D * 2 + 4) + 4 * (D + 1) * 4
    )
    assert workspace._splits(blocks=2 * 32, columns=8) == 4
    assert workspace._splits(blocks=212, columns=8) == 1
    assert workspace._splits(blocks=1, columns=1) == 1


def test_cmp_of_one_sequence_copies_dq_only(monkeypatch: pytest.MonkeyPatch) -> None:
    residues, blank = 16, 31
    rows, remainder = divmod(S - blank, residues)
    keys = rows + 1
    assert (rows, remainder) == (510, 1)
    # o and lse of the library call, before they are copied to their rows
    call_outputs = residues * rows * HQ * (D * 2 + 4)
    inf_mask = rounded(residues * rows * HQ)
    assert stated(slot="cmp", needs_grad=False) == OUTPUTS + call_outputs + inf_mask
    grads = S * HQ * D * 2 + keys * G * 2 * D * 4  # dq, and dk and dv in fp32
    lse_copy = residues * rows * HQ * 4
    backward = library_backward(residues, rows, HQ, rows, G)
    assert stated(slot="cmp") == OUTPUTS + grads + lse_copy + backward
    # PyTorch's backward also copies do and o, which are strided.
    monkeypatch.setattr(providers, "first", lambda: PYTORCH)
    copies = 2 * (residues * rows * HQ * D * 2)
    assert stated(slot="cmp") == OUTPUTS + grads + lse_copy + backward + copies


@pytest.mark.few_cases("cmp", "win")
@pytest.mark.parametrize("slot", ["cmp", "sel", "win"])
def test_workspace_counts_an_additional_copy_in_the_code(
    slot: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = stated(slot=slot, batch=2)
    fit = padding.fit
    monkeypatch.setattr(padding, "fit", lambda x, width: fit(x, width).clone())
    assert stated(slot=slot, batch=2) > before


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("batch", [1, 2, None])
def test_a_dry_run_of_sel_reaches_the_peak_of_all_chunks(
    batch: int | None, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    change = {
        "slot": "sel",
        "batch": batch,
        "varlen": batch is None,
        "seq_len": 3000,
        "deterministic": deterministic,
    }
    few = stated(**change)
    monkeypatch.setattr(sel, "_peak_chunks", lambda numbers: numbers)
    assert stated(**change) == few


@pytest.mark.slow
def test_sel_grows_no_faster_than_its_tensors() -> None:
    # o and lse; dq; dk and dv in fp32 and rounded
    per_token = HQ * (D * 2 + 4) + HQ * D * 2 + G * 2 * D * (4 + 2)
    growth = stated(slot="sel", seq_len=65536) - stated(slot="sel", seq_len=32768)
    assert growth <= 32768 * (per_token + HQ * 4 + 5 * 8)


@pytest.mark.parametrize("slot", ["cmp", "sel", "win"])
@pytest.mark.parametrize(
    "change", [{"seq_len": 0}, {"batch": 0}, {"seq_len": None, "batch": None}, {"seq_len": 31}]
)
def test_workspace_is_zero_only_without_tokens(slot: str, change: dict) -> None:
    size = stated(slot=slot, **change)
    assert size >= 0
    assert (size == 0) == (0 in change.values())


def test_dry_run_restores_the_provider() -> None:
    stated()
    assert providers._override.get() is None
