"""Peak memory (fault row 47) and binaries (row 29), from dry runs without data.

tests/triton/interpreted compares a dry run with what a run allocates; tests/gpu measures both on a
GPU.
"""

from __future__ import annotations

import collections
import dataclasses
import importlib
import math
import threading
import types
from typing import Any

import pytest
import torch

from nsa_core.dryrun import slot_inputs
from slot_requests import make_request

pytest.importorskip("triton")
configs = importlib.import_module("nsa_backend_triton.host.configs")
device = importlib.import_module("nsa_backend_triton.host.device")
compile_table = importlib.import_module("compile_table")
select = importlib.import_module("nsa_backend_triton.select.forward")
workspace = importlib.import_module("nsa_backend_triton.workspace")

SLOTS = ("cmp", "select", "sel", "win", "combine")


def test_row_47_peak_of_combine_equals_its_outputs() -> None:
    """The forward allocates o; the backward adds three gradients and dgates."""
    rows, width = 1000 * 12, 64 * 2
    request = make_request("combine", 1000)
    assert workspace.peak(request) == pytest.approx(rows * (4 * width + 3 * 4), rel=0.001)
    assert workspace.peak(make_request("combine", 1000, needs_grad=False)) == pytest.approx(
        rows * width, rel=0.001
    )


def test_row_47_peak_of_the_fused_backward_equals_a_sum_by_hand() -> None:
    """In bf16 with h=16 it is reached before the outputs are freed: all statistics live beside."""
    outputs, statistics, dgates = 3 * 128 * 2, 3 * 2 * 4, 3 * 4  # bytes of a token and head
    request = make_request("cmp", 8192, n_heads=64, n_kv_heads=4, head_dim=128, v_head_dim=128)
    expected = 8192 * 64 * (outputs + statistics + dgates)
    assert workspace.core_backward(request) == expected
    # In fp16 the backwards of the slots run: three outputs, and the gradients of all three.
    by_slots = dataclasses.replace(request, dtype="float16")
    assert workspace.core_backward(by_slots) > 2 * expected


def test_row_47_fused_backward_without_compressed_tokens_does_not_run() -> None:
    assert workspace.core_backward(make_request("cmp", 31)) == 0
    assert workspace.core_backward(make_request("cmp", 32)) > 0


PEAKS = {slot: (slot, workspace.peak) for slot in SLOTS}
PEAKS["core"] = ("cmp", workspace.core_backward)


@pytest.mark.parametrize("name", PEAKS)
def test_row_47_memory_grows_linearly_with_the_length(name: str) -> None:
    slot, peak = PEAKS[name]
    for fields in (
        {},
        {"n_heads": 64, "n_kv_heads": 4, "deterministic": True},
        {"varlen": True, "batch": 8},
    ):
        points = [
            (math.log(s), math.log(peak(make_request(slot, s, **fields)))) for s in (8192, 1 << 17)
        ]
        slope = (points[1][1] - points[0][1]) / (points[1][0] - points[0][0])
        assert 0.5 < slope <= 1.05, (fields, slope)


@pytest.mark.parametrize("name", PEAKS)
def test_row_47_peak_of_no_tokens_is_zero(name: str) -> None:
    slot, peak = PEAKS[name]
    assert peak(make_request(slot, 0)) == 0
    assert peak(make_request(slot, 64)) > 0


def test_dry_run_does_not_affect_other_threads() -> None:
    from triton.runtime.jit import JITFunction

    stock, in_thread = JITFunction.run, []
    with workspace._no_launches():
        thread = threading.Thread(target=lambda: in_thread.append(workspace._dry.get()))
        thread.start()
        thread.join()
        assert workspace._dry.get()
    assert in_thread == [False]
    assert JITFunction.run is stock


def described_multiprocessors(architecture: int) -> int:
    with device.described(architecture):
        return device.multiprocessors(torch.device("meta"))


