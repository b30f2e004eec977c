"""The tables of benchmarks/figure_*.py, from result files that the tests write."""

from __future__ import annotations

import functools
import json
import re
import shutil
from pathlib import Path

import figure_recipes
import figures
import pytest

from nsa_bench.result import read_result

ROOT = Path(__file__).resolve().parents[2]
MEMORY_VALUES = [f"row-13-{name}" for name in ("peak-2k", "peak-16", "largest", "slope")]
POINT = ("nsa", 2048, 1)  # attention, tokens, batch


@pytest.fixture
def results(tmp_path):
    """A copy of the results folder with the files of training."""
    folder = tmp_path / "copy" / "h100"
    folder.mkdir(parents=True)
    for name in ("h200/train.json", "h100/train_memory.json"):
        shutil.copy(ROOT / "benchmarks" / "results" / name, folder)
    return folder.parent


def rows_of(results, name):
    """Return the rows of a table as lists of cells."""
    lines = figures.TABLES[name](figures.Results(results)).splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.parametrize("name", ["a100", "shapes", "sel-rivals", "serving-steps", "counters"])
def test_a_table_without_its_files_says_so(tmp_path, name):
    ((state, *others),) = rows_of(tmp_path / "results" / "h100", name)
    assert state == "not measured yet"
    assert {*others} == {"-"}


def test_the_serving_tables_have_the_cells_that_ran(tmp_path):
    cells = [
        {"batch": 8, "length": 8192, "nsa": 50.0, "eager": 80.0, "dense": 60.0, "flash-attn": 55.0},
        {"batch": 1, "length": 8192, "nsa": 40.0, "eager": 70.0, "error": "no memory"},
        {"batch": 1, "length": 131072, "error": "no time left"},
    ]
    prompts = [{"tokens": 8192, "chunks": 5.0, "cache": 6.0, "whole": 4.0, "rows": 90.0}]
    result = {"device": "NVIDIA H100 80GB HBM3", "shape": "64/4/128 bfloat16"}
    result |= {"cells": cells, "prompts": prompts}
    folder = tmp_path / "results" / "h100"
    folder.mkdir(parents=True)
    (folder / "serving_decode.json").write_text(json.dumps(result))
    published = tmp_path / "results" / "h200"
    assert figures.TABLES["serving-device"](figures.Results(published)) == "H100 80GB"
    assert rows_of(published, "serving-steps") == [
        ["8k", "1", "40.0", "70.0", "-", "-", "-", "25.0"],
        ["8k", "8", "50.0", "80.0", "55.0", "2.4", "1.1x", "160"],
        ["128k", "1", "-", "-", "-", "-", "-", "-"],
    ]
    assert rows_of(published, "serving-prompts") == [["8k", "90.0", "5.00", "6.00", "4.00"]]


def test_the_a100_table_has_the_fastest_of_each_kind(tmp_path):
    source = ROOT / "benchmarks" / "results" / "h200_as_sm80" / "a100_core_64_4_128.json"
    document = json.loads(source.read_text())
    (own,) = (
        m
        for m in document["measurements"]
        if (m["inputs"], m["length"], m["subject"], m["phase"]) == ("random", 8192, "auto", "both")
    )
    ms = {"auto": 5.0, "triton": 4.0, "dense flash": 9.0, "sfnsa NSA": 6.0}
    document["measurements"] = [
        own | {"subject": subject, "performance": own["performance"] | {"median_ms": value}}
        for subject, value in ms.items()
    ]
    document["measurements"].append(own | {"inputs": "real"})
    folder = tmp_path / "results" / "h200_as_sm80"
    folder.mkdir(parents=True)
    (folder / "a100_core_64_4_128.json").write_text(json.dumps(document))
    rows = rows_of(tmp_path / "results" / "h200", "a100")
    assert rows == [["64/4/128", "8k", "4.00", "9.00", "6.00", "-"]]


