"""cmp and win in the strict interpreter beyond the common cases: tiles, descriptors, bits, NaN."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from triton.runtime import interpreter

from nsa_backend_triton.host import configs, descriptors
from nsa_backend_triton.span import backward as span_backward
from nsa_backend_triton.span import cmp, win
from nsa_backend_triton.span import forward as span_forward
from nsa_backend_triton.strict.interpreter import strict
from nsa_core.contract import SlotCall
from nsa_core.layout import BlockGeometry
from slot_results import assert_slot_correct

MODULES = {"cmp": cmp, "win": win}
KEYS = {"cmp": ("k_cmp", "v_cmp"), "win": ("k", "v")}
BOTH = pytest.mark.parametrize("slot", MODULES)
# Bounds of documents of 40 tokens.
MALFORMED = [(0, 60, 20, 40), (0, 10, 99, 40), (0, -90, 20, 40), (0, 39, 1, 40), (30, 35, 38, 40)]


def geometry(size: int = 8, stride: int = 4, window: int = 20) -> BlockGeometry:
    """A geometry with l, d and w; cmp and win do not read its other sizes."""
    return BlockGeometry(size, stride, 16, 3, 1, 2, window)


def problem(
    slot: str,
    call: SlotCall,
    length: int,
    *,
    batch: int = 1,
    heads: int = 4,
    groups: int = 2,
    width: int = 16,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> dict[str, Tensor]:
    """Return q, the slot's keys and values, and do."""
    packed, g = call.cu_seqlens is not None, torch.Generator().manual_seed(seed)
    bound = call.geometry.max_compressed(length) if packed else call.geometry.num_compressed(length)
    rows = {"q": (length, heads), "do": (length, heads)}
    rows |= dict.fromkeys(KEYS[slot], (length if slot == "win" else bound, groups))
    lead = () if packed else (batch,)
    return {
        n: torch.randn((*lead, *shape, width), generator=g, dtype=dtype)
        for n, shape in rows.items()
    }


@contextlib.contextmanager
def inside_the_tensors() -> Iterator[None]:
    """Overlapping documents may write wrong rows inside the block, but never one outside."""
    try:
        yield
    except Exception as error:  # triton's interpreter wraps what is raised inside it
        if "store to one address" not in str(error):
            raise


def run(slot: str, call: SlotCall, given: Mapping[str, Tensor], seed: int = 0) -> dict[str, Tensor]:
    """Return o, lse and the gradients."""
    names = ("q", *KEYS[slot])
    inputs = [given[n] for n in names]
    with strict(seed):
        o, lse = MODULES[slot].forward(*inputs, call=call)
        grads = MODULES[slot].backward(given["do"], *inputs, o, lse, call=call)
    return {"o": o, "lse": lse, **{f"d{n}": x for n, x in zip(names, grads)}}


def assert_right(
    slot: str, call: SlotCall, given: Mapping[str, Tensor], found: Mapping[str, Tensor]
) -> None:
    """Check that every output passes the verdict."""
    inputs, cu = {n: given[n] for n in ("q", *KEYS[slot])}, call.cu_seqlens
    sizes = (call.geometry, call.scale)
    assert_slot_correct(slot, inputs, found, *sizes, cu_seqlens=cu, do=given["do"])


@pytest.mark.few_cases("cmp-8-1-7", "cmp-16-8-17", "cmp-8-4-33", "win-1-1-1", "win-4-4-16")
@pytest.mark.parametrize(
    ("size", "stride", "window"), [(1, 1, 1), (8, 1, 7), (4, 4, 16), (16, 8, 17), (8, 4, 33)]
)
@BOTH
def test_spans_around_the_tile_size(slot: str, size: int, stride: int, window: int) -> None:
    call = SlotCall(geometry(size, stride, window), 0.3)
    given = problem(slot, call, 45, groups=1, heads=1)
    assert_right(slot, call, given, run(slot, call, given))


@pytest.mark.few_cases("cmp--0.5")
@pytest.mark.parametrize("scale", [-0.5, 0.0])
@BOTH
def test_negative_and_zero_scale(slot: str, scale: float) -> None:
    call = SlotCall(geometry(), scale)
    given = problem(slot, call, 33, heads=2, groups=1)
    assert_right(slot, call, given, run(slot, call, given))


