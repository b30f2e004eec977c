"""Train a small MiniMax-M3 with "nsa_blocks" and with "eager": the same losses, step by step.

    python benchmarks/hugging_face/minimax_learning.py --json hf_minimax.json
    python benchmarks/hugging_face/minimax_learning.py --scale tiny --device cpu   # some seconds

All trainings begin with the same random weights and read the same rows of source code, in float32
without TF32, so that only rounding differs. The model chooses blocks of keys and experts by rank:
where two ranks are nearly equal, rounding decides, and later steps amplify the difference. Two
further kinds of training tell this from a wrong kernel:

- the control is "eager" again, but each initial weight is moved to the next number of float32;
- a replay makes the choices of "eager" at every step, so that rounding cannot change a choice.

A high learning rate amplifies more, with and without a replay. Choose it by the control alone: so
low that rounding moves no loss by the bound, while the loss still falls clearly.
--only-control --learning-rate X shows both.

Exit code 1 if the losses of "nsa_blocks", free or replayed, differ from those of "eager" by 1e-3 or
more at any step. The file is written at the end: an interrupted run leaves none.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import statistics
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import MiniMaxM3VLTextConfig
from transformers.models.minimax_m3_vl.modeling_minimax_m3_vl import (
    MiniMaxM3VLForCausalLM,
    MiniMaxM3VLIndexer,
    MiniMaxM3VLTopKRouter,
)

from nsa_bench.environment import machine
from nsa_core.util.atomic_files import write_atomic
from nsa_models.hf import minimax
from nsa_models.lm.data import is_held_out

LIMIT = 1e-3  # nats per byte
EPSILON = 1e-6
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}


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
        learning_rate: Learning rate of AdamW.
    """

    steps: int
    batch: int
    length: int
    block: int
    hidden: int
    layers: int
    heads: int
    head_dim: int
    learning_rate: float

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
    "full": Scale(200, 4, 2048, 64, 128, 4, 8, 64, 1e-4),
    "tiny": Scale(5, 2, 96, 16, 32, 2, 2, 16, 3e-4),
}


