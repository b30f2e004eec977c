"""The slots of fa2 with the fake library on the CPU, compared with the oracle."""

from __future__ import annotations

import importlib

import pytest
import torch

from fa2_problems import (
    PROBLEMS,
    SLOTS,
    SMALL,
    Problem,
    assert_correct,
    assert_judged,
    kernel,
    run,
)
from fa2_standin import FLASH4, Library
from nsa_backend_fa2 import cmp
from nsa_core.contract import SlotCall
from nsa_core.layout import BlockGeometry


@pytest.mark.few_cases
@pytest.mark.parametrize("slot", SLOTS)
@pytest.mark.parametrize("name", PROBLEMS)
def test_slot_matches_the_oracle_in_fp32(name: str, slot: str, library: Library) -> None:
    assert_judged(slot, PROBLEMS[name], torch.float32)


@pytest.mark.few_cases
@pytest.mark.parametrize("slot", SLOTS)
@pytest.mark.parametrize("name", ["plain", "row14-narrow-v", "row18-packed-empties"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_slot_matches_the_oracle_in_half_precision(
    dtype: torch.dtype, name: str, slot: str, library: Library
) -> None:
    assert_judged(slot, PROBLEMS[name], dtype)


@pytest.mark.parametrize("library", ["2.8.3.post2", "aten", FLASH4], indirect=True)
@pytest.mark.parametrize("name", ["plain", "one-sequence", "row18-packed-empties"])
def test_backward_of_cmp_reads_the_lse(name: str, library: Library) -> None:
    """lse - ln(gate) gives the gradients of a gated branch; a gate of 0 is an LSE of +inf."""
    problem = PROBLEMS.get(name, Problem((23,), batch=1))
    inputs, do, cu = problem.inputs("cmp", torch.float32)
    call = SlotCall(problem.geometry, problem.factor, cu, max(problem.lengths))
    o, lse = cmp.forward(*inputs.values(), call=call)
    gates = torch.rand(do.shape[:-1], generator=torch.Generator().manual_seed(1)) + 0.1
    gates[..., ::3, :] = 0
    gated = lse.masked_fill(lse == -torch.inf, torch.inf) - gates.log().transpose(-1, -2)
    expected = cmp.backward(do * gates[..., None], *inputs.values(), o, lse, call=call)
    for gradient, other in zip(cmp.backward(do, *inputs.values(), o, gated, call=call), expected):
        torch.testing.assert_close(gradient, other)


def test_historic_0_766_sliding_window_of_flash_attention_2(library: Library) -> None:
    """B=2, S=64, G=2, h=2, D=64, w=32, fp16.

    A report found an error of 0.766, because its reference returned V[0].
    """
    problem = Problem(
        (64,), heads=4, groups=2, Dk=64, Dv=64, geometry=BlockGeometry(16, 8, 16, 4, 1, 2, 32)
    )
    inputs, *_ = problem.inputs("win", torch.float16)
    o = assert_judged("win", problem, torch.float16)["o"]
    # The report's reference: one query and its window with is_causal, which PyTorch aligns
    # top-left, so that the query sees only the first key.
    first = [inputs["v"][:, max(0, t - 31)].repeat_interleave(2, 1) for t in range(64)]
    error = (torch.stack(first, 1).float() - o.float()).abs().mean()
    assert error > 0.5


def test_row_04_cmp_without_compressed_tokens_does_not_call_the_library(library: Library) -> None:
    for problem in (Problem((7,)), Problem((7, 3, 7), batch=None)):
        outputs = assert_judged("cmp", problem, torch.float32)
        assert not outputs["o"].any()
        assert bool((outputs["lse"] == -torch.inf).all())
        assert not any(outputs[n].any() for n in ("dq", "dk_cmp", "dv_cmp"))
    assert not library.calls


def _layouts(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the same values in other memory layouts."""
    strided = x.new_full((*x.shape[:-1], 2 * x.shape[-1]), torch.nan)[..., : x.shape[-1]].copy_(x)
    misaligned = x.new_zeros(x.numel() + 1)[1:].view(x.shape).copy_(x)
    heads_first = x.transpose(-3, -2).contiguous().transpose(-3, -2)
    odd = x.new_full((*x.shape[:-1], x.shape[-1] + 1), torch.nan)[..., : x.shape[-1]].copy_(x)
    return {
        "row23-strided": strided,
        "row23-heads-first": heads_first,
        "row24-misaligned": misaligned,
        "row24-odd-stride": odd,
    }


@pytest.mark.few_cases
@pytest.mark.parametrize(
    "layout", ["row23-strided", "row23-heads-first", "row24-misaligned", "row24-odd-stride"]
)
@pytest.mark.parametrize("slot", SLOTS)
@pytest.mark.parametrize("name", ["plain", "row18-packed-empties"])
def test_memory_layout_does_not_change_results(
    name: str, slot: str, layout: str, library: Library
) -> None:
    problem = PROBLEMS[name]
    inputs, do, cu = problem.inputs(slot, torch.float32)
    expected = run(slot, problem, inputs, do, cu)
    copies = {n: x if n == "blocks" else _layouts(x)[layout] for n, x in inputs.items()}
    outputs = run(slot, problem, copies, _layouts(do)[layout], cu)
    for key, value in expected.items():
        assert torch.equal(outputs[key], value), key


@pytest.mark.parametrize("slot", SLOTS)
def test_row_16_keys_expanded_with_stride_0(slot: str, library: Library) -> None:
    problem = Problem(batch=3)
    inputs, do, cu = problem.inputs(slot, torch.float32)
    for name in [n for n in inputs if n[0] in "kv"]:
        inputs[name] = inputs[name][:1].expand(3, -1, -1, -1)
    assert_correct(slot, problem, inputs, run(slot, problem, inputs, do, cu), do, cu)


@pytest.mark.parametrize("slot", SLOTS)
@pytest.mark.parametrize("packed", [False, True])
def test_row_34_nan_in_one_query_stays_in_its_row(
    packed: bool, slot: str, library: Library
) -> None:
    problem = Problem((9, 14), batch=None) if packed else Problem((37,), batch=1)
    inputs, do, cu = problem.inputs(slot, torch.float32)
    row = inputs["q"].view(-1, problem.heads, problem.Dk)[-1]
    row[1] = torch.nan  # head 1, of group 0, in the last token
    outputs = run(slot, problem, inputs, do, cu)
    assert_correct(slot, problem, inputs, {n: outputs[n] for n in ("o", "lse")}, do, cu)
    o = outputs["o"].view(-1, problem.heads, problem.Dv).clone()
    assert o[-1, 1].isnan().all()
    o[-1, 1] = 0
    assert o.isfinite().all()
    assert outputs["dq"].view(-1, problem.heads, problem.Dk)[:-1].isfinite().all()


@pytest.mark.parametrize("slot", SLOTS)
def test_nan_in_a_key_reaches_the_lse_of_every_row_that_sees_it(
    slot: str, library: Library
) -> None:
    """The library leaves a split of the keys whose sum is NaN out of the LSE."""
    problem = Problem((37,), batch=2)
    inputs, do, cu = problem.inputs(slot, torch.float32)
    inputs["k_cmp" if slot == "cmp" else "k"][0, 1] = torch.nan
    outputs = run(slot, problem, inputs, do, cu)
    nan = outputs["o"].isnan().any(-1)
    assert nan[0].any()
    assert not nan[1].any()
    assert torch.equal(outputs["lse"].isnan(), nan.transpose(1, 2))


@pytest.mark.parametrize("slot", SLOTS)
def test_nan_of_one_document_does_not_reach_another(slot: str, library: Library) -> None:
    problem = PROBLEMS["packed"]  # the last run of its first document is incomplete
    inputs, do, cu = problem.inputs(slot, torch.float32)
    first = problem.lengths[0]
    inputs["q"][first:], do[first:] = torch.nan, torch.nan
    outputs = run(slot, problem, inputs, do, cu)
    keys = SMALL.num_compressed(first) if slot == "cmp" else first
    for name, value in outputs.items():
        if name == "lse":
            assert not value[:, :first].isnan().any()
        else:
            assert value[: keys if name[:2] in ("dk", "dv") else first].isfinite().all(), name


@pytest.mark.parametrize("slot", SLOTS)
def test_row_17_malformed_boundaries_cause_no_invalid_access(slot: str, library: Library) -> None:
    """On CUDA, malformed boundaries reach the backend unchecked.

    The fake library raises where the library would read out of bounds.
    """
    problem = Problem((30,), batch=None)
    inputs, do, _ = problem.inputs(slot, torch.float32)
    for bounds in ([0, 50, 20, 30], [0, -5, 30], [7, 3, 2**31 - 1], [0, 0, 0]):
        call = SlotCall(SMALL, 0.3, torch.tensor(bounds, dtype=torch.int32), 30)
        module = importlib.import_module(f"nsa_backend_fa2.{slot}")
        o, lse = module.forward(*inputs.values(), call=call)
        module.backward(do, *inputs.values(), o, lse, call=call)


def test_row_17_sel_with_too_small_max_seqlen_causes_no_invalid_access(library: Library) -> None:
    problem = Problem((30,), batch=None)
    inputs, _, cu = problem.inputs("sel", torch.float32)
    inputs["blocks"] = torch.arange(4, dtype=torch.int32).expand_as(inputs["blocks"])
    importlib.import_module("nsa_backend_fa2.sel").forward(
        *inputs.values(), call=SlotCall(SMALL, 0.3, cu, 9)
    )


@pytest.mark.few_cases("True-cmp", "True-win")
@pytest.mark.parametrize("slot", SLOTS)
@pytest.mark.parametrize("packed", [False, True])
def test_operator_passes_opcheck(packed: bool, slot: str, library: Library) -> None:
    problem = Problem((9, 4), batch=None) if packed else Problem((13,), batch=1)
    inputs, _, cu = problem.inputs(slot, torch.float32)
    leaves = [x.requires_grad_(n != "blocks") for n, x in inputs.items()]
    bound = kernel(slot, problem)
    arguments = (*leaves, cu, max(problem.lengths), bound.scale, list(bound.geometry), False, None)
    torch.library.opcheck(bound.op, arguments)
