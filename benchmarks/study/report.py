"""Write the tables and pictures of the study from the result files of run.py.

    python benchmarks/study/report.py benchmarks/study/results --out build/study

The folder gets report.md and its pictures. A run that is missing or did not finish is named there,
and is not part of any mean.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from matplotlib.figure import Figure

from nsa_bench.render.style import GREYS, INK, NSA_COLOURS, EndLabel, draw, label_ends
from nsa_bench.render.words import tokens as length_words
from nsa_core.errors import InvalidInput

ARMS = {
    "dense": ("dense", GREYS[2]),
    "dense_wide": ("dense, wide MLP", INK),
    "nsa": ("NSA", NSA_COLOURS[0]),
    "nsa_shared_kv": ("NSA, shared K/V", NSA_COLOURS[2]),
    "window": ("window alone", NSA_COLOURS[3]),
    "window_cmp": ("window, compressed", NSA_COLOURS[4]),
    "random_blocks": ("random blocks", NSA_COLOURS[1]),
}
BASELINE, SEEDS, SWEPT, RATES = "dense_wide", (0, 1, 2), ("dense", "nsa"), 3
BASE = ARMS[BASELINE][0]
MASS = {"best": INK, "selected": NSA_COLOURS[0], "random": NSA_COLOURS[1], "keys": GREYS[2]}
_WIDTH = 7.3  # inches; 800 pixels
Run = dict[str, Any]
Arms = dict[str, list[Run]]  # the finished runs of each arm that has any, in the order of ARMS


def read(folder: Path) -> tuple[Arms, list[Run], list[str]]:
    """Return the finished runs of arms and of the sweep, and a line on each other run.

    Raises:
        InvalidInput: A file is no result of the study, or the runs cannot be compared.
    """
    runs: dict[str, Run] = {}
    for path in sorted(folder.glob("*.json")):
        try:
            run = runs[path.stem] = json.loads(path.read_text(encoding="utf-8"))
            got = [run.get(fact) for fact in ("kind", "schema_version", "arm")]
        except (ValueError, AttributeError):
            got = ["no JSON object"]
        if got[:2] != ["nsa-study", 1] or got[2] not in ARMS:
            raise InvalidInput(
                f"{path}: expected kind nsa-study, schema_version 1, arm in {', '.join(ARMS)};"
                f" got {', '.join(map(str, got))}"
            )
    of_arms = {(r["arm"], r["seed"]): r for r in runs.values() if r["purpose"] == "arm"}
    sweep = [run for run in runs.values() if run["purpose"] == "sweep"]
    absent = [key for key in itertools.product(ARMS, SEEDS) if key not in of_arms]
    lines = [f"{arm}, seed {seed}: no result file" for arm, seed in absent]
    for arm in SWEPT:
        if (count := sum(run["arm"] == arm for run in sweep)) < RATES:
            lines.append(f"{arm}, sweep: {count} of {RATES} learning rates")
    for name, run in runs.items():
        if not run["complete"]:
            reached = "stopped before its first evaluation"
            if run["evaluations"]:
                reached = f"stopped after {millions(last(run, 'tokens'))} tokens"
                reached += f", at a loss of {last(run):.4f}"
            lines.append(f"{name}.json: {reached}: {run['ended']}")
    finished = [run for _, run in sorted(of_arms.items()) if run["complete"]]
    data = {(r["corpus"]["sha256"], r["row"], len(last(r, "document_losses"))) for r in finished}
    if len(data) != 1:
        raise InvalidInput(
            f"{folder}: expected finished runs of arms with one corpus, row and number of held-out"
            f" documents, got {sorted(data) or 'no finished run'}"
        )
    arms = {arm: [run for run in finished if run["arm"] == arm] for arm in ARMS}
    arms = {arm: own for arm, own in arms.items() if own}
    return arms, [run for run in sweep if run["complete"]], lines


def last(run: Run, field: str = "loss") -> Any:
    """Return a field of the last evaluation."""
    return run["evaluations"][-1][field]


def millions(count: float) -> str:
    """Format 98304000 as 98.3 M."""
    return f"{count / 1e6:.1f} M"


def curve(runs: list[Run]) -> list[tuple[int, list[float]]]:
    """Return the tokens at which all runs have a loss, and the loss of each run."""
    losses = [{e["tokens"]: e["loss"] for e in run["evaluations"]} for run in runs]
    shared = sorted(set.intersection(*map(set, losses)))
    return [(tokens, [loss[tokens] for loss in losses]) for tokens in shared]


def share_to(runs: list[Run], loss: float) -> float | None:
    """Return the interpolated share of training until the mean loss is at most ``loss``."""
    points = [(tokens / float(runs[0]["tokens"]), fmean(losses)) for tokens, losses in curve(runs)]
    for (before, high), (after, low) in itertools.pairwise([points[0], *points]):
        if low <= loss:
            return before + (after - before) * ((high - loss) / (high - low) if high > low else 1)
    return None


def positions(run: Run) -> dict[str, float]:
    """Return the final loss by range of positions, such as "1k-4k"."""
    ranges = last(run, "by_position")
    return {f"{length_words(r['first'])}-{length_words(r['last'])}": r["loss"] for r in ranges}


def recalled(runs: list[Run], task: str, field: str = "correct") -> dict[tuple[int, float], float]:
    """Return the mean over seeds of "correct" or "loss", by length and depth."""
    cells: dict[tuple[int, float], list[float]] = {}
    for entry in itertools.chain(*(run["recall"] for run in runs)):
        if entry["task"] == task:
            cells.setdefault((entry["length"], entry["depth"]), []).append(entry[field])
    return {cell: fmean(values) for cell, values in sorted(cells.items())}


def tasks(runs: list[Run]) -> list[str]:
    """Return the tasks of recall."""
    return list(dict.fromkeys(entry["task"] for entry in runs[0]["recall"]))


def with_error(values: Sequence[float]) -> str:
    """Format a mean and its standard error."""
    error = f"{stdev(values) / math.sqrt(len(values)):.4f}" if len(values) > 1 else "unknown"
    return f"{fmean(values):+.4f} ± {error}"


def cells(runs: list[Run], base: list[Run]) -> list[dict[str, str]]:
    """Return the cells of an arm by column, in the tables of loss, positions, cost and recall."""
    losses, by_seed = [last(run) for run in runs], {run["seed"]: run for run in base}
    error = fmean(last(run, "standard_error") for run in runs)
    loss = {
        "parameters": millions(runs[0]["parameters"]),
        "seeds": f"{len(runs)} of {len(SEEDS)}",
        "tokens": millions(runs[0]["tokens"]),
        "final loss": f"{fmean(losses):.4f}",
        "lowest, highest seed": f"{min(losses):.4f}, {max(losses):.4f}",
        "standard error over documents": f"{error:.4f}",
    }
    pairs = [(run, by_seed[run["seed"]]) for run in runs if run["seed"] in by_seed]
    if pairs and runs is not base:
        both = [[last(run, "document_losses") for run in pair] for pair in pairs]
        differences = zip(*([a - b for a, b in zip(*pair)] for pair in both))
        loss[f"difference to {BASE}, over documents"] = with_error([*map(fmean, differences)])
        loss["over seeds"] = with_error([last(run) - last(other) for run, other in pairs])
    ranges = [positions(run) for run in runs]
    speed = {fact: fmean(run["speed"][fact] for run in runs) for fact in runs[0]["speed"]}
    cost = {
        "learning rate": f"{runs[0]['learning_rate']:g}",
        "tokens/s": f"{speed['tokens_per_s']:,.0f}",
        "peak memory, GiB": f"{speed['memory_bytes'] / 2**30:.1f}",
        "GPU-hours": f"{speed['gpu_hours']:.3f}",
    }
    if base:
        share = share_to(runs, fmean(map(last, base)))
        hours = f"{speed['gpu_hours'] * share:.3f}" if share else "not reached"
        cost[f"GPU-hours to the final loss of {BASE}"] = hours
    recall = {}
    for task in tasks(runs):
        right = [fmean(recalled([run], task).values()) for run in runs]
        nats = fmean(recalled(runs, task, "loss").values())
        recall[task] = f"{fmean(right):.1%} ({min(right):.1%} to {max(right):.1%}), {nats:.2f}"
    return [loss, {n: f"{fmean(r[n] for r in ranges):.4f}" for n in ranges[0]}, cost, recall]


def table(rows: dict[str, dict[str, str]]) -> str:
    """Return a Markdown table of the cells of each arm by column; "-" where an arm has none."""
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    lines = [["arm", *columns], ["---"] * (len(columns) + 1)]
    for arm, row in rows.items():
        lines.append([ARMS[arm][0], *(row.get(column, "-") for column in columns)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def sweep_cells(sweep: list[Run]) -> dict[str, dict[str, str]]:
    """Return the final loss of each arm by learning rate, the lowest in bold."""
    rows: dict[str, dict[str, str]] = {arm: {} for arm in SWEPT}
    for run in sorted(sweep, key=lambda run: float(run["learning_rate"])):
        lowest = min(last(other) for other in sweep if other["arm"] == run["arm"])
        loss = f"**{last(run):.4f}**" if last(run) == lowest else f"{last(run):.4f}"
        rows[run["arm"]][f"{run['learning_rate']:g}"] = loss
    return rows


def loss_figure(arms: Arms) -> Figure:
    """Draw the loss over tokens, and its difference to the baseline by position."""
    figure = Figure(figsize=(_WIDTH, 3.3))
    over_tokens = figure.add_axes((0.075, 0.15, 0.3, 0.74))
    by_position = figure.add_axes((0.745, 0.15, 0.25, 0.74))
    base = {run["seed"]: positions(run) for run in arms.get(BASELINE, [])}
    ends, starts = [], []
    for index, (arm, runs) in enumerate(arms.items()):
        label, colour = ARMS[arm]
        points = [(n / 1e6, fmean(losses), min(losses), max(losses)) for n, losses in curve(runs)]
        tokens, means, lows, highs = zip(*points)
        over_tokens.plot(tokens, means, color=colour, lw=1.4)
        over_tokens.fill_between(tokens, lows, highs, color=colour, alpha=0.25, lw=0)
        ends.append(EndLabel(f"{label}  {means[-1]:.3f}", colour, points[-1][:2], means[-1]))
        starts.append(next(point[:2] for point in points if point[0] >= tokens[-1] / 3))
        pairs = [(positions(run), base[run["seed"]]) for run in runs if run["seed"] in base]
        for place, name in enumerate(positions(runs[0]) if pairs else ()):
            values = [own[name] - other[name] for own, other in pairs]
            x = place + 0.7 * ((index + 0.5) / len(arms) - 0.5)
            by_position.plot([x, x], [min(values), max(values)], color=colour, lw=1.4)
            by_position.plot(x, fmean(values), "o", color=colour, ms=3.5)
    names = list(positions(runs[0]))
    left, top = min(n for n, _ in starts), max(mean for _, mean in starts)  # where arms differ
    over_tokens.set(xlim=(left, None), ylim=(None, top), title="Held-out loss")
    over_tokens.set(xlabel="tokens, millions", ylabel="nats per token")
    by_position.set(xticks=range(len(names)), xticklabels=names, title="Loss by position")
    by_position.set(xlabel="position in the row, tokens", ylabel=f"nats per token above {BASE}")
    by_position.axhline(0, color=INK, lw=1)
    for axes in (over_tokens, by_position):
        axes.grid()
    label_ends(over_tokens, ends)
    return figure


def recall_figure(arms: Arms, task: str) -> Figure:
    """Draw the share of right answers by length and depth, one map for each arm."""
    figure = Figure(figsize=(_WIDTH, 4.2), layout="constrained")
    grid = figure.subplots(2, 4, sharex=True, sharey=True)
    for axes, (arm, runs) in zip(grid.flat, arms.items()):
        shares = recalled(runs, task)
        lengths, depths = (sorted(set(values)) for values in zip(*shares))
        rows = [[shares.get((length, depth), math.nan) for depth in depths] for length in lengths]
        axes.imshow(rows, cmap="Blues", vmin=0, vmax=1, aspect="auto")
        for y, x in itertools.product(range(len(lengths)), range(len(depths))):
            colour = "white" if rows[y][x] > 0.55 else INK
            axes.text(x, y, f"{100 * rows[y][x]:.0f}", ha="center", va="center", color=colour)
        axes.set_xticks(range(len(depths)), [f"{100 * depth:.0f}" for depth in depths])
        axes.set_yticks(range(len(lengths)), [length_words(length) for length in lengths])
        axes.set_title(ARMS[arm][0], fontsize=9)
        axes.tick_params(length=0)
    for axes in grid.flat[len(arms) :]:
        axes.set_visible(False)
    figure.suptitle(f"{task}: right answers, %", weight="bold")
    figure.supxlabel("depth, % of the prompt")
    figure.supylabel("length, tokens")
    return figure


def mass_figure(arms: Arms) -> Figure:
    """Draw the share of dense attention's mass by layer and kind of blocks."""
    by_arm = {arm: [e for run in runs for e in run.get("mass") or ()] for arm, runs in arms.items()}
    shown = {arm: entries for arm, entries in by_arm.items() if entries}
    figure = Figure(figsize=(_WIDTH, 2.8), layout="constrained")
    panels = figure.subplots(1, max(1, len(shown)), squeeze=False, sharey=True)
    for axes, (arm, entries) in zip(panels.flat, shown.items()):
        layers = sorted({entry["layer"] for entry in entries})
        for kind, colour in MASS.items():
            means = [fmean(e[kind] for e in entries if e["layer"] == layer) for layer in layers]
            axes.plot(layers, means, "o-", color=colour, ms=3.5, lw=1.4, label=kind)
        axes.set(xlabel="layer", ylim=(0, 1), title=ARMS[arm][0])
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
        axes.grid()
    panels[0, 0].set_ylabel("share of attention mass")
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside right center")
    return figure


