"""Tiling of the sdpa backend, and its arithmetic for CUDA emulated on the CPU."""

from __future__ import annotations

import dataclasses
import functools
import types

import pytest
import torch

from nsa_backend_sdpa import aten, device, engine, probe, sel, select
from nsa_core import BlockGeometry, block_attention, resolve
from nsa_core.contract import SLOTS, SlotCall
from nsa_core.dtypes import stats_dtype
from nsa_core.plan.candidates import request_of
from nsa_verify.judge.selection import judge_selection
from nsa_verify.problems.cases import Case, config_of
from nsa_verify.problems.findings import bits
from nsa_verify.problems.slot_runs import SlotRun, run_kernel, run_slots
from slot_results import assert_slot_correct

BRANCHES = ("cmp", "sel", "win")
CONFIG = config_of(4, 2, 16, 24, (8, 4, 16, 4, 20))
DENSE = Case("dense", CONFIG, (131,), batch=2)
PACKED = Case("packed", CONFIG, (0, 3, 57, 0, 1, 89, 0), packed=True)


def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(engine.SCORE_BYTES, "cpu", 20_000)
    monkeypatch.setattr(engine, "MAX_KEYS", 33)


def _causal_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aten, "route", lambda *request: "tiles")
    monkeypatch.setitem(engine.SCORE_BYTES, "cpu", 60_000)


