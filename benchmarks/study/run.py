"""Train and evaluate the arms of the study on one GPU, and write one result file a run.

    python benchmarks/study/run.py small TOKENS --out results
    python benchmarks/study/run.py small TOKENS --out results --runs 'nsa-seed*'
    CUDA_VISIBLE_DEVICES=1 python benchmarks/study/run.py small TOKENS --out results --part 1/2

`small` is a group of arms.toml, TOKENS the folder that `corpus.py tokens` wrote. A finished run is
not repeated, and a run that was cut resumes from its last save.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import functools
import gc
import itertools
import json
import math
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any, NamedTuple

import numpy as np
import recall
import tomllib
import torch
import torch.nn.functional as F
import typer
from corpus import sha256
from tokenizers import Tokenizer

from nsa_bench.environment import machine
from nsa_core import NSAConfig
from nsa_core.flops import visible_pairs
from nsa_core.util.atomic_files import write_atomic
from nsa_models.lm.config import LMConfig
from nsa_models.lm.corpus import permutation
from nsa_models.lm.data import Row
from nsa_models.lm.log import FILE, read_log
from nsa_models.lm.mass import Mass, selected_mass
from nsa_models.lm.model import LanguageModel, parameter_count
from nsa_models.lm.model_folder import open_folder
from nsa_models.lm.parallel import World
from nsa_models.lm.recipe import Recipe
from nsa_models.lm.run_folder import INDEX
from nsa_models.lm.synthetic import NumberedRows
from nsa_models.lm.task import Data, DataSpec
from nsa_models.lm.train import Progress, train
from nsa_models.lm.trainer import Trainer

PLAN: dict[str, Any] = tomllib.loads(Path(__file__).with_name("arms.toml").read_text())
BRANCHES = ("cmp", "sel", "win")
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)  # of recall
MASS_DOCUMENTS = 8
LOGITS_AT_ONCE = 8192  # tokens
_order = functools.lru_cache(maxsize=2)(permutation)


class Run(NamedTuple):
    """One training run."""

    group: str
    arm: str
    seed: int
    rate: float
    tokens: int
    purpose: str  # "arm" or "sweep"

    @property
    def name(self) -> str:
        """The name of its result file, without ending."""
        if self.purpose == "sweep":
            return f"sweep-{self.arm}-{self.rate:g}"
        return f"{self.arm}-seed{self.seed}"

    @property
    def settings(self) -> dict[str, Any]:
        """The values of the group, replaced by those of the arm."""
        group = PLAN[self.group]
        defaults = {"attention": "nsa", "layer": {}, "held_out": {}}
        return {**defaults, **group, **group["arms"][self.arm]}


def all_runs(group: str) -> list[Run]:
    """Return the runs of a group: the sweep, then every arm with the first seed, and so on."""
    plan, runs = PLAN[group], []
    sweep = plan.get("sweep", {"arms": (), "rates": ()})
    for arm, rate in itertools.product(sweep["arms"], sweep["rates"]):
        runs.append(Run(group, arm, 0, rate, sweep["tokens"], "sweep"))
    for seed, (arm, entry) in itertools.product(plan["seeds"], plan["arms"].items()):
        rate = entry.get("rate", plan["rate"])
        runs.append(Run(group, arm, seed, rate, plan["tokens"], "arm"))
    return runs


def open_tokenizer(corpus: Path) -> Tokenizer:
    """Return the tokenizer of a corpus."""
    return Tokenizer.from_file(str(corpus / "tokenizer.json"))


@functools.cache
def read_documents(corpus: Path, side: str) -> list[np.ndarray]:
    """Return the token ids of each document of a side, "train" or "held_out"."""
    ids = np.fromfile(corpus / f"{side}.bin", dtype="<u2")
    ends = np.flatnonzero(ids == open_tokenizer(corpus).token_to_id("<|endoftext|>")) + 1
    return np.split(ids, ends)[:-1]


def rows_of(document: np.ndarray, length: int) -> list[np.ndarray]:
    """Return all rows of a document, each with the token after it."""
    return [document[i : i + length + 1] for i in range(0, len(document) - length, length)]


class TokenRows(NumberedRows):
    """Rows of one document each, in another order in each epoch, which the seed determines."""

    def __init__(self, documents: list[np.ndarray], length: int, seed: int) -> None:
        super().__init__(length)
        self.rows = [row for document in documents for row in rows_of(document, length)]
        self._seed = seed

    def row(self, number: int) -> Row:
        """Return the row with this number, counted over the epochs."""
        epoch, place = divmod(number, len(self.rows))
        tokens = self.rows[_order(len(self.rows), self._seed, epoch)[place]].tolist()
        return Row(tokens[:-1], tokens[1:], [self.length])


def spread(items: Sequence[Any], count: int) -> Sequence[Any]:
    """Return at most ``count`` items, evenly spread."""
    return items[:: max(1, len(items) // count)][:count]


def held_out_rows(
    documents: list[np.ndarray], length: int, at_most: int = 1000, rows_each: int = 2
) -> list[torch.Tensor]:
    """Return some rows, int64 [rows, length + 1], of each of some documents that have any."""
    rows = [own for document in documents if (own := rows_of(document, length))]
    chosen = (np.stack(spread(own, rows_each)) for own in spread(rows, at_most))
    return [torch.from_numpy(own.astype(np.int64)) for own in chosen]


@functools.cache
def questions(corpus: Path, lengths: tuple[int, ...], count: int) -> list[list[recall.Example]]:
    """Return recall questions by task, length and depth; it takes a while."""
    filler = np.concatenate(read_documents(corpus, "held_out"))
    tokenizer = open_tokenizer(corpus)
    return [
        recall.examples(task, tokenizer, filler, length, depth, count, seed=0)
        for task, length, depth in itertools.product(recall.TASKS, lengths, DEPTHS)
    ]


def eighths(length: int) -> tuple[int, ...]:
    """Return an eighth, a quarter, a half and the whole of a length."""
    return tuple(length >> shift for shift in (3, 2, 1, 0))


def close_branches(branches: Sequence[str], *call: Any) -> torch.Tensor:
    """Return the gates with 0 for closed branches; they still run, so their cost says nothing."""
    gates: torch.Tensor = call[-1]  # of a forward hook
    columns = zip(BRANCHES, gates.unbind(-1))
    return torch.stack([column * (branch in branches) for branch, column in columns], -1)


def model_config(run: Run, corpus: Path) -> LMConfig:
    """Return the sizes of an arm's model."""
    entry = run.settings
    change = entry["layer"] | entry.get("change", {})
    if "from" in entry:
        config = open_folder(corpus / entry["from"]).config
        return dataclasses.replace(config, layer=dataclasses.replace(config.layer, **change))
    vocab_size = open_tokenizer(corpus).get_vocab_size()
    layer = NSAConfig(**change)
    config = LMConfig(layer, entry["n_layers"], vocab_size, attention=entry["attention"])
    if "parameters_of" not in entry:
        return config
    wanted = model_config(run._replace(arm=entry["parameters_of"]), corpus)
    with torch.device("meta"):
        missing = parameter_count(LanguageModel(wanted)) - parameter_count(LanguageModel(config))
    hidden = config.hidden + missing / (3 * layer.dim * config.n_layers)
    return dataclasses.replace(config, mlp_dim=16 * round(hidden / 16))


