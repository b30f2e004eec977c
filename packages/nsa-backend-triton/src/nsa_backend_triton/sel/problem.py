"""The inputs of the backward of the selected branch, and the tuned settings of sel's kernels."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from nsa_backend_triton.host import configs, constexprs, device, strides
from nsa_backend_triton.host.launch_cache import cached_by_metadata
from nsa_backend_triton.host.sequences import Sequences
from nsa_core.contract import SlotCall
from nsa_core.layout import BlockGeometry


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
        return {
            **constexprs.widths(self.k, self.v),
            "GROUP": self.group,
            "NUM_KV_HEADS": self.k.shape[-2],
            "SELECT_BLOCK": self.call.geometry.select_block_size,
            "VARLEN": self.seqs.packed,
            "PARTIAL": self.seqs.partial,
            "ACC": constexprs.accumulator(self.q.dtype),
        }


@cached_by_metadata
def tuned_settings(
    q: Tensor, k: Tensor, v: Tensor, geometry: BlockGeometry, kernel: str
) -> configs.Settings:
    """Return the tuned settings of ``kernel``."""
    return configs.pick(
        kernel,
        device.architecture(q.device),
        head_dim=k.shape[-1],
        v_head_dim=v.shape[-1],
        itemsize=q.itemsize,
        heads=q.shape[-2] // k.shape[-2],
        block=geometry.select_block_size,
        selected=geometry.num_selected_blocks,
    )
