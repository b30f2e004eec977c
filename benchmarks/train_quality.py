"""Held-out loss of NSA and of dense attention, trained alike, token for token, on the documentation
inside Python.

    python benchmarks/train_quality.py --device cuda --json train_quality.json
    python benchmarks/train_quality.py --steps 1000 --data FOLDER
    # whatever nsa train takes: more text, more steps

Beside the losses: how much of dense attention's probability lies inside the blocks that NSA
chooses, as training goes.
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


def trained(model: LMConfig, recipe: Recipe, spec: DataSpec, device: str) -> dict[str, Any]:
    """Train one model; its held-out losses, and what its chosen blocks hold, over the steps."""
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
    """Train both, print, write."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--model", choices=list(MODELS), default="256")
    options.add_argument("--data", default="python-docs")
    options.add_argument("--steps", type=int, default=200)
    options.add_argument("--batch", type=int, default=16)
    options.add_argument("--length", type=int, default=2048)
    options.add_argument("--rows", type=int, default=16, help="held-out rows")
    options.add_argument("--json", type=Path)
    given = options.parse_args()
    cuda = given.device.startswith("cuda")
    recipe = Recipe(
        steps=given.steps,
        batch=given.batch,
        learning_rate=1e-3 if cuda else 3e-3,
        warmup=min(100, given.steps // 10),
        precision="bfloat16" if cuda else "float32",
        eval_every=max(1, given.steps // 8),
    )
    spec = DataSpec(given.data, given.length, held_out_rows=given.rows)
    document: dict[str, Any] = {
        "kind": "nsa-train-quality",
        "schema_version": 1,
        "machine": machine(given.device),
        "torch": torch.__version__,
        "recipe": dataclasses.asdict(recipe),
        "data": dataclasses.asdict(spec),
        "model": MODELS[given.model].to_dict(),
    }
    for attention in ("dense", "nsa"):
        model = dataclasses.replace(MODELS[given.model], attention=attention)
        document[attention] = trained(model, recipe, spec, given.device)
        if given.json is not None:
            write_atomic(given.json, json.dumps(document, indent=1) + "\n", force=True)
    last = {a: document[a]["held_out_loss"][-1][1] for a in ("dense", "nsa")}
    print(
        f"held out after {recipe.steps} steps: dense {last['dense']}, NSA {last['nsa']}, "
        f"NSA - dense {last['nsa'] - last['dense']:+.4f}"
    )


if __name__ == "__main__":
    main()
