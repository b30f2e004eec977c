"""Compute tables and values of pages about learning from result files.

Those of docs/how-to/minimax-m3.md come from the result of this GPU, or else from that of another
one. Those of docs/explanation/learning.md come from the result files of the study, with the
functions of its report. Without a result file, the value is :data:`figure_tables.PENDING`.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from figure_tables import PENDING, Results, short_device, table, tokens

sys.path.insert(0, str(Path(__file__).with_name("study")))
import report

MINIMAX = "hf_minimax.json"
# Groups of the study.
SMALL, LARGE, MODEL = ("small",), ("large_150m",), ("smollm2_8k", "smollm2_32k")
# The large arms on fewer tokens, and at twice the rate.
SHORT, FAST = ("large",), ("large_150m_2e-3",)
CONVERTED, SEPARATE = "NSA, shared K/V, means", "NSA"  # by default, and with the paper's options
WINDOW = report.NSAConfig.window_size
IMAGES = {
    SMALL: "learning_small.svg",
    LARGE: "learning_large.svg",
    MODEL: "learning_model.svg",
    MINIMAX: "learning_minimax.svg",
}


def _from_file(file: str) -> Callable[[Callable[[Any], str]], Callable[[Results], str]]:
    """Give a function the document of the nearest result file; without any, return PENDING."""

    def decorate(compute: Callable[[Any], str]) -> Callable[[Results], str]:
        @functools.wraps(compute)
        def value(results: Results) -> str:
            document = results.document(file)
            return PENDING if document is None else compute(document)

        return value

    return decorate


def _device(document: Any) -> str:
    return short_device(document["machine"]["device"])


def study_results(folder: Path) -> Path:
    """Return the folder of the study's results, which lies beside those of the GPUs."""
    return folder.parent.parent / "study" / "results"


def groups_of(folder: Path, names: Sequence[str]) -> list[report.Group]:
    """Return groups of the study's arms; [] if one has no finished run of its baseline.

    Args:
        folder: The folder of a GPU's results; those of the study lie beside it.
        names: Names of groups in arms.toml.
    """
    results = study_results(folder)
    finished = report.read(results)[0] if results.exists() else []
    groups = [report.Group(n, finished, report.read_starts(results, n)) for n in names]
    return groups if all(g.runs and g.base in g.curves() for g in groups) else []


def _from_study(
    names: Sequence[str],
) -> Callable[[Callable[[list[report.Group]], str]], Callable[[Results], str]]:
    """Give a function the named groups of the study; without their results, return PENDING."""

    def decorate(compute: Callable[[list[report.Group]], str]) -> Callable[[Results], str]:
        @functools.wraps(compute)
        def value(results: Results) -> str:
            groups = groups_of(results.folder, names)
            return compute(groups) if groups else PENDING

        return value

    return decorate


def _rows(columns: dict[str, Any], labels: Sequence[str]) -> list[list[str]]:
    """Return a row for each arm, from columns of values by arm; "-" stands for no value."""
    return [[label, *(column.get(label, "-") for column in columns.values())] for label in labels]


def _far_values(group: report.Group) -> Any:
    """Return the share of values recalled from beyond the window, by arm, in words."""
    entries = group.recall()
    far = entries[(entries["task"] == "key_value") & (entries["distance"] > WINDOW)]
    shares = far.groupby("arm")["correct"].mean()
    return shares.map("{:.1%}".format)


def _masses(group: report.Group) -> dict[str, str]:
    """Return the mass of the selected blocks and of random ones in words, by arm."""
    layers = group.layers()[["selected", "random"]].groupby("arm").mean()
    return {arm: f"{m['selected']:.0%}, {m['random']:.0%}" for arm, m in layers.iterrows()}


def _trained(group: report.Group) -> str:
    """Tabulate loss, recall beyond the window and mass of the selected blocks."""
    columns = {
        "loss": group.final["loss"].groupby("arm").mean().map("{:.3f}".format),
        f"above {group.base}": report.with_error(_above(group).drop(group.base)),
        "recalled": _far_values(group),
        "mass: selected, random": _masses(group),
    }
    finished = [label for label in group.labels.values() if label in columns["loss"]]
    return table(["attention", *columns], _rows(columns, finished))


@_from_study(SMALL)
def small(groups: list[report.Group]) -> str:
    """Tabulate the small arms."""
    return _trained(groups[0])