def page(arms: Arms, sweep: list[Run], missing: list[str]) -> str:
    """Return the report as Markdown."""
    rows = {arm: cells(runs, arms.get(BASELINE, [])) for arm, runs in arms.items()}
    loss, position, cost, recall = (
        table({arm: rows[arm][i] if arm in rows else {} for arm in ARMS}) for i in range(4)
    )
    runs = list(itertools.chain(*arms.values()))
    facts = {
        f"{run['machine']['device']}, torch {run['torch']}, rows of"
        f" {run['row']} tokens, {millions(run['corpus']['unique_tokens'])} unique training tokens,"
        f" {run['corpus']['epochs']:.2f} epochs, {last(run, 'documents')} held-out documents"
        for run in runs
    }
    parts = [
        "# Dense attention and NSA at equal tokens",
        "; ".join(sorted(facts)),
        "## Runs that are missing or did not finish",
        "\n".join(f"- {line}" for line in missing) or "None.",
        "## Held-out loss",
        f"![Loss over tokens, and its difference to {BASE} by position](loss.svg)",
        "Losses are in nats per token. Lines and dots are means over seeds; bands and bars reach"
        " from the lowest seed to the highest. A difference is between runs with the same seed, and"
        " has its standard error, over documents or over seeds.",
        *(loss, "By position in the row:", position, "## Cost", cost, "## Recall"),
        "Right answers (lowest to highest seed), and nats per answer token; means over lengths and"
        " depths:",
        recall,
        *(f"![{task} by length and depth](recall_{task}.svg)" for task in tasks(runs)),
        "## Selected blocks",
        "The attention mass in the selected blocks, in as many random ones and in the best ones;"
        " `keys` is their share of all keys.",
        "![Attention mass by layer](mass.svg)",
        "## Learning rates",
        "Final losses of short runs, the lowest of each arm in bold:",
        table(sweep_cells(sweep)),
    ]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Write the report of the folder that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="the folder with the result files")
    parser.add_argument("--out", type=Path, required=True, help="the folder of the report")
    options = parser.parse_args()
    try:
        arms, sweep, missing = read(options.folder)
    except InvalidInput as error:
        parser.error(str(error))
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "report.md").write_text(page(arms, sweep, missing), encoding="utf-8")
    figures = {"loss": loss_figure, "mass": mass_figure}
    for task in tasks(next(iter(arms.values()))):
        figures[f"recall_{task}"] = functools.partial(recall_figure, task=task)
    for name, figure in figures.items():
        (options.out / f"{name}.svg").write_bytes(draw(functools.partial(figure, arms), "svg"))


if __name__ == "__main__":
    main()
