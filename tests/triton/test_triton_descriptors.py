"""Matrix products of sm_90 read the tiles that the PTX names, for every width of K and V.

The ptxas of CUDA 12.8 gets them wrong where V's tiles are narrower than K's; see value_band.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
from unittest import mock

import pytest
import torch

from nsa_core import dryrun

triton = pytest.importorskip("triton")
compile_table = importlib.import_module("compile_table")
meta_inputs = importlib.import_module("nsa_backend_triton.meta_inputs")
offline = importlib.import_module("offline")
sass = importlib.import_module("sass")
constexprs = importlib.import_module("nsa_backend_triton.host.constexprs")
sequences = importlib.import_module("nsa_backend_triton.host.sequences")
decode_launch = importlib.import_module("nsa_backend_triton.decode.launch")
forms = importlib.import_module("nsa_backend_triton.decode.forms")
span_forward = importlib.import_module("nsa_backend_triton.span.forward")

# One width of each kind: 16 columns, 32, 64, and three bands of 32; none is a multiple of a band.
WIDTHS = (13, 24, 56, 72)
STEPS = ("decode_span", "decode_sel", "decode_step")
LOOPS = ("span_forward", "sel_forward_kernel", "sel_bucket_kernel")  # kernels that read K, then V


def lost(slot: str, head_dim: int, v_head_dim: int, **changes: object) -> list[str]:
    """Compile the forward kernels of ``slot`` and return their products without an address."""
    request = dataclasses.replace(
        compile_table._BASE,
        slot=slot,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        needs_grad=False,
        **changes,
    )
    launches = [x for x in compile_table.launches(request, 90) if x.name in LOOPS]
    assert launches
    found = []
    for launch in launches:
        code = sass.disassemble(offline.compile_launch(launch).asm["cubin"])
        assert any(line.name.startswith("HGMMA") for line in code), launch.name
        found += [f"{launch.name} {line}" for line in sass.lost_descriptors(code)]
    return found


def lost_in_steps(slot: str, head_dim: int, v_head_dim: int, group: int = 16) -> list[str]:
    """As :func:`lost`, for the decode form of ``slot``, or of a fused step, with four tokens."""
    request = dataclasses.replace(
        compile_table._BASE,
        **{"phase": "decode", "needs_grad": False, "batch": 3, "seq_len": 256, "page_size": 64},
        **{"n_heads": 2 * group, "n_kv_heads": 2, "head_dim": head_dim, "v_head_dim": v_head_dim},
    )
    tensors, call = meta_inputs.step_inputs(request, 4)
    with offline.recording(90) as launches:
        getattr(forms, slot)(*(tensors[name] for name in meta_inputs.STEP_INPUTS[slot]), call=call)
    codes = [
        sass.disassemble(offline.compile_launch(launch).asm["cubin"])
        for launch in launches
        if launch.name in STEPS
    ]
    assert any(line.name.startswith("HGMMA") for code in codes for line in code)
    return [line for code in codes for line in sass.lost_descriptors(code)]


@pytest.mark.slow
def test_a_narrow_v_keeps_its_address() -> None:
    assert lost("cmp", 24, 8) == []


def test_a_narrow_v_keeps_its_address_in_steps() -> None:
    assert lost_in_steps("win", 24, 8) == []


@pytest.mark.slow
@pytest.mark.skipif(triton.__version__ != "3.6.0", reason="a later ptxas has no such fault")
def test_the_fault_of_ptxas_is_seen_without_value_band() -> None:
    def band_of_v(k_band: int, v_band: int, *_: object, **__: object) -> int:
        return v_band

    with mock.patch.object(span_forward, "value_band", band_of_v):
        assert "ULDC.64" in lost("cmp", 24, 8)[0]
    with mock.patch.object(decode_launch, "value_band", band_of_v):
        assert lost_in_steps("win", 24, 8)


def test_value_band_changes_only_narrow_v_on_sm_90() -> None:
    value_band = constexprs.value_band
    assert value_band(32, 16, 90, use_tma=False) == 32
    assert value_band(256, 16, 90, use_tma=False) == 64
    assert value_band(32, 16, 90, use_tma=True) == value_band(32, 16, 80, use_tma=False) == 16
    for k_band, v_band in ((64, 64), (256, 128), (128, 128), (16, 256)):
        assert value_band(k_band, v_band, 90, use_tma=False) == v_band


def test_bands_are_no_wider_than_asked() -> None:
    q, v = torch.empty(4, 2, 128), torch.empty(4, 2, 72)
    seqs = sequences.Sequences(q, q, 1, 4, True)
    for most, bands in ((256, (128, 32)), (64, (64, 32)), (16, (16, 16))):
        with mock.patch.object(constexprs, "architecture", return_value=80):
            found = constexprs.common_constants(q, v, 2, seqs, use_tma=False, max_band=most)
        assert (found["HEAD_DIM_BAND"], found["V_HEAD_DIM_BAND"]) == bands


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("slot", ["cmp", "win", "sel"])
@pytest.mark.parametrize("head_dim", WIDTHS)
def test_masked_columns_of_any_width(head_dim: int, slot: str, packed: bool) -> None:
    for v_head_dim in WIDTHS:
        assert lost(slot, head_dim, v_head_dim, varlen=packed) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("slot", "group"),
    # A tile of sel holds one token: asynchronous products need more than 32 heads a group.
    [*itertools.product(("cmp", "select", "win", "step"), (16, 17, 64)), ("sel", 64)],
)
def test_masked_columns_of_any_width_in_steps(slot: str, group: int) -> None:
    for head_dim, v_head_dim in ((24, 8), (72, 13), (56, 24), (128, 64)):
        assert lost_in_steps(slot, head_dim, v_head_dim, group) == []


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [16, 32, 64, 96])
def test_rows_that_are_not_aligned(head_dim: int) -> None:
    """Odd strides forbid asynchronous copies of whole columns too."""

    def odd(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype != torch.bfloat16:
            return tensor
        wider = tensor.new_empty(*tensor.shape[:-1], tensor.shape[-1] + 1)
        return wider[..., :-1]

    def inputs(request: object) -> tuple[object, ...]:
        do, tensors, call = dryrun.slot_inputs(request)
        return odd(do), tuple(map(odd, tensors)), call

    with mock.patch.object(compile_table, "slot_inputs", inputs):
        for v_head_dim in (16, 32, 64, 96):
            assert lost("cmp", head_dim, v_head_dim) == []
