"""The entry point of the plug-in, and the versions of vLLM that it supports."""

from __future__ import annotations

from typing import Any, NoReturn

from nsa_core.errors import Unsupported

ARCHITECTURES = ("NSALlamaForCausalLM", "NSAQwen2ForCausalLM", "NSAQwen3ForCausalLM")
OPERATOR = "nsa_vllm::attention"  # vLLM captures the parts of a model between such operators
# The tests ran with this minor version. vLLM changes the interfaces below between them.
SUPPORTED = (0, 32)


def register() -> None:
    """Register the NSA models with vLLM, and their configurations with transformers.

    With a version of vLLM that is not supported, the configuration of an NSA model raises
    Unsupported when vLLM reads it; vLLM goes on serving other models.
    """
    import vllm
    from transformers import AutoConfig, PreTrainedConfig

    from nsa_models.hf import NSALlamaConfig, NSAQwen2Config, NSAQwen3Config

    configs: tuple[Any, ...] = (NSALlamaConfig, NSAQwen2Config, NSAQwen3Config)
    if problem := version_problem(vllm.__version__):

        def refuse(*_: Any, **__: Any) -> NoReturn:
            raise Unsupported(problem)

        fields = {"from_dict": staticmethod(refuse)}
        configs = tuple(
            type(x.__name__, (PreTrainedConfig,), {"model_type": x.model_type, **fields})
            for x in configs
        )
    else:
        from vllm.config import CompilationConfig
        from vllm.model_executor.models.config import MODELS_CONFIG_MAP

        from nsa_vllm.options import NSAOptions

        if OPERATOR not in CompilationConfig._attention_ops:
            CompilationConfig._attention_ops.append(OPERATOR)
        MODELS_CONFIG_MAP.update(dict.fromkeys(ARCHITECTURES, NSAOptions))
    for config in configs:
        AutoConfig.register(config.model_type, config, exist_ok=True)
    for name in ARCHITECTURES:
        vllm.ModelRegistry.register_model(name, "nsa_vllm.models:NSAForCausalLM")


def version_problem(version: str) -> str:
    """Return why a version of vLLM is not supported, or ""."""
    major, minor = SUPPORTED
    if version.split(".")[:2] == [str(major), str(minor)]:
        return ""
    return (
        f"nsa-vllm supports vLLM >= {major}.{minor} and < {major}.{minor + 1}, but {version} is"
        f" installed: pip install 'vllm=={major}.{minor}.*'"
    )
