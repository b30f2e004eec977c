"""Rows of the fault table on the sdpa backend, judged by the oracle.

Most rows are lines of drawn cases. The oracle gets the same tensors as the slot, bit for bit.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from nsa_core import resolve
from nsa_core.plan.registry import default_registry
from nsa_core.torch_ops.slot_op import slot_op
from nsa_verify.drawn.judge import judge
from nsa_verify.drawn.parser import parse
from nsa_verify.problems.cases import Case, config_of
from nsa_verify.problems.combination import Combination
from nsa_verify.problems.findings import bits
from nsa_verify.problems.slot_runs import SlotRun, run_kernel, run_slots, slot_inputs
from slot_results import assert_slot_correct

BRANCHES = ("cmp", "sel", "win")
# With fewer elements per row than 64, the RMS of a row varies too much.
CONFIG = config_of(4, 2, 16, 16, (8, 4, 16, 3, 12))
SIZES = {"l": 8, "d": 4, "block": 16, "n": 3, "w": 12, "h": 2, "groups": 2, "tokens": 53}
ROWS = {
    "row03-S=1": "tokens=1",
    "row04-S<l": "tokens=5",
    "row04-S=l-1": "tokens=7",
    "row05-S=l": "tokens=8",
    "row05-S=l+d-1": "tokens=11",
    "row05-S=l+d": "tokens=12",
    "row06-tail": "tokens=17",
    "row06-odd": "tokens=53",
    "row07-n*l'>S": "n=9",
    "row10-w=S": "w=53",
    "row10-w>S": "w=99",
    "w=1": "w=1",
    "row12-h=1": "h=1",
    "row12-h=3": "h=3",
    "row12-h=7": "h=7",
    "row12-h=64": "h=64 groups=1",
    "row13-odd": "dk=17 dv=17",
    "row13-65": "dk=65 dv=65",
    "row13-96": "dk=96 dv=96",
    "row13-320": "dk=320 dv=320",
    "row14-Dv>Dk": "dv=24",
    "row14-Dv<Dk": "dk=24",
    "row16-expanded": "batch=2 layout=expanded",
    "row25-transposed": "do_layout=transposed",
    "row25-expanded": "do_layout=expanded",
    "row34-q": "poison=nan_q",
    "row34-k": "poison=nan_k",
    "row34-v": "poison=nan_v",
    "row41-scale=0": "scale=0.0",
    "row41-scale<0": "scale=-0.3",
}


def check(words: str) -> None:
    """Judge the call of each branch that ``words`` describe; other sizes are those of SIZES."""
    fields = SIZES | dict(word.split("=") for word in words.split())
    line = " ".join(f"{name}={value}" for name, value in fields.items())
    for slot in BRANCHES:
        findings = judge(Combination({slot: "sdpa"}), parse(f"{slot} {line}"))
        assert findings
        assert not [finding for finding in findings if finding.ok is not True]


@pytest.mark.few_cases
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("row", ROWS)
def test_rows_of_single_calls(row: str, dtype: str) -> None:
    check(f"dtype={dtype} {ROWS[row]}")


@pytest.mark.few_cases
@pytest.mark.parametrize("scale", [-0.7, 0.0, 0.9])
@pytest.mark.parametrize("v_width", [1, 2, 3, 4])
@pytest.mark.parametrize("width", [1, 2])
def test_narrow_heads(width: int, v_width: int, scale: float) -> None:
    """Their strides make `pad` choose layouts that the operators misread.

    The window covers the sequence, so that win also runs as one causal attention call.
    """
    check(f"dtype=float64 w=64 tokens=21 batch=2 dk={width} dv={v_width} scale={scale}")


def resolve_plan(c: Case, dtype: torch.dtype):
    return resolve(c.config, dtype=dtype, backends="sdpa", needs_grad=True, varlen=c.packed)


@pytest.mark.parametrize("slot", BRANCHES)
def test_row_23_sliced_and_transposed_inputs_give_bitwise_equal_results(slot: str) -> None:
    c = Case("row 23", CONFIG, (53,), batch=2)
    data, plan = c.data(torch.float32), resolve_plan(c, torch.float32)
    run = run_slots(plan, c, data)[slot]
    for view in (
        lambda t: torch.cat([t, t], -2)[..., : t.shape[-2], :],
        lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
        lambda t: t.transpose(-1, -2).contiguous().transpose(-1, -2),
    ):
        inputs = {n: t if n == "blocks" else view(t) for n, t in run.inputs.items()}
        again = run_kernel(getattr(plan, slot), inputs, data.do, data)
        assert all(torch.equal(bits(again.outputs[n]), bits(t)) for n, t in run.outputs.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_row_37_huge_logits_stay_finite(dtype: torch.dtype) -> None:
    c = Case("row 37", CONFIG, (53,))
    data, plan = c.data(dtype), resolve_plan(c, dtype)
    runs = run_slots(plan, c, data)
    for slot in BRANCHES:
        inputs = dict(runs[slot].inputs)
        inputs["q"] = inputs["q"] * 1e4
        run = run_kernel(getattr(plan, slot), inputs, data.do, data)
        assert all(t.isfinite().all() for n, t in run.outputs.items() if n in ("o", "dv", "dv_cmp"))
        sees_keys = run.outputs["lse"] > -torch.inf
        assert run.outputs["lse"][sees_keys].isfinite().all()


@pytest.mark.few_cases
@pytest.mark.parametrize("factor", [1e-6, 1e3, "outlier", "subnormal"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_row_38_values_of_every_magnitude(factor: float | str, dtype: torch.dtype) -> None:
    c = Case("row 38", CONFIG, (53,))
    data, plan = c.data(dtype), resolve_plan(c, dtype)
    for slot, run in run_slots(plan, c, data).items():
        inputs = {n: t.clone() for n, t in run.inputs.items()}
        for values in [t for n, t in inputs.items() if n[0] == "v" and slot in BRANCHES]:
            row = values[0, 3 % values.shape[1]]
            if factor == "outlier":
                row.fill_(1e4)
            elif factor == "subnormal":
                row.fill_(torch.finfo(dtype).tiny / 8)
            else:
                values.mul_(factor)
            again = run_kernel(getattr(plan, slot), inputs, data.do, data)
            sizes = (c.config.geometry, c.config.softmax_scale)
            assert_slot_correct(slot, again.inputs, again.outputs, *sizes, do=data.do)


@pytest.mark.few_cases("cmp-packed", "select-dense", "sel-packed", "win-dense", "combine-dense")
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("slot", ["cmp", "select", "sel", "win", "combine"])
def test_opcheck(slot: str, packed: bool) -> None:
    c = Case("opcheck", CONFIG, (5, 0, 23) if packed else (28,), packed=packed)
    data, plan = c.data(torch.float32), resolve_plan(c, torch.float32)
    inputs = slot_inputs(slot, data, run_slots(plan, c, data))
    args = [
        t.clone().requires_grad_(slot != "select") if n not in ("blocks", "lse") else t
        for n, t in inputs.items()
    ]
    spec = default_registry().get("sdpa").spec
    assert spec is not None
    op = slot_op("sdpa", slot, spec.slots[slot]).op
    tail = (data.cu_seqlens, 28, c.config.softmax_scale, c.config.geometry.as_ints(), False, None)
    torch.library.opcheck(op, (*args, *tail))


@pytest.mark.slow
def test_window_above_4096_keys_matches_the_oracle() -> None:
    """Windows of more than 4096 keys are computed in several key chunks."""
    c = Case(
        "long window",
        dataclasses.replace(CONFIG, n_heads=1, n_kv_heads=1, window_size=4200),
        (4700,),
    )
    rows = (0, 4095, 4199, 4200, 4699)
    data, plan = c.data(torch.float32), resolve_plan(c, torch.float32)
    do = torch.zeros_like(data.do)
    do[:, list(rows)] = data.do[:, list(rows)]
    inputs = {"q": data.q, "k": data.k_win, "v": data.v_win}
    run = run_kernel(plan.win, inputs, do, data)
    forward = SlotRun(run.inputs, {n: run.outputs[n] for n in ("o", "lse", "dq")}, do)
    sizes = (c.config.geometry, c.config.softmax_scale)
    assert_slot_correct("win", forward.inputs, forward.outputs, *sizes, do=do, rows=rows)
