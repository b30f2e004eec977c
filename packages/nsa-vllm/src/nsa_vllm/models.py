"""Llama, Qwen2 and Qwen3 with NSA, as models of vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from vllm.config import CompilationConfig, VllmConfig
from vllm.model_executor.models.llama import LlamaDecoderLayer, LlamaForCausalLM

from nsa_core.errors import Unsupported
from nsa_vllm.attention import NSAServedAttention

_OPERATOR = "nsa_vllm::attention"
if _OPERATOR not in CompilationConfig._attention_ops:  # CUDA graphs of parts of a model end there
    CompilationConfig._attention_ops.append(_OPERATOR)


class NSADecoderLayer(LlamaDecoderLayer):
    """A layer with NSA. The rest of Qwen2 and Qwen3 is that of Llama."""

    def __init__(self, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config, prefix, attn_layer_type=NSAServedAttention)


class NSAForCausalLM(LlamaForCausalLM):
    """A language model with NSA.

    Raises:
        Unsupported: an option of vLLM is set that does not work with NSA models.
    """

    # vLLM itself refuses what these declare.
    supports_lora: ClassVar[Literal[False]] = False  # type: ignore[assignment]
    supports_pp: ClassVar[Literal[False]] = False  # type: ignore[assignment]
    supports_eagle: ClassVar[Literal[False]] = False  # type: ignore[assignment]
    supports_eagle3: ClassVar[Literal[False]] = False  # type: ignore[assignment]

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        if problems := [*_problems(vllm_config)]:
            raise Unsupported(f"NSA models in vLLM: {'; '.join(problems)}")
        super().__init__(vllm_config=vllm_config, prefix=prefix, layer_type=NSADecoderLayer)


def _problems(config: VllmConfig) -> Iterator[str]:
    """Yield why a configuration of vLLM is not supported."""
    model, parallel = config.model_config.hf_config, config.parallel_config
    if model.nsa_layers is not None and len(model.nsa_layers) < model.num_hidden_layers:
        yield (
            f"nsa_layers is {model.nsa_layers}, but all {model.num_hidden_layers} layers must have"
            " NSA: serve such a model with `transformers serve`"
        )
    if (model.nsa or {}).get("compress_stride") == 1:  # cmp would have the blocks of sel
        yield "nsa.compress_stride must be > 1"
    for name in ("tensor_parallel_size", "decode_context_parallel_size"):
        if (size := getattr(parallel, name)) > 1:
            yield f"{name} must be 1, got {size}: start one server per GPU (data parallelism)"
    if parallel.enable_dbo:
        yield "enable_dbo must not be set"
    if config.quant_config is not None:
        yield f"quantization must not be set, got {config.quant_config.get_name()!r}"
    if (dtype := config.cache_config.cache_dtype) != "auto":
        yield f"kv_cache_dtype must be 'auto', got {dtype!r}"
    if config.speculative_config is not None and config.speculative_config.method != "ngram":
        yield f"speculative method must be 'ngram', got {config.speculative_config.method!r}"
    if config.kv_transfer_config is not None:
        yield "kv_transfer_config must not be set: the cache cannot be offloaded or transferred"
