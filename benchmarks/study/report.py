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

import tomllib
from matplotlib.figure import Figure

from nsa_bench.render.style import GREYS, INK, NSA_COLOURS, EndLabel, draw, label_ends
from nsa_bench.render.words import tokens as length_words

ARMS = {
    "dense": ("dense", GREYS[2]),
    "dense_wide": ("dense, wide MLP", INK),
    "nsa": ("NSA", NSA_COLOURS[0]),
    "nsa_shared_kv": ("NSA, shared K/V", NSA_COLOURS[2]),
    "nsa_mean": ("NSA, means", GREYS[1]),
    "window": ("window alone", NSA_COLOURS[3]),
    "window_cmp": ("window, compressed", NSA_COLOURS[4]),
    "random_blocks": ("random blocks", NSA_COLOURS[1]),
}
BASELINE, BASE = "dense_wide", ARMS["dense_wide"][0]
MASS = {"best": INK, "selected": NSA_COLOURS[0], "random": NSA_COLOURS[1], "keys": GREYS[2]}
PLAN = tomllib.loads(Path(__file__).with_name("arms.toml").read_text())
SEEDS, SWEEP = PLAN["training"]["seeds"], PLAN["sweep"]
_WIDTH = 7.3  # inches; 800 pixels
_DRAWN = 0.01  # a task has a picture if some arm has this share of right answers
Run = dict[str, Any]
Arms = dict[str, list[Run]]  # the finished runs of each arm that has any, in the order of ARMS


def read(folder: Path) -> tuple[Arms, list[Run], list[str]]:
    """Return the finished runs of arms and of the sweep, and a line on each other run."""
    names = [f"{arm}-seed{seed}" for arm, seed in itertools.product(ARMS, SEEDS)]
    names += [f"sweep-{a}-{r:g}" for a, r in itertools.product(SWEEP["arms"], SWEEP["rates"])]
    arms: Arms = {}
    sweep, lines = [], []
    for name in names:
        file = folder / f"{name}.json"
        run: Run = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        if not run:
            lines.append(f"{name}: no result file")
        elif not run["complete"]:
            reached = "before its first evaluation"
            if run["evaluations"]:
                tokens = f"{last(run, 'tokens') / 1e6:.1f} M"
                reached = f"after {tokens} tokens, at a loss of {last(run):.4f}"
            lines.append(f"{name}: stopped {reached}: {run['ended']}")
        elif run["purpose"] == "sweep":
            sweep.append(run)
        else:
            arms.setdefault(run["arm"], []).append(run)
    return arms, sweep, lines


def last(run: Run, field: str = "loss") -> Any:
    """Return a field of the last evaluation."""
    return run["evaluations"][-1][field]


def curve(runs: list[Run]) -> list[tuple[int, list[float]]]:
    """Return the tokens of each evaluation, and the loss of each run there."""
    evaluations = zip(*(run["evaluations"] for run in runs))
    return [(of_runs[0]["tokens"], [e["loss"] for e in of_runs]) for of_runs in evaluations]


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


def recalled(run: Run, field: str = "correct") -> dict[str, float]:
    """Return the mean of "correct" or "loss" over lengths and depths, by task."""
    values: dict[str, list[float]] = {}
    for entry in run["recall"]:
        values.setdefault(entry["task"], []).append(entry[field])
    return {task: fmean(of_task) for task, of_task in values.items()}


def with_error(values: Sequence[float]) -> str:
    """Format a mean and its standard error."""
    error = f"{stdev(values) / math.sqrt(len(values)):.4f}" if len(values) > 1 else "unknown"
    return f"{fmean(values):+.4f} ± {error}"


