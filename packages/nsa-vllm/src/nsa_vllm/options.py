"""The options of vLLM that do not work with NSA models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vllm.model_executor.models.config import VerifyAndUpdateConfig

from nsa_core.errors import Unsupported

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class NSAOptions(VerifyAndUpdateConfig):
    """Checks the options, before vLLM starts its processes."""

    @staticmethod
    def verify_and_update_config(vllm_config: VllmConfig) -> None:
        """Check the options.

        Raises:
            Unsupported: one does not work; the message names all of them.
        """
        if problems := [*_problems(vllm_config)]:
            raise Unsupported(f"NSA models in vLLM: {'; '.join(problems)}")


def _problems(config: VllmConfig) -> Iterator[str]:
    """Yield why a configuration of vLLM is not supported."""
    model, parallel = config.model_config.hf_config, config.parallel_config
    if model.nsa_layers is not None and len(model.nsa_layers) < model.num_hidden_layers:
        yield (
            f"nsa_layers is {model.nsa_layers}, but all {model.num_hidden_layers} layers must have"
            " NSA: serve such a model with `transformers serve`"
        )
    if (model.nsa or {}).get("compress_stride") == 1:  # cmp would have the blocks of sel
        yield "nsa.compress_stride must be > 1, got 1"
    for dimension in ("tensor", "pipeline", "prefill_context", "decode_context"):
        if (size := getattr(parallel, name := f"{dimension}_parallel_size")) > 1:
            yield f"{name} must be 1, got {size}: start one server per GPU"
    if parallel.enable_dbo:
        yield "enable_dbo must not be set"
    if config.lora_config is not None:
        yield "enable_lora must not be set: merge the adapter into the model"
    if config.model_config.enable_sleep_mode:  # the angles of rope are no buffer to restore
        yield "enable_sleep_mode must not be set: end the server, and start it again"
    if config.model_config.quantization is not None:
        yield f"quantization must not be set, got {config.model_config.quantization!r}"
    if (dtype := config.cache_config.cache_dtype) != "auto":
        yield f"kv_cache_dtype must be 'auto', got {dtype!r}"
    if config.speculative_config is not None and config.speculative_config.method != "ngram":
        yield f"speculative method must be 'ngram', got {config.speculative_config.method!r}"
    if config.kv_transfer_config is not None:
        yield "kv_transfer_config must not be set: the cache cannot be offloaded or transferred"