def test_the_decode_steps_are_compared_with_the_same_gpu(tmp_path):
    results = tmp_path / "results"
    shown = functools.partial(figures.TABLES["a100-decode"], figures.Results(results / "h100"))
    for name in ("h100", "h200", "h200_as_sm80"):
        (results / name).mkdir(parents=True)
    assert shown() == "not measured yet"
    source = ROOT / "benchmarks" / "results" / "h200" / "decode.json"
    document = json.loads(source.read_text())
    (results / "h100" / "decode.json").write_text(json.dumps(document))
    (results / "h200_as_sm80" / "a100_decode.json").write_text(json.dumps(document))
    assert shown() == "not measured yet"
    for measurement in document["measurements"]:
        if measurement["subject"] == "auto":
            measurement["performance"]["median_ms"] /= 2
    (results / "h200" / "decode.json").write_text(json.dumps(document))
    assert shown() == "2.00 to 2.00 times"


def test_the_speed_up_of_blocks_is_a_range_over_block_sizes(tmp_path):
    results = figures.Results(tmp_path / "h200")
    assert figures.TABLES["block-attention-a100"](results) == "not measured"
    times = [
        *(("block_attention", 64, phase, 4.0) for phase in ("forward", "both")),
        *(("block_attention", 128, phase, 5.0) for phase in ("forward", "both")),
        ("dense flash", None, "both", 10.0),
        ("dense cudnn", None, "both", 1.0),
    ]
    rows = [
        {"shape": "8/2/32", "S": length, "implementation": name, "block_size": size}
        | {"phase": phase, "median_ms": ms if length == 8192 or size == 64 else 4.0}
        for name, size, phase, ms in times
        for length in (8192, 32768)
    ]
    (tmp_path / "h200_as_sm80").mkdir()
    (tmp_path / "h200_as_sm80" / "blocks.json").write_text(json.dumps({"rows": rows}))
    assert figures.TABLES["block-attention-a100"](results) == "2.0x to 2.5x at 8k, 1.0x at 32k"


def test_the_table_of_shapes_takes_the_fastest_dense_kernel(tmp_path):
    folder = tmp_path / "results" / "h100"
    folder.mkdir(parents=True)
    document = json.loads((ROOT / "benchmarks/results/h200/backends_32_8_128.json").read_text())
    document["measurements"] = [
        m
        for m in document["measurements"]
        if m["length"] == 16384 and (m["subject"] == "auto" or m["kind"] == "dense")
    ]
    (folder / "shapes_16k.json").write_text(json.dumps(document))
    times = {
        m["subject"]: m["performance"]["median_ms"]
        for m in document["measurements"]
        if m["phase"] == "both" and m["performance"]
    }
    own = times.pop("auto")
    fastest = min(times.values())
    ((heads, length, nsa, dense, kernel, speed_up),) = rows_of(folder, "shapes")
    assert (heads, length) == ("32/8/128", "16k")
    assert float(nsa) == pytest.approx(own, rel=0.01)
    assert float(dense) == pytest.approx(fastest, rel=0.01)
    assert kernel == "FlashAttention-4"
    assert times["dense flash-attn 4"] == fastest
    assert speed_up == f"{fastest / own:.1f}x"


@pytest.fixture
def published(tmp_path):
    """A folder with copies of the published results, which a test may change."""
    for folder in ("h200", "h200_as_sm80"):
        shutil.copytree(ROOT / "benchmarks/results" / folder, tmp_path / folder)
    return tmp_path / "h200"


def changed(path, factor, field="performance", **facts):
    """Multiply the time or the memory of the cells that have ``facts``."""
    document = json.loads(path.read_text())
    cells = [m for m in document["measurements"] if all(m[k] == v for k, v in facts.items())]
    assert cells
    for m in cells:
        if field == "performance":
            m["performance"]["median_ms"] *= factor
        else:
            m[field] *= factor
    path.write_text(json.dumps(document))


