"""real_blocks.py trains layers and measures their blocks; random_blocks.py draws blocks."""

from __future__ import annotations

import json
import sys

import pytest
import random_blocks
import real_blocks
import torch

from nsa_bench.result import read_result
from nsa_cli.app import main as nsa
from nsa_core import NSAConfig
from nsa_core.layout import BlockGeometry


@pytest.mark.slow
def test_real_blocks_trains_measures_and_saves_what_nsa_bench_reads(tmp_path, monkeypatch, capsys):
    """Run small versions of the two commands in docs/how-to/benchmark.md."""
    pytest.importorskip("safetensors")
    monkeypatch.setattr(real_blocks, "TEXT_BYTES", 1)
    options = {
        "device": "cpu",
        "shapes": "2/1/8",
        "dim": 16,
        "steps": 8,
        "length": 192,
        "lengths": 256,
    }
    options |= {"learning-rate": 0.01, "json": tmp_path / "r", "checkpoints": tmp_path}
    monkeypatch.setattr(
        sys, "argv", ["real_blocks", *(f"--{name}={value}" for name, value in options.items())]
    )
    real_blocks.main()
    assert "2/1/8: 8 steps" in capsys.readouterr().out
    document = json.loads((tmp_path / "r").read_text())
    facts = document["shapes"]["2/1/8"]
    assert facts["loss_after"] < facts["loss_before"] - 0.1
    for name in ("untrained", "trained", "random"):
        assert set(facts[name]["256"]["union_over_n"]) == {"2", "4", "8", "16", "32"}
    assert 0 < facts["trained"]["256"]["entropy_over_log_visible"] <= 1
    assert facts["untrained"] != facts["trained"]
    file, json_file = tmp_path / "2-1-8.safetensors", tmp_path / "result.json"
    words = "bench --device cpu --shape 2/1/8 --length 192 --combo sdpa --budget 0.001"
    words += f" --inputs random,real --checkpoint {file} --json {json_file}"
    with pytest.raises(SystemExit) as end:
        nsa(words.split())
    assert not end.value.code, capsys.readouterr().err
    result = read_result(json_file)
    assert all(m.performance for m in result.measurements)
    assert {(m.inputs, m.phase) for m in result.measurements} == {
        (inputs, phase) for inputs in ("random", "real") for phase in ("forward", "backward")
    }
    assert result.settings["checkpoints"]["2/1/8"]["file"] == file.name
    assert result.settings["text_bytes"] >= 192


def test_an_interrupted_run_keeps_finished_shapes(tmp_path, monkeypatch):
    facts = {"steps": 1, "seconds": 1, "loss_before": 2, "loss_after": 1}
    facts |= {
        name: {"64": {"union_over_n": {"8": 1}}} for name in ("untrained", "trained", "random")
    }

    def study(shape, *others):
        if shape == "4/2/8":
            raise KeyboardInterrupt
        return facts

    monkeypatch.setattr(real_blocks, "study", study)
    monkeypatch.setattr(real_blocks, "TEXT_BYTES", 1)
    options = ["--device=cpu", "--shapes=2/1/8,4/2/8", "--lengths=64", f"--json={tmp_path / 'r'}"]
    monkeypatch.setattr(sys, "argv", ["real_blocks", *options])
    with pytest.raises(KeyboardInterrupt):
        real_blocks.main()
    assert json.loads((tmp_path / "r").read_text())["shapes"] == {"2/1/8": facts}


@pytest.mark.parametrize(("init", "local", "n"), [(1, 2, 4), (0, 0, 3), (2, 3, 6)])
def test_random_causal_blocks_follow_the_selection_rules(init, local, n):
    geometry = NSAConfig(
        dim=8,
        n_heads=1,
        n_kv_heads=1,
        compress_block_size=8,
        compress_stride=4,
        select_block_size=16,
        num_selected_blocks=n,
        init_blocks=init,
        local_blocks=local,
    ).geometry
    blocks = random_blocks.random_causal_blocks(250, 2, geometry, "cpu", batch=2, seed=1)
    assert blocks.shape == (2, 250, 2, n)
    for t in range(250):
        current = t // 16
        forced = {*range(min(init, current + 1)), *range(max(0, current + 1 - local), current + 1)}
        for row in blocks[:, t].flatten(0, 1).tolist():
            chosen = [b for b in row if b >= 0]
            assert row == sorted(set(chosen)) + [-1] * (n - len(chosen))
            assert len(chosen) == min(n, current + 1)
            assert forced <= set(chosen) <= set(range(current + 1))
    assert not torch.equal(blocks[0], blocks[1])
    assert torch.equal(
        blocks, random_blocks.random_causal_blocks(250, 2, geometry, "cpu", batch=2, seed=1)
    )


@pytest.mark.parametrize("lists", [1, 2, 3])
def test_eight_neighbours_share_the_blocks_of_the_first_of_them(lists):
    geometry = BlockGeometry(8, 4, 16, num_selected_blocks=5, init_blocks=1, local_blocks=1)
    blocks = random_blocks.random_causal_blocks(250, 2, geometry, "cpu", batch=2, seed=1)
    shared = random_blocks.share_blocks(blocks, lists)
    assert shared.shape == blocks.shape
    assert torch.equal(shared[:, 248:], blocks[:, 248:])
    varied = 0
    for first in range(0, 248, 8):
        for row, group in ((r, g) for r in range(2) for g in range(2)):
            pool = set(blocks[row, first : first + lists, group].flatten().tolist()) - {-1}
            lists_of = shared[row, first : first + 8, group].tolist()
            for chosen in lists_of:
                valid = [b for b in chosen if b >= 0]
                assert chosen == sorted(set(valid)) + [-1] * (5 - len(valid))
                assert len(valid) == min(5, len(pool))
                assert set(valid) <= pool
            varied += len({tuple(chosen) for chosen in lists_of}) > 1
    assert (varied > 0) == (lists > 1)
    with pytest.raises(ValueError, match="lists must be 1 to 8, got 9"):
        random_blocks.share_blocks(blocks, 9)


def test_locality_is_1_for_equal_and_the_tile_size_for_disjoint_blocks():
    geometry = BlockGeometry(8, 4, 16, num_selected_blocks=2, init_blocks=0, local_blocks=1)
    same = torch.tensor([0, 1]).expand(1, 1024, 1, 2)
    assert set(real_blocks.locality(same, geometry).values()) == {1.0}
    disjoint = (torch.arange(1024)[:, None] * 2 + torch.arange(2)).remainder(64).view(1, 1024, 1, 2)
    assert real_blocks.locality(disjoint, geometry) == {
        "2": 2.0,
        "4": 4.0,
        "8": 8.0,
        "16": 16.0,
        "32": 32.0,
    }
    half = torch.where(
        torch.arange(1024)[:, None] < 512, torch.tensor([1, 2]), torch.tensor([1, -1])
    )
    assert real_blocks.locality(half.view(1, 1024, 1, 2), geometry)["8"] == 0.75
