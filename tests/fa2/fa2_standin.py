"""A dense stand-in for FlashAttention-2 that runs on the CPU, as strict as the library about its
arguments.

Written from the library's documented semantics in float64 with explicit masks, one document at a
time. Whatever the library leaves unwritten is NaN here; whatever it would crash on raises.
"""

from __future__ import annotations

import inspect
import itertools
import types
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor

from nsa_backend_fa2 import providers

PROVIDERS = ("2.5.8", "2.6.3", "2.7.4", "2.8.3.post2", "aten")


def require(fact: bool, message: str) -> None:
    if not fact:
        raise RuntimeError(message)


def visible(rows: int, keys: int, causal: bool, left: int, right: int, longest: int) -> Tensor:
    """bool [rows, keys], aligned bottom-right; a bound of ``longest`` keys or more is none, as in
    the library.
    """
    left = -1 if left >= longest else left
    right = -1 if right >= longest else right
    right = 0 if causal else right
    key = torch.arange(keys)
    row = torch.arange(rows)[:, None] + keys - rows
    seen = torch.ones(rows, keys, dtype=torch.bool)
    if right >= 0:
        seen &= key <= row + right
    if left >= 0:
        seen &= key >= row - left
    return seen


def check(*tensors: Tensor) -> None:
    q, k, v = tensors[:3]
    require(k.shape[-3] > 0, "division by zero: no keys")
    require(
        q.shape[-1] % 8 == 0 and q.shape[-1] <= 256,
        "head width must be a multiple of 8, at most 256",
    )
    require(q.shape[-1] == k.shape[-1] == v.shape[-1], "q, k, v must share one head width")
    require(q.shape[-2] % k.shape[-2] == 0, "kv heads must divide query heads")
    for x in tensors:
        require(x.dtype == q.dtype, "one dtype")
        require(x.stride(-1) == 1, "last axis must be contiguous")
        whole = 16 // x.element_size()
        odd = [
            step for size, step in zip(x.shape[:-1], x.stride()[:-1]) if size > 1 and step % whole
        ]
        require(not odd and x.data_ptr() % 16 == 0, "misaligned address")


def one(q: Tensor, k: Tensor, v: Tensor, scale: float, seen: Tensor) -> tuple[Tensor, ...]:
    """o [Sq, H, D], lse [H, Sq], P [H, Sq, Sk] and the operands in float64, k and v per query
    head.
    """
    repeat = q.shape[1] // k.shape[1]
    q, k, v = (
        q.double(),
        k.double().repeat_interleave(repeat, 1),
        v.double().repeat_interleave(repeat, 1),
    )
    # Masked before scaling, as the library does: a negative scale would turn the mask around.
    scores = torch.einsum("qhd,khd->hqk", q, k).masked_fill(~seen, -torch.inf) * scale
    top = (
        scores.amax(-1, keepdim=True)
        if scores.shape[-1]
        else scores.new_zeros(*scores.shape[:-1], 1)
    )
    weight = (scores - top.masked_fill(top == -torch.inf, 0)).exp()
    total = weight.sum(-1, keepdim=True)
    lse = torch.where((total == 0) | total.isnan(), torch.inf, top + total.log()).squeeze(-1)
    p = weight / total.masked_fill(total == 0, 1)
    return torch.einsum("hqk,khd->qhd", p, v), lse, q, k, v


def one_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scale: float, seen: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    groups = k.shape[1]
    repeat = q.shape[1] // groups
    q, k, v = (
        q.double(),
        k.double().repeat_interleave(repeat, 1),
        v.double().repeat_interleave(repeat, 1),
    )
    do, o = do.double(), o.double()
    scores = torch.einsum("qhd,khd->hqk", q, k).masked_fill(~seen, -torch.inf) * scale
    p = (scores - lse.double()[..., None]).exp()
    dv = torch.einsum("hqk,qhd->khd", p, do)
    ds = p * (torch.einsum("qhd,khd->hqk", do, v) - (do * o).sum(-1).t()[..., None])
    dq = torch.einsum("hqk,khd->qhd", ds, k) * scale
    dk = torch.einsum("hqk,qhd->khd", ds, q) * scale
    return dq, dk.unflatten(1, (groups, repeat)).sum(2), dv.unflatten(1, (groups, repeat)).sum(2)


