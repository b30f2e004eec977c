"""benchmarks/hugging_face: the rows, both trainings on a small scale, tables and plots."""

from __future__ import annotations

import json
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "benchmarks" / "hugging_face"


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module benchmarks/hugging_face/learning_rows.py."""
    monkeypatch.syspath_prepend(SCRIPTS)
    import learning_rows

    return learning_rows


@pytest.mark.parametrize(("length", "pairs"), [(400, 12), (64, 16)])
def test_rows_ask_once_for_every_pair(rows: Any, length: int, pairs: int) -> None:
    text = torch.arange(200, dtype=torch.uint8).repeat(9)
    row = next(rows.TextWithPairs(text, length, pairs, 20))
    tokens, targets = torch.tensor(row.tokens), torch.tensor(row.targets)
    body = length - 2 * pairs
    is_key = (tokens >= 256) & (tokens < 276)
    assert int(is_key[:body].sum()) == int(is_key[body:].sum()) == pairs
    stated = {int(tokens[i]): int(tokens[i + 1]) for i in is_key[:body].nonzero().flatten()}
    asked = {int(tokens[i]): int(targets[i]) for i in range(body, length, 2)}
    assert len(stated) == pairs
    assert asked == stated
    assert all(256 + 20 <= value < 256 + 20 + rows.VALUES for value in stated.values())
    is_text = tokens[:body] < 256
    assert int(is_text.sum()) == length - 4 * pairs
    assert (tokens[:body][is_text].diff() % 200 == 1).all()
    followed = torch.cat((is_text[1:], torch.tensor([False])))
    assert torch.equal(targets[:body] >= 0, followed)
    assert torch.equal(targets[:body][followed], tokens[1 : body + 1][followed])
    assert (targets[body + 1 :: 2] < 0).all()
    answers = torch.arange(body, length, 2)
    place = {int(tokens[i]): int(i) for i in is_key[:body].nonzero().flatten()}
    expected = [int(i) - place[int(tokens[i])] for i in answers]
    assert rows.distances(tokens, answers).tolist() == expected


def test_the_text_is_a_target_in_a_share_of_the_rows(rows: Any) -> None:
    text = torch.zeros(999, dtype=torch.uint8)
    made = rows.TextWithPairs(text, 100, 4, 4, 0.25)
    with_text = sum(any(0 <= t < 256 for t in next(made).targets) for _ in range(400))
    assert 60 < with_text < 140


def test_training_and_held_out_text_share_no_file(rows: Any) -> None:
    training, held_out = (bytes(side.tolist()) for side in rows.library_sources())
    assert len(training) > 10 * len(held_out) > 10**5
    files = {path.read_bytes() for path in Path(json.__file__).parents[1].glob("*.py")}
    assert not [f for f in files if len(f) > 999 and f in training and f in held_out]


def run_script(name: str, folder: Path) -> dict[str, Any]:
    file = folder / "result.json"
    command = [sys.executable, str(SCRIPTS / name), "--scale", "tiny", "--device", "cpu"]
    subprocess.run([*command, "--json", str(file)], check=True)
    document: dict[str, Any] = json.loads(file.read_text())
    return document


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the result files of both trainings on a small scale."""
    folder = tmp_path_factory.mktemp("learning") / "benchmarks" / "results" / "h200"
    folder.mkdir(parents=True)
    for script, file in (("convert", "hf_convert.json"), ("minimax", "hf_minimax.json")):
        document = run_script(f"{script}_learning.py", folder)
        (folder / file).write_text(json.dumps(document))
    (folder / "result.json").unlink()
    return folder


@pytest.mark.slow
def test_both_attentions_continue_from_the_same_model_and_learn(results: Path) -> None:
    document = json.loads((results / "hf_convert.json").read_text())
    steps = [0, 2, 4, 6, 8]
    for name in ("nsa", "dense"):
        assert [point["step"] for point in document[name]] == steps
        losses = [point["text_loss"] for point in document[name]]
        assert losses[-1] < losses[0]
    assert [point["stage"] for point in document["nsa"]] == [1, 1, 1, 2, 2]
    before = document["before_conversion"][-1]
    assert document["dense"][0]["text_loss"] == pytest.approx(before["text_loss"], abs=1e-3)
    assert document["nsa"][0]["text_loss"] != document["dense"][0]["text_loss"]
    mass = [point["selected_mass"] for point in document["nsa"]]
    assert all(len(layers) == 2 and 0 < min(layers) <= max(layers) <= 1 for layers in mass)
    assert document["machine"]["source_trees"]["nsa_models"]


@pytest.mark.slow
def test_minimax_has_the_same_losses_with_both_implementations(results: Path) -> None:
    document = json.loads((results / "hf_minimax.json").read_text())
    losses = [document[name]["loss"] for name in ("eager", "nsa_blocks")]
    assert len(losses[0]) == len(losses[1]) == 5
    assert losses[0][-1] < losses[0][0]
    assert max(abs(a - b) for a, b in zip(*losses)) == document["largest_difference"] < 1e-5


@pytest.mark.slow
def test_tables_and_plots_show_the_result_files(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from figure_learning import LEARNING
    from figure_tables import Results

    tables = {name: table(Results(results)) for name, table in LEARNING.items()}
    assert tables["hf-convert"].count("\n") == 4
    assert "4, after the first stage" in tables["hf-convert"]
    assert "| nsa_blocks | 5." in tables["hf-minimax"]
    assert "8 held-out questions" in tables["hf-convert-run"]
    script = ROOT / "docs" / "scripts" / "learning_figure.py"
    arguments = ["learning_figure.py", str(tmp_path), "--results", str(results)]
    monkeypatch.setattr("sys.argv", arguments)
    runpy.run_path(str(script), run_name="__main__")
    drawn = {path.name for path in tmp_path.glob("*.svg")}
    assert drawn == {"learning_convert.svg", "learning_minimax.svg"}
    shutil.rmtree(results)
    runpy.run_path(str(script), run_name="__main__")
    assert capsys.readouterr().out.count("not drawn") == 2
    assert {table(Results(results)) for table in LEARNING.values()} == {"not measured yet"}
