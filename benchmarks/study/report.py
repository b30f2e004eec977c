"""Write the tables and pictures of the study from the result files of run.py.

    python benchmarks/study/report.py benchmarks/study/results --out build/study

The folder gets report.md and its pictures. A run that is missing or did not finish is named there,
and is not part of any mean.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import typer
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from matplotlib.figure import Figure
from run import PLAN, all_runs

from nsa_bench.render.style import GREYS, INK, NSA_COLOURS, draw
from nsa_bench.render.words import tokens as length_words
from nsa_core import NSAConfig

MASS = {
    "best": INK,
    "selected": NSA_COLOURS[0],
    "random": NSA_COLOURS[1],
    "window": NSA_COLOURS[2],
    "keys": GREYS[2],
}
GATES = {"gates.cmp": "compressed", "gates.sel": "selected", "gates.win": "window"}
_WIDTH = 7.3  # inches; 800 pixels
Result = dict[str, Any]  # a result file


def read(folder: Path) -> tuple[list[Result], list[str]]:
    """Return the finished runs, and a line on each other run of the groups that have any.

    A run that trained to its end counts as finished when only longer rows are missing.
    """
    finished, lines = [], []
    for name in PLAN:
        files = {run.name: folder / f"{run.name}.json" for run in all_runs(name)}
        if not any(file.exists() for file in files.values()):
            lines.append(f"{PLAN[name]['title']}: no result file")
            continue
        for run, file in files.items():
            result = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
            if not result:
                lines.append(f"{run}: no result file")
                continue
            last = result["evaluations"][-1] if result["evaluations"] else None
            is_trained = last is not None and last["tokens"] == result["tokens"]
            if result["complete"] or (is_trained and result.get("recall")):
                finished.append(result)
            if result["complete"]:
                continue
            reached = "before its first evaluation"
            if is_trained and result.get("recall"):
                lengths = [length_words(entry["length"]) for entry in result["longer"]]
                reached = f"after training; longer rows: {', '.join(lengths) or 'none'}"
            elif last is not None:
                tokens, loss = last["tokens"], last["loss"]
                reached = f"after {tokens / 1e6:.1f} M tokens, at a loss of {loss:.3f}"
            lines.append(f"{run}: stopped {reached}: {result['ended']}")
    return finished, lines


def read_starts(folder: Path, group: str) -> list[Result]:
    """Return the entries of starts.py for a group; [] without a file."""
    file = folder / f"starts-{group}.json"
    entries: list[Result] = []
    if file.exists():
        entries = json.loads(file.read_text(encoding="utf-8"))["starts"]
    return entries


def positions(ranges: pd.Series) -> pd.DataFrame:
    """Return the losses of `by_position`, with a column for each range, such as "1k-4k"."""
    rows = (
        {f"{length_words(r['first'])}-{length_words(r['last'])}": r["loss"] for r in of_run}
        for of_run in ranges
    )
    return pd.DataFrame(rows, index=ranges.index)


def level(points: pd.Series) -> float:
    """Return the interpolated index from which on a series is at most 0; infinite if never."""
    points = points.dropna()  # a run has no loss at tokens where only others were evaluated
    above = np.flatnonzero(points > 0)
    if not len(above):
        return float(points.index[0])
    pair = points.iloc[above[-1] : above[-1] + 2]
    return float(np.interp(0, pair[::-1], pair.index[::-1])) if len(pair) > 1 else float("inf")


def words(series: pd.Series, form: str) -> pd.Series:
    """Format the values of a series; infinity, of :func:`level`, is "not reached"."""
    return series.map(form.format).where(series < np.inf, "not reached")


def with_error(frame: pd.DataFrame) -> pd.Series:
    """Format the mean of each row and its standard error, which a single value does not have."""
    errors = frame.sem(axis=1).map(" ± {:.3f}".format).replace(" ± nan", "")
    return frame.mean(axis=1).map("{:+.3f}".format) + errors


def scale_of_tokens(axes: Any, last: float) -> None:
    """Let the x axis show millions of tokens of a conversion, 0 to ``last``, on a log scale."""
    axes.set_xscale("symlog", linthresh=0.5, linscale=0.5)
    axes.set_xticks([n for n in (0, 0.5, 1, 2, 5, 10, 20, 50, 100) if n <= last])
    axes.xaxis.set_major_formatter("{x:g}")


class Group:
    """The finished runs of a group of arms, as frames with the label of the arm and the seed."""

    def __init__(self, name: str, results: Iterable[Result], starts: Sequence[Result] = ()) -> None:
        self.name, self.plan, self.starts = name, PLAN[name], starts
        arms = self.plan["arms"]
        self.labels = {arm: entry["label"] for arm, entry in arms.items()}
        self.base = self.labels[self.plan["baseline"]]
        self.converts = "from" in arms[self.plan["baseline"]]
        hues = iter((*NSA_COLOURS, "#56b4e9", "#e69f00"))
        self.colours = {
            entry["label"]: GREYS[2] if entry.get("attention") == "dense" else next(hues)
            for entry in arms.values()
        } | {self.base: INK}
        own = [result for result in results if result["arm"] in arms]
        own.sort(key=lambda result: (list(arms).index(result["arm"]), result["seed"]))
        self.runs = [result for result in own if result["purpose"] == "arm"]
        self.sweep = [result for result in own if result["purpose"] == "sweep"]
        if self.runs:
            self.final = self.entries("evaluations").groupby(["arm", "seed"], sort=False).last()

    def circumstances(self) -> str:
        """Return the machines and the data of the runs in words."""
        words = {
            f"{run['machine']['device']}, torch {run['torch']}, rows of {run['row']} tokens,"
            f" {run['tokens'] / 1e6:.1f} M training tokens"
            f" from a text of {run['corpus']['unique_tokens'] / 1e6:.1f} M,"
            f" {run['evaluations'][-1]['documents']} held-out documents"
            for run in self.runs
        }
        return "; ".join(sorted(words))

    def entries(self, field: str) -> pd.DataFrame:
        """Return the entries of a list of each run, with the label and the seed of the run."""
        rows = [
            {**entry, "arm": self.labels[run["arm"]], "seed": run["seed"]}
            for run in self.runs
            for entry in run.get(field) or ()
        ]
        return pd.json_normalize(rows)

    def table(self, columns: pd.DataFrame | dict[str, pd.Series]) -> str:
        """Return a Markdown table with a row for each arm; "-" where an arm has no value."""
        frame = pd.DataFrame(columns).astype(object).fillna("-").rename_axis("arm")
        frame = frame.loc[[label for label in self.labels.values() if label in frame.index]]
        return frame.reset_index().to_markdown(index=False, disable_numparse=True)

    def above_base(self, frame: pd.DataFrame) -> pd.DataFrame:
        """Return the differences to the run of the baseline with the same seed."""
        if self.base not in frame.index.get_level_values("arm"):
            return frame[:0]
        return (frame - frame.loc[self.base].reindex(frame.index, level="seed")).dropna(how="all")

    def curves(self) -> pd.DataFrame:
        """Return the loss by tokens, with a column for each label and seed."""
        return self.entries("evaluations").pivot(
            index="tokens", columns=["arm", "seed"], values="loss"
        )[[*self.final.index]]

    def facts(self) -> pd.DataFrame:
        """Return the means over seeds of the numbers of the result files."""
        facts = pd.json_normalize(self.runs).select_dtypes("number")
        return facts.groupby(self.final.index.get_level_values("arm")).mean()

    def loss_table(self) -> str:
        """Return the table of final losses, and of their differences to the baseline."""
        losses, far = self.final["loss"], positions(self.final["by_position"]).iloc[:, -1]
        columns = {
            "parameters": words(self.facts()["parameters"] / 1e6, "{:.1f} M"),
            "loss": words(losses.groupby("arm").mean(), "{:.3f}"),
        }
        documents = pd.DataFrame(self.final["document_losses"].tolist(), index=self.final.index)
        by_document = self.above_base(documents).groupby("arm").mean()
        by_seed = self.above_base(pd.DataFrame({"loss": losses, "far": far}))
        if len(by_seed):
            above = {f"above {self.base}, over documents": by_document}
            if len(self.plan["seeds"]) > 1:
                above["over seeds"] = by_seed["loss"].unstack("seed")
            above[f"at {far.name}"] = by_seed["far"].unstack("seed")
            columns |= {name: with_error(own.drop(self.base)) for name, own in above.items()}
        return self.table(columns)

    def cost_table(self) -> str:
        """Return the table of costs, and of the tokens that repay a conversion."""
        facts, curves = self.facts(), self.curves().T.groupby("arm").mean().T
        columns = {
            "tokens/s": words(facts["speed.tokens_per_s"], "{:,.0f}"),
            "peak memory, GiB": words(facts["speed.memory_bytes"] / 2**30, "{:.1f}"),
        }
        if self.converts:
            columns["keys per query"] = words(facts["keys_per_query"], "{:,.0f}")
        if self.base in curves:
            base = curves[self.base]
            share = (curves - base.iloc[-1]).apply(level) / curves.index[-1]
            hours = share * facts["speed.gpu_hours"]
            columns[f"GPU-hours to the loss of {self.base}"] = words(hours, "{:.3f}")
            if self.converts:
                start, equal = curves - base.iloc[0], curves.sub(base, axis=0)
                for name, points in (("as before training", start), ("as dense", equal)):
                    columns[f"tokens to a loss {name}"] = words(
                        points.apply(level) / 1e6, "{:.1f} M"
                    )
        return self.table(columns)

    def recall(self) -> pd.DataFrame:
        """Return the entries of recall, with the distance of what must be found."""
        entries = self.entries("recall")
        return entries.assign(distance=entries["length"] * (1 - entries["depth"]))

    def recall_by_distance(self) -> pd.Series:
        """Return the shares of right answers by task, arm and distance.

        A distance counts as the next power of 2.
        """
        entries = self.recall()
        entries["distance"] = 2 ** np.ceil(np.log2(entries["distance"].clip(lower=256)))
        return entries.set_index(["task", "arm", "distance"])["correct"]

    def recall_table(self) -> str:
        """Return the table of right answers beyond the window, means over lengths and depths."""
        entries = self.recall()
        far = entries[entries["distance"] > NSAConfig.window_size]
        by_seed = far.groupby(["task", "arm", "seed"], sort=False)["correct"].mean()
        by_arm = by_seed.groupby(["task", "arm"], sort=False)
        lowest, highest = (each.map("{:.1%}".format) for each in (by_arm.min(), by_arm.max()))
        ranges = (lowest + " to " + highest).where(lowest != highest, lowest)
        return self.table(ranges.unstack("task", sort=False))

    def longer(self) -> list[tuple[str, pd.DataFrame]]:
        """Return the entries of each length beyond that of the training, of seeds with all arms."""
        entries, found = self.entries("longer"), []
        for length, own in entries.groupby("length") if len(entries) else ():
            seeds = set.intersection(*own.groupby("arm")["seed"].agg(set))
            found.append((length_words(length), own[own["seed"].isin(seeds)]))
        return found

    def longer_table(self, entries: pd.DataFrame) -> str:
        """Return the table of one length beyond that of the training."""
        entries = entries.set_index("arm")
        recall = [pd.DataFrame(e).groupby("task")["correct"].mean() for e in entries["recall"]]
        mass = [pd.DataFrame(e, columns=[*MASS]).mean() for e in entries["mass"]]
        columns = [
            entries[["rope_base", "loss"]],
            positions(entries["by_position"]).iloc[:, -1:],
            pd.DataFrame(recall, index=entries.index).add_prefix("recall: "),
            pd.DataFrame(mass, index=entries.index)[["selected", "random"]].add_prefix("mass: "),
        ]
        means = pd.concat(columns, axis=1).groupby("arm").mean()
        return self.table(means.map("{:.4g}".format, na_action="ignore"))

    def layers(self) -> pd.DataFrame:
        """Return the mass and the gates of each arm and layer, means over seeds."""
        entries = self.entries("mass").reindex(columns=["arm", "layer", *MASS, *GATES])
        return entries.groupby(["arm", "layer"], sort=False).mean()

    def starts_table(self) -> str:
        """Return the table of the losses before any training, over documents in pairs."""
        entries = pd.DataFrame(self.starts).set_index("label")
        losses = pd.DataFrame(entries["document_losses"].tolist(), index=entries.index)
        mass = [pd.DataFrame(e, columns=["selected", "random"]).mean() for e in entries["mass"]]
        table = pd.DataFrame(mass, index=entries.index).add_prefix("mass: ").rename_axis("start")
        table = table.map("{:.1%}".format).replace("nan%", "-")
        table.insert(0, "above dense", with_error(losses - losses.loc["dense"]))
        return table.drop("dense").reset_index().to_markdown(index=False, disable_numparse=True)

    def mass_table(self) -> str:
        """Return the table of the mass in the selected and in random blocks, means over layers."""
        layers = self.layers()[["selected", "random"]]
        table = layers.groupby("arm").mean().map("{:.1%}".format).add_prefix("mass: ")
        found = layers["selected"] > layers["random"]
        found = found.groupby("arm").agg(["sum", "count"])
        table["layers above random"] = found.apply(lambda n: f"{n['sum']} of {n['count']}", axis=1)
        return self.table(table)

    def sweep_table(self) -> str:
        """Return the final losses of the sweep, the lowest of each arm in bold."""
        rows = [
            (self.labels[run["arm"]], f"{run['learning_rate']:g}", run["evaluations"][-1]["loss"])
            for run in self.sweep
        ]
        losses = pd.DataFrame(rows, columns=["arm", "rate", "loss"]).pivot(
            index="arm", columns="rate", values="loss"
        )
        bold = losses.eq(losses.min(axis=1), axis=0)
        cells = losses.map("{:.3f}".format).where(~bold, losses.map("**{:.3f}**".format))
        return self.table(cells.where(losses.notna()))

    def loss_figure(self) -> Figure:
        """Draw the loss over tokens, and its difference to the baseline by position."""
        figure = Figure(figsize=(_WIDTH, 3.6), layout="constrained")
        over_tokens, by_position = figure.subplots(1, 2, width_ratios=(3, 2))
        curves = self.curves().dropna()
        if self.converts:
            start = curves[self.base].iloc[0].mean()
            over_tokens.axhline(start, color=GREYS[2], lw=1, ls="--", label="dense, untrained")
            scale_of_tokens(over_tokens, curves.index[-1] / 1e6)
        else:  # before, all losses fall alike and fill the picture
            curves = curves[len(curves) // 3 :]
        curves.index /= 1e6
        for arm, losses in curves.T.groupby("arm", sort=False):
            style = {"marker": "o", "ms": 3} if self.converts else {}
            over_tokens.plot(losses.mean(), color=self.colours[arm], lw=1.4, label=arm, **style)
            band = curves.index, losses.min(), losses.max()
            over_tokens.fill_between(*band, color=self.colours[arm], alpha=0.25, lw=0)
        over_tokens.set(title="Held-out loss, nats per token", xlabel="tokens, millions")
        above = self.above_base(positions(self.final["by_position"]))
        arms = above.groupby("arm", sort=False)
        for number, (arm, seeds) in enumerate(arms):
            x = np.arange(above.shape[1]) + 0.7 * ((number + 0.5) / len(arms) - 0.5)
            by_position.vlines(x, seeds.min(), seeds.max(), color=self.colours[arm], lw=1.4)
            by_position.plot(x, seeds.mean(), "o", color=self.colours[arm], ms=3.5)
        by_position.set_xticks(range(above.shape[1]), above.columns)
        by_position.set(title=f"Above {self.base}", xlabel="position in the row, tokens")
        by_position.axhline(0, color=INK, lw=1)
        for axes in (over_tokens, by_position):
            axes.grid()
        figure.legend(loc="outside lower center", ncols=4)
        return figure

    def panels(self, titles: Iterable[str], height: float, **limits: Any) -> tuple[Figure, Any]:
        """Return a figure of panels for shares, and the panels by title."""
        figure, titles = Figure(figsize=(_WIDTH, height), layout="constrained"), [*titles]
        panels = figure.subplots(1, len(titles), sharey=True, squeeze=False)[0]
        for axes, title in zip(panels, titles):
            axes.set(title=title, ylim=(0, 1), **limits)
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
            axes.grid()
        return figure, dict(zip(titles, panels))

    def recall_figure(self) -> Figure:
        """Draw the share of right answers by the distance of what must be found."""
        by_distance = self.recall_by_distance()
        shares, tasks = by_distance.groupby(level=[*range(3)]).mean(), by_distance.index.unique(0)
        figure, panels = self.panels(tasks, 3.0, xlabel="distance, tokens")
        for task, axes in panels.items():
            for arm in by_distance.index.unique(1):
                axes.plot(shares[task, arm], "o-", color=self.colours[arm], ms=3, lw=1.2, label=arm)
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter(lambda value, _: length_words(int(value)))
        handles = axes.get_legend_handles_labels()
        figure.legend(*handles, loc="outside lower center", ncols=4)
        return figure

    def mass_figure(self) -> Figure:
        """Draw the share of dense attention's mass, and the gates, by arm and layer."""
        layers = self.layers()
        arms, gated = layers.index.unique("arm"), layers[[*GATES]].dropna()
        gates = {f"{arm}: gates": arm for arm in gated.index.unique("arm")}
        figure, panels = self.panels([*arms, *gates], 2.8, xlabel="layer")
        branches = dict(zip(GATES, NSA_COLOURS))
        for title, axes in panels.items():
            kinds = branches if title in gates else MASS
            for kind, colour in kinds.items():
                values = layers.loc[gates.get(title, title), kind].dropna()
                if len(values):
                    label = GATES.get(kind, kind)
                    axes.plot(values, "o-", color=colour, ms=3.5, lw=1.4, label=label)
        panels[arms[0]].set_ylabel("share of attention mass")
        for title in (arms[-1], *[*gates][-1:]):
            panels[title].legend(fontsize="small")
        return figure

    def figures(self) -> dict[str, Callable[[], Figure]]:
        """Return the functions that draw the pictures, by name."""
        figures = {"loss": self.loss_figure, "recall": self.recall_figure} if self.runs else {}
        return figures | ({"mass": self.mass_figure} if len(self.entries("mass")) else {})


def page(groups: list[Group], missing: list[str]) -> str:
    """Return the report in Markdown."""
    folder = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=folder, trim_blocks=True, undefined=StrictUndefined)
    template = environment.get_template("report.md.jinja")
    return template.render(groups=groups, missing=missing, window=NSAConfig.window_size)


def main(
    folder: Annotated[Path, typer.Argument(help="the folder with the result files")],
    out: Annotated[Path, typer.Option(help="the folder of the report")],
) -> None:
    """Write the tables and pictures of the study."""
    results, missing = read(folder)
    found = (Group(name, results, read_starts(folder, name)) for name in PLAN)
    groups = [group for group in found if group.runs or group.sweep]
    if not groups:
        raise typer.BadParameter(f"{folder} has no finished run: start run.py first")
    out.mkdir(parents=True, exist_ok=True)
    (out / "report.md").write_text(page(groups, missing), encoding="utf-8")
    for group in groups:
        for name, figure in group.figures().items():
            (out / f"{group.name}_{name}.svg").write_bytes(draw(figure, "svg"))


if __name__ == "__main__":
    typer.run(main)
