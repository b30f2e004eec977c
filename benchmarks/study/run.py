"""Train and evaluate the arms of the study on one GPU, and write one result file a run.

    python benchmarks/study/run.py TOKENS --out results      # the sweep, then all arms and seeds
    python benchmarks/study/run.py TOKENS --out results --runs 'nsa-seed*'
    CUDA_VISIBLE_DEVICES=1 python benchmarks/study/run.py TOKENS --out results --part 1/2

TOKENS is the folder that `corpus.py tokens` wrote. A finished run is not repeated, and a run that
was cut resumes from its last save. Arms train at the best rate of the sweep, so its results must
lie in the folder of the results.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import functools
import gc
import hashlib
import itertools
import json
import math
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import recall
import tokenizers
import tomllib
import torch
import torch.nn.functional as F

from nsa_bench.environment import machine
from nsa_core import NSAConfig
from nsa_core.layer.gating import LinearGate
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

ARMS = Path(__file__).with_name("arms.toml")
BRANCHES = ("cmp", "sel", "win")
ROWS_PER_DOCUMENT = 2  # of the held-out loss
RECALL_COUNT, DEPTHS = 32, (0.0, 0.25, 0.5, 0.75, 1.0)
MASS_DOCUMENTS = 8
_order = functools.lru_cache(maxsize=2)(permutation)


class Tokens(NamedTuple):
    """One side of the corpus: token ids, and the first token and length of each document."""

    ids: np.ndarray
    documents: list[tuple[int, int]]
    sha256: str

    def rows(self, length: int) -> list[range]:
        """Return the first token of every row that fits, by document."""
        return [range(first, first + count - length, length) for first, count in self.documents]


@functools.cache
def read_tokens(folder: Path, side: str) -> Tokens:
    """Read the side "train" or "held_out" of the folder that `corpus.py tokens` wrote."""
    listed = json.loads((folder / f"{side}.json").read_text())
    ids = np.fromfile(folder / f"{side}.bin", dtype="<u2")
    documents = [(document["first"], document["tokens"]) for document in listed]
    return Tokens(ids, documents, hashlib.sha256(ids).hexdigest())


class TokenRows(NumberedRows):
    """Rows of one document each, in another order in each epoch, which the seed determines."""

    def __init__(self, tokens: Tokens, length: int, seed: int) -> None:
        super().__init__(length)
        self._ids, self._seed = tokens.ids, seed
        self.starts = list(itertools.chain(*tokens.rows(length)))

    def row(self, number: int) -> Row:
        """Return the row with this number, counted over the epochs."""
        epoch, place = divmod(number, len(self.starts))
        start = self.starts[_order(len(self.starts), self._seed, epoch)[place]]
        part = self._ids[start : start + self.length + 1].tolist()
        return Row(part[:-1], part[1:], [self.length])


def held_out_rows(tokens: Tokens, length: int) -> list[torch.Tensor]:
    """Return some rows of each document that has any, int64 [rows, length + 1], evenly spread."""
    documents = []
    for starts in filter(None, tokens.rows(length)):
        chosen = starts[:: max(1, len(starts) // ROWS_PER_DOCUMENT)][:ROWS_PER_DOCUMENT]
        rows = np.stack([tokens.ids[start : start + length + 1] for start in chosen])
        documents.append(torch.from_numpy(rows.astype(np.int64)))
    return documents


def open_tokenizer(corpus: Path) -> tokenizers.Tokenizer:
    """Return the tokenizer of a corpus."""
    return tokenizers.Tokenizer.from_file(str(corpus / "tokenizer.json"))


@functools.cache
def questions(corpus: Path, length: int) -> list[list[recall.Example]]:
    """Return the recall questions up to a length, by task, length and depth; it takes a while."""
    filler, tokenizer = read_tokens(corpus, "held_out").ids, open_tokenizer(corpus)
    return [
        recall.examples(task, tokenizer, filler, size, depth, RECALL_COUNT, seed=0)
        for task, size, depth in itertools.product(recall.TASKS, _eighths(length), DEPTHS)
    ]


def _eighths(length: int) -> list[int]:
    return [length >> shift for shift in (3, 2, 1, 0)]


class BranchGate(LinearGate):
    """A gate that is 0 for closed branches; they still run, so their cost is not measured."""

    def __init__(self, dim: int, n_heads: int, branches: Sequence[str]) -> None:
        super().__init__(dim, n_heads)
        mask = torch.tensor([float(branch in branches) for branch in BRANCHES])
        self.register_buffer("open", mask, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the gates [..., Hq, 3] of x [..., dim]."""
        return super().forward(x) * self.open