def build(run: Run, corpus: Path) -> LanguageModel:
    """Return an arm's model with the weights of a seed."""
    entry, config = run.settings, model_config(run, corpus)
    torch.manual_seed(run.seed)
    model = LanguageModel(config, entry.get("backends"))
    for block in model.blocks if entry.get("start") == "mean" else ():
        block.attn.phi_k.start_as_mean()
        block.attn.phi_v.start_as_mean()
    for block in model.blocks if "branches" in entry else ():
        hook = functools.partial(close_branches, entry["branches"])
        block.attn.gate.register_forward_hook(hook)
    return model


@torch.no_grad()
def held_out_loss(
    model: LanguageModel, documents: list[torch.Tensor], batch: int
) -> dict[str, Any]:
    """Return the loss in nats per token, by position, with standard errors over documents."""
    losses: list[torch.Tensor] = []
    weight = model.output_weight
    for rows in torch.cat(documents).split(batch):
        rows = rows.to(weight.device)
        for hidden, targets in zip(model.hidden(rows[:, :-1]), rows[:, 1:]):
            parts = [  # because the logits are large
                F.cross_entropy(F.linear(h, weight).float(), t, reduction="none")
                for h, t in zip(hidden.split(LOGITS_AT_ONCE), targets.split(LOGITS_AT_ONCE))
            ]
            losses.append(torch.cat(parts).cpu())
    by_row = torch.stack(losses).double().split([len(rows) for rows in documents])
    by_document = torch.stack([rows.mean(0) for rows in by_row])
    means, edges = by_document.mean(1), [0, *eighths(by_document.shape[1])]
    return {
        **_mean(means),
        "documents": len(means),
        "by_position": [
            {"first": first, "last": last, **_mean(by_document[:, first:last].mean(1))}
            for first, last in itertools.pairwise(edges)
        ],
        "document_losses": [round(loss, 6) for loss in means.tolist()],
    }