@pytest.mark.few_cases("cmp-wide keys", "cmp-tall queries")
@pytest.mark.parametrize(
    "settings",
    [
        {
            "span_forward": {"BLOCK_H": 1},
            "span_dq": {"BLOCK_H": 1},
            "span_dkdv": {"QUERY_SPLITS": 1},
        },
        {
            "span_forward": {"BLOCK_H": 4, "BLOCK_N": 32},
            "span_dq": {"BLOCK_H": 4},
            "span_dkdv": {"QUERY_SPLITS": 3},
        },
        {
            "span_forward": {"BLOCK_M": 32},
            "span_dq": {"BLOCK_N": 32},
            "span_dkdv": {"BLOCK_N": 32, "BLOCK_M": 16},
        },
        {"span_forward": {"BLOCK_M": 64, "BLOCK_H": 4}, "span_dkdv": {"BLOCK_M": 32}},
        {"span_dkdv": {"PROGRAMS_PER_SM": 0}},
        {"span_dkdv": {"PROGRAMS_PER_SM": 100}},
        {"span_dkdv": {"SEPARATE_DK_DV": 1}},
        {"span_dkdv": {"SEPARATE_DK_DV": 1, "USE_TMA": 1}},
    ],
    ids=[
        "heads apart",
        "heads together",
        "wide keys",
        "tall queries",
        "few programs",
        "many programs",
        "dk and dv apart",
        "apart by descriptors",
    ],
)
@BOTH
def test_results_for_any_tile_shape(
    slot: str, settings: dict[str, dict[str, int]], tiles: dict[str, dict[str, int]]
) -> None:
    tiles.update(settings)
    call = SlotCall(geometry(window=18), 0.25)
    given = problem(slot, call, 50, heads=4, groups=1)
    assert_right(slot, call, given, run(slot, call, given))


@pytest.mark.few_cases("cmp-0-parts3-dense")
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize(
    ("slot", "per_sm", "parts"),
    [  # parts of a dense call with 4 tiles of keys, and of a packed one with 6; 0: one part
        ("win", 0, (0, 0)),
        ("win", 2, (2, 0)),
        ("win", 3, (4, 2)),
        ("cmp", 0, (8, 8)),
        ("cmp", 9, (16, 16)),
    ],
)
def test_short_sequences_divide_the_gradients_of_keys(
    slot: str, per_sm: int, parts: tuple[int, int], packed: bool, tiles: dict[str, dict[str, int]]
) -> None:
    tiles["span_dkdv"] = {"PROGRAMS_PER_SM": per_sm}
    bounds = torch.tensor([0, 20, 64], dtype=torch.int32) if packed else None
    call = SlotCall(geometry(window=18), 0.25, *((bounds, 44) if packed else ()))
    given = problem(slot, call, 64, heads=4, groups=1)
    plans: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        launch = span_backward._launch_dkdv
        patch.setattr(
            span_backward, "_launch_dkdv", lambda *a: plans.append(launch(*a)) or plans[-1]
        )
        found = run(slot, call, given)
    assert plans[-1].num_parts == parts[packed]
    assert_right(slot, call, given, found)


def inexact_exp2(monkeypatch: pytest.MonkeyPatch, error: float) -> None:
    """Let exp2 be too small by ``error``, except for integers, as on a GPU."""

    def exp2(x: np.ndarray) -> np.ndarray:
        return np.where(x == np.floor(x), 1, 1 - error).astype(x.dtype) * np.exp2(x)

    monkeypatch.setattr(
        interpreter.InterpreterBuilder, "create_exp2", lambda self, x: self.unary_op(x, exp2)
    )


