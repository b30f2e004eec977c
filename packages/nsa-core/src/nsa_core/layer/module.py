"""NSAttention: the attention layer of Native Sparse Attention as a torch module (arXiv 2502.11089,
Figure 2).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from nsa_core.cache.new_cache import make_cache
from nsa_core.cache.sizes import CacheSizes
from nsa_core.layer.attention import nsa_attention
from nsa_core.layer.gating import gates_of
from nsa_core.layer.plain_linear import dtype_and_device_from
from nsa_core.layer.projection import NSAProjections
from nsa_core.torch_ops.tensor_checks import check_layer_input

if TYPE_CHECKING:
    from nsa_core.cache.cache import NSACache
    from nsa_core.dispatch.plan import Plan
    from nsa_core.layer.stats import NSAStats


class NSAttention(NSAProjections):
    """o = W_o concat over heads of sum over c of g^c Attn(q, K^c, V^c): x [B, S, dim] -> [B, S,
    dim].

    One fused projection gives q and a key/value pair per branch (one pair with
    ``config.shared_kv``); phi compresses the first pair; the gates come from x. Packed documents: x
    [T, dim] with ``cu_seqlens`` (see nsa_core.unpad).

    The gradient of some parameters is zero by construction, because a term common to all compressed
    keys leaves every softmax unchanged. Where k_cmp is not rotated after phi (``rope=False`` or
    ``rope_before_compress=True``) these are ``phi_k.down.bias`` (mlp), ``phi_k.proj.bias`` and
    ``phi_k.position`` (linear) and ``phi_k.bias`` (conv). With ``window_size=1`` the rows of
    ``qkv.weight`` that make k_win have no gradient either: one key has weight 1. All others are
    trained from the first step on, once some token sees two compressed tokens.

    Plans are cached and never part of the state_dict, a pickle or a deepcopy.

    Args:
        config: the layer's shapes and options.
        backends: as in :func:`nsa_core.resolve`: None, one name, or a mapping slot -> name.
        layer: name of the layer in errors.
        check: raise on the first branch output that is not finite. Costs a synchronisation per
            branch, and works eagerly only.
    """

    def forward(
        self,
        x: torch.Tensor,  # [B, S, dim], or packed [T, dim]
        cu_seqlens: torch.Tensor | None = None,  # int32 [documents + 1]
        max_seqlen: int | None = None,
        attention_mask: None = None,
        context: None = None,
        key_value_states: None = None,
        plan: Plan | None = None,
        cache: NSACache | None = None,
        new: Sequence[int] | torch.Tensor | None = None,  # int32 [B]
    ) -> torch.Tensor:
        """The layer's output, of x's shape, in the dtype of the projections or of autocast.

        With ``cache`` the tokens of x continue the sequences in the cache, and are added to it. The
        call runs without gradient, whatever the grad mode is (docs/decode.md).

        Args:
            x: [B, S, dim], or packed documents [T, dim].
            cu_seqlens: first row of each document and the number of rows T, on x's device.
            max_seqlen: the longest document's length, or a bound of it (default T). A smaller value
                gives wrong rows, and an error only on the CPU or with NSA_CHECK=1.
            attention_mask, context, key_value_states: must be None; named so that passing one is an
                error that says what to do instead.
            plan: the kernels of this call, instead of those that ``backends`` named. Its phase is
                "prefill"; with a cache only the first call of several tokens on empty sequences is
                prefill, and all others take a plan of phase "decode".
            cache: keys and values of earlier tokens, see :meth:`new_cache`.
            new: with a cache, the number of rows of each sequence that are tokens (None: all). The
                output of the rows past them is 0.

        Raises:
            InvalidInput: x or cu_seqlens do not fit the layer or the cache; a padding mask, or keys
                from elsewhere, are given; the cache has no room, and is unchanged.
            Unsupported: no backend takes the request.
        """
        weight, unsupported = dtype_and_device_from(self.qkv), (context, key_value_states)
        check_layer_input(
            x, self.config.dim, weight, cu_seqlens, max_seqlen, attention_mask, *unsupported
        )
        packed = cu_seqlens is not None
        if cache is not None or new is not None:
            from nsa_core.cache.step import step  # imports the compiler

            y: torch.Tensor = step(self, x, cache, new, plan, packed)
            return y
        q, k, v, k_cmp, v_cmp = self.project(x, cu_seqlens)
        gates, plan = gates_of(self.gate, x), self.plan_of(x, q, packed, plan)
        o = nsa_attention(
            q,
            k,
            v,
            gates,
            k_cmp=k_cmp,
            v_cmp=v_cmp,
            config=self.config,
            cu_seqlens=cu_seqlens,
            max_seqlen=max_seqlen,
            plan=plan,
        )
        y = self.out(o.flatten(-2))
        return y

    def new_cache(
        self,
        batch: int,
        max_len: int,
        *,
        page_size: int | None = None,
        num_pages: int | None = None,
        max_rollback: int = 0,
        max_step: int = 64,
        dtype: torch.dtype | None = None,
        device: str | torch.device | None = None,
        plan: Plan | None = None,
    ) -> NSACache:
        """An empty cache for ``forward(x, cache=...)``.

        Args:
            batch: number of sequences.
            max_len: most tokens of a sequence.
            page_size: tokens of a page, a multiple of l'. None: each sequence lies in one piece.
            num_pages: pages that all sequences share (default: as many as all can need).
            max_rollback: tokens that ``crop`` may take back.
            max_step: most rows of a captured step. A longer eager step takes more memory while it
                runs.
            dtype: of the keys and values (default: that of the projections).
            device: where the cache lies (default: the layer's device).
            plan: a plan for decode (default: that of ``backends``).

        Raises:
            InvalidInput: a size is out of range, or the plan does not fit.
            Unsupported, BackendUnavailable: no backend decodes here.
        """
        sizes = CacheSizes(batch, max_len, page_size, num_pages, max_rollback, max_step)
        return make_cache(self, sizes, self.out_dtype if dtype is None else dtype, device, plan)

    def stats(self, x: torch.Tensor, cu_seqlens: torch.Tensor | None = None) -> NSAStats:
        """Gates and selected blocks over x (see nsa_core.layer.stats); runs cmp and select, without
        gradient.
        """
        from nsa_core.layer.stats import summarize

        with torch.no_grad():
            check_layer_input(x, self.config.dim, dtype_and_device_from(self.qkv), cu_seqlens)
            q, _, _, k_cmp, v_cmp = self.project(x, cu_seqlens)
            plan = self.plan_of(x, q, cu_seqlens is not None)
            _, lse = plan.cmp(q, k_cmp, v_cmp, cu_seqlens=cu_seqlens)
            blocks = plan.select(q, k_cmp, lse, cu_seqlens=cu_seqlens)
            return summarize(gates_of(self.gate, x), blocks, self.config.geometry, cu_seqlens)