def _mean(values: torch.Tensor) -> dict[str, float]:
    """Return the mean of independent values and its standard error."""
    error = float(values.std()) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return {"loss": float(values.mean()), "standard_error": error}


@torch.no_grad()
def mass(model: LanguageModel, documents: list[torch.Tensor]) -> list[dict[str, Any]]:
    """Return the mass of the selected blocks and the mean gates by layer, for some documents.

    The mass has the fields of :class:`nsa_models.lm.mass.Mass`.
    """
    gates: list[list[torch.Tensor]] = [[] for _ in model.blocks]

    def keep(gates_of_layer: list[torch.Tensor], *call: Any) -> None:
        gates_of_layer.append(call[-1].flatten(0, -2).mean(0))

    with contextlib.ExitStack() as hooks:
        for block, own in zip(model.blocks, gates):
            hooks.enter_context(block.attn.gate.register_forward_hook(functools.partial(keep, own)))
        some = spread(documents, MASS_DOCUMENTS)
        found = [selected_mass(model, rows[0, :-1].to(model.output_weight.device)) for rows in some]
    shares = torch.tensor(found).mean(0).tolist()
    means = [torch.stack(own).mean(0).tolist() for own in gates]
    return [
        {"layer": n, **dict(zip(Mass._fields, share)), "gates": dict(zip(BRANCHES, mean))}
        for n, (share, mean) in enumerate(zip(shares, means))
    ]