def _narrow_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulate products of CUDA: bf16 or fp16 operands, fp32 results."""

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        stats = stats_dtype(a.dtype)
        return torch.bmm(a.to(stats), b.to(stats))

    monkeypatch.setattr(aten, "route", lambda *request: "tiles")
    monkeypatch.setattr(engine, "NARROW_DEVICES", {"cpu"})
    for module in (engine, select):
        monkeypatch.setattr(module, "product", product)


VARIANTS = {
    "default": lambda m: None,
    "small tiles": _small_tiles,
    "causal tiles": _causal_tiles,
    "narrow operands": _narrow_operands,
}


def resolve_plan(case: Case, dtype: torch.dtype):
    return resolve(case.config, dtype=dtype, backends="sdpa", needs_grad=True, varlen=case.packed)


def assert_correct(case: Case, slot: str, run: SlotRun, cu_seqlens: torch.Tensor | None) -> None:
    sizes, do = (case.config.geometry, case.config.softmax_scale), run.do
    assert_slot_correct(slot, run.inputs, run.outputs, *sizes, cu_seqlens=cu_seqlens, do=do)


@pytest.mark.few_cases("narrow operands-row18-packed-dtype0")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", [DENSE, PACKED], ids=["dense", "row18-packed"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_tiling_matches_the_oracle(
    variant: str, case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    VARIANTS[variant](monkeypatch)
    data = case.data(dtype)
    runs = run_slots(resolve_plan(case, dtype), case, data)
    for slot in BRANCHES:
        assert_correct(case, slot, runs[slot], data.cu_seqlens)
    selection = runs["select"]
    verdict = judge_selection(
        *selection.inputs.values(),
        selection.outputs["blocks"],
        case.config.geometry,
        case.config.softmax_scale,
        cu_seqlens=data.cu_seqlens,
    )
    assert verdict, verdict.why


@pytest.mark.parametrize("window", [57, 64, 200])
def test_window_as_long_as_the_longest_document_matches_the_oracle(
    window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _small_tiles(monkeypatch)
    case = dataclasses.replace(PACKED, config=dataclasses.replace(CONFIG, window_size=window))
    data, plan = case.data(torch.float64), resolve_plan(case, torch.float64)
    inputs = {"q": data.q, "k": data.k_win, "v": data.v_win}
    assert_correct(case, "win", run_kernel(plan.win, inputs, data.do, data), data.cu_seqlens)


@pytest.mark.few_cases
@pytest.mark.parametrize("slot", BRANCHES)
@pytest.mark.parametrize("name", ["k", "v", "do"])
@pytest.mark.parametrize("row", [59, 61], ids=["end of a document", "start of a document"])
def test_row_34_nan_never_reaches_another_document(slot: str, name: str, row: int) -> None:
    """Documents are rows 3..59, 60 and 61..149; compressed rows 0..12 (of 57 tokens) and 13..33."""
    data, plan = PACKED.data(torch.float32), resolve_plan(PACKED, torch.float32)
    run = run_slots(plan, PACKED, data)[slot]
    inputs, do = {n: t.clone() for n, t in run.inputs.items()}, data.do.clone()
    clean = run_kernel(getattr(plan, slot), inputs, do, data).outputs
    if name == "do":
        do[row if slot != "cmp" or row == 59 else 90] = torch.nan  # row 61 sees no compressed token
    else:
        poisoned = next(t for n, t in inputs.items() if n[0] == name)
        poisoned[row if slot != "cmp" else {59: 12, 61: 13}[row]] = torch.nan
    outputs = run_kernel(getattr(plan, slot), inputs, do, data).outputs
    assert any(t.isnan().any() for t in outputs.values())
    for quantity, tensor in outputs.items():
        boundary = 13 if quantity in ("dk_cmp", "dv_cmp") else 60 if row == 59 else 61
        other_rows = slice(boundary, None) if row == 59 else slice(None, boundary)
        index = (slice(None), other_rows) if quantity == "lse" else other_rows
        assert torch.equal(bits(tensor[index]), bits(clean[quantity][index])), quantity


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_rows_30_36_invalid_duplicate_and_missing_blocks(dtype: torch.dtype) -> None:
    data, plan = DENSE.data(torch.float32), resolve_plan(DENSE, torch.float32)
    blocks = torch.randint(-3, 12, (2, 131, 2, 7), generator=torch.Generator().manual_seed(0)).to(
        dtype
    )
    blocks[:, 50:60] = -1  # queries without a visible key: o = 0, lse = -inf, zero gradient
    blocks[:, 70] = torch.iinfo(dtype).max
    blocks[:, 71, :, 0] = torch.iinfo(dtype).min
    blocks[:, 72] = 2  # one block seven times
    blocks[:, 73] = torch.iinfo(dtype).max // 2 + 1  # times l', 2^62 is 0 in int64
    inputs = {"q": data.q, "k": data.k_sel, "v": data.v_sel, "blocks": blocks}
    run = run_kernel(plan.sel, inputs, data.do, data)
    assert not run.outputs["o"][:, 50:60].any()
    assert (run.outputs["lse"][:, :, [70, 73]] == -torch.inf).all()
    assert_correct(DENSE, "sel", run, None)
    for x in (data.k_sel, data.v_sel):
        x[:, 112:] = torch.nan  # earlier tokens that name these blocks do not see them
    after = run_kernel(plan.sel, inputs, data.do, data)
    assert torch.equal(bits(after.outputs["o"][:, :112]), bits(run.outputs["o"][:, :112]))
    assert torch.equal(bits(after.outputs["lse"][..., :112]), bits(run.outputs["lse"][..., :112]))


@pytest.mark.few_cases("dtype0-packed", "dtype1-packed", "dtype2-packed")
@pytest.mark.parametrize("case", [DENSE, PACKED], ids=["dense", "packed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_row_39_equal_scores_go_to_the_lower_index(case: Case, dtype: torch.dtype) -> None:
    config = dataclasses.replace(CONFIG, head_dim=64, scale=0.25)
    case = dataclasses.replace(case, config=config)
    data, plan = case.data(dtype), resolve_plan(case, dtype)
    generator = torch.Generator().manual_seed(0)
    for k_cmp in (
        torch.zeros_like(data.k_cmp),
        torch.randint(0, 2, data.k_cmp.shape, generator=generator).to(dtype),
    ):
        q = torch.randint(-1, 2, data.q.shape, generator=generator).to(dtype)
        packing = {"cu_seqlens": data.cu_seqlens, "max_seqlen": data.max_seqlen}
        lse = plan.cmp(q, k_cmp, data.v_cmp, **packing)[1]
        blocks = plan.select(q, k_cmp, lse, **packing)
        verdict = judge_selection(
            q, k_cmp, lse, blocks, config.geometry, 0.25, cu_seqlens=data.cu_seqlens
        )
        assert verdict, verdict.why
        if not k_cmp.any():
            row = blocks[0, 130] if not case.packed else blocks[149]
            last = 130 // 16 if not case.packed else 88 // 16
            assert row.tolist() == [[0, 1, last - 1, last]] * 2


def test_row_39_500_equal_scores_select_the_first_blocks() -> None:
    geometry = BlockGeometry(8, 4, 16, 20, init_blocks=0, local_blocks=0)
    blocks = select.choose(torch.full((3, 500), 0.25), torch.tensor([7999, 7999, 160]), geometry)
    assert blocks[:2].tolist() == [list(range(20))] * 2
    assert blocks[2].tolist() == [*range(11), *[-1] * 9]


def test_row_39_nan_ranks_below_every_score_and_is_still_a_candidate() -> None:
    scores = torch.tensor([torch.nan, 0.0, torch.nan, 3.0, 0.0, torch.nan, 1.0, 9.0])
    geometry = BlockGeometry(8, 4, 16, 4, init_blocks=0, local_blocks=0)
    blocks = select.choose(scores, torch.tensor(7 * 16 - 1), geometry)  # block 7 is in the future
    assert blocks.tolist() == [1, 3, 4, 6]
    six_blocks = dataclasses.replace(geometry, num_selected_blocks=6)
    blocks = select.choose(scores, torch.tensor(7 * 16 - 1), six_blocks)
    assert blocks.tolist() == [0, 1, 2, 3, 4, 6]


def test_ieee_products_turns_tf32_off_and_restores_it() -> None:
    on_cuda = types.SimpleNamespace(dtype=torch.float32, device=types.SimpleNamespace(type="cuda"))
    settings, name, tf32, ieee = engine._tf32()
    before = getattr(settings, name)
    try:
        setattr(settings, name, tf32)
        with engine.ieee_products(on_cuda):
            assert getattr(settings, name) == ieee
            with pytest.raises(ValueError, match="inner"), engine.ieee_products(on_cuda):
                raise ValueError("inner")
            assert getattr(settings, name) == ieee
        assert getattr(settings, name) == tf32
        with engine.ieee_products(torch.zeros(1)):
            assert getattr(settings, name) == tf32
    finally:
        setattr(settings, name, before)


def test_probe_returns_every_reason() -> None:
    request = functools.partial(dataclasses.replace, request_of(CONFIG, "win"))
    assert [list(probe.probe(request(slot=slot))) for slot in SLOTS] == [[]] * len(SLOTS)
    too_long = request(device="cuda", dtype="float64", seq_len=2**20, phase="decode")
    assert [r.code for r in probe.probe(too_long)] == ["fp64_too_long"]
    assert [r.code for r in probe.probe(request(device="xpu"))] == ["device_not_supported"]
    limit = probe.FP64_CUDA_MAX_SEQ_LEN
    assert not probe.probe(request(device="cuda", dtype="float64", seq_len=limit))
    (reason,) = probe.probe(request(device="cuda", dtype="float64", seq_len=limit + 1))
    assert str(limit) in reason.message


@pytest.mark.parametrize("kernel", ["cpu", "tiles"])
@pytest.mark.parametrize("queries", [1, 4, 9])
def test_causal_aligns_the_last_query_with_the_last_key(
    queries: int, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer queries than keys give the last rows of as many queries as keys."""
    monkeypatch.setattr(aten, "route", lambda *request: kernel)
    generator = torch.Generator().manual_seed(0)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    q, k, v, do = values(2, 3, 9, 4), values(2, 9, 4), values(2, 9, 5), values(2, 3, 9, 5)
    do[:, :, : 9 - queries] = 0
    o, lse = aten.causal(q, k, v, 0.5)
    dq, *dkv = aten.causal_backward(do, q, k, v, o, lse, 0.5, False)
    q, do, *expected = (x[:, :, 9 - queries :] for x in (q, do, o, lse, dq))
    results = aten.causal(q, k, v, 0.5)
    gradients = aten.causal_backward(do, q, k, v, *results, 0.5, False)
    for actual, rows in zip((*results, *gradients), (*expected, *dkv)):
        torch.testing.assert_close(actual, rows, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("offset", "strides", "copied"),
    [
        (0, (192, 24, 1), False),
        (8, (192, 24, 1), False),
        (1, (192, 24, 1), True),
        (0, (196, 24, 1), True),
        (0, (192, 28, 1), True),
        (0, (0, 24, 1), False),
    ],
)
def test_rows_for_cuda_begin_on_16_bytes(offset: int, strides: tuple[int, ...], copied) -> None:
    x = torch.empty(4096, dtype=torch.bfloat16, device="meta")
    rows = x.as_strided((3, 8, 24), strides, offset)
    result = aten._pad_to(rows, 24)
    assert (result is rows) != copied
    assert result.shape == rows.shape
    assert not copied or (result.is_contiguous() and not result.storage_offset())
    with device.simulated("cpu", None):
        assert aten._pad_to(rows, 24) is rows


