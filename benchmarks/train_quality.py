"""Compare the held-out loss of NSA and of dense attention, train on the same tokens.

    python benchmarks/train_quality.py --device cuda --json train_quality.json
    python benchmarks/train_quality.py --steps 1000 --data FOLDER

The default data is Python's own documentation; ``--data`` accepts all data of `nsa train`. The
result also has the share of dense attention's probability inside the selected blocks, over the
training steps.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import torch

from nsa_bench.environment import machine
from nsa_core import NSAConfig
from nsa_core.util.atomic_files import write_atomic
from nsa_models.lm.config import LMConfig, size
from nsa_models.lm.model import LanguageModel
from nsa_models.lm.parallel import World
from nsa_models.lm.recipe import Recipe
from nsa_models.lm.task import DataSpec, open_data
from nsa_models.lm.trainer import Trainer

MODELS = {"tiny": size("tiny"), "256": LMConfig(NSAConfig(dim=256, n_heads=4, n_kv_heads=2), 4)}


def train(model: LMConfig, recipe: Recipe, spec: DataSpec, device: str) -> dict[str, Any]:
    """Train one model; return its held-out losses and selected mass over the steps."""
    torch.manual_seed(recipe.seed)
    data = open_data(spec)
    trainer = Trainer(LanguageModel(model), data, recipe, World(torch.device(device)))
    losses, masses = [], []
    for step in range(recipe.steps + 1):
        if step % recipe.eval_every == 0 or step == recipe.steps:
            losses.append((step, round(trainer.held_out_loss(), 4)))
            print(f"{model.attention} step {step}: held out {losses[-1][1]}", flush=True)
            if (mass := trainer.selected_mass()) is not None:
                masses.append(
                    (step, [round(m.selected, 4) for m in mass], [round(m.keys, 4) for m in mass])
                )
        if step < recipe.steps:
            trainer.step()
    return {"held_out_loss": losses, "selected_mass": masses, "tokens": trainer.tokens}


def main() -> None:
    """Train both models, print and save the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", choices=list(MODELS), default="256")
    parser.add_argument("--data", default="python-docs")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=16, help="held-out rows")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    cuda = options.device.startswith("cuda")
    recipe = Recipe(
        steps=options.steps,
        batch=options.batch,
        learning_rate=1e-3 if cuda else 3e-3,
        warmup=min(100, options.steps // 10),
        precision="bfloat16" if cuda else "float32",
        eval_every=max(1, options.steps // 8),
    )
    spec = DataSpec(options.data, options.length, held_out_rows=options.rows)
    document: dict[str, Any] = {
        "kind": "nsa-train-quality",
        "schema_version": 1,
        "machine": machine(options.device),
        "torch": torch.__version__,
        "recipe": dataclasses.asdict(recipe),
        "data": dataclasses.asdict(spec),
        "model": dataclasses.asdict(MODELS[options.model]),
    }
    for attention in ("dense", "nsa"):
        model = dataclasses.replace(MODELS[options.model], attention=attention)
        document[attention] = train(model, recipe, spec, options.device)
        if options.json is not None:
            write_atomic(options.json, json.dumps(document, indent=1) + "\n", force=True)
    last = {a: document[a]["held_out_loss"][-1][1] for a in ("dense", "nsa")}
    print(
        f"held out after {recipe.steps} steps: dense {last['dense']}, NSA {last['nsa']}, "
        f"NSA - dense {last['nsa'] - last['dense']:+.4f}"
    )


if __name__ == "__main__":
    main()
