"""Row 47 without a GPU: the stated bytes against sums written down by hand from flash-attn's
sources.
"""

from __future__ import annotations

import dataclasses

import pytest

from nsa_backend_fa2 import padding, providers, workspace
from nsa_backend_fa2.plugin import nsa_register_backends
from nsa_core.contract import Request, import_named
from nsa_core.dryrun import rounded
from nsa_core.layout import BlockGeometry

S, HQ, G, D = 8192, 12, 2, 64
BASE = Request(
    slot="win",
    geometry=BlockGeometry(),
    n_heads=HQ,
    n_kv_heads=G,
    head_dim=D,
    v_head_dim=D,
    dtype="bfloat16",
    device="cuda",
    capability=(9, 0),
    needs_grad=True,
    batch=1,
    seq_len=S,
)
OUT = S * HQ * (D * 2 + 4)  # o and lse
MARK = S * HQ  # bool: rows whose lse is +inf
PACKAGE, PYTORCH = providers.FlashAttnPackage(None, providers.TOO_NEW), providers.TorchFlash(None)


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """An H200 with the package."""
    monkeypatch.setattr(workspace, "_multiprocessors", lambda: 132)
    monkeypatch.setattr(providers, "first", lambda: PACKAGE)


def stated(**change: object) -> int:
    request = dataclasses.replace(BASE, **change)
    path = nsa_register_backends().slots[request.slot].workspace
    assert path is not None
    workspace._measure.cache_clear()  # the tests change the code that is measured
    return int(import_named(path)(request))


def library_backward(
    sequences: int, rows: int, heads: int, keys: int, groups: int, copies: int = 1
) -> int:
    """dq, dk, dv; fp32 dq and sums of rows in whole tiles of 128; dk and dv per query head."""
    grads = sequences * (rows * heads + 2 * keys * groups) * D * 2
    tiles = sequences * -(-rows // 128) * 128 * heads * (copies * D + 1) * 4
    return grads + tiles + sequences * 2 * keys * heads * D * 2


def test_win_is_its_outputs_and_the_librarys_own() -> None:
    assert stated(needs_grad=False) == OUT + MARK
    assert stated() == OUT + library_backward(1, S, HQ, S, G)
    assert stated(batch=3) == 3 * stated()
    # no dk and dv but its own
    alone = S * G * (D * 2 + 4) + library_backward(1, S, G, S, G) - 2 * S * G * D * 2
    assert stated(n_heads=G) == alone
    copies = -(-132 // HQ)
    assert stated(deterministic=True) == OUT + library_backward(1, S, HQ, S, G, copies)


def test_win_packed_has_rows_of_its_own_for_each_document() -> None:
    one = stated(varlen=True, batch=None)
    assert one == stated() + 128 * HQ * (D + 1) * 4 + rounded(2 * 4)  # and cu_seqlens
    assert stated(varlen=True, batch=3) == one + 2 * 128 * HQ * (D + 1) * 4


def test_cmp_packed_has_rows_of_every_folded_head_for_each_document() -> None:
    """Measured on an H200, three documents of 8192 tokens in all: 12779520 bytes more than one
    document has.
    """
    more = stated(slot="cmp", varlen=True, batch=3) - stated(slot="cmp", varlen=True, batch=1)
    assert more == pytest.approx(2 * 128 * HQ * 16 * (D + 1) * 4, abs=64)


def test_sel_packed_counts_its_tokens_once() -> None:
    assert stated(slot="sel", varlen=True, batch=3) == pytest.approx(
        stated(slot="sel", varlen=True), rel=1e-3
    )


def test_win_of_few_rows_holds_partial_outputs() -> None:
    """2 heads x 32 blocks of 64 rows leave an H200 idle: keys go in parts, o and lse of each in
    fp32.
    """
    assert stated(needs_grad=False, n_heads=2, seq_len=2048) == 2048 * 2 * (
        (D * 2 + 4) + 4 * (D + 1) * 4
    )
    assert workspace._splits(blocks=2 * 32, columns=8) == 4
    assert workspace._splits(blocks=212, columns=8) == 1
    assert workspace._splits(blocks=1, columns=1) == 1


def test_cmp_of_one_sequence_copies_dq_only(monkeypatch: pytest.MonkeyPatch) -> None:
    places, skip = 16, 31
    rows, rest = divmod(S - skip, places)
    keys = rows + 1
    assert (rows, rest) == (510, 1)
    # the call's own o and lse, before they go to their places
    spread = places * rows * HQ * (D * 2 + 4)
    assert stated(slot="cmp", needs_grad=False) == OUT + spread + rounded(places * rows * HQ)
    own = S * HQ * D * 2 + keys * G * 2 * D * 4  # dq, and dk and dv in fp32
    stats = places * rows * HQ * 4
    assert stated(slot="cmp") == OUT + own + stats + library_backward(places, rows, HQ, rows, G)
    # whose backward copies do and o, which are strided
    monkeypatch.setattr(providers, "first", lambda: PYTORCH)
    assert stated(slot="cmp") == OUT + own + stats + library_backward(
        places, rows, HQ, rows, G
    ) + 2 * (places * rows * HQ * D * 2)


@pytest.mark.parametrize("slot", ["cmp", "sel", "win"])
def test_a_copy_more_in_the_code_is_stated(slot: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = stated(slot=slot, batch=2)
    fit = padding.fit
    monkeypatch.setattr(padding, "fit", lambda x, width: fit(x, width).clone())
    assert stated(slot=slot, batch=2) > before


@pytest.mark.parametrize("deterministic", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("batch", [1, 2, None])
def test_sel_continued_in_a_line_is_what_every_chunk_gives(
    batch: int | None, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    change = {
        "slot": "sel",
        "batch": batch,
        "varlen": batch is None,
        "seq_len": 3000,
        "deterministic": deterministic,
    }
    line = stated(**change)
    monkeypatch.setattr(workspace, "_EXACT_CHUNKS", 10**6)
    assert stated(**change) == pytest.approx(line, rel=1e-3)


def test_sel_does_not_grow_faster_than_its_tensors() -> None:
    # o, lse; dq; dk and dv in fp32, then rounded
    per_token = HQ * (D * 2 + 4) + HQ * D * 2 + G * 2 * D * (4 + 2)
    grown = stated(slot="sel", seq_len=65536) - stated(slot="sel", seq_len=32768)
    assert grown <= 32768 * (per_token + HQ * 4 + 5 * 8)


@pytest.mark.parametrize("slot", ["cmp", "sel", "win"])
@pytest.mark.parametrize(
    "change", [{"seq_len": 0}, {"batch": 0}, {"seq_len": None, "batch": None}, {"seq_len": 31}]
)
def test_small_requests_state_something(slot: str, change: dict) -> None:
    size = stated(slot=slot, **change)
    assert size >= 0
    assert (size == 0) == (0 in change.values())


def test_nothing_serves_instead_afterwards() -> None:
    stated()
    assert providers._override.get() is None