def test_the_table_of_use_has_the_ranges_over_head_counts(published):
    before = {row[0]: row for row in rows_of(published, "use")}
    assert list(before) == ["2k", "8k", "16k", "32k", "64k", "128k"]
    own, dense = next(
        pair
        for pair in figure_recipes.pairs([read_result(published / "core_12_2_64.json")])
        if pair[0].length == 65536
    )
    cell = {"phase": "both", "inputs": "random", "length": 65536, "subject": "auto"}
    changed(published / "core_12_2_64.json", 1 / 4, **cell)
    changed(published / "core_12_2_64.json", 8, "peak_memory_bytes", **cell)
    changed(published / "decode.json", 1 / 2, subject="auto", shape="64/4/128", length=131072)
    older = published.with_name("h200_as_sm80") / "a100_core_12_2_64.json"
    changed(older, 1 / 100, **cell)
    after = {row[0]: row for row in rows_of(published, "use")}
    assert [n for n in before if before[n] != after[n]] == ["64k", "128k"]
    highest = [float(re.findall(r"([\d.]+)x", cell)[-1]) for cell in after["64k"][1:]]
    ms = [m.performance.median_ms for m in (own, dense)]
    assert highest[0] == pytest.approx(4 * ms[1] / ms[0], abs=0.05)
    assert highest[1] > 100
    memory = 8 * own.peak_memory_bytes / dense.peak_memory_bytes
    assert highest[-1] == pytest.approx(memory, abs=0.05)
    steps = [float(of["128k"][4].removesuffix("x")) for of in (before, after)]
    assert steps[1] == pytest.approx(2 * steps[0], abs=0.1)


def test_the_recipes_scale_with_groups_and_layers(published):
    rows = {(row[0], row[1]): row[2:] for row in rows_of(published, "recipes")}
    assert len(rows) == 9
    own, dense = (
        next(
            m["performance"]["median_ms"]
            for m in json.loads((published / "core_64_4_128.json").read_text())["measurements"]
            if (m["subject"], m["phase"], m["inputs"], m["length"])
            == (subject, "both", "random", length)
        )
        for subject, length in (("auto", 32768), ("dense flash-attn 4", 65536))
    )
    assert rows["70B", "32k"][0] == f"{80 * own / 1e3:.2f} s"
    assert rows["8B", "32k"][0] == f"{32 * own / 2:.0f} ms"
    assert float(rows["70B", "32k"][1].split()[0]) == pytest.approx(80 * dense / 4e3, rel=0.01)
    assert [row[-1] for row in rows.values()] == ["1", "1", "4", "2", "4", "8", "16", "32", "64"]
    # 16 bytes a parameter; checkpoints and the MLP of 128k tokens
    expected = 16 * 8e9 + 2**17 * (2 * 4096 * 32 + 12 * 14336)
    assert rows["8B", "128k"][-2] == f"{expected / 2**30:,.0f}"


def test_the_recipes_are_checked_by_measured_cells(published):
    results = figures.Results(published)
    ((own, _),) = figure_recipes.pairs([read_result(published / "shapes_128k.json")])
    times = [figure_recipes.nsa_ms(results, 1, own.length), own.performance.median_ms]
    value = figures.TABLES["recipe-check"](results)
    assert [float(n) for n in re.findall(r"([\d.]+) ms", value)] == pytest.approx(times, rel=0.01)
    for path in published.glob("shapes_*.json"):
        path.unlink()
    assert figures.TABLES["recipe-check"](figures.Results(published)) == "not measured yet"


def test_the_tables_of_training_take_the_fastest_dense_mode_and_recompute(results):
    folder = results / "h100"
    document = json.loads((folder / "train.json").read_text())
    dense = next(r for r in document["rows"] if r.get("attention") == "dense" and r["S"] == 2048)
    nsa = next(r for r in document["rows"] if r.get("attention") == "nsa" and r["S"] == 2048)
    nsa |= {"tokens_per_s": 8_000_000}
    bf16 = dense | {"mode": "bf16+compile", "tokens_per_s": 9_000_000}
    slower = dense | {"mode": "bf16+compile+graph", "tokens_per_s": 1}
    document["rows"] += [bf16, slower]
    (folder / "train.json").write_text(json.dumps(document))
    rows = rows_of(folder, "train")
    speed = nsa["tokens_per_s"]
    expected = [f"{speed / 1e3:.1f}", "9000.0", f"{speed / 9e6:.2f}x"]
    assert [row[1] for row in rows] == expected
    assert figures.TABLES["row-12-dense-1"](figures.Results(folder)) == "9000.0k"
    recompute = nsa | {"mode": "recompute+compile+graph", "tokens_per_s": 1000, "peak_gib": 0.5}
    document["rows"] = [nsa, recompute, dense]
    (folder / "train_recompute.json").write_text(json.dumps(document))
    lost = f"{1 - 1000 / speed:.0%} at 2k x {nsa['B']}"
    assert figures.TABLES["recompute-price"](figures.Results(folder)) == lost


