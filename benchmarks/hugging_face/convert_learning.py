"""Train a small dense model, convert it to NSA, and continue both on the same rows.

    python benchmarks/hugging_face/convert_learning.py --json hf_convert.json
    python benchmarks/hugging_face/convert_learning.py --scale tiny --device cpu   # under a minute

The rows are those of learning_rows.py: source code with hidden pairs. The dense model is trained as
`nsa train --attention dense` does, on ever longer rows, and is converted as `nsa convert` does.
From then on all rows are long, and NSA and dense attention read the same ones:

- NSA trains phi and the gates only for the steps of its first stage, then all parameters;
- dense attention trains all parameters from the first step on.

The file is written at the end: an interrupted run leaves none.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from learning_rows import VALUES, TextWithPairs, distances, library_sources

from nsa_bench.environment import machine
from nsa_core import NSAConfig
from nsa_core.util.atomic_files import write_atomic
from nsa_models.hf import convert_checkpoint, selected_mass, train_new_parameters
from nsa_models.hf.trained_run import dense_from_run
from nsa_models.lm.config import LMConfig
from nsa_models.lm.data import Row, batch_of
from nsa_models.lm.model import LanguageModel
from nsa_models.lm.parallel import World
from nsa_models.lm.recipe import Recipe
from nsa_models.lm.run_folder import CHECKPOINT
from nsa_models.lm.task import Data, DataSpec
from nsa_models.lm.trainer import Trainer

SEED = 100  # of the rows after the conversion; other than those of the dense training
Point = dict[str, Any]  # one point of the curves


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of the dense training.

    Attributes:
        length: Tokens per row.
        pairs: Pairs per row.
        text_share: Share of the rows in which the text is a target, and not only the answers.
        batch: Rows per step.
        steps: Number of steps.
    """

    length: int
    pairs: int
    text_share: float
    batch: int
    steps: int


@dataclasses.dataclass(frozen=True)
class Scale:
    """The sizes of a run.

    Attributes:
        layer: Heads and NSA's sizes.
        layers: Number of blocks of the model.
        before: The dense training. Short rows with many pairs teach the model to recall.
        length: Tokens of the rows after the conversion.
        pairs: Pairs in such a row.
        batch: Such rows per step.
        first_stage: Steps in which NSA trains phi and the gates only.
        steps: Steps after the conversion, the first stage included.
        eval_every: Steps between two points of the curves.
        held_out: Number of held-out rows.
        learning_rate: Peak learning rate of the dense training; after the conversion it is half.
    """

    layer: NSAConfig
    layers: int
    before: tuple[Part, ...]
    length: int
    pairs: int
    batch: int
    first_stage: int
    steps: int
    eval_every: int
    held_out: int
    learning_rate: float


_SMALL = NSAConfig(
    dim=32,
    n_heads=2,
    n_kv_heads=1,
    compress_block_size=8,
    compress_stride=4,
    select_block_size=16,
    num_selected_blocks=4,
    window_size=32,
)
SCALES = {
    "full": Scale(
        layer=NSAConfig(dim=256, n_heads=4, n_kv_heads=2, rope_base=500_000.0),
        layers=4,
        before=(
            Part(64, 16, 0.0, 128, 1500),
            Part(512, 64, 0.5, 32, 300),
            Part(4096, 256, 1.0, 8, 300),
            Part(16384, 512, 1.0, 4, 200),
        ),
        length=16384,
        pairs=512,
        batch=4,
        first_stage=100,
        steps=500,
        eval_every=50,
        held_out=4,
        learning_rate=2e-3,
    ),
    "tiny": Scale(
        layer=_SMALL,
        layers=2,
        before=(Part(64, 8, 0.5, 4, 6), Part(256, 8, 1.0, 1, 2)),
        length=256,
        pairs=8,
        batch=1,
        first_stage=4,
        steps=8,
        eval_every=2,
        held_out=1,
        learning_rate=3e-3,
    ),
}


