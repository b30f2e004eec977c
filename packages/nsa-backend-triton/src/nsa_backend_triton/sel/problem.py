"""The inputs of the backward of the selected branch, and the tuned settings of its kernels."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from nsa_backend_triton.host import configs, constexprs, device, strides
from nsa_backend_triton.host.launch_cache import cached_by_metadata
from nsa_backend_triton.host.sequences import Sequences
from nsa_core.contract import SlotCall


class Problem(NamedTuple):
    """The inputs that the kernels of the backward share."""

    do: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    lse2: Tensor  # [B, S, Hq], contiguous; see delta.rows and core.backward
    delta: Tensor  # [B, S, Hq], contiguous
    seqs: Sequences
    call: SlotCall

    @property
    def group(self) -> int:
        """Query heads per kv head."""
        return self.q.shape[-2] // self.k.shape[-2]

    def strides(self) -> list[tuple[int, int, int]]:
        """(sequence, token, head) strides of q, k, v and do."""
        inputs = (self.q, self.k, self.v, self.do)
        return [strides.strides(x, self.seqs.packed, int64_products=True) for x in inputs]

    def constants(self) -> dict[str, object]:
        """Return the constexpr arguments that the kernels share."""
        head_dim, v_head_dim = self.k.shape[-1], self.v.shape[-1]
        return {
            "GROUP": self.group,
            "NUM_KV_HEADS": self.k.shape[-2],
            "HEAD_DIM": head_dim,
            "V_HEAD_DIM": v_head_dim,
            "HEAD_DIM_BAND": constexprs.band(head_dim),
            "V_HEAD_DIM_BAND": constexprs.band(v_head_dim),
            "SELECT_BLOCK": self.call.geometry.select_block_size,
            "VARLEN": self.seqs.packed,
            "PARTIAL": self.seqs.partial,
            "ACC": constexprs.accumulator(self.q.dtype),
        }


@cached_by_metadata
def tuned(q: Tensor, k: Tensor, v: Tensor, select_block: int, kernel: str) -> configs.Settings:
    """Return the tuned settings of ``kernel`` for blocks of ``select_block`` keys."""
    return configs.pick(
        kernel,
        device.architecture(q.device),
        head_dim=k.shape[-1],
        v_head_dim=v.shape[-1],
        itemsize=q.itemsize,
        heads=q.shape[-2] // k.shape[-2],
        block=select_block,
    )
