"""Train a small MiniMax-M3 with "nsa_blocks" and with "eager": the same losses, step by step.

    python benchmarks/hugging_face/minimax_learning.py --json hf_minimax.json
    python benchmarks/hugging_face/minimax_learning.py --scale tiny --device cpu   # some seconds

Both trainings begin with the same random weights and read the same rows of source code, in float32,
so that only rounding differs. The indexer chooses blocks by rank: where two blocks have nearly the
same score, rounding decides, and the losses drift apart by more than rounding. Exit code 1 if they
differ by 1e-3 or more anywhere. The file is written at the end: an interrupted run leaves none.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from learning_rows import library_sources
from transformers import MiniMaxM3VLTextConfig
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import MiniMaxM3VLForCausalLM

from nsa_bench.environment import machine
from nsa_core.util.atomic_files import write_atomic
from nsa_models.hf import minimax

IMPLEMENTATIONS = ("eager", minimax.NAME)
LIMIT = 1e-3  # nats per byte
LEARNING_RATE, EPSILON = 3e-4, 1e-6


@dataclasses.dataclass(frozen=True)
class Scale:
    """The sizes of a run.

    Attributes:
        steps: Optimizer steps.
        batch: Rows per step.
        length: Bytes per row.
        block: Keys per block of the indexer; each query attends to 4 blocks.
        hidden: Width of the model.
        layers: Number of layers; the first one attends to all keys.
        heads: Query heads; there are 2 kv heads, each of which chooses its blocks.
        head_dim: Width of a head.
    """

    steps: int
    batch: int
    length: int
    block: int
    hidden: int
    layers: int
    heads: int
    head_dim: int

    def config(self) -> MiniMaxM3VLTextConfig:
        """Return the configuration of the model; its last layer has experts."""
        return MiniMaxM3VLTextConfig(
            vocab_size=256,
            hidden_size=self.hidden,
            intermediate_size=self.hidden,
            dense_intermediate_size=2 * self.hidden,
            shared_intermediate_size=self.hidden // 2,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=2,
            head_dim=self.head_dim,
            rotary_dim=self.head_dim // 2,
            index_n_heads=2,
            index_head_dim=self.head_dim,
            index_block_size=self.block,
            index_topk_blocks=4,
            num_local_experts=4,
            num_experts_per_tok=2,
            layer_types=["full_attention", *["minimax_m3_sparse"] * (self.layers - 1)],
            mlp_layer_types=[*["dense"] * (self.layers - 1), "sparse"],
            max_position_embeddings=self.length,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )


SCALES = {
    "full": Scale(200, 4, 2048, 64, 128, 4, 8, 64),
    "tiny": Scale(5, 2, 96, 16, 32, 2, 2, 16),
}


def rows(scale: Scale, text: torch.Tensor) -> torch.Tensor:
    """Return the rows of all steps, bytes as int64 [steps, B, S]."""
    generator = torch.Generator().manual_seed(0)
    count = (scale.steps, scale.batch)
    starts = torch.randint(len(text) - scale.length, count, generator=generator)
    return text[starts[..., None] + torch.arange(scale.length)].long()


def train(
    start: MiniMaxM3VLForCausalLM, implementation: str, tokens: torch.Tensor
) -> dict[str, Any]:
    """Train a copy of a model; return its losses in nats per byte and the median step time."""
    model = copy.deepcopy(start).train()
    model.set_attn_implementation(implementation)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=EPSILON)
    losses, seconds = [], []
    for batch in tokens:
        started = time.perf_counter()
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())  # waits for the device
        seconds.append(time.perf_counter() - started)
    # The first steps compile kernels.
    settled = seconds[len(seconds) // 4 :]
    result = {"loss": losses, "seconds_per_step": round(statistics.median(settled), 5)}
    print(f"{implementation}: loss {losses[0]:.4f} to {losses[-1]:.4f}", flush=True)
    return result


def main() -> int:
    """Run both trainings, print and save the result; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--scale", choices=list(SCALES), default="full")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    minimax.register()
    scale = SCALES[options.scale]
    tokens = rows(scale, library_sources()[0]).to(options.device)
    torch.manual_seed(0)
    start = MiniMaxM3VLForCausalLM(scale.config()).to(options.device, torch.float32)
    trained = {name: train(start, name, tokens) for name in IMPLEMENTATIONS}
    pairs = zip(*(trained[name]["loss"] for name in IMPLEMENTATIONS))
    difference = max(abs(one - other) for one, other in pairs)
    document = {
        "kind": "nsa-hf-minimax",
        "schema_version": 1,
        "machine": machine(options.device),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "scale": dataclasses.asdict(scale),
        "learning_rate": LEARNING_RATE,
        "parameters": sum(parameter.numel() for parameter in start.parameters()),
        "largest_difference": difference,
        **trained,
    }
    if options.json is not None:
        write_atomic(options.json, json.dumps(document, indent=1) + "\n", force=True)
    print(f"largest difference of the losses: {difference:.2e}")
    if difference < LIMIT:
        return 0
    print(f"the losses must differ by less than {LIMIT:g}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
