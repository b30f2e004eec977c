"""The sweeps of benchmarks/kernels/tune_tables.py and the rows that they change."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")
import tune_tables

from nsa_backend_triton.host import configs

TRAITS = {"head_dim": 128, "v_head_dim": 128, "itemsize": 2, "heads": 64, "window": 0}
LINE = "span_dkdv cmp 64/4/128 65536 BLOCK_N=64,128 num_warps=4,8 span_dq.BLOCK_M=64"


def test_a_line_gives_the_tuned_row_and_every_combination() -> None:
    sweep = tune_tables.Sweep.parse(LINE)
    assert str(sweep) == "span_dkdv, cmp backward 64/4/128 65536 tokens"
    changes = sweep.changes()
    assert changes[0] == {}
    assert len(changes) == 5
    assert {"BLOCK_N": 128, "num_warps": 8, "span_dq.BLOCK_M": 64} in changes


def test_sizes_of_blocks_belong_to_the_problem() -> None:
    line = "sel_forward sel 64/4/128 65536 BLOCK_N=64,128 select_block_size=128 batch=2"
    sweep = tune_tables.Sweep.parse(line)
    assert sweep.fields == (("select_block_size", 128), ("batch", 2))
    assert sweep.changes() == [{}, {"BLOCK_N": 64}, {"BLOCK_N": 128}]
    assert str(sweep).endswith("65536 tokens select_block_size=128 batch=2")
    assert (sweep.config.select_block_size, sweep.config.window_size) == (128, 512)


@pytest.mark.parametrize(
    ("shape", "sizes"), [("64/4/128", (64, 4, 128, 128)), ("64/4/192/128", (64, 4, 192, 128))]
)
def test_the_problem_has_the_heads_and_widths_of_the_line(
    shape: str, sizes: tuple[int, ...]
) -> None:
    config = tune_tables.Sweep.parse(f"sel_forward sel {shape} 65536").config
    assert (config.n_heads, config.n_kv_heads, config.qk_dim, config.v_dim) == sizes
    assert (config.select_block_size, config.num_selected_blocks) == (64, 16)


def test_a_change_reaches_its_kernels_until_it_is_taken_back() -> None:
    names = ("span_dkdv", "span_dq", "span_forward")

    def rows() -> list[dict[str, int]]:
        return [dict(configs.pick(name, 80, **TRAITS)) for name in names]

    before, pick = rows(), configs.pick
    changed = tune_tables.TunedRows("span_dkdv")
    changed.change({"BLOCK_N": 16, "span_dq.BLOCK_M": 32, "maxnreg": 0})
    assert rows() == [{**before[0], "BLOCK_N": 16}, {**before[1], "BLOCK_M": 32}, before[2]]
    changed.change({})
    assert configs.pick is pick


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("span_dkdv cmp 64/4/128", "is not of the form"),
        ("span_dkdv cmp 64/4/128 64k BLOCK_N=64", "is not of the form"),
        ("span_dkdv cmp 64/4/128 65536 BLOCK_N", "is not of the form"),
        ("span_dkdv cmp 64/4/128 65536 select_block_size=64,128", "is not of the form"),
        ("span_dkdv sel 64/4/128 65536 BLOCK_N=64", "slot 'sel' launches no kernel 'span_dkdv'"),
        ("span_dkdv cmp 64/4/128 65536 random_blocks=64", "needs the slot sel, .* got cmp and 64"),
        ("sel_forward sel 64/4/128 65536 random_blocks=96", "divides it, got sel and 64"),
        ("sel_forward sel 64/4/128 65536 sharing=2", "sharing=2 must be .* needs random_blocks"),
        ("sel_forward sel 64/4/128 4096 random_blocks=64 sharing=9", "sharing=9 must be 1 to 8"),
        ("sel_bucket sel 64/4/128 4096 runs=0", "runs=0 must be at least 1"),
        ("sel_block_backward sel 64/4/128 4096 runs=8", "runs=8 .* belongs to the forward of sel"),
    ],
)
def test_a_wrong_line_is_named(line: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        tune_tables.Sweep.parse(line)
    assert line in str(error.value)