class Choices:
    """The blocks and experts that a model chooses in its forward passes.

    Args:
        model: The model to watch.
        expected: Choices of another training to compare with; None: record the choices.
        replay: Return the expected choices to the model.

    Attributes:
        made: The recorded choices in order, [..., n] integers.
        counts: How many choices of blocks and of experts each layer made, in order.
        changed: How many of them differ from the expected ones as sets.
    """

    def __init__(
        self, model: torch.nn.Module, expected: list[torch.Tensor] | None, replay: bool = False
    ) -> None:
        self.expected, self.replay = iter(expected or ()), replay
        self.recording = expected is None
        self.made: list[torch.Tensor] = []
        self.counts: dict[str, list[int]] = {"blocks": [], "experts": []}
        self.changed: dict[str, list[torch.Tensor]] = {"blocks": [], "experts": []}
        self._hooks = [
            module.register_forward_hook(hook)
            for module in model.modules()
            for kind, hook in (
                (MiniMaxM3VLIndexer, self._blocks),
                (MiniMaxM3VLTopKRouter, self._experts),
            )
            if isinstance(module, kind)
        ]

    def stop(self) -> None:
        """Watch the model no longer."""
        for hook in self._hooks:
            hook.remove()

    def _blocks(self, module: Any, args: Any, chosen: torch.Tensor) -> torch.Tensor:
        return self._choose("blocks", chosen)

    def _experts(self, module: Any, args: Any, output: Any) -> Any:
        logits, weights, own = output
        chosen = self._choose("experts", own)
        if self.replay:
            weights = logits.float().sigmoid().gather(1, chosen)
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights, chosen

    def _choose(self, kind: str, own: torch.Tensor) -> torch.Tensor:
        self.counts[kind].append(own.shape[:-1].numel())
        if self.recording:
            self.made.append(own.to(torch.int16))
            return own
        expected = next(self.expected).to(own.dtype)
        differs = (own.sort(-1).values != expected.sort(-1).values).any(-1)
        self.changed[kind].append(differs.sum())
        return expected if self.replay else own

    def made_per_step(self, steps: int) -> dict[str, int]:
        """Return how many choices of blocks and of experts a step makes."""
        return {kind: sum(counts) // steps for kind, counts in self.counts.items()}

    def changed_per_step(self, kind: str, steps: int) -> list[int]:
        """Return how many choices of blocks or of experts differ, by step."""
        counts = torch.stack(self.changed[kind]).view(steps, -1).sum(1)
        values: list[int] = counts.tolist()
        return values


def rows(scale: Scale, text: torch.Tensor) -> torch.Tensor:
    """Return the rows of all steps, bytes as int64 [steps, B, S]."""
    generator = torch.Generator().manual_seed(0)
    count = (scale.steps, scale.batch)
    starts = torch.randint(len(text) - scale.length, count, generator=generator)
    return text[starts[..., None] + torch.arange(scale.length)].long()


def moved(model: MiniMaxM3VLForCausalLM) -> MiniMaxM3VLForCausalLM:
    """Return a copy whose parameters are the next numbers of their dtype, up or down at random."""
    model, generator = copy.deepcopy(model), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            up = torch.randint(2, parameter.shape, generator=generator).to(parameter.device)
            parameter.copy_(torch.nextafter(parameter, (2.0 * up - 1) * torch.inf))
    return model


class Training:
    """A training of a copy of a model.

    Args:
        start: The model.
        implementation: Its attention implementation.
        learning_rate: Learning rate of AdamW.
        like: A training whose choices are expected; None: record the choices.
        replay: Make the expected choices.
    """

    def __init__(
        self,
        start: MiniMaxM3VLForCausalLM,
        implementation: str,
        learning_rate: float,
        like: Training | None = None,
        replay: bool = False,
    ) -> None:
        self.model = copy.deepcopy(start).train()
        self.model.set_attn_implementation(implementation)
        self.like, self.loss, self.seconds = like, [], []
        self.choices = Choices(self.model, like and like.choices.made, replay)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=learning_rate, eps=EPSILON)

    def run(self, tokens: torch.Tensor) -> dict[str, Any]:
        """Train on the rows of all steps [steps, B, S]; return the fields of the result."""
        for batch in tokens:
            started = time.perf_counter()
            loss = self.model(input_ids=batch, labels=batch, use_cache=False).loss
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.loss.append(loss.item())  # waits for the device
            self.seconds.append(time.perf_counter() - started)
        self.choices.stop()
        settled = self.seconds[len(self.seconds) // 4 :]  # the first steps compile kernels
        fields: dict[str, Any] = {
            "loss": self.loss,
            "seconds_per_step": round(statistics.median(settled), 5),
        }
        if self.like is not None:
            differences = [abs(a - b) for a, b in zip(self.loss, self.like.loss)]
            fields["largest_difference"] = max(differences)
            for kind in self.choices.changed:
                fields[f"changed_{kind}"] = self.choices.changed_per_step(kind, len(tokens))
        return fields

    def gradients(self, batch: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the gradient of each parameter that has one, by name, for rows [B, S]."""
        self.model(input_ids=batch, labels=batch, use_cache=False).loss.backward()
        self.choices.stop()
        gradients = {
            name: parameter.grad
            for name, parameter in self.model.named_parameters()
            if parameter.grad is not None
        }
        self.optimizer.zero_grad()
        return gradients


def compare_gradients(model: MiniMaxM3VLForCausalLM, batch: torch.Tensor) -> dict[str, Any]:
    """Compare the gradients of both implementations with the choices of "eager", name by name.

    Returns:
        The parameter with the largest difference, the norm of its difference over its norm, and the
        number of parameters that have a gradient.

    Raises:
        RuntimeError: Different parameters have a gradient.
    """
    eager = Training(model, "eager", 0.0)
    expected = eager.gradients(batch)
    actual = Training(model, minimax.NAME, 0.0, eager, replay=True).gradients(batch)
    if actual.keys() != expected.keys():
        names = ", ".join(sorted(actual.keys() ^ expected.keys()))
        raise RuntimeError(f"only one implementation has gradients of {names}")
    differences = {
        name: float((actual[name] - gradient).norm() / gradient.norm())
        for name, gradient in expected.items()
    }
    name = max(differences, key=differences.__getitem__)
    return {"parameter": name, "difference": differences[name], "parameters": len(differences)}


def library_sources() -> torch.Tensor:
    """Return the source files of Python's own library, uint8 [N], without those held out."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [
        path.read_bytes()
        for path in sorted(root.rglob("*.py"))
        if not SKIPPED & set(path.relative_to(root).parts)
    ]
    training = [file for file in files if not is_held_out(file.decode(errors="replace"), 0.05)]
    return torch.frombuffer(bytearray(b"".join(training)), dtype=torch.uint8)


def train_all(scale: Scale, device: str, with_kernel: bool = True) -> dict[str, Any]:
    """Run all trainings, or "eager" and its controls only; return the fields of the result."""
    tokens = rows(scale, library_sources()).to(device)
    torch.manual_seed(0)
    start = MiniMaxM3VLForCausalLM(scale.config()).to(device, torch.float32)
    near, rate = moved(start), scale.learning_rate
    eager = Training(start, "eager", rate)
    trained: dict[str, Any] = {"eager": eager.run(tokens)}
    report("eager", trained["eager"])
    others = {
        "control": (near, "eager", False),
        minimax.NAME: (start, minimax.NAME, False),
        "control_replayed": (near, "eager", True),
        f"{minimax.NAME}_replayed": (start, minimax.NAME, True),
    }
    for name, (model, implementation, replay) in others.items():
        if implementation == minimax.NAME and not with_kernel:
            continue
        trained[name] = Training(model, implementation, rate, eager, replay).run(tokens)
        report(name, trained[name])
    if not with_kernel:
        return trained
    return {
        "parameters": sum(parameter.numel() for parameter in start.parameters()),
        "limit": LIMIT,
        "choices_per_step": eager.choices.made_per_step(len(tokens)),
        "tf32": torch.backends.cuda.matmul.allow_tf32,
        "gradients_at_start": compare_gradients(start, tokens[0]),
        "gradients_at_end": compare_gradients(eager.model, tokens[0]),
        **trained,
    }


def report(name: str, trained: dict[str, Any]) -> None:
    """Print the losses of a training, and what changed against "eager"."""
    losses = trained["loss"]
    line = f"{name}: loss {losses[0]:.4f} to {losses[-1]:.4f}"
    if "largest_difference" in trained:
        line += f", largest difference {trained['largest_difference']:.2e}"
        for kind in ("blocks", "experts"):
            changed = trained[f"changed_{kind}"]
            first = next((step for step, count in enumerate(changed, 1) if count), None)
            line += f", {sum(changed)} {kind} changed"
            line += f" from step {first} on" if first else ""
    print(line, flush=True)


def main() -> int:
    """Run all trainings, print and save the result; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    available = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=available, help=f"default: {available}")
    parser.add_argument("--scale", choices=list(SCALES), default="full", help="default: full")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result file")
    parser.add_argument(
        "--only-control",
        action="store_true",
        help='train only "eager" and its controls, to choose a learning rate; writes no file',
    )
    parser.add_argument("--learning-rate", type=float, help="default: that of the scale")
    options = parser.parse_args()
    if options.only_control and options.json is not None:
        parser.error("--json needs all trainings; leave out --json or --only-control")
    minimax.register()
    torch.set_float32_matmul_precision("highest")  # no TF32
    scale = SCALES[options.scale]
    if options.learning_rate is not None:
        scale = dataclasses.replace(scale, learning_rate=options.learning_rate)
    if options.only_control:
        train_all(scale, options.device, with_kernel=False)
        return 0
    document = {
        "kind": "nsa-hf-minimax",
        "schema_version": 1,
        "machine": machine(options.device),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "scale": dataclasses.asdict(scale),
        **train_all(scale, options.device),
    }
    if options.json is not None:
        write_atomic(options.json, json.dumps(document, indent=1) + "\n", force=True)
    names = (minimax.NAME, f"{minimax.NAME}_replayed")
    wrong = [name for name in names if not document[name]["largest_difference"] < LIMIT]
    for name in wrong:
        difference = document[name]["largest_difference"]
        print(
            f"{name}: a loss differs by {difference:.2e}, must be less than {LIMIT:g}",
            file=sys.stderr,
        )
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