def model_config(plan: dict[str, Any], arm: str, vocab_size: int) -> LMConfig:
    """Return the sizes of an arm's model."""
    entry = plan["arms"][arm]
    layer = NSAConfig(**plan["model"], **entry.get("layer", {}))
    attention = entry.get("attention", "nsa")
    config = LMConfig(layer, plan["training"]["n_layers"], vocab_size, attention=attention)
    if "parameters_of" not in entry:
        return config
    wanted = model_config(plan, entry["parameters_of"], vocab_size)
    with torch.device("meta"):
        missing = parameter_count(LanguageModel(wanted)) - parameter_count(LanguageModel(config))
    hidden = config.hidden + missing / (3 * layer.dim * config.n_layers)
    return dataclasses.replace(config, mlp_dim=16 * round(hidden / 16))


def build(plan: dict[str, Any], arm: str, vocab_size: int, seed: int) -> LanguageModel:
    """Return an arm's model with the weights of a seed."""
    entry, config = plan["arms"][arm], model_config(plan, arm, vocab_size)
    torch.manual_seed(seed)
    model = LanguageModel(config, entry.get("backends"))
    if "branches" in entry:
        for block in model.blocks:
            gate = BranchGate(config.layer.dim, config.layer.n_heads, entry["branches"])
            gate.load_state_dict(block.attn.gate.state_dict())
            block.attn.gate = gate
    return model


class Run(NamedTuple):
    """One training run."""

    arm: str
    seed: int
    rate: float | None  # None: the best of the sweep
    tokens: int
    purpose: str  # "arm" or "sweep"

    @property
    def name(self) -> str:
        """The name of its result file, without ending."""
        if self.purpose == "sweep":
            return f"sweep-{self.arm}-{self.rate:g}"
        return f"{self.arm}-seed{self.seed}"


def all_runs(plan: dict[str, Any]) -> list[Run]:
    """Return the runs in their order: the sweep, then every arm with the first seed, and so on."""
    sweep, training = plan["sweep"], plan["training"]
    short = itertools.product(sweep["arms"], sweep["rates"])
    arms = itertools.product(training["seeds"], plan["arms"])
    runs = [Run(arm, 0, rate, sweep["tokens"], "sweep") for arm, rate in short]
    return runs + [Run(arm, seed, None, training["tokens"], "arm") for seed, arm in arms]


def best_rate(plan: dict[str, Any], out: Path, attention: str) -> float:
    """Return the rate of the sweep with the lowest final held-out loss.

    Raises:
        SystemExit: A run of the sweep is missing.
    """
    losses = {}
    for rate in plan["sweep"]["rates"]:
        file = out / f"sweep-{attention}-{rate:g}.json"
        document = json.loads(file.read_text()) if file.exists() else {"complete": False}
        if not document["complete"]:
            raise SystemExit(f"{file} has no complete run: run the sweep first (--runs 'sweep-*')")
        losses[rate] = document["evaluations"][-1]["loss"]
    return min(losses, key=losses.__getitem__)