def cells(runs: list[Run], base: list[Run]) -> list[dict[str, str]]:
    """Return the cells of an arm by column, in the tables of loss, positions, cost and recall."""
    losses, by_seed = [last(run) for run in runs], {run["seed"]: run for run in base}
    error = fmean(last(run, "standard_error") for run in runs)
    loss = {
        "parameters": f"{runs[0]['parameters'] / 1e6:.1f} M",
        "seeds": f"{len(runs)} of {len(SEEDS)}",
        "tokens": f"{runs[0]['tokens'] / 1e6:.1f} M",
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
    for task in recalled(runs[0]):
        right = [recalled(run)[task] for run in runs]
        nats = fmean(recalled(run, "loss")[task] for run in runs)
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
    rows: dict[str, dict[str, str]] = {arm: {} for arm in SWEEP["arms"]}
    for run in sweep:
        lowest = min(last(other) for other in sweep if other["arm"] == run["arm"])
        bold = "**" if last(run) == lowest else ""
        rows[run["arm"]][f"{run['learning_rate']:g}"] = f"{bold}{last(run):.4f}{bold}"
    return rows


def loss_figure(arms: Arms) -> Figure:
    """Draw the loss over tokens, and its difference to the baseline by position."""
    figure = Figure(figsize=(_WIDTH, 3.3))
    over_tokens = figure.add_axes((0.055, 0.15, 0.335, 0.74))
    by_position = figure.add_axes((0.715, 0.15, 0.28, 0.74))
    base = {run["seed"]: positions(run) for run in arms.get(BASELINE, [])}
    ends, tops = [], []
    for index, (arm, runs) in enumerate(arms.items()):
        label, colour = ARMS[arm]
        points = [(n / 1e6, fmean(losses), min(losses), max(losses)) for n, losses in curve(runs)]
        points = points[len(points) // 3 :]  # before, losses fall alike, and would fill the picture
        tokens, means, lows, highs = zip(*points)
        over_tokens.plot(tokens, means, color=colour, lw=1.4)
        over_tokens.fill_between(tokens, lows, highs, color=colour, alpha=0.25, lw=0)
        ends.append(EndLabel(f"{label}  {means[-1]:.3f}", colour, points[-1][:2], means[-1]))
        tops.append(means[0])
        pairs = [(positions(run), base[run["seed"]]) for run in runs if run["seed"] in base]
        for place, name in enumerate(positions(runs[0]) if pairs else ()):
            values = [own[name] - other[name] for own, other in pairs]
            x = place + 0.7 * ((index + 0.5) / len(arms) - 0.5)
            by_position.plot([x, x], [min(values), max(values)], color=colour, lw=1.4)
            by_position.plot(x, fmean(values), "o", color=colour, ms=3.5)
    names = list(positions(runs[0]))
    over_tokens.set(ylim=(None, max(tops)), title="Held-out loss, nats per token")
    over_tokens.set(xlim=(tokens[0], None), xlabel="tokens, millions")
    by_position.set(xticks=range(len(names)), xticklabels=names, title=f"Above {BASE}")
    by_position.set(xlabel="position in the row, tokens")
    by_position.axhline(0, color=INK, lw=1)
    for axes in (over_tokens, by_position):
        axes.grid()
    label_ends(over_tokens, ends)
    return figure


def recall_figure(arms: Arms, task: str) -> Figure:
    """Draw the share of right answers by length and depth, one map for each arm."""
    figure = Figure(figsize=(_WIDTH, 4.2), layout="constrained")
    grid = figure.subplots(2, 4, sharex=True, sharey=True)
    for axes in grid.flat[len(arms) :]:
        axes.set_visible(False)
    for axes, (arm, runs) in zip(grid.flat, arms.items()):
        entries = [entry for run in runs for entry in run["recall"] if entry["task"] == task]
        lengths, depths = (sorted({entry[n] for entry in entries}) for n in ("length", "depth"))
        shares: list[list[float]] = [[0.0] * len(depths) for _ in lengths]
        for e in entries:
            y, x = lengths.index(e["length"]), depths.index(e["depth"])
            shares[y][x] += e["correct"] / len(runs)
        axes.imshow(shares, cmap="Blues", vmin=0, vmax=1, aspect="auto")
        for y, x in itertools.product(range(len(lengths)), range(len(depths))):
            colour = "white" if shares[y][x] > 0.55 else INK
            axes.text(x, y, f"{100 * shares[y][x]:.0f}", ha="center", va="center", color=colour)
        axes.set_xticks(range(len(depths)), [f"{100 * depth:.0f}" for depth in depths])
        axes.set_yticks(range(len(lengths)), [length_words(length) for length in lengths])
        axes.set_title(ARMS[arm][0], fontsize=9)
        axes.tick_params(length=0)
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


def page(arms: Arms, sweep: list[Run], missing: list[str]) -> tuple[str, list[str]]:
    """Return the report as Markdown, and the tasks of recall whose pictures it shows."""
    rows = {arm: cells(runs, arms.get(BASELINE, [])) for arm, runs in arms.items()}
    loss, position, cost, recall = (
        table({arm: rows[arm][i] if arm in rows else {} for arm in ARMS}) for i in range(4)
    )
    runs = list(itertools.chain(*arms.values()))
    facts = {
        f"{run['machine']['device']}, torch {run['torch']}, rows of {run['row']} tokens,"
        f" {run['corpus']['unique_tokens'] / 1e6:.1f} M unique training tokens,"
        f" {run['corpus']['epochs']:.2f} epochs, {last(run, 'documents')} held-out documents"
        for run in runs
    }
    best = {task: max(recalled(run)[task] for run in runs) for task in recalled(runs[0])}
    drawn = [task for task, share in best.items() if share >= _DRAWN]
    others = ", ".join(task for task in best if task not in drawn)
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
        *(f"![{task} by length and depth](recall_{task}.svg)" for task in drawn),
        f"No run answers {_DRAWN:.0%} of these: {others}." * bool(others),
        "## Selected blocks",
        "The attention mass in the selected blocks, in as many random ones and in the best ones;"
        " `keys` is their share of all keys.",
        "![Attention mass by layer](mass.svg)",
        "## Learning rates",
        "Final losses of short runs, the lowest of each arm in bold:",
        table(sweep_cells(sweep)),
    ]
    return "\n\n".join(filter(None, parts)) + "\n", drawn


def main() -> None:
    """Write the report of the folder that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="the folder with the result files")
    parser.add_argument("--out", type=Path, required=True, help="the folder of the report")
    options = parser.parse_args()
    arms, sweep, missing = read(options.folder)
    if not arms:
        parser.error(f"{options.folder} has no finished run of an arm: start run.py first")
    text, drawn = page(arms, sweep, missing)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "report.md").write_text(text, encoding="utf-8")
    figures = {"loss": loss_figure, "mass": mass_figure}
    figures |= {f"recall_{task}": functools.partial(recall_figure, task=task) for task in drawn}
    for name, figure in figures.items():
        (options.out / f"{name}.svg").write_bytes(draw(functools.partial(figure, arms), "svg"))


if __name__ == "__main__":
    main()
