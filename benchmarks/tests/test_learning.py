"""benchmarks/hugging_face: the rows, both trainings on a small scale, tables and plots."""

from __future__ import annotations

import dataclasses
import json
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import convert_learning
import learning_rows as rows
import minimax_learning as minimax
import pytest
import torch
from figure_learning import LEARNING
from figure_tables import Results
from transformers import AttentionInterface

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "benchmarks" / "hugging_face"


@pytest.mark.parametrize(("length", "pairs"), [(400, 12), (64, 16)])
def test_rows_ask_once_for_every_pair(length: int, pairs: int) -> None:
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


def test_rows_of_pairs_ask_once_for_every_pair_and_repeat() -> None:
    all_rows = rows.PairRows(5, 9, 4)
    first, lane = [next(all_rows) for _ in range(4)], all_rows.lane(1, 2)
    assert len({tuple(row.tokens) for row in first}) == 4
    assert [next(lane) for _ in range(3)] == [first[1], first[3], first[1]]
    state = lane.state_dict()
    following = next(lane)
    lane.load_state_dict(state)
    assert next(lane) == following == first[3]
    for tokens, targets, documents in first:
        assert len(tokens) == len(targets) == 20 == documents[0]
        stated = dict(zip(tokens[:10:2], tokens[1:10:2]))
        assert len(stated) == 5
        assert dict(zip(tokens[10::2], targets[10::2])) == stated
        assert tokens[11::2] == targets[10::2]
        assert all(256 <= key < 265 <= value < 265 + rows.VALUES for key, value in stated.items())
        assert [t for t in (*targets[:10], *targets[11::2]) if t >= 0] == []


def test_a_share_of_the_text_is_a_target() -> None:
    text = torch.zeros(999, dtype=torch.uint8)
    made = rows.TextWithPairs(text, 100, 4, 4, 0.25)
    targets = [[t for t in next(made).targets if t >= 0] for _ in range(400)]
    assert all(sum(t >= 256 for t in row) == 4 for row in targets)
    of_text = sum(t < 256 for row in targets for t in row) / 400
    assert 17 < of_text < 23  # of 84 bytes, a quarter of those that follow a byte


@pytest.mark.slow
def test_training_and_held_out_text_share_no_file() -> None:
    training, held_out = (bytes(side.tolist()) for side in rows.library_sources())
    assert len(training) > 10 * len(held_out) > 10**5
    files = {path.read_bytes() for path in Path(json.__file__).parents[1].glob("*.py")}
    assert not [f for f in files if len(f) > 999 and f in training and f in held_out]


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


@pytest.fixture
def lesson() -> Any:
    """The lesson of a scale of seconds; ``lesson.module`` is convert_learning.py."""
    lesson = convert_learning.Lesson(convert_learning.SCALES["tiny"], "cpu")
    lesson.module = convert_learning
    return lesson


def test_text_and_answers_weigh_the_same(lesson: Any) -> None:
    targets = torch.tensor([[7, 8, 9, -100], [-100, 300, -100, -100]])
    logits = torch.zeros(2, 4, 400)
    logits[1, 1, 300] = 5.0
    text = torch.tensor(400.0).log()
    answer = (399 + torch.tensor(5.0).exp()).log() - 5
    actual = lesson.module.lesson_loss(logits, targets)
    assert float(actual) == pytest.approx(float(text + answer), rel=1e-6)


def test_recall_counts_right_answers_and_far_pairs(lesson: Any) -> None:
    row = lesson.held_out[0]
    targets, tokens = torch.tensor(row.targets), torch.tensor(row.tokens)
    answers = (targets >= 256).nonzero().flatten()
    far = lesson.module.distances(tokens, answers) > 128
    assert 0 < int(far.sum()) < len(answers)

    def only_near(given: torch.Tensor) -> torch.Tensor:
        assert torch.equal(given[0], tokens)
        logits = torch.zeros(1, len(tokens), lesson.vocab_size)
        logits[0, answers[~far], targets[answers[~far]]] = 1.0
        return logits

    point = lesson.measure(only_near, [row])
    assert point["recall"] == pytest.approx(float((~far).float().mean()), abs=1e-4)
    assert point["recall_of_far_pairs"] == 0
    assert point["text_loss"] == pytest.approx(float(torch.tensor(lesson.vocab_size).log()), 1e-4)


def test_a_part_ends_when_its_recall_is_enough(lesson: Any, tmp_path: Path) -> None:
    part = lesson.scale.before[0]
    before = (dataclasses.replace(part, enough=0.0), part)
    lesson.scale = dataclasses.replace(lesson.scale, before=before)
    curve = lesson.module.train_dense(lesson, tmp_path)
    assert [(point["row_length"], point["step"]) for point in curve] == [
        (64, 2),
        *[(64, step) for step in (2, 4, 6)],
    ]
    model = lesson.module.load_model(lesson.module.open_folder(tmp_path))
    recall = lesson.module.recall_by_length(lesson, model)
    assert recall.keys() == {64, 256}


def test_a_file_needs_the_whole_run(
    lesson: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    arguments = ["convert_learning.py", "--scale", "tiny", "--device", "cpu"]
    monkeypatch.setattr("sys.argv", [*arguments, "--stop-after", "dense", "--json", "file"])
    with pytest.raises(SystemExit) as stopped:
        lesson.module.main()
    assert stopped.value.code == 2
    assert "leave out --json or --stop-after dense" in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", [*arguments, "--stop-after", "dense"])
    lesson.module.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("dense, before the conversion: recall ")
    assert lines[-1].endswith(" in rows of 256 tokens")


def run_script(name: str, folder: Path) -> dict[str, Any]:
    file = folder / "result.json"
    command = [sys.executable, str(SCRIPTS / name), "--scale", "tiny", "--device", "cpu"]
    subprocess.run([*command, "--json", str(file)], check=True)
    document: dict[str, Any] = json.loads(file.read_text())
    return document


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the result files of both trainings on a small scale."""
    folder = tmp_path_factory.mktemp("learning") / "benchmarks" / "results" / "h100"
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
    difference = max(abs(a - b) for a, b in zip(*losses))
    assert difference == document["nsa_blocks"]["largest_difference"] < 1e-5
    assert document["nsa_blocks_replayed"]["largest_difference"] < 1e-5
    assert document["gradients_at_end"]["difference"] < 1e-5


@pytest.mark.slow
def test_tables_and_plots_show_the_result_files(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    tables = {name: table(Results(results)) for name, table in LEARNING.items()}
    assert tables["hf-convert"].count("\n") == 4
    assert "4, after the first stage" in tables["hf-convert"]
    assert "| nsa_blocks | 5." in tables["hf-minimax"]
    assert tables["hf-minimax-differences"].count("\n") == 5
    assert "| nsa_blocks, choices replayed | " in tables["hf-minimax-differences"]
    assert " the largest of 26 parameters" in tables["hf-minimax-gradients"]
    assert tables["hf-convert-lesson"].startswith("6 on rows of 64, 2 on rows of 256 tokens; ")
    assert tables["hf-convert-recall"].count("%") == 6
    assert "128 held-out questions" in tables["hf-convert-run"]
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
