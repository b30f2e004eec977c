"""benchmarks/study/report.py: known differences come out, and every absent run is named."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import report

DOCUMENTS = [2.0, 2.5, 4.0, 3.5]
# The loss of an arm above that of the baseline, in the order of ARMS.
ABOVE = dict(zip(report.ARMS, (0.25, 0.0, -0.5, -0.25, 0.125, 1.0, 0.5, 0.75)))
BASE = report.ARMS["dense_wide"][0]


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
    runs = {f"{arm}-seed{seed}": arm_run(arm, seed) for arm in report.ARMS for seed in range(3)}
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


def test_tables_have_the_known_figures(study: dict[str, Any], tmp_path: Path) -> None:
    arms, sweep, missing = report.read(written(study, tmp_path))
    assert missing == []
    page = report.page(arms, sweep, missing)[0]
    assert "\n\nNone.\n\n" in page
    loss, position, cost, recall, rates = tables(page)
    assert list(loss) == list(position) == [label for label, _ in report.ARMS.values()]
    assert loss["NSA"] == {
        "arm": "NSA",
        "parameters": "26.9 M",
        "seeds": "3 of 3",
        "tokens": "4.0 M",
        "final loss": "2.5100",  # 3 - 0.5, and the mean of 0, 0.01 and 0.02
        "lowest, highest seed": "2.4700, 2.5500",
        "standard error over documents": "0.1250",
        # -0.6, -0.4, -0.6, -0.4: deviation sqrt(0.04 / 3), over sqrt(4)
        f"difference to {BASE}, over documents": "-0.5000 ± 0.0577",
        "over seeds": "-0.5000 ± 0.0289",  # -0.45, -0.5, -0.55: 0.05 / sqrt(3)
    }
    assert loss[BASE]["over seeds"] == "-"
    assert position["window alone"] == {"arm": "window alone", "0-1k": "4.0100", "1k-8k": "5.0200"}
    # The baseline ends at 3.01; NSA is there after 3.5 of 4 M tokens.
    hours = {arm: row[f"GPU-hours to the final loss of {BASE}"] for arm, row in cost.items()}
    assert hours["NSA"] == "0.350"
    assert hours["NSA, shared K/V"] == "0.375"
    assert hours[BASE] == "0.400"
    assert hours["dense"] == hours["window alone"] == "not reached"
    assert cost["NSA"]["tokens/s"] == "900,001"
    assert cost["NSA"]["peak memory, GiB"] == "3.0"
    assert recall["NSA"]["copy"] == "66.0% (65.0% to 67.0%), 1.50"
    assert rates["NSA"] == {
        "arm": "NSA",
        "0.0005": "5.0000",
        "0.001": "4.5000",
        "0.002": "**4.2500**",
        "0.004": "4.7500",
    }


def test_an_arm_that_starts_below_the_loss_reached_it_at_its_first_evaluation() -> None:
    assert report.share_to([arm_run("dense", 0)], 8.0) == 0.25
    assert report.share_to([arm_run("dense", 0)], 1.0) is None


def test_every_run_that_is_missing_or_did_not_finish_is_named(
    study: dict[str, Any], tmp_path: Path
) -> None:
    for name in ("window-seed1", "sweep-nsa-0.002", "dense-seed0", "dense-seed1", "dense-seed2"):
        del study[name]
    for name in ("nsa-seed2", "random_blocks-seed0", "sweep-dense-0.004"):
        study[name] |= {"complete": False, "ended": f"the reason of {name}"}
    study["nsa-seed2"]["evaluations"] = study["nsa-seed2"]["evaluations"][:2]
    study["random_blocks-seed0"]["evaluations"] = []
    arms, sweep, missing = report.read(written(study, tmp_path))
    assert missing == [
        *(f"dense-seed{seed}: no result file" for seed in range(3)),
        "nsa-seed2: stopped after 2.0 M tokens, at a loss of 4.4700: the reason of nsa-seed2",
        "window-seed1: no result file",
        "random_blocks-seed0: stopped before its first evaluation: the reason of"
        " random_blocks-seed0",
        "sweep-dense-0.004: stopped after 1.0 M tokens, at a loss of 4.7500: the reason of"
        " sweep-dense-0.004",
        "sweep-nsa-0.002: no result file",
    ]
    page = report.page(arms, sweep, missing)[0]
    assert all(f"- {line}\n" in page for line in missing)
    loss, *_, rates = tables(page)
    assert loss["NSA"]["seeds"] == loss["window alone"]["seeds"] == "2 of 3"
    assert loss["NSA"]["over seeds"] == "-0.4750 ± 0.0250"
    assert set(loss["dense"].values()) == {"dense", "-"}
    assert (rates["dense"]["0.004"], rates["NSA"]["0.002"]) == ("-", "-")
    assert rates["NSA"]["0.001"] == "**4.5000**"
    # The document losses of the baseline's third seed do not count against two seeds of NSA.
    assert loss["NSA"][f"difference to {BASE}, over documents"] == "-0.4750 ± 0.0548"


def test_without_the_baseline_there_is_no_difference(study: dict[str, Any], tmp_path: Path) -> None:
    kept = {name: run for name, run in study.items() if not name.startswith("dense_wide")}
    arms, sweep, missing = report.read(written(kept, tmp_path))
    loss, _, cost, *_ = tables(report.page(arms, sweep, missing)[0])
    assert not [
        column for row in (*loss.values(), *cost.values()) for column in row if BASE in column
    ]
    assert loss["NSA"]["final loss"] == "2.5100"
    assert len(report.loss_figure(arms).axes[1].lines) == 1  # zero


def test_a_folder_without_results_is_an_error(
    tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.setattr("sys.argv", ["report.py", str(tmp_path), "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit):
        report.main()
    assert f"{tmp_path} has no finished run of an arm" in capsys.readouterr().err


def points(line: Any) -> list[tuple[float, float]]:
    return [(round(float(x), 4), round(float(y), 4)) for x, y in zip(*line.get_data())]


def test_figures_show_the_known_values(study: dict[str, Any], tmp_path: Path) -> None:
    arms, _, _ = report.read(written(study, tmp_path))
    left, right = report.loss_figure(arms).axes
    index = list(report.ARMS).index("nsa")
    assert points(left.lines[index]) == [(2, 4.51), (3, 3.51), (4, 2.51)]
    assert "NSA  2.510" in {text.get_text() for text in left.texts}
    colour = report.ARMS["nsa"][1]
    own = [points(line) for line in right.lines if line.get_color() == colour]
    bars, dots = own[::2], own[1::2]
    assert [[y for _, y in bar] for bar in bars] == [[-0.55, -0.45], [-1.1, -0.9]]
    assert [y for ((_, y),) in dots] == [-0.5, -1.0]
    maps = [axes for axes in report.recall_figure(arms, "copy").axes if axes.get_visible()]
    assert [axes.get_title() for axes in maps] == [label for label, _ in report.ARMS.values()]
    shown = {text.get_position(): text.get_text() for text in maps[2].texts}
    assert shown == {(0, 0): "81", (1, 0): "91", (0, 1): "21", (1, 1): "71"}
    assert [label.get_text() for label in maps[4].get_yticklabels()] == ["1k", "8k"]
    assert [label.get_text() for label in maps[4].get_xticklabels()] == ["0", "100"]
    (panel,) = report.mass_figure(arms).axes
    drawn = {line.get_label(): points(line) for line in panel.lines}
    assert drawn["selected"] == [(0, 0.6), (1, 0.6)]
    assert (drawn["random"][0], drawn["best"][1]) == ((0, 0.2), (1, 0.9))


def test_the_command_writes_every_picture_of_its_page(
    study: dict[str, Any], tmp_path: Path, monkeypatch: Any
) -> None:
    out = tmp_path / "new" / "report"
    for run in study.values():
        run["recall"] += [e | {"task": "variable", "correct": 0.009} for e in run["recall"]]
    written(study, tmp_path)
    monkeypatch.setattr("sys.argv", ["report.py", str(tmp_path), "--out", str(out)])
    report.main()
    page = (out / "report.md").read_text(encoding="utf-8")
    assert "No run answers 1% of these: variable.\n" in page
    pictures = re.findall(r"!\[.+\]\((.+)\)", page)
    assert pictures == ["loss.svg", "recall_copy.svg", "mass.svg"]
    assert {path.name for path in out.iterdir()} == {"report.md", *pictures}
    assert all((out / name).read_text().startswith("<?xml") for name in pictures)
