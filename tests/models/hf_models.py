"""Tiny dense and NSA models of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, Qwen2Config, Qwen3Config, Trainer, TrainingArguments

import nsa_models.hf as hf

NSA = {
    "compress_block_size": 8,
    "compress_stride": 4,
    "select_block_size": 16,
    "num_selected_blocks": 3,
    "window_size": 20,
}
SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
# head_dim other than hidden_size / num_attention_heads = 8
SIZES_OF_KIND: dict[str, dict[str, Any]] = {"llama": {}, "qwen2": {}, "qwen3": {"head_dim": 16}}
NSA_CONFIGS = {
    "llama": hf.NSALlamaConfig,
    "qwen2": hf.NSAQwen2Config,
    "qwen3": hf.NSAQwen3Config,
}
DENSE_CONFIGS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
NSA_MODELS = {
    "llama": hf.NSALlamaForCausalLM,
    "qwen2": hf.NSAQwen2ForCausalLM,
    "qwen3": hf.NSAQwen3ForCausalLM,
}


def nsa_model(kind: str = "llama", dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """An NSA model with random weights, in eval mode; biases and norms are random too."""
    values = {**SIZES, **SIZES_OF_KIND[kind], "nsa": NSA, **changes}
    model = NSA_MODELS[kind](NSA_CONFIGS[kind](**values))
    randomize(model)
    return model.to(dtype).eval()


@torch.no_grad()
def randomize(model: Any) -> None:
    """Add noise to biases and norms, whose initial values hide errors."""
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            parameter.add_(0.3 * torch.randn_like(parameter))


def padded_batch(
    lengths: tuple[int, ...], side: str = "left"
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Random prompts as (input_ids, attention_mask, prompts without padding)."""
    longest = max(lengths)
    ids = torch.zeros(len(lengths), longest, dtype=torch.long)
    mask, prompts = torch.zeros_like(ids), []
    for row, length in enumerate(lengths):
        place = slice(longest - length, None) if side == "left" else slice(0, length)
        prompt = torch.randint(1, 61, (length,))
        ids[row, place], mask[row, place] = prompt, 1
        prompts.append(prompt[None])
    return ids, mask, prompts


def trained(
    model: Any, data: list[dict[str, Any]], folder: Path, collator: Any = None, **options: Any
) -> tuple[Trainer, list[float]]:
    """Train with the Trainer of transformers; return it, and the loss of each step."""
    options = {"max_steps": 3, "per_device_train_batch_size": 2, "logging_steps": 1, **options}
    quiet: dict[str, Any] = {"save_strategy": "no", "report_to": [], "disable_tqdm": True}
    arguments = TrainingArguments(output_dir=str(folder), use_cpu=True, **quiet, **options)
    trainer = Trainer(model=model, args=arguments, train_dataset=data, data_collator=collator)
    trainer.train()
    return trainer, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
