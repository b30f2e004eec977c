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
from statistics import fmean
from typing import Any

from figure_pieces import nearest
from figure_tables import PENDING, Results, short_device, table, tokens

sys.path.insert(0, str(Path(__file__).with_name("study")))
import report

MINIMAX = "hf_minimax.json"
_KINDS = ("blocks", "experts")
TRAININGS = {
    "eager": "eager",
    "nsa_blocks": "nsa_blocks",
    "control": "eager, weights moved by one rounding",
    "nsa_blocks_replayed": "nsa_blocks, choices replayed",
    "control_replayed": "eager, weights moved, choices replayed",
}
SMALL, MODEL = ("small",), ("smollm2_8k", "smollm2_32k")  # groups of the study
WINDOW, BLOCK = report.NSAConfig.window_size, report.NSAConfig.select_block_size
IMAGES = {SMALL: "learning_small.svg", MODEL: "learning_model.svg", MINIMAX: "learning_minimax.svg"}


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


def groups_of(folder: Path, names: Sequence[str]) -> list[report.Group]:
    """Return groups of the study's arms; [] if one has no finished run of its baseline.

    Args:
        folder: The folder of a GPU's results; those of the study lie beside it.
        names: Names of groups in arms.toml.
    """
    results = folder.parent.parent / "study" / "results"
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


def _values(entries: Any) -> Any:
    """Return the entries of recall that ask for the value of a definition."""
    return entries[entries["task"] == "key_value"]


def _far_values(group: report.Group) -> Any:
    """Return the share of values recalled from beyond the window, by arm, in words."""
    entries = _values(group.recall())
    shares = entries[entries["distance"] > WINDOW].groupby("arm")["correct"].mean()
    return shares.map("{:.1%}".format)


def _masses(group: report.Group) -> dict[str, str]:
    """Return the mass of the selected blocks and of random ones in words, by arm."""
    layers = group.layers()[["selected", "random"]].groupby("arm").mean()
    return {arm: f"{m['selected']:.0%}, {m['random']:.0%}" for arm, m in layers.iterrows()}


@_from_study(SMALL)
def small(groups: list[report.Group]) -> str:
    """Tabulate the small arms: loss, recall beyond the window, mass of the selected blocks."""
    (group,) = groups
    positions = report.positions(group.final["by_position"])
    far = positions.columns[-1]
    losses = positions[[far]].assign(loss=group.final["loss"])
    above = group.above_base(losses)
    near, far_above = (
        report.with_error(above[name].unstack("seed").drop(group.base)) for name in ("loss", far)
    )
    columns = {
        "loss": group.final["loss"].groupby("arm").mean().map("{:.3f}".format),
        f"above {group.base}": near,
        f"at positions {far}": far_above,
        "values recalled from beyond the window": _far_values(group),
        "mass in the selected blocks, in random ones": _masses(group),
    }
    return table(["attention", *columns], _rows(columns, [*group.labels.values()]))


@_from_study(MODEL)
def model(groups: list[report.Group]) -> str:
    """Tabulate the converted model beside dense attention, at both lengths."""
    rows = []
    for group in groups:
        curves, facts = group.curves().T.groupby("arm").mean().T, group.facts()
        base, others = curves[group.base], curves.drop(columns=group.base)
        early = curves.index[curves.index <= 1.02e6][-1]
        columns = {
            "start": curves.iloc[0].map("{:.3f}".format),
            "1 M": curves.loc[early].map("{:.3f}".format),
            "end": curves.iloc[-1].map("{:.3f}".format),
            "as the start": _reached(others - base.iloc[0]),
            "as dense": _reached(others.sub(base, axis=0)),
            "recall": _far_values(group),
            "speed": facts["speed.tokens_per_s"].map("{:,.0f}".format),
            "keys": facts["keys_per_query"].map("{:,.0f}".format),
        }
        length = tokens(group.plan["row"])
        labels = [label for label in group.labels.values() if label in curves][::-1]
        rows += [[length, *row] for row in _rows(columns, labels)]
    return table(
        [
            *("rows of", "attention", "loss before training", "after 1 M tokens", "at the end"),
            *("as before the conversion after", "as dense attention after"),
            *("values recalled from beyond the window", "training tokens/s", "keys per query"),
        ],
        rows,
    )


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