def test_memory_with_recompute_has_a_row_of_its_own(results):
    folder = results / "h100"
    document = json.loads((folder / "train_memory.json").read_text())
    document["rows"] = [r for r in document["rows"] if r.get("mode") != "recompute"]
    before = {name: figures.TABLES[name](figures.Results(folder)) for name in MEMORY_VALUES}
    (row,) = (r for r in document["rows"] if (r.get("attention"), r.get("S"), r.get("B")) == POINT)
    others = [{"mode": "recompute", "attention": "nsa", "largest_B_in_80_GiB": 192}]
    others += [{"mode": "recompute", "attention": "nsa", "slope_in_S": 0.5}]
    document["rows"] += [row | {"mode": "recompute", "peak_gib": 0.1}, *others]
    (folder / "train_memory.json").write_text(json.dumps(document))
    after = {name: figures.TABLES[name](figures.Results(folder)) for name in MEMORY_VALUES}
    assert after == before
    rows = rows_of(folder, "train-memory")
    assert [row[0] for row in rows] == ["NSA", "NSA, recompute=True", "dense"]
    assert rows[1][1:3] == ["0.1", "-"]


def test_the_memory_of_another_gpu_is_shown_with_its_name(results):
    own = figures.Results(results / "h200")
    assert figures.TABLES["train-memory-gpu"](own) == "H100 80GB"
    for name in ("train-memory", "row-13-largest"):
        other = figures.TABLES[name](figures.Results(results / "h100"))
        assert figures.TABLES[name](own) == other
    document = json.loads((results / "h100" / "train_memory.json").read_text())
    document["machine"]["device"] = "NVIDIA H200"
    (results / "h200").mkdir()
    (results / "h200" / "train_memory.json").write_text(json.dumps(document))
    assert figures.TABLES["train-memory-gpu"](own) == "H200"


def test_the_other_libraries_are_compared_in_one_run(tmp_path):
    """The rows of fla in the table of every backend are from that run, too."""
    source = ROOT / "benchmarks" / "results" / "h200"
    folder = tmp_path / "h200"
    folder.mkdir()
    for path in source.glob("backends_*.json"):
        shutil.copy(path, folder)
    document = json.loads((source / "rivals.json").read_text())
    ms = {"auto": 1.5, "fla NSA, l=d=64": 3.5, "sfnsa NSA": 4.5}
    for m in document["measurements"]:
        if (m["phase"], m["length"]) == ("both", 16384) and m["subject"] in ms:
            m["performance"]["median_ms"] = ms[m["subject"]]
    (folder / "rivals.json").write_text(json.dumps(document))
    shown = ("compared-nsa", "compared-fla", "compared-sfnsa")
    values = [figures.TABLES[name](figures.Results(folder)) for name in shown]
    assert {figures.TABLES[name](figures.Results(tmp_path)) for name in shown} == {"not measured"}
    assert values == ["1.50 ms", "3.50 ms", "4.50 ms"]
    rows = rows_of(folder, "backends")
    (fla,) = (row for row in rows if "fla" in row[1].split(", "))
    assert fla[0] == "64/4/128"
    assert fla[4] == "3.50"  # heads, kernels, 2k, 8k, 16k
    assert not [row for row in rows if "1.50" in row[4:5]]  # other rows are from another run
    assert len({(row[0], row[1]) for row in rows}) == len(rows)


def test_a_training_on_another_gpu_is_shown(tmp_path):
    name = "hf-minimax"
    results = figures.Results(tmp_path / "h200")
    assert figures.TABLES[name](results) == "not measured yet"
    (tmp_path / "a40").mkdir()
    document = json.loads((ROOT / "benchmarks/results/h200/hf_minimax.json").read_text())
    document["machine"]["device"] = "NVIDIA A40"
    (tmp_path / "a40" / "hf_minimax.json").write_text(json.dumps(document))
    value = figures.TABLES[name](results)
    assert value.endswith("on one A40")
    words = {"nsa_blocks": ' for "nsa_blocks",', "control": ' for another run of "eager" whose'}
    for training, text in (words | {"nsa_blocks_replayed": " for .* with the choices"}).items():
        assert re.search(f"{document[training]['largest_difference']:.1e}{text}", value)
