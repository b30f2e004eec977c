"""Kernels compiled for GPUs that are not present fit their shared memory and the stored figures."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import json
import zlib

import pytest

from nsa_core.layout import BlockGeometry

triton = pytest.importorskip("triton")
compile_table = importlib.import_module("compile_table")
offline = importlib.import_module("offline")
sass = importlib.import_module("sass")
configs = importlib.import_module("nsa_backend_triton.host.configs")

TABLE = json.loads(compile_table.FILE.read_text())
# One title may have two launches, for dk and for dv.
ENTRIES = {compile_table.title(entry): [] for entry in TABLE["rows"]}
for entry in TABLE["rows"]:
    ENTRIES[compile_table.title(entry)].append(entry)
SAME_TRITON = TABLE["triton"] == triton.__version__
SLOTS = ("cmp", "select", "sel", "win", "combine", "step")


def check(rows) -> int:
    count = 0
    for row in rows:
        cost, count = offline.cost(row.launch), count + 1
        assert cost.shared <= offline.SHARED[row.launch.architecture], f"{row.title}: shared memory"
        assert cost.spills <= row.max_spills, f"{row.title}: bytes spilled per thread"
        assert set(cost.serialized) <= set(row.accepted_serialized), (
            f"{row.title}: ptxas serializes its wgmma products and may slow them down; SERIALIZED"
            " of tests/triton/tools/compile_table.py explains the codes and accepts some rows"
        )
        if "wgmma.mma_async" in cost.instructions:
            cubin = offline.compile_launch(row.launch).asm["cubin"]
            assert sass.lost_descriptors(sass.disassemble(cubin)) == [], row.title
        if SAME_TRITON:
            again = "write the table again: python tests/triton/tools/compile_table.py"
            assert row.entry(cost) in ENTRIES[row.title], again
    return count


@pytest.fixture(scope="module")
def all_rows():
    return list(compile_table.rows())


@pytest.mark.slow
@pytest.mark.parametrize("slot", SLOTS)
def test_row_46_the_widest_common_heads_fit(slot: str) -> None:
    """A third of the rows, chosen by their titles."""
    rows = list(compile_table.rows({"bfloat16": ((128, 128),)}, (slot,)))
    assert check([row for row in rows if zlib.crc32(row.title.encode()) % 3 == 0] or rows[:1])


@pytest.mark.slow
@pytest.mark.parametrize("slot", [*SLOTS, "core", "steps"])
def test_every_width_and_dtype_fits_shared_memory(slot: str) -> None:
    assert check(compile_table.rows(slots=(slot,)))


@pytest.mark.slow
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("architecture", [80, 86, 90])
def test_tiles_padded_to_whole_blocks_fit_shared_memory(architecture: int, stride: int) -> None:
    """The probe accepts exactly these requests; on sm_86 it refuses larger tiles."""
    count = 0
    for heads, step in itertools.product((4, 64), (False, True)):
        request = dataclasses.replace(
            compile_table._BASE,
            slot="select",
            n_heads=heads,
            n_kv_heads=1,
            head_dim=256,
            v_head_dim=256,
            needs_grad=False,
            geometry=BlockGeometry(8, stride, 128),
            phase="decode" if step else "prefill",
        )
        if configs.missing(request, architecture):
            continue
        launches = compile_table.step_launches if step else compile_table.launches
        for launch in launches(request, architecture):
            assert offline.cost(launch).shared <= offline.SHARED[architecture], (launch.name, heads)
            count += 1
    assert count or (architecture, stride) == (86, 1)


def test_rows_whose_launch_changed_keep_their_limits(all_rows) -> None:
    """A tile that changed in tuned/*.json is compiled in every run, not only in the full one."""
    stored = {(compile_table.title(entry), entry["launch"]) for entry in TABLE["rows"]}
    check(row for row in all_rows if (row.title, row.launch.digest) not in stored)


@pytest.mark.slow
def test_the_table_has_the_rows_of_this_tree(all_rows) -> None:
    """The file lists every kernel on both GPUs and no other; titles need no compilation."""
    titles = [compile_table.title(entry) for entry in TABLE["rows"]]
    assert titles == [row.title for row in all_rows]
    # kernels of small groups only
    assert {"sel_bucket_kernel", "sel_merge_kernel"} <= {entry["kernel"] for entry in TABLE["rows"]}


def test_the_table_has_exactly_the_accepted_serialized_products() -> None:
    serialized = {
        compile_table.title(entry): tuple(entry["serialized"])
        for entry in TABLE["rows"]
        if entry["serialized"]
    }
    assert serialized == compile_table.SERIALIZED


def test_the_file_is_written_one_entry_a_line() -> None:
    text = compile_table.FILE.read_text()
    assert compile_table.as_json(TABLE["rows"], TABLE["triton"]) == text
    assert len(text.splitlines()) == len(TABLE["rows"]) + 2


@pytest.mark.slow
def test_block_gradients_keep_their_products_asynchronous() -> None:
    """Serialized (C7515), sel_block_backward takes 10.95 ms instead of 8.52.

    On an H200 at 65536 tokens of 64/4/128.
    """
    rows = [
        row
        for row in compile_table.rows({"bfloat16": ((96, 96), (128, 128), (192, 128))}, ("sel",))
        if row.title.startswith("sel_block_backward | sm_90 | sel |")
        or row.title == "sel_block_backward | sm_90 | sel, h=4 | 96/96 bfloat16"
    ]
    assert len(rows) == 4
    for row in rows:
        cost = offline.cost(row.launch)
        assert "wgmma.mma_async" in cost.instructions, row.title
        assert not cost.serialized, row.title


@pytest.mark.slow
def test_serialized_products_are_reported() -> None:
    """Another version of triton has another ptxas, which may not warn."""
    (row,) = (
        row
        for row in compile_table.rows({"bfloat16": ((128, 128),)}, ("win",))
        if row.title == "span_forward | sm_90 | win | 128/128 bfloat16"
    )
    assert offline.cost(row.launch).serialized == ("C7512",) or not SAME_TRITON


@pytest.mark.parametrize("architecture", [80, 86, 90])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_blocks_are_selected_by_four_warps(architecture: int, dtype: str) -> None:
    """With more warps, several would hold parts of one sum over heads."""
    seen = set()
    for heads, width, rows in itertools.product((16, 64), (64, 256), (1, 4)):
        request = dataclasses.replace(
            compile_table._BASE,
            phase="decode",
            needs_grad=False,
            batch=2,
            seq_len=4096,
            page_size=128,
            n_heads=heads,
            n_kv_heads=1,
            head_dim=width,
            v_head_dim=width,
            dtype=dtype,
        )
        for launch in compile_table.step_launches(request, architecture, rows):
            seen.add((launch.name, launch.options.num_warps))
    assert {warps for name, warps in seen if name in ("decode_step", "decode_choose")} == {4}
    assert ("decode_sel", 8) in seen


@pytest.mark.slow
def test_shared_memory_of_a_too_large_tile_is_reported() -> None:
    """Triton compiles such a tile without an error; only the figure shows it."""
    launch = next(compile_table.rows({"bfloat16": ((128, 128),)}, ("win",))).launch
    names = launch.kernel.arg_names
    wide = {
        place: 256 if names[place[0]] == "BLOCK_N" else value
        for place, value in launch.constexprs.items()
    }
    options = dataclasses.replace(launch.options, num_stages=4)
    cost = offline.cost(dataclasses.replace(launch, constexprs=wide, options=options))
    assert cost.shared > offline.SHARED[launch.architecture]
