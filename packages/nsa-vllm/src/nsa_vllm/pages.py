"""The keys and values of NSA in the cache of vLLM.

Each layer has four caches in vLLM's sense, which vLLM puts into three groups with a block table
each:

    sel, cmp   FullAttentionSpec     all tokens; one state per d tokens. They share a block table.
    win        SlidingWindowSpec(w)  vLLM frees the blocks behind the window.
    raw        SlidingWindowSpec(l)  the tokens of the compressed token that comes next

:mod:`nsa_vllm.layout` says which compressed tokens a block of cmp holds.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

from nsa_core import DecodeRows, NSAConfig, decode_rows
from nsa_vllm.layout import pitch, state_pages, state_table

if TYPE_CHECKING:
    from vllm.config import VllmConfig

BRANCHES = ("cmp", "sel", "win", "raw")


class BranchCache(AttentionLayerBase):
    """One of the four caches of a layer.

    vLLM finds it in its ``static_forward_context`` under the name of the layer and the branch.

    Args:
        branch: one of BRANCHES.
        config: the sizes of the layer.
        dtype: the dtype of keys and values.
    """

    def __init__(self, branch: str, config: NSAConfig, dtype: torch.dtype) -> None:
        self.branch, self.config, self.dtype = branch, config, dtype
        self.kv_cache = torch.tensor([])  # vLLM reads and replaces it

    def get_attn_backend(self) -> type[AttentionBackend]:
        """Return the backend of all branches."""
        return NSABackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        """Return the tokens that vLLM keeps, and the size of a block.

        A block is as large as ``--block-size`` asks for, and holds whole selection blocks.
        """
        config = self.config
        unit = math.lcm(config.select_block_size, config.compress_stride)
        block_size = -(-vllm_config.cache_config.block_size // unit) * unit
        sizes = {
            "block_size": block_size,
            "num_kv_heads": config.n_kv_heads,
            "head_size": config.qk_dim,
            "head_size_v": config.v_dim,
            "dtype": self.dtype,
        }
        if self.branch == "sel":
            return FullAttentionSpec(**sizes)
        if self.branch == "cmp":
            return FullAttentionSpec(**sizes, tokens_per_state=config.compress_stride)
        window = config.window_size if self.branch == "win" else config.compress_block_size
        return SlidingWindowSpec(**sizes, sliding_window=window)

    def bind_kv_cache(self, kv_cache: torch.Tensor) -> None:
        """Take the memory of this layer and branch.

        Args:
            kv_cache: [blocks, G, rows, Dk + Dv], any strides but that of the last axis.
        """
        self.kv_cache = kv_cache
        pages = kv_cache.transpose(1, 2)
        if self.branch == "cmp":
            self.pitch = pitch(pages)
            pages = state_pages(pages)
        self.k, self.v = pages.split([self.config.qk_dim, self.config.v_dim], -1)

    def table(self, blocks: torch.Tensor, max_len: int) -> torch.Tensor:
        """Return the block table of the branch.

        Args:
            blocks: int32 [B, columns], the block table of vLLM.
            max_len: host integer, an upper bound of the lengths.
        """
        if self.branch != "cmp":
            return blocks
        states = self.kv_cache.shape[2]
        return state_table(blocks, self.config.geometry, states, self.pitch, max_len)


class BranchMetadata(NamedTuple):
    """A step of one branch, for all layers.

    Attributes:
        table: the block table.
        max_len: an upper bound of the lengths.
        rows: of sel only, the sequence and the position of each row of the step, and its chunks.
    """

    table: torch.Tensor
    max_len: int
    rows: DecodeRows | None


class NSAMetadataBuilder(AttentionMetadataBuilder[BranchMetadata]):
    """Makes the metadata of one branch, once a step."""

    def __init__(
        self,
        kv_cache_spec: KVCacheSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layers = vllm_config.compilation_config.static_forward_context
        self.cache: BranchCache = layers[layer_names[0]]

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> BranchMetadata:
        """Return the metadata of a step."""
        step = common_attn_metadata
        table = self.cache.table(step.block_table_tensor, step.max_seq_len)
        rows = None
        if self.cache.branch == "sel":
            lengths = step.seq_lens_cpu_upper_bound  # exact for prompts
            on_host = None if lengths is None else (step.query_start_loc_cpu, lengths)
            tensors = (step.query_start_loc, step.seq_lens)
            rows = decode_rows(*tensors, step.num_actual_tokens, on_host)
        return BranchMetadata(table, step.max_seq_len, rows)


class NSABackend(AttentionBackend):
    """The backend of all branches: it says which memory they take, and makes their metadata.

    The attention itself is in :class:`nsa_vllm.attention.NSAServedAttention`.
    """

    @staticmethod
    def get_name() -> str:
        """Return the name."""
        return "NSA"

    @staticmethod
    def get_impl_cls() -> type:
        """Return a type that vLLM asks for support of context parallelism: none."""
        return NoImplementation

    @staticmethod
    def get_builder_cls() -> type[NSAMetadataBuilder]:
        """Return the class that makes metadata."""
        return NSAMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(
        kv_cache_spec: KVCacheSpec | None = None,
    ) -> list[int | MultipleOf]:
        """Return the sizes of blocks: those of the spec."""
        return [MultipleOf(1) if kv_cache_spec is None else kv_cache_spec.block_size]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Return the layouts in which sel and cmp, whose pages differ in size, share blocks."""
        return (KVCacheLayout.BLNHC, KVCacheLayout.BLHNC)


class NoImplementation:
    """In place of an AttentionImpl, which this backend does not have."""

    supports_pcp = False
    supports_dcp = False