@pytest.mark.parametrize(
    ("dtype", "once"),
    [(torch.float64, True), pytest.param(torch.bfloat16, False, marks=pytest.mark.slow)],
)
@BOTH
def test_an_error_of_exp2_enters_a_wide_lse_once(
    slot: str, dtype: torch.dtype, once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every tile raises the maximum.

    In 2 bytes, the error enters once for each of them: p of the largest key must be 1 there.
    """
    error, call = 2**-10, SlotCall(geometry(2, 2, 96), 1.0)
    given = problem(slot, call, 96, heads=1, groups=1, dtype=dtype)
    q, k, v = (given[n] for n in ("q", *KEYS[slot]))
    q.fill_(1 / 16)
    k.copy_(torch.arange(k.shape[1])[None, :, None, None] / k.shape[1])

    def lse() -> Tensor:
        return MODULES[slot].forward(q, k, v, call=call)[1].double()

    exact = lse()
    inexact_exp2(monkeypatch, error)
    seen = exact > -math.inf
    assert bool(((exact - lse())[seen] < 1.1 * error).all()) == once


@pytest.mark.parametrize(
    ("slot", "per_sm"), [pytest.param("win", 3, marks=pytest.mark.slow), ("cmp", 4)]
)
def test_deterministic_bits_do_not_depend_on_other_batch_entries(
    slot: str, per_sm: int, tiles: dict[str, dict[str, int]]
) -> None:
    """One entry is divided into more parts than three are."""
    tiles["span_dkdv"] = {"PROGRAMS_PER_SM": per_sm}
    call = SlotCall(geometry(window=18), 0.25, None, 0, True)
    given = problem(slot, call, 64, batch=3, heads=2, groups=1, dtype=torch.float32)
    inputs = [given[n] for n in ("q", *KEYS[slot])]
    tensors = given["do"], *inputs, *MODULES[slot].forward(*inputs, call=call)
    batch = MODULES[slot].backward(*tensors, call=call)
    alone = MODULES[slot].backward(*(x[1:2] for x in tensors), call=call)
    for x, entry in zip(batch, alone, strict=True):
        assert torch.equal(x[1:2], entry)


@pytest.mark.few_cases("cmp-0.25-descriptors")
@pytest.mark.parametrize(
    ("settings", "width"),
    [({"USE_TMA": 1}, 16), ({"USE_TMA": 1, "BLOCK_H": 1}, 16), ({"USE_TMA": 1}, 48)],
    ids=["descriptors", "heads apart", "three bands"],
)
@pytest.mark.parametrize(("slot", "scale"), [("cmp", 0.25), ("win", -0.25)])
def test_results_with_descriptors(
    slot: str, scale: float, settings: dict[str, int], width: int, tiles: dict[str, dict[str, int]]
) -> None:
    call = SlotCall(geometry(), scale)
    given = problem(slot, call, 45, batch=2, heads=2, groups=1, width=width)
    tiles |= dict.fromkeys(("span_forward", "span_dq", "span_dkdv"), settings)
    made: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for module, name in ((descriptors, "key"), (span_backward, "stats")):
            original = getattr(module, f"{name}_descriptor")
            patch.setattr(
                module, f"{name}_descriptor", lambda *a, f=original, n=name: made.append(n) or f(*a)
            )
        found = run(slot, call, given)
    assert set(made) == {"key", "stats"}
    assert_right(slot, call, given, found)


@pytest.mark.parametrize(
    ("change", "packed"),
    [
        (lambda k: k, True),
        (lambda k: torch.zeros(3, 8, 4, 17)[..., :16], False),
        (lambda k: torch.zeros(k.numel() + 1)[1:].view_as(k), False),
        (lambda k: k[:, :0], False),
        (lambda k: k[:1].expand(3, 8, 4, 16), False),
        (lambda k: torch.zeros(3, 8, 4, 8), False),
        (lambda k: torch.zeros(3, 8, 4, 24), False),
    ],
    ids=[
        "packed",
        "rows of 68 bytes",
        "begins on 4 bytes",
        "empty",
        "expanded",
        "8 wide",
        "24 wide",
    ],
)
def test_descriptors_do_not_fit(change, packed: bool) -> None:
    k = torch.zeros(3, 8, 4, 16)
    assert span_forward.descriptors_fit(
        False, k, torch.zeros(3, 8, 4, 48), torch.zeros(3, 8, 4, 192)
    )
    assert not span_forward.descriptors_fit(packed, change(k))


TILES: dict[str, dict[str, int]] = {
    "span_forward": {"BLOCK_M": 16, "BLOCK_H": 2, "BLOCK_N": 16, "num_warps": 4, "num_stages": 1},
    "span_dkdv": {
        "BLOCK_M": 16,
        "BLOCK_N": 16,
        "QUERY_SPLITS": 2,
        "PROGRAMS_PER_SM": 0,
        "num_warps": 4,
        "num_stages": 1,
    },
}
TILES["span_dq"] = TILES["span_forward"]


@pytest.mark.few_cases
@pytest.mark.parametrize("kind", ["aligned", "unaligned", "packed"])
@BOTH
def test_settings_with_descriptors_apply_only_to_fitting_tensors(
    slot: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = {
        kernel: [({"pointers": 0}, {**tile, "USE_TMA": 1}), ({}, tile)]
        for kernel, tile in TILES.items()
    }
    monkeypatch.setattr(configs, "table", lambda _: rows)
    made: list[object] = []
    describe = descriptors.key_descriptor
    monkeypatch.setattr(
        descriptors, "key_descriptor", lambda *a: made.append(describe(*a)) or made[-1]
    )
    bounds = torch.tensor([0, 30, 45], dtype=torch.int32) if kind == "packed" else None
    call = SlotCall(geometry(), 0.25, *((bounds, 30) if kind == "packed" else ()))
    given = problem(slot, call, 45, heads=2, groups=1)
    if kind == "unaligned":  # rows of 136 bytes
        given = {name: torch.cat((x, x[..., :1]), -1)[..., :-1] for name, x in given.items()}
    found = run(slot, call, given)
    assert len(made) == (6 if kind == "aligned" else 0)  # two of each kernel
    assert_right(slot, call, given, found)


@pytest.mark.slow
@BOTH
def test_packed_documents_are_independent(slot: str, tiles: dict[str, dict[str, int]]) -> None:
    """NaN in one document changes no bit of the others, which equal each document alone.

    The number of tiles would choose the parts of dk and dv, whose sums have another order.
    """
    tiles["span_dkdv"] = {"PROGRAMS_PER_SM": 0}
    lengths = (21, 19, 30)
    bounds = [0, *itertools.accumulate(lengths)]
    call = SlotCall(geometry(), 0.25, torch.tensor(bounds, dtype=torch.int32), 30)
    given = problem(slot, call, 70, heads=2, groups=1)
    clean = run(slot, call, given)
    compressed = [0, *itertools.accumulate(call.geometry.num_compressed(n) for n in lengths)]
    keys = compressed if slot == "cmp" else bounds
    poisoned = {name: x.clone() for name, x in given.items()}
    for name, x in poisoned.items():
        first = keys if name in KEYS[slot] else bounds
        x[first[1] : first[2]] = torch.nan
    if slot == "cmp":  # rows past the last document belong to none
        for name in KEYS[slot]:
            poisoned[name][compressed[-1] :] = torch.nan
    dirty = run(slot, call, poisoned, seed=1)
    for document in (0, 2):
        alone_call = SlotCall(geometry(), 0.25)
        rows, crows = (slice(b[document], b[document + 1]) for b in (bounds, keys))
        alone = run(
            slot,
            alone_call,
            {n: x[crows if n in KEYS[slot] else rows][None] for n, x in given.items()},
        )
        for name, x in dirty.items():
            at = (slice(None), rows) if name == "lse" else crows if name[1:] in KEYS[slot] else rows
            assert torch.equal(x[at], clean[name][at]), name
            assert torch.equal(x[at], alone[name][0]), name
    if slot == "cmp":
        assert not dirty["dk_cmp"][compressed[-1] :].any()
        assert not dirty["dv_cmp"][compressed[-1] :].any()


@pytest.mark.few_cases("cmp")
@BOTH
def test_nan_in_q_stays_in_its_row(slot: str) -> None:
    call = SlotCall(geometry(), 0.25)
    given = problem(slot, call, 40, heads=2, groups=1)
    clean = run(slot, call, given)
    given["q"][0, 20, 0] = torch.nan
    dirty = run(slot, call, given)
    assert dirty["o"][0, 20, 0].isnan().all()
    keep = torch.ones(40, 2, dtype=torch.bool)
    keep[20, 0] = False
    assert torch.equal(dirty["o"][0][keep], clean["o"][0][keep])
    assert torch.equal(dirty["dq"][0][keep], clean["dq"][0][keep])


@pytest.mark.few_cases("cmp")
@BOTH
def test_batch_entry_equals_the_same_sequence_alone(
    slot: str, tiles: dict[str, dict[str, int]]
) -> None:
    tiles["span_dkdv"] = {"PROGRAMS_PER_SM": 0}  # as above
    call = SlotCall(geometry(), 0.25)
    given = problem(slot, call, 33, batch=2, heads=2, groups=1)
    both, one = run(slot, call, given), run(slot, call, {n: x[1:] for n, x in given.items()})
    for name, x in one.items():
        assert torch.equal(both[name][1:], x), name


@pytest.mark.few_cases
@pytest.mark.parametrize("bounds", MALFORMED)
@BOTH
def test_malformed_boundaries_stay_inside_the_tensors(slot: str, bounds: tuple[int, ...]) -> None:
    call = SlotCall(geometry(4, 2, 9), 0.25, torch.tensor(bounds, dtype=torch.int32), 40)
    given = problem(slot, call, 40)
    inputs = [given[n] for n in ("q", *KEYS[slot])]
    with inside_the_tensors():
        MODULES[slot].forward(*inputs, call=call)


def test_partial_sums_are_linear_in_the_sequence_length() -> None:
    """The fp32 partial sums of cmp are QUERY_SPLITS * h times the gradient at every length."""
    empty = torch.empty
    for length in (12, 24):
        call = SlotCall(geometry(), 0.25)
        given = problem("cmp", call, length, heads=2, groups=1, dtype=torch.float32)
        shapes: list[tuple[int, ...]] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                torch, "empty", lambda *a, s=shapes, **k: s.append(a[0]) or empty(*a, **k)
            )
            run("cmp", call, given)
        parts = [shape for shape in shapes if isinstance(shape, tuple) and len(shape) == 5]
        assert parts == [(2 * 2, 1, call.geometry.num_compressed(length), 1, 16)] * 2
