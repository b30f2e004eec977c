"""`nsa eval`: its table, its JSON file and its errors."""

from __future__ import annotations

import importlib.util
import json
import pathlib

import pytest

from nsa_models.evaluation import run
from nsa_models.evaluation.run import Score

SCORES = [
    Score("ruler", "4096", 0.75, 0.0125, True, 500),
    Score("text", "bits_per_byte", 1.5, None, False, 3),
    Score("group", "acc", 0.25, None, None, None),
]
TABLE = """
task   metric          value  std. error  examples  better
ruler  4096           0.7500      0.0125       500  higher
text   bits_per_byte  1.5000      -              3  lower
group  acc            0.2500      -              -
"""


@pytest.fixture(autouse=True)
def harness(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """Put an empty lm_eval on the path, because only the full run installs the harness."""
    folder = tmp_path / "site"
    for name, file, text in (
        ("lm_eval", "__init__.py", ""),
        ("lm_eval-0.dist-info", "METADATA", "Metadata-Version: 2.1\nName: lm_eval\nVersion: 0\n"),
    ):
        (folder / name).mkdir(parents=True)
        (folder / name / file).write_text(text)
    monkeypatch.syspath_prepend(str(folder))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    """Replace the evaluation; return the arguments of its calls."""
    calls = []

    def evaluate(checkpoint, tasks, **options):
        calls.append({"checkpoint": str(checkpoint), "tasks": tasks, **options})
        return SCORES

    monkeypatch.setattr(run, "evaluate", evaluate)
    return calls


def test_scores_are_printed_and_written(nsa, calls, tmp_path):
    file = tmp_path / "scores.json"
    done = nsa("eval", "--checkpoint", "run", "--tasks", "ruler, text,group", "--json", str(file))
    assert done.code == 0
    lines = [line.rstrip() for line in done.out.splitlines()]
    assert lines == TABLE.strip().splitlines()
    document = json.loads(file.read_text())
    assert document["schema_version"] == 1
    assert document["settings"]["checkpoint"] == "run"
    assert document["settings"]["tasks"] == ["ruler", "text", "group"]
    assert document["scores"][0] == {
        "task": "ruler",
        "metric": "4096",
        "value": 0.75,
        "stderr": 0.0125,
        "higher_is_better": True,
        "examples": 500,
    }
    assert document["libraries"].keys() == {"lm_eval", "transformers"}
    assert document["environment"]["versions"]["nsa-models"]


def test_options_reach_the_evaluation(nsa, calls):
    options = "--length 4k,8k --limit 5 --fewshot 2 --task-folder here --batch 3"
    options += " --dtype bf16 --device cpu --backends sel=sdpa"
    assert nsa("eval", "--checkpoint", "run", "--tasks", "ruler", *options.split()).code == 0
    (call,) = calls
    assert str(call.pop("task_folder")) == "here"
    assert call == {
        "checkpoint": "run",
        "tasks": ["ruler"],
        "lengths": [4096, 8192],
        "limit": 5,
        "fewshot": 2,
        "batch": 3,
        "dtype": "bfloat16",
        "device": "cpu",
        "backends": {"sel": "sdpa"},
    }


@pytest.mark.parametrize("columns", [80, 100, 200])
def test_the_table_fits_the_terminal(terminal, calls, columns):
    code, text = terminal("eval", "--checkpoint", "run", "--tasks", "ruler", columns=columns)
    assert code == 0
    assert [line.rstrip() for line in text.splitlines()] == TABLE.strip().splitlines()


@pytest.mark.parametrize(("library", "extra"), [("lm_eval", "eval"), ("transformers", "hf")])
def test_missing_libraries_are_named(nsa, monkeypatch, library, extra):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == library else find_spec(name, *rest),
    )
    done = nsa("eval", "--checkpoint", "run", "--tasks", "ruler")
    assert done.code == 3
    assert f"nsa eval needs {library}, which is not installed" in done.err
    assert f"pip install 'nsa-cli[{extra}]'" in done.err


@pytest.mark.parametrize("length", ["5.5k", "4096,0", "1", "-3"])
def test_a_wrong_length_is_named(nsa, length):
    done = nsa("eval", "--checkpoint", "run", "--tasks", "ruler", "--length", length)
    assert done.code == 2
    wrong = length.split(",")[-1]
    assert f"--length: {wrong!r} is not a number of tokens from 2 to" in done.err


def test_the_options_of_wrong_arguments_are_named(nsa, tmp_path):
    done = nsa("eval", "--checkpoint", str(tmp_path / "no"), "--tasks", "ruler")
    assert done.code == 2
    assert "--checkpoint must be a folder on this machine, got" in done.err
    (tmp_path / "config.json").write_text("{}")
    done = nsa("eval", "--checkpoint", str(tmp_path), "--tasks", " ,")
    assert done.code == 2
    assert "--tasks must name tasks" in done.err
    done = nsa(
        "eval", "--checkpoint", str(tmp_path), "--tasks", "ruler", "--task-folder", "missing"
    )
    assert done.code == 2
    assert "--task-folder must be a folder, got missing" in done.err


def test_an_existing_file_is_kept(nsa, calls, tmp_path):
    file = tmp_path / "scores.json"
    file.write_text("mine")
    command = ["eval", "--checkpoint", "run", "--tasks", "ruler", "--json", str(file)]
    done = nsa(*command)
    assert done.code == 2
    assert "give --force to overwrite it" in done.err
    assert not calls
    assert file.read_text() == "mine"
    assert nsa(*command, "--force").code == 0
    assert json.loads(file.read_text())["scores"]