@_from_study(SMALL)
def small_answer(groups: list[report.Group]) -> str:
    """State the difference of NSA to the baseline of the small arms, over seeds."""
    losses = groups[0].above_base(groups[0].final[["loss"]])["loss"].unstack("seed")
    return str(report.with_error(losses)["NSA"])


@_from_study(MODEL)
def model_answer(groups: list[report.Group]) -> str:
    """State how far NSA is above dense attention at the end, over documents, at both lengths."""
    words = []
    for group in groups:
        losses = report.pd.DataFrame(
            group.final["document_losses"].tolist(), index=group.final.index
        )
        words.append(report.with_error(group.above_base(losses).groupby("arm").mean())["NSA"])
    return _by_length(groups, words)


@_from_study(MODEL)
def model_start(groups: list[report.Group]) -> str:
    """State how far a fresh conversion is above the dense model, at both lengths."""
    curves = (group.curves().T.groupby("arm").mean().T.iloc[0] for group in groups)
    words = [f"{own['NSA'] - own[group.base]:+.3f}" for group, own in zip(groups, curves)]
    return _by_length(groups, words)


@_from_study(MODEL)
def model_repaid(groups: list[report.Group]) -> str:
    """State after how many tokens NSA is as good as the dense model before, at both lengths."""
    words = []
    for group in groups:
        curves = group.curves().T.groupby("arm").mean().T
        words.append(_reached(curves - curves[group.base].iloc[0])["NSA"])
    return _by_length(groups, words)


@_from_study(MODEL)
def model_behind(groups: list[report.Group]) -> str:
    """State after how many tokens dense attention has the final loss of NSA, at both lengths."""
    words = []
    for group in groups:
        curves = group.curves().T.groupby("arm").mean().T
        words.append(_reached(curves - curves["NSA"].iloc[-1])[group.base])
    return _by_length(groups, words)


@_from_study(MODEL)
def model_speed(groups: list[report.Group]) -> str:
    """State how many times faster NSA trains than dense attention, at both lengths."""
    speeds = (group.facts()["speed.tokens_per_s"] for group in groups)
    words = [f"{own['NSA'] / own[group.base]:.2f} times" for group, own in zip(groups, speeds)]
    return _by_length(groups, words)


@_from_study(MODEL)
def starts(groups: list[report.Group]) -> str:
    """Tabulate how near to dense attention each start of a conversion is."""
    columns: dict[str, dict[str, str]] = {}
    labels: list[str] = []
    for group in groups:
        if not group.starts:
            return PENDING
        length = tokens(group.plan["row"])
        frame = report.pd.DataFrame(group.starts).set_index("label")
        losses = report.pd.DataFrame(frame["document_losses"].tolist(), index=frame.index)
        above = (losses - losses.loc["dense"]).drop("dense")
        columns[f"above dense attention, {length}"] = dict(report.with_error(above))
        columns[f"mass in the selected blocks, {length}"] = {
            label: f"{fmean(layer['selected'] for layer in mass):.0%}"
            for label, mass in frame["mass"].items()
            if mass
        }
        labels += [label for label in above.index if label not in labels]
    return table(["start", *columns], _rows(columns, labels))


@_from_study(MODEL)
def losing(groups: list[report.Group]) -> str:
    """Tabulate by tokens how far NSA is above dense attention, and what its blocks hold."""
    rows = []
    for group in groups:
        entries = group.entries("evaluations").set_index(["arm", "tokens"])
        above = report.positions(entries["by_position"])
        above = above.loc["NSA"] - above.loc[group.base]
        first, last = above.columns[0], above.columns[-1]
        last_tokens = above.index[-1]
        wanted = [n for n in (0, 5e5, 5e6) if n < last_tokens]
        shown = {min(above.index, key=lambda t: abs(t - n)) for n in wanted}
        for tokens_now in sorted(shown | {last_tokens}):
            now = entries.loc["NSA", tokens_now]
            rows.append(
                [
                    tokens(group.plan["row"]),
                    f"{tokens_now / 1e6:.2g} M",
                    f"{above.loc[tokens_now, first]:+.3f} ({first})",
                    f"{above.loc[tokens_now, last]:+.3f} ({last})",
                    f"{now['selected']:.0%}",
                    f"{now['random']:.0%}",
                ]
            )
    columns = ["above dense, first positions", "above dense, last positions"]
    masses = ["mass in the selected blocks", "in random ones"]
    return table(["rows of", "tokens", *columns, *masses], rows)


