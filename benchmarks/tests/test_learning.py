"""benchmarks/hugging_face: trainings on a small scale, tables and plots; tables of the study."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import minimax_learning as minimax
import pytest
import torch
from figure_learning import LEARNING
from figure_tables import Results
from transformers import AttentionInterface

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "benchmarks" / "hugging_face"


@pytest.fixture
def model() -> Any:
    """A MiniMax-M3 whose queries choose 4 of up to 8 blocks, and 2 of 4 experts."""
    minimax.minimax.register()
    torch.manual_seed(0)
    return minimax.MiniMaxM3VLForCausalLM(minimax.Scale(2, 2, 64, 8, 32, 3, 2, 16, 1e-3).config())


TOKENS = torch.randint(256, (2, 2, 64), generator=torch.Generator().manual_seed(0))


def test_a_control_needs_no_kernel_and_writes_no_file(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    trained = minimax.train_all(minimax.SCALES["tiny"], "cpu", with_kernel=False)
    assert trained.keys() == {"eager", "control", "control_replayed"}
    arguments = ["minimax_learning.py", "--scale", "tiny", "--device", "cpu", "--only-control"]
    monkeypatch.setattr("sys.argv", [*arguments, "--json", "file"])
    with pytest.raises(SystemExit):
        minimax.main()
    assert "leave out --json or --only-control" in capsys.readouterr().err
    calls = []
    monkeypatch.setattr(minimax, "train_all", lambda *args, **kw: calls.append((args, kw)))
    monkeypatch.setattr("sys.argv", [*arguments, "--learning-rate", "0.5"])
    assert minimax.main() == 0
    ((scale, device), options) = calls[0]
    assert (scale.learning_rate, device, options) == (0.5, "cpu", {"with_kernel": False})


def test_moved_weights_are_the_next_numbers(model: Any) -> None:
    moved = minimax.moved(model)
    signs = set()
    for old, new in zip(model.parameters(), moved.parameters(), strict=True):
        assert torch.equal(new, torch.nextafter(old, new))
        signs |= set((new - old).sign().flatten().tolist())
    assert signs == {-1.0, 1.0}


def test_a_replay_makes_the_choices_of_the_other_training(model: Any) -> None:
    expected = minimax.Training(model, "eager", 1e-3)
    losses = expected.run(TOKENS)["loss"]
    # These weights and this bias affect the choices only.
    for name, parameter in model.named_parameters():
        if ".indexer.q_proj" in name:
            parameter.data.copy_(-parameter.data)
    model.model.layers[-1].mlp.gate.e_score_correction_bias[1] = 9.0
    free = minimax.Training(model, "eager", 1e-3, expected).run(TOKENS)
    assert min(free["changed_blocks"]) > 0 < min(free["changed_experts"])
    assert free["loss"] != losses
    for implementation in ("eager", "nsa_blocks"):
        training = minimax.Training(model, implementation, 1e-3, expected, replay=True)
        replayed = training.run(TOKENS)
        assert replayed["largest_difference"] < 1e-5
        assert min(replayed["changed_blocks"]) > 0 < min(replayed["changed_experts"])
    # 2 rows of 64 queries; 2 layers choose blocks for 2 kv heads, and 1 layer chooses experts.
    assert training.choices.made_per_step(2) == {"blocks": 512, "experts": 128}


def test_gradients_agree_in_double_precision_name_by_name(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The model computes norms, ranks and the softmax of "eager" in float32, whatever its dtype.
    softmax = torch.nn.functional.softmax
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    monkeypatch.setattr(torch.nn.functional, "softmax", lambda x, dim, dtype: softmax(x, dim))
    model.set_experts_implementation("eager")  # grouped_mm has no double precision
    model.double()
    eager = minimax.Training(model, "eager", 1e-3)
    eager.run(TOKENS)
    for start in (model, eager.model):
        result = minimax.compare_gradients(start, TOKENS[0])
        assert 0 < result["difference"] < 1e-12
        # All but the 4 parameters of each of the 2 indexers.
        assert result["parameters"] == len(list(model.parameters())) - 8
    trained = minimax.Training(model, "nsa_blocks", 1e-3, eager).run(TOKENS)
    assert trained["largest_difference"] < 1e-12


@pytest.mark.slow
def test_a_wrong_kernel_fails_with_and_without_a_replay(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    monkeypatch.setitem(minimax.SCALES, "tiny", minimax.Scale(2, 2, 64, 8, 32, 2, 2, 16, 1e-3))
    arguments = ["minimax_learning.py", "--scale", "tiny", "--device", "cpu", "--json"]
    monkeypatch.setattr("sys.argv", [*arguments, str(tmp_path / "right.json")])
    assert minimax.main() == 0
    right, attend = capsys.readouterr(), minimax.minimax.attend

    def wrong(*args: Any, **options: Any) -> Any:
        output, weights = attend(*args, **options)
        return 9 * output, weights

    # `main` registers it again; the first line restores the right one after the test.
    monkeypatch.setitem(AttentionInterface._global_mapping, "nsa_blocks", wrong)
    monkeypatch.setattr(minimax.minimax, "attend", wrong)
    monkeypatch.setattr("sys.argv", [*arguments, str(tmp_path / "wrong.json")])
    assert minimax.main() == 1
    failed = capsys.readouterr().err.splitlines()
    assert right.err == ""
    assert [line.partition(":")[0] for line in failed] == ["nsa_blocks", "nsa_blocks_replayed"]
    document = json.loads((tmp_path / "wrong.json").read_text())
    assert document["gradients_at_start"]["difference"] > 0.1
    assert document["control"]["largest_difference"] < 1e-5


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the result file of the training on a small scale."""
    folder = tmp_path_factory.mktemp("learning") / "h100"
    folder.mkdir()
    command = [sys.executable, str(SCRIPTS / "minimax_learning.py"), "--scale", "tiny"]
    command += ["--device", "cpu", "--json", str(folder / "hf_minimax.json")]
    subprocess.run(command, check=True)
    return folder