class Lesson:
    """The rows of a scale, and the measurement of a model on its held-out rows."""

    def __init__(self, scale: Scale, device: str) -> None:
        self.scale, self.device = scale, torch.device(device)
        self.text, held_out_text = library_sources()
        self.keys = max(scale.pairs, *(part.pairs for part in scale.before))
        held_out = TextWithPairs(
            held_out_text, scale.length, scale.pairs, self.keys, held_out=True
        )
        self.held_out = [next(held_out) for _ in range(scale.held_out)]

    def rows(self, part: Part, seed: int) -> TextWithPairs:
        """Return rows to train on."""
        text, keys = self.text, self.keys
        return TextWithPairs(text, part.length, part.pairs, keys, part.text_share, seed=seed)

    def autocast(self) -> torch.autocast:
        """Return the context of every forward: bfloat16 on a GPU, float32 elsewhere.

        It does not keep copies of weights, because the first stage updates weights inside it.
        """
        enabled = self.device.type == "cuda"
        return torch.autocast(
            self.device.type, torch.bfloat16, enabled=enabled, cache_enabled=False
        )

    @torch.no_grad()
    def measure(self, logits_of: Callable[[torch.Tensor], torch.Tensor]) -> Point:
        """Return the loss on held-out text in nats per byte, and the recall of the pairs.

        Args:
            logits_of: Maps tokens [1, S] to logits [1, S, vocabulary].
        """
        losses, right, far_right = [], [], []
        for row in self.held_out:
            tokens, targets = self._tensors([row])
            with self.autocast():
                logits = logits_of(tokens)[0].float()
            is_text = (targets[0] >= 0) & (targets[0] < 256)
            answers = (targets[0] >= 256).nonzero().flatten()
            losses.append(F.cross_entropy(logits[is_text], targets[0, is_text]))
            correct = (logits[answers].argmax(-1) == targets[0, answers]).float()
            right.append(correct)
            far_right.append(correct[distances(tokens[0], answers) > self.scale.length // 2])
        return {
            "text_loss": round(float(torch.stack(losses).mean()), 4),
            "recall": round(float(torch.cat(right).mean()), 4),
            "recall_of_far_pairs": round(float(torch.cat(far_right).mean()), 4),
        }

    def measure_model(self, model: Any) -> Point:
        """Return :meth:`measure` of a model of transformers."""
        return self.measure(lambda tokens: model(input_ids=tokens, use_cache=False).logits)

    def measure_mass(self, model: Any) -> Point:
        """Return selected and random mass, by layer; see :func:`nsa_models.hf.selected_mass`."""
        with self.autocast():
            masses = selected_mass(model, torch.tensor(self.held_out[0].tokens))
        return {
            "selected_mass": [round(mass.selected, 4) for mass in masses],
            "random_mass": [round(mass.keys, 4) for mass in masses],
        }

    def batches(self, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield tokens and targets [B, S] of every step after the conversion."""
        scale = self.scale
        rows = self.rows(Part(scale.length, scale.pairs, 1.0, scale.batch, scale.steps), seed)
        for _ in range(scale.steps):
            yield self._tensors([next(rows) for _ in range(scale.batch)])

    def _tensors(self, rows: list[Row]) -> tuple[torch.Tensor, torch.Tensor]:
        batch = batch_of(rows, packed=False).to(self.device)
        return batch.tokens, batch.targets


def train_dense(lesson: Lesson, run: Path) -> list[Point]:
    """Train the dense model, save it as a run of `nsa train`, and return its curve."""
    scale = lesson.scale
    vocab_size = 256 + lesson.keys + VALUES
    config = LMConfig(scale.layer, scale.layers, vocab_size, attention="dense")
    torch.manual_seed(0)
    model, curve = LanguageModel(config), []
    for seed, part in enumerate(scale.before):
        rows, steps, length = lesson.rows(part, seed), part.steps, part.length
        recipe = Recipe(
            steps=steps,
            batch=part.batch,
            weight_decay=0.0,
            learning_rate=scale.learning_rate,
            warmup=min(100, steps // 5),
            precision="bfloat16" if lesson.device.type == "cuda" else "float32",
        )
        spec = DataSpec("pairs", length, vocab_size=vocab_size)
        data = Data(spec, rows, lesson.held_out, vocab_size)
        trainer = Trainer(model, data, recipe, World(lesson.device))
        for step in range(1, steps + 1):
            trainer.step()
            if step % (2 * scale.eval_every) == 0 or step == steps:
                point = {"row_length": length, "step": step} | lesson.measure(trainer.model)
                curve.append(point)
                report("dense, before the conversion", point)
    trainer.save(run / CHECKPOINT)
    return curve


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
    scale, steps = lesson.scale, lesson.scale.steps - done
    peak, warmup = scale.learning_rate / 2, max(1, steps // 20)
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / warmup, 0.55 + 0.45 * math.cos(math.pi * step / steps)),
    )
    for step, (tokens, targets) in enumerate(batches, done + 1):
        model.train()
        with lesson.autocast():
            logits = model(input_ids=tokens, use_cache=False).logits
        F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        yield step


def continue_dense(lesson: Lesson, model: Any) -> list[Point]:
    """Continue with dense attention; return its curve."""
    curve = [{"step": 0} | lesson.measure_model(model)]
    for step in continue_all(lesson, model, lesson.batches(SEED), 0):
        if step % lesson.scale.eval_every == 0 or step == lesson.scale.steps:
            curve.append({"step": step} | lesson.measure_model(model))
            report("dense", curve[-1])
    return curve


def continue_nsa(lesson: Lesson, model: Any) -> list[Point]:
    """Train phi and the gates, then all parameters; return the curve."""
    scale, batches, curve = lesson.scale, lesson.batches(SEED), []

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
        if step % scale.eval_every == 0 or step == scale.steps:
            add(step)
    return curve


_started = time.monotonic()


def report(name: str, point: Point) -> None:
    """Print a point of a curve and the seconds since the start."""
    print(f"{time.monotonic() - _started:6.1f} s  {name}: {point}", flush=True)


def run(scale: Scale, device: str) -> dict[str, Any]:
    """Run everything; return the fields of the result."""
    lesson = Lesson(scale, device)
    seconds, started = {}, time.monotonic()

    def lap(name: str) -> None:
        nonlocal started
        seconds[name], started = round(time.monotonic() - started, 1), time.monotonic()

    with tempfile.TemporaryDirectory() as folder:
        runs, converted = Path(folder, "run"), Path(folder, "nsa")
        runs.mkdir()
        before = train_dense(lesson, runs)
        lap("dense, before the conversion")
        torch.manual_seed(0)
        conversion = convert_checkpoint(runs, converted)
        dense = dense_from_run(runs)
    nsa = continue_nsa(lesson, conversion.model.to(lesson.device))
    lap("NSA")
    parameters = sum(parameter.numel() for parameter in dense.parameters())
    dense_curve = continue_dense(lesson, dense.to(lesson.device))
    lap("dense")
    return {
        "parameters": {
            "dense": parameters,
            "nsa": sum(parameter.numel() for parameter in conversion.model.parameters()),
        },
        "text_bytes": len(lesson.text),
        "answers": sum(sum(t >= 256 for t in row.targets) for row in lesson.held_out),
        "seconds": seconds,
        "before_conversion": before,
        "nsa": nsa,
        "dense": dense_curve,
    }


def main() -> None:
    """Run everything, print and save the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--scale", choices=list(SCALES), default="full")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    scale = SCALES[options.scale]
    document = {
        "kind": "nsa-hf-convert",
        "schema_version": 1,
        "machine": machine(options.device),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "scale": dataclasses.asdict(scale),
        **run(scale, options.device),
    }
    if options.json is not None:
        write_atomic(options.json, json.dumps(document, indent=1) + "\n", force=True)
    for name in ("dense", "nsa"):
        last = document[name][-1]
        print(f"{name}: text {last['text_loss']} nats per byte, recall {last['recall']:.1%}")


if __name__ == "__main__":
    main()
