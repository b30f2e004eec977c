"""Tasks of the lm-evaluation-harness for the tests of `nsa_models.evaluation`."""

from __future__ import annotations

import pathlib
from typing import Any

QUESTIONS = ["The capital of France is", "The capital of Italy is", "The capital of Norway is"]
CHOICES = ["Paris", "Rome", "Oslo"]
DATA = f"""
import json, pathlib
import datasets

def questions(**options):
    pathlib.Path(__file__).with_name("options.json").write_text(json.dumps(options))
    rows = [
        {{"question": q, "choices": {CHOICES!r}, "answer": i}}
        for i, q in enumerate({QUESTIONS!r})
    ]
    return {{"test": datasets.Dataset.from_list(rows)}}

def lengths(max_seq_lengths, **_):
    rows = [
        {{"question": f"{{q}} of {{n}} tokens", "answer": "x", "max_length": n}}
        for n in max_seq_lengths
        for q in "abc"
    ]
    return {{"test": datasets.Dataset.from_list(rows)}}

def nothing(**_):
    raise ERROR
"""
TASK = """
task: {name}
dataset_path: ""
custom_dataset: !function data.{data}
test_split: test
fewshot_split: test
doc_to_text: {text}
doc_to_target: {target}
metric_list:
  - metric: {metric}
    aggregation: {aggregation}
    higher_is_better: {better}
output_type: {kind}
"""
TASKS: dict[str, dict[str, Any]] = {
    "capitals": {
        "kind": "multiple_choice\ndoc_to_choice: choices",
        "metric": "acc",
    },
    "spell": {
        "kind": 'generate_until\ngeneration_kwargs: {until: ["."], max_gen_toks: 6}',
        "target": '"{{choices[answer]}}"',
        "metric": "exact_match",
    },
    "text": {
        "kind": "loglikelihood_rolling",
        "text": '""',
        "target": "question",
        "metric": "bits_per_byte",
        "aggregation": "bits_per_byte",
        "better": "false",
    },
    "made": {"kind": "loglikelihood", "data": "lengths", "metric": "perplexity"},
    "offline": {"kind": "multiple_choice\ndoc_to_choice: choices", "data": "nothing"},
}
DEFAULTS = {
    "data": "questions",
    "text": "question",
    "target": "answer",
    "metric": "acc",
    "aggregation": "mean",
    "better": "true",
}


def write_tasks(folder: pathlib.Path) -> pathlib.Path:
    """Write the tasks and their data into a new folder, and return it."""
    folder.mkdir()
    (folder / "data.py").write_text(DATA)
    for name, fields in TASKS.items():
        (folder / f"{name}.yaml").write_text(TASK.format(**(DEFAULTS | fields | {"name": name})))
    return folder
