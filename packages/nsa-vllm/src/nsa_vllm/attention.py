"""The attention layer of an NSA model in vLLM, on nsa_decode over vLLM's pages."""

from __future__ import annotations

import functools
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.models.utils import extract_layer_index
from vllm.utils.torch_utils import direct_register_custom_op

from nsa_core import LayerPages, NSAConfig, PagedKV, nsa_decode, rope_angles
from nsa_models.hf import NSASelfAttention
from nsa_models.hf.configs import layer_spec
from nsa_vllm.pages import BRANCHES, BranchCache


class NSAServedAttention(NSASelfAttention):
    """An NSA layer whose keys and values are in vLLM's cache.

    Args:
        config: the configuration of the model.
        prefix: the name of the layer.
        **_: other arguments of vLLM's attention layers, which ``config`` states too.
    """

    def __init__(self, *, config: Any, prefix: str, **_: Any) -> None:
        super().__init__(layer_spec(config), extract_layer_index(prefix))
        vllm_config = get_current_vllm_config()
        self.prefix, dtype = prefix, vllm_config.model_config.dtype
        branches = [b for b in BRANCHES if not (b == "win" and self.config.shared_kv)]
        self.caches = {branch: BranchCache(branch, self.config, dtype) for branch in branches}
        layers = vllm_config.compilation_config.static_forward_context
        layers[prefix] = self
        layers |= {f"{prefix}.{branch}": cache for branch, cache in self.caches.items()}
        self.rope = _angles(self.config, vllm_config.model_config.max_model_len)

    def forward(  # type: ignore[override]  # the call of vLLM
        self, positions: torch.Tensor, hidden_states: torch.Tensor
    ) -> torch.Tensor:
        """Append the tokens of a step to their sequences, and attend.

        Args:
            positions: the positions of the tokens, which the metadata of the step has too.
            hidden_states: [T, dim].
        """
        output = torch.empty_like(hidden_states)
        torch.ops.nsa_vllm.attention(hidden_states, output, self.prefix)
        return output

    def run(self, x: torch.Tensor, output: torch.Tensor) -> None:
        """Write the output of the layer for x [T, dim] to ``output``."""
        metadata = get_forward_context().attn_metadata
        if metadata is None:  # vLLM measures the memory of a step before it allocates the cache
            output.zero_()
            return
        steps = {branch: metadata[f"{self.prefix}.{branch}"] for branch in self.caches}
        parts = {b: PagedKV(c.k, c.v, steps[b].table) for b, c in self.caches.items()}
        pages = LayerPages(**{"win": parts["sel"], **parts})  # shared_kv: one pair for both
        rows, max_len = steps["sel"].rows, steps["sel"].max_len
        count = len(rows.starts)
        x, padding = x[:count], output[count:]
        q, k, v = self.heads(x)
        o = nsa_decode(
            q,
            k,
            v,
            self.gate(x),
            pages,
            rows,
            config=self.config,
            phi=(self.phi_k, self.phi_v),
            rope=self.rope,
            max_len=max_len,
            backends=self.spec.backends,
        )
        output[:count] = self.out(o.flatten(1))
        padding.zero_()


@functools.lru_cache(maxsize=1)
def _angles(config: NSAConfig, positions: int) -> Any:
    """Return the angles of all positions, which the layers of a model share."""
    return rope_angles(config, positions)


def _attention(x: torch.Tensor, output: torch.Tensor, layer: str) -> None:
    get_forward_context().no_compile_layers[layer].run(x, output)


def _fake(x: torch.Tensor, output: torch.Tensor, layer: str) -> None:
    """The shapes are those of the arguments."""


_library = torch.library.Library("nsa_vllm", "FRAGMENT")
direct_register_custom_op("attention", _attention, ["output"], _fake, _library)
