"""judge_slot passes correct results in every dtype, and locates errors."""

from __future__ import annotations

import dataclasses
import resource
import sys
import time

import pytest
import torch

from nsa_core.errors import InvalidInput
from nsa_core.layout import BlockGeometry
from nsa_verify import oracle
from nsa_verify.judge.slot import judge_slot, path_dtype
from nsa_verify.judge.tensor import Verdict, heads_first, judge
from nsa_verify.reference import attention
from truth_cases import TruthCase

INPUTS = {
    "cmp": ("q", "k_cmp", "v_cmp"),
    "sel": ("q", "k", "v", "blocks"),
    "win": ("q", "k", "v"),
    "combine": ("gates", "o_cmp", "o_sel", "o_win"),
}
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
GEOMETRY = BlockGeometry(4, 2, 8, 4, 1, 2, 13)
DENSE = TruthCase(GEOMETRY, (61,), False, 2, 3, 2, 16, 24, 0.25, 3)
PACKED = dataclasses.replace(DENSE, lengths=(0, 5, 0, 40, 3, 13), packed=True)


def problem(
    case: TruthCase, slot: str, dtype: torch.dtype
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    t = case.tensors(dtype)
    return {name: t[name] for name in INPUTS[slot]}, t["do"]


def compute(
    case: TruthCase,
    slot: str,
    inputs: dict[str, torch.Tensor],
    do: torch.Tensor,
    dtype: torch.dtype,
    **change: object,
) -> dict[str, torch.Tensor]:
    """Return what a correct kernel returns: arithmetic in ``dtype``, results in contract dtypes."""
    call: dict[str, object] = (
        {"arithmetic": "rounded", "dtype": dtype} if dtype != torch.float64 else {}
    )
    args = list(inputs.values())
    if slot != "combine":
        call |= {"cu_seqlens": case.cu_seqlens}
        args += [change.get("geometry", case.geometry), change.get("scale", case.scale)]
    result = getattr(attention, slot)(*args, do=do, **call)
    out = {"o": result.o.to(do.dtype)} | ({"lse": result.lse} if slot != "combine" else {})
    return out | {name: g.to(inputs[name[1:]].dtype) for name, g in result.grads.items()}


def judged(
    case: TruthCase,
    slot: str,
    inputs: dict[str, torch.Tensor],
    outputs: dict[str, torch.Tensor],
    **kw: object,
) -> dict[str, Verdict]:
    return judge_slot(
        slot, inputs, outputs, case.geometry, case.scale, cu_seqlens=case.cu_seqlens, **kw
    )


@pytest.mark.few_cases(
    "cmp-packed-torch.bfloat16",
    "cmp-packed-torch.float32",
    "sel-packed-torch.float64",
    "win-packed-torch.float64",
    "combine-dense-torch.float16",
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", [DENSE, PACKED], ids=["dense", "packed"])
@pytest.mark.parametrize("slot", INPUTS)
def test_correct_results_pass_and_small_errors_are_found(
    slot: str, case: TruthCase, dtype: torch.dtype
) -> None:
    inputs, do = problem(case, slot, dtype)
    outputs = compute(case, slot, inputs, do, dtype)
    verdicts = judged(case, slot, inputs, outputs, do=do)
    assert verdicts.keys() == outputs.keys()
    assert all(verdicts.values()), verdicts
    u = torch.finfo(dtype).eps * (1 if dtype in (torch.bfloat16, torch.float16) else 20)
    for name, x in outputs.items():
        wrong = {**outputs, name: x * (1 + 70 * u)}
        verdicts = judged(case, slot, inputs, wrong, do=do)
        assert [n for n, v in verdicts.items() if not v] == [name]
        assert len(verdicts[name].where) == len(case.lead) + 1


def test_outputs_and_gradients_are_judged_by_their_rules() -> None:
    inputs, do = problem(DENSE, "win", torch.bfloat16)
    outputs = compute(DENSE, "win", inputs, do, torch.bfloat16)
    args = (*inputs.values(), GEOMETRY, DENSE.scale)
    g, m = oracle.win(*args, do=do), attention.win(*args, do=do, arithmetic="magnitude")
    r = attention.win(*args, do=do, arithmetic="rounded", dtype=torch.bfloat16)
    verdicts = judged(DENSE, "win", inputs, outputs, do=do)
    for name in ("o", "dq", "dk", "dv"):
        tensors = [
            x if torch.is_tensor(x) else x.o if name == "o" else x.grads[name]
            for x in (outputs[name], g, r, m)
        ]
        assert verdicts[name] == judge(
            *(heads_first(x) for x in tensors), torch.bfloat16, grad=name != "o"
        )


@pytest.mark.parametrize("slot", ["cmp", "sel", "win"])
def test_wrong_geometry_or_scale_is_found(slot: str) -> None:
    inputs, do = problem(DENSE, slot, torch.float32)
    change = {
        "cmp": {"compress_block_size": 2},
        "sel": {"select_block_size": 10},
        "win": {"window_size": 12},
    }[slot]
    for wrong in ({"geometry": dataclasses.replace(GEOMETRY, **change)}, {"scale": 0.2501}):
        verdicts = judged(
            DENSE, slot, inputs, compute(DENSE, slot, inputs, do, torch.float32, **wrong), do=do
        )
        assert not any(verdicts.values()), verdicts


def test_where_is_batch_head_and_row() -> None:
    inputs, do = problem(DENSE, "win", torch.float32)
    outputs = compute(DENSE, "win", inputs, do, torch.float32)
    outputs["o"][1, 37, 4] += 0.1
    outputs["dk"][0, 9, 1] += 0.1
    outputs["lse"][1, 2, 3] += 0.1
    verdicts = judged(DENSE, "win", inputs, outputs, do=do)
    assert (verdicts["o"].where, verdicts["dk"].where, verdicts["lse"].where) == (
        (1, 4, 37),
        (0, 1, 9),
        (1, 2, 3),
    )


def test_sampled_rows_report_token_positions_and_ignore_other_rows() -> None:
    inputs, do = problem(DENSE, "sel", torch.float32)
    rows = [60, 0, 17]
    mask = torch.zeros(61, dtype=torch.bool)
    mask[rows] = True
    do = do * mask[:, None, None]
    outputs = compute(DENSE, "sel", inputs, do, torch.float32)
    outputs["o"][:, 30] = 7.0
    outputs["lse"][..., 30] = 7.0
    assert all(judged(DENSE, "sel", inputs, outputs, do=do, rows=rows).values())
    outputs["o"][1, 17, 2] += 1.0
    outputs["lse"][0, 5, 60] += 1.0
    outputs["dq"][0, 60, 1] += 1.0
    outputs["dv"][1, 3, 1] += 1.0
    verdicts = judged(DENSE, "sel", inputs, outputs, do=do, rows=torch.tensor(rows))
    assert {n: v.where for n, v in verdicts.items() if not v} == {
        "o": (1, 2, 17),
        "lse": (0, 5, 60),
        "dq": (0, 1, 60),
        "dv": (1, 1, 3),
    }
    assert "(1, 2, 17)" in verdicts["o"].why
    with pytest.raises(InvalidInput, match="do must be 0 outside"):
        judged(DENSE, "sel", inputs, outputs, do=do + 1, rows=rows)


def test_sampled_rows_of_gate_gradients() -> None:
    inputs, do = problem(DENSE, "combine", torch.float32)
    outputs = compute(DENSE, "combine", inputs, do, torch.float32)
    outputs["dgates"][0, 5] = 9.0
    mask = torch.zeros(61, 1, 1)
    mask[[3, 4, 60]] = 1
    good = compute(DENSE, "combine", inputs, do * mask, torch.float32)
    good["dgates"][0, 5] = 9.0
    assert all(judged(DENSE, "combine", inputs, good, do=do * mask, rows=[3, 4, 60]).values())
    assert not judged(DENSE, "combine", inputs, outputs, do=do)["dgates"]


@pytest.mark.parametrize("name", ["dk_cmp", "dv_cmp"])
def test_row_18_packed_tail_is_not_read_and_has_zero_gradient(name: str) -> None:
    inputs, do = problem(PACKED, "cmp", torch.bfloat16)
    owned = sum(max(0, (n - 4) // 2 + 1) for n in PACKED.lengths)
    assert owned < PACKED.n_c
    for x in ("k_cmp", "v_cmp"):
        inputs[x][owned:] = torch.nan
    outputs = compute(PACKED, "cmp", inputs, do, torch.bfloat16)
    assert all(judged(PACKED, "cmp", inputs, outputs, do=do).values())
    outputs[name][owned, 1, 3] = 1e-30
    verdict = judged(PACKED, "cmp", inputs, outputs, do=do)[name]
    assert not verdict
    assert verdict.where == (1, owned)
    assert "no document owns" in verdict.why


def test_row_34_nan_in_a_query_affects_only_its_row_and_group() -> None:
    inputs, do = problem(DENSE, "win", torch.float32)
    outputs = compute(DENSE, "win", inputs, do, torch.float32)
    inputs["q"][0, 40, 4, 2] = torch.nan
    assert not judged(DENSE, "win", inputs, {"o": outputs["o"]})["o"]
    outputs["o"][0, 40, 4] = torch.nan
    outputs["lse"][0, 4, 40] = torch.nan
    assert all(judged(DENSE, "win", inputs, {n: outputs[n] for n in ("o", "lse")}).values())
    outputs["o"][0, 41, 4, 0] = torch.nan
    assert judged(DENSE, "win", inputs, {"o": outputs["o"]})["o"].where == (0, 4, 41, 0)


def test_row_34_nan_in_a_query_affects_only_gradients_of_its_visible_keys() -> None:
    inputs, do = problem(DENSE, "win", torch.bfloat16)
    outputs = compute(DENSE, "win", inputs, do, torch.bfloat16)
    # The last token sees 13 keys in its group and batch entry.
    inputs["q"][0, 60, 4, 2] = torch.nan
    assert not judged(DENSE, "win", inputs, outputs, do=do)["dk"]
    outputs["o"][0, 60, 4] = outputs["dq"][0, 60, 4] = torch.nan
    outputs["lse"][0, 4, 60] = torch.nan
    outputs["dk"][0, 48:, 1] = outputs["dv"][0, 48:, 1] = torch.nan
    verdicts = judged(DENSE, "win", inputs, outputs, do=do)
    assert all(verdicts.values()), verdicts
    outputs["dk"][0, 47, 1, 0] = torch.nan
    assert judged(DENSE, "win", inputs, outputs, do=do)["dk"].where == (0, 1, 47, 0)


def test_lowest_precision_on_the_path_selects_the_limits() -> None:
    t = DENSE.tensors(torch.bfloat16)
    assert path_dtype([t["gates"], t["o_cmp"], t["blocks"]]) == torch.bfloat16
    assert path_dtype([t["q"].half(), t["gates"]]) == torch.float16
    assert path_dtype([t["q"].double(), t["gates"].float()]) == torch.float32
    inputs, do = problem(DENSE, "combine", torch.bfloat16)
    outputs = compute(DENSE, "combine", inputs, do, torch.bfloat16)
    assert outputs["dgates"].dtype == torch.float32
    assert judged(DENSE, "combine", inputs, outputs, do=do)["dgates"]


@pytest.mark.parametrize(
    ("name", "change", "why"),
    [
        ("o", lambda x: x.double(), "torch.float64 on cpu, expected torch.float32 on cpu"),
        ("lse", lambda x: x.bfloat16(), "torch.bfloat16 on cpu, expected torch.float32"),
        ("dq", lambda x: x.to("meta"), "meta, expected torch.float32 on cpu"),
        ("dk", lambda x: x[:, :-1], r"shape (2, 60, 2, 16), expected (2, 61, 2, 16)"),
        ("lse", lambda x: x.transpose(1, 2), r"shape (2, 61, 6), expected (2, 6, 61)"),
    ],
)
def test_row_59_wrong_dtype_device_or_shape_fails(name: str, change: object, why: str) -> None:
    inputs, do = problem(DENSE, "win", torch.float32)
    outputs = compute(DENSE, "win", inputs, do, torch.float32)
    outputs[name] = change(outputs[name])
    verdict = judged(DENSE, "win", inputs, outputs, do=do)[name]
    assert not verdict
    assert why in verdict.why


@pytest.mark.parametrize(
    "case", [dataclasses.replace(DENSE, lengths=(0,)), dataclasses.replace(DENSE, batch=0)]
)
@pytest.mark.parametrize("slot", INPUTS)
def test_rows_1_and_2_empty_tensors_pass(slot: str, case: TruthCase) -> None:
    inputs, do = problem(case, slot, torch.float32)
    outputs = compute(case, slot, inputs, do, torch.float32)
    assert all(judged(case, slot, inputs, outputs, do=do).values())


@pytest.mark.slow
@pytest.mark.parametrize("slot", ["cmp", "sel", "win"])
def test_2048_tokens_are_judged_within_30_seconds_and_1_gib(slot: str) -> None:
    case = TruthCase(BlockGeometry(), (2048,), False, 1, 6, 2, 64, 64, 0.125, 0)
    inputs, do = problem(case, slot, torch.bfloat16)
    outputs = compute(case, slot, inputs, do, torch.bfloat16)
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    assert all(judged(case, slot, inputs, outputs, do=do).values())
    unit = 1 if sys.platform == "darwin" else 1024
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * unit < 2**30
    assert time.process_time() - start < 30
