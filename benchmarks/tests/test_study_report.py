"""benchmarks/study/report.py: known differences come out, and every absent run is named."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import report
import typer
from figure_learning import LEARNING
from figure_tables import Results
from learning_figure import trained_figure
from matplotlib.colors import to_hex

DOCUMENTS = [2.0, 2.5, 4.0, 3.5]
LABELS = {arm: entry["label"] for arm, entry in report.PLAN["small"]["arms"].items()}
# The loss of an arm above that of the baseline, in the order of the plan.
ABOVE = dict(zip(LABELS, (0.25, 0.0, -0.5, -0.25, 0.125, -0.125, 1.0, 0.5, 0.75), strict=True))
BASE, SHARED = LABELS["dense_wide"], LABELS["nsa_shared_kv"]


def arm_run(arm: str, seed: int) -> dict[str, Any]:
    """Return an invented run: its loss falls by 1 with every quarter of its 4 M tokens."""
    above_of_seed = ABOVE[arm] * (1 + (seed - 1) / 10)
    above = above_of_seed + 0.01 * seed
    evaluations: list[dict[str, Any]] = [
        {
            "tokens": count * 1_000_000,
            "loss": 7 - count + above,
            **{"standard_error": 0.125, "documents": 4},
            "by_position": [
                {"first": first, "last": last, "loss": 7 - count + above * factor}
                for first, last, factor in ((0, 1024, 1.0), (1024, 8192, 2.0))
            ],
        }
        for count in range(1, 5)
    ]
    # The difference of documents has a spread, and the seed adds the same to all.
    evaluations[-1]["document_losses"] = [
        loss + above_of_seed * (1 + (-1) ** i / 5) + seed for i, loss in enumerate(DOCUMENTS)
    ]
    blocks = {"selected": 0.5 + seed / 10, "random": 0.2, "best": 0.9, "keys": 0.1}
    return {
        **{"kind": "nsa-study", "schema_version": 1, "purpose": "arm", "arm": arm, "seed": seed},
        **{"learning_rate": 0.002, "complete": True, "ended": "", "torch": "2"},
        **{"machine": {"device": "GPU"}, "parameters": 26_900_000, "row": 8192},
        "corpus": {"unique_tokens": 98_000_000, "sha256": "a", "epochs": 1.02},
        "tokens": 4_000_000,
        "speed": {"tokens_per_s": 9e5 + seed, "memory_bytes": 3 << 30, "gpu_hours": 0.4},
        "evaluations": evaluations,
        "recall": [
            {"task": "copy", "length": n, "depth": d, "correct": c + seed / 100, "loss": 1 + d}
            for n, d, c in ((1024, 0.0, 0.8), (1024, 1.0, 0.9), (8192, 0.0, 0.2), (8192, 1.0, 0.7))
        ],
        "mass": [{"layer": layer, **blocks} for layer in range(2)] if arm == "nsa" else None,
    }


def sweep_run(arm: str, rate: float, loss: float) -> dict[str, Any]:
    evaluations = [{"tokens": 1_000_000, "loss": loss}]
    short = {"purpose": "sweep", "learning_rate": rate, "evaluations": evaluations}
    return arm_run(arm, 0) | short


@pytest.fixture
def study() -> dict[str, Any]:
    """All runs of the study by the names of their files."""
    runs = {f"{arm}-seed{seed}": arm_run(arm, seed) for arm in LABELS for seed in range(3)}
    for arm in ("dense", "nsa"):
        for rate, loss in ((0.0005, 5.0), (0.001, 4.5), (0.002, 4.25), (0.004, 4.75)):
            runs[f"sweep-{arm}-{rate}"] = sweep_run(arm, rate, loss)
    return runs


def written(runs: dict[str, Any], folder: Path) -> Path:
    for name, run in runs.items():
        (folder / f"{name}.json").write_text(json.dumps(run), encoding="utf-8")
    return folder


def tables(page: str) -> list[dict[str, dict[str, str]]]:
    """Return the tables of a page: cells by arm and column."""
    found = []
    for text in re.findall(r"(?:^\|.*\|\n)+", page, re.MULTILINE):
        columns, _, *rows = (
            [c.strip() for c in line.split("|")[1:-1]] for line in text.splitlines()
        )
        found.append({row[0]: dict(zip(columns, row, strict=True)) for row in rows})
    return found


def group_of(folder: Path, name: str = "small") -> report.Group:
    return report.Group(name, report.read(folder)[0])


OTHERS = [
    f"{report.PLAN[name]['title']}: no result file"
    for name in ("large", "large_150m", "large_150m_2e-3", "smollm2_8k", "smollm2_32k")
]


def test_tables_have_the_known_figures(study: dict[str, Any], tmp_path: Path) -> None:
    results, missing = report.read(written(study, tmp_path))
    assert missing == OTHERS
    page = report.page([report.Group("small", results)], missing)
    loss, cost, recall, mass, rates = tables(page)
    assert list(loss) == [*LABELS.values()]
    assert loss["NSA"] == {
        "arm": "NSA",
        "parameters": "26.9 M",
        "loss": "2.510",  # 3 - 0.5, and the mean of 0, 0.01 and 0.02
        # -0.6, -0.4, -0.6, -0.4: deviation sqrt(0.04 / 3), over sqrt(4)
        f"above {BASE}, over documents": "-0.500 ± 0.058",
        "over seeds": "-0.500 ± 0.029",  # -0.45, -0.5, -0.55: 0.05 / sqrt(3)
        "at 1k-8k": "-1.000 ± 0.058",  # the double
    }
    assert loss[BASE]["over seeds"] == "-"
    # The baseline ends at 3.01; NSA is there after 3.5 of 4 M tokens.
    hours = {arm: row[f"GPU-hours to the loss of {BASE}"] for arm, row in cost.items()}
    assert hours["NSA"] == "0.350"
    assert hours["NSA, shared K/V"] == "0.375"
    assert hours[BASE] == "0.400"
    assert hours["dense"] == hours["window alone"] == "not reached"
    assert cost["NSA"]["tokens/s"] == "900,001"
    assert cost["NSA"]["peak memory, GiB"] == "3.0"
    assert not any("tokens to" in column for column in cost["NSA"])
    assert recall["NSA"]["copy"] == "50.0% to 52.0%"  # at depth 0; the window holds depth 1
    shares = {"mass: selected": "60.0%", "mass: random": "20.0%"}
    assert mass == {"NSA": {"arm": "NSA", **shares, "layers above random": "2 of 2"}}
    assert list(rates) == ["dense", "NSA"]
    assert rates["NSA"] == {
        "arm": "NSA",
        "0.0005": "5.000",
        "0.001": "4.500",
        "0.002": "**4.250**",
        "0.004": "4.750",
    }


@pytest.mark.parametrize(
    ("losses", "tokens"),
    [
        ([-1.0, -2.0], 10),  # never above
        ([1.0, -1.0], 15),
        ([1.0, -1.0, 1.0, 0.0], 40),  # from the last crossing on
        ([1.0, -1.0, 3.0], float("inf")),
        ([1.0, float("nan"), -1.0, -2.0], 20),  # not evaluated after 20 tokens
        ([1.0, -1.0, -2.0, float("nan")], 15),
    ],
)
def test_the_level_is_the_last_crossing(losses: list[float], tokens: float) -> None:
    assert report.level(pd.Series(losses, [10, 20, 30, 40][: len(losses)])) == tokens


def test_every_run_that_is_missing_or_did_not_finish_is_named(
    study: dict[str, Any], tmp_path: Path
) -> None:
    for name in ("window-seed1", "sweep-nsa-0.002", "dense-seed0", "dense-seed1", "dense-seed2"):
        del study[name]
    for name in ("nsa-seed2", "random_blocks-seed0", "sweep-dense-0.004"):
        study[name] |= {"complete": False, "ended": f"the reason of {name}"}
    study["nsa-seed2"]["evaluations"] = study["nsa-seed2"]["evaluations"][:2]
    study["random_blocks-seed0"]["evaluations"] = []
    results, missing = report.read(written(study, tmp_path))
    assert sorted(missing) == sorted(
        [
            *OTHERS,
            *(f"dense-seed{seed}: no result file" for seed in range(3)),
            "nsa-seed2: stopped after 2.0 M tokens, at a loss of 4.470: the reason of nsa-seed2",
            "window-seed1: no result file",
            "random_blocks-seed0: stopped before its first evaluation: the reason of"
            " random_blocks-seed0",
            "sweep-dense-0.004: stopped after 1.0 M tokens, at a loss of 4.750: the reason of"
            " sweep-dense-0.004",
            "sweep-nsa-0.002: no result file",
        ]
    )
    loss, *_, rates = tables(report.page([report.Group("small", results)], missing))
    assert loss["NSA"]["over seeds"] == "-0.475 ± 0.025"
    assert "dense" not in loss
    assert (rates["dense"]["0.004"], rates["NSA"]["0.002"]) == ("-", "-")
    assert rates["NSA"]["0.001"] == "**4.500**"
    # The document losses of the baseline's third seed do not count against two seeds of NSA.
    assert loss["NSA"][f"above {BASE}, over documents"] == "-0.475 ± 0.055"


def test_a_run_cut_after_its_training_counts_and_is_named(
    large_arms: dict[str, Any], tmp_path: Path
) -> None:
    cut = large_arms["large_dense-seed1"]
    cut |= {"complete": False, "ended": "cut", "longer": []}
    results, missing = report.read(written(large_arms, tmp_path))
    assert "large_dense-seed1: stopped after training; longer rows: none: cut" in missing
    group = report.Group("large", results)
    assert len(group.runs) == 4
    ((_, longer),) = group.longer()
    assert [*longer["seed"]] == [0, 0]


def test_without_the_baseline_there_is_no_difference(study: dict[str, Any], tmp_path: Path) -> None:
    kept = {name: run for name, run in study.items() if not name.startswith("dense_wide")}
    group = group_of(written(kept, tmp_path))
    loss, cost, *_ = tables(report.page([group], []))
    assert not [
        column for row in (*loss.values(), *cost.values()) for column in row if BASE in column
    ]
    assert loss["NSA"]["loss"] == "2.510"
    assert len(group.loss_figure().axes[1].lines) == 1  # zero


def test_a_folder_without_results_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(typer.BadParameter, match=f"{tmp_path} has no finished run"):
        report.main(tmp_path, tmp_path / "out")


def converted(arm: str, losses: list[float], keys: float) -> dict[str, Any]:
    """Return an invented run of a real model, with its loss after 0, 1, 2 M tokens and so on."""
    run = arm_run("nsa", 0) | {"arm": arm, "keys_per_query": keys}
    evaluations = [run["evaluations"][0] | {"document_losses": [loss]} for loss in losses]
    for number, loss in enumerate(losses):
        evaluations[number] |= {"tokens": number * 1_000_000, "loss": loss}
    return run | {"evaluations": evaluations, "tokens": 3_000_000}


def test_the_tokens_that_repay_a_conversion(tmp_path: Path) -> None:
    runs = {
        "smollm2_8k_dense-seed0": converted("smollm2_8k_dense", [2.0, 1.5, 1.5, 1.0], 4096),
        "smollm2_8k_nsa-seed0": converted("smollm2_8k_nsa", [5.0, 2.5, 1.5, 1.25], 1683.4),
    }
    group = group_of(written(runs, tmp_path), "smollm2_8k")
    (rows,) = tables(group.cost_table() + "\n")
    lines = {line.get_label(): points(line) for line in group.loss_figure().axes[0].lines}
    assert lines["NSA"] == [(0, 5.0), (1, 2.5), (2, 1.5), (3, 1.25)]
    assert lines["dense, untrained"] == [(0, 2.0), (1, 2.0)]
    assert rows["NSA"]["keys per query"] == "1,683"
    assert rows["NSA"]["tokens to a loss as before training"] == "1.5 M"
    assert rows["NSA"]["tokens to a loss as dense"] == "not reached"
    assert rows["dense"]["tokens to a loss as dense"] == "0.0 M"


def test_the_starts_of_a_conversion_are_compared_with_dense_attention(tmp_path: Path) -> None:
    runs = {"smollm2_8k_dense-seed0": converted("smollm2_8k_dense", [2.0, 1.0], 4096)}
    mass = [{"selected": 0.5, "random": 0.25}, {"selected": 0.75, "random": 0.25}]
    dense = {"label": "dense", "document_losses": [0.5, 1.5]}
    nsa = dense | {"label": "NSA", "document_losses": [0.7, 1.8], "mass": mass}
    other = nsa | {"label": "dense, other base", "mass": []}
    starts = {"starts": [dense | {"mass": []}, nsa, other]}
    (tmp_path / "starts-smollm2_8k.json").write_text(json.dumps(starts))
    report.main(written(runs, tmp_path), tmp_path)
    loss, found, *_ = tables((tmp_path / "report.md").read_text(encoding="utf-8"))
    assert "over seeds" not in loss["dense"]  # the plan has one
    assert found == {
        other: {
            "start": other,
            **{"above dense": "+0.250 ± 0.050", "mass: selected": share, "mass: random": random},
        }
        for other, share, random in (("NSA", "62.5%", "25.0%"), ("dense, other base", "-", "-"))
    }


def test_gates_are_shown_by_branch_and_layer(tmp_path: Path) -> None:
    run = converted("smollm2_8k_nsa", [2.0, 1.0], 1683)
    for number, layer in enumerate(run["mass"]):
        layer["gates"] = {"cmp": 0.1, "sel": 0.7 + 0.2 * number, "win": 0.25}
    group = group_of(written({"smollm2_8k_nsa-seed0": run}, tmp_path), "smollm2_8k")
    mass, drawn = group.mass_figure().axes
    lines = {line.get_label(): points(line) for line in drawn.lines}
    assert lines["selected"] == [(0, 0.7), (1, 0.9)]
    assert [line.get_label() for line in mass.lines] == ["best", "selected", "random", "keys"]


def test_rows_longer_than_those_of_the_training(tmp_path: Path) -> None:
    runs = {}
    mass = [{"selected": 0.5, "random": 0.25}, {"selected": 0.75, "random": 0.25}]
    for arm, seed in (("large_dense", 0), ("large_nsa", 0), ("large_nsa", 1)):
        run = arm_run("nsa", seed) | {"arm": arm}
        scores = [{"task": "copy", "length": 65536, "depth": 0, "correct": 0.5, "loss": 1}]
        edges = [(0, 32768), (32768, 65536)]
        ranges = [{"first": a, "last": b, "loss": 2.5 + seed + b / 65536} for a, b in edges]
        entry = {"length": 65536, "rope_base": 4e4, "loss": 2.75, "by_position": ranges}
        entry |= {"recall": scores, "mass": mass if arm == "large_nsa" else []}
        runs[f"{arm}-seed{seed}"] = run | {"longer": [entry]}
    page = report.page([group_of(written(runs, tmp_path), "large")], [])
    assert "Rows of 64k, without further training, seed 0:" in page  # dense has no other
    longer = tables(page)[1]
    label = report.PLAN["large"]["arms"]["large_nsa"]["label"]
    assert longer[label] == {
        "arm": label,
        **{"rope_base": "4e+04", "loss": "2.75", "32k-64k": "3.5"},
        **{"recall: copy": "0.5", "mass: selected": "0.625", "mass: random": "0.25"},
    }
    assert (longer[BASE]["32k-64k"], longer[BASE]["mass: selected"]) == ("3.5", "-")


def test_a_sweep_alone_is_reported(tmp_path: Path) -> None:
    own = {"arm": "large_nsa"}
    rates = (5e-4, 1e-3)
    runs = {f"sweep-large_nsa-{r}": sweep_run("nsa", r, 5 - 100 * r) | own for r in rates}
    report.main(written(runs, tmp_path), tmp_path / "out")
    (table,) = tables((tmp_path / "out" / "report.md").read_text(encoding="utf-8"))
    (row,) = table.values()
    assert (row["0.0005"], row["0.001"]) == ("4.950", "**4.900**")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["report.md"]


def points(line: Any) -> list[tuple[float, float]]:
    return [(round(float(x), 4), round(float(y), 4)) for x, y in zip(*line.get_data())]


def test_figures_show_the_known_values(study: dict[str, Any], tmp_path: Path) -> None:
    group = group_of(written(study, tmp_path))
    left, right = group.loss_figure().axes
    index, colour = list(LABELS).index("nsa"), group.colours["NSA"]
    assert points(left.lines[index]) == [(2, 4.51), (3, 3.51), (4, 2.51)]
    (bars,) = [c for c in right.collections if to_hex(c.get_edgecolor()[0]) == colour]
    assert np.array(bars.get_segments())[..., 1].round(4).tolist() == [[-0.55, -0.45], [-1.1, -0.9]]
    (dots,) = [line for line in right.lines if line.get_color() == colour]
    assert [y for _, y in points(dots)] == [-0.5, -1.0]
    (panel,) = group.recall_figure().axes
    assert panel.get_title() == "copy"
    lines = {line.get_label(): points(line) for line in panel.lines}
    assert list(lines) == [*LABELS.values()]
    # At the end of the prompt, both lengths; at its start, 1024 and 8192 tokens back.
    assert lines["NSA"] == [(256, 0.81), (1024, 0.81), (8192, 0.21)]
    (panel,) = group.mass_figure().axes
    drawn = {line.get_label(): points(line) for line in panel.lines}
    assert drawn["selected"] == [(0, 0.6), (1, 0.6)]
    assert (drawn["random"][0], drawn["best"][1]) == ((0, 0.2), (1, 0.9))
    assert len(set(group.colours.values())) == len(LABELS)


def test_the_command_writes_every_picture_of_its_page(
    study: dict[str, Any], tmp_path: Path
) -> None:
    out = tmp_path / "new" / "report"
    written(study, tmp_path)
    report.main(tmp_path, out)
    page = (out / "report.md").read_text(encoding="utf-8")
    assert all(f"- {line}\n" in page for line in OTHERS)
    pictures = re.findall(r"!\[.+\]\((.+)\)", page)
    assert pictures == ["small_loss.svg", "small_recall.svg", "small_mass.svg"]
    assert {path.name for path in out.iterdir()} == {"report.md", *pictures}
    assert all((out / name).read_text().startswith("<?xml") for name in pictures)


@pytest.fixture
def page_table(tmp_path: Path) -> Any:
    """A function that returns a table of docs/explanation/learning.md for some runs."""

    def of(name: str, runs: dict[str, Any]) -> Any:
        folder = tmp_path / "study" / "results"
        folder.mkdir(parents=True)
        written(runs, folder)
        text = LEARNING[name](Results(tmp_path / "results" / "h100"))
        lines = [[c.strip() for c in line.split("|")[1:-1]] for line in text.splitlines()]
        return [dict(zip(lines[0], row, strict=True)) for row in lines[2:]] or text

    return of


def test_the_page_shows_the_small_arms(study: dict[str, Any], page_table: Any) -> None:
    for run in study.values():
        run["recall"] = [entry | {"task": "key_value"} for entry in run["recall"]]
    for seed in range(3):
        del study[f"nsa_from_mean-seed{seed}"]
    rows = {row["attention"]: row for row in page_table("study-small", study)}
    assert list(rows) == [label for arm, label in LABELS.items() if arm != "nsa_from_mean"]
    assert rows["NSA"] == {
        **{"attention": "NSA", "loss": "2.510", f"above {BASE}": "-0.500 ± 0.029"},
        # All distances lie beyond the window but those at depth 1.
        "recalled": "51.0%",
        "mass: selected, random": "60%, 20%",
    }
    assert rows[BASE][f"above {BASE}"] == "-"


@pytest.fixture
def large_arms() -> dict[str, Any]:
    """Invented runs of the large arms; NSA is 0.5 nats below dense attention, and 0.75 far out."""
    runs = {}
    for arm, like in (("large_dense", "dense_wide"), ("large_nsa", "nsa")):
        for seed in range(2):
            run = arm_run(like, seed) | {"arm": arm, "row": 16384}
            run["recall"] = [entry | {"task": "key_value"} for entry in run["recall"]]
            far = 2.0 + seed - 0.75 * (arm == "large_nsa")
            ends = ((0, 16384, far + 4), (16384, 32768, far))
            parts = [dict(zip(("first", "last", "loss"), end)) for end in ends]
            longer = {"length": 32768, "rope_base": 1e4 * (1 + 3 * seed), "loss": far + 0.25}
            runs[f"{arm}-seed{seed}"] = run | {"longer": [longer | {"by_position": parts}]}
    runs["large_nsa-seed0"]["speed"]["tokens_per_s"] = runs["large_nsa-seed1"]["speed"][
        "tokens_per_s"
    ] = 1_350_000.75
    return runs


def renamed(runs: dict[str, Any], ending: str, seeds: str = "01") -> dict[str, Any]:
    """Return the runs of large arms as those that train on 150 M tokens."""
    found = {}
    for name, run in runs.items():
        arm, seed = name.replace("large_", "large_150m_").split("-seed")
        if seed in seeds:
            found[f"{arm}{ending}-seed{seed}"] = run | {"arm": arm + ending}
    return found


def test_the_page_shows_the_large_arms(large_arms: dict[str, Any], page_table: Any) -> None:
    rows = page_table("study-large", renamed(large_arms, "_1e-3"))
    assert [*rows[0].values()] == [BASE, "3.005", "-", "50.5%", "-"]
    # -0.45 and -0.5 above the baseline with the same seed
    assert [*rows[1].values()][1:] == ["2.530", "-0.475 ± 0.025", "50.5%", "55%, 20%"]


def test_pages_compare_documents_of_a_single_seed(
    large_arms: dict[str, Any], page_table: Any
) -> None:
    for arm, losses in (("dense", [3.0, 3.5, 4.0]), ("nsa", [2.5, 3.25, 3.25])):
        large_arms[f"large_{arm}-seed0"]["evaluations"][-1]["document_losses"] = losses
    one_seed = renamed(large_arms, "_1e-3", seeds="0")
    # The differences are -0.5, -0.25 and -0.75.
    assert page_table("study-large", one_seed)[1][f"above {BASE}"] == "-0.500 ± 0.144"


@pytest.mark.parametrize(
    ("name", "ending", "words"),
    [
        ("answer", "_1e-3", "-0.475 ± 0.025"),
        ("seeds", "_1e-3", "0.01"),
        ("speed", "", "1.50 times"),
        ("fast", "", "3.000 with dense attention, and 2.550 with NSA"),
    ],
)
def test_pages_state_values_of_the_large_arms(
    name: str, ending: str, words: str, large_arms: dict[str, Any], page_table: Any
) -> None:
    assert page_table(f"study-large-{name}", renamed(large_arms, ending)) == words


def test_pages_state_the_difference_after_fewer_tokens(
    large_arms: dict[str, Any], page_table: Any
) -> None:
    assert page_table("study-large-short", large_arms) == "-0.475 ± 0.025"


def test_the_picture_of_the_large_arms_has_their_differences(
    large_arms: dict[str, Any], tmp_path: Path
) -> None:
    group = group_of(written(large_arms, tmp_path), "large")
    figure = trained_figure(group, [BASE, "NSA, means"])
    losses, above = figure.axes
    assert points(losses.lines[1])[-1] == (4, 2.53)
    dots = [round(y, 3) for y in above.lines[0].get_ydata()]
    places = [label.get_text() for label in above.get_xticklabels()]
    assert places == ["0-1k", "1k-8k", "16k-32k"]
    assert dots == [-0.475, -0.95, -0.75]
    assert [text.get_text() for text in losses.texts] == ["dense  3.005", "NSA  2.530"]


def pairs_of_arms() -> dict[str, Any]:
    """Return invented runs of both lengths of the real model."""
    runs = {}
    for group, keys in (("smollm2_8k", 4096), ("smollm2_32k", 16384)):
        losses = {"dense": [2.0, 1.5, 1.5, 1.0], "nsa": [5.0, 2.5, 1.5, 1.25]}
        for arm, own in losses.items():
            run = converted(f"{group}_{arm}", own, keys if arm == "dense" else 1000)
            for number, layer in enumerate(run["mass"]):
                layer["gates"] = {"cmp": 0.1, "sel": 0.7 + 0.2 * number, "win": 0.25}
                layer["window"] = 0.3
            run["evaluations"][-1]["document_losses"] = [own[-1] - 0.5, own[-1] + 0.5]
            run["mass"] = run["mass"] if arm == "nsa" else []
            run["recall"] = [
                {**entry, "task": task, "correct": entry["correct"] * (task == "key_value")}
                for entry in run["recall"]
                for task in ("key_value", "copy")
            ]
            for number, entry in enumerate(run["evaluations"]):
                entry |= {"selected": 0.9 - number / 10, "random": 0.5}
            runs[f"{group}_{arm}-seed0"] = run
    return runs


def test_the_page_shows_the_real_model(page_table: Any) -> None:
    rows = page_table("study-model", pairs_of_arms())
    assert [(row["rows of"], row["attention"]) for row in rows] == [
        *(("8k", "dense"), ("8k", "NSA"), ("32k", "dense"), ("32k", "NSA"))
    ]
    assert [*rows[1].values()][2:] == ["5.000", "1.250", "50.0%"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("study-model-answer", "+0.250 ± 0.000 at 8k and +0.250 ± 0.000 at 32k"),
        ("study-model-start", "+3.000 at 8k and +3.000 at 32k"),
        ("study-model-repaid", "1.5 M at 8k and 1.5 M at 32k"),
        ("study-model-behind", "2.5 M at 8k and 2.5 M at 32k"),
        ("study-model-speed", "1.00 times at 8k and 2.00 times at 32k"),
    ],
)
def test_pages_state_values_of_the_real_model(name: str, words: str, page_table: Any) -> None:
    """They are about the default of nsa convert."""
    runs = pairs_of_arms()
    runs["smollm2_32k_nsa-seed0"]["speed"]["tokens_per_s"] *= 2
    for length in ("8k", "32k"):
        run = runs.pop(f"smollm2_{length}_nsa-seed0")
        runs[f"smollm2_{length}_shared_means-seed0"] = run | {
            "arm": f"smollm2_{length}_shared_means"
        }
    assert page_table(name, runs) == words


def test_pages_state_an_arm_that_ran_at_one_length(page_table: Any) -> None:
    runs = pairs_of_arms()
    del runs["smollm2_32k_nsa-seed0"]
    assert page_table("study-model-answer-separate", runs) == "+0.250 ± 0.000 at 8k"


def test_pages_state_what_shared_keys_select_in_a_run_that_was_cut(page_table: Any) -> None:
    own = json.loads(json.dumps(pairs_of_arms()["smollm2_8k_nsa-seed0"]))
    own |= {"arm": "smollm2_8k_shared", "complete": False, "ended": "cut"}
    words = page_table("study-model-shared", {"smollm2_8k_shared-seed0": own})
    assert words == "90% to 60% after 3 M tokens (random ones: 50%)"


def test_pages_state_the_difference_of_the_small_arms(
    study: dict[str, Any], page_table: Any
) -> None:
    assert page_table("study-small-answer", study) == "-0.500 ± 0.029"


def test_the_page_shows_where_nsa_loses(page_table: Any) -> None:
    runs = json.loads(json.dumps(pairs_of_arms()))  # evaluations share their lists
    shared = runs["smollm2_32k_nsa-seed0"] | {"arm": "smollm2_32k_shared"}
    runs["smollm2_32k_shared-seed0"] = shared
    for number, entry in enumerate(runs["smollm2_8k_nsa-seed0"]["evaluations"]):
        for place, part in enumerate(entry["by_position"]):
            part["loss"] += number / 4 + place
    rows = page_table("study-losing", runs)
    assert [*rows[0].values()] == [
        *("8k", "NSA", "+0.750 (0-1k)", "+1.750 (1k-8k)", "90%, 50%", "60%, 50%")
    ]
    others = [(row["rows of"], row["attention"]) for row in rows[1:]]
    assert others == [("32k", "NSA"), ("32k", SHARED)]
