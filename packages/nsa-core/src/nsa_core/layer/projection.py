"""The projections of an NSA layer: queries, keys, values, compressed tokens and output."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from nsa_core.config import NSAConfig, check_config
from nsa_core.dtypes import FLOATING
from nsa_core.errors import InvalidInput
from nsa_core.layer.gating import compute_gates, has_sigmoid, make_gate, start_near_dense
from nsa_core.layer.input_checks import check_plan
from nsa_core.layer.phi.chunks import PackedBlocks, packed_blocks
from nsa_core.layer.phi.kinds import compress_pair, make_phi
from nsa_core.layer.plain_linear import are_plain, base_weight
from nsa_core.layer.rope import (
    RopeTable,
    rope_table,
    rotate,
    table_for,
)
from nsa_core.layer.split_product import joins_columns, rotated_heads, split_columns
from nsa_core.layer.unit_linear import unit_linear
from nsa_core.packing import token_positions
from nsa_core.plan.default_plan import (
    backends_of,
    check_is_plan,
    default_plan,
    frozen_backends,
    partial_plan,
    planned_length,
)
from nsa_core.plan.finite_checks import checked_plan
from nsa_core.torch_ops.core_kernels import CoreInputs
from nsa_core.torch_ops.core_node import run_core
from nsa_core.torch_ops.packing_checks import check_cu_seqlens, checked_boundaries, has_values
from nsa_core.torch_ops.torch_state import dtype_of_products, is_eager

if TYPE_CHECKING:
    from nsa_core.plan.plan import Plan


class HeadNorm(nn.Module):
    """RMS norm of a head: x / sqrt(mean(x^2) + eps) * weight, with fp32 statistics."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def reset_parameters(self) -> None:
        """Initialise the weight to 1."""
        nn.init.ones_(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise x [..., D]; shape and dtype are unchanged."""
        weight = self.weight  # read once: a parametrisation computes it
        return F.rms_norm(x, weight.shape, weight.to(x.dtype), self.eps)


class Projected(NamedTuple):
    """The inputs of :func:`nsa_core.nsa_attention`, except the gates.

    Packed tensors have no axis B.

    Attributes:
        q: [B, S, Hq, Dk], rotated.
        k: (None, k_sel, k_win), each [B, S, G, Dk], rotated.
        v: (None, v_sel, v_win), each [B, S, G, Dv].
        k_cmp: [B, n_c, G, Dk], rotated.
        v_cmp: [B, n_c, G, Dv].
    """

    q: torch.Tensor
    k: tuple[None, torch.Tensor, torch.Tensor]
    v: tuple[None, torch.Tensor, torch.Tensor]
    k_cmp: torch.Tensor
    v_cmp: torch.Tensor


class NSAProjections(nn.Module):
    """Parameters and projections of :class:`nsa_core.NSAttention`.

    The class has no forward. Prefill (NSAttention) and decode (nsa_core.cache) both build on it.

    Attributes:
        config: shapes and options of the layer; constant, because phi and caches have its sizes.
        backends: the requested backends, in hashable form.
        layer: name or index of the layer, for error messages.
        check: whether every branch output is checked for NaN and Inf.
        recompute: whether the backward runs the branches again.
        qkv: the linear layer from x to q and a key/value pair per branch (or one shared pair).
        q_norm, k_norm: HeadNorm, or nn.Identity without ``config.qk_norm``.
        phi_k, phi_v: the compression of keys and values.
        gate: the gates of the branches.
        out: the linear layer from all heads to the output.
    """

    # Modules that were pickled whole before this option existed have no attribute of their own.
    recompute: bool = False

    def __init__(
        self,
        config: NSAConfig,
        backends: str | Mapping[str, str] | None = None,
        *,
        layer: str | int | None = None,
        check: bool = False,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        check_config(config)
        self.config, self.layer, self.check = config, layer, check
        self.recompute = recompute
        self.backends = frozen_backends(backends)
        pairs = 1 if config.shared_kv else 3
        q_width, k_width = config.n_heads * config.qk_dim, config.n_kv_heads * config.qk_dim
        v_width = config.n_kv_heads * config.v_dim
        self._widths = [q_width, *[k_width] * pairs, *[v_width] * pairs]
        self.qkv = unit_linear(config.dim, sum(self._widths))
        self.q_norm = HeadNorm(config.qk_dim) if config.qk_norm else nn.Identity()
        self.k_norm = HeadNorm(config.qk_dim) if config.qk_norm else nn.Identity()
        self.phi_k = make_phi(config.compress, config.geometry, config.qk_dim)
        self.phi_v = make_phi(config.compress, config.geometry, config.v_dim)
        self.gate = make_gate(config.gate, config.dim, config.n_heads)
        self.out = unit_linear(config.n_heads * config.v_dim, config.dim)
        self._last: tuple[torch.device, torch.dtype, bool, int | None] | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute.

        Raises:
            InvalidInput: it is ``config``, and has another value already.
        """
        if name == "config" and vars(self).get(name, value) is not value:
            raise InvalidInput(
                "config of a layer cannot be replaced, because its parameters and caches have the"
                f" sizes of the first one; got {value!r}: create NSAttention(config), and load"
                " state_dict() of this layer into it"
            )
        super().__setattr__(name, value)

    def reset_parameters(self) -> None:
        """Initialise all parameters as those of a new layer, for example after ``to_empty``."""
        for module in self.modules():
            reset: Any = getattr(module, "reset_parameters", None)
            if module is not self and reset is not None:
                reset()

    def start_from_dense(self) -> None:
        """Initialise phi and the gates for projections that come from a trained dense layer.

        phi becomes the mean of the tokens of a block (:meth:`Phi.start_as_mean`), and the gates of
        cmp, sel and win become 0.1, 0.8 and 0.1. Nothing is drawn at random. If each branch has the
        keys and values of the dense layer, the output is near that of the dense layer, and nearest
        in sequences whose blocks are all selected. Call it instead of :meth:`reset_parameters`,
        which makes a layer for training from the start.
        """
        self.phi_k.start_as_mean()
        self.phi_v.start_as_mean()
        start_near_dense(self.gate)

    def extra_repr(self) -> str:
        """Return the fields of the config that differ from their defaults, for repr."""
        fields = [
            (f.name, getattr(self.config, f.name), f.default)
            for f in dataclasses.fields(self.config)
        ]
        return ", ".join(f"{name}={value!r}" for name, value, default in fields if value != default)

    @property
    def reference(self) -> torch.Tensor:
        """A tensor with the dtype and the device of the layer.

        It is the weight of ``qkv``, or the largest parameter of phi, norms and gate if that weight
        is quantised.
        """
        weight = base_weight(self.qkv)
        if weight is not None and weight.dtype in FLOATING:
            return weight
        modules = (self.q_norm, self.k_norm, self.phi_k, self.phi_v, self.gate)
        parameters = chain.from_iterable(module.parameters() for module in modules)
        return max((p for p in parameters if p.dtype in FLOATING), key=torch.Tensor.numel)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Apply qkv to x, in the dtype of x or of autocast.

        Autocast may leave the product of a quantised layer as it is.
        """
        product: torch.Tensor = self.qkv(x)
        dtype = dtype_of_products(x)
        return product if product.dtype == dtype else product.to(dtype)

    def project(self, x: torch.Tensor, cu_seqlens: torch.Tensor | None = None) -> Projected:
        """Project x [B, S, dim], or packed [T, dim], to the inputs of nsa_attention."""
        return self.project_with_raw(x, cu_seqlens)[0]

    def project_with_raw(
        self, x: torch.Tensor, cu_seqlens: torch.Tensor | None = None
    ) -> tuple[Projected, tuple[torch.Tensor, torch.Tensor]]:
        """Project x as :meth:`project` does, and return the inputs of phi too.

        Returns:
            The projected tensors, and the pair of keys [B, S, G, Dk] and values [B, S, G, Dv] that
            phi compresses.
        """
        config, packed = self.config, None
        if cu_seqlens is not None:
            packed = packed_blocks(cu_seqlens, x.shape[0], config.geometry)
        product = self.product(x)
        table = self._rope_of_tokens(product, cu_seqlens) if config.rope else None
        q, (k_raw, v_raw), ks, vs = self.rotated(product, table)
        k_cmp, v_cmp = self.compressed(k_raw, v_raw, packed, table)
        projected = Projected(q, (None, ks[0], ks[-1]), (None, vs[0], vs[-1]), k_cmp, v_cmp)
        return projected, (k_raw, v_raw)

    def compressed(
        self,
        k_raw: torch.Tensor,
        v_raw: torch.Tensor,
        packed: PackedBlocks | None,
        table: RopeTable | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the compressed keys, rotated, and the compressed values.

        Args:
            k_raw: keys that phi compresses.
            v_raw: values that phi compresses.
            packed: the compressed tokens of packed documents; None for one sequence.
            table: the angles of all tokens, if they exist.
        """
        k_cmp, v_cmp = compress_pair(self.phi_k, self.phi_v, k_raw, v_raw, packed)
        if self.config.rope and not self.config.rope_before_compress:
            k_cmp = rotate(k_cmp, self._rope_of_blocks(k_cmp, packed, table))
        return k_cmp, v_cmp

    def rotated(
        self, product: torch.Tensor, table: RopeTable | None
    ) -> tuple[
        torch.Tensor, tuple[torch.Tensor, torch.Tensor], list[torch.Tensor], list[torch.Tensor]
    ]:
        """Split the product of qkv [..., R, W] into heads, and rotate them.

        Args:
            product: output of ``qkv``.
            table: the angles of the R rows; None without rotary embedding.

        Returns:
            q; the pair of keys and values that phi compresses; and lists of the keys and of the
            values of (sel, win), or of the shared pair. Only keys are rotated; those of phi with
            ``config.rope_before_compress``.
        """
        config = self.config
        plain_pairs = not (config.shared_kv or config.rope_before_compress or self._norms())
        if table is not None and plain_pairs and is_eager():
            q, k_raw, k_sel, k_win, v_raw, v_sel, v_win = rotated_heads(
                product, table, config.n_heads, config.n_kv_heads, config.qk_dim
            )
            return q, (k_raw, v_raw), [k_sel, k_win], [v_sel, v_win]
        q, (k_raw, *ks), (v_raw, *vs) = self._split(product)
        ks, vs = ks or [k_raw], vs or [v_raw]
        if table is None:
            ks = [k.contiguous() for k in ks]
        else:
            q, *ks = (rotate(x, table) for x in (q, *ks))
            k_raw = rotate(k_raw, table) if config.rope_before_compress else k_raw
        # Copies, so that saving one for backward does not keep the whole product alive.
        return q, (k_raw, v_raw), ks, [v.contiguous() for v in vs]

    def heads(self, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
        """Project x to heads that are not rotated.

        Returns:
            q, and lists of the keys and of the values of (cmp, sel, win), or of the shared pair.
        """
        return self._split(self.product(x))

    def attend(
        self,
        x: torch.Tensor,
        projected: Projected,
        cu_seqlens: torch.Tensor | None = None,
        max_seqlen: int | None = None,
        plan: Plan | None = None,
    ) -> torch.Tensor:
        """Return the heads [B, S, Hq, Dv] (Eq. 5): :meth:`prepare`, then :meth:`attend_with`."""
        call = self.prepare(x, projected, cu_seqlens, max_seqlen, plan)
        return self.attend_with(*call, cu_seqlens, max_seqlen)

    def prepare(
        self,
        x: torch.Tensor,
        projected: Projected,
        cu_seqlens: torch.Tensor | None,
        max_seqlen: int | None,
        plan: Plan | None,
    ) -> tuple[Plan, CoreInputs]:
        """Compute the gates, and check what a checked input leaves to check.

        The projections made the tensors, so only the slots check their shapes and dtypes: a module
        that replaced one of the layer may return others. A sigmoid made the gates, so their sign
        is not checked.

        Args:
            x: input of the layer.
            projected: the projections of x.
            cu_seqlens: int32 [documents + 1], for packed documents; their values are checked here.
            max_seqlen: length of the longest document, or an upper bound.
            plan: an explicit plan, which is checked.

        Returns:
            The plan of the call, and the inputs of the core.

        Raises:
            InvalidInput: the plan, or the values of cu_seqlens, do not fit the call.
            Unsupported: no backend supports the request.
        """
        q, (_, k_sel, k_win), (_, v_sel, v_win), k_cmp, v_cmp = projected
        gates = compute_gates(self.gate, x)
        tensors = CoreInputs(q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates)
        packed = cu_seqlens is not None
        if has_values(cu_seqlens):
            check_cu_seqlens(cu_seqlens, q.shape[0], max_seqlen)
        if plan is not None:
            needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
            check_plan(plan, self.config, q, packed, needs_grad)
        return self.resolve_plan(x, q, packed, plan), tensors

    def attend_with(
        self,
        plan: Plan,
        tensors: CoreInputs,
        cu_seqlens: torch.Tensor | None,
        max_seqlen: int | None,
    ) -> torch.Tensor:
        """Run the core of a call whose documents and plan are checked.

        Args:
            plan: the plan of the call.
            tensors: the inputs of the core, made by this layer.
            cu_seqlens: int32 [documents + 1], for packed documents.
            max_seqlen: length of the longest document, or an upper bound.

        Returns:
            The heads [B, S, Hq, Dv], or packed [T, Hq, Dv].

        Raises:
            Unsupported: a parameter carries a tangent, which the operators of the slots see.
        """
        if cu_seqlens is not None:
            cu_seqlens = cu_seqlens.contiguous()  # one copy for all slots and their backwards
        options = (self.recompute, has_sigmoid(self.gate))
        with checked_boundaries(cu_seqlens, tensors.q.shape[0], max_seqlen):
            return run_core(plan, tensors, None, cu_seqlens, max_seqlen, *options).o

    def _norms(self) -> bool:
        """Whether q_norm and k_norm must be called."""
        modules = self._modules  # an attribute takes ten times as long, at every decode step
        norms = modules["q_norm"], modules["k_norm"]
        return self.config.qk_norm or not are_plain(nn.Identity, *norms)  # type: ignore[arg-type]

    def _split(
        self, product: torch.Tensor
    ) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
        """Split the product of qkv into heads [..., H, D], and apply the norms: see :meth:`heads`.

        Without norms they are views.
        """
        config, pairs = self.config, 1 if self.config.shared_kv else 3
        counts = [config.n_heads, *[config.n_kv_heads] * (2 * pairs)]
        joins = not config.shared_kv and joins_columns(product)
        if config.qk_dim == config.v_dim and not joins:  # two operators instead of eight
            heads = product.view(*product.shape[:-1], sum(counts), config.qk_dim)
            # Tensor.split does the same, in twice the time.
            q, *rows = torch.split_with_sizes(heads, counts, -2)
        else:
            widths = self._widths
            columns = split_columns(product, widths) if joins else product.split(widths, -1)
            q, *rows = (x.unflatten(-1, (n, -1)) for x, n in zip(columns, counts))
        ks, vs = rows[:pairs], rows[pairs:]
        if self._norms():
            q, ks = self.q_norm(q), [self.k_norm(k) for k in ks]
        return q, ks, vs

    def _rope_of_tokens(self, product: torch.Tensor, cu_seqlens: torch.Tensor | None) -> RopeTable:
        """Return the angles of every token's position in its sequence or document."""
        rows, dim, frequencies = product.shape[-2], self.config.qk_dim, self.config.frequencies
        if cu_seqlens is None:
            return table_for(product, rows, 1, dim, frequencies)
        positions = token_positions(cu_seqlens, rows).position
        return rope_table(positions, dim, frequencies, product.dtype)

    def _rope_of_blocks(
        self, k_cmp: torch.Tensor, packed: PackedBlocks | None, token_table: RopeTable | None
    ) -> RopeTable:
        """Return the angles of the first token of every compression block."""
        step, dim, frequencies = (
            self.config.compress_stride,
            self.config.qk_dim,
            self.config.frequencies,
        )
        if packed is None:
            return table_for(k_cmp, k_cmp.shape[-3], step, dim, frequencies, token_table)
        return rope_table(packed.starts, dim, frequencies, k_cmp.dtype)

    @property
    def plan(self) -> Plan:
        """The prefill plan of the last eager call.

        Before any call, it is the plan for the parameters' device and dtype.
        """
        weight = self.reference
        device, dtype, varlen, length = self._last or (weight.device, weight.dtype, False, None)
        return default_plan(
            self.config, device, dtype, varlen, self._needs_grad(), self.backends, length
        )

    def _needs_grad(self, *inputs: torch.Tensor) -> bool:
        return torch.is_grad_enabled() and any(
            x.requires_grad for x in chain(inputs, self.parameters())
        )

    def resolve_plan(
        self, x: torch.Tensor, q: torch.Tensor, varlen: bool, plan: Plan | None = None
    ) -> Plan:
        """Return the prefill plan for this call: ``plan``, or the cached plan of ``backends``.

        Args:
            x: input of the layer.
            q: queries of the call.
            varlen: whether the call is packed.
            plan: an explicit plan.
        """
        if plan is None:
            needs_grad, length = self._needs_grad(x), planned_length(q.shape[1], varlen)
            plan = default_plan(
                self.config, q.device, q.dtype, varlen, needs_grad, self.backends, length
            )
            if not torch.compiler.is_compiling():
                self._last = (q.device, q.dtype, varlen, length)
        else:
            check_is_plan(plan)
        return checked_plan(plan, self.layer) if self.check else plan

    def chunk_plan(self, plan: Plan, device: torch.device, dtype: torch.dtype) -> Plan | None:
        """Return the plan for long chunks over a cache, of the backends of ``plan``.

        None if they do not take queries that begin inside a sequence; then the decode forms serve.

        Args:
            plan: the plan of decode steps.
            device: device of the cache.
            dtype: dtype of the cache.
        """
        deterministic = plan.requests["cmp"].deterministic
        partial = partial_plan(self.config, device, dtype, backends_of(plan), deterministic)
        return checked_plan(partial, self.layer) if partial is not None and self.check else partial
