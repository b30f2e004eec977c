"""The entry point of the plug-in, and the versions of vLLM that it supports."""

from __future__ import annotations

from nsa_core.errors import Unsupported

ARCHITECTURES = ("NSALlamaForCausalLM", "NSAQwen2ForCausalLM", "NSAQwen3ForCausalLM")
# The plug-in uses interfaces that vLLM changes between minor versions.
SUPPORTED = "0.32"


def register() -> None:
    """Register the NSA models with vLLM, and their configurations with transformers."""
    from vllm import ModelRegistry

    import nsa_models.hf  # noqa: F401  # registers the configurations

    for name in ARCHITECTURES:
        ModelRegistry.register_model(name, "nsa_vllm.models:NSAForCausalLM")


def check_version(version: str) -> None:
    """Check the version of vLLM.

    Raises:
        Unsupported: the version is not one that the tests of this package ran with.
    """
    if ".".join(version.split(".")[:2]) != SUPPORTED:
        raise Unsupported(
            f"nsa-vllm supports vLLM >= {SUPPORTED}.0 and < {_next(SUPPORTED)}.0, but {version} is"
            f" installed: pip install 'vllm=={SUPPORTED}.*'"
        )


def _next(version: str) -> str:
    major, minor = version.split(".")
    return f"{major}.{int(minor) + 1}"
