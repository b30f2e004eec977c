"""Native Sparse Attention in vLLM: a plug-in that serves nsa_llama, nsa_qwen2 and nsa_qwen3.

vLLM calls :func:`register` in each of its processes (entry point ``vllm.general_plugins``).
"""

from nsa_vllm.plugin import register

__all__ = ["register"]