@_from_study(MODEL)
def recalled(groups: list[report.Group]) -> str:
    """Tabulate the recall of values before training and at the end, by their place.

    Rows whose blocks are all selected do not count.
    """
    rows = []
    for group in groups:
        if not group.starts:
            return PENDING
        before = [
            {**entry, "arm": start["label"]}
            for start in group.starts
            for entry in start.get("recall", ())
        ]
        at_end = group.recall()
        for when, entries in (("before", report.pd.DataFrame(before)), ("at the end", at_end)):
            values = _values(entries)
            values = values[values["length"] > report.NSAConfig.num_selected_blocks * BLOCK]
            far = values["length"] * (1 - values["depth"]) >= WINDOW
            first = values["depth"] == 0
            places = (values[~far], values[far & first], values[far & ~first])
            shares = [place.groupby("arm")["correct"].mean() for place in places]
            for arm in (group.base, "NSA"):
                cells = (f"{share[arm]:.0%}" for share in shares)
                rows.append([tokens(group.plan["row"]), arm, when, *cells])
    places = ["in the window", "in the first block", "elsewhere"]
    return table(["rows of", "attention", "training", *places], rows)


@_from_study(MODEL)
def gates(groups: list[report.Group]) -> str:
    """State the gates of cmp, sel and win at the end, with the lowest and the highest layer."""
    words = []
    for group in groups:
        own = group.layers().loc["NSA"][[*report.GATES]]
        gates = [f"{g.mean():.2f} ({g.min():.2f} to {g.max():.2f})" for _, g in own.items()]
        words.append(", ".join(gates))
    return _by_length(groups, words)


@_from_file(MINIMAX)
def minimax(document: Any) -> str:
    """Tabulate the losses of each training, and its differences to "eager"."""
    choices = sum(document["choices_per_step"].values()) * len(document["eager"]["loss"])
    rows = []
    for training, label in TRAININGS.items():
        trained = document[training]
        losses = [f"{trained['loss'][step]:.3f}" for step in (0, -1)]
        difference = changed = "-"
        if training != "eager":
            difference = f"{trained['largest_difference']:.1e}"
        if training in ("control", "nsa_blocks"):  # the others make the choices of "eager"
            count = sum(sum(trained[f"changed_{kind}"]) for kind in _KINDS)
            changed = f"{100 * count / choices:.2g}%"
        rows.append([label, *losses, difference, changed])
    last = f"loss of step {len(document['eager']['loss'])}"
    columns = ["training", "loss of step 1", last, "largest difference to eager"]
    return table([*columns, "choices unlike those of eager"], rows)


@_from_file(MINIMAX)
def minimax_gradients(document: Any) -> str:
    """State how much the gradients differ at most, name by name."""
    start, end = document["gradients_at_start"], document["gradients_at_end"]
    return (
        f"{start['difference']:.1e} at the start and {end['difference']:.1e} after the training,"
        f" the largest of {end['parameters']} parameters, on one {_device(document)}"
    )


def _plot(source: Any, text: str) -> Callable[[Results], str]:
    reader = _from_file(source) if isinstance(source, str) else _from_study(source)
    return reader(lambda _: f"![{text}](../images/{IMAGES[source]})")


LEARNING: dict[str, Callable[[Results], str]] = {
    "study-small": small,
    "study-small-answer": small_answer,
    "study-small-plot": _plot(SMALL, "Loss over tokens, and its difference by position"),
    "study-model": model,
    "study-model-answer": model_answer,
    "study-model-start": model_start,
    "study-model-repaid": model_repaid,
    "study-model-behind": model_behind,
    "study-model-speed": model_speed,
    "study-model-plot": _plot(MODEL, "Loss over tokens, and recalled values by distance"),
    "study-starts": starts,
    "study-losing": losing,
    "study-recalled": recalled,
    "study-gates": gates,
    "hf-minimax": minimax,
    "hf-minimax-gradients": minimax_gradients,
    "hf-minimax-plot": _plot(
        MINIMAX, "Losses of both implementations, and the differences to eager"
    ),
}
