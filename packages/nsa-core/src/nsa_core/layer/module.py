"""NSAttention: the attention layer of Native Sparse Attention as a torch module (arXiv 2502.11089,
Figure 2).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from nsa_core.cache.new_cache import CacheSizes, make_cache
from nsa_core.config import NSAConfig, must_be_config
from nsa_core.dispatch.default_plan import default_plan, frozen_backends, is_long, must_be_plan
from nsa_core.dispatch.finite_checks import checked_plan
from nsa_core.layer.attention import nsa_attention
from nsa_core.layer.fused_heads import rotated_heads
from nsa_core.layer.gating import gates_of, make_gate
from nsa_core.layer.phi.chunks import PackedBlocks, packed_blocks
from nsa_core.layer.phi.kinds import compress_pair, make_phi
from nsa_core.layer.plain_linear import dtype_and_device_from, is_plain
from nsa_core.layer.rope import Table, apart, as_used, rope_table, rotate, table_for
from nsa_core.packing import token_places
from nsa_core.torch_ops.tensor_checks import check_layer_input
from nsa_core.torch_ops.torch_state import autocasts, eager

if TYPE_CHECKING:
    from nsa_core.cache.cache import NSACache
    from nsa_core.dispatch.plan import Plan
    from nsa_core.layer.stats import NSAStats


class HeadNorm(nn.Module):
    """x / sqrt(mean(x^2) + 1e-6) * weight over the head width, statistics in fp32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., D] -> the same shape and dtype."""
        weight = self.weight  # read once: a parametrisation computes it
        return F.rms_norm(x, weight.shape, weight.to(x.dtype), 1e-6)


class Projected(NamedTuple):
    """What a layer hands to :func:`nsa_attention`."""

    q: torch.Tensor  # [B, S, Hq, Dk], rotated
    k: tuple[None, torch.Tensor, torch.Tensor]  # (None, sel, win), [B, S, G, Dk], rotated
    v: tuple[None, torch.Tensor, torch.Tensor]  # (None, sel, win), [B, S, G, Dv]
    k_cmp: torch.Tensor  # [B, n_c, G, Dk], rotated
    v_cmp: torch.Tensor  # [B, n_c, G, Dv]


class NSAttention(nn.Module):
    """o = W_o concat over heads of sum over c of g^c Attn(q, K^c, V^c): x [B, S, dim] -> [B, S,
    dim].

    One fused projection gives q and a key/value pair per branch (one pair with
    ``config.shared_kv``); phi compresses the first pair; the gates come from x. Packed documents: x
    [T, dim] with ``cu_seqlens`` (see nsa_core.unpad).

    ``backends`` is that of :func:`nsa_core.resolve`: None, one name, or a mapping slot -> name.
    ``layer`` names the layer in errors. ``check=True`` raises on the first non-finite branch
    output, at the price of a synchronisation per branch (eager only); off, it costs nothing.

    Parameters whose gradient is zero by construction, because a term common to all compressed keys
    leaves every softmax unchanged, when k_cmp is not rotated after phi (``rope=False`` or
    ``rope_before_compress=True``): ``phi_k.down.bias`` (mlp), ``phi_k.proj.bias`` and
    ``phi_k.position`` (linear), ``phi_k.bias`` (conv). And with ``window_size=1`` the rows of
    ``qkv.weight`` that make k_win: one key has weight 1. All others are trained from the first step
    on, once some token sees two compressed tokens.

    Plans are caches: nothing of them is in the state_dict, a pickle or a deepcopy.
    """

    def __init__(
        self,
        config: NSAConfig,
        backends: str | Mapping[str, str] | None = None,
        *,
        layer: str | int | None = None,
        check: bool = False,
    ) -> None:
        super().__init__()
        must_be_config(config)
        self.config, self.layer, self.check = config, layer, check
        self.backends = frozen_backends(backends)
        pairs = 1 if config.shared_kv else 3
        q_width, k_width = config.n_heads * config.qk_dim, config.n_kv_heads * config.qk_dim
        v_width = config.n_kv_heads * config.v_dim
        self._widths = [q_width, *[k_width] * pairs, *[v_width] * pairs]
        self.qkv = nn.Linear(config.dim, sum(self._widths), bias=False)
        self.q_norm = HeadNorm(config.qk_dim) if config.qk_norm else nn.Identity()
        self.k_norm = HeadNorm(config.qk_dim) if config.qk_norm else nn.Identity()
        self.phi_k = make_phi(config.compress, config.geometry, config.qk_dim)
        self.phi_v = make_phi(config.compress, config.geometry, config.v_dim)
        self.gate = make_gate(config.gate, config.dim, config.n_heads)
        self.out = nn.Linear(config.n_heads * config.v_dim, config.dim, bias=False)
        self._last: tuple[torch.device, torch.dtype, bool, bool] | None = None
        for linear in (self.qkv, self.out):  # unit variance out for unit variance in
            nn.init.normal_(linear.weight, std=linear.in_features**-0.5)

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
        """The layer's output, of x's shape, in the dtype of the projections (autocast's, under
        autocast).

        ``max_seqlen`` is the longest document's length or a bound of it (default T); less gives
        wrong rows, and an error only on the CPU or with NSA_CHECK=1.

        ``plan`` runs this call on its kernels instead of those that ``backends`` named. It must be
        of phase "prefill"; with a cache, a first call of several tokens on empty sequences is a
        prefill, and all others are decode.

        With ``cache`` (see :meth:`new_cache`) x holds the next tokens of each sequence, the first
        ``new[b]`` rows of x[b] (None: all), and what came before lies in the cache, to which they
        are added. Rows past them give 0. Without gradient, whatever the grad mode is.
        docs/decode.md has more.

        Raises:
            InvalidInput: x or cu_seqlens do not fit the layer or the cache; a padding mask, or keys
                from elsewhere, are given; the cache has no room, and stays as it was.
            Unsupported: no backend takes the request.
        """
        dim, weight, elsewhere = (
            self.config.dim,
            dtype_and_device_from(self.qkv),
            (context, key_value_states),
        )
        check_layer_input(x, dim, weight, cu_seqlens, max_seqlen, attention_mask, *elsewhere)
        if cache is not None or new is not None:
            # whose exemption from torch.compile imports the compiler
            from nsa_core.cache.step import (
                step,
            )

            over_cache: torch.Tensor = step(
                self, x, cache, new, plan, packed=cu_seqlens is not None
            )
            return over_cache
        q, k, v, k_cmp, v_cmp = self.project(x, cu_seqlens)
        o = nsa_attention(
            q,
            k,
            v,
            gates_of(self.gate, x),
            k_cmp=k_cmp,
            v_cmp=v_cmp,
            config=self.config,
            cu_seqlens=cu_seqlens,
            max_seqlen=max_seqlen,
            plan=self.plan_of(x, q, cu_seqlens is not None, plan),
        )
        result: torch.Tensor = self.out(o.flatten(-2))
        return result

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
        """An empty cache of ``batch`` sequences of up to ``max_len`` tokens, for ``forward(x,
        cache=...)``.

        ``page_size``: a multiple of l'; None: a sequence lies in one piece. ``num_pages`` of it are
        shared by all sequences (default: as many as all can need). ``max_rollback``: tokens that
        ``crop`` may take back. ``max_step``: rows that a captured step may have; a longer eager one
        takes more memory while it runs. ``plan``: a plan for decode, by default that of
        ``backends``.

        Raises:
            InvalidInput: a size is out of range, or the plan does not fit.
            Unsupported, BackendUnavailable: no backend decodes here.
        """
        sizes = CacheSizes(batch, max_len, page_size, num_pages, max_rollback, max_step)
        return make_cache(self, sizes, self.out_dtype if dtype is None else dtype, device, plan)

    @property
    def out_dtype(self) -> torch.dtype:
        """The dtype that projections have now: the parameters', or autocast's."""
        weight = dtype_and_device_from(self.out)
        return (
            torch.get_autocast_dtype(weight.device.type)
            if autocasts(weight.device)
            else weight.dtype
        )

    def project(self, x: torch.Tensor, cu_seqlens: torch.Tensor | None = None) -> Projected:
        """x [B, S, dim], or packed [T, dim], to queries, keys, values and compressed pairs."""
        return self.project_with_raw(x, cu_seqlens)[0]

    def project_with_raw(
        self, x: torch.Tensor, cu_seqlens: torch.Tensor | None = None
    ) -> tuple[Projected, tuple[torch.Tensor, torch.Tensor]]:
        """:meth:`project`, and the keys [B, S, G, Dk] and values [B, S, G, Dv] that phi took."""
        config = self.config
        packed = (
            None if cu_seqlens is None else packed_blocks(cu_seqlens, x.shape[0], config.geometry)
        )
        product = self.qkv(x)
        table = self._rope_of_tokens(product, cu_seqlens) if config.rope else None
        separately = config.shared_kv or config.rope_before_compress or self._norms()
        if table is not None and eager() and not separately:
            q, k_raw, k_sel, k_win, v_raw, v_sel, v_win = rotated_heads(
                product, table, config.n_heads, config.n_kv_heads, config.qk_dim
            )
            ks, vs = [k_sel, k_win], [v_sel, v_win]
        else:
            q, k_raw, k, v_raw, v = self._split(product)
            # v is copied, so that keeping it for backward does not keep the whole projection.
            ks, vs = apart(k, table), apart(v, None)
            if table is not None:
                q, k_raw = (
                    rotate(q, table),
                    rotate(k_raw, table) if config.rope_before_compress else k_raw,
                )
        k_cmp, v_cmp = compress_pair(self.phi_k, self.phi_v, k_raw, v_raw, packed)
        if config.rope and not config.rope_before_compress:
            k_cmp = rotate(k_cmp, self._rope_of_blocks(k_cmp, packed, table))
        return Projected(q, (None, ks[0], ks[-1]), (None, vs[0], vs[-1]), k_cmp, v_cmp), (
            k_raw,
            v_raw,
        )

    def heads(self, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
        """q and the keys and values of the branches (cmp, sel, win; or one), as views of one
        product.
        """
        config, product = self.config, self.qkv(x)
        if (
            not (config.shared_kv or self._norms()) and config.qk_dim == config.v_dim
        ):  # two operators, not a dozen
            q, *rows = product.unflatten(-1, (-1, config.qk_dim)).split(
                [config.n_heads, *[config.n_kv_heads] * 6], -2
            )
            return q, rows[:3], rows[3:]
        q, k_raw, k, v_raw, v = self._split(product)
        return (
            (q, [k_raw], [v_raw])
            if config.shared_kv
            else (q, [k_raw, *k.unbind(-3)], [v_raw, *v.unbind(-3)])
        )

    def _norms(self) -> bool:
        """Whether q_norm and k_norm must be called."""
        return self.config.qk_norm or not all(
            is_plain(norm, nn.Identity) for norm in (self.q_norm, self.k_norm)
        )

    def _split(self, product: torch.Tensor) -> list[torch.Tensor]:
        """q [..., Hq, Dk]; k of cmp [..., G, Dk], then of sel and win, or of all three, [..., n, G,
        Dk]; v likewise.
        """
        config, (q_width, *widths) = self.config, self._widths
        groups, k_width, v_width = config.n_kv_heads, widths[0], widths[-1]
        joint = (
            [k_width, v_width] if config.shared_kv else [k_width, 2 * k_width, v_width, 2 * v_width]
        )
        q, *rest = product.split([q_width, *joint], dim=-1)
        q = self.q_norm(q.unflatten(-1, (config.n_heads, -1)))
        if config.shared_kv:
            k, v = (part.unflatten(-1, (groups, -1)) for part in rest)
            k = self.k_norm(k)
            return [q, k, k.unsqueeze(-3), v, v.unsqueeze(-3)]
        k_raw, v_raw = (part.unflatten(-1, (groups, -1)) for part in rest[::2])
        k, v = (part.unflatten(-1, (2, groups, -1)) for part in rest[1::2])
        return [q, self.k_norm(k_raw), self.k_norm(k), v_raw, v]

    def _rope_of_tokens(self, product: torch.Tensor, cu_seqlens: torch.Tensor | None) -> Table:
        rows, dim, base = product.shape[-2], self.config.qk_dim, self.config.rope_base
        if cu_seqlens is None:
            return table_for(product, rows, 1, dim, base)
        return as_used(
            rope_table(token_places(cu_seqlens, rows).position, dim, base, product.dtype)
        )

    def _rope_of_blocks(
        self, k_cmp: torch.Tensor, packed: PackedBlocks | None, every: Table | None
    ) -> Table:
        step, dim, base = self.config.compress_stride, self.config.qk_dim, self.config.rope_base
        if packed is None:
            return table_for(k_cmp, k_cmp.shape[-3], step, dim, base, every)
        return rope_table(packed.starts, dim, base, k_cmp.dtype)

    @property
    def plan(self) -> Plan:
        """What runs: the plan of the last eager call, or before any, that of the parameters' device
        and dtype.
        """
        weight = dtype_and_device_from(self.qkv)
        device, dtype, varlen, long = self._last or (weight.device, weight.dtype, False, False)
        return default_plan(
            self.config, device, dtype, varlen, self._wants_grad(), self.backends, long
        )

    def _wants_grad(self, *inputs: torch.Tensor) -> bool:
        return torch.is_grad_enabled() and any(
            x.requires_grad for x in chain(inputs, self.parameters())
        )

    def plan_of(
        self, x: torch.Tensor, q: torch.Tensor, varlen: bool, plan: Plan | None = None
    ) -> Plan:
        """Who runs a call on x that is not over a cache; ``plan`` where one is given."""
        if plan is None:
            grad, long = self._wants_grad(x), is_long(q.shape[1], varlen)
            plan = default_plan(self.config, q.device, q.dtype, varlen, grad, self.backends, long)
            if not torch.compiler.is_compiling():
                self._last = (q.device, q.dtype, varlen, long)
        else:
            must_be_plan(plan)
        return checked_plan(plan, self.layer) if self.check else plan

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

    def extra_repr(self) -> str:
        """Shown by repr."""
        told = [
            (f.name, getattr(self.config, f.name), f.default)
            for f in dataclasses.fields(self.config)
        ]
        return ", ".join(f"{name}={value!r}" for name, value, default in told if value != default)
