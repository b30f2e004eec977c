"""Llama, Qwen2 and Qwen3 with NSA, as models of vLLM."""

from __future__ import annotations

from vllm.config import VllmConfig
from vllm.model_executor.models.llama import LlamaDecoderLayer, LlamaForCausalLM

from nsa_vllm.attention import NSAServedAttention


class NSADecoderLayer(LlamaDecoderLayer):
    """A layer with NSA. The rest of Qwen2 and Qwen3 is that of Llama."""

    def __init__(self, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config, prefix, attn_layer_type=NSAServedAttention)


class NSAForCausalLM(LlamaForCausalLM):
    """A language model with NSA."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, layer_type=NSADecoderLayer)
