"""Compute the tables and values of docs/explanation/learning.md from result files.

The result of another GPU replaces a missing one; without any, the value is
:data:`figure_tables.PENDING`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from statistics import fmean
from typing import Any

from figure_pieces import nearest
from figure_tables import PENDING, Results, digits, short_device, table, tokens

CONVERT, MINIMAX = "hf_convert.json", "hf_minimax.json"
_KINDS = ("blocks", "experts")
# The trainings that are compared with "eager".
DIFFERENCES = {
    "control": "eager, weights moved by one rounding",
    "nsa_blocks": "nsa_blocks",
    "control_replayed": "eager, weights moved, choices replayed",
    "nsa_blocks_replayed": "nsa_blocks, choices replayed",
}
# Fields of a converted model that are compared with dense attention, and their formats.
_COMPARED = (("text_loss", ".3f"), ("recall", ".1%"), ("recall_of_far_pairs", ".1%"))
IMAGES = {CONVERT: "learning_convert.svg", MINIMAX: "learning_minimax.svg"}


def _from_file(file: str) -> Callable[[Callable[[Any], str]], Callable[[Results], str]]:
    """Give a function the document of the nearest result file; without any, return PENDING."""

    def decorate(compute: Callable[[Any], str]) -> Callable[[Results], str]:
        @functools.wraps(compute)
        def value(results: Results) -> str:
            path = nearest(results.folder, file)
            return compute(json.loads(path.read_text())) if path else PENDING

        return value

    return decorate


def _device(document: Any) -> str:
    return short_device(document["machine"]["device"])


@_from_file(CONVERT)
def convert(document: Any) -> str:
    """Tabulate loss, recall and selected mass at the conversion, after stage 1 and at the end."""
    scale, dense = document["scale"], {p["step"]: p for p in document["dense"]}
    names = {0: "0, after the conversion", scale["first_stage"]: "{}, after the first stage"}
    rows = []
    for nsa in document["nsa"]:
        step = nsa["step"]
        if step not in (*names, scale["steps"]):
            continue
        other = dense[step]
        rows.append(
            [
                names.get(step, "{}").format(step),
                *(f"{nsa[field]:{form}} / {other[field]:{form}}" for field, form in _COMPARED),
                f"{fmean(nsa['selected_mass']):.1%}, {fmean(nsa['selected_keys']):.1%}",
            ]
        )
    columns = ["step", "text, nats per byte", "recall", "recall of far pairs"]
    return table([*columns, "mass in the selected blocks, their share of the keys"], rows)


@_from_file(CONVERT)
def convert_run(document: Any) -> str:
    """State the sizes, the device and the duration of the conversion run."""
    scale, seconds = document["scale"], document["seconds"]
    return (
        f"{document['parameters']['dense'] / 1e6:.1f} million parameters,"
        f" {document['parameters']['nsa'] / 1e6:.1f} million with NSA; {scale['layers']} layers of"
        f" {scale['layer']['dim']}, rows of {tokens(scale['length'])} tokens, {document['answers']}"
        f" held-out questions; {sum(seconds.values()):.0f} seconds on one {_device(document)}"
    )


@_from_file(CONVERT)
def convert_lesson(document: Any) -> str:
    """State the steps and rows of the dense training, the pairs of a long row, and the loss."""
    scale, loss = document["scale"], document.get("loss", "the mean over text and answers")
    steps = {point["row_length"]: point["step"] for point in document["before_conversion"]}
    parts = ", ".join(f"{count} on rows of {tokens(length)}" for length, count in steps.items())
    return (
        f"{parts} tokens; a row of {tokens(scale['length'])} tokens has {scale['pairs']} pairs;"
        f" after the conversion the loss is {loss}"
    )


@_from_file(CONVERT)
def convert_recall(document: Any) -> str:
    """State the recall before the conversion, directly after it, and at the end."""
    first, nsa, dense = document["dense"][0], document["nsa"], document["dense"]
    return (
        f"the dense model answered {first['recall']:.1%} of the questions when it was converted,"
        f" and the converted model {nsa[0]['recall']:.1%} before any training; at the end NSA"
        f" answered {nsa[-1]['recall']:.1%} and dense attention {dense[-1]['recall']:.1%}, of the"
        f" questions for far pairs {nsa[-1]['recall_of_far_pairs']:.1%} and"
        f" {dense[-1]['recall_of_far_pairs']:.1%}"
    )


@_from_file(MINIMAX)
def minimax(document: Any) -> str:
    """Tabulate the losses and step times of both implementations."""
    rows = [
        [
            name,
            f"{document[name]['loss'][0]:.4f}",
            f"{document[name]['loss'][-1]:.4f}",
            digits(1e3 * document[name]["seconds_per_step"]),
        ]
        for name in ("eager", "nsa_blocks")
    ]
    last = f"loss of step {len(document['eager']['loss'])}"
    return table(["implementation", "loss of step 1", last, "ms per step"], rows)


@_from_file(MINIMAX)
def minimax_differences(document: Any) -> str:
    """Tabulate the differences to "eager", with free and with replayed choices."""
    choices = sum(document["choices_per_step"].values())
    rows = []
    for training, what in DIFFERENCES.items():
        trained = document[training]
        changed = [sum(counts) for counts in zip(*(trained[f"changed_{k}"] for k in _KINDS))]
        first = next((step for step, count in enumerate(changed, 1) if count), None)
        share = sum(changed) / (choices * len(changed))
        difference = f"{trained['largest_difference']:.1e}"
        rows.append([what, difference, "none" if first is None else str(first), f"{share:.4%}"])
    columns = ["training", "largest difference, nats per byte", "first step with another choice"]
    return table([*columns, "other choices"], rows)


@_from_file(MINIMAX)
def minimax_gradients(document: Any) -> str:
    """State how much the gradients differ at most, name by name."""
    start, end = document["gradients_at_start"], document["gradients_at_end"]
    return (
        f"{start['difference']:.1e} at the start and {end['difference']:.1e} after the training,"
        f" the largest of {end['parameters']} parameters, on one {_device(document)}"
    )


def _plot(file: str, text: str) -> Callable[[Results], str]:
    return _from_file(file)(lambda _: f"![{text}](../images/{IMAGES[file]})")


LEARNING: dict[str, Callable[[Results], str]] = {
    "hf-convert": convert,
    "hf-convert-run": convert_run,
    "hf-convert-lesson": convert_lesson,
    "hf-convert-recall": convert_recall,
    "hf-convert-plot": _plot(
        CONVERT, "Held-out loss, recall and selected mass over the steps after the conversion"
    ),
    "hf-minimax": minimax,
    "hf-minimax-differences": minimax_differences,
    "hf-minimax-gradients": minimax_gradients,
    "hf-minimax-plot": _plot(
        MINIMAX, "Losses of both implementations, and the differences to eager"
    ),
}
