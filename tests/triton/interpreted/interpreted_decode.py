"""The decode kernels in the strict interpreter, judged by the oracle.

Covers the decode forms and the fused step, append, gates and compress, splits, invalid block
indices and replays.
"""

from __future__ import annotations

import dataclasses
from unittest import mock

import pytest
import torch
import triton
import triton.language as tl

import decode_problems
from nsa_backend_triton.decode import forms, launch
from nsa_backend_triton.decode import sel as decode_sel
from nsa_backend_triton.decode import span as decode_span
from nsa_backend_triton.decode.compress import compress
from nsa_backend_triton.host import configs
from nsa_backend_triton.strict.interpreter import strict
from nsa_core.contract import SLOTS, DecodeCall
from nsa_core.dryrun import PeakBytes
from nsa_verify.checks.decode_compress import fused_compress
from nsa_verify.checks.decode_fused import append_parity, fused_gates, fused_step
from nsa_verify.checks.decode_parity import decode_parity
from nsa_verify.problems.cases import PAPER, SMALL, TINY, Case, config_of
from nsa_verify.problems.combination import Combination
from nsa_verify.problems.findings import bits
from nsa_verify.problems.step_data import StepData, step_data
from nsa_verify.problems.steps import ODD, Step

SUBJECT = Combination(dict.fromkeys(SLOTS, "triton"))
TINY_STEP, RAGGED_LENGTHS = config_of(4, 2, 16, 16, TINY), (1, 7, 8, 15, 16, 17, 23, 24, 25, 64, 77)
STEPS = {
    step.case.name: step
    for step in (
        Step(Case("one token", TINY_STEP, ()), RAGGED_LENGTHS, (1,) * len(RAGGED_LENGTHS)),
        Step(
            Case("one token, pages", TINY_STEP, ()),
            RAGGED_LENGTHS,
            (1,) * len(RAGGED_LENGTHS),
            page_size=16,
        ),
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
PAGED = dataclasses.replace(STEPS["one token, pages"], lengths=(1, 8, 17, 24, 77), new=(1,) * 5)
STEPS |= {PAGED.case.name: PAGED}
STORES = ("k_cmp", "v_cmp", "k_sel", "v_sel", "k_win", "v_win")
QUICK_PROBLEMS = [(name, FP64) for name in STEPS if name not in ("one token", "a chunk")] + [
    ("h=1", FP32),
    ("h=20", BF16),
]
SLOW_PROBLEMS = [
    (name, dtype)
    for name in STEPS
    for dtype in (FP64, FP32, BF16)
    if (name, dtype) not in QUICK_PROBLEMS
]
PROBLEMS = [pytest.param(*problem, id=f"{problem[0]}-{problem[1]}") for problem in QUICK_PROBLEMS]
PROBLEMS += [
    pytest.param(*problem, id=f"{problem[0]}-{problem[1]}", marks=pytest.mark.slow)
    for problem in SLOW_PROBLEMS
]
ONE, FIVE_TOKENS, CHUNK = STEPS["h=1"], STEPS["five tokens, some absent"], STEPS["a chunk"]
SHORT = dataclasses.replace(ONE, lengths=(75, 0, 21), new=(1, 0, 1), page_size=16)


def many_splits() -> mock._patch:
    """Patch the host to have so many multiprocessors that every tile becomes a split."""
    return mock.patch.object(launch, "multiprocessors", return_value=1000)


def run_step(
    data: StepData, call: DecodeCall | None = None, **settings
) -> tuple[torch.Tensor, torch.Tensor]:
    stores = (data.stores[name] for name in STORES)
    return forms.step(data.q, data.gates, *stores, call=call or data.call, **settings)


def equal_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(bits(a), bits(b))


@pytest.mark.few_cases("h=1-torch.float32")
@pytest.mark.parametrize(("name", "dtype"), PROBLEMS)
def test_decode_forms_and_fused_step_match_oracle(name, dtype):
    findings = [
        *decode_parity(SUBJECT, STEPS[name], dtype),
        *fused_step(SUBJECT, STEPS[name], dtype),
    ]
    assert len(findings) >= 9
    assert not [f for f in findings if not f.ok]


def test_rounding_does_not_bias_rows_of_few_keys():
    """A factor that is wrong in all columns of a row shows up with many wide heads."""
    step = Step(Case("32/1 256/256", config_of(32, 1, 256, 256, PAPER), ()), (65, 40), (1, 1))
    findings = [*fused_step(SUBJECT, step, BF16)]
    assert len(findings) == 2
    assert not [f for f in findings if not f.ok]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["h=20", "five tokens, some absent"])
def test_forms_match_oracle_if_every_tile_is_a_split(name):
    with many_splits():
        findings = [
            *decode_parity(SUBJECT, STEPS[name], FP64),
            *fused_step(SUBJECT, STEPS[name], FP64),
        ]
    assert not [f for f in findings if not f.ok]


@pytest.mark.parametrize("scale", [-0.5, pytest.param(0.0, marks=pytest.mark.slow)])
def test_negative_and_zero_scales_match_oracle(scale):
    config = dataclasses.replace(ONE.case.config, scale=scale)
    step = dataclasses.replace(ONE, case=dataclasses.replace(ONE.case, config=config))
    findings = [*decode_parity(SUBJECT, step, FP64), *fused_step(SUBJECT, step, FP64)]
    assert not [f for f in findings if not f.ok]


@pytest.mark.slow
def test_program_order_does_not_change_bits():
    """The last program merges the splits, but in the order of the splits."""
    data, runs = step_data(SHORT, FP32), []
    for seed in (1, 2, 3):
        with strict(seed), many_splits():
            runs.append(run_step(data))
    for o, blocks in runs[1:]:
        assert equal_bits(o, runs[0][0])
        assert equal_bits(blocks, runs[0][1])


@triton.jit
def _count_up(FLAG):
    tl.atomic_add(FLAG, 1)


@pytest.mark.few_cases("h=1")
@pytest.mark.parametrize("name", ["one token, pages", "h=1"])
def test_every_program_waits_for_its_own_token(name, monkeypatch):
    """Programs that run one after another find every flag set, so flags count signals and waits."""
    allocated = []

    def allocate(*args):
        allocated.append(launch.allocate(*args))
        return allocated[-1]

    data = step_data(STEPS[name], FP32)
    monkeypatch.setattr(decode_span, "signal", _count_up)
    monkeypatch.setattr(decode_sel, "wait", _count_up)
    monkeypatch.setattr(forms, "allocate", allocate)
    with many_splits():
        run_step(data)
        splits = launch.SelLaunch(
            data.q, 1, data.stores["k_sel"], data.stores["v_sel"], data.call, block_n=16
        ).splits
    ((_, (_, flags, ticket)),) = allocated
    units = data.q.shape[0] * data.stores["k_sel"].shape[2]
    assert splits > 1
    assert flags[: units * 2].view(units, 2).tolist() == [[1 + splits, 2]] * units
    assert ticket[0] > units * (splits + 2)


def test_many_multiprocessors_split_every_branch():
    data = step_data(SHORT, FP32)
    with many_splits():
        span = launch.SpanLaunch(
            data.q,
            1,
            (data.stores["k_cmp"],) * 2,
            (data.stores["k_win"],) * 2,
            data.call,
            True,
            True,
        )
        sel = launch.SelLaunch(data.q, 1, data.stores["k_sel"], data.stores["v_sel"], data.call)
    assert min(span.splits, span.win_splits, sel.splits) > 1


@pytest.mark.slow
def test_step_in_three_launches_equals_fused_step():
    data = step_data(SHORT, FP32)
    span = dict(configs.pick("decode_span", 0))
    fused, separate = run_step(data), run_step(data, settings=(span | {"FUSE_STEP": 0}, None))
    assert equal_bits(separate[0], fused[0])
    assert equal_bits(separate[1], fused[1])


@pytest.mark.slow
def test_equal_scores_select_the_lower_block():
    """Equal keys before and after a block with larger logits give the same score, bit for bit."""
    config = dataclasses.replace(
        config_of(4, 1, 16, 16, (6, 2, 8, 8, 9)), init_blocks=0, local_blocks=0
    )
    data = step_data(Step(Case("ties", config, ()), (400,), (1,), page_size=8), FP32)
    equal_keys, generator = [*range(8, 25, 2), *range(32, 49, 2)], torch.Generator().manual_seed(6)
    for _ in range(3):
        page = torch.zeros(50, 4, 1, 16)
        page[equal_keys] = torch.randn(4, 1, 16, generator=generator)
        page[27] = data.q[0, 0].sum(0) * 0.5
        data.stores["k_cmp"][data.call.tables.cmp[0].long()] = page
        lse = forms.cmp(data.q, data.stores["k_cmp"], data.stores["v_cmp"], call=data.call)[1]
        blocks = forms.select(data.q, data.stores["k_cmp"], lse, call=data.call).flatten().tolist()
        of_step = run_step(data)[1].flatten().tolist()
        equal_blocks = [b for b in blocks if b not in (27, 28)]
        # either the blocks of the equal keys or the next blocks, which get a part of their weight
        first = 8 + blocks[0] % 2
        assert blocks == of_step
        assert equal_blocks == [*range(first, 26, 2)][: len(equal_blocks)]
        assert len(equal_blocks) >= 6


@pytest.mark.slow
def test_chunks_of_one_token_equal_the_whole_step(monkeypatch):
    data = step_data(CHUNK, FP64)
    o, blocks = run_step(data)
    monkeypatch.setattr(forms, "MAX_SUM_BYTES", 1)
    o_chunks, blocks_chunks = run_step(data)
    lse = forms.cmp(data.q, data.stores["k_cmp"], data.stores["v_cmp"], call=data.call)[1]
    blocks_alone = forms.select(data.q, data.stores["k_cmp"], lse, call=data.call)
    assert torch.allclose(o_chunks, o, rtol=1e-12, atol=1e-12)
    assert equal_bits(blocks_chunks, blocks)
    assert equal_bits(blocks_alone, blocks)


@pytest.mark.parametrize("most_bytes", [2**28, 1])
def test_runs_of_one_token_equal_the_step(most_bytes, monkeypatch):
    """A ragged batch, also in parts, gives what a step of several tokens gives."""
    data = step_data(CHUNK, FP64)
    o, blocks = run_step(data)
    ragged = decode_problems.ragged(data)
    order = ragged.call.sequences.long(), torch.arange(CHUNK.rows).repeat(len(CHUNK.lengths))
    monkeypatch.setattr(forms, "MAX_SUM_BYTES", most_bytes)
    o_ragged, blocks_ragged = run_step(ragged)
    stores = (ragged.stores["k_cmp"], ragged.stores["v_cmp"])
    lse = forms.cmp(ragged.q, *stores, call=ragged.call)[1]
    blocks_alone = forms.select(ragged.q, stores[0], lse, call=ragged.call)
    assert torch.allclose(o_ragged[:, 0], o[order], rtol=1e-12, atol=1e-12)
    assert equal_bits(blocks_ragged[:, 0], blocks[order])
    assert equal_bits(blocks_alone[:, 0], blocks[order])


def test_sel_accepts_unsorted_repeated_and_invalid_blocks():
    step = STEPS["one token"]
    data = step_data(dataclasses.replace(step, lengths=(75, 40), new=(1, 1)), FP64)
    k, v = data.stores["k_sel"], data.stores["v_sel"]
    clean = torch.tensor([[0, 2, 4, -1], [0, 1, 2, -1]], dtype=torch.int32)[:, None, None].expand(
        2, 1, 2, 4
    )
    wild = torch.tensor([[4, 2, 2, 0], [2, -7, 0, 1]])[:, None, None].expand(2, 1, 2, 4).clone()
    # and one that no token has reached: with 40 tokens block 3 is empty
    wild[1, 0, 1] = torch.tensor([1, 2**40, 0, 2])
    o, lse = forms.sel(data.q, k, v, clean, call=data.call)
    o_wild, lse_wild = forms.sel(data.q, k, v, wild, call=data.call)
    wild[1, 0, 0, 1] = 3
    o_future, _ = forms.sel(data.q, k, v, wild, call=data.call)
    assert torch.allclose(o_wild, o, rtol=1e-12, atol=1e-12)
    assert torch.allclose(lse_wild, lse, rtol=1e-12, atol=1e-12)
    assert equal_bits(o_future, o_wild)


def test_sel_takes_more_blocks_than_it_compares_at_once():
    """Slots 64 and more repeat blocks of the slots below 64, and of each other."""
    data = step_data(dataclasses.replace(STEPS["one token"], lengths=(75, 40), new=(1, 1)), FP64)
    k, v = data.stores["k_sel"], data.stores["v_sel"]
    few = torch.tensor([[4, 2, 0, 3], [2, -1, 0, 1]])[:, None, None].expand(2, 1, 2, 4)
    many = torch.full((2, 1, 2, 140), -1)
    many[..., [7, 70, 90, 139]] = few
    many[..., 75] = few[..., 0]
    many[..., 100:104] = few
    call = dataclasses.replace(
        data.call, geometry=dataclasses.replace(data.call.geometry, num_selected_blocks=140)
    )
    o, lse = forms.sel(data.q, k, v, few, call=data.call)
    o_many, lse_many = forms.sel(data.q, k, v, many, call=call)
    assert torch.allclose(o_many, o, rtol=1e-12, atol=1e-12)
    assert torch.allclose(lse_many, lse, rtol=1e-12, atol=1e-12)


def test_nan_in_a_query_affects_only_its_token_and_group():
    data = step_data(dataclasses.replace(ONE, lengths=(40, 30), new=(2, 2), rows=2), FP32)
    o, blocks = run_step(data)
    data.q[0, 1, 1, 3] = torch.nan  # token 1 of sequence 0, group 1
    o_nan, blocks_nan = run_step(data)
    assert torch.isnan(o_nan[0, 1, 1]).all()
    others = torch.ones(o.shape[:3], dtype=torch.bool)
    others[0, 1, 1] = False
    assert equal_bits(o_nan[others], o[others])
    # three blocks exist
    assert equal_bits(blocks_nan[0, 1, 1], torch.tensor([0, 1, 2, -1], dtype=torch.int32))
    assert equal_bits(blocks_nan[0, 0], blocks[0, 0])


@pytest.mark.slow
def test_tokens_beyond_max_len_or_the_block_table_are_padding():
    """A replayed graph may have such lengths: nothing is read there and the outputs are 0."""
    step = dataclasses.replace(SHORT, lengths=(40, 30), new=(1, 1))
    data = step_data(step, FP32)
    expected, _ = run_step(data)
    data.call.starts[0], data.call.lengths[0] = 60, 61
    for call in (
        dataclasses.replace(data.call, max_len=60),
        dataclasses.replace(data.call, max_len=61),
    ):
        o, blocks = run_step(data, call)
        assert (o[0] == 0).all()
        assert (blocks[0] == -1).all()
        assert equal_bits(o[1], expected[1])


def test_step_replays_with_other_lengths_in_its_tensors():
    data = step_data(SHORT, FP64)
    fewer = dataclasses.replace(SHORT, lengths=(74, 0, 20), new=(1, 0, 1))
    data.call.starts[:2], data.call.lengths[:2] = torch.tensor([73, 0]), torch.tensor([74, 0])
    o, blocks = run_step(data)
    o_sel, lse_sel = forms.sel(
        data.q, data.stores["k_sel"], data.stores["v_sel"], blocks, call=data.call
    )
    assert fewer.lengths[0] == int(data.call.lengths[0])
    assert torch.isfinite(o).all()
    assert (o[1] == 0).all()
    assert torch.isfinite(o_sel[[0, 2]]).all()
    assert (lse_sel[1] == -torch.inf).all()


@pytest.mark.few_cases("sel", "win")
@pytest.mark.parametrize("slot", ["cmp", "select", "sel", "win"])
def test_workspace_bytes_equal_the_peak_of_a_run(slot):
    step = dataclasses.replace(ONE, lengths=(77,), page_size=16)
    data = step_data(step, FP32)
    plan = SUBJECT.plan(step.case.config, FP32, needs_grad=False, phase="decode", page_size=16)
    request = dataclasses.replace(plan.requests[slot], batch=1, seq_len=77)
    q, s = data.q, data.stores
    lse, blocks = q.new_zeros(1, 2, 1), torch.zeros((1, 1, 2, 4), dtype=torch.int32)
    inputs = {
        "cmp": (q, s["k_cmp"], s["v_cmp"]),
        "select": (q, s["k_cmp"], lse),
        "sel": (q, s["k_sel"], s["v_sel"], blocks),
        "win": (q, s["k_win"], s["v_win"]),
    }[slot]
    with (
        strict(),
        PeakBytes(*inputs, data.call.starts, data.call.lengths, *data.call.tables) as counter,
    ):
        out = getattr(forms, slot)(*inputs, call=data.call)
        del out
    assert 0.9 * counter.peak <= plan.workspace_bytes(request) <= counter.peak


APPENDS = {
    "one token": (STEPS["one token, pages"], True, False, 8),
    "several, raw too": (FIVE_TOKENS, True, True, 14),
    "more than a ring holds": (CHUNK, True, False, 8),
    "no rotary": (STEPS["h=3, Dk != Dv"], False, False, 9),
}


@pytest.mark.few_cases(
    "one token-torch.float64",
    "one token-torch.bfloat16",
    "no rotary-torch.float64",
    "no rotary-torch.bfloat16",
)
@pytest.mark.parametrize("dtype", [FP64, BF16], ids=str)
@pytest.mark.parametrize("name", APPENDS)
def test_append_matches_plain_pytorch(name, dtype):
    step, rope, rotate_raw, ring = APPENDS[name]
    findings = [
        *append_parity(SUBJECT, step, dtype, rope=rope, rotate_raw=rotate_raw, raw_ring=ring)
    ]
    assert len(findings) == 7  # q, and k and v of three stores
    assert not [f for f in findings if not f.ok]


@pytest.mark.parametrize("dtype", [FP64, FP32, BF16], ids=str)
@pytest.mark.parametrize("name", ["one token, pages", "h=3, Dk != Dv"])
def test_gates_match_oracle(name, dtype):
    (finding,) = fused_gates(SUBJECT, STEPS[name], dtype)
    assert finding.ok, finding.detail


SHORT_BLOCKS = Step(
    Case("l=4, Dk != Dv", config_of(2, 2, 16, 10, (4, 2, 16, 3, 9)), ()), (10, 3, 0), (2, 2, 0), 2
)


@pytest.mark.parametrize(
    ("step", "dtype"),
    [
        (SHORT_BLOCKS, FP64),
        pytest.param(SHORT_BLOCKS, BF16, marks=pytest.mark.slow),
        pytest.param(STEPS["h=3, Dk != Dv"], FP64, marks=pytest.mark.slow),
        pytest.param(STEPS["h=3, Dk != Dv"], BF16, marks=pytest.mark.slow),
        pytest.param(STEPS["one token, pages"], FP32, marks=pytest.mark.slow),
        pytest.param(STEPS["five tokens, some absent"], BF16, marks=pytest.mark.slow),
    ],
    ids=lambda x: x.case.name if isinstance(x, Step) else str(x),
)
def test_compress_matches_oracle(step, dtype):
    findings = [*fused_compress(SUBJECT, step, dtype)]
    assert len(findings) == (28 if dtype == BF16 else 24)
    assert not [f for f in findings if not f.ok]


def test_compress_refuses_weights_of_other_sizes():
    data, k = step_data(ONE, FP32), torch.zeros(1, 9, 2, 16)
    stores = (k, k, data.stores["k_cmp"], data.stores["v_cmp"])
    weights = torch.zeros(8, 16), torch.zeros(16, 8 * 16), torch.zeros(16)
    compress(*stores, weights, weights, rope=None, call=data.call)
    for i, wrong in enumerate((torch.zeros(4, 16), torch.zeros(16, 4 * 16), torch.zeros(17))):
        others = (*weights[:i], wrong, *weights[i + 1 :])
        with pytest.raises(ValueError, match="compress expects weights of shapes"):
            compress(*stores, weights, others, rope=None, call=data.call)
