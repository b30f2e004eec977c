"""The decode kernels in the strict interpreter: slots and fused forms against the oracle, splits,
strays, replays.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import pathlib
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl

from nsa_backend_triton.decode import forms, launch
from nsa_backend_triton.decode import sel as decode_sel
from nsa_backend_triton.decode import span as decode_span
from nsa_backend_triton.host import configs
from nsa_backend_triton.strict.interpreter import strict
from nsa_core import NSAttention
from nsa_core.contract import SLOTS, DecodeCall
from nsa_core.dryrun import PeakBytes
from nsa_core.torch_ops.slot_op import record_dispatch
from nsa_verify.cases import PAPER, SMALL, TINY, Case, config_of
from nsa_verify.checks.decode_fused import append_parity, fused_gates, step_parity
from nsa_verify.checks.decode_parity import ODD, Step, StepData, decode_parity, step_data
from nsa_verify.combination import Combination
from nsa_verify.findings import bits

SUBJECT = Combination(dict.fromkeys(SLOTS, "triton"))
TINY_STEP, RAGGED = config_of(4, 2, 16, 16, TINY), (1, 7, 8, 15, 16, 17, 23, 24, 25, 64, 77)
STEPS = {
    step.case.name: step
    for step in (
        Step(Case("one token", TINY_STEP, ()), RAGGED, (1,) * len(RAGGED)),
        Step(Case("one token, pages", TINY_STEP, ()), RAGGED, (1,) * len(RAGGED), page_size=16),
        Step(
            Case("five tokens, some absent", TINY_STEP, ()),
            (5, 8, 31, 0, 66),
            (5, 0, 3, 0, 1),
            5,
            page_size=32,
        ),
        Step(Case("a chunk", TINY_STEP, ()), (21, 10), (10, 10), rows=10, page_size=16),
        Step(
            Case("reports 12/2/64", config_of(12, 2, 64, 64, SMALL), ()),
            (150, 33),
            (1, 1),
            page_size=64,
        ),
        Step(Case("h=3, Dk != Dv", config_of(3, 1, 32, 16, TINY), ()), (70, 20), (2, 2), rows=2),
        Step(Case("h=1", config_of(2, 2, 16, 16, TINY), ()), (90,), (1,)),
        Step(Case("h=20", config_of(20, 1, 24, 16, ODD), ()), (100, 48), (1, 1), page_size=48),
        Step(Case("equal scores", TINY_STEP, (), sharpness=0.0), (75, 40), (1, 1)),
    )
}
FP64, FP32, BF16 = torch.float64, torch.float32, torch.bfloat16
PAGES = dataclasses.replace(STEPS["one token, pages"], lengths=(1, 8, 17, 24, 77), new=(1,) * 5)
STEPS |= {PAGES.case.name: PAGES}
STORES = ("k_cmp", "v_cmp", "k_sel", "v_sel", "k_win", "v_win")
QUICK = [(name, FP64) for name in STEPS if name not in ("one token", "a chunk")] + [
    ("h=1", FP32),
    ("h=20", BF16),
]
REST = [
    (name, dtype) for name in STEPS for dtype in (FP64, FP32, BF16) if (name, dtype) not in QUICK
]
PROBLEMS = [pytest.param(*problem, id=f"{problem[0]}-{problem[1]}") for problem in QUICK]
PROBLEMS += [
    pytest.param(*problem, id=f"{problem[0]}-{problem[1]}", marks=pytest.mark.slow)
    for problem in REST
]
ONE, SOME, CHUNK = STEPS["h=1"], STEPS["five tokens, some absent"], STEPS["a chunk"]
SHORT = dataclasses.replace(ONE, lengths=(75, 0, 21), new=(1, 0, 1), page_size=16)


def many_splits() -> mock._patch:
    """As on a GPU with room for every tile in a program of its own."""
    return mock.patch.object(launch, "multiprocessors", return_value=1000)


def run_step(
    data: StepData, call: DecodeCall | None = None, **settings
) -> tuple[torch.Tensor, torch.Tensor]:
    stores = (data.stores[name] for name in STORES)
    return forms.step(data.q, data.gates, *stores, call=call or data.call, **settings)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(bits(a), bits(b))


@pytest.mark.parametrize(("name", "dtype"), PROBLEMS)
def test_slots_and_the_fused_step_equal_the_oracle(name, dtype):
    with strict():
        findings = [
            *decode_parity(SUBJECT, STEPS[name], dtype),
            *step_parity(SUBJECT, STEPS[name], dtype),
        ]
    assert len(findings) >= 9
    assert not [f for f in findings if not f.ok]


def test_a_row_of_few_keys_leans_to_no_side():
    """A factor that errs in all columns of a row stands out where heads are many and wide."""
    step = Step(Case("32/1 256/256", config_of(32, 1, 256, 256, PAPER), ()), (65, 40), (1, 1))
    with strict():
        findings = [*step_parity(SUBJECT, step, BF16)]
    assert len(findings) == 2
    assert not [f for f in findings if not f.ok]


@pytest.mark.parametrize(
    "name", ["h=20", pytest.param("five tokens, some absent", marks=pytest.mark.slow)]
)
def test_every_tile_a_split_of_its_own(name):
    with strict(), many_splits():
        findings = [
            *decode_parity(SUBJECT, STEPS[name], FP64),
            *step_parity(SUBJECT, STEPS[name], FP64),
        ]
    assert not [f for f in findings if not f.ok]


@pytest.mark.parametrize("scale", [-0.5, pytest.param(0.0, marks=pytest.mark.slow)])
def test_any_finite_scale(scale):
    config = dataclasses.replace(ONE.case.config, scale=scale)
    step = dataclasses.replace(ONE, case=dataclasses.replace(ONE.case, config=config))
    with strict():
        findings = [*decode_parity(SUBJECT, step, FP64), *step_parity(SUBJECT, step, FP64)]
    assert not [f for f in findings if not f.ok]


def test_the_order_of_programs_changes_no_bit():
    """Whoever comes last merges; splits are added in their own order."""
    data, runs = step_data(SHORT, FP32), []
    for seed in (1, 2, 3):
        with strict(seed), many_splits():
            runs.append(run_step(data))
    for o, blocks in runs[1:]:
        assert same(o, runs[0][0])
        assert same(blocks, runs[0][1])


@triton.jit
def _count(FLAG):
    tl.atomic_add(FLAG, 1)


@pytest.mark.parametrize("name", ["one token, pages", "h=1"])
def test_every_program_waits_for_its_own_token(name, monkeypatch):
    """Where programs run one after the other every flag is set: so flags count who told them and
    who asked.
    """
    made = []

    def kept(*asked):
        made.append(launch.allocate(*asked))
        return made[-1]

    data = step_data(STEPS[name], FP32)
    monkeypatch.setattr(decode_span, "signal", _count)
    monkeypatch.setattr(decode_sel, "wait", _count)
    monkeypatch.setattr(forms, "allocate", kept)
    with strict(), many_splits():
        run_step(data)
        splits = launch.Sel(
            data.q, 1, data.stores["k_sel"], data.stores["v_sel"], data.call, block_n=16
        ).splits
    ((_, (_, flags, ticket)),) = made
    units = data.q.shape[0] * data.stores["k_sel"].shape[2]
    assert splits > 1
    assert flags[: units * 2].view(units, 2).tolist() == [[1 + splits, 2]] * units
    assert ticket[0] > units * (splits + 2)


def test_splits_are_used_where_they_are_counted_on():
    data = step_data(SHORT, FP32)
    with many_splits():
        span = launch.Span(
            data.q,
            1,
            (data.stores["k_cmp"],) * 2,
            (data.stores["k_win"],) * 2,
            data.call,
            True,
            True,
        )
        sel = launch.Sel(data.q, 1, data.stores["k_sel"], data.stores["v_sel"], data.call)
    assert min(span.splits, span.win_splits, sel.splits) > 1


def test_a_step_in_three_launches_is_the_same():
    data = step_data(SHORT, FP32)
    span = dict(configs.pick("decode_span", 0))
    with strict():
        expected, got = run_step(data), run_step(data, settings=(span | {"FUSE_STEP": 0}, None))
    assert same(got[0], expected[0])
    assert same(got[1], expected[1])


def test_equal_scores_go_to_the_lower_block_whatever_was_seen_before_them():
    """Blocks of equal keys in front of and behind one with larger logits: the same score, bit for
    bit.
    """
    config = dataclasses.replace(
        config_of(4, 1, 16, 16, (6, 2, 8, 8, 9)), init_blocks=0, local_blocks=0
    )
    data = step_data(Step(Case("ties", config, ()), (400,), (1,), page_size=8), FP32)
    equal, generator = [*range(8, 25, 2), *range(32, 49, 2)], torch.Generator().manual_seed(6)
    for _ in range(3):
        page = torch.zeros(50, 4, 1, 16)
        page[equal] = torch.randn(4, 1, 16, generator=generator)
        page[27] = data.q[0, 0].sum(0) * 0.5
        data.stores["k_cmp"][data.call.block_table[0].long()] = page
        with strict():
            lse = forms.cmp(data.q, data.stores["k_cmp"], data.stores["v_cmp"], call=data.call)[1]
            blocks = (
                forms.select(data.q, data.stores["k_cmp"], lse, call=data.call).flatten().tolist()
            )
            together = run_step(data)[1].flatten().tolist()
        same_kind = [b for b in blocks if b not in (27, 28)]
        # of the equal ones, or of those behind them, which have a part of their weight
        first = 8 + blocks[0] % 2
        assert blocks == together
        assert same_kind == [*range(first, 26, 2)][: len(same_kind)]
        assert len(same_kind) >= 6


@pytest.mark.slow
def test_runs_of_a_few_tokens_at_a_time(monkeypatch):
    data = step_data(CHUNK, FP64)
    with strict():
        o, blocks = run_step(data)
        monkeypatch.setattr(forms, "MAX_SUM_BYTES", 1)
        got, chosen = run_step(data)
        lse = forms.cmp(data.q, data.stores["k_cmp"], data.stores["v_cmp"], call=data.call)[1]
        alone = forms.select(data.q, data.stores["k_cmp"], lse, call=data.call)
    assert torch.allclose(got, o, rtol=1e-12, atol=1e-12)
    assert same(chosen, blocks)
    assert same(alone, blocks)


def test_blocks_in_any_order_with_duplicates_and_strays():
    step = STEPS["one token"]
    data = step_data(dataclasses.replace(step, lengths=(75, 40), new=(1, 1)), FP64)
    k, v = data.stores["k_sel"], data.stores["v_sel"]
    clean = torch.tensor([[0, 2, 4, -1], [0, 1, 2, -1]], dtype=torch.int32)[:, None, None].expand(
        2, 1, 2, 4
    )
    wild = torch.tensor([[4, 2, 2, 0], [2, -7, 0, 1]])[:, None, None].expand(2, 1, 2, 4).clone()
    # and one of the future: block 3 of 40 tokens does not begin
    wild[1, 0, 1] = torch.tensor([1, 2**40, 0, 2])
    with strict():
        o, lse = forms.sel(data.q, k, v, clean, call=data.call)
        got, got_lse = forms.sel(data.q, k, v, wild, call=data.call)
        wild[1, 0, 0, 1] = 3
        again, _ = forms.sel(data.q, k, v, wild, call=data.call)
    assert torch.allclose(got, o, rtol=1e-12, atol=1e-12)
    assert torch.allclose(got_lse, lse, rtol=1e-12, atol=1e-12)
    assert same(again, got)


def test_nan_in_a_query_stays_in_its_row_and_group():
    data = step_data(dataclasses.replace(ONE, lengths=(40, 30), new=(2, 2), rows=2), FP32)
    with strict():
        o, blocks = run_step(data)
        data.q[0, 1, 1, 3] = torch.nan  # token 1 of sequence 0, group 1
        got, chosen = run_step(data)
    assert torch.isnan(got[0, 1, 1]).all()
    kept = torch.ones(o.shape[:3], dtype=torch.bool)
    kept[0, 1, 1] = False
    assert same(got[kept], o[kept])
    # as few as there are
    assert same(chosen[0, 1, 1], torch.tensor([0, 1, 2, -1], dtype=torch.int32))
    assert same(chosen[0, 0], blocks[0, 0])


def test_lengths_past_what_the_host_allows_are_padding():
    """Of a replayed graph: nothing past max_len or the block table is read, and the last rows come
    back empty.
    """
    step = dataclasses.replace(SHORT, lengths=(40, 30), new=(1, 1))
    data = step_data(step, FP32)
    with strict():
        expected, _ = run_step(data)
        data.call.starts[0], data.call.lengths[0] = 60, 61
        for call in (
            dataclasses.replace(data.call, max_len=60),
            dataclasses.replace(data.call, max_len=61),
        ):
            o, blocks = run_step(data, call)
            assert (o[0] == 0).all()
            assert (blocks[0] == -1).all()
            assert same(o[1], expected[1])


def test_a_step_that_replays_with_other_numbers_in_its_tensors():
    whole = step_data(SHORT, FP64)
    fewer = dataclasses.replace(SHORT, lengths=(74, 0, 20), new=(1, 0, 1))
    whole.call.starts[:2], whole.call.lengths[:2] = torch.tensor([73, 0]), torch.tensor([74, 0])
    with strict():
        o, blocks = run_step(whole)
        lone, lone_blocks = forms.sel(
            whole.q, whole.stores["k_sel"], whole.stores["v_sel"], blocks, call=whole.call
        )
    assert fewer.lengths[0] == int(whole.call.lengths[0])
    assert torch.isfinite(o).all()
    assert (o[1] == 0).all()
    assert torch.isfinite(lone[[0, 2]]).all()
    assert (lone_blocks[1] == -torch.inf).all()


@pytest.mark.parametrize("slot", ["cmp", "select", "sel", "win"])
def test_the_dry_run_counts_what_a_run_makes(slot):
    step = dataclasses.replace(ONE, lengths=(77,), page_size=16)
    data = step_data(step, FP32)
    plan = SUBJECT.plan(step.case.config, FP32, needs_grad=False, phase="decode", page_size=16)
    request = dataclasses.replace(plan.requests[slot], batch=1, seq_len=77)
    q, s = data.q, data.stores
    lse, blocks = q.new_zeros(1, 2, 1), torch.zeros((1, 1, 2, 4), dtype=torch.int32)
    given = {
        "cmp": (q, s["k_cmp"], s["v_cmp"]),
        "select": (q, s["k_cmp"], lse),
        "sel": (q, s["k_sel"], s["v_sel"], blocks),
        "win": (q, s["k_win"], s["v_win"]),
    }[slot]
    with (
        strict(),
        PeakBytes(*given, data.call.starts, data.call.lengths, data.call.block_table) as counted,
    ):
        out = getattr(forms, slot)(*given, call=data.call)
        del out
    assert 0.9 * counted.peak <= plan.workspace_bytes(request) <= counted.peak


APPENDS = {
    "one token": (STEPS["one token, pages"], True, False, 8),
    "several, raw too": (SOME, True, True, 14),
    "more than a ring holds": (CHUNK, True, False, 8),
    "no rotary": (STEPS["h=3, Dk != Dv"], False, False, 9),
}


@pytest.mark.parametrize("dtype", [FP64, BF16], ids=str)
@pytest.mark.parametrize("name", APPENDS)
def test_append_writes_what_plain_code_does(name, dtype):
    step, rope, rotate_raw, ring = APPENDS[name]
    with strict():
        findings = [
            *append_parity(SUBJECT, step, dtype, rope=rope, rotate_raw=rotate_raw, raw_ring=ring)
        ]
    assert len(findings) == 7  # q, and k and v of three stores
    assert not [f for f in findings if not f.ok]


@pytest.mark.parametrize("dtype", [FP64, FP32, BF16], ids=str)
@pytest.mark.parametrize("name", ["one token, pages", "h=3, Dk != Dv"])
def test_gates_are_what_their_formula_gives(name, dtype):
    with strict():
        (found,) = fused_gates(SUBJECT, STEPS[name], dtype)
    assert found.ok, found.detail


@pytest.mark.slow
def test_the_benchmark_runs_its_checks_and_prints_its_lines(capsys, monkeypatch):
    monkeypatch.syspath_prepend(pathlib.Path(__file__).parents[3] / "benchmarks" / "kernels")
    bench = importlib.import_module("triton_decode")
    with strict():
        assert bench.check([("cpu", list(STEPS).index("h=1"), FP32)])
        shape = bench.Shape(1, 64, 4, 2, 16, 16, page=16, geometry=ONE.case.config.geometry)
        times = dict.fromkeys(("graph_ms", "eager_ms"), lambda run: (run(), 2e-3)[1])
        make = bench.make
        monkeypatch.setattr(bench, "make", lambda shape, _, dtype: make(shape, "cpu", dtype))
        for name, value in times.items():
            monkeypatch.setattr(bench, name, value)
        monkeypatch.setattr(bench, "kernel_us", lambda run: (run(), [(2.0, "decode_step")])[1])
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        found = bench.measure(
            shape, [({}, {}), ({"BLOCK_N": 32}, {}), ({"RANK_BLOCKS": 24}, {})], True, FP32
        )
    said = capsys.readouterr().out.splitlines()
    # 15 compressed tokens, 4 blocks and 24 tokens of the window, two heads of 32 numbers
    assert shape.bytes_read(4) == {"cmp": 15 * 256, "sel": 64 * 256, "win": 24 * 256}
    assert len(found) == 2
    assert sum("off by" in text for text in said) == 2
    assert sum("2.0 us decode_step" in text for text in said) == 2
    assert sum("Error" in text for text in said) == 1
    assert said[-1].endswith("append and step: 0.0020 ms")


def test_a_layer_decodes_as_on_plain_pytorch():
    """Through a paged cache: a prompt, steps of one token, a step of several, each by the fused
    forms.
    """
    torch.manual_seed(0)
    config = dataclasses.replace(ONE.case.config, dim=16, rope=True)
    layer, x = NSAttention(config).double(), torch.randn(2, 22, 16, dtype=FP64)
    outputs = {}
    for name in ("sdpa", "triton"):
        layer.backends = name
        with (
            torch.no_grad(),
            strict() if name == "triton" else contextlib.nullcontext(),
            record_dispatch() as seen,
        ):
            cache = layer.new_cache(2, 32, page_size=16)
            pieces = x.split([17, 1, 4], 1)
            outputs[name] = torch.cat([layer(piece, cache=cache) for piece in pieces], 1)
    ran = {(call.backend, call.slot, call.direction) for call in seen}
    assert {("triton", "append", "decode"), ("triton", "step", "decode")} <= ran
    assert torch.allclose(outputs["triton"], outputs["sdpa"], rtol=1e-9, atol=1e-9)
