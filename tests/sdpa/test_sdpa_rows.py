"""Rows of the fault table on the sdpa backend, judged by the oracle.

The oracle gets the same tensors as the slot, bit for bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from nsa_core import resolve
from nsa_core.plan.registry import default_registry
from nsa_core.torch_ops.slot_op import slot_op
from nsa_verify.problems.cases import Case, config_of
from nsa_verify.problems.findings import bits
from nsa_verify.problems.slot_runs import SlotRun, run_kernel, run_slots, slot_inputs
from slot_results import assert_slot_correct

BRANCHES = ("cmp", "sel", "win")
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
# With fewer elements per row than 64, the RMS of a row varies too much.
CONFIG = config_of(4, 2, 16, 16, (8, 4, 16, 3, 12))


def case(length: int = 53, batch: int = 1, **fields: object) -> Case:
    return Case("row", dataclasses.replace(CONFIG, **fields), (length,), batch=batch)


def resolve_plan(c: Case, dtype: torch.dtype):
    return resolve(c.config, dtype=dtype, backends="sdpa", needs_grad=True, varlen=c.packed)


def assert_correct(c: Case, run: SlotRun, slot: str, **kw: object) -> None:
    sizes = (c.config.geometry, c.config.softmax_scale)
    assert_slot_correct(slot, run.inputs, run.outputs, *sizes, do=run.do, **kw)


def check(
    c: Case,
    dtype: torch.dtype,
    change: Callable[[dict[str, torch.Tensor]], None] = lambda tensors: None,
) -> None:
    """Run and judge every branch after ``change`` modified its inputs."""
    data, plan = c.data(dtype), resolve_plan(c, dtype)
    runs = run_slots(plan, c, data)
    for slot in BRANCHES:
        inputs = {n: t.clone() for n, t in runs[slot].inputs.items()}
        change(inputs)
        assert_correct(c, run_kernel(getattr(plan, slot), inputs, data.do, data), slot)


@pytest.mark.few_cases
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "length",
    [1, 5, 7, 8, 11, 12, 17, 53],
    ids=[
        "row03-S=1",
        "row04-S<l",
        "row04-S=l-1",
        "row05-S=l",
        "row05-S=l+d-1",
        "row05-S=l+d",
        "row06-tail",
        "row06-odd",
    ],
)
def test_rows_03_to_06_short_and_partial_lengths(length: int, dtype: torch.dtype) -> None:
    check(case(length), dtype)


@pytest.mark.few_cases
@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"num_selected_blocks": 9}, id="row07-n*l'>S"),
        pytest.param({"window_size": 53}, id="row10-w=S"),
        pytest.param({"window_size": 99}, id="row10-w>S"),
        pytest.param({"window_size": 1}, id="w=1"),
        pytest.param({"n_kv_heads": 4}, id="row12-h=1"),
        pytest.param({"n_heads": 6, "dim": 96}, id="row12-h=3"),
        pytest.param({"n_heads": 7, "n_kv_heads": 1, "dim": 112}, id="row12-h=7"),
        pytest.param({"n_heads": 64, "n_kv_heads": 1, "dim": 1024}, id="row12-h=64"),
        pytest.param({"head_dim": 17, "v_head_dim": 17, "rope": False}, id="row13-odd"),
        pytest.param({"head_dim": 65, "v_head_dim": 65, "rope": False}, id="row13-65"),
        pytest.param({"head_dim": 96, "v_head_dim": 96}, id="row13-96"),
        pytest.param({"head_dim": 320, "v_head_dim": 320}, id="row13-320"),
        pytest.param({"head_dim": 16, "v_head_dim": 24}, id="row14-Dv>Dk"),
        pytest.param({"head_dim": 24, "v_head_dim": 16}, id="row14-Dv<Dk"),
        pytest.param({"scale": 0.0}, id="row41-scale=0"),
        pytest.param({"scale": -0.3}, id="row41-scale<0"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_rows_07_10_12_13_14_41_shapes_and_scales(
    fields: dict[str, object], dtype: torch.dtype
) -> None:
    check(case(**fields), dtype)


@pytest.mark.parametrize("slot", BRANCHES)
def test_row_16_expanded_keys_and_values(slot: str) -> None:
    c = case(batch=2)
    data, plan = c.data(torch.float32), resolve_plan(c, torch.float32)
    inputs = dict(run_slots(plan, c, data)[slot].inputs)
    for name in [n for n in inputs if n[0] in "kv"]:
        inputs[name] = inputs[name][:1].expand(2, -1, -1, -1)
    assert_correct(c, run_kernel(getattr(plan, slot), inputs, data.do, data), slot)


@pytest.mark.parametrize("slot", BRANCHES)
def test_row_23_sliced_and_transposed_inputs_give_bitwise_equal_results(slot: str) -> None:
    c = case(batch=2)
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


@pytest.mark.parametrize("slot", BRANCHES)
def test_row_25_output_gradient_not_contiguous_or_with_stride_0(slot: str) -> None:
    c = case()
    data, plan = c.data(torch.float32), resolve_plan(c, torch.float32)
    inputs = run_slots(plan, c, data)[slot].inputs
    for do in (
        data.do.transpose(1, 2).contiguous().transpose(1, 2),
        torch.ones(()).expand(data.do.shape),
    ):
        assert_correct(c, run_kernel(getattr(plan, slot), inputs, do, data), slot)


@pytest.mark.parametrize("slot", BRANCHES)
def test_row_34_nan_in_one_query_stays_in_its_row_and_group(slot: str) -> None:
    c = case()
    data, plan = c.data(torch.float32), resolve_plan(c, torch.float32)
    inputs = dict(run_slots(plan, c, data)[slot].inputs)
    clean = run_kernel(getattr(plan, slot), inputs, None, data).outputs["o"]
    inputs["q"] = inputs["q"].clone()
    inputs["q"][0, 40, 1] = torch.nan  # head 1 is in group 0
    o = run_kernel(getattr(plan, slot), inputs, None, data).outputs["o"]
    assert o[0, 40, 1].isnan().all()
    unaffected = torch.ones(o.shape[:-1], dtype=torch.bool)
    unaffected[0, 40, :2] = False
    assert torch.equal(bits(o[unaffected]), bits(clean[unaffected]))


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("slot", BRANCHES)
def test_row_34_visible_nan_reaches_the_output(slot: str, name: str) -> None:
    """A NaN that a query sees reaches its output, and does not reach the other group.

    A NaN in q or k does not change earlier rows. A NaN in v may spread to all rows of its kv head,
    because 0 times NaN is NaN.
    """
    c = case()
    data, plan = c.data(torch.float32), resolve_plan(c, torch.float32)
    inputs = dict(run_slots(plan, c, data)[slot].inputs)
    clean = run_kernel(getattr(plan, slot), inputs, None, data).outputs["o"]
    key = next(n for n in inputs if n[0] == name)
    inputs[key] = inputs[key].clone()
    row = 9 if key.endswith("_cmp") else 43
    inputs[key][0, row, 0] = torch.nan
    o = run_kernel(getattr(plan, slot), inputs, None, data).outputs["o"]
    assert o[0, 43, 0].isnan().any()
    assert name == "v" or torch.equal(bits(o[:, :32]), bits(clean[:, :32]))
    assert torch.equal(bits(o[..., 2:, :]), bits(clean[..., 2:, :]))  # the other group


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_row_37_huge_logits_stay_finite(dtype: torch.dtype) -> None:
    c = case()
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
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [n for n in tensors if n[0] == "v"]:
            row = tensors[name][0, 3 % tensors[name].shape[1]]
            if factor == "outlier":
                row.fill_(1e4)
            elif factor == "subnormal":
                row.fill_(torch.finfo(dtype).tiny / 8)
            else:
                tensors[name].mul_(factor)

    check(case(), dtype, change)


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
    assert_correct(c, forward, "win", rows=rows)
