"""Measure a converted model before any training: how near dense attention does it start?

    python benchmarks/study/starts.py smollm2_8k smollm2 --out results

Writes OUT/starts-GROUP.json, with an entry for dense attention and one for each way in which a
conversion may start. The held-out rows and the questions are those of the arms.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from run import (
    PLAN,
    eighths,
    held_out_loss,
    held_out_rows,
    mass,
    read_documents,
    recall_scores,
    with_base,
)

from nsa_bench.environment import machine
from nsa_core import NSAttention
from nsa_core.util.atomic_files import write_atomic
from nsa_models.lm.model import LanguageModel
from nsa_models.lm.model_folder import open_folder

Change = Callable[[NSAttention], None]


def set_gates(gates: Sequence[float]) -> Change:
    """Return a function that sets the gates of a layer for all tokens and heads."""

    def change(attn: NSAttention) -> None:
        attn.gate.bias.view(-1, 3).copy_(torch.tensor(gates).logit())

    return change


def draw(*modules: torch.nn.Module) -> None:
    """Draw the parameters of modules as for a new layer."""
    for module in modules:
        for part in module.modules():  # the module itself comes first
            if hasattr(part, "reset_parameters"):
                part.reset_parameters()


# Each start changes these values in every layer of the conversion.
STARTS: dict[str, Change] = {
    "NSA": lambda attn: None,
    "NSA, gates of 0.02, 0.96, 0.02": set_gates((0.02, 0.96, 0.02)),
    "NSA, gates of 0.01, 0.01, 0.98": set_gates((0.01, 0.01, 0.98)),
    "NSA, random phi": lambda attn: draw(attn.phi_k, attn.phi_v),
    "NSA, random phi and gates": lambda attn: draw(attn.phi_k, attn.phi_v, attn.gate),
}


@torch.no_grad()
def main(
    group: Annotated[str, typer.Argument(help="a group of arms that begin with a model")],
    tokens: Annotated[Path, typer.Argument(help="the folder of `corpus.py tokens`")],
    out: Annotated[Path, typer.Option(help="the folder of the results")],
    device: str = "cuda" if torch.cuda.is_available() else "cpu",
) -> None:
    """Measure every start of a group."""
    out.mkdir(parents=True, exist_ok=True)
    plan = PLAN[group]
    row, batch = plan["row"], plan["batch"]
    documents = held_out_rows(read_documents(tokens, "held_out"), row, **plan.get("held_out", {}))
    dense = open_folder(tokens / "dense").model().to(device)
    base = plan.get("layer", {}).get("rope_base", dense.config.layer.rope_base)
    entries: list[dict[str, Any]] = []
    facts = {
        "kind": "nsa-study-starts",
        "schema_version": 1,
        "group": group,
        "machine": machine(device),
        "torch": torch.__version__,
        "starts": entries,
    }

    def measure(label: str, model: LanguageModel, asks: bool = False) -> None:
        entry = {"label": label, "rope_base": model.config.layer.rope_base}
        with torch.autocast(device, torch.bfloat16):
            entry |= held_out_loss(model, documents, batch)
            entry["mass"] = mass(model, documents) if model.config.attention == "nsa" else []
            if asks:
                entry["recall"] = recall_scores(
                    model, tokens, eighths(row), plan["questions"], row * batch
                )
        entries.append(entry)
        print(f"{group}, {label}: {entry['loss']:.4f}", flush=True)
        text = json.dumps(facts, indent=1) + "\n"
        write_atomic(out / f"starts-{group}.json", text, force=True)

    if base != dense.config.layer.rope_base:
        measure("dense, rotary base of the model", dense)
    measure("dense", with_base(dense, base), asks=True)
    folder = open_folder(tokens / "nsa")
    for label, change in STARTS.items():
        torch.manual_seed(0)
        model = with_base(folder.model().to(device), base)
        for block in model.blocks:
            change(block.attn)
        measure(label, model, asks=label == "NSA")


if __name__ == "__main__":
    typer.run(main)
