"""Report row 14, '.item() guard fails, group-consistency numeric issue'.

The sets of blocks are equal bit for bit. For host reads, the code of sdpa runs on meta tensors,
where a read raises. The workspace estimates of the other backends run on meta tensors as well, and
tests/gpu and tests/fa2 check their kernels with CUDA.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nsa_core.contract import SLOTS, SlotCall, import_named
from nsa_core.plan.registry import default_registry
from nsa_core.torch_ops.schema import output_specs
from row_14 import GEOMETRY, group_sets_agree

CUDA = [pytest.param(backend, "cuda", marks=pytest.mark.gpu) for backend in ("sdpa", "triton")]


@pytest.mark.parametrize(("backend", "device"), [("sdpa", "cpu"), *CUDA])
def test_report_row_14_group_sets_are_bit_identical(backend: str, device: str) -> None:
    group_sets_agree(backend, device)


def test_report_row_14_finds_scores_that_mix_groups() -> None:
    def mixed(select: Any) -> Any:
        return lambda q, k_cmp, lse: select(q, k_cmp + 0.1 * k_cmp.mean(-2, keepdim=True), lse)

    with pytest.raises(AssertionError):
        group_sets_agree("sdpa", fault=mixed)


def on_meta(slot: str, packed: bool) -> tuple[list[torch.Tensor], SlotCall]:
    """Return the inputs of a slot as meta tensors, and its call."""
    length, lead = 141, ((141,) if packed else (2, 141))
    rows = (*lead[:-1], length // 4 if packed else GEOMETRY.num_compressed(length))

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    keys = rows if slot in ("cmp", "select") else lead
    tensors = [empty(*lead, 4, 16), empty(*keys, 2, 16), empty(*keys, 2, 16)]
    if slot == "select":
        tensors[2] = empty(4, length) if packed else empty(2, 4, length)
    if slot == "sel":
        tensors.append(empty(*lead, 2, 4, dtype=torch.int32))
    if slot == "combine":
        tensors = [empty(*lead, 4, 3), *(empty(*lead, 4, 16) for _ in range(3))]
    cu = empty(4, dtype=torch.int32) if packed else None
    return tensors, SlotCall(GEOMETRY, 0.25, cu, 90 if packed else length)


def run_on_meta(slot: str, packed: bool, fault: Any = lambda forward: forward) -> None:
    """Run the forward and backward functions of sdpa on meta tensors."""
    spec = default_registry().get("sdpa").spec
    assert spec is not None
    tensors, call = on_meta(slot, packed)
    outs = fault(import_named(spec.slots[slot].forward))(*tensors, call=call)
    outs = [outs] if isinstance(outs, torch.Tensor) else list(outs)
    expected = output_specs(slot, tensors, GEOMETRY.num_selected_blocks)
    assert [(tuple(o.shape), o.dtype) for o in outs] == expected
    backward = spec.slots[slot].backward
    if backward is not None:
        saved = outs if len(outs) == 2 else ()
        import_named(backward)(torch.empty_like(outs[0]), *tensors, *saved, call=call)


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("slot", SLOTS)
def test_report_row_14_nothing_is_read_back_to_the_host(slot: str, packed: bool) -> None:
    if (slot, packed) == ("cmp", True):  # the one documented read: sdpa loops over documents
        with pytest.raises(NotImplementedError, match="meta"):
            run_on_meta(slot, packed)
    else:
        run_on_meta(slot, packed)


def test_report_row_14_finds_a_host_read() -> None:
    def reading(forward: Any) -> Any:
        return lambda *x, call: (x[0].max().item(), forward(*x, call=call))[1]

    with pytest.raises(RuntimeError, match="meta"):
        run_on_meta("win", packed=False, fault=reading)
