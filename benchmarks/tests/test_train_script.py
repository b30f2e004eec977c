"""The options and modes of benchmarks/train.py."""

from __future__ import annotations

import dataclasses
import json
import sys

import pytest
import torch
import train
import train_cells
from train_parts import group_of

NSA_MODES = ("eager", "recompute", "bf16")


@pytest.fixture
def shapes_of(monkeypatch):
    """A function that runs the script with --shapes and returns the shapes of its section."""
    measured = []
    monkeypatch.setattr(train, "throughput", lambda bench: measured.append(bench.grid.shapes))

    def run(text: str) -> tuple[tuple[int, int], ...]:
        words = ["train.py", "--quick", "--device", "cpu", "--only", "throughput"]
        monkeypatch.setattr(sys, "argv", [*words, "--shapes", text])
        train.main()
        return measured[-1]

    return run


def test_shapes_replace_those_of_the_grid(shapes_of):
    assert shapes_of("64x2,128x1") == ((64, 2), (128, 1))


@pytest.mark.parametrize("text", ["64", "64x", "0x1", "64x2x1", "64x2,"])
def test_malformed_shapes_are_refused(shapes_of, text, capsys):
    with pytest.raises(SystemExit):
        shapes_of(text)
    assert f"--shapes must be like 2048x8,16384x1; got {text}" in capsys.readouterr().err


@pytest.fixture
def script(monkeypatch):
    """A function that runs the quick form of the script on the CPU."""

    def run(*words: str) -> None:
        monkeypatch.setattr(sys, "argv", ["train.py", "--quick", "--device", "cpu", *words])
        train.main()

    return run


@pytest.fixture
def trainer_of():
    """A function that returns a trainer of a tiny model after one step."""

    def trainer(attention: str, mode: str):
        grid = train_cells.quick("cpu")
        bench = train_cells.Bench(grid, None, 60)
        model = dataclasses.replace(grid.model, attention=attention)
        trained = bench.trainer(model, 64, 1, mode)
        trained.step()
        return trained

    return trainer


@pytest.mark.parametrize("attention", ["dense", "nsa"])
def test_bf16_mode_has_no_fp32_parameters_or_moments(trainer_of, attention):
    trained = trainer_of(attention, "bf16")
    assert {p.dtype for p in trained.model.parameters()} == {torch.bfloat16}
    states = trained.optimizer.state.values()
    assert {state["exp_avg"].dtype for state in states} == {torch.bfloat16}
    assert not trained._autocast()._enabled
    eager = trainer_of(attention, "eager")
    assert {p.dtype for p in eager.model.parameters()} == {torch.float32}


@pytest.mark.parametrize("mode", ["recompute", "eager"])
def test_recompute_mode_sets_every_layer(trainer_of, mode):
    layers = [block.attn.recompute for block in trainer_of("nsa", mode).model.blocks]
    assert layers == [mode == "recompute"]


def test_flash4_mode_is_for_dense_attention_and_ends_with_its_cell(script, monkeypatch, tmp_path):
    active = []
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", active.append)
    monkeypatch.setattr(torch.nn.attention, "restore_flash_attention_impl", active.clear)
    seen = []

    def timed(bench, config, length, batch, mode):
        seen.append((config.attention, mode, list(active), torch.backends.cuda.math_sdp_enabled()))
        raise RuntimeError("no time")

    monkeypatch.setattr(train, "_timed_steps", timed)
    words = ("--only", "throughput", "--shapes", "64x1", "--modes", "flash4+bf16,eager")
    script(*words, "--json", str(tmp_path / "train.json"))
    assert seen == [
        ("nsa", "eager", [], True),
        ("dense", "flash4+bf16", ["FA4"], False),
        ("dense", "eager", [], True),
    ]


def test_a_cell_without_flash_attention_4_has_a_reason(script, tmp_path):
    file = tmp_path / "train.json"
    words = ("--only", "throughput", "--shapes", "64x1", "--modes", "flash4+bf16,eager")
    script(*words, "--json", str(file))
    rows = json.loads(file.read_text())["rows"]
    (row,) = [row for row in rows if "reason" in row]
    assert (row["attention"], row["mode"]) == ("dense", "flash4+bf16")
    assert "flash_attn" in row["reason"]


@pytest.mark.slow
def test_each_attention_runs_the_modes_that_it_has(script, tmp_path):
    file = tmp_path / "train.json"
    script("--only", "throughput,memory", "--shapes", "64x1", "--json", str(file))
    rows = json.loads(file.read_text())["rows"]
    cells = [(r["section"], r["attention"], r["mode"]) for r in rows if "peak_gib" in r]
    assert {*cells} == {
        *(("throughput", "nsa", mode) for mode in NSA_MODES),
        ("memory", "nsa", "eager"),
        ("memory", "nsa", "recompute"),
        ("throughput", "dense", "eager"),
        ("throughput", "dense", "bf16"),
        ("memory", "dense", "eager"),
    }
    assert not [row for row in rows if "reason" in row]


def test_a_step_is_divided_among_groups_of_kernels(script, tmp_path):
    file = tmp_path / "train.json"
    script("--only", "parts", "--shapes", "64x1", "--json", str(file))
    rows = json.loads(file.read_text())["rows"]
    assert [(r["section"], r["attention"], r["mode"]) for r in rows] == [
        ("parts", "nsa", "bf16"),
        ("parts", "dense", "bf16"),
    ]
    for row in rows:
        assert row["step_ms"] > 0
        assert row["kernels_ms"].keys() == {*GROUPS_OF_A_STEP, "other"}
        assert row["kernels_ms"]["products"] > 0


GROUPS_OF_A_STEP = ("attention", "products", "compiled", "optimizer")


@pytest.mark.parametrize(
    ("kernel", "group"),
    [
        ("sel_block_backward", "attention"),
        ("attention_delta", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma", "attention"),
        ("nvjet_sm90_tst_192x128_64x5_1x2_h_bz_coopB_NNT", "products"),
        ("aten::mm", "products"),
        ("triton_poi_fused_mul_silu_15", "compiled"),
        ("void at::native::multi_tensor_apply_kernel<at::native::TensorList>", "optimizer"),
        ("void at::native::vectorized_elementwise_kernel<4, FillFunctor>", "other"),
    ],
)
def test_kernels_belong_to_groups(kernel, group):
    assert group_of(kernel) == group


@pytest.mark.parametrize(
    ("modes", "message"),
    [
        ("graph+compile", "in this order, joined with +"),
        ("recompute+bf16", "got 'recompute+bf16'"),
        ("eager+compile", "got 'eager+compile'"),
        ("eager,", "got ''"),
        ("recompute", "--modes needs a mode without recompute, for dense attention"),
        ("flash4", "--modes needs a mode without flash4, for nsa attention"),
    ],
)
def test_unknown_and_missing_modes_are_refused(script, modes, message, capsys):
    with pytest.raises(SystemExit):
        script("--modes", modes)
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_the_script_runs_every_section(script, tmp_path):
    file = tmp_path / "train.json"
    script("--json", str(file))
    rows = json.loads(file.read_text())["rows"]
    assert not [row for row in rows if "reason" in row], rows
    assert {row["section"] for row in rows} == {"throughput", "memory", "stall", "layers", "toy"}
    assert any("crossover" in row for row in rows)
    assert any("R2" in row for row in rows)
