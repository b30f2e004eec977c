"""The tables of benchmarks/figure_*.py, from result files that the tests write."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import figures
import pytest

ROOT = Path(__file__).resolve().parents[2]
MEMORY_VALUES = [f"row-13-{name}" for name in ("peak-2k", "peak-16", "largest", "slope")]
POINT = ("nsa", 2048, 1)  # attention, tokens, batch


@pytest.fixture
def results(tmp_path):
    """A copy of the results folder with the files of training."""
    folder = tmp_path / "copy" / "h100"
    folder.mkdir(parents=True)
    for name in ("train.json", "train_memory.json"):
        shutil.copy(ROOT / "benchmarks" / "results" / "h100" / name, folder)
    return folder.parent


def rows_of(results, name):
    """Return the rows of a table as lists of cells."""
    lines = figures.TABLES[name](figures.Results(results)).splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.parametrize(
    "name",
    [
        *("a100", "a100-decode", "shapes", "train-parts", "train-recompute"),
        *("old-new", "old-new-a100"),
    ],
)
def test_a_table_without_its_files_says_so(tmp_path, name):
    ((state, *others),) = rows_of(tmp_path / "results" / "h100", name)
    assert state == "not measured yet"
    assert {*others} == {"-"}


def test_the_a100_table_has_rivals_and_real_inputs_by_gpu(tmp_path):
    source = ROOT / "benchmarks" / "results" / "h100_as_sm80" / "a100_core_64_4_128.json"
    document = json.loads(source.read_text())
    shown = ("random", 8192)
    document["measurements"] = [
        m | {"inputs": inputs, "subject": subject}
        for m in document["measurements"]
        if (m["inputs"], m["length"]) == shown and m["subject"] == "auto"
        for inputs, subject in (("real", "auto"), ("random", "sfnsa NSA"))
    ]
    devices = {
        "h100": "NVIDIA H100 80GB HBM3 rehearsing sm_80",
        "h200": "NVIDIA H200 rehearsing sm_80",
    }
    for gpu, device in devices.items():
        folder = tmp_path / "results" / f"{gpu}_as_sm80"
        folder.mkdir(parents=True)
        document["environment"]["device"] = device
        (folder / "a100_core_64_4_128.json").write_text(json.dumps(document))
        document["measurements"] = [
            m | {"performance": m["performance"] | {"median_ms": m["performance"]["median_ms"] / 2}}
            for m in document["measurements"]
        ]
    rows = rows_of(tmp_path / "results" / "h100", "a100")
    assert [row[:4] for row in rows] == [
        ["64/4/128", "random", "8k", "H100 80GB"],
        ["64/4/128", "random", "8k", "H200"],
        ["64/4/128", "real", "8k", "H100 80GB"],
        ["64/4/128", "real", "8k", "H200"],
    ]
    random, faster, real, _ = rows
    assert random[-2:] == [real[5], "-"]  # sfnsa, xunhao
    assert (real[4], real[-2:]) == ("-", ["-", "-"])
    assert float(faster[-2]) == pytest.approx(float(random[-2]) / 2, rel=0.01)


def test_the_decode_table_compares_with_the_same_gpu(tmp_path):
    results = tmp_path / "results"
    for name in ("h100", "h200", "h200_as_sm80"):
        (results / name).mkdir(parents=True)
    source = ROOT / "benchmarks" / "results" / "h100" / "decode.json"
    document = json.loads(source.read_text())
    (results / "h100" / "decode.json").write_text(json.dumps(document))
    (results / "h200_as_sm80" / "a100_decode.json").write_text(json.dumps(document))
    assert {row[-1] for row in rows_of(results / "h100", "a100-decode")} == {"-"}
    for measurement in document["measurements"]:
        if measurement["subject"] == "auto":
            measurement["performance"]["median_ms"] /= 2
    (results / "h200" / "decode.json").write_text(json.dumps(document))
    rows = rows_of(results / "h100", "a100-decode")
    assert {row[-1] for row in rows} == {"2.00x"}
    assert ["64/4/128", "32 x 64k"] in [row[:2] for row in rows]


@pytest.mark.parametrize(
    ("name", "folder", "device", "gpu"),
    [
        ("old-new", "h100", "NVIDIA H100 80GB HBM3", "H100 80GB"),
        ("old-new-a100", "h200_as_sm80", "NVIDIA H200 rehearsing sm_80", "H200 rehearsing sm_80"),
    ],
)
def test_the_tables_of_two_versions_have_times_and_reasons(tmp_path, name, folder, device, gpu):
    timed = {"name": "12/2/64 8k cmp forward", "old_ms": 2.0, "new_ms": 1.5, "spread": 0.011}
    rows = [
        timed | {"verdict": "faster", "reason": ""},
        timed | {"name": "x", "old_ms": None, "new_ms": None, "verdict": "missing", "reason": "r"},
    ]
    document = {"machine": {"device": device}, "rows": rows, "left_out": ["8/2/32 2k"]}
    file = tmp_path / "results" / folder / "compare_trees.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(document))
    assert rows_of(tmp_path / "results" / "h100", name) == [
        ["12/2/64 8k cmp forward", "2.00", "1.50", "0.75", "1.1%", "faster"],
        ["x", "-", "-", "-", "-", "missing"],
        ["8/2/32 2k", "-", "-", "-", "-", "left out"],
    ]
    text = figures.TABLES[name](figures.Results(tmp_path / "results" / "h100"))
    assert text.startswith(f"| case and kernel, on one {gpu} |")
    (other,) = {"old-new", "old-new-a100"} - {name}
    assert len(rows_of(tmp_path / "results" / "h100", other)) == 1  # not measured yet
    counted = name.replace("old-new", "old-new-verdicts")
    results = figures.Results(tmp_path / "results" / "h100")
    assert figures.TABLES[counted](results) == "1 of 2 rows are faster and 0 slower"
    document["rows"] += [timed | {"verdict": "slower"}, timed | {"verdict": "same"}]
    file.write_text(json.dumps(document))
    assert figures.TABLES[counted](results) == "1 of 4 rows are faster and 1 slower"
    assert figures.TABLES[other.replace("old-new", "old-new-verdicts")](results) == (
        "not measured yet"
    )


def test_the_table_of_shapes_takes_the_fastest_dense_kernel(tmp_path):
    folder = tmp_path / "results" / "h100"
    folder.mkdir(parents=True)
    document = json.loads((ROOT / "benchmarks/results/h100/backends_32_8_128.json").read_text())
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
    fastest = min(times, key=times.get)
    ((heads, length, nsa, dense, speed_up, kernel),) = rows_of(folder, "shapes")
    assert (heads, length, kernel) == ("32/8/128", "16k", fastest.removeprefix("dense "))
    assert float(nsa) == pytest.approx(own, rel=0.01)
    assert float(dense) == pytest.approx(times[fastest], rel=0.01)
    assert speed_up == f"{times[fastest] / own:.1f}x"


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
    expected = [f"{speed / 1e3:.1f}", "9000.0", f"{speed / 9e6:.2f}x", nsa["mode"], "bf16+compile"]
    assert [row[1] for row in rows] == expected
    assert figures.TABLES["row-12-dense-1"](figures.Results(folder)) == "9000.0k"
    recompute = nsa | {"mode": "recompute+compile+graph", "tokens_per_s": 1000, "peak_gib": 0.5}
    document["rows"] = [nsa, recompute, dense]
    (folder / "train_recompute.json").write_text(json.dumps(document))
    lost = f"{1 - 1000 / speed:.0%} at 2k x {nsa['B']}"
    assert figures.TABLES["recompute-price"](figures.Results(folder)) == lost
    ((shape, *cells),) = rows_of(folder, "train-recompute")
    assert shape == "2k x 1"
    assert cells[:2] == [f"{nsa['tokens_per_s'] / 1e3:.1f}", "1.0"]
    assert cells[3:] == [f"{nsa['peak_gib']:.1f}", "0.5", f"{dense['peak_gib']:.1f}"]


def test_parts_of_a_training_step_have_a_difference_from_dense(tmp_path):
    folder = tmp_path / "results" / "h100"
    folder.mkdir(parents=True)
    parts = [
        {"attention": name, "S": 8192, "B": 1, "step_ms": step, "kernels_ms": kernels}
        for name, step, kernels in (
            ("nsa", 24.36, {"attention": 13.1, "products": 6.5}),
            ("dense", 22.1, {"attention": 11.7, "products": 5.6}),
        )
    ]
    failed = {"attention": "nsa", "S": 2048, "B": 8, "reason": "out of memory"}
    (folder / "train_parts.json").write_text(json.dumps({"rows": [failed, *parts]}))
    assert rows_of(folder, "train-parts") == [
        ["8k x 1", "NSA", "24.4", "13.1", "6.5"],
        ["8k x 1", "dense", "22.1", "11.7", "5.6"],
        ["8k x 1", "difference", "2.3", "1.4", "0.9"],
    ]


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
    subjects = ("auto", "dense cudnn", "fla NSA, l=d=64", "sfnsa NSA")
    ms = dict(zip(subjects, (1.5, 2.5, 3.5, 4.5)))
    for m in document["measurements"]:
        if (m["phase"], m["length"]) == ("both", 16384) and m["subject"] in ms:
            m["performance"]["median_ms"] = ms[m["subject"]]
    (folder / "rivals.json").write_text(json.dumps(document))
    shown = ("compared-nsa", "compared-dense", "compared-fla", "compared-sfnsa")
    values = [figures.TABLES[name](figures.Results(folder)) for name in shown]
    assert {figures.TABLES[name](figures.Results(tmp_path)) for name in shown} == {"not measured"}
    assert values == ["1.50 ms", "2.50 ms", "3.50 ms", "4.50 ms"]
    rows = rows_of(folder, "backends")
    (fla,) = (row for row in rows if row[1].startswith("fla"))
    assert fla[0] == "64/4/128"
    assert fla[5] == "3.50"  # heads, kernels, 2k, 4k, 8k, 16k
    assert not [row for row in rows if "1.50" in row[5:6]]  # other rows are from another run
    assert len({(row[0], row[1]) for row in rows}) == len(rows)


def test_a_training_on_another_gpu_is_shown(tmp_path):
    name = "hf-convert-run"
    results = figures.Results(tmp_path / "h200")
    assert figures.TABLES[name](results) == "not measured yet"
    (tmp_path / "h100").mkdir()
    shutil.copy(ROOT / "benchmarks/results/h100/hf_convert.json", tmp_path / "h100")
    assert figures.TABLES[name](results).endswith("on one H100 80GB")
