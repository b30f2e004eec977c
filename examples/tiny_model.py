"""Write a tiny NSA model and a byte tokenizer to a folder, for examples that run on a CPU."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from nsa_models.hf import NSAQwen3Config, NSAQwen3ForCausalLM

TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}assistant: {% endif %}"


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose tokens are the 256 bytes, <pad> and <eos>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: id for id, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        chat_template=TEMPLATE,
        model_max_length=1 << 20,
    )


def tiny_model(folder: str) -> str:
    """Write the model and its tokenizer to ``folder``, if it has none, and return ``folder``."""
    if (Path(folder) / "config.json").exists():
        return folder
    torch.manual_seed(0)
    tokenizer = byte_tokenizer()
    config = NSAQwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        nsa={"select_block_size": 32, "num_selected_blocks": 4, "window_size": 64},
    )
    NSAQwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