def spans(cu: Tensor, total: int) -> list[slice]:
    require(cu.dtype == torch.int32 and cu.is_contiguous(), "cu_seqlens must be contiguous int32")
    bounds = cu.tolist()
    require(
        bounds[0] >= 0 and bounds == sorted(bounds) and bounds[-1] <= total, "illegal memory access"
    )
    return [slice(a, b) for a, b in itertools.pairwise(bounds)]


class Library:
    """The mathematics of the four functions; ``calls`` records what came."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **how: Any) -> tuple[Tensor, Tensor]:
        self.calls.append({"direction": "forward", "q": tuple(q.shape), "k": tuple(k.shape), **how})
        check(q, k, v)
        o = torch.full(q.shape, torch.nan, dtype=q.dtype)
        stats = torch.float32
        if how["cu_q"] is None:
            lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), torch.nan, dtype=stats)
            seen = visible(
                q.shape[1], k.shape[1], how["causal"], how["left"], how["right"], k.shape[1]
            )
            for b in range(q.shape[0]):
                o[b], lse[b] = one(q[b], k[b], v[b], how["scale"], seen)[:2]
            return o, lse
        unbounded = how["left"] < 0 or how["left"] >= how["max_k"]
        # The library then puts the group in the place of the rows, and takes every document to have
        # one row.
        swapped = how["max_q"] == 1 and q.shape[1] > k.shape[1] and unbounded and how["right"] < 0
        require(not swapped or len(q) == len(how["cu_q"]) - 1, "shape is invalid for input")
        lse = torch.full((q.shape[1], q.shape[0]), torch.nan, dtype=stats)
        for rows, keys in zip(spans(how["cu_q"], len(q)), spans(how["cu_k"], len(k))):
            count, length = rows.stop - rows.start, keys.stop - keys.start
            require(count <= how["max_q"] and length <= how["max_k"], "longer than max_seqlen")
            seen = visible(count, length, how["causal"], how["left"], how["right"], how["max_k"])
            o[rows], lse[:, rows] = one(q[rows], k[keys], v[keys], how["scale"], seen)[:2]
        return o, lse

    def backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, **how: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        self.calls.append(
            {"direction": "backward", "q": tuple(q.shape), "k": tuple(k.shape), **how}
        )
        check(q, k, v, do, o)
        require(lse.is_contiguous(), "lse must be contiguous")
        grads = [torch.full(x.shape, torch.nan, dtype=x.dtype) for x in (q, k, v)]
        if how["cu_q"] is None:
            seen = visible(
                q.shape[1], k.shape[1], how["causal"], how["left"], how["right"], k.shape[1]
            )
            for b in range(q.shape[0]):
                for grad, new in zip(
                    grads, one_backward(do[b], q[b], k[b], v[b], o[b], lse[b], how["scale"], seen)
                ):
                    grad[b] = new
            return grads[0], grads[1], grads[2]
        for rows, keys in zip(spans(how["cu_q"], len(q)), spans(how["cu_k"], len(k))):
            seen = visible(
                rows.stop - rows.start,
                keys.stop - keys.start,
                how["causal"],
                how["left"],
                how["right"],
                how["max_k"],
            )
            new = one_backward(
                do[rows], q[rows], k[keys], v[keys], o[rows], lse[:, rows], how["scale"], seen
            )
            for grad, where, part in zip(grads, (rows, keys, keys), new):
                grad[where] = part
        return grads[0], grads[1], grads[2]


_WINDOWS = {
    "2.5": "window_size",
    "2.6": "window_size, softcap",
    "2.7": "window_size_left, window_size_right, softcap",
}
_VARLEN = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, "


def _signature(head: str, release: str, varlen: bool, backward: bool) -> inspect.Signature:
    """The parameters of the release's function, in order (2.5.8, 2.6.3, 2.7.0, 2.8.3 read for
    this).
    """
    text = (
        f"{head}, {_VARLEN if varlen else ''}dropout_p, softmax_scale, causal, {_WINDOWS[release]},"
        " alibi_slopes, "
    )
    text += "deterministic, rng_state=None" if backward else "return_softmax"
    if varlen and not backward:
        text += ", block_table" if release == "2.5" else ", block_table=None"
    return inspect.signature(eval(f"lambda {text}: None"))


def flash_attn_interface(release: str, library: Library) -> types.SimpleNamespace:
    """What `flash_attn.flash_attn_interface` of ``release`` ("2.5", "2.6", "2.7": also 2.8) has,
    over ``library``.
    """

    def unpack(given: dict[str, Any]) -> dict[str, Any]:
        require(
            given["dropout_p"] == 0
            and given.get("softcap", 0) == 0
            and given["alibi_slopes"] is None,
            "extras",
        )
        left, right = given.get("window_size") or (
            given["window_size_left"],
            given["window_size_right"],
        )
        how = {
            "scale": given["softmax_scale"],
            "causal": given["causal"],
            "left": left,
            "right": right,
        }
        names = {
            "cu_q": "cu_seqlens_q",
            "cu_k": "cu_seqlens_k",
            "max_q": "max_seqlen_q",
            "max_k": "max_seqlen_k",
        }
        return how | {ours: given.get(theirs) for ours, theirs in names.items()}

    def forward(varlen: bool) -> Any:
        signature = _signature("q, k, v", release, varlen, backward=False)

        def function(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
            given = signature.bind(*args, **kwargs).arguments
            require(given["return_softmax"] is False, "return_softmax needs dropout")
            how = unpack(given)
            o, lse = library.forward(given["q"], given["k"], given["v"], **how)
            if varlen and release == "2.5":
                lse = pad_lse(lse, how["cu_q"], how["max_q"])
            return (
                (o, lse, None, None)
                if release == "2.7"
                else (o, None, None, None, o, lse, None, None)
            )

        function.__signature__ = signature  # type: ignore[attr-defined]
        return function

    def backward(varlen: bool) -> Any:
        signature = _signature(
            "dout, q, k, v, out, softmax_lse, dq, dk, dv", release, varlen, backward=True
        )

        def function(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            how, lse = unpack(given), given["softmax_lse"]
            if varlen and release == "2.5":
                lse = unpad_lse(lse, how["cu_q"], len(given["q"]))
            names = ("dout", "q", "k", "v", "out")
            grads = library.backward(
                *(given[n] for n in names), lse, **how, deterministic=given["deterministic"]
            )
            for name, grad in zip(("dq", "dk", "dv"), grads):
                given[name].copy_(grad)

        function.__signature__ = signature  # type: ignore[attr-defined]
        return function

    return types.SimpleNamespace(
        flash_attn_with_kvcache=with_kvcache(release, library),
        _flash_attn_forward=forward(False),
        _flash_attn_varlen_forward=forward(True),
        _flash_attn_backward=backward(False),
        _flash_attn_varlen_backward=backward(True),
    )


def with_kvcache(release: str, library: Library) -> Any:
    """The function of that name: one query a sequence, over cache_batch_idx's sequence or
    block_table's pages.
    """
    text = (
        "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None,"
        " cache_seqlens=None, "
    )
    text += "cache_batch_idx=None, block_table=None, softmax_scale=None, causal=False, num_splits=0"
    signature = inspect.signature(
        eval(f"lambda {text}{'' if release == '2.5' else ', return_softmax_lse=False'}: 0")
    )

    def function(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        q, k, v, lengths = given["q"], given["k_cache"], given["v_cache"], given["cache_seqlens"]
        library.calls.append(
            {"direction": "cache", "q": tuple(q.shape), "k": tuple(k.shape), **kwargs}
        )
        check(q, k, v)
        table, index = given.get("block_table"), given.get("cache_batch_idx")
        require((table is None) != (index is None), "pages or sequences")
        require(
            table is None or k.shape[1] % 256 == 0,
            "Paged KV cache block size must be divisible by 256",
        )
        for x in (lengths, index if table is None else table):
            require(
                x.dtype == torch.int32 and x.is_contiguous() and len(x) == len(q),
                "int32, a row a sequence",
            )
        o, lse = torch.full_like(q, torch.nan), torch.full((len(q), q.shape[2], 1), torch.nan)
        for b, length in enumerate(lengths.tolist()):
            where = index[b : b + 1] if table is None else table[b]
            require(length <= len(where) * k.shape[1], "illegal memory access")
            pages = where[: -(-length // k.shape[1])].long()
            keys, values = (x[pages].flatten(0, 1)[:length] for x in (k, v))
            seen = torch.ones(1, length, dtype=torch.bool)
            o[b], lse[b] = one(q[b], keys, values, given["softmax_scale"], seen)[:2]
        return (o, lse) if given["return_softmax_lse"] else o

    function.__signature__ = signature  # type: ignore[attr-defined]
    return function


def pad_lse(lse: Tensor, cu: Tensor, longest: int) -> Tensor:
    padded = torch.full((len(cu) - 1, lse.shape[0], longest), torch.nan)
    for i, rows in enumerate(spans(cu, lse.shape[1])):
        padded[i, :, : rows.stop - rows.start] = lse[:, rows]
    return padded


def unpad_lse(lse: Tensor, cu: Tensor, total: int) -> Tensor:
    require(
        lse.dim() == 3 and lse.shape[0] == len(cu) - 1, "lse must be [documents, heads, longest]"
    )
    flat = torch.full((lse.shape[1], total), torch.nan)
    for i, rows in enumerate(spans(cu, total)):
        flat[:, rows] = lse[i, :, : rows.stop - rows.start]
    return flat


def aten_ops(library: Library) -> types.SimpleNamespace:
    """What torch.ops.aten has of FlashAttention-2, over ``library``; arguments bound by PyTorch's
    own schemas.
    """

    def names(op: Any) -> inspect.Signature:
        parameters = []
        for a in op._schema.arguments:
            kind = (
                inspect.Parameter.KEYWORD_ONLY
                if a.kwarg_only
                else inspect.Parameter.POSITIONAL_OR_KEYWORD
            )
            default = a.default_value if a.has_default_value() else inspect.Parameter.empty
            parameters.append(inspect.Parameter(a.name, kind, default=default))
        return inspect.Signature(parameters)

    def unpack(given: dict[str, Any]) -> dict[str, Any]:
        require(given["dropout_p"] == 0, "dropout")
        how = {
            "scale": given["scale"],
            "causal": given["is_causal"],
            "left": given["window_size_left"],
        }
        how |= {
            "right": given["window_size_right"],
            "cu_q": given["cum_seq_q"],
            "cu_k": given["cum_seq_k"],
        }
        return how | {"max_q": given["max_q"], "max_k": given["max_k"]}

    def forward(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        given = (
            names(torch.ops.aten._flash_attention_forward.default).bind(*args, **kwargs).arguments
        )
        require(given["return_debug_mask"] is False, "return_debug_mask")
        o, lse = library.forward(given["query"], given["key"], given["value"], **unpack(given))
        return o, lse, None, None, None

    def backward(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        given = (
            names(torch.ops.aten._flash_attention_backward.default).bind(*args, **kwargs).arguments
        )
        tensors = (given[n] for n in ("grad_out", "query", "key", "value", "out", "logsumexp"))
        return library.backward(*tensors, **unpack(given))

    return types.SimpleNamespace(
        _flash_attention_forward=forward, _flash_attention_backward=backward
    )


def make(name: str, library: Library) -> providers.Provider:
    """The provider ``name`` of PROVIDERS, a release of flash-attn or "aten", over ``library``."""
    if name == "aten":
        return providers.TorchFlash(aten_ops(library))
    version = Version(name)
    release = "2.7" if version >= Version("2.7") else f"2.{version.minor}"
    return providers.FlashAttnPackage(flash_attn_interface(release, library), version)
