"""Train a small dense model, convert it to NSA, and continue both on the same rows.

    python benchmarks/hugging_face/convert_learning.py --json hf_convert.json
    python benchmarks/hugging_face/convert_learning.py --stop-after dense   # only its recall
    python benchmarks/hugging_face/convert_learning.py --scale tiny --device cpu   # under a minute

The rows are those of learning_rows.py: source code with hidden pairs. The dense model is trained as
`nsa train --attention dense` does, on ever longer rows, and is converted as `nsa convert` does.
From then on all rows are long, and NSA and dense attention read the same ones:

- NSA trains phi and the gates only for the steps of its first stage, then all parameters;
- dense attention trains all parameters from the first step on.

The file is written at the end: an interrupted run leaves none.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from convert_scales import SCALES, Part, Scale
from learning_command import command_line, result, write
from learning_rows import VALUES, PairRows, TextWithPairs, distances, library_sources

from nsa_models.hf import convert_checkpoint, selected_mass, train_new_parameters
from nsa_models.hf.folder import load_model
from nsa_models.lm.config import LMConfig
from nsa_models.lm.data import Row, batch_of
from nsa_models.lm.model import LanguageModel
from nsa_models.lm.model_folder import open_folder
from nsa_models.lm.parallel import World
from nsa_models.lm.recipe import Recipe
from nsa_models.lm.task import Data, DataSpec
from nsa_models.lm.trainer import Trainer

SEED = 100  # of the rows after the conversion; other than those of the dense training
OWN_ROWS = 16  # held-out rows of a part of the dense training
Point = dict[str, Any]  # one point of the curves


class Lesson:
    """The rows of a scale, and the measurement of a model on held-out rows."""

    def __init__(self, scale: Scale, device: str) -> None:
        self.scale, self.device = scale, torch.device(device)
        self.text, self.held_out_text = library_sources()
        self.held_out = self.held_out_rows(scale.after, scale.held_out)

    @property
    def vocab_size(self) -> int:
        """Return the number of token ids: bytes, keys and values."""
        return 256 + self.scale.keys + VALUES

    def rows(self, part: Part, seed: int) -> TextWithPairs | PairRows:
        """Return rows to train on."""
        if part.length == 4 * part.pairs:  # no room for text
            return PairRows(part.pairs, self.scale.keys, seed=seed)
        return TextWithPairs(
            self.text, part.length, part.pairs, self.scale.keys, part.text_share, seed=seed
        )

    def held_out_rows(self, part: Part, count: int) -> list[Row]:
        """Return rows of held-out text, with other pairs than those to train on."""
        rows = TextWithPairs(
            self.held_out_text, part.length, part.pairs, self.scale.keys, held_out=True
        )
        return [next(rows) for _ in range(count)]

    def autocast(self) -> torch.autocast:
        """Return the context of every forward: bfloat16 on a GPU, float32 elsewhere.

        It does not keep copies of weights, because the first stage updates weights inside it.
        """
        enabled = self.device.type == "cuda"
        return torch.autocast(
            self.device.type, torch.bfloat16, enabled=enabled, cache_enabled=False
        )

    @torch.no_grad()
    def measure(
        self, logits_of: Callable[[torch.Tensor], torch.Tensor], rows: Sequence[Row]
    ) -> Point:
        """Return the loss on the text of rows in nats per byte, and the recall of their pairs.

        Args:
            logits_of: Maps tokens [1, S] to logits [1, S, vocabulary].
            rows: Held-out rows; the loss is left out if they have no text.
        """
        losses, right, far_right = [], [], []
        for row in rows:
            tokens, targets = self.tensors([row])
            with self.autocast():
                logits = logits_of(tokens)[0].float()
            is_text = (targets[0] >= 0) & (targets[0] < 256)
            answers = (targets[0] >= 256).nonzero().flatten()
            if is_text.any():
                losses.append(F.cross_entropy(logits[is_text], targets[0, is_text]))
            correct = (logits[answers].argmax(-1) == targets[0, answers]).float()
            right.append(correct)
            far_right.append(correct[distances(tokens[0], answers) > len(row.tokens) // 2])
        point = {"text_loss": round(float(torch.stack(losses).mean()), 4)} if losses else {}
        return point | {
            "recall": round(float(torch.cat(right).mean()), 4),
            "recall_of_far_pairs": round(float(torch.cat(far_right).mean()), 4),
        }

    def measure_model(self, model: Any) -> Point:
        """Return :meth:`measure` of a model of transformers on the long rows."""
        return self.measure(
            lambda tokens: model(input_ids=tokens, use_cache=False).logits, self.held_out
        )

    def measure_mass(self, model: Any) -> Point:
        """Return selected and random mass, by layer; see :func:`nsa_models.hf.selected_mass`."""
        with self.autocast():
            masses = selected_mass(model, torch.tensor(self.held_out[0].tokens))
        return {
            "selected_mass": [round(mass.selected, 4) for mass in masses],
            "random_mass": [round(mass.random, 4) for mass in masses],
            "selected_keys": [round(mass.keys, 4) for mass in masses],
        }

    def batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield tokens and targets [B, S] of every step after the conversion."""
        after = self.scale.after
        rows = self.rows(after, SEED)
        for _ in range(after.steps):
            yield self.tensors([next(rows) for _ in range(after.batch)])

    def tensors(self, rows: list[Row]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens and targets [B, S] of rows."""
        batch = batch_of(rows, packed=False).to(self.device)
        return batch.tokens, batch.targets


def train_dense(lesson: Lesson, run: Path) -> list[Point]:
    """Train the dense model, save it as a run of `nsa train`, and return its curve.

    Each part ends when the recall on rows of its own length is enough, or after its last step.
    """
    scale = lesson.scale
    config = LMConfig(scale.layer, scale.layers, lesson.vocab_size, attention="dense")
    torch.manual_seed(0)
    model, curve = LanguageModel(config), []
    for seed, part in enumerate(scale.before):
        recipe = Recipe(
            steps=part.steps,
            batch=part.batch,
            weight_decay=0.0,
            learning_rate=scale.learning_rate,
            warmup=min(100, part.steps // 5),
            precision="bfloat16" if lesson.device.type == "cuda" else "float32",
        )
        held_out = lesson.held_out_rows(part, OWN_ROWS)
        spec = DataSpec("pairs", part.length, vocab_size=lesson.vocab_size)
        data = Data(spec, lesson.rows(part, seed), held_out, lesson.vocab_size)
        trainer = Trainer(model, data, recipe, World(lesson.device))
        for step in range(1, part.steps + 1):
            trainer.step()
            if step % scale.eval_every and step < part.steps:
                continue
            point = {"row_length": part.length, "step": step}
            point |= lesson.measure(trainer.model, held_out)
            curve.append(point)
            report("dense, before the conversion", point)
            if point["recall"] >= part.enough:
                break
    trainer.save(run)
    return curve


def recall_by_length(lesson: Lesson, model: Any) -> dict[int, float]:
    """Return the recall of a model of transformers on held-out rows of each part, by length."""
    parts = {part.length: part for part in (*lesson.scale.before, lesson.scale.after)}
    logits_of = lambda tokens: model(input_ids=tokens, use_cache=False).logits  # noqa: E731
    return {
        length: lesson.measure(logits_of, lesson.held_out_rows(part, OWN_ROWS))["recall"]
        for length, part in parts.items()
    }


def lesson_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean loss on the text plus the mean loss on the answers.

    A long row has a hundred bytes of text for each answer, so that one mean would hide the answers.

    Args:
        logits: [B, S, vocabulary].
        targets: [B, S], with text and answers.
    """
    losses = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
    losses = losses.view_as(targets)
    is_answer, is_text = targets >= 256, (targets >= 0) & (targets < 256)
    return losses[is_answer].mean() + losses[is_text].mean()


def continue_all(
    lesson: Lesson, model: Any, batches: Iterator[tuple[torch.Tensor, torch.Tensor]], done: int
) -> Iterator[int]:
    """Train all parameters on the remaining rows; yield the number of steps after each one.

    Args:
        lesson: The rows.
        model: A model of transformers.
        batches: The remaining rows.
        done: Number of steps before.
    """
    steps = lesson.scale.after.steps - done
    peak, warmup = lesson.scale.learning_rate / 2, max(1, steps // 20)
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / warmup, 0.55 + 0.45 * math.cos(math.pi * step / steps)),
    )
    for step, (tokens, targets) in enumerate(batches, done + 1):
        model.train()
        with lesson.autocast():
            logits = model(input_ids=tokens, use_cache=False).logits
        lesson_loss(logits, targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        yield step


def continue_dense(lesson: Lesson, model: Any) -> list[Point]:
    """Continue with dense attention; return its curve."""
    curve = [{"step": 0} | lesson.measure_model(model)]
    for step in continue_all(lesson, model, lesson.batches(), 0):
        if step % lesson.scale.eval_every == 0 or step == lesson.scale.after.steps:
            curve.append({"step": step} | lesson.measure_model(model))
            report("dense", curve[-1])
    return curve


def continue_nsa(lesson: Lesson, model: Any) -> list[Point]:
    """Train phi and the gates, then all parameters; return the curve."""
    scale, batches, curve = lesson.scale, lesson.batches(), []

    def add(step: int) -> None:
        stage = 1 if step <= scale.first_stage else 2
        point = {"step": step, "stage": stage} | lesson.measure_model(model)
        curve.append(point | lesson.measure_mass(model))
        report("NSA", curve[-1])

    add(0)
    first = (next(batches)[0] for _ in range(scale.first_stage))
    with lesson.autocast():
        for progress in train_new_parameters(model, first):
            if progress.step % scale.eval_every == 0 or progress.step == scale.first_stage:
                add(progress.step)
    for step in continue_all(lesson, model, batches, scale.first_stage):
        if step % scale.eval_every == 0 or step == scale.after.steps:
            add(step)
    return curve


_started = time.monotonic()


def report(name: str, point: Point) -> None:
    """Print a point of a curve and the seconds since the start."""
    print(f"{time.monotonic() - _started:6.1f} s  {name}: {point}", flush=True)


def run(lesson: Lesson, stop_after: str) -> dict[str, Any] | None:
    """Run everything and return the fields of the result, or stop after the dense training."""
    seconds, started = {}, time.monotonic()

    def lap(name: str) -> None:
        nonlocal started
        seconds[name], started = round(time.monotonic() - started, 1), time.monotonic()

    with tempfile.TemporaryDirectory() as folder:
        runs, converted = Path(folder, "run"), Path(folder, "nsa")
        runs.mkdir()
        before = train_dense(lesson, runs)
        dense = load_model(open_folder(runs)).to(lesson.device)
        by_length = recall_by_length(lesson, dense)
        for length, recall in by_length.items():
            print(f"dense, before the conversion: recall {recall:.1%} in rows of {length} tokens")
        lap("dense, before the conversion")
        if stop_after == "dense":
            return None
        torch.manual_seed(0)
        conversion = convert_checkpoint(runs, converted)
    nsa = continue_nsa(lesson, conversion.model.to(lesson.device))
    lap("NSA")
    parameters = sum(parameter.numel() for parameter in dense.parameters())
    dense_curve = continue_dense(lesson, dense)
    lap("dense")
    return {
        "parameters": {
            "dense": parameters,
            "nsa": sum(parameter.numel() for parameter in conversion.model.parameters()),
        },
        "loss": "the mean over the text plus the mean over the answers",
        "text_bytes": len(lesson.text),
        "answers": lesson.scale.after.pairs * lesson.scale.held_out,
        "seconds": seconds,
        "before_conversion": before,
        "recall_by_length": by_length,
        "nsa": nsa,
        "dense": dense_curve,
    }


def main() -> None:
    """Run everything, print and save the result."""
    parser = command_line(__doc__, SCALES)
    parser.add_argument(
        "--stop-after",
        choices=("dense", "all"),
        default="all",
        help="dense: only train the dense model and print its recall; writes no file",
    )
    options = parser.parse_args()
    if options.stop_after == "dense" and options.json is not None:
        parser.error("--json needs the whole run; leave out --json or --stop-after dense")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    scale = SCALES[options.scale]
    fields = run(Lesson(scale, options.device), options.stop_after)
    if fields is None:
        return
    document = result("nsa-hf-convert", options.device, scale, fields)
    write(document, options.json)
    for name in ("dense", "nsa"):
        last = document[name][-1]
        print(f"{name}: text {last['text_loss']} nats per byte, recall {last['recall']:.1%}")


if __name__ == "__main__":
    main()