@_from_study(LARGE)
def large(groups: list[report.Group]) -> str:
    """Tabulate the large arms."""
    return _trained(groups[0])


@_from_study(MODEL)
def model(groups: list[report.Group]) -> str:
    """Tabulate the converted model beside dense attention, at both lengths."""
    rows = []
    for group in groups:
        curves = group.curves().T.groupby("arm").mean().T
        columns = {
            "loss before training": curves.iloc[0].map("{:.3f}".format),
            "loss at the end": curves.iloc[-1].map("{:.3f}".format),
            "recalled": _far_values(group),
        }
        length = tokens(group.plan["row"])
        labels = [label for label in group.labels.values() if label in curves][::-1]
        rows += [[length, *row] for row in _rows(columns, labels)]
    return table(["rows of", "attention", *columns], rows)


def _reached(points: Any) -> dict[str, str]:
    """Return after how many tokens each column of differences is at most 0, in words."""
    levels = points.apply(report.level)
    last = points.index[-1] / 1e6
    return {
        arm: f"{level / 1e6:.2g} M" if level < float("inf") else f"not within {last:.0f} M"
        for arm, level in levels.items()
    }


def _by_length(groups: list[report.Group], words: Sequence[str]) -> str:
    """Join the words for each group, with its length."""
    return " and ".join(f"{w} at {tokens(g.plan['row'])}" for g, w in zip(groups, words))


def _answer(groups: list[report.Group]) -> str:
    """State the difference of NSA to the baseline of one group, as in the tables."""
    (group,) = groups
    return str(report.with_error(_above(group))[_nsa(group)])


def _above(group: report.Group) -> Any:
    """Return the differences to the baseline by arm and seed, or by document of a single seed."""
    by_seed = group.above_base(group.final[["loss"]])["loss"].unstack("seed")
    return by_seed if by_seed.shape[1] > 1 else _above_by_document(group)


def _above_by_document(group: report.Group) -> Any:
    """Return the differences to the baseline by arm and held-out document, means over seeds."""
    losses = report.pd.DataFrame(group.final["document_losses"].tolist(), index=group.final.index)
    return group.above_base(losses).groupby("arm").mean()


def _nsa(group: report.Group) -> str:
    """Return the label of the first arm with NSA."""
    return next(label for label in group.labels.values() if label.startswith("NSA"))


@_from_study(FAST)
def large_speed(groups: list[report.Group]) -> str:
    """State how many times faster NSA trains than dense attention."""
    (group,) = groups
    speeds = group.facts()["speed.tokens_per_s"]
    return f"{speeds[_nsa(group)] / speeds[group.base]:.2f} times"


@_from_study(LARGE)
def large_seeds(groups: list[report.Group]) -> str:
    """State how far the seeds of dense attention are apart."""
    (group,) = groups
    losses = group.final["loss"][group.base]
    return f"{losses.max() - losses.min():.2f}"


@_from_study(FAST)
def large_fast(groups: list[report.Group]) -> str:
    """State the final losses of NSA and of dense attention at twice the rate."""
    (group,) = groups
    losses = group.final["loss"].groupby("arm").mean()
    return f"{losses[group.base]:.3f} with dense attention, and {losses[_nsa(group)]:.3f} with NSA"


def _model_answer(label: str) -> Callable[[Results], str]:
    """State how far an arm is above dense attention at the end, over documents, by length."""

    @_from_study(MODEL)
    def value(groups: list[report.Group]) -> str:
        words = {}
        for group in groups:
            above = report.with_error(_above_by_document(group))
            words |= {group: above[label]} if label in above else {}
        return _by_length([*words], [*words.values()])

    return value


@_from_study(MODEL)
def model_start(groups: list[report.Group]) -> str:
    """State how far a fresh conversion is above the dense model, at both lengths."""
    curves = (group.curves().T.groupby("arm").mean().T.iloc[0] for group in groups)
    words = [f"{own[CONVERTED] - own[group.base]:+.3f}" for group, own in zip(groups, curves)]
    return _by_length(groups, words)


@_from_study(MODEL)
def model_repaid(groups: list[report.Group]) -> str:
    """State after how many tokens NSA is as good as the dense model before, at both lengths."""
    words = []
    for group in groups:
        curves = group.curves().T.groupby("arm").mean().T
        words.append(_reached(curves - curves[group.base].iloc[0])[CONVERTED])
    return _by_length(groups, words)