def recall_scores(
    model: LanguageModel, corpus: Path, lengths: tuple[int, ...], count: int, tokens: int
) -> list[dict[str, Any]]:
    """Return the scores of ``count`` questions each, with at most ``tokens`` at a time."""
    groups = questions(corpus, lengths, count)
    return [recall.score(model, group, max(1, tokens // group[0].length)) for group in groups]


def with_base(model: LanguageModel, base: float) -> LanguageModel:
    """Return a copy of a model with another rotary base."""
    layer = dataclasses.replace(model.config.layer, rope_base=base)
    copy = LanguageModel(dataclasses.replace(model.config, layer=layer))
    copy.load_state_dict(model.state_dict())
    return copy.to(model.output_weight.device)


class TimeOver(Exception):
    """The time for training is over."""


class StudyTrainer(Trainer):
    """A trainer with the held-out loss of the study, which it keeps in ``evaluations``."""

    documents: list[torch.Tensor]
    evaluations: list[dict[str, Any]]
    points: set[int]  # steps after which it is evaluated, besides the first and the last one
    selects: bool  # whether the model selects blocks, by scores

    def held_out_loss(self) -> float:
        """Return the held-out loss in nats per token."""
        with self.evaluating():
            result = held_out_loss(self.model, self.documents, self.recipe.batch)
            layers = mass(self.model, self.documents) if self.selects else ()
        for name in ("selected", "random") if layers else ():
            result[name] = fmean(layer[name] for layer in layers)
        if self.evaluations:  # the losses by document are of the last evaluation
            self.evaluations[-1].pop("document_losses", None)
        self.evaluations.append({"step": self.step_number, "tokens": self.tokens, **result})
        return float(result["loss"])

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Run the model in eager mode and in the precision of the training."""
        with torch.compiler.set_stance("force_eager"), self._autocast():
            yield


class Study:
    """One run: its trainer, and the facts of its result file."""

    def __init__(self, run: Run, corpus: Path, out: Path, device: str) -> None:
        self.run, self.corpus, self.entry = run, corpus, run.settings
        self.file, self.saves = out / f"{run.name}.json", out / "saves" / run.name
        self.saves.mkdir(parents=True, exist_ok=True)
        row, batch = self.entry["row"], self.entry["batch"]
        steps = run.tokens // (row * batch)
        recipe = Recipe(
            steps=steps,
            batch=batch,
            learning_rate=run.rate,
            warmup=self.entry["warmup"],
            precision="bfloat16",
            compile=device != "cpu",
            graph=device != "cpu",
            eval_every=steps,
            save_every=max(1, steps // 2),
            seed=run.seed,
        )
        model = build(run, corpus)
        rows = TokenRows(read_documents(corpus, "train"), row, run.seed)
        data = Data(DataSpec("study", row, seed=run.seed), rows, [], model.config.vocab_size)
        resume = self.file.exists() and (self.saves / INDEX).exists()
        start = self.saves if resume else corpus / self.entry.get("from", "")
        folder = open_folder(start) if resume or "from" in self.entry else None
        world = World(torch.device(device))
        self.trainer = trainer = StudyTrainer(model, data, recipe, world, folder, resume)
        changed = self.entry.keys() & {"branches", "backends"}
        trainer.selects = model.config.attention == "nsa" and not changed
        points = self.entry["points"]
        if isinstance(points, int):
            points = [run.tokens * n / points for n in range(1, points)]
        trainer.points = {round(tokens / (row * batch)) for tokens in points} - {0, steps}
        held_out = read_documents(corpus, "held_out")
        trainer.documents = held_out_rows(held_out, row, **self.entry["held_out"])
        old = json.loads(self.file.read_text())["evaluations"] if resume else []
        trainer.evaluations = [e for e in old if e["step"] <= trainer.step_number]
        tokens, unique = steps * row * batch, len(rows.rows) * row
        pairs = visible_pairs(model.config.layer.geometry, row)
        kinds = ("dense",) if model.config.attention == "dense" else BRANCHES
        self.facts: dict[str, Any] = {
            "kind": "nsa-study",
            "schema_version": 1,
            **run._asdict(),
            "learning_rate": recipe.learning_rate,
            "complete": False,
            "ended": "cut",
            "machine": machine(device),
            "torch": torch.__version__,
            "corpus": {
                "sha256": sha256(corpus / "train.bin"),
                "held_out_sha256": sha256(corpus / "held_out.bin"),
                "unique_tokens": unique,
                "epochs": tokens / unique,
            },
            "parameters": parameter_count(model),
            "row": row,
            "keys_per_query": sum(pairs[kind] for kind in kinds) / row,
            "steps": steps,
            "tokens": tokens,
            "recipe": dataclasses.asdict(recipe),
            "evaluations": trainer.evaluations,
        }

    def write(self) -> None:
        """Write the result file."""
        records = read_log(self.saves / FILE)[1] if (self.saves / FILE).exists() else []
        if log := [record for record in records if record["step"] > 3]:  # the first ones compile
            speed = median(record["tokens_per_s"] for record in log)
            self.facts["speed"] = {
                "tokens_per_s": speed,
                "gpu_hours": self.facts["tokens"] / speed / 3600,
                "memory_bytes": log[0]["memory_bytes"],  # later evaluations allocate too
            }
            loss = self.trainer.evaluations[-1]["loss"]
            print(f"{self.run.name}: {loss:.4f}, {speed:,.0f} tokens/s", flush=True)
        write_atomic(self.file, json.dumps(self.facts, indent=1) + "\n", force=True)

    def go(self, deadline: float) -> None:
        """Train until the deadline at most, and evaluate."""

        trainer = self.trainer

        def report(progress: Progress) -> None:
            # On a GPU, trainer.step_number is already that of the step after this progress.
            last, reached = trainer.evaluations[-1]["step"], trainer.step_number
            if any(last < point <= reached for point in trainer.points):
                trainer.held_out_loss()
                self.write()
            if progress.held_out_loss is not None:
                self.write()
            if time.monotonic() > deadline:
                raise TimeOver

        try:
            try:
                train(trainer, self.saves, report)
                ended = {"complete": True, "ended": ""}
            except TimeOver:
                if trainer.evaluations[-1]["step"] < trainer.step_number:
                    trainer.held_out_loss()
                ended = {"ended": "the time limit was reached"}
            print(f"{self.run.name}: trained", flush=True)
            if self.run.purpose == "arm":
                with trainer.evaluating():
                    self.evaluate()
            self.facts |= ended
        except Exception as error:
            self.facts["ended"] = f"{type(error).__name__}: {error}"
            raise
        finally:
            self.write()

    def evaluate(self) -> None:
        """Measure recall and selected mass, also on rows longer than those of the training."""
        entry, facts, trainer = self.entry, self.facts, self.trainer
        lengths = eighths(entry["row"])
        facts |= self.measure(trainer.model, trainer.documents, lengths, entry["questions"])
        longer = entry.get("longer", {"rows": ()})
        facts["longer"] = []
        for length in longer["rows"]:
            held_out = read_documents(self.corpus, "held_out")
            documents = held_out_rows(held_out, length, **entry["held_out"])
            models = {base: with_base(trainer.model, base) for base in longer["bases"]}
            losses = {base: held_out_loss(models[base], documents, 1) for base in models}
            best = min(losses, key=lambda base: losses[base]["loss"])
            measured = self.measure(models[best], documents, (length,), longer["questions"])
            by_base = {"by_base": {f"{base:g}": losses[base]["loss"] for base in losses}}
            own = {"length": length, "rope_base": best, **losses[best], **by_base, **measured}
            facts["longer"].append(own)
            self.write()

    def measure(
        self,
        model: LanguageModel,
        documents: list[torch.Tensor],
        lengths: tuple[int, ...],
        count: int,
    ) -> dict[str, Any]:
        """Return the recall of ``count`` questions each, and the mass of the selected blocks."""
        tokens = self.entry["row"] * self.entry["batch"]
        scores = recall_scores(model, self.corpus, lengths, count, tokens)
        return {"recall": scores, "mass": mass(model, documents) if self.trainer.selects else []}


def main(
    group: Annotated[str, typer.Argument(help=", ".join(PLAN))],
    tokens: Annotated[Path, typer.Argument(help="the folder of `corpus.py tokens`")],
    out: Annotated[Path, typer.Option(help="the folder of the results")],
    runs: Annotated[str, typer.Option(help="pattern of names, such as 'nsa-seed*'")] = "*",
    part: Annotated[str, typer.Option(help="I/N: every N-th of these runs, from I on")] = "0/1",
    device: str = "cuda" if torch.cuda.is_available() else "cpu",
    minutes: Annotated[float, typer.Option(help="the time in which training must end")] = math.inf,
) -> None:
    """Run the chosen runs one after another; an arm that fails does not end the others."""
    if group not in PLAN:
        raise typer.BadParameter(f"{group} is not one of {', '.join(PLAN)}")
    chosen = [run for run in all_runs(group) if fnmatch.fnmatch(run.name, runs)]
    if not chosen:
        known = ", ".join(run.name for run in all_runs(group))
        raise typer.BadParameter(f"--runs {runs} matches no run of {known}")
    first, count = map(int, part.split("/"))
    deadline, failed = time.monotonic() + 60 * minutes, False
    for run in chosen[first::count]:
        file = out / f"{run.name}.json"
        if file.exists() and json.loads(file.read_text())["complete"]:
            print(f"{run.name}: finished before", flush=True)
        elif time.monotonic() > deadline:
            print(f"{run.name}: not begun, the time limit was reached", flush=True)
        else:
            try:
                Study(run, tokens, out, device).go(deadline)
            except Exception:  # noqa: BLE001  (the other arms still run)
                traceback.print_exc()
                failed = True
            torch.compiler.reset()
            gc.collect()
    raise SystemExit(failed)


if __name__ == "__main__":
    typer.run(main)