@torch.no_grad()
def held_out_loss(
    model: LanguageModel, documents: list[torch.Tensor], batch: int
) -> dict[str, Any]:
    """Return the loss in nats per token, by position, with standard errors over documents."""
    losses: list[torch.Tensor] = []
    weight = model.output_weight
    for rows in torch.cat(documents).to(weight.device).split(batch):
        for hidden, targets in zip(model.hidden(rows[:, :-1]), rows[:, 1:]):
            logits = F.linear(hidden, weight).float()  # of one row at a time, as they are large
            losses.append(F.cross_entropy(logits, targets, reduction="none"))
    by_row = torch.stack(losses).double().cpu().split([len(rows) for rows in documents])
    by_document = torch.stack([rows.mean(0) for rows in by_row])
    means, edges = by_document.mean(1), [0, *_eighths(by_document.shape[1])]
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


def mass(model: LanguageModel, documents: list[torch.Tensor]) -> list[dict[str, Any]]:
    """Return the fields of :class:`nsa_models.lm.mass.Mass` by layer, for some documents."""
    some = documents[:: max(1, len(documents) // MASS_DOCUMENTS)][:MASS_DOCUMENTS]
    device = model.output_weight.device
    found = [selected_mass(model, rows[0, :-1].to(device)) for rows in some]
    means = torch.tensor(found).mean(0).tolist()
    return [{"layer": n, **dict(zip(Mass._fields, m))} for n, m in enumerate(means)]


class StudyTrainer(Trainer):
    """A trainer with the held-out loss of the study, which it keeps in ``evaluations``."""

    documents: list[torch.Tensor]
    evaluations: list[dict[str, Any]]

    def held_out_loss(self) -> float:
        """Return the held-out loss in nats per token."""
        found = self.measure(held_out_loss, self.documents, self.recipe.batch)
        if self.evaluations:  # the losses by document are of the last evaluation
            self.evaluations[-1].pop("document_losses", None)
        self.evaluations.append({"step": self.step_number, "tokens": self.tokens, **found})
        return float(found["loss"])

    def measure(self, measurement: Callable[..., Any], *args: Any) -> Any:
        """Return a measurement of the model, in eager mode and in the precision of the training."""
        with torch.compiler.set_stance("force_eager"), self._autocast():
            return measurement(self.model, *args)


def train_and_evaluate(
    plan: dict[str, Any], run: Run, corpus: Path, out: Path, device: str
) -> None:
    """Train and evaluate one run, and write its result file after every evaluation.

    The model and its log are saved in the folder "saves" of the results.
    """
    file, saves = out / f"{run.name}.json", out / "saves" / run.name
    old = json.loads(file.read_text()) if file.exists() else {"complete": False, "evaluations": []}
    if old["complete"]:
        print(f"{run.name}: finished before", flush=True)
        return
    training, entry = plan["training"], plan["arms"][run.arm]
    own, held_out = read_tokens(corpus, "train"), read_tokens(corpus, "held_out")
    row, batch = training["row"], training["batch"]
    vocab_size = open_tokenizer(corpus).get_vocab_size()
    steps = run.tokens // (row * batch)
    recipe = Recipe(
        steps=steps,
        batch=batch,
        learning_rate=run.rate or best_rate(plan, out, entry.get("attention", "nsa")),
        warmup=training["warmup"],
        precision="bfloat16",
        compile=device != "cpu",
        graph=device != "cpu",
        eval_every=max(1, steps // training["points"]),
        save_every=max(1, steps // 2),
        seed=run.seed,
    )
    rows = TokenRows(own, row, run.seed)
    data = Data(DataSpec("study", row, seed=run.seed), rows, [], vocab_size)
    model = build(plan, run.arm, vocab_size, run.seed)
    saves.mkdir(parents=True, exist_ok=True)
    resume = file.exists() and (saves / INDEX).exists()
    folder = open_folder(saves) if resume else None
    trainer = StudyTrainer(model, data, recipe, World(torch.device(device)), folder, resume)
    trainer.documents = held_out_rows(held_out, row)
    done = trainer.step_number if resume else -1
    trainer.evaluations = [e for e in old["evaluations"] if e["step"] <= done]
    tokens, unique = steps * row * batch, len(rows.starts) * row
    facts: dict[str, Any] = {
        "kind": "nsa-study",
        "schema_version": 1,
        **run._asdict(),
        "learning_rate": recipe.learning_rate,
        "complete": False,
        "ended": "cut",
        "machine": machine(device),
        "torch": torch.__version__,
        "corpus": {
            "sha256": own.sha256,
            "held_out_sha256": held_out.sha256,
            "unique_tokens": unique,
            "epochs": tokens / unique,
        },
        "parameters": parameter_count(model),
        "parameters_without_embedding": parameter_count(model) - model.embed.weight.numel(),
        "row": row,
        "steps": steps,
        "tokens": tokens,
        "recipe": dataclasses.asdict(recipe),
        "evaluations": trainer.evaluations,
    }

    def write(progress: Progress | None = None) -> None:
        if progress is not None and progress.held_out_loss is None:
            return
        log = [r for r in read_log(saves / FILE)[1] if r["step"] > 3]  # the first ones compile
        if log:
            speed = median(r["tokens_per_s"] for r in log)
            facts["speed"] = {
                "tokens_per_s": speed,
                "gpu_hours": tokens / speed / 3600,
                "memory_bytes": log[0]["memory_bytes"],  # later evaluations allocate too
            }
            kept = ("step", "tokens", "loss")
            facts["steps_log"] = [{k: r[k] for k in kept} for r in log if r["step"] % 10 == 0]
            loss = trainer.evaluations[-1]["loss"]
            print(f"{run.name}: {loss:.4f}, {speed:,.0f} tokens/s", flush=True)
        write_atomic(file, json.dumps(facts, indent=1) + "\n", force=True)

    try:
        train(trainer, saves, write)
        if run.purpose == "arm":
            facts["recall"] = [
                trainer.measure(recall.score, group, batch * row // group[0].length)
                for group in questions(corpus, row)
            ]
            if model.config.attention == "nsa" and not {"branches", "backends"} & entry.keys():
                facts["mass"] = trainer.measure(mass, trainer.documents)
        facts |= {"complete": True, "ended": ""}
    except Exception as error:
        facts["ended"] = f"{type(error).__name__}: {error}"
        raise
    finally:
        write()


def main() -> None:
    """Run the chosen runs one after another; an arm that fails does not end the others."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tokens", type=Path, help="the folder of `corpus.py tokens`")
    parser.add_argument("--out", type=Path, required=True, help="the folder of the results")
    parser.add_argument("--plan", type=Path, default=ARMS, help="default: arms.toml")
    parser.add_argument("--runs", default="*", help="pattern of names, such as 'nsa-seed*'")
    parser.add_argument("--part", default="0/1", help="I/N: every N-th of these runs, from I on")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--time-limit", type=float, default=math.inf, help="begin no run after: s")
    options = parser.parse_args()
    plan = tomllib.loads(options.plan.read_text())
    runs = [run for run in all_runs(plan) if fnmatch.fnmatch(run.name, options.runs)]
    if not runs:
        known = ", ".join(run.name for run in all_runs(plan))
        parser.error(f"--runs {options.runs} matches no run of {known}")
    first, count = map(int, options.part.split("/"))
    options.out.mkdir(parents=True, exist_ok=True)
    started, failed = time.monotonic(), False
    for run in runs[first::count]:
        if time.monotonic() - started > options.time_limit:
            print(f"{run.name}: not begun, the time limit is over", flush=True)
            continue
        try:
            train_and_evaluate(plan, run, options.tokens, options.out, options.device)
        except Exception:  # noqa: BLE001  (the other arms still run)
            traceback.print_exc()
            failed = True
        torch.compiler.reset()
        gc.collect()
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
