"""NSAttention: the Native Sparse Attention layer as a torch module (arXiv 2502.11089, Figure 2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import torch

from nsa_core.cache.cache import NSACache, make_cache
from nsa_core.cache.state import CacheSizes
from nsa_core.errors import Unsupported
from nsa_core.layer.input_checks import check_layer_input
from nsa_core.layer.other_keywords import check_other_keywords
from nsa_core.layer.plain_linear import base_weight, stated_dtype
from nsa_core.layer.projection import NSAProjections
from nsa_core.torch_ops.torch_state import dtype_of_products

if TYPE_CHECKING:
    from nsa_core.plan.plan import Plan


class ParallelForward:
    """The forward of a layer whose sequence or heads are divided over several ranks.

    Attributes:
        refusal: why one rank cannot do something alone, and what to do instead; follows "is not".
    """

    refusal: ClassVar[str]

    def forward(
        self,
        layer: NSAttention,
        x: torch.Tensor,
        cu_seqlens: torch.Tensor | None,
        max_seqlen: int | None,
        plan: Plan | None,
    ) -> torch.Tensor:
        """Apply the layer to the rows of this rank; arguments as NSAttention.forward."""
        raise NotImplementedError

    def refuse(self, action: str) -> NoReturn:
        """Raise Unsupported for something that one rank cannot do alone."""
        raise Unsupported(f"{action} is not {self.refusal}")


class NSAttention(NSAProjections):
    """Native Sparse Attention layer: projections, gates and three attention branches.

    For the input x [B, S, dim] the output of token t is

        y_t = W_o concat over heads of (sum over c of g_t^c Attn(q_t, K_t^c, V_t^c))      (Eq. 5)

    with c in {cmp, sel, win}; see :func:`nsa_core.nsa_attention` for the branches. One linear layer
    ``qkv`` projects x to q and to a key/value pair per branch (one shared pair with
    ``config.shared_kv``). ``phi_k`` and ``phi_v`` compress the pair of cmp (Eq. 7). ``gate``
    computes the gates g from x.

    The gradient of some parameters is zero by construction, because a term common to all compressed
    keys does not change a softmax. If k_cmp is not rotated after phi (``rope=False`` or
    ``rope_before_compress=True``), these are ``phi_k.down.bias`` (mlp), ``phi_k.proj.bias`` and
    ``phi_k.position`` (linear) and ``phi_k.bias`` (conv). With ``window_size=1`` the rows of
    ``qkv.weight`` that produce k_win have zero gradient too, because a single key always has the
    weight 1. All other parameters receive a gradient from the first step on, as soon as some token
    sees two compressed tokens.

    Plans are cached per process. They are not part of the state_dict, a pickle or a deepcopy.

    Args:
        config: shapes and options of the layer.
        backends: the backends of the slots, as in :func:`nsa_core.resolve`: None or "auto" for the
            highest-ranked backend that supports the request, one name for all slots, or a mapping
            of slots (cmp, select, sel, win, combine) to names.
        layer: name or index of the layer, for error messages.
        check: raise an NSAError at the first branch output that is not finite. This synchronises
            once per branch, and works in eager mode only.
        recompute: keep less for the backward, which runs the branches again: see
            :func:`nsa_core.nsa_attention`. The attribute of this name may be changed at any time.

    Raises:
        InvalidInput: ``config`` is not an NSAConfig, or ``backends`` is malformed or names an
            unknown slot or backend; the message suggests a similar name.

    Example:
        >>> import torch
        >>> from nsa_core import NSAConfig, NSAttention
        >>> attn = NSAttention(NSAConfig(dim=256, n_heads=8, n_kv_heads=2))
        >>> attn(torch.randn(1, 1024, 256)).shape
        torch.Size([1, 1024, 256])
    """

    # The forward over several ranks, set by a style of nsa_core.parallel.
    parallel: ParallelForward | None = None

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Call the module. A call with a cache that raises, in a hook too, leaves it unchanged."""
        cache = options.get("cache")
        if cache is None:
            return super().__call__(*args, **options)
        from nsa_core.cache.step import call_with_cache  # it imports the compiler

        return call_with_cache(self, cache, args, options)

    def forward(
        self,
        x: torch.Tensor,  # [B, S, dim], or packed [T, dim]
        cu_seqlens: torch.Tensor | None = None,  # int32 [documents + 1]
        max_seqlen: int | None = None,
        *,
        plan: Plan | None = None,
        cache: NSACache | None = None,
        new: Sequence[int] | torch.Tensor | None = None,  # int32 [B]
        **other: None,
    ) -> torch.Tensor:
        """Apply the layer to x.

        With ``cache`` the tokens of x continue the sequences in the cache, and the call appends
        them to the cache. Such calls run without gradient in every grad mode
        (docs/how-to/generate.md).

        Args:
            x: the input [B, S, dim], or packed documents [T, dim], on the layer's device. Its dtype
                is that of the parameters, any but float64 under autocast, or any with quantised
                projections.
            cu_seqlens: int32 [documents + 1] on x's device, the first row of each packed document
                and, last, the number of rows T. See :func:`nsa_core.unpad` for padded batches.
            max_seqlen: host integer, length in tokens of the longest packed document or an upper
                bound; default T. A value below the longest document gives wrong results; it is an
                error on the CPU, and on a GPU with NSA_CHECK=1.
            plan: a plan from :func:`nsa_core.resolve` for this call; default: the cached plan of
                ``backends``. Its phase is "prefill". With a cache, only the first call of several
                tokens on empty sequences is a prefill; all other calls take phase "decode".
            cache: the keys and values of earlier tokens, from :meth:`new_cache` of this layer.
            new: with a cache, the number of rows of each sequence that are tokens: B integers, or
                an integer tensor [B]; default: all rows. The rows after them are padding, and their
                output is 0. While a CUDA graph is captured, it must be int32 [B] on the device.
            **other: keywords of other attention layers, such as ``attention_mask``, which must be
                None or have no effect.

        Returns:
            The output y, of x's shape, in the dtype of x or of autocast.

        Raises:
            InvalidInput: x, cu_seqlens or plan do not fit the layer or the cache; a keyword of
                another attention layer asks for a padding mask, cross-attention or the like, and
                the message gives the alternative; or the cache has no room for the tokens.
            TypeError: a keyword is unknown.
            Unsupported: no backend supports the request; or a cache is passed to a layer that a
                style of :mod:`nsa_core.parallel` divided.
            BackendUnavailable: no backend is usable on this machine.
            NSAError: a backend failed while it ran; or, with ``check``, an output is not finite.

        After any error or interrupt, the cache is as it was before the call.
        """
        if other:
            check_other_keywords(other)
        if self.parallel is not None:  # it checks x among the ranks
            if cache is not None or new is not None:
                self.parallel.refuse("a call with a cache")
            return self.parallel.forward(self, x, cu_seqlens, max_seqlen, plan)
        self._check_input(x, cu_seqlens, max_seqlen)
        packed = cu_seqlens is not None
        if cache is not None or new is not None:
            from nsa_core.cache.step import step  # imported here, because it imports the compiler

            y: torch.Tensor = step(self, x, cache, new, plan, packed)
            return y
        o = self.attend(x, self.project(x, cu_seqlens), cu_seqlens, max_seqlen, plan)
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
        kv_dtype: torch.dtype | None = None,
        kv_scales: Sequence[torch.Tensor] | None = None,
        device: str | torch.device | None = None,
        plan: Plan | None = None,
    ) -> NSACache:
        """Allocate an empty cache for ``forward(x, cache=...)``.

        Args:
            batch: number of sequences, B.
            max_len: maximum number of tokens per sequence.
            page_size: tokens per page, a multiple of ``config.select_block_size``; default: no
                pages, each sequence is contiguous.
            num_pages: number of pages, shared by all sequences; default: enough for B sequences of
                ``max_len`` tokens. Only with ``page_size``.
            max_rollback: maximum number of tokens that :meth:`NSACache.crop` can remove.
            max_step: maximum number of rows of a step that a CUDA graph captures. A longer step
                runs eagerly only, and allocates more memory while it runs.
            dtype: dtype of the keys and values; default: that of autocast, or of the projections.
                Quantised projections compute in the dtype of x; the default is then the dtype of
                phi and gate.
            kv_dtype: torch.float8_e4m3fn or torch.int8: keys and values are quantized, and take
                about half the memory of 16 bits; see :mod:`nsa_core.decode.pages`. A prompt attends
                to its own keys and values as they were before. Default: ``dtype``.
            kv_scales: scales of cmp, sel and win, float32 [G, 2] of keys and of values each, from
                :meth:`NSACache.kv_scales` of a calibration run; default: 1, in float8_e4m3fn alone.
            device: device of the cache; default: the layer's device.
            plan: a plan of phase "decode"; default: resolved from ``backends``.

        Returns:
            The cache. All of its memory is allocated.

        Raises:
            InvalidInput: a size is out of range, the scales do not fit, or the plan does not fit
                the layer and the sizes.
            Unsupported: no backend has decode forms for this request.
            BackendUnavailable: no backend is usable on this machine.

        Example:
            >>> cache = attn.new_cache(batch=1, max_len=2048)
            >>> y = attn(torch.randn(1, 1000, 256), cache=cache)  # prompt
            >>> y = attn(torch.randn(1, 1, 256), cache=cache)  # next token
        """
        if self.parallel is not None:
            self.parallel.refuse("new_cache")
        sizes = CacheSizes(batch, max_len, page_size, num_pages, max_rollback, max_step)
        dtype = dtype_of_products(self.reference) if dtype is None else dtype
        return make_cache(self, sizes, dtype, device, plan, kv_dtype, kv_scales)

    def _check_input(
        self, x: torch.Tensor, cu_seqlens: torch.Tensor | None, max_seqlen: int | None = None
    ) -> None:
        """Check the arguments of a call, by metadata only."""
        weight = base_weight(self.qkv)
        dtype = stated_dtype(weight)
        device = self.reference.device if weight is None or dtype is None else weight.device
        check_layer_input(x, self.config.dim, device, dtype, cu_seqlens, max_seqlen)