def test_absent_gpu_has_the_multiprocessors_of_its_architecture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    counts = {
        architecture: described_multiprocessors(architecture) for architecture in configs.TABLES
    }
    assert counts.pop(0) == 3, "the interpreter"
    assert {counts[a] for a in (80, 86, 89, 90, 120)} == {108, 84, 142, 132, 188}
    assert min(counts.values()) >= 16, "every architecture that has configurations"


def test_present_gpu_reports_its_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(device, "_capability", lambda _: 89)
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: types.SimpleNamespace(multi_processor_count=58),
    )
    assert (described_multiprocessors(89), described_multiprocessors(90)) == (58, 132)


LENGTHS = (1, 31, 32, 127, 1000, 1024, 4097, 8192, 65536, 1 << 20)


def differences(left: set[tuple[Any, ...]], right: set[tuple[Any, ...]]) -> list[Any]:
    """Return the differences between binaries of the same kernels."""
    pairs = [(a, b) for a in left - right for b in right - left if a[0] == b[0]]
    return [(a[0], sorted(set(a) ^ set(b), key=str)) for a, b in pairs] or sorted(
        x[0] for x in left ^ right
    )


# Kernels that only short sequences run, that write parts of dk and dv only there, or that rank
# fewer scores at once there.
IN_SHORT = {
    "select": {"select_forward"},
    "sel": {"sel_bitmask_dq", "sel_bitmask_dkdv", "sum_parts"},
    "win": {"span_dkdv", "sum_parts"},
}


SHORT_WINDOW = (select.select_forward.arg_names.index("RANK_CHUNKS"),)

# Kernels that sort pairs. Long sequences run the last two of them instead of the others. Each has
# two binaries: the pairs may have a mask, and sort keys 16 or 32 bits.
OF_LISTS = {"sel_mark_kernel", "sel_counts_kernel", "sel_places_kernel"}
OF_LISTS |= {"sel_keys_kernel", "sel_pairs_kernel"}


def is_in_short(slot: str, binary: tuple[Any, ...]) -> bool:
    """Return whether only short sequences run this binary."""
    if slot == "select":
        return (SHORT_WINDOW, "4") in binary
    writes_parts = binary[0] != "span_dkdv" or ("DK", "*fp32") in binary
    return binary[0] in IN_SHORT.get(slot, ()) and writes_parts


@pytest.mark.few_cases
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("slot", SLOTS)
def test_row_29_one_binary_per_kernel_over_ten_lengths(slot: str, packed: bool) -> None:
    for shape in ({}, {"n_heads": 64, "n_kv_heads": 4, "head_dim": 192, "v_head_dim": 128}):
        per_length = {}
        for length in LENGTHS:
            request = make_request(slot, length, varlen=packed, **shape)
            if not slot_inputs(request)[1][1].numel():
                continue  # no compressed token: the core does not call the slot
            launches = compile_table.launches(request, 90)
            per_length[length] = {launch.binary for launch in launches}
        binaries = set().union(*per_length.values())
        of_lists = collections.Counter(x[0] for x in binaries if x[0] in OF_LISTS)
        assert not of_lists or set(of_lists) == OF_LISTS
        assert all(count <= 2 for count in of_lists.values()), of_lists
        per_length = {
            length: {x for x in found if x[0] not in OF_LISTS}
            for length, found in per_length.items()
        }
        assert all(per_length.values())
        assert len(per_length) >= 5
        *shorter, longest = LENGTHS
        in_short = {x for y in per_length.values() for x in y if is_in_short(slot, x)}
        assert len(in_short) == len({binary[0] for binary in in_short})
        # select has rows for short sequences for heads of at most 128 columns
        only_short = set() if slot == "select" and shape else IN_SHORT.get(slot, set())
        assert {binary[0] for binary in in_short} == only_short
        common = per_length[shorter[-1]] | in_short
        for length in shorter:  # a short sequence may need fewer kernels, but no others
            binaries = per_length.get(length, set())
            assert binaries <= common, f"{length} tokens: {differences(binaries, common)}"
        # If offsets do not fit into 32 bits, one kernel has a second, slower binary.
        others = per_length[longest] - common
        assert {binary[0] for binary in others} <= {"sel_block_backward"}, differences(
            others, common
        )