@_from_study(MODEL)
def model_behind(groups: list[report.Group]) -> str:
    """State after how many tokens dense attention has the final loss of NSA, at both lengths."""
    words = []
    for group in groups:
        curves = group.curves().T.groupby("arm").mean().T
        words.append(_reached(curves - curves[CONVERTED].iloc[-1])[group.base])
    return _by_length(groups, words)


@_from_study(MODEL)
def model_speed(groups: list[report.Group]) -> str:
    """State how many times faster NSA trains than dense attention, at both lengths."""
    speeds = (group.facts()["speed.tokens_per_s"] for group in groups)
    words = [f"{own[CONVERTED] / own[group.base]:.2f} times" for group, own in zip(groups, speeds)]
    return _by_length(groups, words)


def shared_keys(results: Results) -> str:
    """State what the blocks hold that shared keys select, while phi learns; the run was cut."""
    path = study_results(results.folder) / "smollm2_8k_shared-seed0.json"
    if not path.exists():
        return PENDING
    entries = json.loads(path.read_text(encoding="utf-8"))["evaluations"]
    start, end = (f"{entries[n]['selected']:.0%}" for n in (0, -1))
    millions = entries[-1]["tokens"] / 1e6
    return (
        f"{start} to {end} after {millions:.0f} M tokens (random ones: {entries[-1]['random']:.0%})"
    )


@_from_study(MODEL)
def losing(groups: list[report.Group]) -> str:
    """Tabulate how far each conversion ends above dense attention, and what its blocks hold."""
    rows = []
    for group in groups:
        entries = group.entries("evaluations").set_index(["arm", "tokens"])
        losses = report.positions(entries["by_position"])
        ends = {losses.columns[0]: "first", losses.columns[-1]: "last"}
        for arm in entries.index.unique("arm").drop(group.base):
            above = (losses.loc[arm] - losses.loc[group.base]).iloc[-1]
            masses = [
                f"{entry['selected']:.0%}, {entry['random']:.0%}"
                for _, entry in entries.loc[arm].iloc[[0, -1]].iterrows()
            ]
            rows.append(
                [
                    *(tokens(group.plan["row"]), arm),
                    *(f"{above[end]:+.3f} ({end})" for end in ends),
                    *masses,
                ]
            )
    columns = [f"above dense, {place} tokens" for place in ends.values()]
    columns += [f"mass {when}: selected, random" for when in ("before", "after")]
    return table(["rows of", "attention", *columns], rows)


@_from_file(MINIMAX)
def minimax(document: Any) -> str:
    """State the largest differences of the loss to that of "eager"."""
    trainings = ("nsa_blocks", "control", "nsa_blocks_replayed")
    own, moved, replayed = (f"{document[name]['largest_difference']:.1e}" for name in trainings)
    return (
        f'{own} for "nsa_blocks", {moved} for another run of "eager" whose initial weights are'
        f' moved by one rounding, and {replayed} for "nsa_blocks" with the choices of "eager", on'
        f" one {_device(document)}"
    )


def _plot(source: Any, text: str) -> Callable[[Results], str]:
    reader = _from_file(source) if isinstance(source, str) else _from_study(source)
    return reader(lambda _: f"![{text}](../images/{IMAGES[source]})")


LEARNING: dict[str, Callable[[Results], str]] = {
    "study-small": small,
    "study-small-answer": _from_study(SMALL)(_answer),
    "study-small-plot": _plot(SMALL, "Loss over tokens, and its difference by position"),
    "study-large": large,
    "study-large-answer": _from_study(LARGE)(_answer),
    "study-large-speed": large_speed,
    "study-large-short": _from_study(SHORT)(_answer),
    "study-large-seeds": large_seeds,
    "study-large-fast": large_fast,
    "study-large-plot": _plot(LARGE, "Loss over tokens, and its difference by position"),
    "study-model": model,
    "study-model-answer": _model_answer(CONVERTED),
    "study-model-answer-separate": _model_answer(SEPARATE),
    "study-model-shared": shared_keys,
    "study-model-start": model_start,
    "study-model-repaid": model_repaid,
    "study-model-behind": model_behind,
    "study-model-speed": model_speed,
    "study-model-plot": _plot(MODEL, "Loss over tokens, and recalled values by distance"),
    "study-losing": losing,
    "hf-minimax": minimax,
    "hf-minimax-plot": _plot(
        MINIMAX, "Losses of both implementations, and the differences to eager"
    ),
}
