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

from nsa_backend_fa2 import flash4
from nsa_backend_fa2.providers import Source
from nsa_models.lm import dense

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


CAUSAL = dense.causal


class DenseInPlaceOfFlash4:
    """Computes what FlashAttention-4 does, on the CPU."""

    def __init__(self):
        self.calls = 0

    def forward(self, q, k, v, attention):
        self.calls += 1
        o = CAUSAL(q, k, v, attention.scale).contiguous()
        return o, torch.zeros(q.shape[0], q.shape[2], q.shape[1])

    def backward(self, tensors, attention):
        do, q, k, v, _, _ = tensors
        repeats = q.shape[2] // k.shape[2]
        keys, values = (x.repeat_interleave(repeats, 2) for x in (k, v))
        scores = torch.einsum("bshd,bthd->bhst", q, keys) * attention.scale
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        p = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        dp = torch.einsum("bshd,bthd->bhst", do, values)
        ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * attention.scale
        dq = torch.einsum("bhst,bthd->bshd", ds, keys)
        dk, dv = (
            torch.einsum("bhst,bshd->bthd", *each).unflatten(2, (-1, repeats)).sum(3)
            for each in ((ds, q), (p, do))
        )
        return dq.contiguous(), dk.contiguous(), dv.contiguous()


@pytest.mark.parametrize("mode", ["flash4", pytest.param("flash4+compile", marks=pytest.mark.slow)])
def test_flash4_mode_trains_with_the_gradients_of_dense_attention(mode, monkeypatch):
    provider = DenseInPlaceOfFlash4()
    monkeypatch.setattr(flash4, "source", lambda: Source("flash-attn-4", provider, None))
    grid = train_cells.quick("cpu")
    bench = train_cells.Bench(grid, None, 60)
    model = dataclasses.replace(grid.model, attention="dense")
    losses = {}
    for name in ("eager", mode):
        with train_cells.Mode.of(name).kernels():
            trainer = bench.trainer(model, 64, 1, name)
            losses[name] = [trainer.step().read()[0] for _ in range(3)]
    assert provider.calls >= 3
    assert losses[mode] == pytest.approx(losses["eager"], rel=1e-6)
    assert dense.causal is CAUSAL


def test_a_cell_without_flash_attention_4_has_a_reason(script, tmp_path):
    file = tmp_path / "train.json"
    words = ("--only", "throughput", "--shapes", "64x1", "--modes", "flash4+bf16,eager")
    script(*words, "--json", str(file))
    rows = json.loads(file.read_text())["rows"]
    (row,) = [row for row in rows if "reason" in row]
    assert (row["attention"], row["mode"]) == ("dense", "flash4+bf16")
    assert "the package flash-attn-4 is not installed" in row["reason"]


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