@pytest.mark.slow
def test_minimax_has_the_same_losses_with_both_implementations(results: Path) -> None:
    document = json.loads((results / "hf_minimax.json").read_text())
    losses = [document[name]["loss"] for name in ("eager", "nsa_blocks")]
    assert len(losses[0]) == len(losses[1]) == 5
    assert losses[0][-1] < losses[0][0]
    difference = max(abs(a - b) for a, b in zip(*losses))
    assert difference == document["nsa_blocks"]["largest_difference"] < 1e-5
    assert document["nsa_blocks_replayed"]["largest_difference"] < 1e-5
    assert document["gradients_at_end"]["difference"] < 1e-5


@pytest.mark.slow
def test_tables_and_plots_show_the_result_files(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    tables = {name: table(Results(results)) for name, table in LEARNING.items()}
    document = json.loads((results / "hf_minimax.json").read_text())
    shown = [float(x) for x in re.findall(r"\d\.\de[+-]\d+", tables["hf-minimax"])]
    names = ("nsa_blocks", "control", "nsa_blocks_replayed")
    assert shown == [float(f"{document[name]['largest_difference']:.1e}") for name in names]
    script = ROOT / "docs" / "scripts" / "learning_figure.py"
    arguments = ["learning_figure.py", str(tmp_path), "--results", str(results)]
    monkeypatch.setattr("sys.argv", arguments)
    runpy.run_path(str(script), run_name="__main__")
    drawn = {path.name for path in tmp_path.glob("*.svg")}
    assert drawn == {"learning_minimax.svg"}
    shutil.rmtree(results)
    runpy.run_path(str(script), run_name="__main__")
    assert capsys.readouterr().out.count("not drawn") == 7  # first those of the study
    assert {table(Results(results)) for table in LEARNING.values()} == {"not measured yet"}
