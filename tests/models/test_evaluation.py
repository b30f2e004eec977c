"""The script of docs/how-to/inspect.md runs the lm-evaluation-harness on a run of `nsa train`."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys
from typing import Any

import pytest
import torch

from nsa_models.lm.model import LanguageModel
from nsa_models.lm.tokens import ByteTokenizer

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "how-to" / "inspect.md"
COUNTRIES, CHOICES = ["France", "Italy", "Norway"], ["Paris", "Rome", "Oslo"]
TASK = """
task: capitals
dataset_path: json
dataset_kwargs: {data_files: {test: tasks/capitals.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "The capital of {{country}} is"
doc_to_choice: [Paris, Rome, Oslo]
doc_to_target: answer
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""


def write_task(folder: pathlib.Path) -> None:
    folder.mkdir()
    rows = [json.dumps({"country": name, "answer": i}) for i, name in enumerate(COUNTRIES)]
    (folder / "capitals.jsonl").write_text("\n".join(rows))
    (folder / "capitals.yaml").write_text(TASK)


def run(script: str, folder: pathlib.Path, *options: str) -> None:
    """Run a script in a folder, without a network."""
    file = folder / "script.py"
    file.write_text(script)
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "hf")}
    offline |= dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")
    done = subprocess.run(
        [sys.executable, file, *options],
        cwd=folder,
        env=os.environ | offline,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def samples(folder: pathlib.Path, task: str) -> list[dict[str, Any]]:
    """Return the examples of a task and their answers, in their order."""
    (file,) = folder.rglob(f"samples_{task}_*.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return sorted(rows, key=lambda row: int(row["doc_id"]))


@pytest.mark.slow
@torch.no_grad()
def test_the_scripts_of_the_page_score_a_run_as_by_hand(
    write_run: Any, config: Any, tmp_path: pathlib.Path
) -> None:
    model = LanguageModel(config).eval()
    for parameter in model.parameters():  # logits of some size
        parameter.mul_(3)
    tokenizer = ByteTokenizer()
    write_run(model, tokenizer, length=64)
    write_task(tmp_path / "tasks")
    evaluate = re.findall(r"```py\n(.*?)```", PAGE.read_text(), re.DOTALL)[0]
    model_args = "pretrained=run,add_bos_token=True,max_length=1024"
    options = ["run", "--model", "hf", "--model_args", model_args, "--limit", "3"]
    options += ["--tasks", "capitals,niah_single_1", "--include_path", "tasks", "--device", "cpu"]
    options += ["--metadata", '{"max_seq_lengths": [512]}', "--gen_kwargs", "max_gen_toks=8"]
    run(evaluate, tmp_path, *options, "--output_path", "scores", "--log_samples")
    (file,) = tmp_path.glob("scores/*/results_*.json")
    scores = json.loads(file.read_text())["results"]
    hits = 0
    for answer, sample in enumerate(samples(tmp_path / "scores", "capitals")):
        expected = []
        for choice in CHOICES:
            text = f"The capital of {COUNTRIES[answer]} is {choice}"
            ids = torch.tensor([[tokenizer.end, *tokenizer.encode(text)]])
            logits = model.hidden(ids[:, :-1])[0] @ model.embed.weight.mT
            new = logits.double().log_softmax(-1)[-len(choice) - 1 :]
            expected.append(float(new.gather(1, ids[0, -len(choice) - 1 :, None]).sum()))
        hits += expected.index(max(expected)) == answer
        actual = [float(response[0]) for response in sample["filtered_resps"]]
        assert actual == pytest.approx(expected, rel=1e-4)
    assert scores["capitals"]["acc,none"] == pytest.approx(hits / 3)
    ruler = samples(tmp_path / "scores", "niah_single_1")
    assert len(ruler) == 3
    for sample in ruler:  # texts of the given length, by the tokenizer of the run, and answers
        assert 400 < len(tokenizer.encode(sample["arguments"]["gen_args_0"]["arg_0"])) <= 512
        assert isinstance(sample["resps"][0][0], str)
    assert 0 <= scores["niah_single_1"]["512,none"] <= 1