def test_every_operand_of_the_cuda_operators_is_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of 24 bf16 numbers at odd addresses; do and o have gaps of 4 bytes between rows."""
    operands: list[torch.Tensor] = []

    class Operators:
        def _scaled_dot_product_flash_attention(self, q, k, v, *options, scale):
            operands.extend((q, k, v))
            return q.new_empty(q.shape), q.new_empty(q.shape[:-1], dtype=torch.float32)

        def _scaled_dot_product_flash_attention_backward(self, do, q, k, v, o, *rest, scale):
            operands.extend((do, q, k, v, o))
            return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)

    def rows(*shape: int, gap: int = 0) -> torch.Tensor:
        wide = torch.empty((*shape[:-1], shape[-1] + gap), dtype=torch.bfloat16, device="meta")
        flat = wide.new_empty(wide.numel() + 1)[1:]
        return flat.view(wide.shape)[..., : shape[-1]]

    monkeypatch.setattr(aten, "_ops", Operators())
    q, k, v = rows(2, 3, 8, 24), rows(2, 8, 24), rows(2, 8, 24)
    do, o = rows(2, 3, 8, 24, gap=2), rows(2, 3, 8, 24, gap=2)
    with device.simulated("cuda", (9, 0)):
        _, lse = aten.causal(q, k, v, 0.5)
        aten.causal_backward(do, q, k, v, o, lse, 0.5, deterministic=False)
    assert len(operands) == 8
    assert all(x.storage_offset() == 0 for x in operands)
    assert not any(2 * stride % 16 for x in operands for stride in x.stride()[:-1])


class FlashOfNaN:
    """The forward operator for CUDA with three query rows, of which two see a NaN score."""

    def _scaled_dot_product_flash_attention(self, q, k, v, *options, scale):
        nan, inf = torch.nan, torch.inf
        o = torch.tensor([0.5, nan, nan]).view(1, 1, 3, 1).expand(*q.shape)
        # One program returned +inf for its row; of the last row, only a part of the keys is NaN.
        return o, torch.tensor([[[1.0, inf, 2.0]]]), None


@pytest.mark.parametrize("split", [True, False])
def test_rows_of_nan_scores_have_a_nan_lse_on_cuda(split: bool, monkeypatch) -> None:
    """Their gradients would be finite without it: exp(s - inf) is 0."""
    monkeypatch.setattr(aten, "_ops", FlashOfNaN())
    monkeypatch.setattr(aten, "route", lambda *request: "flash")
    monkeypatch.setattr(aten.flash, "may_split_keys", lambda *sizes: split)
    q, k = torch.zeros(1, 1, 3, 8), torch.zeros(1, 3, 8)
    o, lse = aten.causal(q, k, k, 1.0)
    assert o.isnan().any(-1).tolist() == [[[False, True, True]]]
    assert lse.isnan().tolist() == [[[False, True, split]]]


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("heads", [1, 2])
def test_operands_have_a_last_axis_of_unit_stride(width: int, heads: int) -> None:
    """Other strides raise an error on CUDA and give wrong results on the CPU."""
    q = -torch.randn(3, 5, heads, width).transpose(1, 2)
    k, v = torch.randn(3, 5, width), torch.randn(3, 5, 3)
    assert [x.stride(-1) for x in aten._operands(q, k, v, 8)] == [1, 1, 1]


def test_causal_requires_a_key_for_each_query() -> None:
    q, k = torch.zeros(1, 1, 6, 8), torch.ones(1, 5, 8)
    with pytest.raises(AssertionError, match="key of its own"):
        aten.causal(q, k, k, 1.0)
    with pytest.raises(AssertionError, match="key of its own"):
        aten.causal_backward(q, q, k, k, q, torch.zeros(1, 1, 6), 1.0, False)


def test_malformed_cu_seqlens_cause_no_invalid_access() -> None:
    """On CUDA, no check reads the boundaries.

    Malformed boundaries give undefined results, but never an index outside a tensor.
    """
    data = PACKED.data(torch.float32)
    q, k, v = data.q, data.k_win, data.v_win
    from nsa_backend_sdpa import sel, win

    for bounds in ([7, 3, 150], [0, 400, 20, 150], [-9, 60, 150], [0, 0, 0], [0, 10, 2**31 - 1]):
        call = SlotCall(CONFIG.geometry, 0.25, torch.tensor(bounds, dtype=torch.int32), 150)
        o, lse = win.forward(q, k, v, call=call)
        win.backward(data.do, q, k, v, o, lse, call=call)
        blocks = select.forward(q, data.k_cmp, lse, call=call)
        o, lse = sel.forward(q, k, v, blocks, call=call)
        sel.backward(data.do, q, k, v, blocks, o, lse, call=call)
        call, rows = dataclasses.replace(call, first_query=20), slice(20, 131)
        o, lse = win.forward(q[rows], k, v, call=call)
        win.backward(data.do[rows], q[rows], k, v, o, lse, call=call)
        blocks = select.forward(q[rows], data.k_cmp, lse, call=call)
        o, lse = sel.forward(q[rows], k, v, blocks, call=call)
        sel.backward(data.do[rows], q[rows], k, v, blocks, o, lse, call=call)


@pytest.mark.parametrize("packed", [False, True])
def test_a_block_of_more_keys_than_exist_has_no_rows_of_its_own(packed, monkeypatch):
    sizes: list[int] = []
    original = sel.make_tiles
    monkeypatch.setattr(
        sel, "make_tiles", lambda k, size, call: sizes.append(size) or original(k, size, call)
    )
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(16, 4, 8, dtype=torch.float64, generator=generator, requires_grad=True)
    k = torch.randn(16, 2, 8, dtype=torch.float64, generator=generator, requires_grad=True)
    documents = torch.tensor([0, 5, 16], dtype=torch.int32) if packed else None
    inputs = (q, k, k) if packed else (q[None], k[None], k[None])
    blocks = torch.zeros(*inputs[0].shape[:-2], 2, 1, dtype=torch.int32)
    results = []
    for size in (16, 100003):  # a prime: larger sizes are split before the kernel
        o = block_attention(*inputs, blocks, block_size=size, cu_seqlens=documents)
        results.append([o, *torch.autograd.grad(o.square().sum(), (q, k))])
    assert sizes == [16] * 4
    torch.testing.assert_close(results[1], results[0])
